"""OrchMLLM's node-wise rearrangement (arXiv:2503.23830, section 5.2.2, algorithm 3).

Balanced mini-batches are permuted over instances, so that the instance that sends most bytes to other nodes sends as
few as possible. No load changes. Importing this file registers two names for ``BalanceConfig(rearrange=...)``:

* ``ilp``: the paper's integer program, solved by HiGHS through cvxpy.
* ``permute``: proposals of batches to nodes, then swaps for the worst sender, in milliseconds.

A source is the instance that read an item; for rows that an encoder sends on, the instance that receives them, as the
direction does not change a volume. A cell is a node that has slots. Cells are numbered 0, 1, ..., while node numbers
may have gaps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Num

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError, require
from hetero_strategy.plan.near_home import number_nodes, propose, register_rearrangement

require("cvxpy", "papers", "hetero_strategy.papers.orchmllm")

_WORK = 1 << 17
"""Entries of ``[batches, nodes]`` evaluated over all passes, so that any size takes milliseconds."""
_PASSES = 4
"""Most rounds of proposals, each with other weights."""
_SWAPS = 32
"""Most swaps of two batches."""
_CANDIDATES = 16
"""Batches tried for one swap, namely those that hold most of the worst source's bytes."""


@dataclass(frozen=True)
class Cells:
    """The cells of sources and slots."""

    of_source: Int64[np.ndarray, "sources"]
    """Cell of each source, or -1 if its node has no slot, so that all its bytes cross."""
    of_slot: Int64[np.ndarray, "slots"]
    """Cell of each slot."""
    room: Int64[np.ndarray, "cells"]
    """Slots on each cell."""

    @property
    def count(self) -> int:
        """Return the number of cells."""
        return len(self.room)

    def fits(self, cell: Int64[np.ndarray, "slots"]) -> bool:
        """Tell whether every cell holds as many batches as it has slots."""
        return bool(np.array_equal(np.bincount(cell, minlength=self.count), self.room))

    def slots(self, cell: Int64[np.ndarray, "slots"]) -> Int64[np.ndarray, "slots"]:
        """Return the slot of each batch, from the cell of each batch; ascending inside a cell."""
        slots = np.empty(len(cell), dtype=np.int64)
        slots[ragged.argsort_small(cell)] = ragged.argsort_small(self.of_slot)
        return slots


def make_cells(source_node: Int64[np.ndarray, "sources"], slot_node: Int64[np.ndarray, "slots"]) -> Cells:
    """Number the nodes that have slots."""
    nodes, of_slot = np.unique(slot_node, return_inverse=True)
    return Cells(number_nodes(source_node, nodes), of_slot, np.bincount(of_slot))


def volumes(
    size: Num[np.ndarray, "items"],
    source: Int64[np.ndarray, "items"],
    batch: Int64[np.ndarray, "items"],
    sources: int,
    batches: int,
) -> Float64[np.ndarray, "sources batches"]:
    """Sum the bytes of items by source and batch: the cost matrix of the paper's algorithm 3."""
    volume = np.bincount(source * batches + batch, weights=size, minlength=sources * batches)
    return volume.reshape(sources, batches).astype(np.float64)  # bincount counts in whole numbers where nothing is sent


@dataclass(frozen=True)
class PlacementSolution:
    """A result of the solver."""

    slots: Int64[np.ndarray, "batches"] | None
    """Slot of each batch; None: no placement was found in time."""
    bound: float
    """Lower bound over placements of the maximum over sources of bytes to other nodes."""
    optimal: bool
    """Whether ``slots`` are proven best, up to the solver's gap of 0.01 %."""


def by_program(
    size: Num[np.ndarray, "items"],
    source: Int64[np.ndarray, "items"],
    batch: Int64[np.ndarray, "items"],
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "slots"],
    *,
    seconds: float = 60.0,
) -> Int64[np.ndarray, "slots"]:
    """Choose the best slot (instance) for each balanced mini-batch, by :func:`solve_placement`; see :func:`permute`."""
    volume = volumes(size, source, batch, len(source_node), len(slot_node))
    solution = solve_placement(volume, source_node, slot_node, time_limit=seconds)
    if not solution.optimal or solution.slots is None:
        # The state of a stopped search depends on the processor's speed, and ranks would disagree (law 7).
        raise ConfigError(
            f"balance: rearrange='ilp' did not solve {len(slot_node)} batches on {len(np.unique(slot_node))} nodes in "
            f"{seconds:g} s; use rearrange='permute'"
        )
    return solution.slots


