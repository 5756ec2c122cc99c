"""OrchMLLM's algorithm 3: node-wise rearrangement as an integer linear program, and a bound from it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.nodes.slots import Cells, make_cells


@dataclass(frozen=True)
class PlacementSolution:
    """What the solver found."""

    slots: Int64[np.ndarray, "batches"] | None
    """Slot of each batch; None: no placement was found in time, or only the relaxation solved."""
    bound: float
    """No placement has a smaller maximum over sources of bytes to other nodes."""
    optimal: bool
    """Whether ``slots`` are proven best, up to the solver's gap of 0.01 %."""


def place_by_program(
    volume: Float64[np.ndarray, "sources batches"],
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "batches"],
    classes: Int64[np.ndarray, "batches"] | None,
    seconds: float = 60.0,
) -> Int64[np.ndarray, "batches"]:
    """Choose a slot (an instance) for each balanced mini-batch: the best placement, by :func:`solve_placement`.

    Raises:
        ConfigError: the program is not solved in time.
    """
    solution = solve_placement(volume, source_node, slot_node, classes=classes, time_limit=seconds)
    if not solution.optimal or solution.slots is None:
        # What a search holds when it is stopped depends on the processor's speed, and ranks would disagree (law 7).
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
    classes: Int64[np.ndarray, "batches"] | None = None,
    time_limit: float = 60.0,
    relax: bool = False,
) -> PlacementSolution:
    """Find the least maximum over sources of bytes to other nodes, over all placements of batches on nodes.

    The program has variables ``[batches, nodes]``, a capacity per node and class, and a row per source (OrchMLLM
    section 5.2.2, algorithm 3). HiGHS solves it through cvxpy.

    Args:
        volume: bytes of each source in each batch (``slots.volumes``).
        slot_node: node of each slot (of its first rank): there are as many slots as batches.
        classes: class (speed) of each slot and of the batch balanced for it: a batch stays in its class. None: all are
            alike.
        time_limit: seconds that the solver may take.
        relax: solve the linear relaxation only, which gives a bound and no placement.
    """
    import cvxpy as cp  # slow to import, and only this method needs it

    cells = make_cells(source_node, slot_node, classes)
    total = volume.sum(axis=1)
    unit = float(total.max(initial=0.0)) or 1.0  # the solver's tolerances are absolute
    fixed = float(total[cells.of_source < 0].max(initial=0.0))
    if cells.count == 1:
        return PlacementSolution(np.arange(len(slot_node)), fixed, True)

    x = cp.Variable((volume.shape[1], cells.count), **({"bounds": [0, 1]} if relax else {"boolean": True}))
    worst = cp.Variable()
    constraints: list[Any] = [x @ np.ones(cells.count) == 1, worst >= fixed / unit]
    for number, room in enumerate(cells.room):
        constraints.append((cells.of_batch == number).astype(np.float64) @ x == room)
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
    if relax:
        solved = problem.status == cp.OPTIMAL
        return PlacementSolution(None, float(problem.value) * unit if solved else 0.0, False)
    bound = float(info.mip_dual_bound) * unit
    bound = bound if np.isfinite(bound) else 0.0
    return PlacementSolution(_slots(x.value, cells), bound, problem.status == cp.OPTIMAL)


def _slots(x: np.ndarray | None, cells: Cells) -> np.ndarray | None:
    """Slot of each batch from the solver's values; None if it stopped before it had a placement."""
    if x is None or not np.all(np.abs(x - np.rint(x)) < 1e-3):
        return None
    cell = np.argmax(x, axis=1)
    return cells.slots(cell) if cells.fits(cell) else None
