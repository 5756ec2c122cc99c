"""Deal the rows of several instances at once, in arrays; see :mod:`hetero_strategy.plan.deal_rows`. Pure.

An instance has sequences of 7, 3, 1 and 1 rows, and three ranks with room for 4 rows each. Sequences stand by falling
pairs; the last ones, with a fifth of the rows, are the tail::

    rows      7        3  1  1
    parts     2  2  3  3  1  1    three ranks share 7 rows, which have 28 of 36 pairs
    rank      0  1  2  ?  ?  ?    a round deals a part to each rank; "?" is the tail and what has no room
    room      2  2  1             rows that ranks 0, 1 and 2 lack: ranks 2, 0, 1 are filled end to end

So all ranks share the first sequence, ranks 2 and 0 the second, and rank 1 has the others whole. :meth:`Instances.cut`
then cuts shared sequences in two chunks a rank, one from either end. All instances of a step are columns of the same
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ContextOrder
from hetero_strategy.plan.deal_blocks import with_blocks
from hetero_strategy.plan.masks import Masks, causal_masks

EVEN = 0.01
"""Share of a rank's time by which ranks may differ before more of them share a sequence."""
WHOLE = 0.8
"""Share of these pairs by which a whole sequence may exceed a rank's, which other sequences fill up."""
TAIL = 0.2
"""Share of an instance's rows in the sequences with fewest pairs, which fill ranks up to equal rows."""
MANY = 6
"""Parts for each rank in an instance from which a round deals to half of the ranks, and later ones several to each."""
KEYS_SEEN = 0.75
"""Share of the keys of an instance in blocks that a rank sees, in estimates."""
GAIN = 0.05
"""Least share of an instance's time that blocks save in estimates: they are cut instance by instance."""
GROUPS = 4
"""Groups of heads, in estimates."""
STEPS = np.iinfo(np.uint16).max
"""Steps of size by which sequences are sorted: numpy sorts 16 bits by radix, which is fast and stable."""
CELLS = 1 << 18
"""Most places for parts in rounds of all instances that are dealt at once; one round may have more."""


class RowCost(NamedTuple):
    """The time of a rank, in any unit: its work on rows, then on pairs, while the keys that it lacks travel.

    They travel in :data:`GROUPS` groups of heads. The first of them arrives before attention begins.
    """

    row: float = 1.0
    pair: float = 1.0
    key: float = 0.0
    """For each key that the rank lacks."""

    def of(self, rows: np.ndarray | float, pairs: np.ndarray | float, keys: np.ndarray | float) -> np.ndarray | float:
        """Return the time of each rank."""
        work, travel = self.pair * pairs, self.key * keys
        return self.row * rows + np.maximum(work, travel * (1 - 1 / GROUPS)) + travel / GROUPS


class Shares(NamedTuple):
    """How many rows of a sequence a rank has, in any order."""

    sequence: np.ndarray
    rank: np.ndarray
    rows: np.ndarray


class RankPieces(NamedTuple):
    """Runs of rows that fill instances."""

    start: Int64[np.ndarray, "pieces"]
    """First row of each piece among the rows of all instances, ascending."""
    rank: Int64[np.ndarray, "pieces"]
    """Context-parallel rank that has the piece."""


