"""The one autograd exchange: moves rows along a route, and gradients along its way back.

Every message is one contiguous tensor per pair of ranks and hop; receives are posted before sends, nothing waits for
a send, and no shape travels: the route holds them all. Rows that stay on their rank are copied at most once, and not
at all where the output is the input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy.boundary.route import Hop, Route, Rows, Transfer
from hetero_strategy.model.inputs import host_index


@dataclass
class InFlight:
    """Sends that may still be running, with the buffers they read. Drain it once per step."""

    pending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def drain(self) -> None:
        """Wait for all sends (stream-ordered on CUDA) and let their buffers go."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


@dataclass(frozen=True)
class Edge:
    """One edge as this rank sees it in one microbatch.

    Args:
        route: what moves.
        width: row size.
        dtype: on the wire; every rank of the edge uses the same, whatever its autocast state.
        device: of the tensors.
        group: process group of the ranks of both modules; None where that is one rank.
        tag: distinguishes edges that share a group.
        in_flight: collects sends.
    """

    route: Route
    width: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None
    tag: int
    in_flight: InFlight

    def empty_source(self) -> torch.Tensor:
        """Stands for the source's rows on a rank that has none."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self.device)


def exchange(rows: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Source rows ``[n, width]`` of this rank to the target rows ``[m, width]`` that this rank needs; differentiable.

    A collective over the ranks of the edge's two modules, forward and backward.
    """
    return _Exchange.apply(rows, edge)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, edge: Edge) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.edge = edge
        moved = move(edge.route.forward, rows, edge)
        return moved.view_as(moved) if moved is rows else moved

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return move(ctx.edge.route.backward, grad.contiguous(), ctx.edge), None


def move(transfer: Transfer, rows: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Run one direction of a route on this rank: ``[inputs, width] -> [outputs, width]``."""
    if rows.shape[0] != transfer.inputs:
        raise RuntimeError(f"the plan says {transfer.inputs} rows on this rank, the module made {rows.shape[0]}")
    if transfer.is_identity:
        return rows
    shape = (transfer.outputs, edge.width)
    out = rows.new_empty(shape) if transfer.is_complete else rows.new_zeros(shape)
    arriving = _start(transfer.first, rows, edge)
    from_rows, to_rows = transfer.local
    if len(from_rows):
        _place(out, to_rows, _pick(rows, from_rows))
    _finish(arriving, out)
    _finish(_start(transfer.second, out, edge), out)
    return out


def _start(hop: Hop, rows: torch.Tensor, edge: Edge) -> list[tuple[dist.Work, Rows, torch.Tensor]]:
    if not hop.sends and not hop.receives:
        return []
    ops, buffers = [], []
    for peer, place in hop.receives:
        buffer = rows.new_empty(len(place), edge.width)
        buffers.append((place, buffer))
        ops.append(dist.P2POp(dist.irecv, buffer, peer, edge.group, edge.tag))
    outgoing = [_pick(rows, take).contiguous() for _, take in hop.sends]
    ops += [
        dist.P2POp(dist.isend, buffer, peer, edge.group, edge.tag)
        for (peer, _), buffer in zip(hop.sends, outgoing, strict=True)
    ]
    works = dist.batch_isend_irecv(ops)
    if len(works) == len(ops):
        edge.in_flight.pending += list(zip(works[len(buffers) :], outgoing, strict=True))
        return [(work, place, buffer) for work, (place, buffer) in zip(works, buffers, strict=False)]
    # NCCL returns one work for the whole batch.
    edge.in_flight.pending += [(works[0], buffer) for buffer in outgoing]
    return [(works[0], place, buffer) for place, buffer in buffers]


def _finish(arriving: list[tuple[dist.Work, Rows, torch.Tensor]], out: torch.Tensor) -> None:
    for work, place, buffer in arriving:
        work.wait()
        _place(out, place, buffer)


def _pick(rows: torch.Tensor, take: Rows) -> torch.Tensor:
    """Rows by number: a view where they are consecutive."""
    if _consecutive(take):
        return rows.narrow(0, int(take[0]), len(take))
    return rows.index_select(0, host_index(take, rows))


def _place(out: torch.Tensor, place: Rows, values: torch.Tensor) -> None:
    if _consecutive(place):
        out.narrow(0, int(place[0]), len(place)).copy_(values)
    else:
        out.index_copy_(0, host_index(place, out), values)


def _consecutive(rows: Rows) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())
