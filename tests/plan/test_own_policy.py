"""A balance policy of one's own: one registered function in one file, which then is an option of the data module."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import POLICIES, Cost, balance, register_policy
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata


def snake(lengths: np.ndarray, bins: int, cost: Cost) -> np.ndarray:
    """Down the bins and up again: 0 1 2 2 1 0 0 1 2 ..."""
    turn, place = np.divmod(np.arange(len(lengths)), bins)
    return np.where(turn % 2, bins - 1 - place, place)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_policy("snake", snake)
    yield
    del POLICIES["snake"]


def test_it_is_asked_for_by_name() -> None:
    lengths = np.array([1, 9, 5, 7, 3, 2])
    assert balance(lengths, 3, Cost(), policy="snake").tolist() == [0, 0, 2, 1, 2, 1]


def test_it_makes_the_plan() -> None:
    sample = np.arange(6)
    rows = np.array([1, 9, 5, 7, 3, 2])
    items = {"vision": StepItems(sample, rows, np.zeros(6, np.int64), rows)}
    metadata = StepMetadata(0, 0, sample, rows + 4, np.ones(6, np.int64), items)
    chosen = BalanceConfig.of({"policy": {"vision": "snake"}, "rearrange": "none"})
    instances = {"vision": 3, "llm": 1}
    resolved = chosen.resolve(instances, ModelContext({"vision": Cost(), "llm": Cost()}))
    assignment = plan_step(metadata, instances, ("llm",), balancing=resolved).assignments["vision"][0]
    found = [sorted(rows[assignment.of(i)].tolist()) for i in range(3)]
    assert found == [[1, 9], [2, 7], [3, 5]]


def test_a_process_in_which_it_is_not_registered_says_so() -> None:
    del POLICIES["snake"]
    with pytest.raises(ConfigError, match=r"no policy 'snake' was registered in this process.* __name__ == '__main__'"):
        balance(np.array([1, 9, 5]), 3, Cost(), policy="snake")
    register_policy("snake", snake)


def test_names_are_taken_once() -> None:
    with pytest.raises(ConfigError, match="'lpt' is known already"):
        register_policy("lpt", snake)


@pytest.mark.parametrize("given", [[0.0, 1.0, 0.5], [0, 1, 3], [0, -1, 1], [0, 1]], ids=str)
def test_what_is_no_bin_of_each_item_is_refused(given: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "snake", lambda *_: np.array(given))
    with pytest.raises(ConfigError, match=r"policy 'snake' gave .* for 3 units and 3 bins; .* integers from 0 to 2"):
        balance(np.array([4, 5, 6]), 3, Cost(), policy="snake")


def test_where_there_is_no_unit_any_empty_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "snake", lambda *_: [])
    assert balance(np.zeros(0, np.int64), 3, Cost(), policy="snake").tolist() == []
