"""Routes: which rows go from which rank to which rank, for one edge and one microbatch. Pure.

Sides. A *holder* set has rows, a *needer* set wants them. Forward, the source module's ranks hold and the target's
need; backward, the target's ranks hold gradient rows and the source's need them. The two are planned separately,
because backward is not forward transposed: where a side is replicated (tensor parallelism), forward takes a row from
any one replica, and backward gives the gradient to every replica.

Rows of an edge are grouped by (holder ranks, needer ranks): an instance's replicas on either side, or one rank alone
where a side shards its rows. Per group:

* a needer that also holds the row copies it locally;
* if some needers hold the rows, they send equal shares of them to the needers that do not;
* if none does, the rows enter the needers' replica set once, split evenly over its members (first hop), which then
  pass their share to the others (second hop: an all-gather inside the set).

Lower bound. A rank can use a row only if it has it, and a missing row can reach a rank only by arriving there. So
whatever the protocol, rows between ranks >= sum over ranks d of |need(d) - have(d)|; and rows entering a replica set
whose members have none of them >= the number of distinct rows it needs. Both are met with equality here: every
(row, rank) that is missing arrives exactly once, and every row enters such a set exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64

from hetero_strategy import ragged
from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.row_sharding import REPLICATED, Pieces, RowOrder, RowSharding
from hetero_strategy.plan.step_plan import EdgeBlocks


class Rows(NamedTuple):
    """A set of row numbers: ``size`` consecutive ones from ``first``, or, if ``at`` is not -1, ``size`` numbers from
    ``at`` on of an index array that all transfers of a step share.
    """

    first: int
    size: int
    at: int = -1


R = TypeVar("R", np.ndarray, Rows)
"""Representation of one rank's row numbers: int64 ``[rows]`` while routes are made, :class:`Rows` once packed."""


@dataclass(frozen=True)
class Side:
    """A module's rows on its ranks at one edge: global ranks and number of rows of each instance.

    By default every rank of an instance has all of its rows.

    Raises:
        LayoutError: ``sharding`` cannot divide the rows of an instance.
    """

    instances: Int64[np.ndarray, "instances ranks"]
    totals: Int64[np.ndarray, "instances"]
    sharding: RowSharding = REPLICATED
    order: RowOrder | None = None
    """Order of each instance's rows before they are split; None: as they are."""

    def __post_init__(self) -> None:
        multiple = self.sharding.parts
        if multiple > 1 and (left := self.totals % multiple).any():
            at = int(left.argmax())
            raise LayoutError(
                f"instance {at} has {self.totals[at]} rows, which is no multiple of {multiple}; samples are filled up,"
                f" items are not: give these a multiple of {multiple} rows, or let row_sharding say one part, with cp=1"
            )

    def seat(self, rank: int) -> tuple[int, int]:
        """Return (instance, part of its rows) of a rank; (-1, -1) if the rank is on no instance."""
        places = np.argwhere(self.instances == rank)
        if not len(places):
            return -1, -1
        return int(places[0, 0]), self.sharding.part_of(int(places[0, 1]), self.instances.shape[1])

    def rows_on(self, rank: int) -> int:
        """Return the number of the module's rows on the rank at this edge."""
        instance, _ = self.seat(rank)
        return 0 if instance < 0 else self.sharding.rows(int(self.totals[instance]))

    def local(self, rows: Int64[np.ndarray, "rows"], instance: int, part: int) -> Int64[np.ndarray, "local"]:
        """Return the members of an instance's ``rows`` that are in a part, as row numbers of the part."""
        places = rows if self.order is None else self.order.places(instance, rows)
        return self.sharding.local(places, int(self.totals[instance]), part)

    def cut(
        self,
        instance: Int64[np.ndarray, "runs"],
        start: Int64[np.ndarray, "runs"],
        rows: Int64[np.ndarray, "runs"],
    ) -> Pieces:
        """Cut runs of rows of instances so that every piece is in one part."""
        totals = self.totals[instance]
        if self.order is None:
            return self.sharding.cut(start, rows, totals)
        one = self.order.cut(instance, start, rows)
        two = self.sharding.cut(one.local, one.rows, totals[one.run])
        return two._replace(run=one.run[two.run], offset=one.offset[two.run] + two.offset)