@dataclass(frozen=True)
class Instances:
    """Instances whose sequences lie end to end; ``ranks`` divides the rows of each."""

    lengths: np.ndarray
    instance: np.ndarray
    """Instance of each sequence, ascending."""
    totals: np.ndarray
    """Rows of each instance."""
    ranks: int
    cost: RowCost
    make_masks: Callable[[], Masks] | None = None
    """Function that makes the masks of all rows. None: each row sees all rows before it in its sequence, so that two
    chunks a rank are even, and masks are rarely needed."""

    @cached_property
    def masks(self) -> Masks:
        """Masks of all rows."""
        return causal_masks(self.lengths) if self.make_masks is None else self.make_masks()

    @cached_property
    def total(self) -> int:
        return int(self.totals.sum())

    @cached_property
    def first(self) -> np.ndarray:
        return ragged.starts(self.totals)

    @cached_property
    def rows_each(self) -> np.ndarray:
        """Rows of a rank of each instance."""
        return self.totals // self.ranks

    @cached_property
    def pairs(self) -> np.ndarray:
        """Pairs of each sequence."""
        if self.make_masks is None:
            return np.asarray(self.lengths * (self.lengths + 1) / 2)
        return self.masks.pairs(ragged.offsets(self.lengths))

    @cached_property
    def share(self) -> np.ndarray:
        """Pairs of a rank of each instance if ranks are even."""
        return np.bincount(self.instance, self.pairs, len(self.totals)) / self.ranks

    @cached_property
    def least(self) -> np.ndarray:
        """Time of each instance if ranks are even and nothing travels."""
        return np.asarray(self.cost.of(self.totals / self.ranks, self.share, 0.0))

    @cached_property
    def slack(self) -> np.ndarray:
        """Pairs by which a rank of each instance may exceed the mean."""
        return EVEN * self.least / self.cost.pair if self.cost.pair else np.full(len(self.totals), np.inf)

    def among(self, chosen: np.ndarray) -> tuple[Instances, np.ndarray]:
        """Return some of the instances, and the numbers of their sequences."""
        kept, number = np.flatnonzero(chosen[self.instance]), np.cumsum(chosen) - 1
        totals = self.totals[chosen]
        make = None if self.make_masks is None else lambda: self.masks.part(self.first[chosen], totals)
        lengths, instance = self.lengths[kept], number[self.instance[kept]]
        some = replace(self, lengths=lengths, instance=instance, totals=totals, make_masks=make)
        some.__dict__["pairs"] = self.pairs[kept]  # else counted again, from masks
        return some, kept

    def dealt(self, order: ContextOrder) -> RankPieces:
        """Return the pieces of all ranks."""
        if order != "auto":
            return self.as_one(order)
        if np.array_equal(self.instance, np.arange(len(self.totals))):
            return self.cut(self.everything(), "auto")
        shares, time = self.spread()
        pieces, worse = self.cut(shares, "auto"), time > (1 + GAIN) * self.least
        if not worse.any():
            return pieces
        some, instance = self.among(worse)[0], self.of_rows(pieces.start)
        ahead, again = self.first[worse] - some.first, worse[instance]
        own = RankPieces(pieces.start[again] - ahead[(np.cumsum(worse) - 1)[instance[again]]], pieces.rank[again])
        best = some.fastest(own)
        best = best._replace(start=best.start + ahead[some.of_rows(best.start)])
        return _by_row(pieces, ~again, best, np.ones(len(best.start), bool))

    def fastest(self, pieces: RankPieces) -> RankPieces:
        """Return the pieces of each instance, or those of two other orders if its busiest rank then takes less time."""
        time = self.time(pieces)
        pieces, time = self.better(pieces, time, self.as_one("zigzag"))
        keys = (KEYS_SEEN * self.ranks - 1) * self.totals / self.ranks
        even = self.cost.of(self.totals / self.ranks, self.share, keys)
        if (slow := (1 + GAIN) * even < time).any():
            pieces, _ = self.better(pieces, time, self.as_one("blocks", slow))
        return pieces

    def as_one(self, order: ContextOrder, some: np.ndarray | None = None) -> RankPieces:
        """Deal each instance as if it were one sequence; ``some`` as in :meth:`cut`."""
        number = np.arange(len(self.totals))
        whole = replace(self, lengths=self.totals, instance=number, make_masks=lambda: self.masks)
        return whole.cut(whole.everything(), order, some)

    def everything(self) -> Shares:
        """Return equal shares of all sequences on all ranks of instances that are one sequence."""
        some = np.flatnonzero(self.lengths)
        rank, sequence = np.tile(np.arange(self.ranks), len(some)), np.repeat(some, self.ranks)
        return Shares(sequence, rank, self.lengths[sequence] // self.ranks)

    def better(self, pieces: RankPieces, time: np.ndarray, other: RankPieces) -> tuple[RankPieces, np.ndarray]:
        """Return the faster pieces of two of each instance, and the times."""
        others = self.time(other)
        kept, replaces = ((others >= time)[self.of_rows(pieces.start)], (others < time)[self.of_rows(other.start)])
        return _by_row(pieces, kept, other, replaces), np.minimum(time, others)

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the instance of each row."""
        return np.searchsorted(self.first, rows, "right") - 1

    def time(self, pieces: RankPieces) -> np.ndarray:
        """Return the time of the busiest rank of each instance."""
        return np.asarray(self.cost.of(self.rows_each[:, None], *self.pairs_and_keys(pieces))).max(axis=1)

    def pairs_and_keys(self, pieces: RankPieces) -> tuple[np.ndarray, np.ndarray]:
        """Count pairs of the rows of each rank, and keys that these see and it lacks, ``[instances, ranks]``."""
        edges, owner = np.append(pieces.start, self.total), self.of_rows(pieces.start) * self.ranks + pieces.rank
        owners = len(self.totals) * self.ranks
        pairs = np.bincount(owner, self.masks.pairs(edges), owners).reshape(-1, self.ranks)
        keys = self.masks.keys(edges, owner, owners).reshape(-1, self.ranks)
        return pairs, keys - self.rows_each[:, None]  # each row sees itself

    def spread(self) -> tuple[Shares, np.ndarray]:
        """Share sequences among the ranks of each instance, over twice the ranks where pairs are uneven otherwise.

        Returns also about the time of each instance.
        """
        shares, time, uneven = self.whole_first(1)
        if not uneven.any():
            return shares, time
        some, kept = self.among(uneven)
        finer, finer_time, _ = some.whole_first(2)
        taken = uneven.copy()
        taken[uneven] = finer_time < time[uneven]
        time[uneven] = np.minimum(finer_time, time[uneven])
        finer = finer._replace(sequence=kept[finer.sequence])
        stays, replaces = ~taken[self.instance[shares.sequence]], taken[self.instance[finer.sequence]]
        return Shares(*(np.concatenate([a[stays], b[replaces]]) for a, b in zip(shares, finer, strict=True))), time

    @cached_property
    def descending(self) -> np.ndarray:
        """Return the sequences with rows by instance, those with most pairs first, about."""
        order = _descending(self.instance, self.pairs)
        return order[self.lengths[order] > 0]

    def whole_first(self, times: int) -> tuple[Shares, np.ndarray, np.ndarray]:
        """Share the sequences of each instance among its ranks; see the head of this file.

        Args:
            times: ranks of a long sequence over the fewest that hold it.

        Returns:
            The shares, about the time of each instance, and whether its pairs are uneven.
        """
        ranks, count, order = self.ranks, len(self.totals), self.descending
        lengths, pairs, instance = self.lengths[order], self.pairs[order], self.instance[order]
        rows_each = self.rows_each[instance]
        ahead = np.cumsum(lengths) - lengths - self.first[instance]
        tail = (ahead >= (1 - TAIL) * self.totals[instance]) & (lengths <= rows_each)
        over = WHOLE * self.slack if times == 1 else np.zeros(count)
        needed = np.maximum(lengths / rows_each, (pairs - over[instance]) / np.maximum(self.share, 1)[instance])
        parts = np.where(tail, 1.0, np.ceil(times * needed))
        parts = np.minimum(parts, np.minimum(lengths, ranks)).astype(np.int64)
        of, number = np.repeat(np.arange(len(parts)), parts), ragged.within(parts)
        rows = (number + 1) * lengths[of] // parts[of] - number * lengths[of] // parts[of]
        load, room = np.zeros((count, ranks)), np.repeat(self.rows_each[:, None], ranks, axis=1)
        rank, large = np.full(len(of), -1), np.flatnonzero(~tail[of])
        if parts.max(initial=1) > 1:
            large = large[_descending(instance[of[large]], (pairs / parts)[of[large]])]
        rank[large] = _rounds(instance[of[large]], rows[large], (pairs / parts)[of[large]], load, room, self.share)
        fits, loose = np.flatnonzero(rank >= 0), np.flatnonzero(rank < 0)
        filler, filled, size = _fill(rows[loose], room, (load - self.share[:, None]) / np.maximum(room, 1))
        part = np.concatenate([fits, loose[filler]])
        shares = Shares(of[part], np.append(rank[fits], filled), np.append(rows[fits], size))
        # About the time: as if ranks saw all keys of their sequences, and rows of a sequence had equally many pairs.
        owner = instance[shares.sequence] * ranks + shares.rank
        columns = (pairs / lengths)[shares.sequence] * shares.rows, lengths[shares.sequence] - shares.rows
        busy, lacked = (np.bincount(owner, column, count * ranks).reshape(-1, ranks) for column in columns)
        time = np.asarray(self.cost.of(self.rows_each[:, None], busy, lacked)).max(axis=1)
        return shares._replace(sequence=order[shares.sequence]), time, busy.max(axis=1) > self.share + self.slack

    def cut(self, shares: Shares, form: ContextOrder, some: np.ndarray | None = None) -> RankPieces:
        """Cut each sequence for the ranks that share it, in two chunks a rank or, if their pairs are uneven, in blocks.

        For example, shares of 3 and 4 rows on ranks 0 and 1 make the pieces 1 2 2 2 of ranks 0 1 1 0.

        Args:
            form: ``blocks`` cuts all sequences, or those of some instances, in blocks.
        """
        by_sequence = ragged.argsort_small(shares.sequence)
        sequence, rank, rows = shares = Shares(*(column[by_sequence] for column in shares))
        count = np.bincount(sequence, minlength=len(self.lengths))
        chunks = np.where(count > 1, 2 * count, count)
        begin, shared = ragged.starts(chunks)[sequence], np.flatnonzero(count[sequence] > 1)
        near = begin + ragged.within(count)
        far = (2 * begin + chunks[sequence] - 1 - near)[shared]
        size, owner, of = (np.empty(int(chunks.sum()), np.int64) for _ in range(3))
        size[near], owner[near], of[near] = rows, rank, np.arange(len(rank))
        size[near[shared]] = rows[shared] // 2
        size[far], owner[far], of[far] = rows[shared] - rows[shared] // 2, rank[shared], shared
        start = ragged.starts(size)
        if form == "blocks" or (form == "auto" and self.make_masks is not None):
            start, owner, size = self.evened(shares, start, owner, size, of, form, some)
        start, owner = start[size > 0], owner[size > 0]
        begins = np.append(True, owner[1:] != owner[:-1])[: len(start)]
        begins[np.searchsorted(start, self.first[self.totals > 0])] = True
        return RankPieces(start[begins], owner[begins])

    def evened(
        self,
        shares: Shares,
        start: np.ndarray,
        owner: np.ndarray,
        size: np.ndarray,
        of: np.ndarray,
        form: ContextOrder,
        some: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut sequences in blocks whose chunks have uneven pairs, or all for ``blocks``."""
        sequence, rank, rows = shares
        if form == "blocks":
            uneven = np.unique(sequence if some is None else sequence[some[self.instance[sequence]]])
        else:
            work = np.bincount(of, self.masks.pairs(np.append(start, self.total)), len(rank))
            even = rows * (self.pairs / np.maximum(self.lengths, 1))[sequence]
            uneven = np.unique(sequence[np.abs(work - even) > self.slack[self.instance[sequence]]])
        if not len(uneven):
            return start, owner, size
        of_piece, of_uneven, bounds = self.of_rows(start), self.instance[uneven], ragged.starts(self.lengths)
        chosen = np.unique(of_uneven)
        kept = ~np.isin(of_piece, chosen)
        parts = [(start[kept], owner[kept])]
        # Pieces, shares and uneven sequences ascend by instance, so each instance has a slice of them.
        columns = (of_piece, self.instance[sequence], of_uneven)
        ends = zip(*(np.searchsorted(c, [chosen, chosen + 1]).T.tolist() for c in columns), strict=True)
        for i, slices in zip(chosen.tolist(), ends, strict=True):
            first = int(self.first[i])
            of_pieces, of_shares, cut_ones = (slice(*limits) for limits in slices)
            some_rows = size[of_pieces] > 0
            cut = with_blocks(
                self.masks.part(self.first[i : i + 1], self.totals[i : i + 1]),
                (bounds - first, self.lengths),
                (sequence[of_shares], rank[of_shares], rows[of_shares]),
                (start[of_pieces][some_rows] - first, owner[of_pieces][some_rows]),
                uneven[cut_ones],
                self.ranks,
                float(self.slack[i]),
            )
            parts.append((cut[0] + first, cut[1]))
        start, owner = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(start, kind="stable")
        start = start[order]
        return start, owner[order], np.diff(np.append(start, self.total))


def _descending(instance: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Sort by instance, then by falling pairs in :data:`STEPS` of the instance's largest square root.

    Args:
        instance: instance of each sequence, ascending.
    """
    begins = np.flatnonzero(np.diff(instance, prepend=-1))
    most = np.repeat(np.maximum.reduceat(pairs, begins), np.diff(begins, append=len(pairs)))
    share = pairs / np.maximum(most, 1.0)
    order = np.argsort((STEPS - STEPS * np.sqrt(share)).astype(np.uint16), kind="stable")
    return order[ragged.argsort_small(instance[order])]


def _rounds(
    instance: np.ndarray, rows: np.ndarray, pairs: np.ndarray, load: np.ndarray, room: np.ndarray, share: np.ndarray
) -> np.ndarray:
    """Deal parts of sequences in rounds; return the rank of each, or -1 if it had no room.

    A round deals a part to each rank, the first to the rank that would have least pairs if the rows that are left were
    spread over the free rows. If there are many parts, a round deals to half of the ranks, and later ones several parts
    to each, forth and back.

    Args:
        instance, rows, pairs: columns of the parts; instances ascend.
        load, room: pairs and free rows of each rank, ``[instances, ranks]``; changed.
        share: pairs of a rank of each instance if ranks are even.
    """
    ranks, counts, no_part = room.shape[1], np.bincount(instance, minlength=len(room)), len(instance)
    begins, most = ragged.starts(counts)[:, None, None], int(counts.max(initial=0))
    rows, pairs, rank = np.append(rows, 0), np.append(pairs, 0.0), np.full(no_part + 1, -1)
    width = max(1, ranks // 2) if most >= MANY * ranks else ranks
    line, done, times = np.arange(len(room))[:, None], 0, 1
    while done < most:
        number = done + np.arange(times * width).reshape(times, width)
        number[1::2] = number[1::2, ::-1]
        parts = np.where(number < counts[:, None, None], begins + number, no_part)
        density = (ranks * share - load.sum(axis=1)) / np.maximum(room.sum(axis=1), 1)
        to = np.argsort(load + room * density[:, None], axis=1, kind="stable")[:, :width]
        rooms, some_rows = room[line, to], rows[parts]
        fits = np.cumsum(some_rows, axis=1) <= rooms[:, None]
        rank[parts] = np.where(fits, to[:, None], -1)
        load[line, to] += (pairs[parts] * fits).sum(axis=1)
        room[line, to] = rooms - (some_rows * fits).sum(axis=1)
        done += times * width
        if done > ranks:
            times = min(2 * times, max(1, most // (MANY * width)), max(1, CELLS // (len(room) * width)))
    return rank[:-1]


def _fill(rows: np.ndarray, room: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill the ranks of each instance with parts end to end, first the ranks with the least excess.

    Args:
        rows: rows of each part, by instance.
        room, excess: free rows of each rank, and pairs beyond the mean for each of them, ``[instances, ranks]``.

    Returns:
        Number of the part, rank, and rows of each share.
    """
    by_excess = np.argsort(excess, axis=1, kind="stable")
    rooms, parts = ragged.offsets(np.take_along_axis(room, by_excess, 1).ravel()), ragged.offsets(rows)
    edges = np.concatenate([rooms, parts])
    order = np.argsort(edges, kind="stable")
    size, part = np.diff(edges[order]), np.cumsum(order >= len(rooms))[:-1] - 1
    place, some = np.arange(len(part)) - part - 1, size > 0
    return part[some], by_excess.ravel()[place[some]], size[some]


def _by_row(one: RankPieces, of_one: np.ndarray, other: RankPieces, of_other: np.ndarray) -> RankPieces:
    """Join some pieces of two orders."""
    start, rank = (np.concatenate([a[of_one], b[of_other]]) for a, b in zip(one, other, strict=True))
    order = np.argsort(start, kind="stable")
    return RankPieces(start[order], rank[order])
