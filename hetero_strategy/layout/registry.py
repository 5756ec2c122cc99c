"""All process groups and DeviceMeshes of a run, created once, on every rank in one order (law 4).

Groups are shared by rank set: two modules on the same ranks, or a mesh axis and a boundary that join the same ranks,
use one group. Creating a group is a collective of the whole world, so nothing outside this file creates one. If NCCL's
world communicator knows its device, one split of it makes all groups of a batch of disjoint rank sets.
:func:`fake_world` lets one process create the groups of any rank while no other process exists.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from hetero_strategy.layout.spec import ModuleLayout, Placement

CONTEXT = 2
"""Index of the context-parallel axis in a pipeline slice, ``[dp_replicate, dp_shard, cp, tp]``."""
MESSAGE_CTAS = 4
"""Thread blocks that a message of NCCL keeps on the GPU, also while it waits for its partner; NCCL_MAX_CTAS overrides
it. Each is a channel of some 20 GB/s with its own buffers. NCCL's default is up to 32."""


class GroupRegistry:
    """The process groups by rank set, and the mesh of this rank's pipeline slice of each module.

    Args:
        placement: resolved layouts; modules are visited in its order on every rank.
        rank_sets_needed: further rank sets that need a group, in the same order on every rank: owners of shared
            weights.
        device_type: ``"cuda"`` or ``"cpu"``; never guessed.
        timeout: limit of every collective in the groups created here.
        balanced: names of modules with a loss on the balance of their experts.
    """

    def __init__(
        self,
        placement: Placement,
        rank_sets_needed: Iterable[Iterable[int]],
        device_type: str,
        timeout: timedelta | None = None,
        balanced: Collection[str] = (),
    ) -> None:
        self.device_type = device_type
        self._timeout, self._placement = timeout, placement
        self._rank = dist.get_rank()
        self._host = "fake" if dist.get_backend() == "fake" else "gloo"  # a dry run has no other processes
        self._channels: list[dist.ProcessGroup | None] = []
        everyone = tuple(range(dist.get_world_size()))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}
        self._share(rank_sets(placement, rank_sets_needed))
        # Each module has an axis of shards in its mesh. With one shard nothing travels along it.
        if (self._rank,) not in self._groups:
            self._groups[(self._rank,)] = self._alone()
        # Keys, rows and choices of experts travel while parameters of the same ranks may be gathered too.
        contexts, exchanges = context_sets(placement), exchange_sets(placement)
        sums = balance_sets(placement, balanced)
        self._contexts = dict(zip(contexts, self._new(contexts), strict=True))
        self._exchanges = dict(zip(exchanges, self._new(exchanges), strict=True))
        self._sums = dict(zip(sums, self._new(sums), strict=True))
        self._tables = self._groups, self._contexts, self._exchanges, self._sums
        layouts = placement.layouts.items()
        self._meshes = {name: self._mesh(name, layout, mesh_sizes(layout)) for name, layout in layouts}
        self._expert_meshes = {name: self._mesh(name, x, expert_sizes(x)) for name, x in layouts if x.ep > 1}
        with connected_on_demand():
            self.background = dist.new_group(backend=self._host, timeout=timeout)
            """All ranks on the host, for work during training (checkpoints)."""
            self.loading = dist.new_group(backend=self._host, timeout=timeout)
            """All ranks on the host, for loading data by one thread per rank."""

    def mesh(self, module: str) -> DeviceMesh | None:
        """Return the mesh of this rank's pipeline slice of the module, over ``dp_shard`` and its other axes above 1.

        It is None if this rank is not in the module.
        """
        return self._meshes[module]

    def experts(self, module: str) -> DeviceMesh | None:
        """Return the mesh of the module's experts over the ranks of this rank's pipeline slice: ``dp_replicate`` if
        above 1, ``efsdp``, ``ep``, whose group carries rows alone; None if ``ep`` is 1 or as in :meth:`mesh`.
        """
        return self._expert_meshes.get(module)

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """Return the group of exactly these ranks; None for one rank alone or if this rank is not a member."""
        key = tuple(sorted(ranks))
        return None if len(key) < 2 else self._groups[key]

    def context(self, module: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share this rank's sequences of the module by context parallelism."""
        layouts = {module: self._placement.layouts[module]}
        lines = (ranks for ranks in context_sets(replace(self._placement, layouts=layouts)) if self._rank in ranks)
        return next((self._contexts[ranks] for ranks in lines), None)

    def balance(self, module: str) -> dist.ProcessGroup | None:
        """Return the group in which this rank sums choices of the module's experts; None: this rank alone, or none."""
        sets = balance_sets(self._placement, [module])
        return next((self._sums[ranks] for ranks in sets if self._rank in ranks), None)

    def channels(self, sets: Sequence[tuple[int, ...]]) -> list[dist.ProcessGroup | None]:
        """Return a group for each rank set, whose messages never wait for other channels; None as in :meth:`group`.

        This is a collective over the world; call it at start, in the same order on every rank. NCCL runs a group's
        messages in sequence, so with NCCL every channel is a new group. Otherwise tags distinguish channels, and
        channels of one rank set share a group.
        """
        if self.device_type != "cuda":
            self._share(sets)
            return [self.group(ranks) for ranks in sets]
        groups = self._new(sets, messages=True)
        self._channels += groups
        return groups

    @property
    def created(self) -> tuple[tuple[int, ...], ...]:
        """Return the rank sets of groups created at start, in one order on every rank, without ranks alone."""
        return tuple(ranks for table in self._tables for ranks in table if len(ranks) > 1)

    def limit(self, timeout: timedelta) -> None:
        """Limit collectives of the world and of modules to this time. Groups on the host keep theirs: reading and
        writing files during training may take longer than a step.
        """
        for group in (*(group for table in self._tables for group in table.values()), *self._channels):
            if group is not None:
                _set_pg_timeout(timeout, group)

    def _share(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Create the groups of rank sets that have none yet."""
        new = [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1 and ranks not in self._groups]
        self._groups.update(zip(new, self._new(new), strict=True))

    def _new(self, sets: Sequence[tuple[int, ...]], *, messages: bool = False) -> list[dist.ProcessGroup | None]:
        """Create a group for each rank set, batch by batch; None if this rank is not a member."""
        groups: list[dist.ProcessGroup | None] = [None] * len(sets)
        splits = _splits()
        for batch in disjoint(sets):
            member = next((number for number in batch if self._rank in sets[number]), None)
            if splits:
                own = self._split([sets[number] for number in batch], messages)
            else:
                groups_of_batch = [dist.new_group([*sets[number]], timeout=self._timeout) for number in batch]
                own = None if member is None else groups_of_batch[batch.index(member)]
            if member is None:
                continue
            groups[member] = own
            if self.device_type == "cuda" and not (splits and messages):
                # NCCL connects ranks at their first collective. A group that was not split off has no communicator yet,
                # and a first use by sends alone would make one with every rank.
                dist.all_reduce(torch.zeros(1, device="cuda"), group=own)
        return groups

    def _split(self, sets: Sequence[tuple[int, ...]], messages: bool) -> dist.ProcessGroup | None:
        """Create the groups of disjoint rank sets by one split of the world's communicator."""
        options = _for_messages(self._timeout) if messages else None
        own = dist.split_group(split_ranks=[[*ranks] for ranks in sets], timeout=self._timeout, pg_options=options)
        if all(self._rank not in ranks for ranks in sets):
            # torch names a group by the number of its rank's groups, and members look each other up by that name
            # (symmetric memory): a rank outside counts too.
            self._alone()
            return None
        return own

    def _alone(self) -> dist.ProcessGroup:
        """Create a group of this rank on the host, without a communicator; no collective."""
        return dist.new_group([self._rank], backend=self._host, timeout=self._timeout, use_local_synchronization=True)

    def _mesh(self, module: str, layout: ModuleLayout, sizes: Mapping[str, int]) -> DeviceMesh | None:
        if self._rank not in layout.ranks:
            return None
        axes = tuple(name for name, size in sizes.items() if size > 1 or name in ("dp_shard", "efsdp"))
        grid = next(g for g in layout.grid() if self._rank in g).reshape([sizes[name] for name in axes])
        lines = [line for axis in range(len(axes)) for line in _lines(grid, axis) if self._rank in line]
        owners = [self._exchanges if axis == "ep" else self._groups for axis in axes]
        if missing := [line for line, owner in zip(lines, owners, strict=True) if line not in owner]:
            raise KeyError(f"{module}: its mesh of {axes} needs a group of ranks {missing[0]}, which was not created")
        groups = [owner[line] for line, owner in zip(lines, owners, strict=True)]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],  # type: ignore[arg-type]
            self.device_type,
            mesh=torch.from_numpy(grid.copy()),
            mesh_dim_names=axes,
        )


