"""Deal the rows of an instance to its context-parallel ranks, for a given attention mask. Pure, deterministic.

All ranks get equally many rows. A sequence stays whole on one rank if its rows and pairs fit there, because its keys
then need not travel; a longer one is cut for the fewest ranks that hold it. Two chunks a rank, one from either end,
make its pairs even under a causal mask. Under other masks it is cut in blocks: each rank gets heavy and light ones, and
blocks change places until the ranks are even. (Cornstarch, arXiv:2503.11367, section 4.3, deals blocks without regard
to sequences, and ranks get unequal rows.)

Two sequences of 6 and 2 rows on two ranks, causal::

    row    0 1 2 3 4 5 | 6 7      pairs of rank 0: rows 0 1 4 5, 14 of 24 pairs; a chunk from either end of the first
    rank   0 0 1 1 0 0   1 1      pairs of rank 1: rows 2 3, and the second sequence whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.layout.row_sharding import RowOrder
from hetero_strategy.layout.spec import ContextOrder
from hetero_strategy.mask import Causal, Slices, Spans
from hetero_strategy.plan.greedy import deal, whole

BLOCKS = 16
"""Blocks of a rank's rows into which masks are cut that two chunks a rank do not make even."""
SIZES = (128, 16, 1)
"""A block has a multiple of the first of these that is not larger than it."""
EVEN = 0.01
"""Share of a rank's time by which ranks may differ before more of them share a sequence."""
SPREADS = (1, 2, 4, 8)
"""Times the fewest ranks that hold a sequence over which it is cut, in turn until ranks are even."""
KEYS_SEEN = 0.75
"""Share of the keys of a cut sequence that a rank sees, in estimates."""
SWAPS = 32
"""Most exchanges of two blocks."""
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


@dataclass(frozen=True)
class Dealing:
    """How the rows of a module's instances are dealt to their context-parallel ranks.

    Args:
        ranks: context-parallel ranks of an instance.
        order, cost: see :func:`deal_rows`.
    """

    ranks: int
    order: ContextOrder = "auto"
    cost: RowCost = RowCost()  # noqa: RUF009 - immutable

    def of(self, lengths: Sequence[Int64[np.ndarray, "_sequences"]]) -> RowOrder:
        """Return the order of rows of instances with sequences of these lengths, for causal attention."""
        dealt = [deal_rows(x, Causal().slices(x, Spans.none()), self.ranks, self.cost, self.order) for x in lengths]
        totals, count = (
            np.array(list(map(f, x)), np.int64) for f, x in ((np.sum, lengths), (lambda d: len(d.rank), dealt))
        )
        start, rank = (np.concatenate(column) for column in zip(*dealt, strict=True))
        return RowOrder.of(totals, count, start, rank)


class RankPieces(NamedTuple):
    """Runs of rows that fill an instance."""

    start: Int64[np.ndarray, "pieces"]
    """First row of each piece, ascending."""
    rank: Int64[np.ndarray, "pieces"]
    """Context-parallel rank that has the piece."""


class _Shares(NamedTuple):
    """How many rows of a sequence a rank has, by sequence."""

    sequence: np.ndarray
    rank: np.ndarray
    rows: np.ndarray


