"""Numpy functions on runs that lie end to end in one array. Pure.

Runs of lengths ``[2, 0, 3]`` lie at ``offsets([2, 0, 3]) == [0, 2, 2, 5]``. All counts are int64.
"""

from __future__ import annotations

import numpy as np


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each run and, last, the end of all: ``offsets([2, 3]) == [0, 2, 5]``; ``[n + 1]``.

    For floating lengths (weights, costs) these are the running sums, as float64.
    """
    bounds = np.zeros(len(lengths) + 1, dtype=np.result_type(np.asarray(lengths), np.int64))
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def starts(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each run: ``starts([2, 3]) == [0, 2]``; ``[n]``."""
    return np.cumsum(lengths) - lengths


def within(lengths: np.ndarray) -> np.ndarray:
    """Return the position of each element inside its run: ``within([2, 3]) == [0, 1, 0, 1, 2]``; ``[sum(lengths)]``."""
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts(lengths), lengths)


def expand(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return every number of some runs: ``expand([5, 0], [2, 3]) == [5, 6, 0, 1, 2]``; ``[sum(lengths)]``."""
    ahead = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - ahead, lengths)


def argsort_small(ids: np.ndarray) -> np.ndarray:
    """Return ``argsort(ids, kind="stable")`` of integers from 0, several times faster if all are below 2^16.

    numpy sorts 16 bits by radix, and wider integers by merging.
    """
    return np.argsort(ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids, kind="stable")


def group_by(ids: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of each id together, ascending, and the offsets of groups ``0 .. groups - 1`` among them.

    >>> group_by(np.array([1, 0, 1]), 3)
    (array([1, 0, 2]), array([0, 1, 3, 3]))
    """
    return argsort_small(ids), offsets(np.bincount(ids, minlength=groups))
