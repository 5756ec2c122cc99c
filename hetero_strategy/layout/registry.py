"""All process groups and DeviceMeshes of a run, created on every rank, in one order, once (law 4).

Groups are shared by rank set: two modules on the same ranks, or a mesh axis and a boundary that join the same ranks,
use one group. A group is a collective of the whole world to create, so nothing outside this file creates one. NCCL
splits them off the world's communicator where that knows its device.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from hetero_strategy.layout.placement import Placement
from hetero_strategy.layout.spec import ModuleLayout

CONTEXT = 2
"""Axis of context parallelism in a pipeline slice, ``[dp_replicate, dp_shard, cp, tp]``."""
MESSAGE_CTAS = 8
"""Blocks of threads that a message of NCCL keeps on the GPU, a receive also while it waits; NCCL_MAX_CTAS goes before.
By itself NCCL takes up to 32 between two GPUs of a node, of which 8 carry some 160 GB/s."""


class GroupRegistry:
    """Process groups by rank set, and one mesh per module: that of this rank's pipeline slice.

    Args:
        placement: resolved layouts; modules are visited in its order on every rank.
        rank_sets_needed: other rank sets that need a group, in the same order on every rank: the owners of a shared
            weight.
        device_type: ``"cuda"`` or ``"cpu"``; never guessed.
        timeout: limit of every collective in the groups created here.
        apart: modules whose collectives run beside those of others: they share no group with these. NCCL runs a
            group's collectives one after another.
    """

    def __init__(
        self,
        placement: Placement,
        rank_sets_needed: Iterable[Iterable[int]],
        device_type: str,
        timeout: timedelta | None = None,
        apart: Collection[str] = (),
    ) -> None:
        self.device_type = device_type
        self._timeout, self._placement = timeout, placement
        self._rank = dist.get_rank()
        self._channels: list[dist.ProcessGroup | None] = []
        everyone = tuple(range(dist.get_world_size()))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}
        for ranks in rank_sets(placement, rank_sets_needed):
            self._create(ranks)
        host = "fake" if dist.get_backend() == "fake" else "gloo"  # in a dry run there is nobody to talk to
        # A module that only one rank shards (to compute in another dtype) has a mesh of that rank alone.
        if (self._rank,) not in self._groups:
            alone = dist.new_group([self._rank], timeout=timeout, use_local_synchronization=True)
            self._groups[(self._rank,)] = alone
        those = replace(placement, layouts={name: x for name, x in placement.layouts.items() if name in apart})
        own = {ranks: self._new(ranks) for ranks in rank_sets(those, ()) if len(ranks) > 1}
        # Keys are gathered beside parameters, which may be those of the same ranks.
        self._contexts = {ranks: self._new(ranks) for ranks in context_sets(placement)}
        self._apart = {(self._rank,): self._groups[self._rank,], **own}
        self._meshes = {
            name: self._mesh(name, layout, self._apart if name in apart else self._groups)
            for name, layout in placement.layouts.items()
        }
        with connected_on_demand():
            self.background = dist.new_group(backend=host, timeout=timeout)
            """All ranks on the host, for what runs beside training (checkpoints)."""
            self.loading = dist.new_group(backend=host, timeout=timeout)
            """All ranks on the host, for loading data by one thread per rank."""

    def mesh(self, module: str) -> DeviceMesh | None:
        """Return the mesh of this rank's pipeline slice of the module, over ``dp_shard`` and its other axes above 1.

        It is None where this rank is not in the module.
        """
        return self._meshes[module]

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """Return the group of exactly these ranks; None for one rank alone or where this rank is not a member.

        Raises:
            KeyError: it was not created at start (groups are never created later).
        """
        key = tuple(sorted(ranks))
        return None if len(key) < 2 else self._groups[key]

    def context(self, module: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share this rank's sequences of the module by context parallelism."""
        layouts = {module: self._placement.layouts[module]}
        mine = (ranks for ranks in context_sets(replace(self._placement, layouts=layouts)) if self._rank in ranks)
        return next((self._contexts[ranks] for ranks in mine), None)

    def channel(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """Return a group of these ranks whose messages wait for no other channel's; None as in :meth:`group`.

        A collective over the world, at start, to be called in the same order on every rank. NCCL runs a group's
        messages one after another, so there every channel is a new group. Elsewhere tags tell channels apart, and those
        of one rank set share a group.
        """
        key = tuple(sorted(ranks))
        if self.device_type != "cuda" or len(key) < 2:
            self._create(key)
            return self.group(key)
        self._channels.append(self._new(key, messages=True))
        return self._channels[-1]

    @property
    def created(self) -> tuple[tuple[int, ...], ...]:
        """Rank sets of the groups that were created at start, in this order and the same on every rank; without those
        of one rank alone.
        """
        return tuple(ranks for ranks in (*self._groups, *self._contexts, *self._apart) if len(ranks) > 1)

    def limit(self, timeout: timedelta) -> None:
        """From now on a collective of the world or of a module ends after this time. Those on the host stay: what they
        do beside training, reading and writing files, may take longer than a step.
        """
        for group in (*self._groups.values(), *self._contexts.values(), *self._apart.values(), *self._channels):
            if group is not None:
                _set_pg_timeout(timeout, group)

    def _create(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1 and ranks not in self._groups:
            self._groups[ranks] = self._new(ranks)

    def _new(self, ranks: tuple[int, ...], *, messages: bool = False) -> dist.ProcessGroup | None:
        splits = _splits()
        options = _for_messages(self._timeout) if splits and messages else None
        group = dist.new_group(list(ranks), timeout=self._timeout, pg_options=options)
        if self._rank not in ranks:
            return None
        if self.device_type == "cuda" and not (splits and messages):
            # NCCL connects ranks at their first collective; a group that was not split off has no communicator before,
            # which a first use by sends alone would have to make with every rank.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        return group

    def _mesh(
        self, module: str, layout: ModuleLayout, made: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    ) -> DeviceMesh | None:
        if self._rank not in layout.ranks:
            return None
        sizes = mesh_sizes(layout)
        axes = tuple(name for name, size in sizes.items() if size > 1 or name == "dp_shard")
        grid = next(g for g in layout.grid() if self._rank in g).reshape([sizes[name] for name in axes])
        lines = [line for axis in range(len(axes)) for line in _lines(grid, axis) if self._rank in line]
        if missing := [line for line in lines if line not in made]:
            raise KeyError(f"{module}: its mesh of {axes} needs a group of ranks {missing[0]}, which was not created")
        groups = [made[line] for line in lines]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],  # type: ignore[arg-type]
            self.device_type,
            mesh=torch.from_numpy(grid.copy()),
            mesh_dim_names=axes,
        )


