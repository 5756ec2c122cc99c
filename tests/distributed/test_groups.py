"""The process groups that are predicted are those that every rank is in."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.parallelize.gradients import tied_rank_sets
from hetero_strategy.runtime.connect import process_groups
from hetero_strategy.strategy.assembly import _channels
from hetero_strategy.testing import Pool
from tests.distributed.exact import on, setting_of
from tests.distributed.stepping import Setting, assembled, data

PLACEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({"vision": on(0), "llm": on(0)}, {}),
    "colocated": ({"vision": on(0, 1), "llm": on(0, 1)}, {}),
    "disjoint, one idle": ({"vision": on(0), "llm": on(2, 3, pp=2)}, {}),
    "mixed, both ends share a weight": (
        {"vision": on(0, 1), "audio": on(2), "llm": on(0, 1, 3, 2, pp=2, tp=2)},
        {"lm": "hf_llama", "tied": True},
    ),
    "context parallel": ({"vision": on(0), "llm": on(0, 1, 2, 3, cp=2)}, {}),
    "tensor parallel, sharded and replicated": (
        {"vision": on(1, 0, 2), "llm": on(0, 1, 2, 3, 4, 5, 6, 7, tp=2, dp_shard=2, dp_replicate=2)},
        {},
    ),
    "experts": ({"vision": on(0, 1), "llm": on(0, 1, 2, 3, ep=2)}, {"lm": "balanced"}),
}
RankSets = Counter[tuple[int, ...]]


def joined() -> RankSets:
    """Ranks of all process groups that this rank is in."""
    return Counter(tuple(sorted(dist.get_process_group_ranks(group))) for group in _world.pg_map)


def on_rank(rank: int, world: int, setting: Setting) -> dict[str, tuple[RankSets, dict[str, list[tuple[int, ...]]]]]:
    """Groups that this rank is in and those that are predicted; on CUDA as far as gloo can stand in for NCCL."""
    made = assembled(setting, rank, world)
    executor, host = made.executor, joined()
    graph, placement, zeros = executor.compiler.graph, executor.placement, torch.zeros
    owners = tied_rank_sets(executor.modules, placement.layouts)
    with patch.object(torch, "zeros", lambda size, device: zeros(size)):
        registry = GroupRegistry(placement, owners, "cuda", balanced=graph.balanced)
        _channels(registry, graph, [(1, torch.float32)] * len(graph.edges), rank, torch.device("cpu"))
    world_group = Counter([tuple(range(world))])
    found = {"cpu": host, "cuda": joined() - host + world_group}
    return {kind: (sets, process_groups(placement, graph, owners, kind)) for kind, sets in found.items()}


@pytest.mark.full_cases("colocated", "tensor parallel, sharded and replicated")
@pytest.mark.parametrize("name", PLACEMENTS)
def test_groups_are_those_predicted(pool: Pool, tmp_path: Any, name: str) -> None:
    layouts, options = PLACEMENTS[name]
    setting = setting_of({False: data(tmp_path / "data", draws=False)}, layouts, "1f1b", **options)
    ranks = pool.run(setting.world, on_rank, setting, timeout=120)
    for device in ("cpu", "cuda"):
        made = ranks[0][device][1]
        assert all(found[device][1] == made for found in ranks)
        for rank, found in enumerate(ranks):
            predicted = Counter(ranks for sets in made.values() for ranks in sets if rank in ranks)
            assert found[device][0] == predicted, (device, rank)
    edges = {device: len(ranks[0][device][1]["edges"]) for device in ("cpu", "cuda")}
    assert edges["cuda"] >= edges["cpu"]
