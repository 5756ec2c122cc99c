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


def before_first(flags: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count the elements of each run before its first True one, all if there is none; ``[n]``.

    >>> before_first(np.array([False, True, False, False]), np.array([2, 0, 2]))
    array([1, 0, 2])
    """
    begin, flagged = starts(lengths), lengths > 0
    flagged[flagged] = flags[begin[flagged]]
    first = np.append(np.flatnonzero(flags[1:] > flags[:-1]) + 1, len(flags))  # few, where flags are in long runs
    before = np.minimum(first[np.searchsorted(first, begin)] - begin, lengths)
    return np.where(flagged, 0, before)


def merged(groups: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge intervals of numbers from 0 that meet or touch in their group: groups, starts and ends, all ascending.

    >>> merged(np.array([1, 0, 0]), np.array([0, 2, 0]), np.array([5, 4, 2]))
    (array([0, 1]), array([0, 0]), array([4, 5]))
    """
    apart = int(ends.max(initial=0)) + 1  # intervals of two groups never meet
    start, end = starts + groups * apart, ends + groups * apart
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, start[1:] > reach[:-1])[: len(start)])
    last = np.append(first[1:], len(start))[: len(first)] - 1
    group = groups[order][first]
    return group, start[first] - group * apart, reach[last] - group * apart


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
