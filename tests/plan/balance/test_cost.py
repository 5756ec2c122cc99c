"""Costs, loads, bounds and fitting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.balancing import lower_bound
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import Cost, balance, fit_cost, loads
from tests.plan.balance.plain import batch_cost, batches, optimum

PADDINGS = ("none", "full", "attention")
costs = st.builds(
    Cost,
    linear=st.sampled_from([0.0, 1.0, 0.5]),
    quadratic=st.sampled_from([0.0, 0.01, 1.0]),
    fixed=st.sampled_from([0.0, 3.0]),
    padding=st.sampled_from(PADDINGS),
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
    speeds=st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=3, max_size=3),
)
def test_no_assignment_undercuts_the_bound(
    lengths: list[int], bins: int, cost: Cost, speeds: list[float] | None
) -> None:
    fast = None if speeds is None else np.array(speeds[:bins])
    bound = lower_bound(np.array(lengths), bins, cost, fast)
    assert bound <= optimum(lengths, bins, cost, None if fast is None else list(fast)) * (1 + 1e-9)


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


def test_bound_with_full_padding_is_the_optimum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 40, 7)
        cost = Cost(1.0, 0.1, 2.0, "full")
        best = optimum(lengths.tolist(), 3, cost)
        assert best * (1 - 2e-5) <= lower_bound(lengths, 3, cost) <= best * (1 + 1e-9)


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
        ({"padding": "some"}, "padding='some'"),
    ],
)
def test_wrong_costs_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cost(**wrong)  # type: ignore[arg-type]


def test_every_part_of_the_cost_changes_the_assignment() -> None:
    lengths = np.random.default_rng(3).integers(1, 500, 60)
    kinds = [Cost(), Cost(1.0, 0.1), Cost(1.0, 0.0, 500.0), Cost(padding="full"), Cost(1.0, 0.1, padding="attention")]
    made = {tuple(balance(lengths, 4, cost).tolist()) for cost in kinds}
    assert len(made) == len(kinds)
