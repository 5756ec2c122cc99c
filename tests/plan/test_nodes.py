"""Batches placed on nodes, and balance near home: brute force, plain loops, and what must be kept."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.nodes.near_home import TOLERANCE, balance_near_home
from hetero_strategy.plan.nodes.placement_ilp import place_by_program, solve_placement
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import volumes
from hetero_strategy.plan.nodes.swap_batches import _CANDIDATES, _largest


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


def bytes_between(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The same from a matrix."""
    source, batch = np.nonzero(volume)
    return item_bytes_between(volume[source, batch], source, slots[batch], source_node, slot_node)


Classes = np.ndarray | None


def fast(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, classes: Classes = None) -> np.ndarray:
    """Slots by ``place_items``, from a matrix."""
    source, batch = np.nonzero(volume)
    return place_items(volume[source, batch], source, batch, source_node, slot_node, classes=classes)


def ilp(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, classes: Classes = None) -> np.ndarray:
    """Slots by the integer program."""
    return place_by_program(volume, source_node, slot_node, classes)


def sent(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, slots: np.ndarray) -> list[float]:
    """Bytes to other nodes, by a plain loop."""
    out = [0.0] * len(source_node)
    for s, b in itertools.product(range(len(source_node)), range(len(slots))):
        if source_node[s] != slot_node[slots[b]]:
            out[s] += volume[s, b]
    return out


def best(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, classes: np.ndarray | None) -> float:
    """Smallest maximum over all permutations, by trying them."""
    kinds = np.zeros(len(slot_node)) if classes is None else classes
    found = np.inf
    for slots in itertools.permutations(range(len(slot_node))):
        if all(kinds[b] == kinds[s] for b, s in enumerate(slots)):
            found = min(found, max(sent(volume, source_node, slot_node, np.asarray(slots)), default=0.0))
    return found


