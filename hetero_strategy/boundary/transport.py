"""Carry rows across boundaries as sends, receives and copies: in parts (:class:`Transport`), or in one call that
autograd can differentiate (:func:`exchange`).

Rows and their gradients are two transfers of one :class:`~hetero_strategy.boundary.route.Route`, and a
:class:`Transport` runs either. The executor calls its parts where the schedule says; :func:`exchange` calls all of them
at once, forward for rows and in its autograd function's backward for gradients.

Every message is one contiguous tensor per pair of ranks and hop; nothing waits for a send, and no shape travels,
because the transfers fix all shapes. Rows that stay on their rank are copied at most once, and not at all if output and
input agree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hetero_strategy.boundary.route import Route, RowIndex, Rows, Transfer
from hetero_strategy.errors import ModelError


@dataclass(frozen=True)
class Channel:
    """A channel for the rows of one edge in one direction; the same on all its ranks.

    Args:
        group: process group of the ranks of both sides; None for one rank. Every rank starts a group's messages in the
            order of the schedule, so channels may share groups.
        second: process group of the second hop: the ranks of the receiving side.
        tag: number that separates channels of one group where tags exist (gloo); hops use ``2 * tag`` and
            ``2 * tag + 1``.
        width: width of a row.
        dtype: data type of a row, whatever the autocast state of either side.
        device: device of this rank.
    """

    group: dist.ProcessGroup | None
    second: dist.ProcessGroup | None
    tag: int
    width: int
    dtype: torch.dtype
    device: torch.device
    source: str = "the source"
    """Module that sends rows or gradients of rows; for error messages, like :attr:`target`."""
    target: str = "the target"
    """Module that receives the rows."""

    @cached_property
    def hops(self) -> tuple[Wire, Wire]:
        """Return the wires of the first and the second hop."""
        return Wire.of(self.group, 2 * self.tag, self.device), Wire.of(self.second, 2 * self.tag + 1, self.device)


class Wire(NamedTuple):
    """A process group with all that its messages have in common, looked up once and not for each message."""

    group: dist.ProcessGroup | None
    tag: int
    places: dict[int, int]
    """Global rank -> rank in the group."""
    joins: torch.device | None = None
    """Device on which the backend runs a batch of messages as one (NCCL); None: it runs each message by itself."""

    @staticmethod
    def of(group: dist.ProcessGroup | None, tag: int, device: torch.device) -> Wire:
        """Look up a group; a rank alone has none."""
        if group is None:
            return Wire(None, tag, {})
        joins = type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing
        places = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
        return Wire(group, tag, places, device if joins else None)


class WireMessage(NamedTuple):
    """A message to (``sends``) or from a peer, given by its global rank."""

    sends: bool
    tensor: torch.Tensor
    peer: int


def start_messages(wire: Wire, messages: Sequence[WireMessage]) -> list[dist.Work]:
    """Start a batch of messages; return the handle of each.

    This is :func:`torch.distributed.batch_isend_irecv` without its checks and lookups, which take longer on the host
    than the messages.
    """
    group, tag, places, joins = wire
    assert group is not None
    if joins is not None:
        group._start_coalescing(joins)
    works = []
    for sends, tensor, peer in messages:
        works.append((group.send if sends else group.recv)([tensor], places[peer], tag))
    return works if joins is None else [group._end_coalescing(joins)] * len(works)


Arriving = tuple[dist.Work, Rows | None, torch.Tensor]
"""An incoming message: its handle, its buffer's target rows (None if the buffer is in place), and its buffer."""
Sent = tuple[dist.Work, torch.Tensor, int | None]
"""An outgoing message: its handle, its rows, and their version when sent (None if others may write to their memory)."""


