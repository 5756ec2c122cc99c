"""Every policy against its paper, brute force, and the ones it may not be worse than."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.balancing import TOLERANCE, disttrain, karmarkar_karp, lower_bound, padded_ascending, tolerant
from hetero_strategy.plan.balance import POLICIES, Cost, balance, loads
from hetero_strategy.plan.balance.auto import conv_transformer
from hetero_strategy.plan.balance.greedy import exchange
from tests.plan.balance.plain import (
    algorithm_2,
    algorithm_4,
    algorithm_5,
    batches,
    differencing,
    optimum,
    time_of,
)

lists = st.lists(st.integers(1, 9) | st.integers(1, 2000), min_size=1, max_size=80)


def time(lengths: np.ndarray, where: np.ndarray, bins: int, cost: Cost) -> float:
    return float(loads(lengths, where, bins, cost).max())


def assigned(lengths: np.ndarray, bins: int, cost: Cost, policy: str) -> np.ndarray:
    """Bin of each item by a policy, or by an algorithm that a paper prints."""
    if policy in POLICIES:
        return balance(lengths, bins, cost, policy=policy)
    if policy == "disttrain":
        return disttrain(cost.alone(lengths), bins)
    return {"padded": padded_ascending, "tolerance": tolerant, "conv": conv_transformer}[policy](lengths, bins)


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12))
def test_padded_is_algorithm_2(lengths: list[int], bins: int) -> None:
    where = padded_ascending(np.array(lengths), bins)
    made = [sorted(batch) for batch in batches(lengths, where.tolist(), bins) if batch]
    assert made == algorithm_2(lengths, bins)


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12))
def test_tolerance_is_algorithm_4(lengths: list[int], bins: int) -> None:
    where = tolerant(np.array(lengths), bins)
    assert where.tolist() == algorithm_4(lengths, bins, TOLERANCE * float(np.mean(lengths)))


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12))
def test_conv_is_algorithm_5(lengths: list[int], bins: int) -> None:
    where = conv_transformer(np.array(lengths), bins)
    assert where.tolist() == algorithm_5(lengths, bins)


def test_karmarkar_karp_is_exactly_the_plain_method_without_ties() -> None:
    rng = np.random.default_rng(0)
    for bins in (2, 3, 5):
        for count in (1, 4, 12, 60):
            lengths = rng.integers(10**8, 10**9, count)
            where = karmarkar_karp(lengths, bins)
            assert sorted(loads(lengths, where, bins, Cost()).tolist()) == differencing(lengths.tolist(), bins)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    bins=st.integers(1, 3),
    cost=st.sampled_from([Cost(padding="full"), Cost(1.0, 0.2, 3.0, "full")]),
)
def test_full_padding_is_optimal(lengths: list[int], bins: int, cost: Cost) -> None:
    where = balance(np.array(lengths), bins, cost)
    assert time_of(lengths, where.tolist(), bins, cost) <= optimum(lengths, bins, cost) * (1 + 2e-5)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    bins=st.integers(1, 3),
    cost=st.sampled_from([Cost(), Cost(1.0, 0.2, 3.0), Cost(1.0, 0.2, 3.0, "attention")]),
)
def test_auto_is_within_a_third_of_the_optimum(lengths: list[int], bins: int, cost: Cost) -> None:
    factor = 1.5 if cost.padding == "attention" else 4 / 3
    where = balance(np.array(lengths), bins, cost)
    assert time_of(lengths, where.tolist(), bins, cost) <= factor * optimum(lengths, bins, cost) + 1e-9


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12), quadratic=st.sampled_from([0.0, 0.001, 1.0]))
def test_auto_is_never_worse_than_the_papers_policies(lengths: list[int], bins: int, quadratic: float) -> None:
    rows = np.array(lengths)
    for padding, others in (
        ("none", ("lpt", "disttrain")),
        ("full", ("padded", "lpt", "conv")),
        ("attention", ("conv", "lpt")),
    ):
        cost = Cost(1.0, quadratic, 2.0, padding)  # type: ignore[arg-type]
        reached = time(rows, balance(rows, bins, cost), bins, cost)
        slack = 1e-9 if padding != "full" else 2e-5
        assert reached >= lower_bound(rows, bins, cost) * (1 - 1e-9)
        for policy in others if padding != "none" or bins < 2 else others[:1]:
            other = time(rows, assigned(rows, bins, cost, policy), bins, cost)
            assert reached <= other * (1 + slack), (padding, policy)


def test_exact_weights_beat_the_tolerance_where_squares_count() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 64 * 30).astype(np.int64) + 1, 16384)
    cost = Cost(1.0, 1e-3)
    reached = {p: time(lengths, assigned(lengths, 64, cost, p), 64, cost) for p in ("auto", "tolerance")}
    bound = lower_bound(lengths, 64, cost)
    assert reached["auto"] <= 1.001 * bound < 1.02 * bound < reached["tolerance"]


@pytest.mark.parametrize("bins", [8, 64, 512])
@pytest.mark.parametrize("quadratic", [0.0, 1e-5])
def test_auto_is_within_a_thousandth_of_the_bound(bins: int, quadratic: float) -> None:
    lengths = np.minimum(np.random.default_rng(bins).lognormal(6, 1, 60 * bins).astype(np.int64) + 1, 16384)
    cost = Cost(1.0, quadratic, 3.0)
    assert time(lengths, balance(lengths, bins, cost), bins, cost) <= 1.001 * lower_bound(lengths, bins, cost)


def test_exchanges_mend_what_the_greedy_leaves() -> None:
    lengths = np.random.default_rng(0).integers(400, 1000, 4 * 40)
    cost = Cost()
    greedy, best = (time(lengths, balance(lengths, 40, cost, policy=p), 40, cost) for p in ("lpt", "auto"))
    bound = lower_bound(lengths, 40, cost)
    assert bound <= best < greedy
    assert best - bound < 0.5 * (greedy - bound)


def test_exchanges_move_single_items() -> None:
    assert np.bincount(exchange(np.full(4, 5), np.array([0, 1, 1, 1]), np.ones(2), 0.0)).tolist() == [2, 2]
    assert np.bincount(exchange(np.full(4, 5), np.array([0, 0, 0, 1]), np.ones(2), 0.0)).tolist() == [2, 2]


def test_padded_attention_takes_algorithm_5_or_the_greedy_where_better() -> None:
    cost = Cost(1.0, 0.1, 2.0, "attention")
    for lengths, better, worse in (([29, 27, 24, 22, 22, 21, 6], "conv", "lpt"), ([9, 9, 9, 1, 1, 1], "lpt", "conv")):
        rows = np.array(lengths)
        reached = {policy: time(rows, assigned(rows, 3, cost, policy), 3, cost) for policy in ("conv", "lpt")}
        assert time(rows, balance(rows, 3, cost), 3, cost) <= reached[better] < reached[worse]


@settings(deadline=None)
@given(
    lengths=lists,
    bins=st.integers(1, 12),
    seed=st.integers(0, 99),
    unequal=st.booleans(),
)
def test_exchanges_never_lengthen(lengths: list[int], bins: int, seed: int, unequal: bool) -> None:
    rng = np.random.default_rng(seed)
    weights = np.sort(np.array(lengths))[::-1]
    speeds = rng.choice([0.5, 1.0, 3.0], bins) if unequal else np.ones(bins)
    where = rng.integers(0, bins, len(weights))
    target = float(weights.sum() / speeds.sum())
    after = exchange(weights, where, speeds, target)

    def longest(assigned: np.ndarray) -> float:
        return float((np.bincount(assigned, weights=weights, minlength=bins) / speeds).max())

    assert longest(after) <= longest(where) * (1 + 1e-12)


def test_unequal_speeds_are_met() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6, 1, 64 * 60).astype(np.int64) + 1, 16384)
    speeds = rng.choice([1.0, 1.7, 2.5], 64)
    for cost, factor in ((Cost(1.0, 1e-5, 3.0), 1.001), (Cost(1.0, 1e-5, 3.0, "full"), 1.08)):
        where = balance(lengths, 64, cost, speeds=speeds)
        times = loads(lengths, where, 64, cost) / speeds
        assert times.max() <= factor * lower_bound(lengths, 64, cost, speeds), cost
        unaware = loads(lengths, balance(lengths, 64, cost), 64, cost) / speeds
        assert unaware.max() > 1.3 * times.max()
