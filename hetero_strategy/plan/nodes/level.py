"""Levelling many groups of bins at once: large items one by one, small ones by the piece of their running sum."""

from __future__ import annotations

import numpy as np

from hetero_strategy import ragged

_CUTS = (0.3, 0.55, 0.75, 0.88, 0.96, 1.0)
"""Parts of a group's items, heavy to light, that are dealt together: each levels what the one before left uneven."""

_SINGLE = 24
"""Most items of a group that are dealt one by one: each costs some numpy calls."""

_LOOKED_AT = 10
"""Items of a bin that one round of exchanges looks at."""


def spread(weights: np.ndarray, group: np.ndarray, load: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Deal the items of each group to the group's bins so that ``load / size`` becomes level.

    The heaviest items go one by one to the lowest bin, all groups at once, as in LPT. The others are dealt in parts,
    heavy to light: bins are filled to a common level by cutting the running sum of the part's weights. A bin is off by
    at most half an item at each end, which the next part, of lighter items, mends.

    Args:
        weights: of each item, float64 ``[n]``, not negative.
        group: of each item, int64 ``[n]``.
        load: of each bin so far, float64 ``[groups, width]``.
        size: what a bin can bear relative to others, float64 ``[groups, width]``; 0: no bin, which fills short rows.

    Returns:
        Column of each item's bin, int64 ``[n]``.
    """
    column = np.zeros(len(weights), dtype=np.int64)
    groups, width = load.shape
    if width == 1 or not len(weights):
        return column
    order = _heavy_first(weights, group)
    count = np.bincount(group, minlength=groups)
    first = ragged.starts(count)
    load, rows = np.where(size > 0, load, np.inf), np.arange(groups)
    single = np.minimum(count, min(2 * width, _SINGLE))
    for turn in range(int(single.max())):
        mine = rows[single > turn]
        items = order[first[mine] + turn]
        lowest = np.argmin((load[mine] + weights[items][:, None]) / np.maximum(size[mine], 1e-300), axis=1)
        load[mine, lowest] += weights[items]
        column[items] = lowest
    begin = single
    for cut in _CUTS:
        end = np.maximum(begin, np.rint(count * cut).astype(np.int64))
        length = end - begin
        if length.any():
            items = order[_ranges(first + begin, length)]
            column[items], load = _deal(weights[items], length, load, size)
        begin = end
    return column


def _deal(weights: np.ndarray, length: np.ndarray, load: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut the running sum of each group's items (``length[g]`` in a row) where bins are level; columns and loads."""
    groups, width = load.shape
    running = np.concatenate([[0.0], np.cumsum(weights)])
    ends = ragged.offsets(length)
    height = load / np.maximum(size, 1e-300)
    order = np.argsort(height, axis=1, kind="stable")
    height = np.take_along_axis(height, order, axis=1)
    held, part = np.take_along_axis(load, order, axis=1), np.take_along_axis(size, order, axis=1)
    # Water level over the j lowest bins; the right j is the last whose own height lies below it.
    total = np.diff(running[ends])[:, None]
    real = part > 0
    level = (total + np.cumsum(np.where(real, held, 0.0), axis=1)) / np.maximum(np.cumsum(part, axis=1), 1e-300)
    last = np.sum(real & (level > height), axis=1) - 1
    surface = level[np.arange(groups), np.maximum(last, 0)][:, None]
    need = np.where(real, np.maximum(0.0, part * surface - np.where(real, held, 0.0)), 0.0)
    until = running[ends[:-1]][:, None] + np.cumsum(need, axis=1)
    middle = running[:-1] + weights / 2
    cut = np.searchsorted(middle, until.ravel()).reshape(groups, width)
    cut = np.clip(cut, ends[:-1, None], ends[1:, None])
    cut = np.where(np.arange(width) >= np.maximum(last, 0)[:, None], ends[1:, None], cut)
    begins = np.concatenate([ends[:-1, None], cut[:, :-1]], axis=1)
    column = np.repeat(order.ravel(), (cut - begins).ravel())
    after = held + (running[cut] - running[begins])
    result = np.empty_like(load)
    np.put_along_axis(result, order, after, axis=1)
    return column, result


def _heavy_first(weights: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Items by group, heaviest first up to 1/65535 of the heaviest; ties by number."""
    top = float(weights.max())
    key = (
        np.uint16(65535) - (weights * (65535 / top)).astype(np.uint16)
        if top > 0
        else np.zeros(len(weights), dtype=np.uint16)
    )
    order = np.argsort(key, kind="stable")  # of 16 bits: a radix sort, ten times faster than one of float64
    return order if group.max() == 0 else order[np.argsort(narrow(group)[order], kind="stable")]


def narrow(numbers: np.ndarray) -> np.ndarray:
    """The same numbers in 16 bits where they fit, since those sort several times faster."""
    return numbers.astype(np.uint16) if numbers.max(initial=0) < 1 << 16 else numbers


def _ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``start[0], start[0] + 1, ...`` of each range in turn."""
    before = ragged.starts(length)
    return np.arange(int(length.sum())) + np.repeat(start - before, length)


def even_out(
    weights: np.ndarray, bin_of: np.ndarray, load: np.ndarray, group_of: np.ndarray, limit: float, *, rounds: int = 8
) -> np.ndarray:
    """Exchange items between bins of the same group until no load is above ``limit``, no exchange helps, or the rounds
    are over.

    In every round the heaviest bin of each group is paired with its lightest, the second with the second, and so on;
    each pair with a bin above the limit exchanges the two of some items of either whose difference is nearest to half
    of what separates the bins. Differences between items are much finer than items.

    Args:
        weights: of each item, float64 ``[n]``.
        bin_of: each item's bin, int64 ``[n]``; a bin keeps its number of items.
        load: of each bin, float64 ``[bins]``.
        group_of: group of each bin, int64 ``[bins]``.
        limit: of a bin.
        rounds: how often.

    Returns:
        The new bin of each item.
    """
    if load.max(initial=0.0) <= limit:
        return bin_of
    bin_of, load = bin_of.copy(), load.copy()
    order = np.argsort(narrow(bin_of), kind="stable")
    count = np.bincount(bin_of, minlength=len(load))
    first = ragged.starts(count)
    filled = np.flatnonzero(count > 0)
    size = np.bincount(group_of[filled], minlength=int(group_of.max(initial=0)) + 1)
    base = ragged.starts(size)
    for turn in range(rounds):
        ranked = filled[np.lexsort((load[filled], group_of[filled]))]
        group = group_of[ranked]
        position = np.arange(len(ranked)) - base[group]
        heavy = ranked[(base + size - 1)[group] - position]
        wanted = (position < size[group] // 2) & (load[heavy] > limit)
        light, heavy = ranked[wanted], heavy[wanted]
        if not len(heavy):
            break
        give_at, take_at = _looked_at(first, count, heavy, turn), _looked_at(first, count, light, turn)
        half = (load[heavy] - load[light]) / 2
        miss = (weights[order[give_at]] - half[:, None])[:, :, None] - weights[order[take_at]][:, None, :]
        miss = np.abs(miss, out=miss).reshape(len(half), -1)
        best = np.argmin(miss, axis=1)
        pair = np.flatnonzero(miss[np.arange(len(half)), best] < half)
        if not len(pair):
            break
        give_at, take_at = give_at[pair, best[pair] // _LOOKED_AT], take_at[pair, best[pair] % _LOOKED_AT]
        given, taken = order[give_at], order[take_at]
        moved = weights[given] - weights[taken]
        load[heavy[pair]] -= moved
        load[light[pair]] += moved
        bin_of[given], bin_of[taken] = light[pair], heavy[pair]
        order[give_at], order[take_at] = taken, given
    return bin_of


def _looked_at(first: np.ndarray, count: np.ndarray, bins: np.ndarray, turn: int) -> np.ndarray:
    """Positions of some items of each bin, spread over it and others in each turn, int64 ``[bins, _LOOKED_AT]``."""
    step = np.arange(_LOOKED_AT)[None, :] * count[bins][:, None] // _LOOKED_AT
    return first[bins][:, None] + (step + turn) % count[bins][:, None]
