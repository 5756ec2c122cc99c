"""Groups for rows: one wherever a step may have a message, and none where it never has."""

from __future__ import annotations

from collections import Counter
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import MESSAGE_CTAS, disjoint
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.runtime.connect import (
    BETWEEN_NODES,
    RECEIVING,
    SENDING,
    Meetings,
    channel_sets,
    meetings_of,
    message_buffers,
    process_groups,
)
from hetero_strategy.schedule.action import Stage, StageGraph, StageId
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.testing import Setting, planned

LLM, EIGHT = ModuleLayout(range(8), pp=4, tp=2), {"llm": (128, 8), "vision": (128, 2), "samples": 24}
SETTINGS = {
    "sequence parallel": ({"vision": ModuleLayout(range(8)), "llm": LLM}, {}),
    "instances in cohorts": ({"vision": ModuleLayout(range(8)), "llm": LLM}, {"fill": "fine"}),
    "disjoint": ({"vision": ModuleLayout((6, 7)), "llm": ModuleLayout(range(4), pp=2, tp=2)}, {}),
    "replicas": ({"vision": ModuleLayout(range(8), tp=2), "llm": ModuleLayout(range(8), pp=2)}, {}),
    "two chunks": (
        {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((0, 1), pp=2, vpp=2)},
        {"schedule": "interleaved_1f1b"},
    ),
    "one rank": ({"vision": ModuleLayout((0,)), "llm": ModuleLayout((0,))}, {}),
}


def setting_of(name: str) -> Setting:
    layouts, options = SETTINGS[name]
    given: dict[str, Any] = {"fill": "none", **EIGHT, **options}
    return Setting(name, layouts, **given)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_hop_has_a_group_if_and_only_if_it_has_messages(name: str) -> None:
    setting = setting_of(name)
    graph = setting.blueprint.graph
    used: set[tuple[int, bool, int]] = set()
    for seed in range(2):
        plan, _, _, schedule = planned(setting, seed)
        for rank in range(setting.world):
            for transfer in compile_step(plan, schedule, rank).transfers:
                for hop, messages in enumerate((transfer.transfer.first, transfer.transfer.second)):
                    if messages.sends or messages.receives:
                        sets = channel_sets(graph, transfer.edge)[transfer.backward]
                        peers = [peer for peer, _ in (*messages.sends, *messages.receives)]
                        assert any({rank, *peers} <= {*ranks} for ranks in sets[hop])
                        used.add((graph.firsts[transfer.edge], transfer.backward, hop))
    sets_of = {first: channel_sets(graph, number) for number, first in enumerate(graph.firsts)}
    ways = [(first, back, hops) for first, sets in sets_of.items() for back, hops in sets.items()]
    assert used == {(first, back, hop) for first, back, hops in ways for hop, ranks in enumerate(hops) if ranks}


def test_how_many_groups_a_rank_of_a_sequence_parallel_pipeline_is_in() -> None:
    """One each way for each neighbouring stage; those of the first stage and of the encoder's, as many between them."""
    setting = setting_of("sequence parallel")
    graph, placement = setting.blueprint.graph, setting.placement
    edges = process_groups(placement, graph, (), "cuda")["edges"]
    counted = Counter(rank for ranks in edges for rank in ranks)
    of_stage = {
        rank: node.stage for node, stage in graph.stages.items() if node.module == "llm" for rank in stage.ranks
    }
    ends = [of_stage[rank] in (0, 3) for rank in range(8)]
    assert [counted[rank] for rank in range(8)] == [2 + (2 if end else 4) for end in ends]


def test_a_group_for_messages_is_as_narrow_as_those_who_meet() -> None:
    """NCCL has fewer channels between two ranks of a wider group: stages of 32 ranks pass rows on in pairs."""
    layouts = {"vision": ModuleLayout(range(64)), "llm": ModuleLayout(range(64), pp=2, tp=2)}
    setting = Setting("wide", layouts, fill="none", llm=(128, 8), vision=(128, 2), samples=64)
    graph, widths = setting.blueprint.graph, dict[tuple[str, str], set[int]]()
    for number, edge in enumerate(graph.edges):
        for hops in channel_sets(graph, number).values():
            for sets in hops:
                ranks = [rank for one in sets for rank in one]
                assert len(ranks) == len({*ranks}), "a rank has one group for a hop"
                widths.setdefault((edge[0].module, edge[1].module), set()).update(map(len, sets))
    assert widths == {("vision", "llm"): {64}, ("llm", "llm"): {2}}
    sets = process_groups(setting.placement, graph, (), "cuda")["edges"]
    assert len(sets) == 2 + 2 * 32 and len(disjoint(sets)) == 2 + 2


