"""OrchMLLM's node-wise rearrangement: brute force, plain loops, and the plans it leads to."""

from __future__ import annotations

import itertools
import sys
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError
from hetero_strategy.papers.orchmllm import _CANDIDATES, _largest, by_program, permute, volumes
from hetero_strategy.plan.plan_step import Near
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from tests.plan.test_balance_options import drawn, places, plan_of, sent, sets
from tests.plan.test_near_home import array, item_bytes_between, items, lpt


def bytes_between(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The same from a matrix."""
    source, batch = np.nonzero(volume)
    return item_bytes_between(volume[source, batch], source, slots[batch], source_node, slot_node)


def fast(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray) -> np.ndarray:
    """Slots by ``permute``, from a matrix."""
    source, batch = np.nonzero(volume)
    return permute(volume[source, batch], source, batch, source_node, slot_node)


def ilp(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray) -> np.ndarray:
    """Slots by the integer program."""
    source, batch = np.nonzero(volume)
    return by_program(volume[source, batch], source, batch, source_node, slot_node)


def sent_by_each(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, slots: np.ndarray) -> list[float]:
    """Bytes to other nodes, by a plain loop."""
    out = [0.0] * len(source_node)
    for s, b in itertools.product(range(len(source_node)), range(len(slots))):
        if source_node[s] != slot_node[slots[b]]:
            out[s] += volume[s, b]
    return out


def best(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray) -> float:
    """Smallest maximum over all permutations, by trying them."""
    orders = itertools.permutations(range(len(slot_node)))
    return min(max(sent_by_each(volume, source_node, slot_node, np.asarray(slots)), default=0.0) for slots in orders)


@st.composite
def cases(draw: st.DrawFn, most: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(volume, source nodes, slot nodes): unequal numbers, nodes with holes, disjoint or shared."""
    batches, sources = draw(st.integers(1, most)), draw(st.integers(1, most))
    shared = [0, 1, 2, 5]
    others = draw(st.sampled_from([shared, [7, 8, 9], [1, 2, 9]]))
    source_node = array(draw(st.lists(st.sampled_from(others), min_size=sources, max_size=sources)))
    slot_node = array(draw(st.lists(st.sampled_from(shared), min_size=batches, max_size=batches)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    volume = rng.integers(0, 50, (sources, batches)) * (rng.random((sources, batches)) < 0.5).astype(np.float64)
    return volume, source_node, slot_node


def test_volumes_and_bytes_between_by_hand() -> None:
    size, source, batch = array([10, 20, 30, 40]), array([0, 0, 1, 2]), array([1, 1, 0, 2])
    volume = volumes(size, source, batch, 3, 3)
    np.testing.assert_array_equal(volume, [[0, 30, 0], [30, 0, 0], [0, 0, 40]])
    node = array([0, 0, 1])
    np.testing.assert_array_equal(bytes_between(volume, node, node, array([0, 1, 2])), [0, 0, 0])
    np.testing.assert_array_equal(bytes_between(volume, node, node, array([0, 2, 1])), [30, 0, 40])


@given(cases())
@settings(max_examples=150, deadline=None)
def test_fast_is_a_permutation_and_never_worse_than_none(case: tuple[np.ndarray, ...]) -> None:
    volume, source_node, slot_node = case
    slots = fast(volume, source_node, slot_node)
    np.testing.assert_array_equal(np.sort(slots), np.arange(len(slot_node)))
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
    optimum = best(volume, source_node, slot_node)
    slots = ilp(volume, source_node, slot_node)
    assert sorted(slots) == list(range(batches))
    assert max(sent_by_each(volume, source_node, slot_node, slots)) == pytest.approx(optimum, rel=2e-4, abs=1e-9)
    quick = max(sent_by_each(volume, source_node, slot_node, fast(volume, source_node, slot_node)))
    assert optimum <= quick * (1 + 1e-12)


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
    from_items = bytes_between(volume, node, node, permute(weights, source, batch, node, node)).max()
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
    assert len(permute(np.zeros(0), array([]), array([]), same, array([0, 1]))) == 2


def test_a_program_that_is_out_of_time_is_refused() -> None:
    weights, source, node = items(1, 64, node=8)
    with pytest.raises(ConfigError, match=r"64 batches on 8 nodes in 0\.01 s; use rearrange='permute'"):
        by_program(weights, source, lpt(weights, 64), node, node, seconds=0.01)


def test_permuting_brings_whole_batches_home() -> None:
    """One image a sample; the longest-processing-time rule orders them by size: two leave their node for nothing."""
    rows = np.array([10, 40, 20, 30])
    items = StepItems(np.arange(4), rows, np.zeros(4, np.int64), rows)
    metadata = StepMetadata(0, 0, np.arange(4), rows + 5, np.full(4, 5), {"vision": items})
    nodes = np.array([0, 0, 1, 1])
    near, policy = Near(nodes, nodes, "llm"), {"vision": "lpt", "llm": "none"}
    found = {way: sent(plan_of(metadata, near=near, policy=policy, rearrange=way), nodes)
             for way in ("none", "permute", "ilp")}  # fmt: skip
    assert found == {"none": [10, 0, 0, 30], "permute": [0] * 4, "ilp": [0] * 4}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_rearrangements_permute_batches_and_the_programme_finds_the_best(microbatches: int) -> None:
    nodes = np.array([0, 0, 1, 1, 2, 2])
    near, better = Near(nodes, nodes, "llm"), []
    for seed in range(4):
        metadata = drawn(seed, 40)
        made = {way: plan_of(metadata, 6, microbatches, near, rearrange=way)
                for way in ("none", "permute", "ilp", "home")}  # fmt: skip
        plain, most = made["none"], {way: max(sent(plan, nodes)) for way, plan in made.items()}
        for way in ("permute", "ilp"):
            assert sets(made[way], "vision") == sets(plain, "vision"), "whole batches move"
            assert places(made[way], "vision") != places(plain, "vision")
            assert sum(sent(made[way], nodes)) < sum(sent(plain, nodes)) or way == "ilp"
            np.testing.assert_allclose(
                np.sort(made[way].loads["vision"].after), np.sort(plain.loads["vision"].after), rtol=1e-12
            )
        assert sets(made["home"], "vision") != sets(plain, "vision"), "items move one by one"
        assert sum(sent(made["home"], nodes)) < sum(sent(made["permute"], nodes))
        assert all(places(plan, "llm") == places(plain, "llm") for plan in made.values())
        if microbatches == 1:
            best = min(max(sent(plain, nodes, slots)) for slots in itertools.permutations(range(6)))
            assert best == pytest.approx(most["ilp"], rel=2e-4) and most["ilp"] <= most["permute"] < most["none"]
            better.append(most["ilp"] < most["permute"])
    assert microbatches > 1 or any(better), "else nothing tells the programme from the fast method"


def test_the_program_without_cvxpy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    monkeypatch.delitem(sys.modules, "hetero_strategy.papers.orchmllm")
    with pytest.raises(ConfigError, match=r"needs cvxpy.*hetero-strategy\[papers\]"):
        import_module("hetero_strategy.papers.orchmllm")