@contextmanager
def connected_on_demand() -> Iterator[None]:
    """Let ranks of new gloo groups connect only when they first talk: each of thousands talks to few."""
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process one of ``size`` ranks, whose collectives return at once, without data of other ranks."""
    from torch.distributed.tensor.debug import (
        _clear_sharding_prop_cache,  # here, because training needs neither of them
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its meshes of this rank equal those of the next rank
        gc.collect()  # meshes and modules of one rank refer to each other


def _splits() -> bool:
    """Return whether groups are split off the world's, as NCCL does if it knows its device and is the only backend."""
    world = dist.group.WORLD
    assert world is not None
    device, alone = world.bound_device_id, len(world._device_types) == 1
    return device is not None and alone and bool(world._get_backend(device).supports_splitting)


def _for_messages(timeout: timedelta | None) -> Any:
    """Return NCCL's options for a group that carries rows."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # starts between waves of a kernel
    if timeout is not None:  # torch warns if the group's timeout differs
        options._timeout = timeout
    options.config.max_ctas = MESSAGE_CTAS
    options.config.cga_cluster_size = 1  # default 4 on Hopper: a message would wait until one cluster has 4 free
    return options


def disjoint(sets: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Sort the numbers of rank sets into batches in which no rank occurs twice, each into the first that fits. Pure.

    The lines of a mesh axis are one batch, together with lines of modules and edges on other ranks.
    """
    batches: list[tuple[list[int], set[int]]] = []
    for number, ranks in enumerate(sets):
        for batch, taken in batches:
            if taken.isdisjoint(ranks):
                batch.append(number)
                taken.update(ranks)
                break
        else:
            batches.append(([number], {*ranks}))
    return [batch for batch, _ in batches]


