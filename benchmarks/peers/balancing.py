"""Balancing algorithms that others use, each of which gives the bin of every item, int64 ``[n]``, and a bound.

OrchMLLM (arXiv:2503.23830) appendix A, DistTrain (arXiv:2408.04275) section 5.1, Karmarkar and Karp (1982).
"""

from __future__ import annotations

import heapq

import numpy as np

from hetero_strategy.plan.balance import Cost, additive_bound
from hetero_strategy.plan.greedy import deal, descending, whole

TOLERANCE = 1.0
"""Tolerance of :func:`tolerant` in mean lengths, which the paper sets by hand."""


def disttrain(costs: np.ndarray, bins: int) -> np.ndarray:
    """DistTrain's algorithm 2: cheapest item first, to the least loaded bin; items that cost nothing come last."""
    order = np.argsort(costs, kind="stable")
    order = np.roll(order, -int(np.count_nonzero(costs == 0)))
    bin_of = np.empty(len(costs), dtype=np.int64)
    bin_of[order] = deal(whole(costs[order], bins), bins)[0]
    return bin_of


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


def lower_bound(lengths: np.ndarray, bins: int, cost: Cost) -> float:
    """A value that the largest load of no assignment of items, int64 ``[n]``, is below, see :func:`additive_bound`."""
    return additive_bound(np.sort(cost.alone(lengths))[::-1], bins)