def solve_placement(
    volume: Float64[np.ndarray, "sources batches"],
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "batches"],
    *,
    time_limit: float = 60.0,
) -> PlacementSolution:
    """Find the least maximum over sources of bytes to other nodes, over all placements of batches on nodes.

    The program has variables ``[batches, nodes]``, a capacity per node, and a row per source.

    Args:
        volume: bytes of each source in each batch (:func:`volumes`).
        source_node, slot_node: arguments of :func:`permute`.
        time_limit: seconds that the solver may take.
    """
    import cvxpy as cp  # slow to import

    cells = make_cells(source_node, slot_node)
    total = volume.sum(axis=1)
    unit = float(total.max(initial=0.0)) or 1.0  # the solver's tolerances are absolute
    fixed = float(total[cells.of_source < 0].max(initial=0.0))
    if cells.count == 1:
        return PlacementSolution(np.arange(len(slot_node)), fixed, True)

    x = cp.Variable((volume.shape[1], cells.count), boolean=True)
    worst = cp.Variable()
    constraints: list[Any] = [x @ np.ones(cells.count) == 1, worst >= fixed / unit]
    constraints.append(np.ones(len(slot_node)) @ x == cells.room)
    for cell in range(cells.count):
        here = np.flatnonzero(cells.of_source == cell)
        if len(here):
            constraints.append(total[here] / unit - (volume[here] / unit) @ x[:, cell] <= worst)
    problem = cp.Problem(cp.Minimize(worst), constraints)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "may be inaccurate" when time is up, as ``optimal`` tells
            problem.solve(solver=cp.HIGHS, time_limit=float(time_limit))
    except cp.SolverError:
        return PlacementSolution(None, 0.0, False)
    info: Any = problem.solver_stats.extra_stats
    bound = float(info.mip_dual_bound) * unit
    bound = bound if np.isfinite(bound) else 0.0
    return PlacementSolution(_slots(x.value, cells), bound, problem.status == cp.OPTIMAL)


def _slots(x: np.ndarray | None, cells: Cells) -> np.ndarray | None:
    """Return the slot of each batch from the solver's values; None if it stopped before it had a placement."""
    if x is None or not np.all(np.abs(x - np.rint(x)) < 1e-3):
        return None
    cell = np.argmax(x, axis=1)
    return cells.slots(cell) if cells.fits(cell) else None


