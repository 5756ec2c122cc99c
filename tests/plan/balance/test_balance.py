"""The interface: every policy on every shape of input, limits, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.balancing import lower_bound
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import POLICIES, Cost, balance, loads

PADDINGS = ("none", "full", "attention")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padding", PADDINGS)
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
def test_all_inputs_work(policy: str, padding: str, lengths: list[int], bins: int, quadratic: float) -> None:
    cost = Cost(1.0, quadratic, 0.0, padding)  # type: ignore[arg-type]
    rows = np.array(lengths, dtype=np.int64)
    for fast in (None, np.linspace(1.0, 2.0, bins), np.full(bins, 2.0)):
        where = balance(rows, bins, cost, policy=policy, speeds=fast)
        assert where.dtype == np.int64 and where.shape == rows.shape
        assert not len(rows) or (where.min() >= 0 and where.max() < bins)
        again = balance(rows.copy(), bins, cost, policy=policy, speeds=fast)
        np.testing.assert_array_equal(where, again)


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_cost_of_nothing_works(padding: str) -> None:
    where = balance(np.array([3, 0, 5]), 2, Cost(0.0, 0.0, 0.0, padding))  # type: ignore[arg-type]
    assert where.shape == (3,)


def test_round_robin_is_as_sampled() -> None:
    assert balance(np.array([9, 1, 1, 1, 1]), 3, Cost(), policy="round_robin").tolist() == [0, 1, 2, 0, 1]


def test_equal_speeds_are_no_speeds() -> None:
    lengths = np.random.default_rng(0).integers(1, 99, 50)
    for policy in POLICIES:
        plain = balance(lengths, 4, Cost(), policy=policy)
        np.testing.assert_array_equal(balance(lengths, 4, Cost(), policy=policy, speeds=np.full(4, 0.3)), plain)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    bins=st.integers(1, 6),
    padding=st.sampled_from(PADDINGS),
    policy=st.sampled_from(["auto", "lpt", "round_robin"]),
    slack=st.integers(0, 40),
    unequal=st.booleans(),
)
def test_limits_are_kept_or_refused(
    lengths: list[int], bins: int, padding: str, policy: str, slack: int, unequal: bool
) -> None:
    rows = np.array(lengths)
    # Above this any greedy fits: the emptiest bin is at most the mean before its last item.
    enough = int(rows.sum()) // bins + int(rows.max())
    speeds = np.linspace(1.0, 3.0, bins) if unequal else None
    cost = Cost(1.0, 0.1, 1.0, padding)  # type: ignore[arg-type]
    where = balance(rows, bins, cost, policy=policy, speeds=speeds, limit=enough + slack)
    assert np.bincount(where, weights=rows, minlength=bins).max() <= enough + slack
    tight = max(int(rows.max()), -(-int(rows.sum()) // bins)) + slack // 4
    try:
        where = balance(rows, bins, cost, policy=policy, speeds=speeds, limit=tight)
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
    for padding in PADDINGS:
        where = balance(lengths, 2, Cost(padding=padding), policy="lpt", limit=10)  # type: ignore[arg-type]
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
