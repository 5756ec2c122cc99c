"""Batches that are runs of items in the order of their lengths, for modules that pad items to the longest.

Where every item is padded (OrchMLLM section 5.1) runs are optimal: if the batch with the longest item takes the next
longest ones, no other batch's longest item grows. Where only attention is padded (appendix A) they waste least.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.plan.balance.cost import Speeds

Fill = Callable[[float], tuple[int, list[int]]]
"""A bound on every run's time -> number of items that the runs hold, first item of each run and end of the last."""

TOLERANCE = 1e-5
"""Relative distance from the least bound at which the search for it ends."""
ATTENTION_TOLERANCE = 1e-4
"""The same for padded attention, where runs are not optimal anyway."""
ROUNDING = 1 + 1e-12
"""Factor by which a quotient that is whole but for rounding counts as whole."""


def padded_runs(
    costs: Float64[np.ndarray, "items"],
    bins: int,
    speeds: Speeds = None,
    ends: Int64[np.ndarray, "items"] | None = None,
) -> Int64[np.ndarray, "bins"] | None:
    """Cut items into at most ``bins`` runs so that the largest (items x first item's cost / speed) is least.

    Under a bound, a run that starts with an item of cost g holds ``floor(bound / g)`` items, so that trying a bound
    takes a step per bin; bounds are bisected. It is OrchMLLM's algorithm 2 with the longest items first, for any cost.

    Args:
        costs: cost of each item in a batch of its own, never rising.
        speeds: in the order of the runs.
        ends: how far a run may reach that starts at each item; None: over all items.

    Returns:
        The number of items of each run; None where ``ends`` leave no room for all items.
    """
    costs = np.ascontiguousarray(costs, dtype=np.float64)
    fast = np.ones(bins) if speeds is None else np.asarray(speeds, dtype=np.float64)
    n, cost_of, pace = len(costs), costs.data, fast.tolist()
    reach = None if ends is None else np.ascontiguousarray(ends, dtype=np.int64).data

    def fill(bound: float) -> tuple[int, list[int]]:
        done, starts = 0, [0]
        bound *= ROUNDING
        try:
            if speeds is None and reach is None:
                for _ in range(bins):
                    done += int(bound / cost_of[done])
                    starts.append(done)
            else:
                for speed in pace:
                    cost = cost_of[done]
                    last = done + int(bound * speed / cost) if cost else n
                    done = last if reach is None else min(last, reach[done])
                    starts.append(done)
        except (IndexError, ZeroDivisionError):  # no items are left, or none that cost anything
            return n, starts
        return done, starts

    def longest(counts: np.ndarray) -> float:
        used = counts > 0
        return float((counts * costs[ragged.starts(counts).clip(max=n - 1)] / fast)[used].max(initial=0.0))

    if not n:
        return np.zeros(bins, dtype=np.int64)
    return _least(fill, longest, costs, fast, TOLERANCE)


def attention_runs(
    own: Float64[np.ndarray, "items"],
    padded: Float64[np.ndarray, "items"],
    bins: int,
    speeds: Speeds = None,
    ends: Int64[np.ndarray, "items"] | None = None,
) -> Int64[np.ndarray, "bins"] | None:
    """Do the same where a run costs the sum of its items' own costs + items x first item's padded cost; no optimum.

    Args:
        own: cost of each item besides attention, never rising.
        padded: cost per item of attention where this item is the longest, never rising.
    """
    fast = np.ones(bins) if speeds is None else np.asarray(speeds, dtype=np.float64)
    n, pace, alone = len(own), fast.tolist(), own + padded
    before = ragged.offsets(own)
    cost_of, pads, ahead = own.data, padded.data, before.data
    reach = np.full(n, n).data if ends is None else np.ascontiguousarray(ends, dtype=np.int64).data

    def fill(bound: float) -> tuple[int, list[int]]:
        done, starts = 0, [0]
        bound *= ROUNDING
        try:
            for speed in pace:
                # As many as fit if all cost as much as the next one, and again with the room that this leaves.
                pad, end = pads[done], reach[done]
                room = bound * speed + ahead[done] + done * pad
                while True:
                    cost = cost_of[done] + pad
                    more = int((room - ahead[done] - done * pad) / cost) if cost else n
                    if more <= 0 or done >= end:
                        break
                    done = min(done + more, end)
                starts.append(done)
        except IndexError:
            return n, starts
        return done, starts

    def longest(counts: np.ndarray) -> float:
        last = np.cumsum(counts)
        first = last - counts
        times = before[last] - before[first] + counts * padded[first.clip(max=n - 1)]
        return float((times / fast).max(initial=0.0))

    if not n:
        return np.zeros(bins, dtype=np.int64)
    return _least(fill, longest, alone, fast, ATTENTION_TOLERANCE)


def _least(
    fill: Fill, longest: Callable[[np.ndarray], float], alone: np.ndarray, speeds: np.ndarray, tolerance: float
) -> np.ndarray | None:
    """Bisect the bound up to the tolerance; number of items of each of the best runs found, None: there are none."""
    n, bins, total = len(alone), len(speeds), float(speeds.sum())
    most = float(n * alone[0] / speeds.min())

    def counted(starts: list[int]) -> np.ndarray:
        return np.diff(np.minimum(starts + [n] * (bins + 1 - len(starts)), n))

    low = high = max(float(alone.sum()) / total, float(alone[0] / speeds.max()))
    done, starts = fill(high)
    if done >= n:
        return counted(starts)
    if fill(most)[0] < n:
        return None
    step = 0.0
    while done < n:
        # What is left, spread over all bins, and a little more as runs waste some of it.
        step = max(2 * step, 1.25 * float(alone[done:].sum()) / total, 1e-3 * high)
        low, high = high, high + step
        done, starts = fill(high)
    counts = counted(starts)
    high = min(high, longest(counts))
    while high - low > tolerance * high:
        middle = (low + high) / 2
        done, starts = fill(middle)
        if done < n:
            # The bound that takes the rest as well is about so much larger: try there next.
            low, middle = middle, middle + 1.1 * float(alone[done:].sum()) / total
            if middle >= high - 0.1 * (high - low):
                continue
            done, starts = fill(middle)
            if done < n:
                low = middle
                continue
        counts = counted(starts)
        high = min(middle, longest(counts))
    return counts
