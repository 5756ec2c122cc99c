"""Rounds of items are, item for item, what a heap would do."""

from __future__ import annotations

import doctest
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.balancing import disttrain
from hetero_strategy.plan.balance import Cost, balance
from hetero_strategy.plan.greedy import deal, descending, whole
from tests.plan.plain import falling, heap_greedy, optimum, time_of


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12) | st.integers(1, 5000), min_size=1, max_size=200),
    bins=st.integers(1, 40),
)
def test_lpt_is_the_heaps_ties_included(lengths: list[int], bins: int) -> None:
    where = balance(np.array(lengths), bins, Cost(), policy="lpt")
    assert where.tolist() == heap_greedy(lengths, falling(lengths), bins)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12) | st.integers(1, 5000), min_size=1, max_size=200),
    bins=st.integers(1, 40),
)
def test_disttrain_is_the_heap_with_rising_sizes(lengths: list[int], bins: int) -> None:
    where = disttrain(np.array(lengths), bins)
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    assert where.tolist() == heap_greedy(lengths, order, bins)


@pytest.mark.parametrize("seed", range(4))
def test_large_batches_with_quadratic_costs_are_the_heaps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(5, 1.2, 20_000).astype(np.int64) + 1, 70_000)
    cost = Cost(1.0, 0.25, 8.0)  # whole and half numbers: sums are exact
    where = balance(lengths, 333, cost, policy="lpt")
    alone = [8 + x + 0.25 * x * x for x in lengths.tolist()]
    assert where.tolist() == heap_greedy(alone, falling(lengths.tolist()), 333)


def test_many_small_items_fill_few_bins_that_are_behind() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(9_000, 10_000, 50), rng.integers(1, 5, 30_000)])
    where = balance(lengths, 32, Cost(), policy="lpt")
    assert where.tolist() == heap_greedy(lengths.tolist(), falling(lengths.tolist()), 32)


def test_loads_before_the_first_item_count() -> None:
    rng = np.random.default_rng(1)
    start, weights = rng.integers(0, 300, 17), np.sort(rng.integers(1, 40, 400))[::-1]
    where, load = deal(weights, 17, start)
    assert where.tolist() == heap_greedy(weights.tolist(), range(400), 17, start.tolist())
    np.testing.assert_array_equal(load, start + np.bincount(where, weights=weights, minlength=17))
    assert where.tolist() != deal(weights, 17)[0].tolist()


def test_items_that_cost_nothing_are_spread() -> None:
    where = balance(np.zeros(12, dtype=np.int64), 4, Cost(), policy="lpt")
    assert np.bincount(where).tolist() == [3, 3, 3, 3]
    mixed = disttrain(np.array([0, 5, 0, 0, 7, 0]), 2)
    assert mixed[4] != mixed[1] and np.bincount(mixed[[0, 2, 3, 5]], minlength=2).tolist() == [2, 2]


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7), bins=st.integers(1, 3))
def test_lpt_is_within_a_third_of_the_optimum(lengths: list[int], bins: int) -> None:
    cost = Cost()
    reached = time_of(lengths, balance(np.array(lengths), bins, cost, policy="lpt").tolist(), bins, cost)
    assert reached <= (4 / 3 - 1 / (3 * bins)) * optimum(lengths, bins, cost) + 1e-9


@pytest.mark.parametrize("longest", [100, 65_535, 65_536, 10**9])
def test_order_is_by_length_then_number(longest: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 50, 500)
    lengths[7] = longest
    assert descending(lengths).tolist() == falling(lengths.tolist())


def test_whole_weights_stay_what_they_are() -> None:
    weights = np.array([3.0, 5.0, 0.25, 1e6])
    scaled = whole(weights, 2560)
    np.testing.assert_array_equal(scaled / scaled[0] * 3.0, weights)
    assert int(scaled.sum()) * 4096 < 2**62
    assert whole(np.zeros(3), 4).tolist() == [0, 0, 0]
    assert int(whole(np.full(5, 1e-200), 4)[0]) > 2**50 and int(whole(np.full(5, 1e200), 4)[0]) > 2**50


DOCTESTS = [
    "ragged",
    "plan.greedy",
    "plan.near_home",
    "papers.cornstarch",
    "planner.allocate",
    "planner.ranking",
    "planner.space",
    "planner.evaluate",
    "schedule.policies",
    "simulator.hardware",
]


@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_in_docstrings_are_right(name: str) -> None:
    module, runner = import_module(f"hetero_strategy.{name}"), doctest.DocTestRunner()
    # Functions seem to be of another module, as the check of shapes is around them.
    for example in doctest.DocTestFinder().find(module, module=False, globs=vars(module)):
        runner.run(example)
    assert runner.tries and not runner.failures
