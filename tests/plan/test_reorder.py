"""Orders of microbatches: the search against all there are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan import reorder
from hetero_strategy.plan.reorder import best_order, register_reordering
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.simulator.reordering import Replay
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.simulate import simulate
from tests.schedule.cases import chain, work

Times = tuple[np.ndarray, np.ndarray]


def drawn(seed: int, ranks: int, count: int, spread: float = 0.7) -> Times:
    """Forward and backward times, float64 ``[ranks, count]``: a part common to all ranks, a part of each."""
    random = np.random.default_rng(seed)
    forward = random.lognormal(0, spread, (ranks, count)) + random.lognormal(0, spread, count)
    return forward, forward * random.uniform(1.5, 2.5, (ranks, 1))


def simulated(forward: np.ndarray, backward: np.ndarray, order: list[int]) -> Simulation:
    """1F1B of these microbatches in this order."""
    schedule = make_schedule("1f1b", chain(len(forward)), work(len(order)))

    def costs(action: Action) -> float:
        if action.microbatch < 0:
            return 0.0
        return float((forward if action.kind == "F" else backward)[action.node.stage, order[action.microbatch]])

    return simulate(schedule, costs)


def replayed(forward: np.ndarray, backward: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """An evaluator: 1F1B."""
    replay = Replay(make_schedule("1f1b", chain(len(forward)), work(forward.shape[1])))
    costs = {("F", StageId("llm", s)): row for s, row in enumerate(forward)}
    costs |= {("B", StageId("llm", s)): row for s, row in enumerate(backward)}
    table = replay.table(costs, forward.shape[1])  # type: ignore[arg-type]
    return lambda orders: replay.of_orders(table, orders)


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_of_few_microbatches_the_best_order_is_found(ranks: int, count: int, seed: int) -> None:
    forward, backward = drawn(seed, ranks, count)
    best = min(simulated(forward, backward, list(order)).time for order in list(permutations(range(count)))[::7])
    times = replayed(forward, backward)
    everything = times(np.array(list(permutations(range(count)))))
    order = best_order(times, forward, backward)
    assert simulated(forward, backward, order.tolist()).time == pytest.approx(everything.min(), rel=1e-12)
    assert everything.min() <= best * (1 + 1e-12)


def test_the_search_comes_near_the_best_of_all_orders() -> None:
    """Eight microbatches have 40320 orders; the search sees at most 2700 of them."""
    gaps, orders = [], np.array(list(permutations(range(8))))
    for seed in range(8):
        forward, backward = drawn(seed, 3, 8, spread=1.0)
        times = replayed(forward, backward)
        found = times(best_order(times, forward, backward)[None])[0]
        everything = times(orders)
        gaps.append(found / everything.min() - 1)
        assert found < np.median(everything)
    assert np.median(gaps) <= 0.002 and max(gaps) <= 0.02


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_never_worse_than_planned(count: int, seed: int) -> None:
    """Of any evaluator, even one that has nothing to do with pipelines."""
    random = np.random.default_rng(seed)
    where = random.random((count, count))
    times = lambda orders: where[np.arange(count), orders].sum(axis=1)  # noqa: E731
    order = best_order(times, *drawn(seed, 2, count))
    assert sorted(order.tolist()) == list(range(count))
    assert times(order[None])[0] <= times(np.arange(count)[None])[0]


def test_where_order_does_not_matter_it_stays() -> None:
    times_of_ranks = drawn(0, 2, 12)
    noise = lambda orders: 1.0 + 1e-13 * np.arange(len(orders))[::-1]  # noqa: E731 (rounding differs)
    for times in (lambda orders: np.ones(len(orders)), noise):
        assert best_order(times, *times_of_ranks).tolist() == list(range(12))
    assert [best_order(times, *drawn(0, 2, count)).tolist() for count in (0, 1)] == [[], [0]]


def test_the_same_on_every_rank() -> None:
    forward, backward = drawn(1, 4, 16)
    times = replayed(forward, backward)
    found = []
    for seed in (0, 1):
        np.random.seed(seed)  # a process' own numbers must not matter
        found.append(best_order(times, forward, backward).tolist())
    assert found[0] == found[1]


def test_work_is_bounded() -> None:
    forward, backward = drawn(2, 4, 16)
    times, sizes = replayed(forward, backward), []

    def counted(orders: np.ndarray) -> np.ndarray:
        sizes.append(len(orders))
        return times(orders)

    best_order(counted, forward, backward)
    assert len(sizes) == 1 + reorder.ROUNDS and sizes[1:] == [reorder.BATCH] * reorder.ROUNDS


def test_the_search_gains_and_an_evaluator_that_lies_does_not() -> None:
    """Negative control: sorted by the wrong sign, the search makes the step longer."""
    forward, backward = drawn(3, 4, 16, spread=1.0)
    times = replayed(forward, backward)
    planned = times(np.arange(16)[None])[0]
    honest = best_order(times, forward, backward)
    wrong = best_order(lambda orders: -times(orders), forward, backward)
    assert times(honest[None])[0] < 0.95 * planned
    assert times(wrong[None])[0] > planned


def test_a_name_of_a_reordering_is_taken_once() -> None:
    for name in ("search", "none"):
        with pytest.raises(ConfigError, match=f"reordering '{name}' is known already; choose another name"):
            register_reordering(name, best_order)
        assert reorder.SEARCHES[name] is None
