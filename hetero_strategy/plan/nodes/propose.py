"""Permuting balanced mini-batches over instances in milliseconds: proposals, then swaps for the worst sources."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, Num

from hetero_strategy.plan.nodes.slots import Cells, make_cells
from hetero_strategy.plan.nodes.swap_batches import Flow, refine

_WORK = 1 << 17
"""Entries of ``[batches, nodes]`` looked at over all passes, so that any size takes milliseconds."""
_PASSES = 4
"""Most rounds of proposals, each with other weights."""
_SWAPS = 32
"""Most swaps of two batches."""


def place_items(
    size: Num[np.ndarray, "items"],
    source: Int64[np.ndarray, "items"],
    batch: Int64[np.ndarray, "items"],
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "batches"],
    *,
    classes: Int64[np.ndarray, "batches"] | None = None,
) -> Int64[np.ndarray, "batches"]:
    """Permute balanced mini-batches over slots (instances), such that sources send little to other nodes.

    The aim is the least maximum over sources of bytes to other nodes (OrchMLLM section 5.2.2), in milliseconds and from
    items, without a matrix of sources.

    In rounds, every batch proposes to the node with room that holds most of its bytes, and every node accepts what it
    holds most of. Bytes of sources with much to send count more; where the size allows it, passes are repeated with
    more weight for those that came out worst. Then batches are swapped for the source that sends most, while that
    helps. The result is never worse than batch ``b`` on slot ``b``, neither in the maximum over sources nor in total.

    Args:
        size, source, batch: bytes, source and balanced batch of each item.
        source_node, slot_node, classes: as for :func:`~hetero_strategy.plan.nodes.placement_ilp.solve_placement`.
    """
    cells = make_cells(source_node, slot_node, classes)
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
    cell, sent = refine(flow, cell, sent, float(start.sum()), swaps)
    if sent.max() > start.max():
        cell, sent = refine(flow, cells.of_slot, start, float(start.sum()), swaps)
    return cells.slots(cell)


def propose(gains: Num[np.ndarray, "batches cells"], cells: Cells) -> Int64[np.ndarray, "batches"]:
    """Choose the cell of each batch by rounds of proposals, from what it gains in each cell.

    A batch of which no node with room holds anything waits until the others are placed, and takes what is left.
    """
    cell = np.full(len(gains), -1, dtype=np.int64)
    for kind in range(len(cells.room)):
        room = cells.room[kind].copy()
        of_kind = np.flatnonzero(cells.of_batch == kind)
        waiting, gain = of_kind, gains if len(of_kind) == len(gains) else gains[of_kind]
        while len(waiting):
            best = np.argmax(gain, axis=1)
            value = gain[np.arange(len(gain)), best]
            order = np.lexsort((-value, best))
            order = order[value[order] > 0]
            asked = best[order]
            rank = np.arange(len(asked)) - np.searchsorted(asked, asked)  # among those that ask the same cell
            accepted = rank < room[asked]
            cell[waiting[order[accepted]]] = asked[accepted]
            room -= np.bincount(asked[accepted], minlength=len(room))
            refused = np.sort(order[~accepted])
            waiting, gain = waiting[refused], np.where(room > 0, gain[refused], 0.0)
        cell[of_kind[cell[of_kind] < 0]] = np.repeat(np.arange(len(room)), room)
    return cell


def _urgency(sent: np.ndarray) -> np.ndarray:
    """Weight of each source: its part of the largest, to the fifth power, float64 ``[sources]``.

    Products alone are the same on every processor, and all ranks must find the same plan.
    """
    part = np.maximum(sent, 1e-300) / max(float(sent.max()), 1e-300)
    squared = part * part
    return np.maximum(squared * squared * part, 1e-30)
