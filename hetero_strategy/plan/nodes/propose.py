"""Permuting balanced mini-batches over instances in milliseconds: proposals, then swaps for the worst sources."""

from __future__ import annotations

import numpy as np

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.nodes.slots import Cells, make_cells
from hetero_strategy.plan.nodes.swap_batches import Flow, refine

_WORK = 1 << 17
"""Entries of ``[batches, nodes]`` that may be looked at again; fewer passes above, for milliseconds at any size."""
_PASSES = 4
_SWAPS = 32


def place_items(
    size: np.ndarray,
    source: np.ndarray,
    batch: np.ndarray,
    source_node: np.ndarray,
    slot_node: np.ndarray,
    *,
    classes: np.ndarray | None = None,
) -> np.ndarray:
    """The fast method of :func:`~hetero_strategy.plan.nodes.place_batches`, from items: no matrix of sources.

    In rounds, every batch proposes to the node with room that holds most of its bytes, and every node accepts what it
    holds most of. Bytes of sources with much to send count more; where the size allows it, passes are repeated with
    more weight for those that came out worst. Then batches are swapped for the source that sends most, while that
    helps. The result is never worse than batch ``b`` on slot ``b``, neither in the maximum over sources nor in total.

    Args:
        size: bytes of each item, ``[n]``.
        source: of each item, int64 ``[n]``.
        batch: of each item, int64 ``[n]``.
        source_node: node of each source, int64 ``[sources]``.
        slot_node: node of each slot, int64 ``[batches]``.
        classes: int64 ``[batches]``: batches stay in their class.

    Returns:
        Slot of each batch, int64 ``[batches]``: a permutation.

    Raises:
        ConfigError: ``classes`` is not one number per slot, or an item has a source or batch that does not exist.
    """
    cells = make_cells(source_node, slot_node, classes)
    _check(source, batch, len(source_node), len(slot_node))
    same = np.arange(len(slot_node))
    if cells.count <= 1 or not np.any(cells.of_source >= 0):
        return same
    flow = Flow(np.asarray(size, dtype=np.float64), source, batch, cells)
    start = flow.sent(cells.of_slot)
    passes = int(np.clip(_WORK // (len(slot_node) * cells.count), 1, _PASSES))
    swaps = int(np.clip(_WORK // (8 * len(slot_node)), 8, _SWAPS))

    cell, sent = cells.of_slot, start
    weight = _urgency(flow.total)
    tried = False
    for _ in range(passes):
        proposed = propose(flow.gains(weight), cells)
        reached = flow.sent(proposed)
        if reached.sum() <= start.sum() and (not tried or reached.max() < sent.max()):
            cell, sent, tried = proposed, reached, True
        weight = weight * _urgency(reached)
        weight /= weight.max()
    cell, sent = refine(flow, cell, sent, start.sum(), swaps)
    if sent.max() > start.max():
        cell, sent = refine(flow, cells.of_slot, start, start.sum(), swaps)
    return cells.slots(cell)


def propose(gains: np.ndarray, cells: Cells) -> np.ndarray:
    """Cell of each batch, int64 ``[batches]``, by rounds of proposals; ``gains`` is float64 ``[batches, cells]``.

    A batch of which no node with room holds anything waits until the others are placed, and takes what is left.
    """
    cell = np.full(len(gains), -1, dtype=np.int64)
    for kind in range(len(cells.room)):
        room = cells.room[kind].copy()
        of_kind = np.flatnonzero(cells.of_batch == kind)
        waiting, mine = of_kind, gains if len(of_kind) == len(gains) else gains[of_kind]
        while len(waiting):
            best = np.argmax(mine, axis=1)
            value = mine[np.arange(len(mine)), best]
            order = np.lexsort((-value, best))
            order = order[value[order] > 0]
            asked = best[order]
            place_in_line = np.arange(len(asked)) - np.searchsorted(asked, asked)
            accepted = place_in_line < room[asked]
            cell[waiting[order[accepted]]] = asked[accepted]
            room -= np.bincount(asked[accepted], minlength=len(room))
            left = np.sort(order[~accepted])
            waiting, mine = waiting[left], np.where(room > 0, mine[left], 0.0)
        cell[of_kind[cell[of_kind] < 0]] = np.repeat(np.arange(len(room)), room)
    return cell


def _urgency(sent: np.ndarray) -> np.ndarray:
    """How much each source is heard: its part of the largest, to the fifth power.

    Only products, which are the same on every processor; all ranks must find the same plan.
    """
    part = np.maximum(sent, 1e-300) / max(float(sent.max()), 1e-300)
    squared = part * part
    urgency: np.ndarray = np.maximum(squared * squared * part, 1e-30)
    return urgency


def _check(source: np.ndarray, batch: np.ndarray, sources: int, batches: int) -> None:
    for name, values, count in (("source", source, sources), ("batch", batch, batches)):
        if len(values) and (values.min() < 0 or values.max() >= count):
            raise ConfigError(
                f"data.nodes: items have {name} {values.min()} to {values.max()}, but there are {count}; "
                "number them from 0"
            )