def permute(
    size: Num[np.ndarray, "items"],
    source: Int64[np.ndarray, "items"],
    batch: Int64[np.ndarray, "items"],
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "slots"],
) -> Int64[np.ndarray, "slots"]:
    """Permute balanced mini-batches over slots (instances), such that sources send little to other nodes.

    As in the paper, the aim is the least maximum over sources of bytes to other nodes. It is computed from items,
    without a matrix of sources.

    In rounds, every batch proposes to the node with room that holds most of its bytes, and every node accepts the
    batches that it holds most of. Bytes of sources with much to send count more; if the size allows, passes are
    repeated with more weight for the worst sources so far. Then batches are swapped for the source that sends most,
    while that helps. The result is never worse than batch ``b`` on slot ``b``, neither in the maximum over sources nor
    in total.

    Args:
        size: bytes of each item.
        source: source of each item.
        batch: balanced batch of each item.
        source_node: node of each source.
        slot_node: node of each slot (of its first rank): there are as many slots as batches.
    """
    cells = make_cells(source_node, slot_node)
    if cells.count <= 1 or not np.any(cells.of_source >= 0):
        return np.arange(len(slot_node))
    flow = _Flow(np.asarray(size, dtype=np.float64), source, batch, cells)
    start = flow.sent(cells.of_slot)
    passes = int(np.clip(_WORK // (len(slot_node) * cells.count), 1, _PASSES))
    swaps = int(np.clip(_WORK // (8 * len(slot_node)), 8, _SWAPS))

    cell, sent = cells.of_slot, start
    weight = _urgency(flow.total)
    improved = False
    for _ in range(passes):
        proposed = propose(flow.gains(weight), cells.room)
        reached = flow.sent(proposed)
        if reached.sum() <= start.sum() and (not improved or reached.max() < sent.max()):
            cell, sent, improved = proposed, reached, True
        weight = weight * _urgency(reached)
        weight /= weight.max()
    cell, sent = _refine(flow, cell, sent, float(start.sum()), swaps)
    if sent.max() > start.max():
        cell, sent = _refine(flow, cells.of_slot, start, float(start.sum()), swaps)
    return cells.slots(cell)


def _urgency(sent: np.ndarray) -> np.ndarray:
    """Return the weight of each source: its share of the largest, to the fifth power, float64 ``[sources]``.

    Products are the same on every processor, unlike powers, and all ranks must find the same plan.
    """
    part = np.maximum(sent, 1e-300) / max(float(sent.max()), 1e-300)
    squared = part * part
    return np.maximum(squared * squared * part, 1e-30)


class _Flow:
    """A table of bytes of items between sources and batches, kept by item because a matrix would be mostly zeros."""

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
        """Sum the bytes that each source sends to other nodes if batch ``b`` is on ``cell[b]``."""
        away = cell[self.batch] != self.cell
        return np.bincount(self.source, weights=self.size * away, minlength=self.sources)

    def gains(self, weight: Float64[np.ndarray, "sources"]) -> Num[np.ndarray, "batches cells"]:
        """Sum the bytes of each batch that each cell holds, times the weight of their source."""
        size, batch, cell = self.size * weight[self.source], self.batch, self.cell
        if cell.size and cell.min() < 0:
            homed = cell >= 0
            size, batch, cell = size[homed], batch[homed], cell[homed]
        shape = (self.batches, self.cells.count)
        return np.bincount(batch * shape[1] + cell, weights=size, minlength=shape[0] * shape[1]).reshape(shape)


def _refine(
    flow: _Flow, cell: Int64[np.ndarray, "batches"], sent: Num[np.ndarray, "sources"], total: float, swaps: int
) -> tuple[Int64[np.ndarray, "batches"], Num[np.ndarray, "sources"]]:
    """Swap batches for the worst source until no swap helps; return new cells, and a ``sent`` whose maximum is no
    larger.

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
            break  # all its bytes cross in any case
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
    """A table of items grouped by batch, and of sources grouped by cell."""

    def __init__(self, flow: _Flow) -> None:
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
        """Return the items of some batches, and for each item the position of its batch in ``batches``."""
        count = self.start[batches + 1] - self.start[batches]
        return self.by_batch[ragged.expand(self.start[batches], count)], np.repeat(np.arange(len(batches)), count)


def _move(flow: _Flow, tables: _Tables, sent: np.ndarray, batch: int, before: int, after: int) -> None:
    """Update ``sent`` for a batch that moves: bytes of its old cell's sources now cross, and its new cell's no longer
    do.
    """
    items = tables.by_batch[tables.start[batch] : tables.start[batch + 1]]
    for cell, sign in ((before, 1.0), (after, -1.0)):
        local = items[flow.cell[items] == cell]
        np.add.at(sent, flow.source[local], sign * flow.size[local])


def _largest(sizes: np.ndarray) -> np.ndarray:
    """Return the batches to try, ascending. Of equal batches the first are chosen, since a partition would depend on
    the processor.
    """
    return np.sort(np.argsort(-sizes, kind="stable")[: min(_CANDIDATES, np.count_nonzero(sizes))])


def _best_swap(
    flow: _Flow, tables: _Tables, cell: np.ndarray, sent: np.ndarray, worst: int, spare: float
) -> tuple[int, int, float] | None:
    """Find the swap after which the largest sender of the two cells sends least.

    The worst source's cell, "here", takes a batch that holds much of it and gives one of its own to the other's cell,
    "there". A source here that sent ``s`` bytes then sends ``s - (its bytes in the joining batch) + (its bytes in the
    leaving batch)``, and a source there the opposite; sources of other cells send the same. All pairs of batches are
    judged at once, on arrays ``[joining, residents, sources of a cell]``.

    Returns:
        The joining batch, the leaving batch, and the growth of the total in bytes; None if no swap helps
        within the ``spare`` bytes.
    """
    here = int(flow.cells.of_source[worst])
    own = np.flatnonzero(flow.source == worst)
    residents = np.flatnonzero(cell == here)
    own_bytes = np.bincount(flow.batch[own], flow.size[own], flow.batches)
    own_bytes[residents] = 0.0
    joining = _largest(own_bytes)
    if not len(joining) or not len(residents):
        return None
    there = cell[joining]
    width = tables.width
    # Bytes of sources here in joining and leaving batches, and of sources there in joining ones, [batches, width]
    near, far = tables.sources[here], tables.sources[there]
    join_here = _bytes_of_cell(flow, tables, joining, np.full(len(joining), here))
    leave_here = _bytes_of_cell(flow, tables, residents, np.full(len(residents), here))
    join_there = _bytes_of_cell(flow, tables, joining, there)
    # Bytes of sources there in the leaving batches, [joining, residents, width]
    items, position = tables.items(residents)
    dense = np.bincount(position * flow.sources + flow.source[items], flow.size[items], len(residents) * flow.sources)
    leave_there = dense.reshape(len(residents), flow.sources)[:, far].transpose(1, 0, 2)
    leave_there = np.where(far[:, None, :] >= 0, leave_there, 0.0)

    after_here = np.where(near >= 0, sent[near], 0.0) - join_here[:, None, :] + leave_here[None, :, :]
    after_there = np.where(far >= 0, sent[far], 0.0)[:, None, :] + join_there[:, None, :] - leave_there
    top = np.maximum(after_here.max(axis=2), after_there.max(axis=2)) if width else np.zeros((0, 0))
    more = (leave_here.sum(axis=1)[None, :] - leave_there.sum(axis=2)) + (join_there - join_here).sum(axis=1)[:, None]
    top = np.where(more <= spare, top, np.inf)
    best = int(np.argmin(top))
    if not top.flat[best] < sent[worst] * (1.0 - 1e-9):
        return None
    join, leave = divmod(best, len(residents))
    return int(joining[join]), int(residents[leave]), float(more[join, leave])


def _bytes_of_cell(flow: _Flow, tables: _Tables, batches: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Sum the bytes of every source of ``cell[b]`` in ``batches[b]``, float64 ``[batches, width]``."""
    items, position = tables.items(batches)
    local = flow.cell[items] == cell[position]
    items, position = items[local], position[local]
    key = position * tables.width + tables.column[flow.source[items]]
    return np.bincount(key, flow.size[items], len(batches) * tables.width).reshape(len(batches), tables.width)


register_rearrangement("permute", permute)
register_rearrangement("ilp", by_program)
