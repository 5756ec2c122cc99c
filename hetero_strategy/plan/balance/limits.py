"""Assignments that keep a limit on what a bin may hold, where the best one does not."""

from __future__ import annotations

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.plan.balance.auto import best, runs
from hetero_strategy.plan.balance.cost import Cost
from hetero_strategy.plan.balance.greedy import deal, deal_by_speed, descending, whole
from hetero_strategy.plan.balance.refine import exchange

BLENDS = 8
"""Bisections of the share that sizes have in the weights."""


def keep_limit(
    lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None, sizes: np.ndarray, limit: int
) -> np.ndarray | None:
    """The best assignment found of those that put at most ``limit`` of ``sizes`` in every bin; None: none found.

    Tried: greedy on a blend of cost and size, with the least share of the size that will do; runs that end at the
    limit, where items are padded; first-fit decreasing by size where one of these finds nothing.

    Args:
        lengths: rows of each item, int64 ``[n]``.
        speeds: of each bin, float64 ``[bins]``; None: equal.
        sizes: int64 ``[n]``.

    Returns:
        Bin of each item, int64 ``[n]``.
    """
    tried = [_blend(lengths, bins, cost, speeds, sizes, limit)]
    if cost.padding != "none":
        tried.append(_runs(lengths, bins, cost, speeds, sizes, limit))
    if any(where is None for where in tried):
        tried.append(_first_fit(sizes, bins, limit))
    return best(lengths, bins, cost, speeds, tried)


def fits(where: np.ndarray, bins: int, sizes: np.ndarray, limit: int) -> bool:
    """No bin holds more than the limit."""
    return bool(np.bincount(where, weights=sizes, minlength=bins).max() <= limit)


def _runs(
    lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None, sizes: np.ndarray, limit: int
) -> np.ndarray | None:
    """Runs by falling length that end where the limit does."""
    order = descending(lengths)
    before = ragged.offsets(sizes[order])
    ends = np.searchsorted(before, before[:-1] + limit, side="right") - 1
    found = runs(lengths[order], bins, cost, speeds, ends)
    if found is None:
        return None
    where = np.empty(len(lengths), dtype=np.int64)
    where[order] = found
    return where


def _blend(
    lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None, sizes: np.ndarray, limit: int
) -> np.ndarray | None:
    """Greedy on (1 - share) x cost + share x size, both of mean 1, with the least share found to keep the limit."""
    alone = cost.alone(lengths)
    alone = alone / (alone.mean() or 1.0)
    size = sizes / (sizes.mean() or 1.0)

    def assigned(share: float) -> np.ndarray | None:
        weights = whole((1 - share) * alone + share * size, bins)
        order = np.argsort(-weights, kind="stable")
        if speeds is None or share == 1:
            dealt = deal(weights[order], bins)[0]
        else:
            dealt = deal_by_speed(weights[order], (1 - share) * speeds + share * speeds.mean())
        if share == 1:  # what keeps the limit is all that counts
            dealt = exchange(sizes[order], dealt, np.ones(bins), limit)
        where = np.empty(len(lengths), dtype=np.int64)
        where[order] = dealt
        return where if fits(where, bins, sizes, limit) else None

    kept = assigned(1.0)
    if kept is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(BLENDS):
        middle = (low + high) / 2
        where = assigned(middle)
        if where is None:
            low = middle
        else:
            kept, high = where, middle
    return kept


def _first_fit(sizes: np.ndarray, bins: int, limit: int) -> np.ndarray | None:
    """First-fit decreasing: at most 11/9 of the least bins for a limit, plus one. Runs of items at a time."""
    left = descending(sizes)
    less = -sizes[left]  # rising, to be searched
    where = np.empty(len(sizes), dtype=np.int64)
    width = 4 * len(sizes) // bins + 16
    for number in range(bins):
        room, at, taken = limit, 0, []
        while True:
            at += int(np.searchsorted(less[at:], -room))  # the first that fits
            ahead = np.cumsum(less[at : at + width])
            count = int(np.searchsorted(-ahead, room, side="right"))
            if not count:
                break
            taken.append(np.arange(at, at + count))
            room += int(ahead[count - 1])
            at += count
        if taken:
            chosen = np.concatenate(taken)
            where[left[chosen]] = number
            left, less = np.delete(left, chosen), np.delete(less, chosen)
    return where if not len(left) else None
