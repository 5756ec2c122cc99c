"""Batches that are runs of items in the order of their lengths, for modules that pad items to the longest.

Where every item is padded (OrchMLLM section 5.1) runs are optimal: give the batch with the longest item the next
longest ones, and no other batch's longest item grows. Where only attention is padded (appendix A) they waste least.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetero_strategy import ragged

Fill = Callable[[float], tuple[int, list[int]]]
"""A bound on every run's time -> (items that the runs hold, first item of each run and the end of the last one)."""

TOLERANCE = 1e-5
"""Relative distance from the least bound at which the search for it ends."""
ATTENTION_TOLERANCE = 1e-4
"""The same where runs are not optimal anyway."""
ROUNDING = 1 + 1e-12
"""A quotient that is whole but for rounding counts as whole."""


def padded_runs(
    costs: np.ndarray, bins: int, speeds: np.ndarray | None = None, ends: np.ndarray | None = None
) -> tuple[float, np.ndarray] | None:
    """Cut items into at most ``bins`` runs so that the largest (items x first item's cost / speed) is least.

    A run that starts with an item of cost g holds ``floor(bound / g)`` items under a bound, so one bound costs a step
    per bin; bounds are bisected. OrchMLLM algorithm 2 with the longest items first, for any cost.

    Args:
        costs: of each item alone, never rising, float64 ``[n]``.
        bins: most runs.
        speeds: of the bins in the order of their runs, float64 ``[bins]``; None: 1.
        ends: of a run that starts at an item, the furthest it may reach, int64 ``[n]``; None: all items.

    Returns:
        (a bound that cannot be undercut where speeds are equal, items of each run int64 ``[bins]``); None where
        ``ends`` leave no room for all items.
    """
    costs = np.ascontiguousarray(costs, dtype=np.float64)
    fast = np.ones(bins) if speeds is None else np.asarray(speeds, dtype=np.float64)
    n, each, pace = len(costs), costs.data, fast.tolist()
    reach = None if ends is None else np.ascontiguousarray(ends, dtype=np.int64).data

    def fill(bound: float) -> tuple[int, list[int]]:
        at, starts = 0, [0]
        bound *= ROUNDING
        try:
            if speeds is None and reach is None:
                for _ in range(bins):
                    at += int(bound / each[at])
                    starts.append(at)
            else:
                for speed in pace:
                    cost = each[at]
                    last = at + int(bound * speed / cost) if cost else n
                    at = last if reach is None else min(last, reach[at])
                    starts.append(at)
        except (IndexError, ZeroDivisionError):  # no items are left, or none that cost anything
            return n, starts
        return at, starts

    def longest(counts: np.ndarray) -> float:
        used = counts > 0
        return float((counts * costs[ragged.starts(counts).clip(max=n - 1)] / fast)[used].max(initial=0.0))

    if not n:
        return 0.0, np.zeros(bins, dtype=np.int64)
    return _least(fill, longest, costs, fast, TOLERANCE)


def attention_runs(
    own: np.ndarray,
    padded: np.ndarray,
    bins: int,
    speeds: np.ndarray | None = None,
    ends: np.ndarray | None = None,
) -> tuple[float, np.ndarray] | None:
    """The same for a run's time = sum of the items' own costs + items x first item's cost of padding; no optimum.

    Args:
        own: of each item, never rising, float64 ``[n]``.
        padded: cost per item of attention where this item is the longest, never rising, float64 ``[n]``.
    """
    fast = np.ones(bins) if speeds is None else np.asarray(speeds, dtype=np.float64)
    n, pace, alone = len(own), fast.tolist(), own + padded
    before = np.concatenate([[0.0], np.cumsum(own)])
    each, pads, ahead = own.data, padded.data, before.data
    reach = np.full(n, n).data if ends is None else np.ascontiguousarray(ends, dtype=np.int64).data

    def fill(bound: float) -> tuple[int, list[int]]:
        at, starts = 0, [0]
        bound *= ROUNDING
        try:
            for speed in pace:
                # As many as fit if all cost what the next one does, and again with what that leaves.
                pad, end = pads[at], reach[at]
                room = bound * speed + ahead[at] + at * pad
                while True:
                    cost = each[at] + pad
                    more = int((room - ahead[at] - at * pad) / cost) if cost else n
                    if more <= 0 or at >= end:
                        break
                    at = min(at + more, end)
                starts.append(at)
        except IndexError:
            return n, starts
        return at, starts

    def longest(counts: np.ndarray) -> float:
        last = np.cumsum(counts)
        first = last - counts
        times = before[last] - before[first] + counts * padded[first.clip(max=n - 1)]
        return float((times / fast).max(initial=0.0))

    if not n:
        return 0.0, np.zeros(bins, dtype=np.int64)
    return _least(fill, longest, alone, fast, ATTENTION_TOLERANCE)


def _least(
    fill: Fill, longest: Callable[[np.ndarray], float], alone: np.ndarray, speeds: np.ndarray, tolerance: float
) -> tuple[float, np.ndarray] | None:
    """(a bound that no filling meets but for the tolerance, the filling with the least bound found); None: none."""
    n, bins, total = len(alone), len(speeds), float(speeds.sum())
    most = float(n * alone[0] / speeds.min())

    def counted(starts: list[int]) -> np.ndarray:
        return np.diff(np.minimum(starts + [n] * (bins + 1 - len(starts)), n))

    low = high = max(float(alone.sum()) / total, float(alone[0] / speeds.max()))
    at, starts = fill(high)
    if at >= n:
        return low, counted(starts)
    if fill(most)[0] < n:
        return None
    step = 0.0
    while at < n:
        # What is left, spread over all bins, and a little more as runs waste some of it.
        step = max(2 * step, 1.25 * float(alone[at:].sum()) / total, 1e-3 * high)
        low, high = high, high + step
        at, starts = fill(high)
    counts = counted(starts)
    high = min(high, longest(counts))
    while high - low > tolerance * high:
        middle = (low + high) / 2
        at, starts = fill(middle)
        if at < n:
            # A bound that takes the rest as well is about so much larger; look there for the next one that is enough.
            low, middle = middle, middle + 1.1 * float(alone[at:].sum()) / total
            if middle >= high - 0.1 * (high - low):
                continue
            at, starts = fill(middle)
            if at < n:
                low = middle
                continue
        counts = counted(starts)
        high = min(middle, longest(counts))
    return low, counts