def deal_rows(
    lengths: Int64[np.ndarray, "sequences"],
    mask: Slices,
    ranks: int,
    cost: RowCost = RowCost(),  # noqa: B008 - immutable
    order: ContextOrder = "auto",
) -> RankPieces:
    """Return the pieces of an instance's rows for each of its ranks, equally many rows a rank.

    Args:
        lengths: rows of each sequence; ``ranks`` divides their sum.
        mask: what the rows see.
        cost: time of a rank, of which the busiest has the least.
        order: ``zigzag``: two chunks a rank, one from either end; ``blocks``: blocks of equal pairs, without regard to
            sequences; ``auto``: whole sequences first, or one of the other two if the busiest rank takes less time.
    """
    total = np.array([int(lengths.sum())])
    if not total[0]:
        return RankPieces(np.zeros(0, np.int64), np.zeros(0, np.int64))
    everything = _Shares(np.zeros(ranks, np.int64), np.arange(ranks), np.full(ranks, total[0] // ranks))
    if order != "auto":
        return _cut(total, mask, ranks, everything, order, 0.0)
    pairs = mask.work(ragged.offsets(lengths))
    least = cost.row * total[0] / ranks + cost.pair * float(pairs.sum()) / ranks
    slack = EVEN * least / cost.pair if cost.pair else np.inf
    best, fewest = everything, np.inf
    for spread in SPREADS if len(lengths) > 1 else ():
        shares = _whole_first(lengths, pairs, ranks, slack, spread)
        expected = _expected(shares, lengths, pairs, ranks, cost)
        if expected >= fewest:
            break
        best, fewest = shares, expected
        if expected <= (1 + EVEN) * least:
            break
    chosen = _cut(lengths if len(lengths) > 1 else total, mask, ranks, best, "auto", slack)
    time = _time(chosen, mask, ranks, cost)
    if len(lengths) > 1 and time > (1 + EVEN) * least:
        even = cost.of(*(float(n) / ranks for n in (total[0], pairs.sum(), (KEYS_SEEN * ranks - 1) * total[0])))
        for form in ("zigzag", "blocks") if even < time else ("zigzag",):
            other = _cut(total, mask, ranks, everything, form, slack)
            if (needed := _time(other, mask, ranks, cost)) < time:
                chosen, time = other, needed
    return chosen


def _time(pieces: RankPieces, mask: Slices, ranks: int, cost: RowCost) -> float:
    """Return the time of the rank that takes longest."""
    pairs, keys = pairs_and_keys(pieces, mask, ranks)
    return float(np.max(cost.of(mask.total / ranks, pairs, keys)))


def pairs_and_keys(
    pieces: RankPieces, mask: Slices, ranks: int
) -> tuple[Float64[np.ndarray, "ranks"], Int64[np.ndarray, "ranks"]]:
    """Count the pairs of each rank's rows, and the keys that these see and the rank lacks."""
    edges = np.append(pieces.start, mask.total)
    pairs = np.bincount(pieces.rank, mask.work(edges), minlength=ranks)
    block, runs = mask.block_keys(edges)
    rank, start, end = ragged.merged(pieces.rank[block], runs[:, 0], runs[:, 1])
    seen = np.bincount(rank, end - start, minlength=ranks).astype(np.int64)
    return pairs, seen - mask.total // ranks  # each row sees itself


def _expected(shares: _Shares, lengths: np.ndarray, pairs: np.ndarray, ranks: int, cost: RowCost) -> float:
    """Return about :func:`_time` of shares, before they are cut."""
    sequence, rank, rows = shares
    whole = lengths[sequence]
    lacked = np.maximum(KEYS_SEEN * whole - rows, 0) * (rows < whole)
    seen = (pairs / np.maximum(lengths, 1))[sequence] * rows
    return float(np.max(cost.of(*(np.bincount(rank, x, minlength=ranks) for x in (rows, seen, lacked)))))


def _whole_first(lengths: np.ndarray, pairs: np.ndarray, ranks: int, slack: float, spread: int) -> _Shares:
    """Choose the ranks of each sequence, most pairs first: as many as it needs if it is long, or the least loaded one.

    Sequences for which that rank has no room fill the rows that are left, those with most pairs a row where most pairs
    are left.
    """
    each, share = int(lengths.sum()) // ranks, float(pairs.sum()) / ranks
    room, load = np.full(ranks, each), np.zeros(ranks)
    needed = np.ceil(spread * np.maximum(lengths / each, (pairs - slack) / max(share, 1.0)))
    falling = np.lexsort((-lengths, -pairs))
    falling = falling[lengths[falling] > 0]
    long = needed[falling] > 1
    loose, found = list[int](), list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
    for i in falling[long].tolist():
        count = min(int(needed[i]), ranks)
        rows = np.diff(np.arange(count + 1) * lengths[i] // count)
        some = np.argsort(np.where(room >= rows.max(), load, np.inf), kind="stable")[:count]
        if (room[some] < rows).any():
            loose.append(i)
            continue
        found.append((np.full(count, i), some, rows))
        room[some] -= rows
        load[some] += rows * (pairs[i] / lengths[i])
    short = falling[~long]
    weights = whole(np.concatenate([pairs[short], load]), ranks)
    rank = deal(weights[: len(short)], ranks, weights[len(short) :])[0]
    by_rank = np.argsort(rank, kind="stable")
    short, rank = short[by_rank], rank[by_rank]
    first = np.searchsorted(rank, np.arange(ranks))
    rows, work = (ragged.offsets(column[short]) for column in (lengths, pairs))
    fits = (rows[1:] - rows[first[rank]] <= room[rank]) & (work[1:] - work[first[rank]] + load[rank] <= share + slack)
    found.append((short[fits], rank[fits], lengths[short[fits]]))
    room -= np.bincount(rank[fits], lengths[short[fits]], ranks).astype(np.int64)
    load += np.bincount(rank[fits], pairs[short[fits]], ranks)
    ends = np.concatenate([np.array(loose, np.int64), short[~fits]])
    ends = ends[np.argsort(-pairs[ends] / lengths[ends], kind="stable")]
    needy = np.argsort((load - share) / np.maximum(room, 1), kind="stable")
    rooms, fills = ragged.offsets(room[needy]), ragged.offsets(lengths[ends])
    edges = np.unique(np.concatenate([rooms, fills]))
    at = edges[:-1]
    found.append(
        (ends[np.searchsorted(fills, at, "right") - 1], needy[np.searchsorted(rooms, at, "right") - 1], np.diff(edges))
    )
    return _Shares(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _cut(
    lengths: np.ndarray, mask: Slices, ranks: int, shares: _Shares, form: ContextOrder, slack: float
) -> RankPieces:
    """Cut each sequence for the ranks that share it, in two chunks a rank or, if their pairs are uneven, in blocks."""
    by_sequence = np.argsort(shares.sequence, kind="stable")
    sequence, rank, rows = (column[by_sequence] for column in shares)
    count = np.bincount(sequence, minlength=len(lengths))
    bounds = ragged.offsets(lengths)
    alone = count[sequence] == 1
    place = ragged.within(count)
    # Chunks: the first of each rank, ascending, then the second of each, descending.
    near = np.where(alone, rows, rows // 2)
    at = np.lexsort((np.r_[place, -place], np.repeat([0, 1], len(place)), np.tile(sequence, 2)))
    size, owner, of = np.r_[near, rows - near][at], np.tile(rank, 2)[at], np.tile(sequence, 2)[at]
    start = ragged.starts(size)
    block = 0
    if form != "zigzag":
        share = np.tile(np.arange(len(rank)), 2)[at]
        work = np.bincount(share, mask.work(np.append(start, mask.total)), minlength=len(rank))
        density = np.bincount(sequence, work, minlength=len(lengths)) / np.maximum(lengths, 1)
        uneven = np.abs(work - rows * density[sequence]) > slack
        uneven = np.unique(sequence[~alone]) if form == "blocks" else np.unique(sequence[uneven])
        if len(uneven):
            each = int(lengths.sum()) // ranks
            block = max(each // BLOCKS, 1)
            block -= block % next(size for size in SIZES if size <= block)
            kept = ~np.isin(of, uneven)
            parts = [(start[kept], owner[kept])]
            for i in uneven.tolist():
                mine = sequence == i
                parts.append(_blocks(int(bounds[i]), int(lengths[i]), mask, rank[mine], rows[mine], block))
            start, owner = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(start, kind="stable")
            start, owner = start[order], owner[order]
            size = np.diff(np.append(start, mask.total))
            owner = _swapped(mask.work(np.append(start, mask.total)), owner, size == block, ranks, slack)
    start, owner = start[size > 0], owner[size > 0]
    changes = np.append(True, owner[1:] != owner[:-1])
    return RankPieces(start[changes], owner[changes])


def _blocks(
    first: int, rows: int, mask: Slices, rank: np.ndarray, share: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut one sequence in blocks: by falling pairs they go to the ranks forth and back, so often as each rank's share
    is large; blocks at the ends of shares are cut.
    """
    start = np.arange(first, first + rows, block)
    size = np.diff(np.append(start, first + rows))
    work = mask.work(np.append(start, first + rows)) / size
    ends = ragged.offsets(share)
    count: np.ndarray = np.diff(np.rint(ends * (len(start) / rows)).astype(np.int64))
    turn, number = ragged.within(count), np.repeat(np.arange(len(rank)), count)
    dealt = np.lexsort((np.where(turn % 2, -number, number), (turn + 0.5) / count[number]))
    of_block = np.empty_like(start)
    of_block[np.argsort(-work, kind="stable")] = number[dealt]
    line = np.argsort(of_block, kind="stable")  # blocks rank by rank, where shares end exactly
    begins = ragged.offsets(size[line])
    edges = np.unique(np.concatenate([begins, ends]))[:-1]
    at = np.searchsorted(begins, edges, "right") - 1
    return start[line][at] + edges - begins[at], rank[np.searchsorted(ends, edges, "right") - 1]


def _swapped(work: np.ndarray, rank: np.ndarray, movable: np.ndarray, ranks: int, slack: float) -> np.ndarray:
    """Exchange blocks of equal rows between the ranks with most and least pairs until they are even."""
    load, rank = np.bincount(rank, work, minlength=ranks), rank.copy()
    mean = int(work.sum()) / ranks  # exact, so that all machines agree
    for _ in range(SWAPS):
        most, fewest = int(load.argmax()), int(load.argmin())
        gap = load[most] - load[fewest]
        if load[most] <= mean + slack / 8:
            break
        heavy, light = (np.flatnonzero(movable & (rank == r)) for r in (most, fewest))
        if not len(heavy) or not len(light):
            break
        light = light[np.argsort(work[light], kind="stable")]
        wanted = work[heavy] - gap / 2
        near = np.clip(np.searchsorted(work[light], wanted), 0, len(light) - 1)
        best = int(np.abs(work[light][near] - wanted).argmin())
        a, b = heavy[best], light[near[best]]
        moved = work[a] - work[b]
        if not 0 < moved < gap:
            break
        rank[a], rank[b] = fewest, most
        load[most] -= moved
        load[fewest] += moved
    return rank
