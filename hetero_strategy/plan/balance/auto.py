"""The default policy, one way per form of cost; items come by falling length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_strategy.plan.balance.bounds import additive_bound
from hetero_strategy.plan.balance.cost import Cost, loads
from hetero_strategy.plan.balance.greedy import deal, deal_by_speed, whole
from hetero_strategy.plan.balance.papers import conv_transformer
from hetero_strategy.plan.balance.refine import exchange
from hetero_strategy.plan.balance.runs import attention_runs, padded_runs

NEAR = 5e-4
"""Relative distance from the lower bound at which exchanging ends."""


def automatic(falling: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None) -> np.ndarray:
    """Bin of each item, int64 ``[n]``: by greedy and exchanges without padding, by runs with full padding, and with
    padded attention the best of runs, OrchMLLM's algorithm 5 and the greedy.

    Args:
        falling: length of each item, never rising, int64 ``[n]``.
        speeds: float64 ``[bins]``; None: equal.
    """
    if cost.padding == "none":
        return _additive(cost.alone(falling), bins, speeds)
    found = runs(falling, bins, cost, speeds)
    if cost.padding == "attention":
        tried = [found, greedy(whole(cost.alone(falling), bins), bins, speeds)]
        if speeds is None:
            tried.append(conv_transformer(falling, bins))
        found = best(falling, bins, cost, speeds, tried)
    assert found is not None  # without ends any bin may take all
    return found


def greedy(weights: np.ndarray, bins: int, speeds: np.ndarray | None) -> np.ndarray:
    """Each item, in the order given, to the least loaded bin or the one first done; int64 ``[n]``."""
    return deal(weights, bins)[0] if speeds is None else deal_by_speed(weights, speeds)


def _additive(alone: np.ndarray, bins: int, speeds: np.ndarray | None) -> np.ndarray:
    """The greedy on the exact cost, then exchanges where it is not near the bound.

    Without padding the cost of a bin is the sum of its items' costs, squares included, so there is no second quantity
    to weigh as in OrchMLLM's algorithm 4.
    """
    weights = whole(alone, bins)
    if speeds is None:
        where, load = deal(weights, bins)
        longest, mean = float(load.max()), float(load.mean())
    else:
        where = deal_by_speed(weights, speeds)
        longest = float((np.bincount(where, weights=weights, minlength=bins) / speeds).max())
        mean = float(weights.sum() / speeds.sum())
    if longest <= mean * (1 + NEAR):
        return where
    near = additive_bound(weights, bins, speeds) * (1 + NEAR)
    return where if longest <= near else exchange(weights, where, np.ones(bins) if speeds is None else speeds, near)


def runs(
    falling: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None, ends: np.ndarray | None = None
) -> np.ndarray | None:
    """Bin of each item by the shortest runs; where speeds differ, longest items on the fastest or on the slowest bins,
    whichever is better. None where ``ends`` (see :func:`padded_runs`) leave no room for all items.
    """
    rows = falling.astype(np.float64)
    orders = [np.arange(bins)]
    if speeds is not None:
        orders = [np.argsort(-speeds, kind="stable"), np.argsort(speeds, kind="stable")]
    tried = []
    for order in orders:
        pace = None if speeds is None else speeds[order]
        if cost.padding == "full":
            found = padded_runs(cost.alone(rows), bins, pace, ends)
        else:
            own, pads = cost.fixed + cost.linear * rows, cost.quadratic * rows * rows
            found = attention_runs(own, pads, bins, pace, ends)
        tried.append(None if found is None else np.repeat(order, found[1]))
    return best(falling, bins, cost, speeds, tried)


def best(
    lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None, tried: Sequence[np.ndarray | None]
) -> np.ndarray | None:
    """The first of the assignments with the least longest time; None: there is none."""
    found = [where for where in tried if where is not None]
    if len(found) < 2:
        return found[0] if found else None
    pace = np.ones(bins) if speeds is None else speeds
    return min(found, key=lambda where: float((loads(lengths, where, bins, cost) / pace).max()))
