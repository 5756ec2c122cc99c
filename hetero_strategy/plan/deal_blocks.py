"""Cut sequences in blocks of rows, and deal these to ranks until the ranks are even. Pure, deterministic."""

from __future__ import annotations

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.plan.masks import Masks

BLOCKS = 16
"""Blocks of a rank's rows into which masks are cut that two chunks a rank do not make even."""
SIZES = (128, 16, 1)
"""Blocks are multiples of the largest of these sizes that fits."""
SWAPS = 32
"""Most exchanges of two blocks."""


def with_blocks(
    masks: Masks,
    sequences: tuple[np.ndarray, np.ndarray],
    shares: tuple[np.ndarray, np.ndarray, np.ndarray],
    pieces: tuple[np.ndarray, np.ndarray],
    uneven: np.ndarray,
    ranks: int,
    slack: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Cut some sequences of an instance in blocks.

    Args:
        masks: masks of the instance.
        sequences: first row and rows of each sequence.
        shares: sequence, rank, and number of rows that the rank has of it.
        pieces: first row and rank of the pieces of all sequences, by row.
        uneven: sequences to cut.
        slack: pairs by which a rank may exceed the mean.

    Returns:
        First row and rank of each piece, by row.
    """
    sequence, rank, rows = shares
    start, owner = pieces
    block = max(masks.total // ranks // BLOCKS, 1)
    block -= block % next(size for size in SIZES if size <= block)
    bounds, lengths = sequences
    kept = ~np.isin(np.searchsorted(bounds, start, "right") - 1, uneven)
    parts = [(start[kept], owner[kept])]
    for i in uneven.tolist():
        mine = sequence == i
        parts.append(_blocks(int(bounds[i]), int(lengths[i]), masks, rank[mine], rows[mine], block))
    start, owner = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(start, kind="stable")
    start, owner = start[order], owner[order]
    size = np.diff(np.append(start, masks.total))
    return start, _swapped(masks.pairs(np.append(start, masks.total)), owner, size == block, ranks, slack)


def _blocks(
    first: int, rows: int, masks: Masks, rank: np.ndarray, share: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut one sequence in blocks: by falling pairs they go to the ranks forth and back, in proportion to each rank's
    share; blocks at the ends of shares are cut.
    """
    start = np.arange(first, first + rows, block)
    size = np.diff(np.append(start, first + rows))
    work = masks.pairs(np.append(start, first + rows)) / size
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
    mean = load.sum() / ranks
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