@dataclass(frozen=True)
class Hop(Generic[R]):
    """The messages of one rank: peers ascending, row numbers in the order of travel."""

    sends: tuple[tuple[int, R], ...] = ()
    receives: tuple[tuple[int, R], ...] = ()

    @property
    def rows_sent(self) -> int:
        return sum(_count(rows) for _, rows in self.sends)


@dataclass(frozen=True)
class Transfer(Generic[R]):
    """A direction of a route as one rank runs it: ``inputs`` rows become ``outputs`` rows."""

    inputs: int
    outputs: int
    local: tuple[R, R]
    """Rows that stay on the rank: (row of the input, row of the output)."""
    first: Hop[R] = field(default_factory=Hop)
    """First hop: reads the input, writes the output."""
    second: Hop[R] = field(default_factory=Hop)
    """Second hop: reads the output after the first hop, writes the output."""

    @property
    def rows_sent(self) -> int:
        """Return the number of rows that this rank sends to other ranks."""
        return self.first.rows_sent + self.second.rows_sent

    @cached_property
    def is_identity(self) -> bool:
        """Return whether every row stays in place, so that the output is the input, without a copy."""
        whole = _count(self.local[0]) == self.inputs == self.outputs
        return whole and not self.rows_sent and all(_first(rows) == 0 for rows in self.local)

    @cached_property
    def is_complete(self) -> bool:
        """Return whether every output row is written."""
        arrived = sum(_count(rows) for hop in (self.first, self.second) for _, rows in hop.receives)
        return _count(self.local[0]) + arrived == self.outputs


@dataclass(frozen=True)
class Route:
    """The two directions of one edge in one microbatch, as one rank runs them."""

    forward: Transfer[np.ndarray]
    backward: Transfer[np.ndarray]


class RowIndex:
    """A collector of the row numbers of a step's transfers in one array; consecutive numbers need no place in it."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._size = 0

    def rows(self, numbers: Int64[np.ndarray, "rows"], *, always: bool = False) -> Rows:
        """Pack row numbers; ``always``: store them in the array, even if they are consecutive."""
        first = None if always else _first(numbers)
        if first is not None:
            return Rows(first, len(numbers))
        self._parts.append(numbers)
        self._size += len(numbers)
        return Rows(0, len(numbers), self._size - len(numbers))

    def pack(self, transfer: Transfer[np.ndarray]) -> Transfer[Rows]:
        """Pack the row numbers of a transfer."""
        hops = (
            Hop(*(tuple((peer, self.rows(rows)) for peer, rows in way) for way in (hop.sends, hop.receives)))
            for hop in (transfer.first, transfer.second)
        )
        local = (self.rows(transfer.local[0]), self.rows(transfer.local[1]))
        packed = Transfer(transfer.inputs, transfer.outputs, local, *hops)
        packed.is_identity, packed.is_complete  # noqa: B018 - computed now, not between two kernels
        return packed

    def array(self) -> Int64[np.ndarray, "rows"]:
        """Return all collected numbers."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._parts])


def route(blocks: EdgeBlocks, source: Side, target: Side, rank: int) -> Route:
    """Return the route of one edge and microbatch for one rank.

    On the target side rows are numbered among the slots that the edge fills on that rank, ascending: the forward output
    has exactly as many rows as :meth:`RowSharding.local` returns for it. Only runs that touch this rank's instances are
    expanded to rows, so the cost follows the rank's own rows.

    Args:
        blocks: runs of rows, ordered by (target instance, target start).
        source, target: rows of either side on their ranks.
        rank: global rank.
    """
    pieces, wants = _pieces(blocks, source, target, rank)
    has = source.rows_on(rank)
    return Route(pieces.transfer(rank, has, wants), pieces.turned().transfer(rank, wants, has))


def least_rows(blocks: EdgeBlocks, source: Side, target: Side, *, backward: bool = False) -> int:
    """Return the lower bound on rows between ranks in one direction (derivation in the module docstring)."""
    pieces, _ = _pieces(blocks, source, target, None)
    if backward:
        pieces = pieces.turned()
    lacking = (pieces.needers[:, :, None] != pieces.holders[:, None, :]).all(axis=2).sum(axis=1)
    return int((lacking * pieces.count).sum())


