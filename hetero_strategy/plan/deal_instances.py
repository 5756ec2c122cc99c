"""Deal the rows of several instances at once, in arrays; see :mod:`hetero_strategy.plan.deal_rows`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ContextOrder
from hetero_strategy.plan.deal_blocks import with_blocks
from hetero_strategy.plan.masks import Masks

EVEN = 0.01
"""Share of a rank's time by which ranks may differ before more of them share a sequence."""
TRIES = ((1, 1e9), (2, 0.05), (4, 0.05))
"""Times the fewest ranks that hold a sequence over which it is cut, and share of a rank's pairs by which it exceeds the
mean (1e9: without limit), in turn until ranks are even."""
KEYS_SEEN = 0.75
"""Share of the keys of an instance in blocks that a rank sees, in estimates."""
GAIN = 0.05
"""Least share of an instance's time that blocks save in estimates: they are cut instance by instance."""
MANY = 16
"""Sequences for each rank in an instance with many of them, whose first rounds deal more than one a rank."""
GROUPS = 4
"""Groups of heads, in estimates."""


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


@dataclass(frozen=True)
class Instances:
    """Instances whose sequences lie end to end."""

    lengths: np.ndarray
    instance: np.ndarray
    """Instance of each sequence, ascending."""
    totals: np.ndarray
    """Rows of each instance."""
    masks: Masks
    ranks: int
    cost: RowCost

    @cached_property
    def bounds(self) -> np.ndarray:
        return ragged.offsets(self.lengths)

    @cached_property
    def first(self) -> np.ndarray:
        return ragged.starts(self.totals)

    @cached_property
    def pairs(self) -> np.ndarray:
        """Pairs of each sequence."""
        return self.masks.pairs(self.bounds)

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

    @cached_property
    def causal(self) -> bool:
        """Whether each row sees all rows before it in its sequence, so that two chunks a rank are even."""
        some = np.count_nonzero(self.lengths)
        return all(len(mask.row) == some and mask.high.all() and not mask.low.any() for mask in self.masks.masks)

    @property
    def whole(self) -> Instances:
        """The instances, each as one sequence."""
        return replace(self, lengths=self.totals, instance=np.arange(len(self.totals)))

    def everything(self) -> Shares:
        """Return equal shares of all sequences on all ranks of instances that are one sequence."""
        some = np.flatnonzero(self.lengths)
        rank, sequence = np.tile(np.arange(self.ranks), len(some)), np.repeat(some, self.ranks)
        return Shares(sequence, rank, self.lengths[sequence] // self.ranks)

    def dealt(self, order: ContextOrder) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row and the rank of each piece."""
        whole = self.whole
        if order != "auto":
            return whole.cut(whole.everything(), order)
        if len(self.lengths) == len(self.totals):
            return whole.cut(whole.everything(), "auto")
        shares, time = self.spread()
        pieces = self.cut(shares, "auto")
        if not (worse := time > (1 + GAIN) * self.least).any():
            return pieces
        time = self.time(*pieces)
        other = whole.cut(whole.everything(), "zigzag")
        pieces, time = self.better(pieces, time, other, worse)
        keys = (KEYS_SEEN * self.ranks - 1) * self.totals / self.ranks
        even = self.cost.of(self.totals / self.ranks, self.share, keys)
        if (worse := worse & ((1 + GAIN) * even < time)).any():
            other = whole.cut(whole.everything(), "blocks", worse)
            pieces, _ = self.better(pieces, time, other, worse)
        return pieces

    def better(
        self,
        pieces: tuple[np.ndarray, np.ndarray],
        time: np.ndarray,
        other: tuple[np.ndarray, np.ndarray],
        some: np.ndarray,
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Return the faster pieces of two of each instance, among some of them, and the times."""
        others = self.time(*other)
        taken = some & (others < time)
        if not taken.any():
            return pieces, time
        start, rank = (
            np.concatenate([a[~taken[self.of_rows(pieces[0])]], b[taken[self.of_rows(other[0])]]])
            for a, b in zip(pieces, other, strict=True)
        )
        order = np.argsort(start, kind="stable")
        return (start[order], rank[order]), np.where(taken, others, time)

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the instance of each row."""
        return np.searchsorted(self.first, rows, "right") - 1

    def time(self, start: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the time of the busiest rank of each instance."""
        rows = (self.totals // self.ranks)[:, None]
        return np.asarray(self.cost.of(rows, *self.pairs_and_keys(start, rank))).max(axis=1)

    def pairs_and_keys(self, start: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Count the pairs of each rank's rows, and the keys that these see and the rank lacks, ``[instances, ranks]``.

        Args:
            start, rank: pieces, as :meth:`dealt` returns them.
        """
        edges, owner = np.append(start, self.masks.total), self.of_rows(start) * self.ranks + rank
        owners, rows = len(self.totals) * self.ranks, (self.totals // self.ranks)[:, None]
        pairs = np.bincount(owner, self.masks.pairs(edges), owners).reshape(-1, self.ranks)
        return pairs, self.masks.keys(edges, owner, owners).reshape(-1, self.ranks) - rows  # each row sees itself

    def spread(self) -> tuple[Shares, np.ndarray]:
        """Cut long sequences of each instance over more ranks until these are even or take longer.

        Returns also about the time of each instance.
        """
        best, fewest = self.whole_first(*TRIES[0], self.pairs, self.share, self.slack)
        again = fewest > (1 + EVEN) * self.least
        for times, uneven in TRIES[1:]:
            if not again.any():
                break
            kept = np.flatnonzero(again[self.instance])
            number = np.cumsum(again) - 1
            some = replace(
                self, lengths=self.lengths[kept], instance=number[self.instance[kept]], totals=self.totals[again]
            )
            work = self.pairs[kept], self.share[again], self.slack[again]
            shares, time = some.whole_first(times, uneven, *work)
            taken = again.copy()
            taken[again] = time < fewest[again]
            fewest[taken] = time[taken[again]]
            shares = Shares(kept[shares.sequence], shares.rank, shares.rows)
            stays, replaces = ~taken[self.instance[best.sequence]], taken[self.instance[shares.sequence]]
            best = Shares(*(np.concatenate([a[stays], b[replaces]]) for a, b in zip(best, shares, strict=True)))
            again = taken & (fewest > (1 + EVEN) * self.least)
        return best, fewest

    def whole_first(
        self, times: int, uneven: float, pairs: np.ndarray, share: np.ndarray, slack: np.ndarray
    ) -> tuple[Shares, np.ndarray]:
        """Choose the ranks of each sequence, most pairs first: as many equal shares as it needs if it is long, each on
        one of the least loaded ranks.

        Shares for which that rank has no room fill the rows that are left, those with most pairs a row where most pairs
        are left. Returns also about the time of each instance.

        Args:
            times, uneven: as in :data:`TRIES`.
            pairs, share, slack: as the properties, of which some instances take a part.
        """
        ranks, count = self.ranks, len(self.totals)
        rows_each, over = self.totals // ranks, np.minimum(2 * slack, uneven * share)
        needed = np.maximum(
            self.lengths / np.maximum(rows_each, 1)[self.instance],
            (pairs - over[self.instance]) / np.maximum(share, 1.0)[self.instance],
        )
        parts = np.where(needed > 1, np.minimum(np.ceil(times * needed), ranks), 1).astype(np.int64)
        parts = np.where(self.lengths > 0, np.minimum(parts, self.lengths), 0)
        sequence, number = np.repeat(np.arange(len(parts)), parts), ragged.within(parts)
        rows = (number + 1) * self.lengths[sequence] // parts[sequence]
        rows -= number * self.lengths[sequence] // parts[sequence]
        density, instance = pairs / np.maximum(self.lengths, 1), self.instance[sequence]
        load, room = np.zeros((count, ranks)), np.repeat(rows_each[:, None], ranks, axis=1)
        rank = _rounds(instance, rows, rows * density[sequence], load, room, share + over)
        loose = np.flatnonzero(rank < 0)
        loose = loose[np.lexsort((-density[sequence[loose]], instance[loose]))]
        excess = (load - share[:, None]) / np.maximum(room, 1)
        emptiest = np.argsort(excess, axis=1, kind="stable") + np.arange(count)[:, None] * ranks
        emptiest = emptiest.ravel()
        rooms, fills = ragged.offsets(room.ravel()[emptiest]), ragged.offsets(rows[loose])
        edges = np.unique(np.concatenate([rooms, fills]))
        at = edges[:-1]
        filled = sequence[loose[np.searchsorted(fills, at, "right") - 1]] if len(at) else sequence[:0]
        fits = rank >= 0
        shares = Shares(
            np.concatenate([sequence[fits], filled]),
            np.concatenate([rank[fits], emptiest[np.searchsorted(rooms, at, "right") - 1] % ranks]),
            np.concatenate([rows[fits], np.diff(edges)]),
        )
        return shares, self.expected(shares, density)

    def expected(self, shares: Shares, density: np.ndarray) -> np.ndarray:
        """Estimate the time of each instance, as if ranks saw all keys of their sequences and pairs were spread evenly
        over rows.
        """
        sequence, rank, rows = shares
        length = self.lengths[sequence]
        lacked = (length - rows) * (rows < length)
        owner, owners = self.instance[sequence] * self.ranks + rank, len(self.totals) * self.ranks
        of = (np.bincount(owner, x, owners) for x in (rows, density[sequence] * rows, lacked))
        return np.asarray(self.cost.of(*of)).reshape(-1, self.ranks).max(axis=1)

    def cut(self, shares: Shares, form: ContextOrder, some: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Cut each sequence for the ranks that share it, in two chunks a rank or, if their pairs are uneven, in blocks.

        For example, shares of 3 and 4 rows on ranks 0 and 1 make the pieces 1 2 2 2 of ranks 0 1 1 0.

        Args:
            form: ``blocks`` cuts all sequences, or those of some instances, in blocks.
        """
        by_sequence = np.argsort(shares.sequence, kind="stable")
        sequence, rank, rows = shares = Shares(*(column[by_sequence] for column in shares))
        count = np.bincount(sequence, minlength=len(self.lengths))
        begin, place = 2 * ragged.starts(count)[sequence], ragged.within(count)
        near = np.where(count[sequence] == 1, rows, rows // 2)
        at = np.concatenate([begin + place, begin + 2 * count[sequence] - 1 - place])
        size, owner, of = np.empty_like(at), np.empty_like(at), np.empty_like(at)
        size[at], owner[at], of[at] = np.append(near, rows - near), np.tile(rank, 2), np.tile(np.arange(len(rank)), 2)
        start = ragged.starts(size)
        if form == "blocks" or (form == "auto" and not self.causal):
            start, owner, size = self.evened(shares, start, owner, size, of, form, some)
        start, owner = start[size > 0], owner[size > 0]
        instance = self.of_rows(start)
        changes = np.append(True, (owner[1:] != owner[:-1]) | (instance[1:] != instance[:-1]))[: len(start)]
        return start[changes], owner[changes]

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
            work = np.bincount(of, self.masks.pairs(np.append(start, self.masks.total)), len(rank))
            even = rows * (self.pairs / np.maximum(self.lengths, 1))[sequence]
            uneven = np.unique(sequence[np.abs(work - even) > self.slack[self.instance[sequence]]])
        if not len(uneven):
            return start, owner, size
        of_piece, of_uneven = self.of_rows(start), self.instance[uneven]
        chosen = np.unique(of_uneven)
        kept = ~np.isin(of_piece, chosen)
        parts = [(start[kept], owner[kept])]
        # Pieces, shares and uneven sequences ascend by instance, so each instance has a slice of them.
        columns = (of_piece, self.instance[sequence], of_uneven)
        ends = zip(*(np.searchsorted(c, [chosen, chosen + 1]).T.tolist() for c in columns), strict=True)
        for i, slices in zip(chosen.tolist(), ends, strict=True):
            first, end = int(self.first[i]), int(self.first[i] + self.totals[i])
            of_pieces, of_shares, cut_ones = (slice(*bounds) for bounds in slices)
            some_rows = size[of_pieces] > 0
            cut = with_blocks(
                self.masks.part(first, end),
                (self.bounds[:-1] - first, self.lengths),
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
        return start, owner[order], np.diff(np.append(start, self.masks.total))


def _rounds(
    instance: np.ndarray,
    rows: np.ndarray,
    pairs: np.ndarray,
    load: np.ndarray,
    room: np.ndarray,
    limit: np.ndarray,
) -> np.ndarray:
    """Return the rank of each item of each instance, -1 if it does not fit, dealt in rounds: most pairs first to the
    least loaded rank.

    Each rank gets 1, 1, 2, 4, ... items in a round, forth and back.

    Args:
        instance, rows, pairs: of each item.
        load, room: pairs and free rows of each rank, ``[instances, ranks]``; changed.
        limit: most pairs of a rank of each instance.
    """
    order = np.argsort(-pairs, kind="stable")
    order = order[ragged.argsort_small(instance[order])]
    ranks, counts = room.shape[1], np.bincount(instance, minlength=len(room))
    begins, most = ragged.starts(counts)[:, None, None], int(counts.max(initial=0))
    rows, pairs = np.append(rows[order], 0), np.append(pairs[order], 0.0)
    rank, no_item = np.full(len(rows), -1), len(order)
    line, done, times = np.arange(len(room))[:, None], 0, max(1, most // (MANY * ranks))
    while done < most:
        number = done + np.arange(times * ranks).reshape(times, ranks)
        number[1::2] = number[1::2, ::-1]
        items = np.where(number < counts[:, None, None], begins + number, no_item)
        to = np.argsort(load, axis=1, kind="stable")
        rooms, loads = room[line, to], load[line, to]
        some_rows, some_pairs = rows[items], pairs[items]
        fits = np.cumsum(some_rows, axis=1) <= rooms[:, None]
        fits &= np.cumsum(some_pairs, axis=1) <= (limit[:, None] - loads)[:, None]
        rank[items] = np.where(fits, to[:, None], -1)
        load[line, to] = loads + (some_pairs * fits).sum(axis=1)
        room[line, to] = rooms - (some_rows * fits).sum(axis=1)
        done += times * ranks
        times *= 1 if done == ranks else 2  # a second round of one each
    of_item = np.empty(no_item, np.int64)
    of_item[order] = rank[:-1]
    return of_item