class Transport:
    """A runner of one step's transfers on this rank.

    For each transfer call, in this order: :meth:`give` on a rank that has rows, :meth:`start`, and :meth:`take` on a
    rank that needs rows.

    Args:
        transfers: channel and transfer of each number.
        index: row numbers that the transfers' :class:`Rows` point to, int64 on the device.
    """

    def __init__(self, transfers: Sequence[tuple[Channel, Transfer[Rows]]], index: torch.Tensor) -> None:
        self._transfers = transfers
        self.index = index
        self._counts = not torch.is_inference_mode_enabled()
        """Whether tensors count writes to them."""
        self._given: dict[int, torch.Tensor] = {}
        self._out: dict[int, torch.Tensor] = {}
        self._arriving: dict[int, list[Arriving]] = {}
        self._sent: dict[int, list[Sent]] = {}
        self._under_way = defaultdict[tuple[int, bool], deque[int]](deque)
        """Communicator -> its transfers in :attr:`_sent`, in the order of their messages."""

    def give(self, number: int, rows: torch.Tensor) -> None:
        """Hand over the rows ``[inputs, width]`` of a transfer, which the current stream makes."""
        channel, transfer = self._transfers[number]
        if rows.shape[0] != transfer.inputs:
            raise RuntimeError(f"the plan says {transfer.inputs} rows on this rank, the module made {rows.shape[0]}")
        if transfer.first.sends or transfer.local[0].size:
            self._given[number] = (rows if rows.dtype is channel.dtype else rows.to(channel.dtype)).contiguous()

    def start(self, batches: Collection[Sequence[int]]) -> None:
        """Start the first hop of transfers, in batches of messages of one channel each."""
        if batches:
            self._let_go()
        for numbers in batches:
            self._start(numbers, first=True)

    def take(self, number: int, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the rows ``[outputs, width]``, zero where none arrive; or add them to ``add_to`` in place.

        The rows are a tensor of their own, which may share the memory of rows that stay.
        """
        channel, transfer = self._transfers[number]
        rows = self._given.pop(number, None)
        if transfer.is_identity and rows is not None:
            return rows.detach() if add_to is None else add_to.add_(rows)
        second = transfer.second
        out = self._out.pop(number, None)
        adds = out is None and add_to is not None and not (second.sends or second.receives)
        if adds:
            out = add_to
        elif out is None:
            out = _memory(transfer.outputs, channel)
            if not transfer.is_complete:
                out.zero_()
        assert out is not None
        from_rows, to_rows = transfer.local
        if from_rows.size:
            assert rows is not None, "rows that stay on their rank were never given"
            self._place(out, to_rows, self._pick(rows, transfer.inputs, from_rows), adds)
        self._finish(number, out, adds)
        if second.sends or second.receives:
            self._given[number] = self._out[number] = out
            self._start([number], first=False)
            del self._given[number], self._out[number]  # the messages keep the rows that are still to be sent
            self._finish(number, out, adds)
        return out if adds or add_to is None else add_to.add_(out)

    def free(self, number: int) -> None:
        """Release the buffers of a transfer whose rows are known to have arrived (stream-ordered on CUDA)."""
        for work, rows, version in self._sent.pop(number, ()):
            work.wait()
            if version is not None and rows._version != version:
                raise self._changed(number)

    def drain(self) -> None:
        """Release all buffers once they are sent."""
        for number in list(self._sent):
            self.free(number)

    def _changed(self, number: int) -> ModelError:
        """Return an error that names modules that may have written to rows in flight, which a GPU would send."""
        sent, _ = self._transfers[number]
        read = {c.target for c, transfer in self._transfers if c.source == sent.source and transfer.is_identity}
        return ModelError(
            f"{' or '.join(sorted(read)) or sent.source} wrote in place into rows of {sent.source} while they were sent"
            f" to {sent.target}, which would get the changed ones on a GPU; let its first operation on them make new"
            " rows (x + y, not x += y; no inplace=True), and return no buffer that is written to again"
        )

    def _let_go(self) -> None:
        """Release buffers of finished messages, for each communicator the oldest first; nothing waits (gloo does not
        tell).
        """
        for numbers in self._under_way.values():
            while numbers:
                if numbers[0] in self._sent:  # else it was freed
                    for work, _, _ in self._sent[numbers[0]]:
                        if not work.is_completed():
                            break
                    else:
                        for _, rows, version in self._sent.pop(numbers[0]):
                            if version is not None and rows._version != version:
                                raise self._changed(numbers[0])
                        continue
                    break
                numbers.popleft()

    def _start(self, numbers: Sequence[int], *, first: bool) -> None:
        """Start the messages of a hop of transfers of one channel."""
        wire = self._transfers[numbers[0]][0].hops[not first]
        messages: list[WireMessage] = []
        owners: list[tuple[int, Rows | None]] = []
        """Transfer of each message, and the target of its rows (None: already in place)."""
        for number in numbers:
            channel, transfer = self._transfers[number]
            hop = transfer.first if first else transfer.second
            if hop.receives:
                out = self._out.get(number)
                if out is None and transfer.is_complete:
                    out = self._out[number] = _memory(transfer.outputs, channel)
                for peer, rows in hop.receives:
                    if out is not None and rows.at < 0:
                        buffer, place = self._pick(out, transfer.outputs, rows), None
                    else:
                        buffer, place = _memory(rows.size, channel), rows
                    messages.append(WireMessage(False, buffer, peer))
                    owners.append((number, place))
            outgoing = self._given[number] if hop.sends else None
            for peer, rows in hop.sends:
                assert outgoing is not None
                sent = self._pick(outgoing, transfer.inputs if first else transfer.outputs, rows)
                messages.append(WireMessage(True, sent, peer))
                owners.append((number, None))
            if first and hop.sends and not transfer.local[0].size:
                del self._given[number]  # the messages keep the rows that are still to be sent
        if not messages:
            return
        # The second hop sends rows of a buffer in which other rows arrive.
        own = first and self._counts
        for work, message, (number, place) in zip(start_messages(wire, messages), messages, owners, strict=True):
            if not message.sends:
                self._arriving.setdefault(number, []).append((work, place, message.tensor))
                continue
            if number not in self._sent:
                self._sent[number] = []
                self._under_way[id(self._transfers[number][0]), first].append(number)
            self._sent[number].append((work, message.tensor, message.tensor._version if own else None))

    def _finish(self, number: int, out: torch.Tensor, adds: bool) -> None:
        for work, rows, buffer in self._arriving.pop(number, ()):
            work.wait()
            if rows is not None:
                self._place(out, rows, buffer, adds)

    def _pick(self, rows: torch.Tensor, count: int, take: Rows) -> torch.Tensor:
        """Return some of ``count`` rows by number: a view if they are consecutive."""
        if take.at < 0:
            return rows if take.size == count else rows.narrow(0, take.first, take.size)
        return rows.index_select(0, self.index.narrow(0, take.at, take.size))

    def _place(self, out: torch.Tensor, place: Rows, values: torch.Tensor, adds: bool) -> None:
        if place.at < 0:
            part = out.narrow(0, place.first, place.size)
            part.add_(values) if adds else part.copy_(values)
            return
        index = self.index.narrow(0, place.at, place.size)
        out.index_add_(0, index, values) if adds else out.index_copy_(0, index, values)


def _memory(count: int, channel: Channel) -> torch.Tensor:
    return torch.empty((count, channel.width), dtype=channel.dtype, device=channel.device)


@dataclass(frozen=True)
class Boundary:
    """The arguments of :func:`exchange` on this rank.

    Args:
        route: rows to move, from :func:`hetero_strategy.boundary.route.route`.
        forward, backward: channels of rows and of their gradients. Without ``backward``, on all ranks alike, no
            gradients come back.
    """

    route: Route
    forward: Channel
    backward: Channel | None


def exchange(rows: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    """Turn source rows ``[n, width]`` of this rank into the target rows ``[m, width]`` that it needs; differentiable.

    A collective over the ranks of both sides, forward and, with a backward channel, backward: a rank whose rows need no
    gradient takes part too. A rank that is only a target passes no rows, and a rank that is only a source gets none.
    """
    if boundary.backward is None:
        return cross(boundary.route.forward, boundary.forward, rows.detach())
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    return _Exchange.apply(rows, boundary)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, boundary: Boundary) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.boundary = boundary
        moved = cross(boundary.route.forward, boundary.forward, rows)
        if boundary.route.forward.is_identity:
            return moved.view_as(rows)  # a view, so that autograd refuses writes in place into the caller's rows
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def]
        boundary = ctx.boundary
        return cross(boundary.route.backward, boundary.backward, gradient.contiguous()), None


def cross(transfer: Transfer, channel: Channel, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[type-arg]
    """Run one transfer from end to end on a rank of either side: ``[inputs, width] -> [outputs, width]``."""
    index = RowIndex()
    packed = index.pack(transfer)
    transport = Transport([(channel, packed)], torch.from_numpy(index.array()).to(channel.device))
    transport.give(0, rows)
    transport.start([[0]])
    moved = transport.take(0)
    transport.drain()
    return moved
