"""Balancing algorithms as OrchMLLM (arXiv:2503.23830) prints them, to compare with; lengths only, whatever the cost."""

from __future__ import annotations

import numpy as np

from hetero_strategy.plan.balance.greedy import deal, descending

TOLERANCE = 1.0
"""Of :func:`tolerant`, in mean lengths: the paper sets it by hand."""


def padded_ascending(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Algorithm 2: the least whole bound on items x longest under which an ascending greedy needs at most ``bins``.

    As printed but for two slips: the search starts with the longest item's bound, not the shortest's (which nothing
    might fit), and what is returned belongs to the bound found, not to the last one tried.

    Returns:
        Bin of each item, int64 ``[n]``.
    """
    order = np.argsort(lengths, kind="stable")
    rising = np.ascontiguousarray(lengths[order], dtype=np.int64).data
    n = len(order)

    def least_batches(bound: int) -> list[int] | None:
        """Starts of the batches; None where there are more than ``bins``."""
        starts: list[int] = []
        at = 0
        while at < n:
            if len(starts) == bins:
                return None
            starts.append(at)
            # items x last item's length grows with every item: bisect for the last that fits
            low, high = at + 1, n
            while low < high:
                middle = (low + high + 1) // 2
                if (middle - at) * rising[middle - 1] <= bound:
                    low = middle
                else:
                    high = middle - 1
            at = low
        return starts

    left = int(lengths.max(initial=0))
    right = left * (n // bins + 1)
    while left < right:
        middle = (left + right) // 2
        if least_batches(middle) is not None:
            right = middle
        else:
            left = middle + 1
    where = np.zeros(n, dtype=np.int64)
    starts = least_batches(right) or []
    where[order] = np.repeat(np.arange(len(starts)), np.diff([*starts, n]))
    return where


def tolerant(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Algorithm 4: falling lengths, each to the bin with the least sum; where sums differ by less than a tolerance, to
    the one with the least sum of squares.

    The printed comparison is not transitive, so a priority queue's top depends on how it is built. Here the top is the
    bin with the least squares among those within the tolerance of the least sum. One step per item: for comparison.

    Returns:
        Bin of each item, int64 ``[n]``.
    """
    where = np.zeros(len(lengths), dtype=np.int64)
    tolerance = TOLERANCE * float(lengths.mean()) if len(lengths) else 0.0
    sums, squares = np.zeros(bins), np.zeros(bins)
    for item in descending(lengths).tolist():
        near = np.flatnonzero(sums - sums.min() < tolerance) if tolerance else [int(sums.argmin())]
        chosen = near[int(squares[near].argmin())]
        length = float(lengths[item])
        sums[chosen] += length
        squares[chosen] += length * length
        where[item] = chosen
    return where


def conv_transformer(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Algorithm 5: falling lengths into batches while (items + 1) x length is within what algorithm 1 reaches, the
    remaining items to the batch with the least sum of lengths.

    As printed but for one slip: the first phase ends with ``bins`` batches, not one more.

    Returns:
        Bin of each item, int64 ``[n]``.
    """
    order = descending(lengths)
    falling = np.ascontiguousarray(lengths[order], dtype=np.int64)
    n = len(order)
    bound = int(deal(falling, bins)[1].max(initial=0))
    counts, at = np.zeros(bins, dtype=np.int64), 0
    each = falling.data
    for batch in range(bins):
        first = at
        while at < n:
            # No later item is longer, so at least this many are within the bound; the first always stays.
            held = bound // each[at] if each[at] else n - first
            if held <= at - first:
                break
            at = min(n, first + held)
        counts[batch] = at - first
    where = np.zeros(n, dtype=np.int64)
    opened = np.repeat(np.arange(bins), counts)
    start = np.bincount(opened, weights=falling[:at], minlength=bins).astype(np.int64)
    where[order[:at]] = opened
    where[order[at:]] = deal(falling[at:], bins, start)[0]
    return where
