"""The keys that the rows of a context-parallel rank see, and which ranks they come from; all ranks know it of each.

Example of 6 rows of one sequence on two ranks, causal, with the rows 0 1 5 on rank 0 and 2 3 4 on rank 1::

    rank 0 sees 0 1 2 3 4 5, lacks 2 3 4    it sends 0 1, receives 2 3 4, and has the rows 0 1 5 | 2 3 4
    rank 1 sees 0 1 2 3 4,   lacks 0 1      it sends 2 3 4, receives 0 1, and has the rows 2 3 4 | 0 1
    keys: places of the seen keys, in order: 0 1 3 4 5 2 on rank 0, 3 4 0 1 2 on rank 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.model.inputs import Movable


@dataclass(eq=False)
class SeenKeys(Movable):
    """The K keys that a rank's rows see in layers of one window, among its R own rows and the rows that it receives."""

    own: Tensor
    """int64: own rows that other ranks see, rank by rank."""
    sent: tuple[int, ...]
    """Number of these for each rank."""
    received: tuple[int, ...]
    """Rows that arrive from each rank, after the own rows."""
    most: int
    """Most rows that any rank receives; 0: no rank lacks a key, and all skip the exchange."""
    keys: Tensor
    """int64 ``[K]``: places of the keys in the order of rows."""
    ends: Tensor
    """int64 ``[R]``: place after each own row's key among the K keys."""
    of_segments: Tensor
    """int64: places of the keys that each segment sees, end to end; none unless the context is by segments."""
    turns: tuple[Tensor, Tensor]
    """int64: positions in :attr:`of_segments` of the first segment of each sequence and of the second; no key is twice
    in a turn."""
    offsets: Tensor
    """int32 ``[segments + 1]``: first key of each segment, for kernels of packed sequences."""
    extent: Tensor
    """``[longest, 0]``, without data: most keys of a segment."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of a rank's rows that follow each other in one sequence."""

    first: Int64[np.ndarray, "segments"]
    """First row of each segment in the instance."""
    rows: Int64[np.ndarray, "segments"]
    begin: Int64[np.ndarray, "segments"]
    """First row of the segment's sequence."""
    number: Int64[np.ndarray, "segments"]
    """Number of the segment among those of its sequence on this rank."""


@dataclass(frozen=True, eq=False)
class DealtPieces:
    """Runs of an instance's rows that follow each other on one rank, ascending."""

    start: Int64[np.ndarray, "pieces"]
    """First row of each piece in the instance."""
    rank: Int64[np.ndarray, "pieces"]
    place: Int64[np.ndarray, "pieces"]
    """Place of this row among the rows of its rank."""
    ranks: int
    rows: int
    """Rows of each rank."""

    @staticmethod
    def of(dealt: Int64[np.ndarray, "ranks rows"]) -> DealtPieces:
        """Cut rows where the next one is on another rank; ``dealt``: rows of each rank, ascending."""
        rank, place = np.nonzero(np.diff(dealt, axis=1, prepend=-2) != 1)
        order = np.argsort(dealt[rank, place])
        rank, place = rank[order], place[order]
        return DealtPieces(dealt[rank, place], rank, place, *dealt.shape)

    @property
    def total(self) -> int:
        return self.ranks * self.rows

    def holding(self, rows: Int64[np.ndarray, "_rows"]) -> Int64[np.ndarray, "_rows"]:
        """Return the piece of each row of the instance."""
        return np.searchsorted(self.start, rows, "right") - 1


class KeyRuns(NamedTuple):
    """Runs of keys that rows of pieces see, in any order."""

    piece: Int64[np.ndarray, "runs"]
    start: Int64[np.ndarray, "runs"]
    end: Int64[np.ndarray, "runs"]


def causal_runs(pieces: DealtPieces, lengths: Int64[np.ndarray, "sequences"], window: int | None) -> KeyRuns:
    """Return the keys that causal rows of sequences see, at most ``window`` each."""
    bounds = ragged.offsets(lengths)
    row = np.unique(np.concatenate([pieces.start, bounds]))
    row, end = row[:-1], row[1:]
    begin = bounds[np.searchsorted(bounds, row, "right") - 1]
    return KeyRuns(pieces.holding(row), begin if window is None else np.maximum(begin, row + 1 - window), end)


