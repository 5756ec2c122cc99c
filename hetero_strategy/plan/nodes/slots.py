"""Nodes that have slots, numbered 0, 1, ...: called cells, since node numbers may have holes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_strategy.errors import ConfigError


@dataclass(frozen=True)
class Cells:
    """Where sources and slots are; all int64."""

    of_source: np.ndarray
    """``[sources]``: cell of each source; -1: its node has no slot, so that all its bytes cross."""
    of_slot: np.ndarray
    """``[slots]``."""
    of_batch: np.ndarray
    """``[slots]``: class of each batch, ``0 .. classes - 1``."""
    room: np.ndarray
    """``[classes, cells]``: slots of each class on each cell."""

    @property
    def count(self) -> int:
        """Number of cells."""
        return int(self.room.shape[1])

    def fits(self, cell: np.ndarray) -> bool:
        """Every cell holds as many batches of each class as it has slots of it."""
        held = np.bincount(self.of_batch * self.count + cell, minlength=self.room.size)
        return bool(np.array_equal(held.reshape(self.room.shape), self.room))

    def slots(self, cell: np.ndarray) -> np.ndarray:
        """Slots of batches whose cells are known: ascending inside a cell and class, int64 ``[slots]``."""
        found = np.empty(len(cell), dtype=np.int64)
        group = self.of_batch * self.count
        found[np.argsort(group + cell, kind="stable")] = np.argsort(group + self.of_slot, kind="stable")
        return found


def make_cells(source_node: np.ndarray, slot_node: np.ndarray, classes: np.ndarray | None) -> Cells:
    """Number the nodes that have slots.

    Raises:
        ConfigError: ``classes`` is not one number per slot.
    """
    if classes is not None and len(classes) != len(slot_node):
        raise ConfigError(f"data.nodes: {len(classes)} classes for {len(slot_node)} slots; give one per slot")
    nodes, of_slot = np.unique(slot_node, return_inverse=True)
    of_batch = np.zeros(len(slot_node), dtype=np.int64)
    if classes is not None:
        of_batch = np.unique(classes, return_inverse=True)[1]
    kinds = int(of_batch.max(initial=0)) + 1
    room = np.bincount(of_batch * len(nodes) + of_slot, minlength=kinds * len(nodes)).reshape(kinds, len(nodes))
    return Cells(cell_of(source_node, nodes), of_slot, of_batch, room)


def cell_of(node: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Position of each node in ``nodes`` (ascending, int64 ``[cells]``); -1: not among them."""
    if not len(nodes):
        return np.full(len(node), -1, dtype=np.int64)
    if len(node) and nodes[0] >= 0 and nodes[-1] < 16 * len(nodes) + 64:  # a table is ten times faster than a search
        table = np.full(int(nodes[-1]) + 3, -1, dtype=np.int64)  # one entry more on either side, for numbers outside
        table[nodes + 1] = np.arange(len(nodes))
        return table[np.clip(node, -1, nodes[-1] + 1) + 1]
    at = np.minimum(np.searchsorted(nodes, node), len(nodes) - 1)
    return np.where(nodes[at] == node, at, -1)
