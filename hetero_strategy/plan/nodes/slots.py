"""Where sources and slots are, and the bytes between them.

A cell is a node that has slots. Cells are numbered 0, 1, ..., while node numbers may have holes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Num

from hetero_strategy import ragged


@dataclass(frozen=True)
class Cells:
    """In which cells sources and slots are."""

    of_source: Int64[np.ndarray, "sources"]
    """Cell of each source, or -1 if its node has no slot, so that all its bytes cross."""
    of_slot: Int64[np.ndarray, "slots"]
    """Cell of each slot."""
    of_batch: Int64[np.ndarray, "slots"]
    """Class of each batch, ``0 .. classes - 1``."""
    room: Int64[np.ndarray, "classes cells"]
    """Slots of each class on each cell."""

    @property
    def count(self) -> int:
        """How many cells there are."""
        return int(self.room.shape[1])

    def fits(self, cell: Int64[np.ndarray, "slots"]) -> bool:
        """Whether every cell holds as many batches of each class as it has slots of that class."""
        held = np.bincount(self.of_batch * self.count + cell, minlength=self.room.size)
        return bool(np.array_equal(held.reshape(self.room.shape), self.room))

    def slots(self, cell: Int64[np.ndarray, "slots"]) -> Int64[np.ndarray, "slots"]:
        """Slot of each batch, from the cell of each batch; ascending inside a cell and class."""
        slots = np.empty(len(cell), dtype=np.int64)
        group = self.of_batch * self.count
        slots[ragged.argsort_small(group + cell)] = ragged.argsort_small(group + self.of_slot)
        return slots


def make_cells(
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "slots"],
    classes: Int64[np.ndarray, "slots"] | None,
) -> Cells:
    """Number the nodes that have slots."""
    nodes, of_slot = np.unique(slot_node, return_inverse=True)
    of_batch = np.zeros(len(slot_node), dtype=np.int64)
    if classes is not None:
        of_batch = np.unique(classes, return_inverse=True)[1]
    kinds = int(of_batch.max(initial=0)) + 1
    room = np.bincount(of_batch * len(nodes) + of_slot, minlength=kinds * len(nodes)).reshape(kinds, len(nodes))
    return Cells(cell_of(source_node, nodes), of_slot, of_batch, room)


def cell_of(node: Int64[np.ndarray, "sources"], nodes: Int64[np.ndarray, "cells"]) -> Int64[np.ndarray, "sources"]:
    """Position of each source's node in ``nodes`` (ascending), or -1 if it is not among them."""
    if len(node) and nodes[0] >= 0 and nodes[-1] < 16 * len(nodes) + 64:  # a table is ten times faster than a search
        table = np.full(int(nodes[-1]) + 3, -1, dtype=np.int64)  # one entry more on either side, for numbers outside
        table[nodes + 1] = np.arange(len(nodes))
        return table[np.clip(node, -1, nodes[-1] + 1) + 1]
    position = np.minimum(np.searchsorted(nodes, node), len(nodes) - 1)
    return np.where(nodes[position] == node, position, -1)


def volumes(
    size: Num[np.ndarray, "items"],
    source: Int64[np.ndarray, "items"],
    batch: Int64[np.ndarray, "items"],
    sources: int,
    batches: int,
) -> Float64[np.ndarray, "sources batches"]:
    """Bytes of each source in each batch (the cost matrix of OrchMLLM's algorithm 3), from those of each item.

    A source is the instance that read the item; or, for rows that an encoder sends on, the instance they go to
    (direction does not change a volume). Nodes may stand for their instances where only totals matter.
    """
    return np.bincount(source * batches + batch, weights=size, minlength=sources * batches).reshape(sources, batches)