def mask_runs(pieces: DealtPieces, intervals: Int32[np.ndarray, "2 most total"]) -> KeyRuns:
    """Return the keys of intervals, see :meth:`~hetero_strategy.mask.Slices.intervals`; those of rows that follow each
    other make one run where they meet.
    """
    starts, ends = intervals
    first = np.isin(np.arange(pieces.total), pieces.start)[1:]
    apart = np.ones(starts.shape, bool)
    apart[:, 1:] = first | (starts[:, 1:] > ends[:, :-1]) | (ends[:, 1:] < starts[:, :-1])
    apart[:, 1:] |= np.diff(ends > starts, axis=1)
    at = np.flatnonzero(apart)
    start, end = np.minimum.reduceat(starts.reshape(-1), at), np.maximum.reduceat(ends.reshape(-1), at)
    some = end > start
    row = at[some] % max(pieces.total, 1)
    return KeyRuns(pieces.holding(row), start[some].astype(np.int64), end[some].astype(np.int64))


def seen_keys(
    pieces: DealtPieces, runs: KeyRuns, rank: int, segments: Segments | None, window: int | None
) -> tuple[SeenKeys, Callable[[np.ndarray], np.ndarray]]:
    """Return the keys that one rank's rows see, and a function of numbers of rows in the instance that counts these
    keys before each.

    Args:
        pieces: rows of all ranks.
        runs: keys that these see.
        rank: context-parallel coordinate.
        segments: segments of the rank's rows, for kernels that run by segments; None: none.
        window: most keys that a row of a segment sees.
    """
    # Each rank's runs, apart from each other and with its own rows, cut where keys have other owners.
    own_end = np.append(pieces.start[1:], pieces.total)
    needer, start, end = ragged.merged(
        np.append(pieces.rank[runs.piece], pieces.rank),
        np.append(runs.start, pieces.start),
        np.append(runs.end, own_end),
    )
    first = pieces.holding(start)
    count = np.searchsorted(pieces.start, end, "left") - first
    of, piece = np.repeat(np.arange(len(start)), count), ragged.expand(first, count)
    needer, low, owner = needer[of], np.maximum(start[of], pieces.start[piece]), pieces.rank[piece]
    rows = np.minimum(end[of], own_end[piece]) - low
    place = pieces.place[piece] + low - pieces.start[piece]

    lacks = np.bincount(needer * pieces.ranks + owner, rows, pieces.ranks**2).astype(np.int64)
    lacks = lacks.reshape(pieces.ranks, -1)
    np.fill_diagonal(lacks, 0)
    leaves, mine = (owner == rank) & (needer != rank), needer == rank
    sent = ragged.expand(place[leaves], rows[leaves])

    low, rows, owner, place = (column[mine] for column in (low, rows, owner, place))
    lacked = np.flatnonzero(owner != rank)
    lacked = lacked[np.argsort(owner[lacked], kind="stable")]
    place[lacked] = pieces.rows + ragged.starts(rows[lacked])
    number, own = ragged.starts(rows), owner == rank

    def before(row: np.ndarray) -> np.ndarray:
        at = np.searchsorted(low, row, "right") - 1
        return np.where(at < 0, 0, number[at] + np.minimum(row - low[at], rows[at]))

    begins = lengths = turn = np.zeros(0, np.int64)
    if segments is not None:
        begins = segments.begin
        if window is not None:
            begins = np.maximum(begins, segments.first + 1 - window)
        lengths = segments.first + segments.rows - begins
        turn = np.repeat(segments.number, lengths)
    places = ragged.expand(place, rows)
    keys = SeenKeys(
        own=torch.from_numpy(sent),
        sent=tuple(lacks[:, rank].tolist()),
        received=tuple(lacks[rank].tolist()),
        most=int(lacks.sum(axis=1).max()),
        keys=torch.from_numpy(places),
        ends=torch.from_numpy(ragged.expand(number[own] + 1, rows[own])),
        of_segments=torch.from_numpy(places[ragged.expand(before(begins), lengths)]),
        turns=(torch.from_numpy(np.flatnonzero(turn == 0)), torch.from_numpy(np.flatnonzero(turn == 1))),
        offsets=torch.from_numpy(ragged.offsets(lengths).astype(np.int32)),
        extent=torch.empty(int(lengths.max(initial=0)), 0, dtype=torch.float32),
    )
    return keys, before
