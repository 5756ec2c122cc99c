"""Runs of rows lying end to end in one array, as int64 numpy arrays. Pure.

Lengths ``[2, 0, 3]`` lie at ``offsets([2, 0, 3]) == [0, 2, 2, 5]``.
"""

from __future__ import annotations

import numpy as np


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each run begins and, last, where all of them end: ``offsets([2, 3]) == [0, 2, 5]``; ``[n + 1]``."""
    found = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def starts(lengths: np.ndarray) -> np.ndarray:
    """Where each run begins: ``starts([2, 3]) == [0, 2]``; ``[n]``."""
    return np.cumsum(lengths) - lengths


def expand(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Every number of some runs: ``expand([5, 0], [2, 3]) == [5, 6, 0, 1, 2]``; ``[sum(lengths)]``."""
    ahead = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - ahead, lengths)
