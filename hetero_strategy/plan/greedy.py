"""Greedy number partitioning in whole rounds of items, item for item what a heap would do; then exchanges of items."""

from __future__ import annotations

import heapq
import math

import numpy as np
from jaxtyping import Int64, Num

from hetero_strategy import ragged

FEW = 32
"""Rounds of fewer items are left to a heap, which is then faster: few bins are behind, and small items fill them."""
HEAPED = 1024
"""Items that the heap deals at a time."""
ROUNDS = 40
"""Most rounds of exchanges."""
TRIES = 3
"""Rounds in a row that may leave the largest load unchanged, each with other partners."""
WORK = 1 << 18
"""Pairs of items compared in a round of exchanges; sets how many items of a bin are compared."""
ITEMS = (16, 64)
"""Fewest and most items of a bin that are compared, for any work; one of them is "nothing"."""


def descending(lengths: Int64[np.ndarray, "items"]) -> Int64[np.ndarray, "items"]:
    """Sort items by falling length, ties by item number."""
    return ragged.argsort_small(lengths.max(initial=0) - lengths)


def whole(weights: Num[np.ndarray, "items"], bins: int) -> Int64[np.ndarray, "items"]:
    """Scale weights by one power of two and round them to int64, so that their sum leaves room for a bin number.

    Whole weights of up to 2^40 in total stay exact. Sums no longer depend on their order, so all ranks agree.
    """
    total = float(weights.sum())
    if not total:
        return np.zeros(len(weights), dtype=np.int64)
    scaled = weights * 2.0 ** (60 - (bins - 1).bit_length() - math.ceil(math.log2(total)))
    return np.rint(scaled, out=scaled).astype(np.int64)


def deal(
    weights: Int64[np.ndarray, "items"], bins: int, start: Int64[np.ndarray, "bins"] | None = None
) -> tuple[Int64[np.ndarray, "items"], Int64[np.ndarray, "bins"]]:
    """Give each item, in order, to the bin with the least load, ties to the lowest; return bins and loads.

    Falling weights give the longest-processing-time rule (OrchMLLM algorithm 1, at most 4/3 of the optimum), rising
    weights DistTrain's algorithm 2. With loads L_1 <= L_2 <= ... a heap gives the next items to bins 1, 2, ... in turn
    for as long as L_j <= L_i + weight_i for all i < j. Such a round is dealt at once, then loads are sorted again. Bin
    numbers are the low bits of their loads, which breaks ties and avoids an argsort.
    For example, the first round gives items 0 to 2 to bins 0 to 2, whose loads are then 5, 4 and 3; so the second round
    begins at bin 2:

    >>> deal(np.array([5, 4, 3, 2, 2]), 3)
    (array([0, 1, 2, 2, 1]), array([5, 6, 5]))

    Args:
        weights: from :func:`whole`; weights of 0 at the end are dealt to the bins in turn.
        start: loads before the first item; None: 0.
    """
    n, bits = len(weights), (bins - 1).bit_length()
    keys = np.arange(bins, dtype=np.int64)
    if start is not None:
        keys += start << bits
        keys.sort()
    steps = weights << bits
    bin_of = np.empty(n, dtype=np.int64)
    done, end = 0, _weighing(weights)
    while done < end:
        count = min(bins, end - done)
        after = keys[:count] + steps[done : done + count]
        count = _round(keys[:count], after)
        if count < min(FEW, bins, end - done):
            count = min(HEAPED, end - done)
            bin_of[done : done + count], keys = _heaped(steps[done : done + count], keys)
        else:
            bin_of[done : done + count] = keys[:count]
            keys[:count] = after[:count]
        keys.sort(kind="stable")  # two runs that are nearly sorted
        done += count
    bin_of[end:] = np.resize(keys, n - end)
    mask = (1 << bits) - 1
    bin_of &= mask
    loads = np.empty(bins, dtype=np.int64)
    loads[keys & mask] = keys >> bits
    return bin_of, loads


