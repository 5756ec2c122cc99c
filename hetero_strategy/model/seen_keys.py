"""The keys that the rows of a context-parallel rank see, and which ranks they come from; all ranks know it of each.

Example of 6 rows of one sequence on two ranks, causal, with the rows 0 1 5 on rank 0 and 2 3 4 on rank 1::

    rank 0 sees 0 1 2 3 4 5, lacks 2 3 4    it sends 0 1, receives 2 3 4, and has the rows 0 1 5 | 2 3 4
    rank 1 sees 0 1 2 3 4,   lacks 0 1      it sends 2 3 4, receives 0 1, and has the rows 2 3 4 | 0 1
    keys: places of the seen keys, in order: 0 1 3 4 5 2 on rank 0, 3 4 0 1 2 on rank 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
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


def seen_keys(
    starts: Int64[np.ndarray, "most total"],
    ends: Int64[np.ndarray, "most total"],
    dealt: Int64[np.ndarray, "ranks rows"],
    rank: int,
    segments: Segments | None,
    window: int | None,
) -> tuple[SeenKeys, Int64[np.ndarray, "keys"]]:
    """Return the keys that one rank's rows see, and the number of them before each row of the instance ``[total + 1]``.

    Args:
        starts, ends: intervals of keys that each row of the instance sees.
        dealt: rows of each rank, ascending.
        rank: context-parallel coordinate.
        segments: segments of the rank's rows, for kernels that run by segments; None: none.
        window: most keys that a row of a segment sees.
    """
    (ranks, own_rows), total = dealt.shape, dealt.size
    rank_of = np.empty(total, np.int64)
    rank_of[dealt] = np.arange(ranks)[:, None]
    lines = rank_of * (total + 1)  # for each rank the changes in the number of intervals around a key
    opened, closed = (np.bincount((lines + x).reshape(-1), minlength=ranks * (total + 1)) for x in (starts, ends))
    seen = np.cumsum((opened - closed).reshape(ranks, -1), axis=1)[:, :total] > 0
    seen[rank_of, np.arange(total)] = True
    lacked = seen & (rank_of != np.arange(ranks)[:, None])
    to, sent = np.nonzero(lacked[:, dealt[rank]])
    wanted = np.flatnonzero(lacked[rank])
    wanted = wanted[np.argsort(rank_of[wanted], kind="stable")]
    place = np.full(total, -1)
    place[dealt[rank]], place[wanted] = np.arange(own_rows), own_rows + np.arange(len(wanted))
    before = ragged.offsets(seen[rank])
    begins = lengths = turn = np.zeros(0, np.int64)
    if segments is not None:
        end = segments.first + segments.rows
        begins = segments.begin if window is None else np.maximum(segments.begin, segments.first + 1 - window)
        lengths = end - begins
        turn = np.repeat(segments.number, lengths)
    keys = SeenKeys(
        own=torch.from_numpy(sent),
        sent=_counts(to, ranks),
        received=_counts(rank_of[wanted], ranks),
        most=int(lacked.sum(axis=1).max()),
        keys=torch.from_numpy(place[seen[rank]]),
        ends=torch.from_numpy(before[dealt[rank] + 1]),
        of_segments=torch.from_numpy(place[ragged.expand(begins, lengths)]),
        turns=(torch.from_numpy(np.flatnonzero(turn == 0)), torch.from_numpy(np.flatnonzero(turn == 1))),
        offsets=torch.from_numpy(ragged.offsets(lengths).astype(np.int32)),
        extent=torch.empty(int(lengths.max(initial=0)), 0, dtype=torch.float32),
    )
    return keys, before


def _counts(ranks_of: np.ndarray, ranks: int) -> tuple[int, ...]:
    return tuple(np.bincount(ranks_of, minlength=ranks).tolist())
