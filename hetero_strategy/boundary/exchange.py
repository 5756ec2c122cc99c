"""How rows travel: one direction of a route as sends, receives and copies, and the autograd exchange made of it.

Every message is one contiguous tensor per pair of ranks and hop; nothing waits for a send, and no shape travels: the
route holds them all. Rows that stay on their rank are copied at most once, and not at all where output and input agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy.boundary.route import Hop, Route, Rows, Transfer
from hetero_strategy.model.inputs import host_index


@dataclass
class InFlight:
    """Sends that may still be running, with the buffers they read. Drain it once per step."""

    pending: dict[int, tuple[dist.Work, tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(self, work: dist.Work, buffers: Iterable[torch.Tensor]) -> int:
        """Keep buffers until their send is done; returns its number."""
        number = next(self._numbers)
        self.pending[number] = (work, tuple(buffers))
        return number

    def finish(self, number: int) -> None:
        """Wait for one send (stream-ordered on CUDA) and let its buffers go."""
        found = self.pending.pop(number, None)
        if found is not None:
            found[0].wait()

    def prune(self) -> None:
        """Let buffers of sends go that are done; gloo does not tell before it is waited for."""
        for number in [n for n, (work, _) in self.pending.items() if work.is_completed()]:
            self.finish(number)

    def drain(self) -> None:
        """Wait for all sends and let their buffers go."""
        for number in list(self.pending):
            self.finish(number)


@dataclass(frozen=True)
class Channel:
    """Where the messages of one edge and direction travel, in the order of its microbatches.

    Args:
        group: process group of the ranks of both sides; None where that is one rank. NCCL runs a group's messages one
            after another, so there every channel has a group of its own, and every hop.
        second: the same for the second hop.
        tag: tells channels apart where groups are shared (gloo); hops use ``2 * tag`` and ``2 * tag + 1``.
        in_flight: collects sends.
    """

    group: dist.ProcessGroup | None
    second: dist.ProcessGroup | None
    tag: int
    in_flight: InFlight


@dataclass(frozen=True)
class Format:
    """Rows on the wire; the same on every rank of an edge, whatever its autocast state."""

    width: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int = 0) -> torch.Tensor:
        """Uninitialised rows ``[rows, width]``."""
        return torch.empty(rows, self.width, dtype=self.dtype, device=self.device)


class Crossing:
    """One direction of one edge between one microbatch of each side, as this rank runs it.

    On a rank of the source: :meth:`send` once. On a rank of the target: :meth:`post` at any time before, then
    :meth:`receive` once. A rank of both does all three.
    """

    def __init__(self, transfer: Transfer, channel: Channel, form: Format) -> None:
        self.transfer = transfer
        self.channel = channel
        self.form = form
        self._rows: torch.Tensor | None = None
        self._arriving: list[tuple[dist.Work, Rows, torch.Tensor]] | None = None
        self._sent: list[int] = []

    def send(self, rows: torch.Tensor) -> None:
        """Let rows ``[inputs, width]`` leave; returns at once. Receives of the same crossing start with the sends."""
        if rows.shape[0] != self.transfer.inputs:
            raise RuntimeError(
                f"the plan says {self.transfer.inputs} rows on this rank, the module made {rows.shape[0]}"
            )
        rows = rows.to(self.form.dtype)
        if self.transfer.first.sends:
            receives = () if self._arriving is not None else self.transfer.first.receives
            arriving = self._start(Hop(self.transfer.first.sends, receives), rows, first=True)
            self._arriving = arriving if self._arriving is None else self._arriving
        if len(self.transfer.local[0]):
            self._rows = rows

    def post(self) -> bool:
        """Start receiving; says whether it has. A rank that also sends here starts both at the same time."""
        if self._arriving is None and not self.transfer.first.sends:
            self._arriving = self._start(Hop((), self.transfer.first.receives), None, first=True)
        return self._arriving is not None

    def receive(self, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the rows: ``[outputs, width]``, zero where nothing arrives; or add them to ``add_to`` in place."""
        transfer, rows = self.transfer, self._rows
        self.post()
        if transfer.is_identity and rows is not None:
            self._rows = None
            return rows if add_to is None else add_to.add_(rows)
        adds = add_to is not None and not (transfer.second.sends or transfer.second.receives)
        if adds:
            assert add_to is not None
            out = add_to
        else:
            shape = (transfer.outputs, self.form.width)
            make = torch.empty if transfer.is_complete else torch.zeros
            out = make(shape, dtype=self.form.dtype, device=self.form.device)
        from_rows, to_rows = transfer.local
        if len(from_rows):
            assert rows is not None, "rows that stay on their rank were never sent"
            _place(out, to_rows, _pick(rows, from_rows), adds)
        self._rows = None
        arriving, self._arriving = self._arriving or [], []  # its buffers are not kept
        self._finish(arriving, out, adds)
        self._finish(self._start(transfer.second, out, first=False), out, adds)
        return out if adds or add_to is None else add_to.add_(out)

    def settle(self) -> None:
        """The rows are known to have arrived: let the buffers they were sent from go."""
        for number in self._sent:
            self.channel.in_flight.finish(number)

    def _start(self, hop: Hop, rows: torch.Tensor | None, *, first: bool) -> list[tuple[dist.Work, Rows, torch.Tensor]]:
        if not hop.sends and not hop.receives:
            return []
        group = self.channel.group if first else self.channel.second
        tag = 2 * self.channel.tag + (not first)
        ops, buffers = [], []
        for peer, place in hop.receives:
            buffer = self.form.empty(len(place))
            buffers.append((place, buffer))
            ops.append(dist.P2POp(dist.irecv, buffer, peer, group, tag))
        outgoing = []
        for peer, take in hop.sends:
            assert rows is not None
            outgoing.append(_pick(rows, take).contiguous())
            ops.append(dist.P2POp(dist.isend, outgoing[-1], peer, group, tag))
        works = dist.batch_isend_irecv(ops)
        if len(works) == len(ops):
            sends = zip(works[len(buffers) :], outgoing, strict=True)
            self._sent += [self.channel.in_flight.add(work, (buffer,)) for work, buffer in sends]
            return [(work, place, buffer) for work, (place, buffer) in zip(works, buffers, strict=False)]
        if outgoing:  # NCCL returns one work for the whole batch
            self._sent.append(self.channel.in_flight.add(works[0], outgoing))
        return [(works[0], place, buffer) for place, buffer in buffers]

    @staticmethod
    def _finish(arriving: list[tuple[dist.Work, Rows, torch.Tensor]], out: torch.Tensor, adds: bool) -> None:
        for work, place, buffer in arriving:
            work.wait()
            _place(out, place, buffer, adds)


