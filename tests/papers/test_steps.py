"""Steps balanced by papers' algorithms: losses and gradients are those of one process, fp64."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_strategy.papers import disttrain, orchmllm
from hetero_strategy.plan.near_home import REARRANGEMENTS
from hetero_strategy.plan.reorder import SEARCHES
from hetero_strategy.testing import Pool
from tests.distributed.exact import compare, expected
from tests.distributed.stepping import steps_on_rank
from tests.distributed.test_balancing import LAYOUTS, balanced, plans_on_rank

WAYS: list[dict[str, Any]] = [{"rearrange": "permute"}, {"rearrange": "ilp"}, {"reorder": "interval"}]


def test_imports_register_the_names() -> None:
    assert REARRANGEMENTS["permute"].__name__ == orchmllm.permute.__name__  # type: ignore[union-attr]
    assert REARRANGEMENTS["ilp"].__name__ == orchmllm.by_program.__name__  # type: ignore[union-attr]
    assert SEARCHES["interval"].__name__ == disttrain.by_intervals.__name__  # type: ignore[union-attr]


def plans_with_names_registered(rank: int, world: int, *args: Any) -> Any:
    """Make plans in a process that has imported this file."""
    return plans_on_rank(rank, world, *args)


def test_ranks_make_the_same_plans_in_another_order(pool: Pool, folders: dict[bool, str]) -> None:
    setting, ways = balanced(folders, "pipelined"), [{"reorder": name} for name in ("none", "interval")]
    first, *others = pool.run(setting.world, plans_with_names_registered, setting, 5, ways)
    assert all(plans == first for plans in others) and first[0] != first[1]


def steps_with_names_registered(rank: int, world: int, *args: Any) -> Any:
    """Run steps in a process that has imported this file."""
    return steps_on_rank(rank, world, *args)


OFTEN = ("pipelined", "unequal dp")


@pytest.mark.parametrize(
    "layout", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_gradients_are_those_of_the_samples_as_drawn(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    setting = balanced(folders, layout)
    wanted = expected(setting)
    compare(wanted, pool.run(setting.world, steps_with_names_registered, setting, wanted, (2,), 0, WAYS, timeout=240))
