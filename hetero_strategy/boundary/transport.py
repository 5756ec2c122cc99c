"""How rows travel: transfers as sends, receives and copies.

Every message is one contiguous tensor per pair of ranks and hop; nothing waits for a send, and no shape travels: the
transfers hold them all. Rows that stay on their rank are copied at most once, and not at all where output and input
agree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetero_strategy.boundary.route import Rows, Transfer
from hetero_strategy.errors import ModelError


@dataclass(frozen=True)
class Channel:
    """Where the rows of one edge travel in one direction, and what they are there; the same on all its ranks.

    Args:
        group: of the ranks of both sides; None where that is one rank. A group's messages are started in one order on
            every rank, that of the schedule, so channels may share groups.
        second: the same for the second hop: the ranks of the side that receives.
        tag: tells channels of one group apart where tags exist (gloo); hops use ``2 * tag`` and ``2 * tag + 1``.
        width: of a row.
        dtype: of a row, whatever the autocast state of either side.
        device: of this rank.
    """

    group: dist.ProcessGroup | None
    second: dist.ProcessGroup | None
    tag: int
    width: int
    dtype: torch.dtype
    device: torch.device
    source: str = "the source"
    """Module whose rows, or gradients of rows, travel; for messages of errors, as :attr:`target`."""
    target: str = "the target"
    """Module that gets them."""

    @cached_property
    def hops(self) -> tuple[Wire, Wire]:
        """What carries messages of the first hop, and of the second."""
        return Wire.of(self.group, 2 * self.tag), Wire.of(self.second, 2 * self.tag + 1)


class Wire(NamedTuple):
    """A group, the tag of its messages, and its ranks by global rank."""

    group: dist.ProcessGroup | None
    tag: int
    places: dict[int, int]

    @staticmethod
    def of(group: dist.ProcessGroup | None, tag: int) -> Wire:
        """Look the ranks up; none where nobody else is there."""
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        return Wire(group, tag, {rank: i for i, rank in enumerate(ranks)})


class _Message(dist.P2POp):
    """One whose rank in the group is known: torch looks it up anew for each, which takes as long as sending it."""

    def __new__(cls, *given: Any) -> _Message:
        return object.__new__(cls)

    def __init__(
        self, op: Any, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int, place: int
    ) -> None:
        self.op, self.tensor, self.peer, self.group, self.tag, self.group_peer = op, tensor, peer, group, tag, place


class Crossing(NamedTuple):
    """Transfers that are given or taken on another stream of the device than the one on which transfers are started.

    Messages travel on a third stream, whose memory they arrive in: no stream that computes waits for what another one
    gives, but where it takes that. Messages of one edge follow each other.
    """

    carries: torch.cuda.Stream
    transfers: Collection[int]
    """Their numbers."""


Arriving = tuple[dist.Work, Rows | None, torch.Tensor]
"""A message on its way here: its handle, its buffer, and the rows it is for, None where the buffer is where they go."""
Sent = tuple[dist.Work, torch.Tensor, int | None]
"""A message on its way from here: its handle, its rows, and how often their memory was written to before, None where
others may write to it."""


class Transport:
    """Runs transfers of one step on this rank.

    For each of them, in this order: :meth:`give` on a rank that has rows, :meth:`start`, and :meth:`take` on a rank
    that needs rows.

    Args:
        transfers: with the channel of each.
        index: int64 on the device, the row numbers that the transfers' :class:`Rows` point to.
        crossing: those that a third stream carries; None: there is one stream.
    """

    def __init__(
        self,
        transfers: Sequence[tuple[Channel, Transfer[Rows]]],
        index: torch.Tensor,
        crossing: Crossing | None = None,
    ) -> None:
        self._transfers = transfers
        self.index = index
        self._carries = None if crossing is None else crossing.carries
        self._crosses: Collection[int] = () if crossing is None else crossing.transfers
        self._counts = not torch.is_inference_mode_enabled()
        """Whether tensors know how often they were written to."""
        self._made: dict[int, torch.cuda.Event] = {}
        """Of what another stream carries: when it is there."""
        self._given: dict[int, torch.Tensor] = {}
        self._out: dict[int, torch.Tensor] = {}
        self._arriving: dict[int, list[Arriving]] = {}
        self._sent: dict[int, list[Sent]] = {}
        self._under_way = defaultdict[tuple[int, bool], deque[int]](deque)
        """Of every communicator: the transfers in :attr:`_sent`, in the order of their messages."""

    def give(self, number: int, rows: torch.Tensor) -> None:
        """Hand over the rows ``[inputs, width]`` of a transfer, which the current stream makes."""
        channel, transfer = self._transfers[number]
        if rows.shape[0] != transfer.inputs:
            raise RuntimeError(f"the plan says {transfer.inputs} rows on this rank, the module made {rows.shape[0]}")
        if transfer.first.sends or transfer.local[0].size:
            self._given[number] = rows.to(channel.dtype).contiguous()
            if number in self._crosses:
                self._made[number] = torch.cuda.current_stream().record_event()

    def start(self, batches: Collection[Sequence[int]]) -> None:
        """Start the first hop of transfers, in batches of messages of one channel each."""
        if batches:
            self._let_go()
        for numbers in batches:
            self._start(numbers, first=True)

    def take(self, number: int, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the rows ``[outputs, width]``, zero where nothing arrives; or add them to ``add_to`` in place."""
        channel, transfer = self._transfers[number]
        rows = self._given.pop(number, None)
        if number in self._crosses:
            self._cross(number, rows)
        if transfer.is_identity and rows is not None:
            return rows if add_to is None else add_to.add_(rows)
        second = transfer.second
        out = self._out.pop(number, None)
        adds = out is None and add_to is not None and not (second.sends or second.receives)
        if adds:
            out = add_to
        elif out is None:
            out = self._empty(channel, transfer)
        assert out is not None
        from_rows, to_rows = transfer.local
        if from_rows.size:
            assert rows is not None, "rows that stay on their rank were never given"
            self._place(out, to_rows, self._pick(rows, from_rows), adds)
        self._finish(number, out, adds)
        if second.sends or second.receives:
            self._given[number] = self._out[number] = out
            self._start([number], first=False)
            del self._given[number], self._out[number]  # the messages hold what is left to send
            self._finish(number, out, adds)
        return out if adds or add_to is None else add_to.add_(out)

    def free(self, number: int) -> None:
        """Let the buffers of a transfer go whose rows are known to have arrived (stream-ordered on CUDA)."""
        # The stream that carries rows has their memory again.
        with torch.cuda.stream(self._carries) if number in self._crosses else nullcontext():
            for work, rows, version in self._sent.pop(number, ()):
                work.wait()
                if version is not None and rows._version != version:
                    raise self._changed(number)

    def drain(self) -> None:
        """Let all buffers go once they are sent."""
        for number in list(self._sent):
            self.free(number)

    def _changed(self, number: int) -> ModelError:
        """Say which modules may have written to rows on their way: a GPU sends what is there when it comes to it."""
        sent, _ = self._transfers[number]
        read = {c.target for c, transfer in self._transfers if c.source == sent.source and transfer.is_identity}
        return ModelError(
            f"{' or '.join(sorted(read)) or sent.source} wrote in place into rows of {sent.source} while they were sent"
            f" to {sent.target}, which would get the changed ones on a GPU; let its first operation on them make new"
            " rows (x + y, not x += y; no inplace=True), and return no buffer that is written to again"
        )

    def _cross(self, number: int, rows: torch.Tensor | None) -> None:
        """The current stream takes over rows of another one, and the memory in which others arrive."""
        stream = torch.cuda.current_stream()
        if (made := self._made.pop(number, None)) is not None:
            stream.wait_event(made)
        arriving = [buffer for _, _, buffer in self._arriving.get(number, ())]
        for tensor in (rows, self._out.get(number), *arriving):
            if tensor is not None:
                tensor.record_stream(stream)

    def _let_go(self) -> None:
        """Let buffers go whose messages are known to be over, of every communicator oldest first; nothing waits (gloo
        does not say).
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
        ops: list[dist.P2POp] = []
        # Messages of one batch are of one edge.
        around = self._carries if first and numbers[0] in self._crosses else None
        # Of each message: its transfer, whether it leaves this rank, and where its rows go (None: they lie there).
        owners: list[tuple[int, bool, Rows | None]] = []
        for number in numbers:
            channel, transfer = self._transfers[number]
            hop = transfer.first if first else transfer.second
            if not (hop.receives or hop.sends):
                continue
            group, tag, places = channel.hops[not first]
            assert group is not None
            if hop.receives:
                out = self._out.get(number)
                if out is None and transfer.is_complete:
                    out = self._out[number] = _memory((transfer.outputs, channel.width), channel, around)
                for peer, rows in hop.receives:
                    if out is not None and rows.at < 0:
                        buffer, place = self._pick(out, rows), None
                    else:
                        buffer, place = _memory((rows.size, channel.width), channel, around), rows
                    ops.append(_Message(dist.irecv, buffer, peer, group, tag, places[peer]))
                    owners.append((number, False, place))
            for peer, rows in hop.sends:
                sent = self._leaving(number, rows, around)
                if not first and number in self._crosses and self._carries is not None:
                    sent.record_stream(self._carries)  # which waits for the message in its place
                ops.append(_Message(dist.isend, sent, peer, group, tag, places[peer]))
                owners.append((number, True, None))
            if first and hop.sends and not transfer.local[0].size:
                del self._given[number]  # the messages hold what is left to send
        if not ops:
            return
        if around is None:
            works = dist.batch_isend_irecv(ops)
        else:
            with torch.cuda.stream(around):
                works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # the backend gives one handle for all of them
            works = works * len(ops)
        for work, op, (number, leaves, place) in zip(works, ops, owners, strict=False):
            if leaves:
                if number not in self._sent:
                    self._sent[number] = []
                    self._under_way[id(self._transfers[number][0]), first].append(number)
                # The second hop sends rows of a buffer in which others arrive.
                own = first and self._counts
                self._sent[number].append((work, op.tensor, op.tensor._version if own else None))
            else:
                self._arriving.setdefault(number, []).append((work, place, op.tensor))

    def _finish(self, number: int, out: torch.Tensor, adds: bool) -> None:
        for work, rows, buffer in self._arriving.pop(number, ()):
            work.wait()
            if rows is not None:
                self._place(out, rows, buffer, adds)

    def _leaving(self, number: int, take: Rows, carries: torch.cuda.Stream | None) -> torch.Tensor:
        """Rows that are sent, on the stream that carries them where that is another one."""
        given = self._given[number]
        if carries is None:
            return self._pick(given, take)
        carries.wait_event(self._made[number])
        given.record_stream(carries)
        with torch.cuda.stream(carries):
            return self._pick(given, take)

    def _empty(self, channel: Channel, transfer: Transfer[Rows]) -> torch.Tensor:
        """Memory for the rows of a transfer, zero where not all of them come."""
        make = torch.empty if transfer.is_complete else torch.zeros
        return make((transfer.outputs, channel.width), dtype=channel.dtype, device=channel.device)

    def _pick(self, rows: torch.Tensor, take: Rows) -> torch.Tensor:
        """Rows by number: a view where they are consecutive."""
        if take.at < 0:
            return rows if take.size == rows.shape[0] else rows.narrow(0, take.first, take.size)
        return rows.index_select(0, self.index.narrow(0, take.at, take.size))

    def _place(self, out: torch.Tensor, place: Rows, values: torch.Tensor, adds: bool) -> None:
        if place.at < 0:
            part = out.narrow(0, place.first, place.size)
            part.add_(values) if adds else part.copy_(values)
            return
        index = self.index.narrow(0, place.at, place.size)
        out.index_add_(0, index, values) if adds else out.index_copy_(0, index, values)


def _memory(size: tuple[int, int], channel: Channel, stream: torch.cuda.Stream | None) -> torch.Tensor:
    """Memory for rows that arrive, of another stream than the current one where that is given."""
    if stream is None:
        return torch.empty(size, dtype=channel.dtype, device=channel.device)
    with torch.cuda.stream(stream):
        return torch.empty(size, dtype=channel.dtype, device=channel.device)