def _pieces(blocks: EdgeBlocks, source: Side, target: Side, rank: int | None) -> tuple[_Pieces, int]:
    """Return the rows that a rank holds or needs, and how many it needs; without a rank, all rows."""
    if rank is None:
        near = np.arange(len(blocks.rows))
    else:
        (i, source_part), (j, target_part) = source.seat(rank), target.seat(rank)
        near = np.flatnonzero((blocks.source_instance == i) | (blocks.target_instance == j))
    # Cut runs at borders of parts: first on the source's side, then on the target's.
    one = source.cut(blocks.source_instance[near], blocks.source_start[near], blocks.rows[near])
    start, from_ = blocks.target_start[near][one.run] + one.offset, blocks.source_instance[near][one.run]
    to = blocks.target_instance[near][one.run]
    two = target.cut(to, start, one.rows)
    from_, to = from_[two.run], to[two.run]
    from_part, length = one.part[two.run], two.rows
    held_rows, needed = one.local[two.run] + two.offset, start[two.run] + two.offset
    part, wants = np.arange(len(length)), 0
    if rank is not None:
        holds, needs = (from_ == i) & (from_part == source_part), (to == j) & (two.part == target_part)
        part, wants = np.flatnonzero(holds | needs), int(length[needs].sum())
        needed = ragged.starts(np.where(needs, length, 0))  # among this rank's slots; other ranks' slots are never read
    holder, needer = from_ * source.sharding.parts + from_part, to * target.sharding.parts + two.part
    return _Pieces.of(held_rows[part], needed[part], length[part], source, holder[part], target, needer[part]), wants


@dataclass(frozen=True)
class _Pieces:
    """The rows that one rank holds or needs, grouped by their holder ranks and needer ranks."""

    held: np.ndarray
    """Row number on the holders, int64 ``[rows]``."""
    needed: np.ndarray
    """Row number on the needers."""
    group: np.ndarray
    """Number of the (holders, needers) pair."""
    place: np.ndarray
    """Position of the row in its group."""
    count: np.ndarray
    """Rows of each group, int64 ``[groups]``."""
    holders: np.ndarray
    """Global ranks, int64 ``[groups, replicas]``."""
    needers: np.ndarray
    turn: np.ndarray
    """Replica that starts sending: it spreads load, and is the same number on every rank."""

    @staticmethod
    def of(
        held: np.ndarray,
        needed: np.ndarray,
        length: np.ndarray,
        source: Side,
        holder: np.ndarray,
        target: Side,
        needer: np.ndarray,
    ) -> _Pieces:
        """Build pieces from runs of rows ``[n]``: first row on either side, length, and number of the rank set on
        either side.
        """
        count_of = len(target.instances) * target.sharding.parts
        pairs, group = np.unique(holder * count_of + needer, return_inverse=True)
        order = np.argsort(group, kind="stable")
        count = np.bincount(group, weights=length, minlength=len(pairs)).astype(np.int64)
        place = np.empty_like(length)
        place[order] = ragged.starts(length[order]) - ragged.starts(count)[group[order]]
        one, other = np.divmod(pairs, count_of)
        return _Pieces(
            held=ragged.expand(held, length),
            needed=ragged.expand(needed, length),
            group=np.repeat(group, length),
            place=ragged.expand(place, length),
            count=count,
            holders=source.sharding.rank_sets(source.instances)[one],
            needers=target.sharding.rank_sets(target.instances)[other],
            turn=one // source.sharding.parts + other // target.sharding.parts,
        )

    def turned(self) -> _Pieces:
        """Swap the sides: ranks that need rows hold the rows' gradients."""
        return replace(self, held=self.needed, needed=self.held, holders=self.needers, needers=self.holders)

    def transfer(self, rank: int, inputs: int, outputs: int) -> Transfer[np.ndarray]:
        """Return the transfer of one rank from holders to needers (see the module docstring)."""
        g, size = self.group, self.needers.shape[1]
        both = (self.needers[:, :, None] == self.holders[:, None, :]).any(axis=2)
        having = both.sum(axis=1)
        # Rows of a group go out in equal shares: over the needers that have them, or else over all needers.
        column = np.argsort(~both, axis=1, kind="stable")
        share = _share(self.place, self.count[g], np.where(having > 0, having, size)[g])
        entry = self.needers[g, np.where(having[g] > 0, column[g, share], share)]
        fresh = having[g] == 0
        sender = np.where(fresh, self.holders[g, (share + self.turn[g]) % self.holders.shape[1]], entry)
        first: list[tuple[np.ndarray, ...]] = []
        second: list[tuple[np.ndarray, ...]] = []
        for k in range(size):
            needer = self.needers[g, k]
            # First hop: to the entry of a group without any rows, or from a needer that has the rows to one that lacks
            # them.
            moves = np.where(fresh, needer == entry, ~both[g, k])
            first.append(_moved(moves, sender, needer, rank, self.held, self.needed))
            if size > 1:
                second.append(_moved(fresh & (needer != entry), entry, needer, rank, self.needed, self.needed))
        both_sides = (self.holders == rank).any(axis=1) & (self.needers == rank).any(axis=1)
        stays = both_sides[g]
        return Transfer(inputs, outputs, (self.held[stays], self.needed[stays]), _hop(first), _hop(second))


