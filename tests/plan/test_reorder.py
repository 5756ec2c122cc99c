"""Orders of microbatches: DistTrain's algorithm against a plain transcription, the search against all there are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.plan import reorder
from hetero_strategy.plan.reorder import Intervals, best_order, interval_order
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.simulator.replay import Replay
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


def interval(found: Simulation, number: int) -> float:
    """Between two backwards of the first rank (or its first forward and backward), until the next may start."""
    first, second = StageId("llm", 0), StageId("llm", 1)
    since = Action("B", first, number - 1) if number else Action("F", first, 0)
    return max(0.0, (found.end[Action("B", second, number)] - found.end[since]).item())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_intervals_are_those_of_the_simulator(ranks: int, count: int, seed: int) -> None:
    """Whatever follows what is placed: the recurrence says what the first ranks wait for."""
    forward, backward = drawn(seed, ranks, count)
    order = np.random.default_rng(seed).permutation(count).tolist()
    full = simulated(forward, backward, order)
    placed = Intervals(forward, backward)
    for size in range(1, count + 1):
        placed.append(order[size - 1])
        if size == 1:
            alone = simulated(forward, backward, order[:1])
            assert placed.interval() == pytest.approx(interval(alone, 0), rel=1e-12)
        elif size >= ranks:
            assert placed.interval() == pytest.approx(interval(full, size - ranks + 1), rel=1e-12, abs=1e-12)


def plainly(forward: np.ndarray, backward: np.ndarray) -> list[int]:
    """Algorithm 3 line by line; GETINTERVAL asks the simulator, everything else searches lists."""
    p, count = forward.shape
    size = {m: float((forward[:, m] + backward[:, m]).sum()) for m in range(count)}
    mb = list(range(count))
    ret_mb = [min(mb, key=size.__getitem__)]
    mb.remove(ret_mb[0])
    rear_mb = sorted(mb, key=size.__getitem__)[: p - 1]
    for m in rear_mb:
        mb.remove(m)
    for i in range(1, count - p + 1):
        if not mb:
            break
        if i == 1:
            cur_mb: list[int] = []
            left = interval(simulated(forward, backward, ret_mb), 0)
            wanted = min(p - 1, len(mb))
            while len(cur_mb) < wanted:
                share = left / (wanted - len(cur_mb))
                near = min((m for m in mb if m not in cur_mb), key=lambda m: abs(forward[0, m] - share))
                cur_mb.append(near)
                left -= forward[0, near]
        else:
            known = simulated(forward, backward, [*ret_mb, *mb, *rear_mb])  # any rest of the order
            volume = interval(known, len(ret_mb) - p + 1)
            cur_mb = [min(mb, key=lambda m: abs(forward[0, m] - volume))]
        ret_mb += cur_mb
        for m in cur_mb:
            mb.remove(m)
    return ret_mb + rear_mb


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 14), st.integers(0, 2**32 - 1))
def test_interval_order_is_algorithm_3(ranks: int, count: int, seed: int) -> None:
    forward, backward = drawn(seed, ranks, count)
    assert interval_order(forward, backward).tolist() == plainly(forward, backward)


def test_small_microbatches_are_first_and_last() -> None:
    forward = np.tile([5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 5.4, 6.0], (3, 1))
    order = interval_order(forward, 2 * forward)
    assert order[0] == 1 and order[-2:].tolist() == [3, 5]
    # The first interval is 2 x (1 + 2) = 6: two forwards, the one nearest to 3, then that to the 1 left.
    assert order[1:3].tolist() == [0, 6]


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_interval_order_is_a_permutation(ranks: int, count: int, seed: int) -> None:
    forward, backward = drawn(seed, ranks, count)
    forward[:, : count // 2] = 0.0  # skipped, and equal
    order = interval_order(forward, backward)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(count))


def replayed(forward: np.ndarray, backward: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """An evaluator: 1F1B."""
    replay = Replay(make_schedule("1f1b", chain(len(forward)), work(forward.shape[1])))
    costs = {("F", StageId("llm", s)): row for s, row in enumerate(forward)}
    costs |= {("B", StageId("llm", s)): row for s, row in enumerate(backward)}
    table = replay.table(costs, forward.shape[1])  # type: ignore[arg-type]
    return lambda orders: replay.of_orders(table, orders)


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
    assert times(honest[None])[0] <= times(interval_order(forward, backward)[None])[0]
    assert times(wrong[None])[0] > planned
