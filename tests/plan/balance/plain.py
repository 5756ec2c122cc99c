"""References written item by item, from the papers' text, without a look at the library."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from hetero_strategy.plan.balance import Cost


def batch_cost(batch: Sequence[int], cost: Cost) -> float:
    """Time of one batch, as the forms are defined."""
    if not len(batch):
        return 0.0
    longest, items = max(batch), len(batch)
    if cost.padding == "full":
        return items * (cost.fixed + cost.linear * longest + cost.quadratic * longest**2)
    own = sum(cost.fixed + cost.linear * row for row in batch)
    if cost.padding == "attention":
        return own + items * cost.quadratic * longest**2
    return own + sum(cost.quadratic * row**2 for row in batch)


def batches(lengths: Sequence[int], where: Sequence[int], bins: int) -> list[list[int]]:
    """Lengths of every bin's items."""
    out: list[list[int]] = [[] for _ in range(bins)]
    for length, number in zip(lengths, where, strict=True):
        out[int(number)].append(int(length))
    return out


def time_of(
    lengths: Sequence[int], where: Sequence[int], bins: int, cost: Cost, speeds: Sequence[float] | None = None
) -> float:
    """The longest time of any bin."""
    fast = [1.0] * bins if speeds is None else speeds
    return max(batch_cost(b, cost) / s for b, s in zip(batches(lengths, where, bins), fast, strict=True))


def optimum(lengths: Sequence[int], bins: int, cost: Cost, speeds: Sequence[float] | None = None) -> float:
    """By trying every assignment."""
    return min(
        time_of(lengths, where, bins, cost, speeds) for where in itertools.product(range(bins), repeat=len(lengths))
    )


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


def algorithm_2(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """OrchMLLM algorithm 2; the search's right end from the longest item, and the batches of the bound found."""
    rows = sorted(int(x) for x in lengths)

    def least_batches(bound: int) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for row in rows:
            if (len(made[-1]) + 1) * row > bound:
                made.append([])
            made[-1].append(row)
        return made

    left, right = rows[-1], rows[-1] * (len(rows) // bins + 1)
    while left < right:
        middle = (left + right) // 2
        if len(least_batches(middle)) <= bins:
            right = middle
        else:
            left = middle + 1
    return least_batches(right)


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


def algorithm_5(lengths: Sequence[int], bins: int) -> list[int]:
    """OrchMLLM algorithm 5 with at most ``bins`` batches in its first phase."""
    order = falling(lengths)
    unpadded = batches(lengths, heap_greedy(lengths, order, bins), bins)
    bound = max(sum(batch) for batch in unpadded)
    where = [-1] * len(lengths)
    made, done, size = 0, 0, 0
    for item in order:
        if size and (size + 1) * lengths[item] > bound:
            if made + 1 >= bins:
                break
            made, size = made + 1, 0
        where[item] = made
        size += 1
        done += 1
    start = [sum(lengths[i] for i in order[:done] if where[i] == number) for number in range(bins)]
    rest = heap_greedy(lengths, order[done:], bins, start)
    return [first if first >= 0 else second for first, second in zip(where, rest, strict=True)]


def differencing(weights: Sequence[int], bins: int) -> list[int]:
    """Largest differencing, k tuples of sums and item lists; returns the sums, rising."""
    parts = [sorted([(0, i) for i in range(bins - 1)] + [(int(w), bins)]) for w in weights]
    states = [[load for load, _ in part] for part in parts]
    while len(states) > 1:
        states.sort(key=lambda state: state[-1] - state[0])
        two, one = states.pop(), states.pop()
        states.append(sorted(a + b for a, b in zip(one, reversed(two), strict=True)))
    return states[0]


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
