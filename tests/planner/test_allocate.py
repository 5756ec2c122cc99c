"""The convex problem has the optimum that a fine grid finds, and its bound is never above it."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_strategy.planner import allocate as allocation
from hetero_strategy.planner.allocate import allocate
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.space import Degrees, partitions
from hetero_strategy.planner.times import MIXED
from tests.planner.models import batch, cluster, model

RANKS = 64
DP = (4, 8, 16)
COUNTS = {dp: [max(1, 64 // dp), max(1, 32 // dp)] for dp in DP}
TP = {"vision": [1, 2], "llm": [1, 2]}
UNITS = {"vision": 90, "llm": 64}


def estimates(**options: float) -> Estimates:
    return Estimates(model((4, 256), (16, 512)), cluster(RANKS, 8, **options), [batch(64)], MIXED)


def test_a_grid_finds_nothing_better() -> None:
    made, apart = estimates(), (("vision",), ("llm",))
    found = allocate(made, [apart], "llm", TP, DP, COUNTS, most_instances=UNITS, within=np.inf)
    # 4 degrees x 3 dp x 2 numbers of microbatches, pipelined and not; a pipeline of 2 x 2 x 16 ranks leaves none
    assert len(found) == 48 - 4
    for one in found:
        choice = one.choice
        llm, vision = choice.tp["llm"] * choice.dp, choice.tp["vision"]
        work = {m: made.work(m, choice.tp[m], m == "llm" and choice.recomputed).total for m in choice.tp}
        best, k = np.inf, choice.microbatches
        for n in np.linspace(vision, RANKS, 4000):
            m = RANKS - n if choice.pipelined else float(llm)
            if m < llm * (2 if choice.pipelined else 1) or n + m > RANKS or n > vision * UNITS["vision"]:
                continue
            if choice.pipelined:
                m = min(m, llm * 16.0)
                own = made.synchronized_ranks("llm", Degrees(choice.tp["llm"], 1, 1, choice.dp), k) / m
            else:
                own = made.synchronized("llm", Degrees(choice.tp["llm"], 1, 1, choice.dp), choice.microbatches)
            pace = max(vision * work["vision"] / n, choice.tp["llm"] * work["llm"] / m)
            first = work["llm"] / choice.dp + vision * work["vision"] / n
            best = min(best, first / k + pace * (k - 1) / k + own)
        assert one.seconds == pytest.approx(best, rel=2e-3)


def test_an_allocation_does_not_depend_on_those_before_it() -> None:
    """Bit by bit, although a program is compiled once."""
    rng, ends = np.random.default_rng(0), (np.full((5, 2), 0.05), np.ones((5, 2)))
    problems = [(rng.uniform(0.1, 3, (5, 2)), rng.uniform(0.1, 9, (5, 2))) for _ in range(4)]
    orders = []
    for order in (problems, problems[::-1]):
        allocation._program.cache_clear()
        orders.append([allocation._shares((((0, 1), 1.0),), *costs, *ends) for costs in order])
    np.testing.assert_array_equal(orders[0], orders[1][::-1])


@pytest.mark.parametrize("within", [1.0, 1.1])
def test_choices_that_are_not_solved_would_not_be_better(within: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made, all_partitions = estimates(), list(partitions(["vision", "llm"]))
    given = (made, all_partitions, "llm", TP, DP, COUNTS)
    everything = allocate(*given, most_instances=UNITS, within=np.inf)
    monkeypatch.setattr(allocation, "CHUNK", 2)
    some = allocate(*given, most_instances=UNITS, within=within)
    for partition in all_partitions:
        whole, part = ([a for a in found if a.choice.partition == partition] for found in (everything, some))
        assert part[0].seconds == pytest.approx(whole[0].seconds, rel=1e-6)
        expected = [a for a in whole if a.seconds <= within * whole[0].seconds * (1 - 1e-6)]
        assert len(expected) <= len(part) < len(whole)


def test_more_memory_than_there_is_is_not_allocated() -> None:
    apart = (("vision",), ("llm",))
    roomy, tight = (
        allocate(made, [apart], "llm", TP, DP, COUNTS, most_instances=UNITS, within=np.inf)
        for made in (estimates(), estimates(memory=6e7))
    )
    assert roomy
    assert len(tight) < len(roomy)
    for one in tight:
        vision, llm = one.ranks
        made = estimates(memory=6e7)
        assert vision >= made.least_ranks("vision") * (1 - 1e-6)
        if one.choice.pipelined:
            assert llm >= made.least_ranks("llm", one.choice.dp) * (1 - 1e-6)


def test_few_units_bound_the_ranks_of_their_module_alone_and_only_where_they_hold_it() -> None:
    given = list(partitions(["vision", "llm"])), "llm", TP, DP, COUNTS
    large = Estimates(model((4, 1024), (4, 64)), cluster(RANKS, 8, memory=3e8), [batch(64)], MIXED)
    for made in (estimates(), large):
        found = allocate(made, *given, most_instances={"vision": 1, "llm": 64})
        shared, (vision, _) = (next(one for one in found if len(one.ranks) == n).ranks for n in (1, 2))
        assert sum(shared) > 2
        assert made.least_ranks("vision") <= vision * (1 + 1e-6) <= max(2, made.least_ranks("vision")) * (1 + 1e-5)
    assert made.least_ranks("vision") > 2


def test_every_sum_of_ranks_keeps_to_what_there_is() -> None:
    found = allocate(estimates(), list(partitions(["vision", "llm"])), "llm", TP, DP, COUNTS, most_instances=UNITS)
    assert found
    for one in found:
        assert sum(one.ranks) <= RANKS * (1 + 1e-6)


@pytest.mark.parametrize("most", [1, 3])
def test_the_best_few_are_those_of_all(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "CHUNK", 2)
    partitioned = list(partitions(["vision", "llm"]))
    given = (estimates(), partitioned, "llm", TP, DP, COUNTS)
    everything, few = (allocate(*given, most_instances=UNITS, within=np.inf, most=n) for n in (None, most))
    for partition in partitioned:
        whole, part = ([a.seconds for a in found if a.choice.partition == partition] for found in (everything, few))
        assert part == pytest.approx(whole[:most], rel=1e-6)