def rank_sets(placement: Placement, needed: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """List the rank sets of mesh axes and of ``needed``, in the one order in which all ranks create groups. Pure."""
    sets: dict[tuple[int, ...], None] = {}
    for layout in placement.layouts.values():
        meshes = [mesh_sizes(layout)] + [expert_sizes(layout)] * (layout.ep > 1)
        for grid, sizes in product(layout.grid(), meshes):
            part = grid.reshape([*sizes.values()])
            for axis, name in enumerate(sizes):
                sets.update(dict.fromkeys(_lines(part, axis) if name != "ep" else ()))
    for ranks in needed:
        sets[tuple(sorted({int(r) for r in ranks}))] = None
    return list(sets)


def context_sets(placement: Placement) -> list[tuple[int, ...]]:
    """List the rank sets of context parallelism, in the one order in which all ranks create their groups. Pure."""
    grids = [grid for layout in placement.layouts.values() if layout.cp > 1 for grid in layout.grid()]
    return list(dict.fromkeys(line for grid in grids for line in _lines(grid, CONTEXT)))


def exchange_sets(placement: Placement) -> list[tuple[int, ...]]:
    """List the rank sets among which rows travel to experts, in the one order in which all ranks create their groups.
    Pure.
    """
    parts = [
        grid.reshape([*expert_sizes(layout).values()])
        for layout in placement.layouts.values()
        for grid in layout.grid()
        if layout.ep > 1
    ]
    return list(dict.fromkeys(line for part in parts for line in _lines(part, part.ndim - 1)))


def balance_sets(placement: Placement, balanced: Collection[str]) -> list[tuple[int, ...]]:
    """List the rank sets that sum the choices of experts of modules with a loss on their balance, in the one order in
    which all ranks create their groups: the ranks of a module's last stage, of all instances, that have one
    tensor-parallel coordinate. Pure.
    """
    layouts = [layout for name, layout in placement.layouts.items() if name in balanced]
    grids = [layout.stage_grid(layout.pipeline.stages - 1).reshape(-1, layout.tp) for layout in layouts]
    return list(dict.fromkeys(line for grid in grids if len(grid) > 1 for line in _lines(grid, 0)))


def expert_sizes(layout: ModuleLayout) -> dict[str, int]:
    """Return the axes of the mesh of a module's experts: ranks with other experts are neighbours."""
    return {"dp_replicate": layout.dp_replicate, "efsdp": layout.expert_shards, "ep": layout.ep}


def mesh_sizes(layout: ModuleLayout) -> dict[str, int]:
    """Return the axes of a module's parameter mesh: context-parallel ranks are on the axis of shards."""
    return {"dp_replicate": layout.dp_replicate, "dp_shard": layout.shards, "tp": layout.tp}


def _lines(grid: np.ndarray, axis: int) -> list[tuple[int, ...]]:
    """List the ranks along one axis, one tuple per coordinate of the other axes."""
    return [tuple(int(r) for r in line) for line in grid.swapaxes(axis, -1).reshape(-1, grid.shape[axis])]
