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

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.plan.step_plan import EdgeBlocks, slots

Rows = np.ndarray
"""Row numbers in one rank's tensor, int64 ``[n]``."""


@dataclass(frozen=True)
class Side:
    """How the rows of one module lie on its ranks, at one edge.

    Args:
        instances: global ranks, int64 ``[instances, ranks per instance]``.
        totals: rows of each instance, int64 ``[instances]``.
        sharded: rank ``j`` of an instance has the ``j``-th of equal contiguous slices of the instance's rows
            (sequence parallelism); otherwise every rank of the instance has them all.
    """

    instances: np.ndarray
    totals: np.ndarray
    sharded: bool = False


@dataclass(frozen=True)
class Hop:
    """Messages of one rank: peers ascending, row numbers in the order in which they travel."""

    sends: tuple[tuple[int, Rows], ...] = ()
    receives: tuple[tuple[int, Rows], ...] = ()

    @property
    def rows_sent(self) -> int:
        return sum(len(rows) for _, rows in self.sends)


@dataclass(frozen=True)
class Transfer:
    """One direction of a route as one rank runs it: ``inputs`` rows become ``outputs`` rows."""

    inputs: int
    outputs: int
    local: tuple[Rows, Rows]
    """Rows that stay: (row of the input, row of the output)."""
    first: Hop
    """Reads the input, writes the output."""
    second: Hop
    """Reads the output after the first hop, writes the output."""

    @property
    def rows_sent(self) -> int:
        """Rows this rank sends to other ranks."""
        return self.first.rows_sent + self.second.rows_sent

    @property
    def is_identity(self) -> bool:
        """Every row stays where it is: the output is the input, without a copy."""
        rows_in, rows_out = self.local
        whole = len(rows_in) == self.inputs == self.outputs
        return whole and not self.rows_sent and np.array_equal(rows_in, rows_out) and _ascending(rows_in)

    @property
    def is_complete(self) -> bool:
        """Every output row is written."""
        arrived = sum(len(rows) for hop in (self.first, self.second) for _, rows in hop.receives)
        return len(self.local[0]) + arrived == self.outputs


@dataclass(frozen=True)
class Route:
    """Both directions of one edge in one microbatch, as one rank runs them."""

    forward: Transfer
    backward: Transfer


_HolderNeeder = tuple[tuple[int, ...], Rows, tuple[int, ...], Rows, int]
"""(holders, their row numbers, needers, their row numbers, turn)."""


@dataclass(frozen=True)
class _Group:
    """Rows with the same holders and the same needers on the forward way."""

    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    source_rows: Rows
    target_rows: Rows
    turn: int
    """Which replica starts sending: spreads load, the same number on every rank."""


def route(blocks: EdgeBlocks, source: Side, target: Side, rank: int) -> Route:
    """The route of one edge and microbatch for one rank.

    On the target side rows are numbered among the slots that the edge fills on that rank, ascending: the forward
    output has exactly :func:`local_slots` rows. Only groups that this rank is part of are expanded to rows, so the
    cost follows the rank's own rows.
    """
    mine = _slots_on(blocks, target, rank)
    forward, backward = [], []
    for g in _groups(blocks, source, target, rank):
        target_rows = np.searchsorted(mine, g.target_rows) if rank in g.target_ranks else g.target_rows
        forward.append((g.source_ranks, g.source_rows, g.target_ranks, target_rows, g.turn))
        backward.append((g.target_ranks, target_rows, g.source_ranks, g.source_rows, g.turn))
    has, wants = _rows_on(source, rank), len(mine)
    return Route(_transfer(forward, rank, has, wants), _transfer(backward, rank, wants, has))


def stage_route(source: Side, target: Side, rank: int) -> Route:
    """The route between two pipeline stages of one module: every instance's rows, from its ranks to its ranks.

    Both sides have the same instances and totals. Where every rank has rows of its own it is one message to the rank of
    the same coordinate; only replicas need :func:`route`.
    """
    per_instance = source.instances.shape[1]
    if per_instance > 1 and not source.sharded:
        instance = np.flatnonzero(source.totals)
        zero = np.zeros(len(instance), dtype=np.int64)
        blocks = EdgeBlocks(instance, zero, instance, zero, np.asarray(source.totals)[instance])
        return route(blocks, source, target, rank)
    has, wants = _seats(rank, source, target), _seats(rank, target, source)
    return Route(_straight(has, wants), _straight(wants, has))


@dataclass(frozen=True)
class _Seat:
    """A rank's rows in one stage, and who has the same coordinate in the other."""

    peer: int
    rows: Rows
    stays: bool