def _heaped(steps: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Deal by the plain algorithm; return the key of the bin that each item goes to, and the keys afterwards."""
    heap = keys.tolist()  # sorted, so a heap
    chosen = [heapq.heapreplace(heap, heap[0] + step) for step in steps.tolist()]
    return np.array(chosen, dtype=np.int64), np.array(heap, dtype=np.int64)


def _weighing(weights: np.ndarray) -> int:
    """Count the items up to the last that weighs anything; a heap would give all later ones to one bin."""
    if len(weights) and weights[-1] == 0:
        heavy = np.flatnonzero(weights)
        return int(heavy[-1]) + 1 if len(heavy) else 0
    return len(weights)


def _round(loads: np.ndarray, after: np.ndarray) -> int:
    """Count the bins, by rising load, that get an item before any of them gets its second."""
    (early,) = (loads[1:] > np.minimum.accumulate(after)[:-1]).nonzero()
    return int(early[0]) + 1 if len(early) else len(loads)


def exchange(
    weights: Num[np.ndarray, "items"],
    bin_of: Int64[np.ndarray, "items"],
    bins: int,
    target: float,
    group: Int64[np.ndarray, "bins"] | None = None,
) -> Int64[np.ndarray, "items"]:
    """Swap pairs of items, or move single ones, between bins so that the largest load falls.

    In a round the bin with the largest load meets the one with the least, the second largest the second least, and so
    on. Each pair makes the exchange that brings its two loads nearest to each other, if the larger one becomes smaller.
    The largest load never grows. Rounds end at the target, or when no partner helps the bin with the largest load. Of
    large bins only items spread evenly over their weights are compared: their differences are many enough. For example,
    loads of 9 and 5 become level by an exchange of the items 5 and 3:

    >>> exchange(np.array([5, 4, 3, 2]), np.array([0, 0, 1, 1]), 2, 7.0)
    array([1, 0, 0, 1])

    Args:
        weights: never rising.
        target: largest load that is good enough.
        group: group of each bin: items stay in their bin's group. None: all bins are one group.
    """
    group = np.zeros(bins, dtype=np.int64) if group is None else group
    sizes = np.bincount(group)
    first, pairs = ragged.starts(sizes), sizes // 2
    total = int(pairs.sum())
    if not total or not len(weights):
        return bin_of
    turn = ragged.within(pairs)  # the heaviest bin of a group has turn 0
    top, bottom, count = (np.repeat(x, pairs) for x in (first + sizes - 1, first, pairs))
    load = np.bincount(bin_of, weights=weights, minlength=bins)
    table = _table(weights, bin_of, bins, min(max(int((WORK / total) ** 0.5), ITEMS[0]), ITEMS[1]))
    heavy = np.append(weights, 0).astype(np.float64)[table]  # item -1, nothing, weighs nothing
    failed = idle = 0
    for _ in range(ROUNDS):
        by_load = np.lexsort((load, group))
        high = by_load[top - turn]
        above = load[high] > target
        if not above.any() or idle == TRIES:
            break
        high, low = high[above], by_load[bottom + (turn + failed * (1 + count // 7)) % count][above]
        give, take = _nearest(heavy[high], heavy[low], (load[high] - load[low]) / 2)
        moved = heavy[high, give] - heavy[low, take]
        gain = np.maximum(load[high] - moved, load[low] + moved) < load[high]
        failed = 0 if gain[load[high].argmax()] else failed + 1
        idle = 0 if gain.any() else idle + 1
        high, low, give, take, moved = high[gain], low[gain], give[gain], take[gain], moved[gain]
        load[high] -= moved
        load[low] += moved
        for items in (table, heavy):
            items[high, give], items[low, take] = items[low, take], items[high, give]
    exchanged = np.append(bin_of, 0)
    exchanged[table] = np.arange(bins)[:, None]
    return exchanged[:-1]


def _nearest(high: np.ndarray, low: np.ndarray, ideal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find a column of ``high`` and one of ``low`` whose difference is nearest to ``ideal``, in each row."""
    off = (high - ideal[:, None])[:, :, None] - low[:, None, :]
    return np.divmod(np.abs(off, out=off).reshape(len(high), -1).argmin(1), low.shape[1])


def _table(weights: np.ndarray, bin_of: np.ndarray, bins: int, columns: int) -> np.ndarray:
    """List items of each bin that differ in weight, with at least one -1 after them, int64 ``[bins, columns]``.

    If a bin has too many of them, items spread evenly over their weights are chosen.
    """
    items = ragged.argsort_small(bin_of)  # items come by falling weight, and a stable sort keeps that within a bin
    owner, heavy = bin_of[items], weights[items]
    different = np.ones(len(items), dtype=bool)
    different[1:] = (heavy[1:] != heavy[:-1]) | (owner[1:] != owner[:-1])
    items = items[different]
    counts = np.bincount(owner[different], minlength=bins)
    chosen = np.arange(columns - 1)
    chosen = np.where(counts[:, None] < columns, chosen, chosen * counts[:, None] // (columns - 1))
    first = ragged.starts(counts)[:, None]
    table = np.full((bins, columns), -1, dtype=np.int64)
    table[:, :-1] = np.where(chosen < counts[:, None], items[np.minimum(first + chosen, len(items) - 1)], -1)
    return table
