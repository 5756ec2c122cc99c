"""Swaps of two batches between nodes that relieve the source that sends most bytes to other nodes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64, Num

from hetero_strategy import ragged
from hetero_strategy.plan.nodes.slots import Cells


class Flow:
    """Bytes of items between sources and batches, kept as items because a matrix of both would be mostly zeros."""

    def __init__(
        self,
        size: Float64[np.ndarray, "items"],
        source: Int64[np.ndarray, "items"],
        batch: Int64[np.ndarray, "items"],
        cells: Cells,
    ) -> None:
        self.size, self.source, self.batch, self.cells = size, source, batch, cells
        self.sources = len(cells.of_source)
        self.batches = len(cells.of_slot)
        self.cell = cells.of_source[source]
        """Cell of each item's source, or -1 if it has none."""
        self.total = np.bincount(source, weights=size, minlength=self.sources)
        """Bytes of each source."""

    def sent(self, cell: Int64[np.ndarray, "batches"]) -> Num[np.ndarray, "sources"]:
        """Bytes that each source sends to other nodes if batch ``b`` is on ``cell[b]``."""
        away = cell[self.batch] != self.cell
        return np.bincount(self.source, weights=self.size * away, minlength=self.sources)

    def gains(self, weight: Float64[np.ndarray, "sources"]) -> Num[np.ndarray, "batches cells"]:
        """Bytes of each batch that each cell holds, times the weight of their source."""
        size, batch, cell = self.size * weight[self.source], self.batch, self.cell
        if cell.size and cell.min() < 0:
            homed = cell >= 0
            size, batch, cell = size[homed], batch[homed], cell[homed]
        shape = (self.batches, self.cells.count)
        return np.bincount(batch * shape[1] + cell, weights=size, minlength=shape[0] * shape[1]).reshape(shape)


_CANDIDATES = 16
"""Batches looked at for one swap, namely those that hold most of the worst source's bytes."""


def refine(
    flow: Flow, cell: Int64[np.ndarray, "batches"], sent: Num[np.ndarray, "sources"], total: float, swaps: int
) -> tuple[Int64[np.ndarray, "batches"], Num[np.ndarray, "sources"]]:
    """Swap batches for the worst source until no swap helps: new cells, and a ``sent`` whose maximum is no larger.

    Args:
        cell: cell of each batch.
        sent: bytes that each source then sends to other nodes.
        total: bytes between nodes that may not be exceeded.
    """
    cell, sent = cell.copy(), sent.copy()
    spare = max(0.0, total - float(sent.sum()))
    tables = _Tables(flow)
    for _ in range(swaps):
        worst = int(np.argmax(sent))
        if flow.cells.of_source[worst] < 0:
            break  # whatever is done, all its bytes cross
        swap = _best_swap(flow, tables, cell, sent, worst, spare)
        if swap is None:
            break
        joins, leaves, more = swap
        here, there = cell[leaves], cell[joins]
        _move(flow, tables, sent, joins, there, here)
        _move(flow, tables, sent, leaves, here, there)
        cell[joins], cell[leaves] = here, there
        spare -= more
    return cell, sent


