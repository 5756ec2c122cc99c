"""Balancing algorithms that others use, each of which gives the bin of every item, int64 ``[n]``, and a bound.

OrchMLLM (arXiv:2503.23830) appendix A, DistTrain (arXiv:2408.04275) section 5.1, Karmarkar and Karp (1982).
"""

from __future__ import annotations

import heapq

import numpy as np

from hetero_strategy.plan.balance import Cost, loads, runs
from hetero_strategy.plan.balance.cost import additive_bound
from hetero_strategy.plan.balance.greedy import deal, descending, whole

TOLERANCE = 1.0
"""Tolerance of :func:`tolerant` in mean lengths, which the paper sets by hand."""


def disttrain(costs: np.ndarray, bins: int) -> np.ndarray:
    """DistTrain's algorithm 2: cheapest item first, to the least loaded bin; items that cost nothing come last."""
    order = np.argsort(costs, kind="stable")
    order = np.roll(order, -int(np.count_nonzero(costs == 0)))
    bin_of = np.empty(len(costs), dtype=np.int64)
    bin_of[order] = deal(whole(costs[order], bins), bins)[0]
    return bin_of


def padded_ascending(lengths: np.ndarray, bins: int) -> np.ndarray:
    """OrchMLLM's algorithm 2: the least whole bound on items x longest that an ascending greedy keeps in ``bins``.

    As printed but for two slips: the search starts with the longest item's bound, not the shortest's (which nothing
    might fit), and what is returned belongs to the bound found, not to the last one tried.
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
    """OrchMLLM's algorithm 4: falling lengths, each to the bin with the least sum.

    Among sums that differ by less than a tolerance the least sum of squares decides. The printed comparison is not
    transitive, so a priority queue's top depends on how it is built. Here the top is the bin with the least squares
    among those within the tolerance of the least sum.
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


def karmarkar_karp(costs: np.ndarray, bins: int) -> np.ndarray:
    """Karmarkar and Karp's largest differencing method for any number of bins: better than greedy, far slower.

    Every item starts as a partition of its own: one bin with it, the others empty. The two partitions with the largest
    differences between their fullest and their emptiest bin become one, the fullest bin of either with the emptiest of
    the other, until one is left (Karmarkar and Karp 1982; verl's seqlen_balancing is the same). ``n`` merges of up to
    ``bins`` loads.
    """
    n = len(costs)
    if not n or bins == 1:
        return np.zeros(n, dtype=np.int64)
    falling = np.argsort(-costs, kind="stable")
    weights = whole(costs[falling], bins)
    # A partition is (loads, falling; the groups of items that make them), of its bins with items only. A group has the
    # number of one of its items; a group that joined another points to it.
    joined = np.arange(n)
    parts = [(weights[i : i + 1], np.array([i])) for i in range(n)]
    heap = [(-int(weights[i]), i) for i in range(n)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heap[0][1]
        (load, group), (more, others) = parts[first], parts[second]
        free = bins - len(load)
        shared = len(more) - free
        if shared > 0:  # the emptiest bins of both meet, in opposite order
            joined[others[free:][::-1]] = group[-shared:]
            load = load.copy()
            load[-shared:] += more[free:][::-1]
            more, others = more[:free], others[:free]
        load, group = np.concatenate([load, more]), np.concatenate([group, others])
        order = np.argsort(-load, kind="stable")
        load = load[order]
        parts[second] = parts[first] = (load, group[order])
        heapq.heapreplace(heap, (int(load[-1] if len(load) == bins else 0) - int(load[0]), second))
    while not np.array_equal(joined, joined[joined]):
        joined = joined[joined]
    number = np.zeros(n, dtype=np.int64)
    groups = parts[heap[0][1]][1]
    number[groups] = np.arange(len(groups))
    bin_of = np.empty(n, dtype=np.int64)
    bin_of[falling] = number[joined]
    return bin_of


def lower_bound(lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None = None) -> float:
    """A value that the largest ``load / speed`` of no assignment is below.

    It follows from the costs of the items alone (:func:`additive_bound`) and, with full padding and equal speeds, from
    the search for the shortest runs, which are optimal.

    Args:
        lengths: rows of each item, int64 ``[n]``.
        speeds: float64 ``[bins]``; None: 1.
    """
    alone = np.sort(cost.alone(lengths))[::-1]
    if speeds is not None and np.ptp(speeds):
        return additive_bound(alone, bins, np.asarray(speeds, dtype=np.float64))
    least = additive_bound(alone, bins)
    if cost.padding == "full":
        counts = runs.padded_runs(alone, bins)
        assert counts is not None
        longest = loads(np.sort(lengths)[::-1], np.repeat(np.arange(bins), counts), bins, cost).max()
        least = max(least, float(longest) * (1 - runs.TOLERANCE))
    return least / (1.0 if speeds is None else float(speeds[0]))
