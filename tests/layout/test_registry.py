"""Process groups of a run, on real processes."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_name, _world

from hetero_strategy.layout import registry as registries
from hetero_strategy.layout.registry import MESSAGE_CTAS, GroupRegistry, disjoint
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.testing import Pool


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


def test_sets_without_a_common_rank_are_one_batch() -> None:
    """The lines of a mesh of 2 x 2, those of another module's ranks, and a set that crosses all of them."""
    rows, columns, elsewhere, across = [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(4, 5)], [(3, 4)]
    assert disjoint([*rows, *columns, *elsewhere, *across]) == [[0, 1, 4], [2, 3], [5]]
    assert disjoint([(0, 1), (0, 1)]) == [[0], [1]] and disjoint([]) == []


Made = tuple[tuple[tuple[int, ...], ...], tuple[int, int] | None]


def made_by(rank: int, world: int, splits: bool) -> tuple[list[Made], list[tuple[int, ...]], list[list[int]], set[str]]:
    """World-wide operations in which a rank makes groups for CUDA, with the most blocks of threads of each and how many
    come at once; those that it connects, the ranks in its channels, and the names of its groups.
    """
    made: list[Made] = []
    connected: list[tuple[int, ...]] = []
    new_group, zeros = dist.new_group, torch.zeros

    def group(ranks: Any = None, use_local_synchronization: bool = False, **options: Any) -> Any:
        if not use_local_synchronization:
            made.append(((tuple(ranks or range(world)),), None))
        return new_group(ranks, use_local_synchronization=use_local_synchronization, **options)

    def split_group(split_ranks: Any, timeout: Any, pg_options: Any) -> Any:
        config = pg_options and pg_options.config
        made.append((tuple(map(tuple, split_ranks)), config and (config.max_ctas, config.cga_cluster_size)))
        mine = [ranks for ranks in split_ranks if rank in ranks]
        return new_group(mine[0], timeout=timeout, use_local_synchronization=True) if mine else None

    def options(is_high_priority_stream: bool) -> Any:
        assert is_high_priority_stream
        return SimpleNamespace(config=SimpleNamespace(max_ctas=None, cga_cluster_size=None))

    with (
        patch.object(registries, "_splits", lambda: splits),
        patch.object(dist, "new_group", group),
        patch.object(dist, "split_group", split_group),
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), create=True),
        patch.object(torch, "zeros", lambda size, device: zeros(size)),
        patch.object(dist, "all_reduce", lambda x, group: connected.append(tuple(dist.get_process_group_ranks(group)))),
    ):
        registry = GroupRegistry(place({"llm": ModuleLayout(tuple(range(world)), pp=2, tp=2)}, world), [], "cuda")
        channels = registry.channels([(1, 2), (1, 2), (0, 3)])
    names = {f"{dist.get_process_group_ranks(group)}: {_get_process_group_name(group)}" for group in _world.pg_map}
    return made, connected, [[] if x is None else dist.get_process_group_ranks(x) for x in channels], names


def test_lines_of_an_axis_are_split_off_at_once_and_messages_take_few_blocks(pool: Pool) -> None:
    everyone, tp, channels = ((0, 1, 2, 3),), ((0, 1), (2, 3)), [((1, 2), (0, 3)), ((1, 2),)]
    named = dict[str, set[str]]()
    for splits in (True, False):
        for rank, (made, connected, ranks, names) in enumerate(pool.run(4, made_by, splits, timeout=60)):
            if splits:
                few = [(sets, (MESSAGE_CTAS, 1)) for sets in channels]
                assert made == [(tp, None), (everyone, None), (everyone, None), *few]
                for name in names:  # symmetric memory looks members up by it
                    members, hashed = name.split(": ")
                    named.setdefault(members, set()).add(hashed)
            else:
                alone = [((x,), None) for sets in channels for x in sets]
                assert made == [*(((x,), None) for x in tp), (everyone, None), (everyone, None), *alone]
            inner = rank in (1, 2)
            assert ranks == [[1, 2], [1, 2], []] if inner else [[], [], [0, 3]]
            own, met = [(0, 1) if rank < 2 else (2, 3)], [(1, 2), (1, 2)] if inner else [(0, 3)]
            assert connected == own + ([] if splits else met)
    assert {len(hashed) for members, hashed in named.items() if members in ("[0, 1]", "[2, 3]", "[0, 3]")} == {1}
    assert len(named["[1, 2]"]) == 2