def _seats(rank: int, side: Side, other: Side) -> list[_Seat]:
    """The rank's seat in a stage, if it has one."""
    found = []
    for instance, shard in np.argwhere(side.instances == rank):
        peer = int(other.instances[instance, shard])
        rows = np.arange(int(side.totals[instance]) // side.instances.shape[1])
        found.append(_Seat(peer, rows, peer == rank))
    return found


def _straight(has: list[_Seat], wants: list[_Seat]) -> Transfer:
    """What a rank with a seat on either side moves: all rows of its seat, to or from the peer."""
    none = np.zeros(0, dtype=np.int64)
    stay = next((s.rows for s in has if s.stays), none)
    first = Hop(
        tuple((s.peer, s.rows) for s in has if not s.stays and len(s.rows)),
        tuple((s.peer, s.rows) for s in wants if not s.stays and len(s.rows)),
    )
    return Transfer(sum(len(s.rows) for s in has), sum(len(s.rows) for s in wants), (stay, stay), first, Hop())


def least_rows(blocks: EdgeBlocks, source: Side, target: Side, *, backward: bool = False) -> int:
    """Lower bound on rows between ranks in one direction (derivation in the module docstring)."""
    total = 0
    for group in _groups(blocks, source, target, None):
        holders, needers = group.source_ranks, group.target_ranks
        if backward:
            holders, needers = needers, holders
        total += len(set(needers) - set(holders)) * len(group.source_rows)
    return total


def local_slots(rows: Rows, side: Side, instance: int, shard: int) -> Rows:
    """Rows of an instance as row numbers of one of its ranks, int64: all of them, or its slice where sharded."""
    if not side.sharded:
        return rows
    size = int(side.totals[instance]) // side.instances.shape[1]
    mine = rows[(rows >= shard * size) & (rows < (shard + 1) * size)]
    return mine - shard * size


def _slots_on(blocks: EdgeBlocks, target: Side, rank: int) -> Rows:
    """Local row numbers on this rank that the edge fills, ascending; empty where the rank is not of the target."""
    where = np.argwhere(target.instances == rank)
    if not len(where):
        return np.zeros(0, dtype=np.int64)
    instance, shard = (int(x) for x in where[0])
    return local_slots(slots(blocks, instance), target, instance, shard)


def _rows_on(side: Side, rank: int) -> int:
    """Rows of the side's module that the rank has at this edge."""
    instance = np.flatnonzero((side.instances == rank).any(axis=1))
    if not len(instance):
        return 0
    total = int(side.totals[instance[0]])
    return total // side.instances.shape[1] if side.sharded else total


def _groups(blocks: EdgeBlocks, source: Side, target: Side, rank: int | None) -> Iterator[_Group]:
    """Rows by (source ranks, target ranks); with a rank, only the groups it is part of, for it to expand."""
    pairs = np.unique(np.stack([blocks.source_instance, blocks.target_instance], axis=1), axis=0)
    for i, j in pairs:
        if rank is not None and rank not in source.instances[i] and rank not in target.instances[j]:
            continue
        mine = (blocks.source_instance == i) & (blocks.target_instance == j)
        rows = blocks.rows[mine]
        source_rows = ragged.expand(blocks.source_start[mine], rows)
        target_rows = ragged.expand(blocks.target_start[mine], rows)
        for source_ranks, here, source_local in _shards(source, int(i), source_rows):
            for target_ranks, there, target_local in _shards(target, int(j), target_rows[here]):
                yield _Group(source_ranks, target_ranks, source_local[there], target_local, int(i + j))


def _shards(side: Side, instance: int, rows: Rows) -> Iterator[tuple[tuple[int, ...], np.ndarray, Rows]]:
    """(ranks that have the rows, which of ``rows`` they are, their row numbers on those ranks)."""
    ranks = tuple(int(r) for r in side.instances[instance])
    if not side.sharded or len(ranks) == 1:
        yield ranks, np.arange(len(rows)), rows
        return
    size = int(side.totals[instance]) // len(ranks)
    owner = rows // size
    for j, rank in enumerate(ranks):
        which = np.flatnonzero(owner == j)
        if len(which):
            yield (rank,), which, rows[which] - j * size


def _transfer(groups: list[_HolderNeeder], rank: int, inputs: int, outputs: int) -> Transfer:
    stay: list[tuple[Rows, Rows]] = []
    sends: tuple[dict[int, list[Rows]], ...] = (defaultdict(list), defaultdict(list))
    receives: tuple[dict[int, list[Rows]], ...] = (defaultdict(list), defaultdict(list))

    def message(hop: int, sender: int, receiver: int, read: Rows, write: Rows) -> None:
        if len(write) and sender == rank:
            sends[hop][receiver].append(read)
        if len(write) and receiver == rank:
            receives[hop][sender].append(write)

    for holders, held, needers, needed, turn in groups:
        both = [r for r in needers if r in holders]
        lacking = [r for r in needers if r not in holders]
        if rank in both:
            stay.append((held, needed))
        if not lacking:
            continue
        givers = both or needers
        for k, part in enumerate(np.array_split(np.arange(len(needed)), len(givers))):
            if both:
                for receiver in lacking:
                    message(0, both[k], receiver, held[part], needed[part])
                continue
            entry = needers[k]
            message(0, holders[(k + turn) % len(holders)], entry, held[part], needed[part])
            for receiver in needers:
                if receiver != entry:
                    message(1, entry, receiver, needed[part], needed[part])
    hops = [Hop(_messages(sends[h]), _messages(receives[h])) for h in (0, 1)]
    local = (_join([a for a, _ in stay]), _join([b for _, b in stay]))
    return Transfer(inputs, outputs, local, hops[0], hops[1])


def _messages(by_peer: dict[int, list[Rows]]) -> tuple[tuple[int, Rows], ...]:
    return tuple((peer, _join(by_peer[peer])) for peer in sorted(by_peer))


def _join(parts: list[Rows]) -> Rows:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _ascending(rows: Rows) -> bool:
    return len(rows) < 2 or bool((np.diff(rows) == 1).all())
