"""Sizes of a global batch's items that became known by decoding them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hetero_strategy.data.plan import StepItems


@dataclass(frozen=True)
class ItemSizes:
    """Of all items of one encoder or generator in a global batch, by sample, then order within it; int64 ``[n]``."""

    sizes: np.ndarray
    """int64 ``[n, k]``, as the module's processor measures them."""
    length: np.ndarray
    """Raw rows: what the processor loads."""
    rows: np.ndarray
    """Rows that cross the module's edges; 0 of an item that was not read."""
    hidden: np.ndarray
    """Rows inside the module."""
    read: np.ndarray
    """bool ``[n]``; the others are not part of the step."""
    targets: np.ndarray | None = None
    """Elements that a generator's loss counts; None for an encoder."""


def expanded(
    tokens: np.ndarray, items: Mapping[str, StepItems], read: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, StepItems]]:
    """A global batch in which items have become their rows.

    Args:
        tokens: tokens of each sample with one of them for each item, int64 ``[S]``.
        items: all items of the samples by module; ``start`` counts such tokens.
        read: module -> which of its items are kept, bool ``[n]``; the rows of the others are 0.

    Returns:
        Tokens of each sample, int64 ``[S]``, and the kept items with their places among these.
    """
    if not items:
        return tokens, {}
    sample = np.concatenate([table.sample for table in items.values()])
    rows = np.concatenate([table.rows for table in items.values()])
    order = np.lexsort((np.concatenate([table.start for table in items.values()]), sample))
    more = rows[order] - 1
    ahead = np.cumsum(more) - more  # of all items before, those of earlier samples included
    counts = np.bincount(sample, minlength=len(tokens))
    first = (np.cumsum(counts) - counts)[sample[order]]
    shift = np.empty(len(rows), np.int64)
    shift[order] = ahead - ahead[first]
    grown = tokens + np.bincount(sample, weights=rows - 1, minlength=len(tokens)).astype(np.int64)
    moved, place = {}, 0
    for module, table in items.items():
        keep = np.flatnonzero(read[module])
        mine = shift[place : place + len(table.sample)]
        place += len(table.sample)
        moved[module] = replace(
            table,
            sample=table.sample[keep],
            rows=table.rows[keep],
            start=(table.start + mine)[keep],
            hidden=table.hidden[keep],
            targets=None if table.targets is None else table.targets[keep],
        )
    return grown, moved
