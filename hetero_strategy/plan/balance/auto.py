"""The default policy, one way per form of cost; items come by falling length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from hetero_strategy.plan.balance.cost import Cost, Speeds, additive_bound, loads
from hetero_strategy.plan.balance.greedy import deal, deal_by_speed, descending, exchange, whole
from hetero_strategy.plan.balance.runs import attention_runs, padded_runs

NEAR = 5e-4
"""Relative distance from the lower bound at which exchanging ends."""


def automatic(falling: Int64[np.ndarray, "items"], bins: int, cost: Cost, speeds: Speeds) -> Int64[np.ndarray, "items"]:
    """Find the bin of each item, given by falling length, in the way that suits the cost.

    Without padding that is the greedy rule followed by exchanges, with full padding the shortest runs, and with padded
    attention the best of runs, OrchMLLM's algorithm 5 and the greedy rule.
    """
    if cost.padding == "none":
        return _additive(cost.alone(falling), bins, speeds)
    in_runs = runs(falling, bins, cost, speeds)
    if cost.padding == "full":
        assert in_runs is not None  # without ends any bin may take all
        return in_runs
    tried = [in_runs, greedy(whole(cost.alone(falling), bins), bins, speeds)]
    if speeds is None:
        tried.append(conv_transformer(falling, bins))
    best_of_all = best(falling, bins, cost, speeds, tried)
    assert best_of_all is not None
    return best_of_all


def greedy(weights: Int64[np.ndarray, "items"], bins: int, speeds: Speeds) -> Int64[np.ndarray, "items"]:
    """Give each item, in the order given, to the least loaded bin or the one first done; bin of each."""
    return deal(weights, bins)[0] if speeds is None else deal_by_speed(weights, speeds)


def _additive(alone: np.ndarray, bins: int, speeds: np.ndarray | None) -> np.ndarray:
    """Deal greedily by the exact cost, then exchange items if the result is not near the bound.

    Without padding the cost of a bin is the sum of its items' costs, squares included, so there is no second quantity
    to weigh as in OrchMLLM's algorithm 4.
    """
    weights, pace = whole(alone, bins), np.ones(bins) if speeds is None else speeds
    bin_of = greedy(weights, bins, speeds)
    longest = float((np.bincount(bin_of, weights=weights, minlength=bins) / pace).max())
    if longest <= float(weights.sum() / pace.sum()) * (1 + NEAR):
        return bin_of
    near = additive_bound(weights, bins, speeds) * (1 + NEAR)
    return bin_of if longest <= near else exchange(weights, bin_of, pace, near)


def runs(
    falling: Int64[np.ndarray, "items"],
    bins: int,
    cost: Cost,
    speeds: Speeds,
    ends: Int64[np.ndarray, "items"] | None = None,
) -> Int64[np.ndarray, "items"] | None:
    """Find the bin of each item, in the shortest runs.

    Where speeds differ the longest items go to the fastest or to the slowest bins, whichever is better. The result is
    None where ``ends`` (see :func:`padded_runs`) leave no room for all items.
    """
    rows = falling.astype(np.float64)
    orders = [np.arange(bins)]
    if speeds is not None:
        orders = [np.argsort(-speeds, kind="stable"), np.argsort(speeds, kind="stable")]
    tried = []
    for order in orders:
        pace = None if speeds is None else speeds[order]
        if cost.padding == "full":
            cut = padded_runs(cost.alone(rows), bins, pace, ends)
        else:
            own, pads = cost.fixed + cost.linear * rows, cost.quadratic * rows * rows
            cut = attention_runs(own, pads, bins, pace, ends)
        tried.append(None if cut is None else np.repeat(order, cut))
    return best(falling, bins, cost, speeds, tried)


def best(
    lengths: Int64[np.ndarray, "items"],
    bins: int,
    cost: Cost,
    speeds: Speeds,
    tried: Sequence[Int64[np.ndarray, "items"] | None],
) -> Int64[np.ndarray, "items"] | None:
    """Choose the assignment whose longest time is least, the first of several; None: all are None."""
    assignments = [bin_of for bin_of in tried if bin_of is not None]
    if len(assignments) < 2:
        return assignments[0] if assignments else None
    pace = np.ones(bins) if speeds is None else speeds
    return min(assignments, key=lambda bin_of: float((loads(lengths, bin_of, bins, cost) / pace).max()))


def conv_transformer(lengths: Int64[np.ndarray, "items"], bins: int) -> Int64[np.ndarray, "items"]:
    """OrchMLLM's algorithm 5 (appendix A) for padded attention: the bin of each item.

    Items of falling length enter a batch while (items + 1) x length is within what algorithm 1 reaches; the remaining
    items go to the batch with the least sum of lengths. It is as printed but for one slip: the first phase ends with
    ``bins`` batches, not one more.
    """
    order = descending(lengths)
    falling = np.ascontiguousarray(lengths[order], dtype=np.int64)
    n, length = len(order), falling.data
    bound = int(deal(falling, bins)[1].max(initial=0))
    counts, done = np.zeros(bins, dtype=np.int64), 0
    for batch in range(bins):
        first = done
        while done < n:
            # No later item is longer, so at least this many are within the bound; the first always stays.
            held = bound // length[done] if length[done] else n - first
            if held <= done - first:
                break
            done = min(n, first + held)
        counts[batch] = done - first
    opened = np.repeat(np.arange(bins), counts)
    start = np.bincount(opened, weights=falling[:done], minlength=bins).astype(np.int64)
    bin_of = np.zeros(n, dtype=np.int64)
    bin_of[order[:done]] = opened
    bin_of[order[done:]] = deal(falling[done:], bins, start)[0]
    return bin_of
