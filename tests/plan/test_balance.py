"""The interface of balancing: costs, policies and their papers, limits, bounds, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.balancing import TOLERANCE, disttrain, karmarkar_karp, lower_bound, tolerant
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import POLICIES, Cost, balance, fit_cost, loads
from hetero_strategy.plan.greedy import exchange
from tests.plan.plain import (
    algorithm_4,
    batch_cost,
    batches,
    differencing,
    optimum,
    time_of,
)


@pytest.mark.parametrize("policy", ["auto", "lpt", "round_robin"])
@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([], 1),
        ([], 7),
        ([4], 1),
        ([4, 4], 7),
        ([9, 1, 3, 2, 2], 1),
        ([5] * 20, 3),
        ([0] * 9, 4),
        ([0, 0, 6, 0, 1], 3),
        ([100_000, 1, 1, 70_000], 2),
    ],
)
@pytest.mark.parametrize("quadratic", [0.0, 0.5])
def test_all_inputs_work(policy: str, lengths: list[int], bins: int, quadratic: float) -> None:
    cost = Cost(1.0, quadratic)
    rows = np.array(lengths, dtype=np.int64)
    where = balance(rows, bins, cost, policy=policy)
    assert where.dtype == np.int64 and where.shape == rows.shape
    assert not len(rows) or (where.min() >= 0 and where.max() < bins)
    np.testing.assert_array_equal(where, balance(rows.copy(), bins, cost, policy=policy))


def test_loads_of_no_items_are_floats() -> None:
    nothing = np.zeros(0, np.int64)
    assert (
        loads(nothing, nothing, 2, Cost()).tolist() == [0.0, 0.0] and loads(nothing, nothing, 2, Cost()).dtype == float
    )


def test_a_cost_of_nothing_works() -> None:
    where = balance(np.array([3, 0, 5]), 2, Cost(0.0, 0.0, 0.0))
    assert where.shape == (3,)


def test_round_robin_is_as_sampled() -> None:
    assert balance(np.array([9, 1, 1, 1, 1]), 3, Cost(), policy="round_robin").tolist() == [0, 1, 2, 0, 1]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    bins=st.integers(1, 6),
    policy=st.sampled_from(["auto", "lpt", "round_robin"]),
    slack=st.integers(0, 40),
)
def test_limits_are_kept_or_refused(lengths: list[int], bins: int, policy: str, slack: int) -> None:
    rows = np.array(lengths)
    # Above this any greedy fits: the emptiest bin is at most the mean before its last item.
    enough = int(rows.sum()) // bins + int(rows.max())
    cost = Cost(1.0, 0.1, 1.0)
    where = balance(rows, bins, cost, policy=policy, limit=enough + slack)
    assert np.bincount(where, weights=rows, minlength=bins).max() <= enough + slack
    tight = max(int(rows.max()), -(-int(rows.sum()) // bins)) + slack // 4
    try:
        where = balance(rows, bins, cost, policy=policy, limit=tight)
    except ConfigError as error:
        assert f"limit={tight}" in str(error)
    else:
        assert np.bincount(where, weights=rows, minlength=bins).max() <= tight


def test_a_limit_that_does_not_bind_changes_nothing_and_one_that_binds_does() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 600).astype(np.int64) + 1, 4000)
    cost = Cost(1.0, 0.01)
    free = balance(lengths, 8, cost)
    held = np.bincount(free, weights=lengths)
    np.testing.assert_array_equal(balance(lengths, 8, cost, limit=int(held.max())), free)
    limit = int(held.mean() * 1.05)
    assert held.max() > limit
    bound = balance(lengths, 8, cost, limit=limit)
    assert np.bincount(bound, weights=lengths).max() <= limit
    # The cost gives way only as far as it must.
    longest = [
        loads(lengths, balance(lengths, 8, cost, limit=int(held.mean() * room)), 8, cost).max()
        for room in (1.0005, 1.02, 1.05, 1.1, 1.15)
    ]
    assert all(tighter > 1.05 * wider for tighter, wider in itertools.pairwise(longest[:-1]))
    assert longest[-1] < 1.001 * lower_bound(lengths, 8, cost)


def test_first_fit_packs_what_the_greedy_cannot() -> None:
    lengths = np.array([6, 4, 4, 3, 3])  # the greedy makes 6 3 | 4 4 3
    free = balance(lengths, 2, Cost(), policy="lpt")
    assert sorted(np.bincount(free, weights=lengths)) == [9, 11]
    where = balance(lengths, 2, Cost(), policy="lpt", limit=10)
    assert np.bincount(where, weights=lengths).tolist() == [10, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 7}, "item 0 has 8 rows and no bin may hold more than limit=7"),
        ({"limit": 8}, "25 rows do not fit into 3 bins of limit=8; give at least 4 bins"),
        ({"limit": 9}, "no assignment of 4 items with 25 rows in all to 3 bins was found with at most limit=9"),
    ],
)
def test_wrong_input_is_refused(arguments: dict[str, object], message: str) -> None:
    given_all: dict[str, object] = {"lengths": np.array([8, 6, 6, 5]), "bins": 3, "cost": Cost(), **arguments}
    with pytest.raises(ConfigError, match=message):
        balance(**given_all)  # type: ignore[arg-type]


costs = st.builds(
    Cost,
    linear=st.sampled_from([0.0, 1.0, 0.5]),
    quadratic=st.sampled_from([0.0, 0.01, 1.0]),
    fixed=st.sampled_from([0.0, 3.0]),
)


@given(
    lengths=st.lists(st.integers(0, 50), max_size=20),
    bins=st.integers(1, 5),
    cost=costs,
    seed=st.integers(0, 99),
)
def test_loads_are_the_sums_of_the_definition(lengths: list[int], bins: int, cost: Cost, seed: int) -> None:
    where = np.random.default_rng(seed).integers(0, bins, len(lengths))
    expected = [batch_cost(batch, cost) for batch in batches(lengths, where, bins)]
    np.testing.assert_allclose(loads(np.array(lengths, dtype=np.int64), where, bins, cost), expected, rtol=1e-12)
    alone = [batch_cost([length], cost) for length in lengths]
    np.testing.assert_allclose(cost.alone(np.array(lengths, dtype=np.int64)), alone, rtol=1e-12)


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    bins=st.integers(1, 3),
    cost=costs,
)
def test_no_assignment_undercuts_the_bound(lengths: list[int], bins: int, cost: Cost) -> None:
    assert lower_bound(np.array(lengths), bins, cost) <= optimum(lengths, bins, cost) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("lengths", "bins", "bound"),
    [
        ([10, 1, 1], 2, 10.0),  # one item above the mean
        ([5] * 7, 3, 15.0),  # equal items that do not divide: some bin has three
        ([9, 8, 7, 1], 3, 9.0),
        ([9, 8, 7, 7], 3, 14.0),  # of the four largest two share a bin
        ([], 4, 0.0),
    ],
)
def test_bound_sees_what_the_mean_does_not(lengths: list[int], bins: int, bound: float) -> None:
    assert lower_bound(np.array(lengths, dtype=np.int64), bins, Cost()) == bound


def test_a_known_cost_is_recovered_from_noisy_times() -> None:
    rng = np.random.default_rng(1)
    true = Cost(linear=2e-5, quadratic=3e-9, fixed=1e-3)
    measured = [rng.integers(1, 2 ** rng.integers(6, 14), rng.integers(1, 40)) for _ in range(400)]
    seconds = np.array([batch_cost(batch.tolist(), true) for batch in measured])
    exact = fit_cost(measured, seconds)
    noisy = fit_cost(measured, seconds * rng.normal(1, 0.03, len(seconds)))
    for name in ("linear", "quadratic", "fixed"):
        assert getattr(exact, name) == pytest.approx(getattr(true, name), rel=1e-6)
        assert getattr(noisy, name) == pytest.approx(getattr(true, name), rel=0.1)


def test_a_cost_is_fitted_to_the_squares_of_masks() -> None:
    rng = np.random.default_rng(3)
    true = Cost(linear=2e-5, quadratic=3e-9, fixed=1e-3)
    rows = [rng.integers(1, 5000, 20) for _ in range(100)]
    squares = [rng.uniform(0.1, 1.0, 20) * batch**2 for batch in rows]
    seconds = [float(n.sum() * 2e-5 + s.sum() * 3e-9 + 20e-3) for n, s in zip(rows, squares, strict=True)]
    assert fit_cost(rows, seconds, squares).quadratic == pytest.approx(true.quadratic, rel=1e-6)
    assert fit_cost(rows, seconds).quadratic < 0.9 * true.quadratic  # control


def test_fit_has_no_negative_part_and_wants_times() -> None:
    rng = np.random.default_rng(2)
    measured = [rng.integers(1, 100, 10) for _ in range(50)]
    falling = fit_cost(measured, [1 / batch.sum() for batch in measured])
    assert min(falling.linear, falling.quadratic, falling.fixed) >= 0
    with pytest.raises(ConfigError, match="50 batches but 49 times"):
        fit_cost(measured, [1.0] * 49)
    with pytest.raises(ConfigError, match="above 0"):
        fit_cost(measured, [0.0] * 50)
    with pytest.raises(ConfigError, match="0 batches with items"):
        fit_cost([np.zeros(0, dtype=np.int64)], [1.0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"linear": -1.0}, "linear=-1.0"),
        ({"quadratic": float("nan")}, "quadratic=nan"),
        ({"fixed": float("inf")}, "fixed=inf"),
    ],
)
def test_wrong_costs_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cost(**wrong)  # type: ignore[arg-type]


def test_every_part_of_the_cost_changes_the_assignment() -> None:
    lengths = np.random.default_rng(3).integers(1, 500, 60)
    kinds = [Cost(), Cost(1.0, 0.1), Cost(1.0, 0.0, 500.0)]
    made = {tuple(balance(lengths, 4, cost).tolist()) for cost in kinds}
    assert len(made) == len(kinds)


lists = st.lists(st.integers(1, 9) | st.integers(1, 2000), min_size=1, max_size=80)


def time(lengths: np.ndarray, where: np.ndarray, bins: int, cost: Cost) -> float:
    return float(loads(lengths, where, bins, cost).max())


def assigned(lengths: np.ndarray, bins: int, cost: Cost, policy: str) -> np.ndarray:
    """Bin of each item by a policy, or by an algorithm that a paper prints."""
    if policy in POLICIES:
        return balance(lengths, bins, cost, policy=policy)
    return disttrain(cost.alone(lengths), bins) if policy == "disttrain" else tolerant(lengths, bins)


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12))
def test_tolerance_is_algorithm_4(lengths: list[int], bins: int) -> None:
    where = tolerant(np.array(lengths), bins)
    assert where.tolist() == algorithm_4(lengths, bins, TOLERANCE * float(np.mean(lengths)))


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
    cost=st.sampled_from([Cost(), Cost(1.0, 0.2, 3.0)]),
)
def test_auto_is_within_a_third_of_the_optimum(lengths: list[int], bins: int, cost: Cost) -> None:
    where = balance(np.array(lengths), bins, cost)
    assert time_of(lengths, where.tolist(), bins, cost) <= 4 / 3 * optimum(lengths, bins, cost) + 1e-9


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12), quadratic=st.sampled_from([0.0, 0.001, 1.0]))
def test_auto_is_never_worse_than_the_papers_policies(lengths: list[int], bins: int, quadratic: float) -> None:
    rows = np.array(lengths)
    cost = Cost(1.0, quadratic, 2.0)
    reached = time(rows, balance(rows, bins, cost), bins, cost)
    assert reached >= lower_bound(rows, bins, cost) * (1 - 1e-9)
    for policy in ("lpt", "disttrain") if bins < 2 else ("lpt",):
        assert reached <= time(rows, assigned(rows, bins, cost, policy), bins, cost) * (1 + 1e-9), policy


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
    assert np.bincount(exchange(np.full(4, 5), np.array([0, 1, 1, 1]), 2, 0.0)).tolist() == [2, 2]
    assert np.bincount(exchange(np.full(4, 5), np.array([0, 0, 0, 1]), 2, 0.0)).tolist() == [2, 2]


@settings(deadline=None)
@given(
    lengths=lists,
    bins=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_exchanges_never_lengthen(lengths: list[int], bins: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = np.sort(np.array(lengths))[::-1]
    where = rng.integers(0, bins, len(weights))
    target = float(weights.sum()) / bins
    after = exchange(weights, where, bins, target)

    def longest(assigned: np.ndarray) -> float:
        return float((np.bincount(assigned, weights=weights, minlength=bins)).max())

    assert longest(after) <= longest(where) * (1 + 1e-12)