@contextmanager
def connected_on_demand() -> Iterator[None]:
    """Two ranks of a gloo group that is made meanwhile connect when they first talk: thousands of ranks, of which each
    talks to few, need no connection of each with each.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _splits() -> bool:
    """Whether the world's groups are split off its own, as NCCL does it where a process told its device."""
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    return device is not None and bool(world._get_backend(device).supports_splitting)


def _for_messages(timeout: timedelta | None) -> Any:
    """Options of NCCL for a group of rows on their way."""
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:  # torch warns where the group's is another
        options._timeout = timeout
    options.config.max_ctas = MESSAGE_CTAS
    return options


def rank_sets(placement: Placement, needed: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """List the rank sets of mesh axes and of ``needed``, in the one order in which all ranks create groups. Pure."""
    sets: dict[tuple[int, ...], None] = {}
    for layout in placement.layouts.values():
        for grid in layout.grid():
            part = grid.reshape([*mesh_sizes(layout).values()])
            for axis in range(part.ndim):
                sets.update(dict.fromkeys(_lines(part, axis)))
    for ranks in needed:
        sets[tuple(sorted({int(r) for r in ranks}))] = None
    return list(sets)


def context_sets(placement: Placement) -> list[tuple[int, ...]]:
    """List the rank sets of context parallelism, in the one order in which all ranks create their groups. Pure."""
    grids = [grid for layout in placement.layouts.values() if layout.cp > 1 for grid in layout.grid()]
    return list(dict.fromkeys(line for grid in grids for line in _lines(grid, CONTEXT)))


def mesh_sizes(layout: ModuleLayout) -> dict[str, int]:
    """Axes of a module's mesh, that of its parameters: its context-parallel ranks are on the axis of shards."""
    return {"dp_replicate": layout.dp_replicate, "dp_shard": layout.shards, "tp": layout.tp}


def _lines(grid: np.ndarray, axis: int) -> list[tuple[int, ...]]:
    """List the ranks along one axis, one tuple per coordinate of the other axes."""
    return [tuple(int(r) for r in line) for line in grid.swapaxes(axis, -1).reshape(-1, grid.shape[axis])]
