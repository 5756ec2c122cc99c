"""Process groups of a run, on real processes."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hetero_strategy.layout import registry as registries
from hetero_strategy.layout.placement import place
from hetero_strategy.layout.registry import MESSAGE_CTAS, GroupRegistry
from hetero_strategy.layout.spec import ModuleLayout
from tests.distributed.harness import Pool


def sockets() -> int:
    """That this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket")
    return found


def on_rank(rank: int, world: int) -> tuple[int, int, int]:
    """Sockets for the two groups on the host, for one that connects at once, and for a sum over the first."""
    placement = place({"llm": ModuleLayout(tuple(range(world)))}, world)
    before = sockets()
    registry = GroupRegistry(placement, [], "cpu")
    on_demand = sockets() - before
    everyone = dist.new_group(backend="gloo")
    at_once = sockets() - before - on_demand
    total = torch.tensor(rank)
    dist.all_reduce(total, group=registry.background)
    assert int(total) == sum(range(world)) and "TORCH_GLOO_LAZY_INIT" not in os.environ
    dist.barrier(everyone)
    return on_demand, at_once, sockets() - before - on_demand - at_once


def test_groups_on_the_host_connect_on_demand(pool: Pool) -> None:
    for on_demand, at_once, talking in pool.run(6, on_rank, timeout=60):
        assert on_demand < at_once, "each rank is connected with each"
        assert talking <= at_once


def shared_groups(rank: int, world: int, apart: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether two modules of one layout share groups with the first, of tensor and of data parallelism."""
    layouts = {name: ModuleLayout(tuple(range(world)), tp=2) for name in ("llm", "vision", "audio")}
    registry = GroupRegistry(place(layouts, world), [], "cpu", apart=apart)
    meshes = [registry.mesh(name) for name in layouts]

    def same(one: int, other: int) -> bool:
        groups = [[meshes[i].get_group(axis) for axis in ("dp_shard", "tp")] for i in (one, other)]  # type: ignore[union-attr]
        shared = {a is b for a, b in zip(*groups, strict=True)}
        assert len(shared) == 1
        return shared.pop()

    total = torch.tensor(rank)
    dist.all_reduce(total, group=meshes[1].get_group("tp"))  # type: ignore[union-attr]
    assert int(total) == 2 * (rank // 2 * 2) + 1
    return same(0, 1), same(1, 2)


@pytest.mark.parametrize(("apart", "expected"), [((), (True, True)), (("vision", "audio"), (False, True))])
def test_modules_apart_share_no_group_with_others(
    pool: Pool, apart: tuple[str, ...], expected: tuple[bool, bool]
) -> None:
    assert pool.run(4, shared_groups, apart, timeout=60) == [expected] * 4


Made = tuple[tuple[int, ...], int | None]


def made_by(rank: int, world: int, splits: bool) -> tuple[list[Made], list[tuple[int, ...]]]:
    """Groups that a rank makes for CUDA, with the most blocks of threads of each, and those that it connects."""
    made: list[Made] = []
    connected: list[tuple[int, ...]] = []
    new_group, zeros = dist.new_group, torch.zeros

    def group(ranks: Any = None, pg_options: Any = None, **options: Any) -> Any:
        made.append((tuple(ranks or range(world)), pg_options and pg_options.config.max_ctas))
        return new_group(ranks, **options)

    def options() -> Any:
        return SimpleNamespace(config=SimpleNamespace(max_ctas=None))

    with (
        patch.object(registries, "_splits", lambda: splits),
        patch.object(dist, "new_group", group),
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), create=True),
        patch.object(torch, "zeros", lambda size, device: zeros(size)),
        patch.object(dist, "all_reduce", lambda x, group: connected.append(tuple(dist.get_process_group_ranks(group)))),
    ):
        registry = GroupRegistry(place({"llm": ModuleLayout(tuple(range(world)), pp=2, tp=2)}, world), [], "cuda")
        for _ in range(2):
            registry.channel((1, 2))
    return made, connected


def test_messages_of_nccl_take_few_blocks_and_are_not_connected_twice(pool: Pool) -> None:
    tp, channels = [((0, 1), None), ((2, 3), None)], [(1, 2), (1, 2)]
    for splits in (True, False):
        for rank, (made, connected) in enumerate(pool.run(4, made_by, splits, timeout=60)):
            alone = ((rank,), None)
            everyone = ((0, 1, 2, 3), None)
            few = [(ranks, MESSAGE_CTAS if splits else None) for ranks in channels]
            assert made == [*tp, alone, everyone, everyone, *few]
            own = [(0, 1) if rank < 2 else (2, 3)]
            assert connected == own + ([] if splits or rank in (0, 3) else channels)
