"""Greedy number partitioning without a heap: whole rounds of items at a time, item for item what the heap would do."""

from __future__ import annotations

import heapq
import math

import numpy as np

FEW = 32
"""Items of a round below which a heap deals the next ones faster: few bins are behind, and small items fill them."""
HEAPED = 1024
"""Items that the heap then deals."""
SMALL = 16
"""Mean loads are at least so many items where, with unequal speeds, an item counts as small."""


def descending(lengths: np.ndarray) -> np.ndarray:
    """Items by falling length, ties by item number, int64 ``[n]``."""
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    short = lengths.max() - lengths
    # numpy sorts 16 bits by radix, five times as fast as 64 bits by merging
    return np.argsort(short.astype(np.uint16) if short.max() < 1 << 16 else short, kind="stable")


def whole(weights: np.ndarray, bins: int) -> np.ndarray:
    """Weights times one power of two, rounded to int64, so that their sum leaves room for a bin number below it.

    Whole weights of up to 2^40 in total stay exact. Sums no longer depend on their order, so all ranks agree.
    """
    total = float(weights.sum())
    if not total:
        return np.zeros(len(weights), dtype=np.int64)
    scaled = weights * 2.0 ** (60 - (bins - 1).bit_length() - math.ceil(math.log2(total)))
    return np.rint(scaled, out=scaled).astype(np.int64)


def deal(weights: np.ndarray, bins: int, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Give each item, in the order given, to the bin with the least load; ties to the lowest bin.

    Falling weights make it the longest-processing-time rule (OrchMLLM algorithm 1, at most 4/3 of the optimum), rising
    ones DistTrain's algorithm 2. With loads L_1 <= L_2 <= ... a heap gives the next items to bins 1, 2, ... in turn for
    as long as L_j <= L_i + weight_i for all i < j: such a round is dealt at once, then loads are sorted again. Bins
    ride in the low bits of their loads, which breaks ties and spares an argsort.

    Args:
        weights: int64 ``[n]``, from :func:`whole`; those at the end that are 0 are dealt in turn.
        start: loads before the first item, int64 ``[bins]``.

    Returns:
        (bin of each item int64 ``[n]``, loads int64 ``[bins]``).
    """
    n, bits = len(weights), (bins - 1).bit_length()
    keys = np.arange(bins, dtype=np.int64)
    if start is not None:
        keys += start << bits
        keys.sort()
    steps = weights << bits
    where = np.empty(n, dtype=np.int64)
    at, end = 0, _weighing(weights)
    while at < end:
        count = min(bins, end - at)
        after = keys[:count] + steps[at : at + count]
        count = _round(keys[:count], after)
        if count < min(FEW, bins, end - at):
            count = min(HEAPED, end - at)
            where[at : at + count], keys = _heaped(steps[at : at + count], keys)
        else:
            where[at : at + count] = keys[:count]
            keys[:count] = after[:count]
        keys.sort(kind="stable")  # two runs that are nearly sorted
        at += count
    where[end:] = np.resize(keys, n - end)
    mask = (1 << bits) - 1
    where &= mask
    loads = np.empty(bins, dtype=np.int64)
    loads[keys & mask] = keys >> bits
    return where, loads


def deal_by_speed(weights: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Give each item, in the order given, to the bin that would be done with it first, int64 ``[n]``.

    The rule of Gonzalez, Ibarra and Sahni (1977) for bins of unequal speeds. A round uses its first item's weight for
    all its items, and has none of less than 0.9 of it, so it is exact where items are equal and near it elsewhere.

    Args:
        weights: int64 ``[n]``, from :func:`whole`.
        speeds: of each bin, above 0, float64 ``[bins]``.
    """
    n, bins = len(weights), len(speeds)
    bits = (bins - 1).bit_length()
    mask = (1 << bits) - 1
    slow = speeds.max() / speeds
    # Times in steps of 2^-40 of the longest that can be: on the fastest bin all items, on any bin one more.
    unit = 2.0**40 / max(1.0, float(weights.sum()) + float(weights.max(initial=0)) * float(slow.max()))
    loads = np.zeros(bins)
    numbers = np.arange(bins, dtype=np.int64)
    where = np.empty(n, dtype=np.int64)
    at, end = 0, _weighing(weights)
    steps = weights.astype(np.float64)
    while at < end:
        keys = ((loads + steps[at]) * (slow * unit)).astype(np.int64) << bits
        keys |= numbers
        keys.sort()
        chosen = keys[: min(bins, end - at)] & mask
        times = (loads[chosen] + steps[at]) * slow[chosen]
        similar = steps[at : at + len(chosen)]
        similar = similar[similar >= 0.9 * steps[at]] if similar[0] >= similar[-1] else similar[:1]
        times = times[: len(similar)]
        count = _round(times, times + similar * slow[chosen[: len(similar)]])
        if count < min(FEW, bins, end - at) and SMALL * steps[at] < loads.mean():
            count = min(HEAPED, end - at)
            where[at : at + count] = _heaped_by_time(steps[at : at + count], loads, slow)
        else:
            where[at : at + count] = chosen[:count]
            loads[chosen[:count]] += steps[at : at + count]
        at += count
    where[end:] = np.resize(numbers, n - end)
    return where


def _heaped(steps: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(key of the bin that each item goes to, keys thereafter): the plain algorithm."""
    heap = keys.tolist()  # sorted, so a heap
    chosen = [heapq.heapreplace(heap, heap[0] + step) for step in steps.tolist()]
    return np.array(chosen, dtype=np.int64), np.array(heap, dtype=np.int64)


def _heaped_by_time(steps: np.ndarray, loads: np.ndarray, slow: np.ndarray) -> list[int]:
    """Bin of each item; adds to the loads. Small items may as well go to the bin that is done with its others first."""
    paces, held = slow.tolist(), loads.tolist()
    heap = [(load * pace, number) for number, (load, pace) in enumerate(zip(held, paces, strict=True))]
    heapq.heapify(heap)
    chosen = []
    for step in steps.tolist():
        number = heap[0][1]
        held[number] += step
        heapq.heapreplace(heap, (held[number] * paces[number], number))
        chosen.append(number)
    loads[:] = held
    return chosen


def _weighing(weights: np.ndarray) -> int:
    """Number of items before those at the end that weigh nothing, which a heap would all give to one bin."""
    if len(weights) and weights[-1] == 0:
        heavy = np.flatnonzero(weights)
        return int(heavy[-1]) + 1 if len(heavy) else 0
    return len(weights)


def _round(loads: np.ndarray, after: np.ndarray) -> int:
    """Number of bins, in the order of their loads, that get an item before any of them gets its second."""
    early = loads[1:] > np.minimum.accumulate(after)[:-1]
    if len(early):
        first = int(early.argmax())
        if early[first]:
            return first + 1
    return len(loads)