def _share(place: np.ndarray, count: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the part in which each row falls if ``count`` rows are cut as by :func:`numpy.array_split`."""
    size, larger = count // parts, count % parts
    edge = larger * (size + 1)
    return np.where(place < edge, place // (size + 1), larger + (place - edge) // np.maximum(size, 1))


def _moved(
    moves: np.ndarray, sender: np.ndarray, needer: np.ndarray, rank: int, read: np.ndarray, write: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return (peer, row) of each row that a rank sends, and of each that it receives."""
    sent, got = np.flatnonzero(moves & (sender == rank)), np.flatnonzero(moves & (needer == rank))
    return needer[sent], read[sent], sender[got], write[got]


def _hop(moved: list[tuple[np.ndarray, ...]]) -> Hop[np.ndarray]:
    if not moved:
        return Hop()
    to, read, from_, write = (np.concatenate(columns) for columns in zip(*moved, strict=True))
    return Hop(_messages(to, read), _messages(from_, write))


def _messages(peer: np.ndarray, rows: np.ndarray) -> tuple[tuple[int, np.ndarray], ...]:
    """Build one message per peer, ascending."""
    if not len(peer):
        return ()
    if (peer == peer[0]).all():
        return ((int(peer[0]), rows),)
    order = np.argsort(peer.astype(np.uint16) if peer.max() < 1 << 16 else peer, kind="stable")
    bounds = np.flatnonzero(np.diff(peer[order])) + 1
    peers = peer[order][np.append(0, bounds)].tolist()
    return tuple(zip(peers, np.split(rows[order], bounds), strict=True))


def stage_route(source: Side, target: Side, rank: int) -> Route:
    """Return the route between two pipeline stages of one module: each instance's rows go from its ranks to its ranks.

    Both sides have the same instances and totals. If every rank has rows of its own, it sends one message to the rank
    with the same coordinate; only replicas need :func:`route`.
    """
    if source.instances.shape[1] > source.sharding.parts:
        instance = np.flatnonzero(source.totals)
        zero = np.zeros(len(instance), dtype=np.int64)
        blocks = EdgeBlocks(instance, zero, instance, zero, source.totals[instance])
        return route(blocks, source, target, rank)
    return Route(_straight(source, target, rank), _straight(target, source, rank))


def _straight(source: Side, target: Side, rank: int) -> Transfer[np.ndarray]:
    """Return the transfer of a rank with one seat a side: all its rows go to the same seat of the other stage."""
    (i, part), (j, place) = source.seat(rank), target.seat(rank)
    own_rows, needed = np.arange(source.rows_on(rank)), np.arange(target.rows_on(rank))
    to = int(target.instances[i, part]) if i >= 0 else rank
    from_ = int(source.instances[j, place]) if j >= 0 else rank
    stays = own_rows if i >= 0 and to == rank else own_rows[:0]
    sends = ((to, own_rows),) if to != rank and len(own_rows) else ()
    receives = ((from_, needed),) if from_ != rank and len(needed) else ()
    return Transfer(len(own_rows), len(needed), (stays, stays), Hop(sends, receives))


def _first(rows: np.ndarray | Rows) -> int | None:
    """Return the first of consecutive row numbers, 0 for none; None if they are not consecutive."""
    if isinstance(rows, Rows):
        return rows.first if rows.at < 0 else None
    if not len(rows):
        return 0
    straight = rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return int(rows[0]) if straight else None


def _count(rows: np.ndarray | Rows) -> int:
    return rows.size if isinstance(rows, Rows) else len(rows)
