"""`Simulation`: when every action of a schedule ran, and what every rank waited for. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from hetero_strategy.schedule.action import Action, Schedule

Cause = Literal["warm-up", "host", "dependency", "boundary", "straggler", "cool-down"]
"""Why a rank is idle.

warm-up: it has not computed anything yet in this step, whatever it waits for (a rank without work: all of the step).
host: its main thread is at what lies between actions. dependency: what it needs is not computed yet. boundary: that is
computed, its rows are on the way. straggler: its rows have arrived, another rank that must take part has not.
cool-down: it has run its last action.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, eq=False)
class Simulation:
    """Times are in seconds from the step's start."""

    schedule: Schedule
    start: Mapping[Action, np.ndarray]
    """Of every action, in an order in which they can run: float64 ``[instances of its node]``."""
    end: Mapping[Action, np.ndarray]
    time: float
    """Of the step: end of the last action, and of what the main thread does after it."""
    ranks: np.ndarray
    """Global ranks, int64 ``[ranks]``, ascending: those of any stage."""
    busy: np.ndarray
    """Float64 ``[ranks]``."""
    idle: Mapping[Cause, np.ndarray]
    """By cause: float64 ``[ranks]``. Their sum and ``busy`` make ``time`` on every rank."""
    peak_memory: np.ndarray | None
    """Bytes, float64 ``[ranks]``; None where the simulation was given no memory."""

    @property
    def idle_total(self) -> np.ndarray:
        """Float64 ``[ranks]``."""
        return self.time - self.busy

    @property
    def bubble(self) -> float:
        """Idle part of all ranks' time."""
        return float(self.idle_total.mean() / self.time) if self.time > 0 else 0.0

    @property
    def bubble_by_cause(self) -> dict[Cause, float]:
        """The same by cause; they sum to `bubble`."""
        return {c: float(self.idle[c].mean() / self.time) if self.time > 0 else 0.0 for c in CAUSES}

    @cached_property
    def places(self) -> dict[int, int]:
        """Rank -> its place in `ranks`."""
        return {int(r): i for i, r in enumerate(self.ranks)}

    def of(self, rank: int) -> list[tuple[Action, float, float]]:
        """(action, start, end) of one rank, in its order."""
        actions = self.schedule.of(rank)
        stages = self.schedule.graph.stages
        instance = {n: int(np.nonzero(stages[n].grid == rank)[0][0]) for n in {a.node for a in actions}}
        return [(a, float(self.start[a][instance[a.node]]), float(self.end[a][instance[a.node]])) for a in actions]