@dataclass(frozen=True)
class Edge:
    """One edge between one microbatch of each side, as :func:`exchange` needs it on this rank.

    Args:
        route: what moves.
        form: of the rows.
        forward, backward: where rows and gradients travel.
    """

    route: Route
    form: Format
    forward: Channel
    backward: Channel


def exchange(rows: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Source rows ``[n, width]`` of this rank to the target rows ``[m, width]`` that this rank needs; differentiable.

    A collective over the ranks of the edge's two modules, forward and backward.
    """
    return _Exchange.apply(rows, edge)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, edge: Edge) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.edge = edge
        moved = cross(Crossing(edge.route.forward, edge.forward, edge.form), rows)
        return moved.view_as(moved) if moved is rows else moved

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        edge = ctx.edge
        return cross(Crossing(edge.route.backward, edge.backward, edge.form), grad.contiguous()), None


def cross(crossing: Crossing, rows: torch.Tensor) -> torch.Tensor:
    """A crossing from end to end on a rank of either side: ``[inputs, width] -> [outputs, width]``."""
    crossing.post()
    crossing.send(rows)
    return crossing.receive()


def _pick(rows: torch.Tensor, take: Rows) -> torch.Tensor:
    """Rows by number: a view where they are consecutive."""
    if _consecutive(take):
        return rows.narrow(0, int(take[0]), len(take))
    return rows.index_select(0, host_index(take, rows))


def _place(out: torch.Tensor, place: Rows, values: torch.Tensor, adds: bool) -> None:
    if _consecutive(place):
        part = out.narrow(0, int(place[0]), len(place))
        part.add_(values) if adds else part.copy_(values)
    elif adds:
        out.index_add_(0, host_index(place, out), values)
    else:
        out.index_copy_(0, host_index(place, out), values)


def _consecutive(rows: Rows) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())
