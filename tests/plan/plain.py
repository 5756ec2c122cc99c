"""References written item by item, from the papers' text, without a look at the library."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from hetero_strategy.plan.balance import Cost


def batch_cost(batch: Sequence[int], cost: Cost) -> float:
    """Time of one batch, as the cost is defined."""
    return float(sum(cost.fixed + cost.linear * row + cost.quadratic * row**2 for row in batch))


def batches(lengths: Sequence[int], where: Sequence[int], bins: int) -> list[list[int]]:
    """Lengths of every bin's items."""
    out: list[list[int]] = [[] for _ in range(bins)]
    for length, number in zip(lengths, where, strict=True):
        out[int(number)].append(int(length))
    return out


def time_of(lengths: Sequence[int], where: Sequence[int], bins: int, cost: Cost) -> float:
    """The longest time of any bin."""
    return max(batch_cost(batch, cost) for batch in batches(lengths, where, bins))


def optimum(lengths: Sequence[int], bins: int, cost: Cost) -> float:
    """By trying every assignment."""
    return min(time_of(lengths, where, bins, cost) for where in itertools.product(range(bins), repeat=len(lengths)))


def heap_greedy(
    weights: Sequence[float], order: Sequence[int], bins: int, start: Sequence[float] | None = None
) -> list[int]:
    """Each item of ``order`` to the bin with the least load, ties to the lowest number."""
    heap = [(0 if start is None else start[i], i) for i in range(bins)]
    heapq.heapify(heap)
    where = [-1] * len(weights)
    for item in order:
        load, number = heapq.heappop(heap)
        where[item] = number
        heapq.heappush(heap, (load + weights[item], number))
    return where


def falling(lengths: Sequence[int]) -> list[int]:
    """Items by falling length, ties by number."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def algorithm_4(lengths: Sequence[int], bins: int, tolerance: float) -> list[int]:
    """OrchMLLM algorithm 4, its queue's top being the least squares among the bins near the least sum."""
    total, square, where = [0] * bins, [0] * bins, [0] * len(lengths)
    for item in falling(lengths):
        least = min(total)
        near = [i for i in range(bins) if total[i] - least < tolerance] or [total.index(least)]
        chosen = min(near, key=lambda i: (square[i], i))
        where[item] = chosen
        total[chosen] += int(lengths[item])
        square[chosen] += int(lengths[item]) ** 2
    return where


def differencing(weights: Sequence[int], bins: int) -> list[int]:
    """Largest differencing, k tuples of sums and item lists; returns the sums, rising."""
    parts = [sorted([(0, i) for i in range(bins - 1)] + [(int(w), bins)]) for w in weights]
    states = [[load for load, _ in part] for part in parts]
    while len(states) > 1:
        states.sort(key=lambda state: state[-1] - state[0])
        two, one = states.pop(), states.pop()
        states.append(sorted(a + b for a, b in zip(one, reversed(two), strict=True)))
    return states[0]
