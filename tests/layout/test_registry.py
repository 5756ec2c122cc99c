"""Process groups of a run, on real processes."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist

from hetero_strategy.layout.placement import place
from hetero_strategy.layout.registry import GroupRegistry
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
