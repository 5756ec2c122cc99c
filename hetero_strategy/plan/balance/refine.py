"""Exchange items between the most and the least loaded bins until the loads are as near as asked."""

from __future__ import annotations

import numpy as np

ROUNDS = 40
TRIES = 3
"""Rounds in a row that may leave the longest time as it is, each with other partners."""
WORK = 1 << 18
"""Pairs of items compared in a round: they set how many items of a bin are looked at."""
ITEMS = (16, 64)
"""Fewest and most of these, one of them nothing, whatever the work."""


def exchange(weights: np.ndarray, where: np.ndarray, speeds: np.ndarray, target: float) -> np.ndarray:
    """Swap pairs of items, or move single ones, between bins so that the largest ``load / speed`` falls.

    In a round the bin with the longest time meets the one with the shortest, the second the second, and so on; each
    pair makes the exchange that brings its two times nearest to each other, if that is a gain. The largest time never
    grows. Ends at the target, or where no partner helps the bin with the longest time. Of large bins only items spread
    evenly over their weights are looked at: their differences are many enough.

    Args:
        weights: of each item, never rising, int64 ``[n]``.
        where: bin of each item, int64 ``[n]``.
        speeds: float64 ``[bins]``.
        target: largest time that is good enough.

    Returns:
        Bin of each item, int64 ``[n]``.
    """
    bins = len(speeds)
    pairs = bins // 2
    if not pairs or not len(weights):
        return where
    load = np.bincount(where, weights=weights, minlength=bins)
    table = _table(weights, where, bins, min(max(int((WORK / pairs) ** 0.5), ITEMS[0]), ITEMS[1]))
    heavy = np.append(weights, 0).astype(np.float64)[table]  # item -1, nothing, weighs nothing
    failed = idle = 0
    for _ in range(ROUNDS):
        time = load / speeds
        by_time = np.argsort(time, kind="stable")
        if time[by_time[-1]] <= target or idle == TRIES:
            break
        high = by_time[: -pairs - 1 : -1]
        high = high[time[high] > target]
        low = np.roll(by_time[:pairs], -failed * (1 + pairs // 7))[: len(high)]
        fast, slow = speeds[high], speeds[low]
        ideal = (load[high] * slow - load[low] * fast) / (fast + slow)
        # |difference - ideal| of all items of the one with all of the other
        off = (heavy[high] - ideal[:, None])[:, :, None] - heavy[low][:, None, :]
        nearest = np.abs(off, out=off).reshape(len(high), -1).argmin(1)
        give, take = np.divmod(nearest, table.shape[1])
        moved = heavy[high, give] - heavy[low, take]
        gain = np.maximum((load[high] - moved) / fast, (load[low] + moved) / slow) < time[high]
        failed = 0 if gain[0] else failed + 1
        idle = 0 if gain.any() else idle + 1
        high, low, give, take, moved = high[gain], low[gain], give[gain], take[gain], moved[gain]
        load[high] -= moved
        load[low] += moved
        for each in (table, heavy):
            each[high, give], each[low, take] = each[low, take], each[high, give]
    where = np.append(where, 0)
    where[table] = np.arange(bins)[:, None]
    return where[:-1]


def _table(weights: np.ndarray, where: np.ndarray, bins: int, columns: int) -> np.ndarray:
    """Items of different weights of each bin, evenly chosen where there are too many, then at least one -1; int64
    ``[bins, columns]``.
    """
    # Items come by falling weight, and a stable sort keeps that within a bin. numpy sorts 16 bits by radix.
    items = np.argsort(where.astype(np.uint16) if bins <= 1 << 16 else where, kind="stable")
    bin_of, heavy = where[items], weights[items]
    different = np.empty(len(items), dtype=bool)
    different[0] = True
    np.not_equal(heavy[1:], heavy[:-1], out=different[1:])
    different[1:] |= bin_of[1:] != bin_of[:-1]
    items, bin_of = items[different], bin_of[different]
    counts = np.bincount(bin_of, minlength=bins)[:, None]
    chosen = np.arange(columns - 1)
    chosen = np.where(counts < columns, chosen, chosen * counts // (columns - 1))
    first = np.cumsum(counts)[:, None] - counts
    table = np.full((bins, columns), -1, dtype=np.int64)
    table[:, :-1] = np.where(chosen < counts, items[np.minimum(first + chosen, len(items) - 1)], -1)
    return table
