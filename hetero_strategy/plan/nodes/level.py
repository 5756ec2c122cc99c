"""Levelling many groups of bins at once: large items one by one, small ones by cutting their running sum."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64, Num

from hetero_strategy import ragged

_CUTS = (0.3, 0.55, 0.75, 0.88, 0.96, 1.0)
"""Parts of a group's items, heavy to light, that are dealt together: each levels what the one before left uneven."""

_SINGLE = 24
"""Most items of a group that are dealt one by one: each costs some numpy calls."""


def spread(
    weights: Float64[np.ndarray, "items"],
    group: Int64[np.ndarray, "items"],
    load: Num[np.ndarray, "groups width"],
    size: Float64[np.ndarray, "groups width"],
) -> Int64[np.ndarray, "items"]:
    """Find the column of each item's bin, among the bins of its group, so that ``load / size`` becomes level.

    The heaviest items go one by one to the lowest bin, all groups at once, as in LPT. The others are dealt in parts,
    heavy to light, by :func:`_deal`. A bin is then off by at most half an item at each end, which the next part, of
    lighter items, makes good.

    Args:
        weights: not negative.
        load: what each bin holds already.
        size: what each bin can bear relative to others; 0 fills the row of a group with fewer than ``width`` bins.
    """
    column = np.zeros(len(weights), dtype=np.int64)
    groups, width = load.shape
    if width == 1 or not len(weights):
        return column
    order = heavy_first(weights, group)
    count = np.bincount(group, minlength=groups)
    first = ragged.starts(count)
    load, rows = np.where(size > 0, load, np.inf), np.arange(groups)
    single = np.minimum(count, min(2 * width, _SINGLE))
    for turn in range(int(single.max())):
        taking = rows[single > turn]
        items = order[first[taking] + turn]
        lowest = np.argmin((load[taking] + weights[items][:, None]) / np.maximum(size[taking], 1e-300), axis=1)
        load[taking, lowest] += weights[items]
        column[items] = lowest
    begin = single
    for cut in _CUTS:
        end = np.maximum(begin, np.rint(count * cut).astype(np.int64))
        length = end - begin
        if length.any():
            items = order[ragged.expand(first + begin, length)]
            column[items], load = _deal(weights[items], length, load, size)
        begin = end
    return column


def _deal(weights: np.ndarray, length: np.ndarray, load: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill each group's bins with its items, ``length[g]`` of ``weights`` in a row, up to a common level.

    With loads 0 and 4 and three items of 2, the common level is (0 + 4 + 6) / 2 = 5: the first bin needs 5. The items'
    middles in their running sum are 1, 3 and 5, so the first two belong to it:

    >>> _deal(np.array([2.0, 2.0, 2.0]), np.array([3]), np.array([[0.0, 4.0]]), np.ones((1, 2)))
    (array([0, 0, 1]), array([[4., 6.]]))

    Returns:
        The column of each item's bin, int64 ``[n]``, and the loads afterwards, float64 ``[groups, width]``.
    """
    groups, width = load.shape
    running, ends = ragged.offsets(weights), ragged.offsets(length)
    height = load / np.maximum(size, 1e-300)
    order = np.argsort(height, axis=1, kind="stable")
    height = np.take_along_axis(height, order, axis=1)
    held, part = np.take_along_axis(load, order, axis=1), np.take_along_axis(size, order, axis=1)
    # Water level over the j lowest bins; the right j is the last whose own height lies below it.
    total = np.diff(running[ends])[:, None]
    real = part > 0
    level = (total + np.cumsum(np.where(real, held, 0.0), axis=1)) / np.maximum(np.cumsum(part, axis=1), 1e-300)
    last = np.maximum(np.sum(real & (level > height), axis=1) - 1, 0)[:, None]
    surface = np.take_along_axis(level, last, axis=1)
    need = np.where(real, np.maximum(0.0, part * surface - np.where(real, held, 0.0)), 0.0)
    # Cut the running sum where a bin has what it needs: an item belongs to the bin in which its middle lies.
    until = running[ends[:-1]][:, None] + np.cumsum(need, axis=1)
    cut = np.searchsorted(running[:-1] + weights / 2, until.ravel()).reshape(groups, width)
    cut = np.clip(cut, ends[:-1, None], ends[1:, None])
    cut = np.where(np.arange(width) >= last, ends[1:, None], cut)
    begins = np.concatenate([ends[:-1, None], cut[:, :-1]], axis=1)
    column = np.repeat(order.ravel(), (cut - begins).ravel())
    loads = np.empty_like(load)
    np.put_along_axis(loads, order, held + (running[cut] - running[begins]), axis=1)
    return column, loads


def heavy_first(weights: Float64[np.ndarray, "items"], group: Int64[np.ndarray, "items"]) -> Int64[np.ndarray, "items"]:
    """Items by group, heaviest first up to 1/65535 of the heaviest, ties by number."""
    top = float(weights.max(initial=0.0)) or 1.0
    light = np.uint16(65535) - (weights * (65535 / top)).astype(np.uint16)
    order = ragged.argsort_small(light)
    return order if group.max(initial=0) == 0 else order[ragged.argsort_small(group[order])]