class _Tables:
    """Items grouped by batch, and sources grouped by cell."""

    def __init__(self, flow: Flow) -> None:
        self.by_batch, self.start = ragged.group_by(flow.batch, flow.batches)
        homed = np.flatnonzero(flow.cells.of_source >= 0)
        owner = flow.cells.of_source[homed]
        order, bounds = ragged.group_by(owner, flow.cells.count)
        count = np.diff(bounds)
        self.width = int(count.max(initial=0))
        column = ragged.within(count)
        self.sources = np.full((flow.cells.count, self.width), -1, dtype=np.int64)
        """Sources of each cell, ``[cells, width]``; -1 fills short rows."""
        self.sources[owner[order], column] = homed[order]
        self.column = np.zeros(flow.sources, dtype=np.int64)
        """Column of each source in its cell's row."""
        self.column[homed[order]] = column

    def items(self, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Items of some batches, and for each the position in ``batches`` of the batch that it is in."""
        count = self.start[batches + 1] - self.start[batches]
        return self.by_batch[ragged.expand(self.start[batches], count)], np.repeat(np.arange(len(batches)), count)


def _move(flow: Flow, tables: _Tables, sent: np.ndarray, batch: int, before: int, after: int) -> None:
    """Update ``sent`` for a batch that moves: bytes of its old cell's sources now cross, of its new one's no longer."""
    items = tables.by_batch[tables.start[batch] : tables.start[batch + 1]]
    for cell, sign in ((before, 1.0), (after, -1.0)):
        local = items[flow.cell[items] == cell]
        np.add.at(sent, flow.source[local], sign * flow.size[local])


def _largest(held: np.ndarray) -> np.ndarray:
    """The batches looked at, in order; of equal ones the first: a partition finds others on other processors."""
    return np.sort(np.argsort(-held, kind="stable")[: min(_CANDIDATES, np.count_nonzero(held))])


def _best_swap(
    flow: Flow, tables: _Tables, cell: np.ndarray, sent: np.ndarray, worst: int, spare: float
) -> tuple[int, int, float] | None:
    """Find the swap after which the largest sender of the two cells sends least.

    The worst source's cell, "here", takes a batch that holds much of it and gives one of its own to the other's cell,
    "there". With ``s`` bytes sent before, a source here sends ``s - (its bytes in the batch that joins) + (its bytes in
    the batch that leaves)`` after, and a source there the opposite; sources of other cells send the same. All pairs of
    batches are judged at once, on arrays ``[joining, residents, sources of a cell]``.

    Returns:
        The batch that joins, the batch that leaves, and by how many bytes the total grows; None if no swap helps
        within the ``spare`` bytes.
    """
    here = int(flow.cells.of_source[worst])
    own = np.flatnonzero(flow.source == worst)
    residents = np.flatnonzero(cell == here)
    held = np.bincount(flow.batch[own], flow.size[own], flow.batches)
    held[residents] = 0.0
    joining = _largest(held)
    if not len(joining) or not len(residents):
        return None
    there = cell[joining]
    width = tables.width
    # Bytes of sources here in batches that join and leave, and of sources there in those that join, [batches, width]
    near, far = tables.sources[here], tables.sources[there]
    join_here = _bytes_of_cell(flow, tables, joining, np.full(len(joining), here))
    leave_here = _bytes_of_cell(flow, tables, residents, np.full(len(residents), here))
    join_there = _bytes_of_cell(flow, tables, joining, there)
    # Bytes of sources there in the batches that leave, [joining, residents, width]
    items, position = tables.items(residents)
    dense = np.bincount(position * flow.sources + flow.source[items], flow.size[items], len(residents) * flow.sources)
    leave_there = dense.reshape(len(residents), flow.sources)[:, far].transpose(1, 0, 2)
    leave_there = np.where(far[:, None, :] >= 0, leave_there, 0.0)

    after_here = np.where(near >= 0, sent[near], 0.0) - join_here[:, None, :] + leave_here[None, :, :]
    after_there = np.where(far >= 0, sent[far], 0.0)[:, None, :] + join_there[:, None, :] - leave_there
    top = np.maximum(after_here.max(axis=2), after_there.max(axis=2)) if width else np.zeros((0, 0))
    more = (leave_here.sum(axis=1)[None, :] - leave_there.sum(axis=2)) + (join_there - join_here).sum(axis=1)[:, None]
    allowed = (more <= spare) & (flow.cells.of_batch[joining][:, None] == flow.cells.of_batch[residents][None, :])
    top = np.where(allowed, top, np.inf)
    best = int(np.argmin(top))
    if not top.flat[best] < sent[worst] * (1.0 - 1e-9):
        return None
    join, leave = divmod(best, len(residents))
    return int(joining[join]), int(residents[leave]), float(more[join, leave])


def _bytes_of_cell(flow: Flow, tables: _Tables, batches: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Bytes of every source of ``cell[b]`` in ``batches[b]``, float64 ``[batches, width]``."""
    items, position = tables.items(batches)
    local = flow.cell[items] == cell[position]
    items, position = items[local], position[local]
    key = position * tables.width + tables.column[flow.source[items]]
    return np.bincount(key, flow.size[items], len(batches) * tables.width).reshape(len(batches), tables.width)
