"""The peer of the boundary: whole rows to a leader or to every rank, then each rank keeps its slice.

After Megatron-LM's MIMO (main, 2026-08). On other ranks (``pipeline_parallel/bridge_communicator.py``): rows go to the
first rank of each target instance, which broadcasts them in its tensor-parallel group, and with sequence parallelism
each rank keeps its slice; backward the slices are all-gathered, the first rank sends gradients to the source's last
rank, and that broadcasts them. On the same ranks (``models/mimo/comm/colocated_communicator.py``): rows are
all-gathered to every rank of the target instance, then sliced; backward is the adjoint. Only rows that the edge carries
are moved, which favours the peer: Megatron also broadcasts shapes and gathers text rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy import ragged
from hetero_strategy.boundary.route import Side, Transfer, least_rows, route
from hetero_strategy.boundary.transport import Channel, cross
from hetero_strategy.layout.row_sharding import REPLICATED
from hetero_strategy.plan.step_plan import EdgeBlocks, slots


class Moved(NamedTuple):
    """Rows, or bytes, between ranks."""

    forward: int
    backward: int

    def in_bytes(self, row_bytes: int) -> dict[str, int]:
        """Return bytes by direction."""
        return {way: rows * row_bytes for way, rows in self._asdict().items()}

    def over(self, bound: Moved) -> float | None:
        """Ratio of the sums; None where nothing has to move, and infinity is no figure."""
        return sum(self) / sum(bound) if sum(bound) else None


def refuses(source: Side, target: Side) -> bool:
    """Whether Megatron refuses the pair: partly shared ranks, or DP sizes of which neither divides the other."""
    first, second = set(source.instances.flat), set(target.instances.flat)
    dp = sorted((len(source.instances), len(target.instances)))
    return bool(first & second and first != second) or bool(dp[1] % dp[0])


@dataclass(frozen=True)
class MIMO:
    """Gather-then-slice on one edge."""

    blocks: EdgeBlocks
    source: Side
    target: Side

    @property
    def whole(self) -> Side:
        """The target as if every rank of an instance had all rows."""
        return replace(self.target, sharding=REPLICATED)

    @property
    def colocated(self) -> bool:
        return set(self.source.instances.flat) == set(self.target.instances.flat)

    def rows(self) -> Moved:
        """Rows between ranks, from the plan alone."""
        gathered = self._in_groups(self.target, self.blocks.target_instance) if self.target.sharding.parts > 1 else 0
        if self.colocated:
            sides = self.source, self.whole
            return Moved(least_rows(self.blocks, *sides), gathered + least_rows(self.blocks, *sides, backward=True))
        leaders = sum(len(m.source_rows) for m in self._messages() if m.sender != m.receiver)
        return Moved(
            leaders + self._in_groups(self.target, self.blocks.target_instance),
            gathered + leaders + self._in_groups(self.source, self.blocks.source_instance),
        )

    def on_rank(self, rank: int) -> OnRank:
        """To run it; a collective over the world."""
        return OnRank(self, rank)

    def _in_groups(self, side: Side, instance: np.ndarray) -> int:
        """Rows of a broadcast or all-gather inside every instance: each reaches all ranks but one."""
        per_instance = np.bincount(instance, weights=self.blocks.rows, minlength=len(side.instances))
        return int(per_instance.sum()) * (side.instances.shape[1] - 1)

    def _messages(self) -> list[_Message]:
        found = []
        b = self.blocks
        for i, j in np.unique(np.stack([b.source_instance, b.target_instance], axis=1), axis=0):
            mine = (b.source_instance == i) & (b.target_instance == j)
            target_rows = np.searchsorted(slots(b, int(j)), ragged.expand(b.target_start[mine], b.rows[mine]))
            sender, receiver = int(self.source.instances[i][-1]), int(self.target.instances[j][0])
            found.append(_Message(sender, receiver, ragged.expand(b.source_start[mine], b.rows[mine]), target_rows))
        return found


class _Message(NamedTuple):
    sender: int
    """Last rank of the source instance."""
    receiver: int
    """First rank of the target instance."""
    source_rows: np.ndarray
    target_rows: np.ndarray
    """Among the rows that the edge fills in the target instance, ascending."""


class OnRank:
    """Gather-then-slice on one rank, over the default process group's backend."""

    def __init__(self, plan: MIMO, rank: int) -> None:
        self.rank = rank
        self.messages = plan._messages()
        self.source = _Instance(plan.source, rank)
        self.target = _Instance(plan.target, rank)
        self.colocated = route(plan.blocks, plan.source, plan.whole, rank) if plan.colocated else None
        self.rows_here, self.slots_here, self.slices = 0, np.zeros(0, np.int64), [np.zeros(0, np.int64)]
        if self.target.number is not None:
            every = slots(plan.blocks, self.target.number)
            self.rows_here = len(every)
            shards = range(len(self.target.ranks)) if plan.target.sharding.parts > 1 else [0]
            self.slices = [np.flatnonzero(_in_shard(every, plan.target, self.target.number, s)) for s in shards]
            total = int(plan.target.totals[self.target.number])
            self.slots_here = plan.target.sharding.local(every, total, self.target.shard)
        self.sharded = plan.target.sharding.parts > 1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Source rows ``[n, width]`` -> rows of the slots that this rank has, ``[m, width]``."""
        whole = rows.new_empty(self.rows_here, rows.shape[1])
        if self.colocated is not None:
            whole = self._move(self.colocated.forward, rows)
        else:
            self._between_leaders(rows, whole, backward=False)
            self.target.broadcast(whole, self.target.first)
        return whole[self.slices[self.target.shard]] if self.sharded else whole

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of those slots -> gradients of the source rows."""
        whole = grad
        if self.sharded and self.target.number is not None:
            whole = grad.new_empty(self.rows_here, grad.shape[1])
            parts = [grad.new_empty(len(rows), grad.shape[1]) for rows in self.slices]
            parts[self.target.shard] = grad
            for part, rank in zip(parts, self.target.ranks, strict=True):  # an all-gather of unequal parts
                self.target.broadcast(part, rank)
            for rows, part in zip(self.slices, parts, strict=True):
                whole[rows] = part
        if self.colocated is not None:
            return self._move(self.colocated.backward, whole)
        back = grad.new_empty(self.source.rows, grad.shape[1])
        self._between_leaders(whole, back, backward=True)
        self.source.broadcast(back, self.source.last)
        return back

    def _between_leaders(self, rows: torch.Tensor, out: torch.Tensor, *, backward: bool) -> None:
        ops, arriving = [], []
        for m in self.messages:
            sender, receiver, read, write = m
            if backward:
                sender, receiver, read, write = receiver, sender, write, read
            if sender == receiver == self.rank:
                out[write] = rows[read]
            elif sender == self.rank:
                ops.append(dist.P2POp(dist.isend, rows[read], receiver))
            elif receiver == self.rank:
                buffer = rows.new_empty(len(write), rows.shape[1])
                ops.append(dist.P2POp(dist.irecv, buffer, sender))
                arriving.append((write, buffer))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        for write, buffer in arriving:
            out[write] = buffer

    def _move(self, transfer: Transfer, rows: torch.Tensor) -> torch.Tensor:
        assert self.colocated is not None
        world = dist.group.WORLD
        return cross(transfer, Channel(world, world, 2, rows.shape[1], rows.dtype, rows.device), rows)


class _Instance:
    """The instance of one side that a rank is part of, if any, with its group."""

    def __init__(self, side: Side, rank: int) -> None:
        self.number: int | None = None
        self.ranks: list[int] = []
        self.shard = self.rows = 0
        self._group = None
        for number, members in enumerate(side.instances.tolist()):
            group = dist.new_group(members) if len(members) > 1 else None
            if rank in members:
                self.number, self.ranks, self.shard, self._group = number, members, members.index(rank), group
                self.rows = int(side.totals[number])

    @property
    def first(self) -> int:
        return self.ranks[0] if self.ranks else -1

    @property
    def last(self) -> int:
        return self.ranks[-1] if self.ranks else -1

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Inside the instance."""
        if self._group is not None:
            dist.broadcast(tensor, source, group=self._group)


def _in_shard(rows: np.ndarray, side: Side, instance: int, shard: int) -> np.ndarray:
    if side.sharding.parts == 1:
        return np.ones(len(rows), bool)
    size = int(side.totals[instance]) // side.instances.shape[1]
    return rows // size == shard