@st.composite
def cases(draw: st.DrawFn, most: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """(volume, source nodes, slot nodes, classes): unequal numbers, nodes with holes, disjoint or shared."""
    batches, sources = draw(st.integers(1, most)), draw(st.integers(1, most))
    shared = [0, 1, 2, 5]
    others = draw(st.sampled_from([shared, [7, 8, 9], [1, 2, 9]]))
    source_node = array(draw(st.lists(st.sampled_from(others), min_size=sources, max_size=sources)))
    slot_node = array(draw(st.lists(st.sampled_from(shared), min_size=batches, max_size=batches)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    volume = rng.integers(0, 50, (sources, batches)) * (rng.random((sources, batches)) < 0.5).astype(np.float64)
    classes = rng.integers(0, 3, batches) if draw(st.booleans()) else None
    return volume, source_node, slot_node, classes


def items(seed: int, instances: int, per: int = 20, node: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, source instance, node of each instance) of a heavy-tailed batch."""
    rng = np.random.default_rng(seed)
    source = np.repeat(np.arange(instances), per)
    keep = rng.random(len(source)) < 0.8
    weights = np.ceil(np.exp(rng.normal(5, 0.9, len(source)))).clip(8, 2000)
    return weights[keep], source[keep], np.arange(instances) // node


def test_volumes_and_bytes_between_by_hand() -> None:
    size, source, batch = array([10, 20, 30, 40]), array([0, 0, 1, 2]), array([1, 1, 0, 2])
    volume = volumes(size, source, batch, 3, 3)
    np.testing.assert_array_equal(volume, [[0, 30, 0], [30, 0, 0], [0, 0, 40]])
    node = array([0, 0, 1])
    np.testing.assert_array_equal(bytes_between(volume, node, node, array([0, 1, 2])), [0, 0, 0])
    np.testing.assert_array_equal(bytes_between(volume, node, node, array([0, 2, 1])), [30, 0, 40])


@given(cases())
@settings(max_examples=150, deadline=None)
def test_fast_is_a_permutation_inside_classes_and_never_worse_than_none(case: tuple[np.ndarray, ...]) -> None:
    volume, source_node, slot_node, classes = case
    slots = fast(volume, source_node, slot_node, classes)
    np.testing.assert_array_equal(np.sort(slots), np.arange(len(slot_node)))
    if classes is not None:
        np.testing.assert_array_equal(classes[slots], classes)
    before = bytes_between(volume, source_node, slot_node, np.arange(len(slot_node)))
    after = bytes_between(volume, source_node, slot_node, slots)
    assert after.max() <= before.max() * (1 + 1e-12)
    assert after.sum() <= before.sum() * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_ilp_equals_all_permutations_tried(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches, sources = int(rng.integers(2, 7)), int(rng.integers(1, 7))
    volume = rng.integers(0, 30, (sources, batches)).astype(np.float64)
    source_node, slot_node = rng.integers(0, 3, sources), rng.integers(0, 3, batches) * 2
    classes = rng.integers(0, 2, batches) if seed % 2 else None
    optimum = best(volume, source_node, slot_node, classes)
    slots = ilp(volume, source_node, slot_node, classes)
    assert sorted(slots) == list(range(batches))
    assert max(sent(volume, source_node, slot_node, slots)) == pytest.approx(optimum, rel=2e-4, abs=1e-9)
    if classes is not None:
        np.testing.assert_array_equal(classes[slots], classes)
    quick = max(sent(volume, source_node, slot_node, fast(volume, source_node, slot_node, classes)))
    assert optimum <= quick * (1 + 1e-12)
    relaxed = solve_placement(volume, source_node, slot_node, classes=classes, relax=True)
    assert relaxed.bound <= optimum * (1 + 1e-6) + 1e-9


def test_fast_is_near_the_optimum_and_far_from_no_placement() -> None:
    ratios, gains = [], []
    for seed in range(6):
        weights, source, node = items(seed, 16)
        batch = lpt(weights, 16)
        volume = volumes(weights, source, batch, 16, 16)
        quick = bytes_between(volume, node, node, fast(volume, node, node)).max()
        exact = bytes_between(volume, node, node, ilp(volume, node, node)).max()
        ratios.append(quick / exact)
        gains.append(quick / bytes_between(volume, node, node, np.arange(16)).max())
    assert max(ratios) < 1.1
    assert np.mean(gains) < 0.85


def test_a_hidden_permutation_is_found() -> None:
    instances, per_node = 64, 8
    node = np.arange(instances) // per_node
    shuffled = np.random.default_rng(3).permutation(instances)
    volume = np.zeros((instances, instances))
    volume[np.arange(instances), shuffled] = 100.0 + np.arange(instances)
    assert bytes_between(volume, node, node, np.arange(instances)).max() > 0
    for method in (fast, ilp):
        slots = method(volume, node, node)
        assert bytes_between(volume, node, node, slots).sum() == 0


def test_items_and_their_matrix_give_the_same_placement() -> None:
    weights, source, node = items(5, 24)
    batch = lpt(weights, 24)
    volume = volumes(weights, source, batch, 24, 24)
    from_items = bytes_between(volume, node, node, place_items(weights, source, batch, node, node)).max()
    assert from_items == bytes_between(volume, node, node, fast(volume, node, node)).max()


@pytest.mark.parametrize("batches", [3, 40, 1000])
def test_of_batches_of_equal_size_the_first_are_candidates(batches: int) -> None:
    """Not those that a partition leaves in front, which depends on the processor's vectors."""
    held = np.ones(batches)
    held[1], held[-1] = 0.0, 2.0
    expected = sorted([batches - 1, *(b for b in range(batches - 1) if b != 1)][:_CANDIDATES])
    assert _largest(held).tolist() == expected


def test_unequal_sizes_and_disjoint_nodes() -> None:
    weights, source, node = items(2, 24)
    batch = lpt(weights, 6)
    volume = volumes(weights, source, batch, 24, 6)
    slot_node = array([0, 1, 2, 3, 4, 5])
    slots = fast(volume, node, slot_node)
    before, after = (bytes_between(volume, node, slot_node, s) for s in (np.arange(6), slots))
    assert after.max() <= before.max() and after.sum() < before.sum()
    away = slot_node + 100
    for method in (fast, ilp):
        slots = method(volume, node, away)
        assert bytes_between(volume, node, away, slots).sum() == weights.sum()
        np.testing.assert_array_equal(np.sort(slots), np.arange(6))


def test_one_node_and_nothing_to_send_are_ordinary() -> None:
    same = array([0, 0, 0])
    for method in (fast, ilp):
        np.testing.assert_array_equal(np.sort(method(np.eye(3), same, same)), [0, 1, 2])
        slots = method(np.zeros((3, 3)), array([0, 1, 2]), array([0, 1, 2]))
        np.testing.assert_array_equal(np.sort(slots), [0, 1, 2])
    assert len(place_items(np.zeros(0), array([]), array([]), same, array([0, 1]))) == 2


def test_a_program_that_is_out_of_time_is_refused() -> None:
    weights, source, node = items(1, 64, node=8)
    volume = volumes(weights, source, lpt(weights, 64), 64, 64)
    with pytest.raises(ConfigError, match=r"64 batches on 8 nodes in 0\.01 s; use rearrange='permute'"):
        place_by_program(volume, node, node, None, seconds=0.01)


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
    placed = place_items(weights, nodes[source], plain, np.arange(nodes[-1] + 1), nodes)[plain]
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