@pytest.mark.parametrize(("world", "before"), [(8, 15), (64, 44)])
def test_the_example_of_the_readme_needs_as_few_meetings_of_all_ranks_on_any_number(world: int, before: int) -> None:
    """Where each axis and each direction of an edge was a group of its own that all ranks made, one after another."""
    half, third = range(world // 2), range(world // 2, 3 * world // 4)
    layouts = {
        "vision": ModuleLayout(half, dp_shard=len(half)),
        "audio": ModuleLayout(third, dp_shard=len(third)),
        "llm": ModuleLayout(range(world), tp=2, pp=2, dp_shard=world // 4),
    }
    small: dict[str, Any] = {"llm": (128, 8), "vision": (128, 2), "audio": (128, 2), "samples": world}
    chosen = Setting("readme", layouts, fill="none", **small)
    graph = chosen.blueprint.graph
    made = process_groups(chosen.placement, graph, (), "cuda")
    axes = [ranks for ranks in made["modules"] if 1 < len(ranks) < world]
    assert len(disjoint(axes)) + len(disjoint(made["edges"])) == 9
    ways = [hops for number in {*graph.firsts} for hops in channel_sets(graph, number).values()]
    assert len(axes) + sum(bool(sets) for hops in ways for sets in hops) == before


def test_what_nccl_keeps_for_messages() -> None:
    """A stage on each of two ranks, whose rows go one way and whose gradients go the other; and wide modules,
    between whose ranks NCCL has fewer channels where they are on several nodes.
    """
    stages = {StageId("llm", n): Stage(np.array([[n]]), True, True, row_sharding=RowSharding(1)) for n in range(2)}
    graph = StageGraph(stages, ((StageId("llm", 0), StageId("llm", 1)),), {})
    assert message_buffers(graph, 3).tolist() == [MESSAGE_CTAS * (SENDING + RECEIVING)] * 2 + [0]
    assert message_buffers(graph, 3, ranks_per_node=1).tolist() == [2 * BETWEEN_NODES] * 2 + [0]
    layouts = {"vision": ModuleLayout(range(8)), "llm": ModuleLayout(range(8, 16))}
    wide = Setting("nodes", layouts, fill="none", llm=(128, 8), vision=(128, 2), samples=64).blueprint.graph
    near = message_buffers(wide, 16, ranks_per_node=16)
    assert near.tolist() == [8 * MESSAGE_CTAS * (SENDING + RECEIVING)] * 16
    assert message_buffers(wide, 16, ranks_per_node=8).tolist() == [2 * BETWEEN_NODES] * 16
    uneven = message_buffers(wide, 16, ranks_per_node=12)  # the second module's ranks are on both
    assert uneven[0] == 2 * BETWEEN_NODES + 4 * 2 * (SENDING + RECEIVING)
    assert uneven[8] == 8 * 2 * (SENDING + RECEIVING) and uneven[12] == 2 * BETWEEN_NODES


def test_stages_of_one_module_keep_their_instance() -> None:
    for parts, met in ((2, {5}), (1, {4, 5})):
        grids, sharding = (np.array([[0, 1], [2, 3]]), np.array([[4, 5], [6, 7]])), RowSharding(parts)
        stages = {StageId("llm", n): Stage(grid, True, True, row_sharding=sharding) for n, grid in enumerate(grids)}
        graph = StageGraph(stages, ((StageId("llm", 0), StageId("llm", 1)),), {})
        assert meetings_of(graph, 0)[False][0].peers(1) == met
        assert meetings_of(graph, 0)[True][0].peers(5) == {1} if parts == 2 else {0, 1}


@pytest.mark.full
def test_whether_ranks_meet() -> None:
    for name in SETTINGS:
        graph = setting_of(name).blueprint.graph
        for number in range(len(graph.edges)):
            for meetings in chain(*meetings_of(graph, number).values()):
                assert bool(meetings) == bool(plain(meetings))
                assert np.unique(meetings.sources[0]).size == meetings.sources.shape[1]


@st.composite
def grids(draw: st.DrawFn) -> np.ndarray:
    instances, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(9)))[: instances * size]
    return np.array(ranks).reshape(instances, size)


def plain(meetings: Meetings) -> set[tuple[int, int]]:
    rows = zip(meetings.sources.tolist(), meetings.targets.tolist(), strict=True)
    return {(a, b) for source, target in rows for a, b in product(source, target) if a != b}


@given(source=grids(), target=grids())
def test_pairs_and_peers(source: np.ndarray, target: np.ndarray) -> None:
    between = Meetings(source.reshape(1, -1), target.reshape(1, -1))
    assert plain(between) == {(a, b) for a in source.flat for b in target.flat if a != b}
    for meetings in (between, Meetings(target, target)):
        expected = plain(meetings)
        for rank in range(10):
            assert meetings.peers(rank) == {b for a, b in expected if a == rank}
            assert meetings.back.peers(rank) == {a for a, b in expected if b == rank}
