"""The least that the most loaded bin can have."""

from __future__ import annotations

import numpy as np

DEEP = 256
"""Items per bin up to which the largest items are looked at; further down the mean is as good."""


def additive_bound(falling: np.ndarray, bins: int, speeds: np.ndarray | None = None) -> float:
    """No assignment has a smaller ``max(sum of costs / speed)``.

    Where speeds are equal: the mean, and for every k the k + 1 least of the k * bins + 1 largest items, as some bin
    has k + 1 of these. Where they differ: all items on all bins, and for every k the k largest on the k fastest bins.

    Args:
        falling: cost of each item, never rising ``[n]``.
        speeds: float64 ``[bins]``; None: 1.
    """
    n = len(falling)
    if not n:
        return 0.0
    if speeds is None:
        least = float(falling.sum()) / bins
        for more in range(min((n - 1) // bins, DEEP) + 1):
            last = more * bins + 1
            least = max(least, float(falling[last - more - 1 : last].sum()))
        return least
    fastest = np.sort(speeds)[::-1]
    first = min(n, bins)
    together = np.cumsum(falling[:first]) / np.cumsum(fastest[:first])
    return max(float(falling.sum() / speeds.sum()), float(together.max()))
