"""``Simulation``: when every action of a schedule ran, and what every rank waited for. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.schedule.action import Action, Schedule

Cause = Literal["warm-up", "host", "dependency", "boundary", "straggler", "cool-down"]
"""Why a rank is idle.

warm-up: it has not computed anything yet in this step, whatever it waits for (a rank without work: all of the step).
host: its main thread is busy between actions. dependency: what it needs is not computed yet. boundary: what it needs is
computed and its rows are on the way. straggler: its rows have arrived, but another rank that must take part is not
ready. cool-down: it has run its last action.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, eq=False)
class Simulation:
    """Times of a simulated step, in seconds from its start."""

    schedule: Schedule
    start: Mapping[Action, Float64[np.ndarray, "_instances"]]
    """Start of every action on each instance of its stage, in a sequence that can run."""
    end: Mapping[Action, Float64[np.ndarray, "_instances"]]
    """End of every action, likewise."""
    time: float
    """Duration of the step, up to the end of what main threads do after the last action."""
    ranks: Int64[np.ndarray, "ranks"]
    """Global ranks of all stages, ascending."""
    busy: Float64[np.ndarray, "ranks"]
    """Seconds that each rank computes."""
    idle: Mapping[Cause, Float64[np.ndarray, "ranks"]]
    """Cause -> seconds that each rank is idle. With ``busy`` they add up to ``time``."""

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time."""
        return float((self.time - self.busy).mean() / self.time) if self.time > 0 else 0.0

    @property
    def bubble_by_cause(self) -> dict[Cause, float]:
        """Idle share by cause; the shares add up to ``bubble``."""
        return {c: float(self.idle[c].mean() / self.time) if self.time > 0 else 0.0 for c in CAUSES}

    @cached_property
    def places(self) -> dict[int, int]:
        """Rank -> its index in ``ranks``."""
        return {int(r): i for i, r in enumerate(self.ranks)}

    def of(self, rank: int) -> list[tuple[Action, float, float]]:
        """(action, start, end) of everything that one rank runs, in that sequence."""
        actions = self.schedule.of(rank)
        stages = self.schedule.graph.stages
        instance = {n: int(np.nonzero(stages[n].grid == rank)[0][0]) for n in {a.node for a in actions}}
        return [(a, float(self.start[a][instance[a.node]]), float(self.end[a][instance[a.node]])) for a in actions]
