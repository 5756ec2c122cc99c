"""Balance near home, and whole batches placed on nodes: plain loops, and what must be kept."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.near_home import (
    REARRANGEMENTS,
    TOLERANCE,
    balance_near_home,
    place_batches,
    register_rearrangement,
)


def array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def lpt(weights: np.ndarray, bins: int) -> np.ndarray:
    """The plain balance: the heaviest item first, each to the lowest bin."""
    heap = [(0.0, b) for b in range(bins)]
    where = np.zeros(len(weights), dtype=np.int64)
    for item in np.argsort(-weights, kind="stable"):
        load, b = heapq.heappop(heap)
        where[item] = b
        heapq.heappush(heap, (load + weights[item], b))
    return where


def item_bytes_between(
    size: np.ndarray, source: np.ndarray, slot: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray
) -> np.ndarray:
    """Bytes that each source sends to other nodes, from each item's size, source and slot."""
    away = source_node[source] != slot_node[slot]
    return np.bincount(source[away], weights=size[away], minlength=len(source_node))


def items(seed: int, instances: int, per: int = 20, node: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, source instance, node of each instance) of a heavy-tailed batch."""
    rng = np.random.default_rng(seed)
    source = np.repeat(np.arange(instances), per)
    keep = rng.random(len(source)) < 0.8
    weights = np.ceil(np.exp(rng.normal(5, 0.9, len(source)))).clip(8, 2000)
    return weights[keep], source[keep], np.arange(instances) // node


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_placed_batches_are_a_permutation_and_send_no_more(seed: int, slots: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    source_node, slot_node = rng.choice([0, 1, 2, 5, 7], 12), rng.choice([0, 1, 2, 5], slots)
    size, source, batch = rng.integers(0, 50, count), rng.integers(0, 12, count), rng.integers(0, slots, count)
    slot_of = place_batches(size, source, batch, source_node, slot_node)
    np.testing.assert_array_equal(np.sort(slot_of), np.arange(slots))
    before, after = (item_bytes_between(size, source, s, source_node, slot_node).sum() for s in (batch, slot_of[batch]))
    assert after <= before


def test_a_hidden_permutation_is_found_and_batches_of_nothing_take_what_is_left() -> None:
    node = np.arange(64) // 8
    shuffled = np.random.default_rng(3).permutation(64)
    size = np.arange(100, 164)
    slot_of = place_batches(size, np.arange(64), shuffled, node, node)
    assert item_bytes_between(size, np.arange(64), slot_of[shuffled], node, node).sum() == 0
    assert item_bytes_between(size, np.arange(64), shuffled, node, node).sum() > 0
    nothing = np.zeros(0, dtype=np.int64)
    for places in (array([0, 0, 1]), array([3, 3, 3])):
        np.testing.assert_array_equal(place_batches(nothing, nothing, nothing, array([0, 1]), places), [0, 1, 2])


def test_a_name_of_a_rearrangement_is_taken_once() -> None:
    assert {"home", "none"} <= set(REARRANGEMENTS)
    with pytest.raises(ConfigError, match="rearrangement 'home' is known already; choose another name"):
        register_rearrangement("home", place_batches)
    assert REARRANGEMENTS["home"] is None


@pytest.mark.full
@given(
    st.integers(0, 10_000),
    st.integers(0, 200),
    st.lists(st.sampled_from([0, 1, 4, 6]), min_size=1, max_size=24),
    st.floats(0.1, 2.5),
)
@settings(max_examples=200, deadline=None)
def test_near_home_keeps_the_load_of_plain_balance(seed: int, count: int, slots: list[int], width: float) -> None:
    rng = np.random.default_rng(seed)
    slot_node = array(slots)
    weights = np.exp(rng.normal(0, width, count)) * (rng.random(count) < 0.95)
    home = rng.choice([-1, 0, 1, 4, 6, 9], count)
    slot = balance_near_home(weights, home, slot_node)
    assert slot.shape == (count,) and slot.dtype == np.int64
    assert np.all((slot >= 0) & (slot < len(slots)))
    load = np.bincount(slot, weights, len(slots))
    plain = np.bincount(lpt(weights, len(slots)), weights, len(slots))
    assert load.max(initial=0.0) <= plain.max(initial=0.0) * (1 + TOLERANCE + 1e-9)
    np.testing.assert_array_equal(slot, balance_near_home(weights, home, slot_node))


@given(st.integers(0, 10_000), st.sampled_from([4, 8, 16]), st.integers(8, 40), st.sampled_from([2, 4]))
@settings(max_examples=60, deadline=None)
def test_near_home_sends_less_than_plain_balance_placed_well(seed: int, instances: int, per: int, node: int) -> None:
    weights, source, nodes = items(seed, instances, per, node)
    near = balance_near_home(weights, nodes[source], nodes)
    plain = lpt(weights, instances)
    placed = place_batches(weights, nodes[source], plain, np.arange(nodes[-1] + 1), nodes)[plain]
    near_bytes, placed_bytes = (item_bytes_between(weights, source, s, nodes, nodes) for s in (near, placed))
    assert near_bytes.sum() <= placed_bytes.sum() * (1 + 1e-12)


def test_near_home_sends_little_more_than_what_nodes_have_too_much_of() -> None:
    weights, source, nodes = items(0, 64, per=60, node=8)
    home = nodes[source]
    slot = balance_near_home(weights, home, nodes)
    crossing = item_bytes_between(weights, source, slot, nodes, nodes).sum()
    must = np.maximum(0, np.bincount(home, weights) - 8 * 1.002 * weights.sum() / 64).sum()
    assert must < crossing < 1.1 * must + weights.sum() / 1000
    plain = lpt(weights, 64)
    assert crossing < 0.1 * item_bytes_between(weights, source, plain, nodes, nodes).sum()
    # Control: homes that are not where items are save nothing.
    wrong = np.random.default_rng(0).permutation(home)
    shuffled = balance_near_home(weights, wrong, nodes)
    assert item_bytes_between(weights, source, shuffled, nodes, nodes).sum() > 5 * crossing


def test_near_home_with_disjoint_nodes_is_a_plain_balance() -> None:
    weights, source, nodes = items(4, 32, per=60)
    slot_node = np.repeat(array([50, 51, 60]), [4, 2, 1])
    load = np.bincount(balance_near_home(weights, nodes[source], slot_node), weights, 7)
    assert load.max() / load.mean() < 1.002


def test_near_home_moves_only_from_the_crowded_node() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 20, 3000).astype(np.float64)
    home = np.repeat([0, 1, 2], [1600, 700, 700])
    slot_node = array([0, 0, 1, 1, 2, 2])
    slot = balance_near_home(weights, home, slot_node)
    moved = slot_node[slot] != home
    assert moved.any() and set(home[moved]) == {0}
    load = np.bincount(slot, weights, 6)
    assert load.max() / load.mean() < 1.002
