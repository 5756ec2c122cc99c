"""Karmarkar and Karp's largest differencing method for any number of bins: better than greedy, far slower."""

from __future__ import annotations

import heapq

import numpy as np


def karmarkar_karp(weights: np.ndarray, bins: int) -> np.ndarray:
    """Bin of each item, int64 ``[n]``.

    Every item starts as a partition of its own: one bin with it, the others empty. The two partitions with the largest
    differences between their fullest and their emptiest bin become one, the fullest bin of either with the emptiest of
    the other, until one is left (Karmarkar and Karp 1982; verl's seqlen_balancing is the same). ``n`` merges of up to
    ``bins`` loads: for comparison, not for every step.

    Args:
        weights: of each item, int64 ``[n]``.
    """
    n = len(weights)
    if not n or bins == 1:
        return np.zeros(n, dtype=np.int64)
    # A partition is (loads, falling; the groups of items that make them), of its bins with items only. A group has the
    # number of one of its items; a group that joined another points to it.
    joined = np.arange(n)
    parts = [(weights[i : i + 1], np.array([i])) for i in range(n)]
    heap = [(-int(weights[i]), i) for i in range(n)]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, two = heapq.heappop(heap)[1], heap[0][1]
        (load, group), (more, others) = parts[one], parts[two]
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
        parts[two] = (load, group[order])
        parts[one] = parts[two]
        heapq.heapreplace(heap, (int(load[-1] if len(load) == bins else 0) - int(load[0]), two))
    while not np.array_equal(joined, joined[joined]):
        joined = joined[joined]
    number = np.zeros(n, dtype=np.int64)
    groups = parts[heap[0][1]][1]
    number[groups] = np.arange(len(groups))
    return number[joined]
