"""Assignments that keep a limit on what a bin may hold, where the best one does not."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance.auto import best, greedy, runs
from hetero_strategy.plan.balance.cost import Cost, Speeds
from hetero_strategy.plan.balance.greedy import descending, exchange, whole

BLENDS = 8
"""Bisections of the share that sizes have in the weights."""


class OverLimit(ConfigError):
    """No assignment was found that keeps a limit: more bins may."""


def keep_limit(
    lengths: Int64[np.ndarray, "items"], bins: int, cost: Cost, speeds: Speeds, limit: int
) -> Int64[np.ndarray, "items"] | None:
    """Find the bin of each item in the best assignment of at most ``limit`` rows to every bin; None: none was found.

    Three ways are tried: greedy on a blend of cost and rows, with the least share of the rows that will do; where items
    are padded, runs that end at the limit; and where one of these finds nothing, first-fit decreasing.
    """
    tried = [_blend(lengths, bins, cost, speeds, limit)]
    if cost.padding != "none":
        order = descending(lengths)
        falling = lengths[order]
        before = ragged.offsets(falling)
        ends = np.searchsorted(before, before[:-1] + limit, side="right") - 1  # of the longest run from each item on
        tried.append(_in_place(order, runs(falling, bins, cost, speeds, ends)))
    if any(bin_of is None for bin_of in tried):
        tried.append(_first_fit(lengths, bins, limit))
    return best(lengths, bins, cost, speeds, tried)


def fits(bin_of: Int64[np.ndarray, "items"], bins: int, lengths: Int64[np.ndarray, "items"], limit: int) -> bool:
    """Whether no bin holds more than the limit."""
    return bool(np.bincount(bin_of, weights=lengths, minlength=bins).max() <= limit)


def _in_place(order: np.ndarray, bins: np.ndarray | None) -> np.ndarray | None:
    """The bin of each item from the bins of items in ``order``."""
    if bins is None:
        return None
    bin_of = np.empty(len(order), dtype=np.int64)
    bin_of[order] = bins
    return bin_of


def _blend(lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None, limit: int) -> np.ndarray | None:
    """Deal greedily by (1 - share) x cost + share x rows, both of mean 1, with the least share that keeps the limit."""
    alone = cost.alone(lengths)
    alone = alone / (alone.mean() or 1.0)
    rows = lengths / (lengths.mean() or 1.0)

    def assigned(share: float) -> np.ndarray | None:
        weights = whole((1 - share) * alone + share * rows, bins)
        order = np.argsort(-weights, kind="stable")
        pace = None if speeds is None or share == 1 else (1 - share) * speeds + share * speeds.mean()
        dealt = greedy(weights[order], bins, pace)
        if share == 1:  # all that counts is to keep the limit
            dealt = exchange(lengths[order], dealt, np.ones(bins), limit)
        bin_of = _in_place(order, dealt)
        return bin_of if bin_of is not None and fits(bin_of, bins, lengths, limit) else None

    within_limit = assigned(1.0)
    if within_limit is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(BLENDS):
        middle = (low + high) / 2
        bin_of = assigned(middle)
        if bin_of is None:
            low = middle
        else:
            within_limit, high = bin_of, middle
    return within_limit


def _first_fit(lengths: np.ndarray, bins: int, limit: int) -> np.ndarray | None:
    """First-fit decreasing, runs of items at a time: needs at most 11/9 of the fewest bins for a limit, plus one."""
    left = descending(lengths)
    less = -lengths[left]  # rising, to be searched
    bin_of = np.empty(len(lengths), dtype=np.int64)
    width = 4 * len(lengths) // bins + 16
    for number in range(bins):
        room, position, chosen = limit, 0, [np.zeros(0, dtype=np.int64)]
        while True:
            position += int(np.searchsorted(less[position:], -room))  # the first that fits
            ahead = np.cumsum(less[position : position + width])
            count = int(np.searchsorted(-ahead, room, side="right"))
            if not count:
                break
            chosen.append(np.arange(position, position + count))
            room += int(ahead[count - 1])
            position += count
        positions = np.concatenate(chosen)
        bin_of[left[positions]] = number
        left, less = np.delete(left, positions), np.delete(less, positions)
    return bin_of if not len(left) else None
