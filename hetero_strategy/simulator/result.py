"""``Simulation``: when every action of a schedule ran, and what every rank waited for. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.schedule.action import Action, Schedule, StageId

Cause = Literal["warm-up", "host", "dependency", "boundary", "straggler", "cool-down"]
"""Why a rank is idle.

warm-up: it has not computed anything yet in this step, whatever it waits for (a rank without work: all of the step).
host: its main thread is busy between actions. dependency: what it needs is not computed yet. boundary: what it needs is
computed and its rows are on the way. straggler: its rows have arrived, but another rank that must take part is not
ready. cool-down: it has run its last action.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


_ARRIVAL: tuple[Cause, ...] = ("dependency", "boundary")
"""What a rank waits for until rows are computed, and until they arrive."""


@dataclass(frozen=True)
class Host:
    """Time that the main threads of ranks spend besides actions, in which they neither compute nor wait."""

    begins: Mapping[int, float]
    """Rank -> seconds from the step's start until it can begin its first action; other ranks: 0."""
    after: Callable[[Action], float]
    """Gives the seconds from the end of an action until its ranks can begin another."""
    closing: float
    """Seconds from the end of the last action of all ranks until the step is over."""


NO_HOST = Host({}, lambda action: 0.0, 0.0)


class Wait(NamedTuple):
    """A time in which a rank is idle; in seconds from the step's start."""

    rank: int
    cause: Cause
    start: float
    end: float


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
    reads: Mapping[Action, tuple[Float64[np.ndarray, "_instances"], Float64[np.ndarray, "_instances"]]]
    """Action -> when what it reads of other stages was computed, and when it had arrived, on each instance."""
    host: Host
    """What it was simulated with."""
    beside: Mapping[Action, Float64[np.ndarray, "_instances"]]
    """Actions that ran beside others on a stream of their own -> their seconds as if alone; between their start and
    their end others run, too."""
    used: Float64[np.ndarray, "ranks"]
    """Seconds by which each rank waits less for collectives inside actions, as it computes others beside them; what
    these wait for their own counts only where the rank has nothing else to do."""

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

    def seconds(self, action: Action) -> Float64[np.ndarray, "_instances"]:
        """What an action takes by itself, on each instance."""
        own = self.beside.get(action)
        return self.end[action] - self.start[action] if own is None else own

    def of(self, rank: int) -> list[tuple[Action, float, float]]:
        """(action, start, end) of everything that one rank runs, in that sequence."""
        of = self._instances(rank)
        return [(a, float(self.start[a][of[a.node]]), float(self.end[a][of[a.node]])) for a in self.schedule.of(rank)]

    def waits(self, rank: int) -> list[Wait]:
        """When one rank is idle and why, in its sequence: what ``idle`` sums up, but for what it runs beside then."""
        of, waits = self._instances(rank), list[Wait]()
        ended, free, warm = 0.0, self.host.begins.get(rank, 0.0), False
        for action, start, end in self.of(rank):
            if action in self.beside:
                continue
            waits.append(Wait(rank, "host", ended, free))
            if action in self.reads:
                for cause, times in zip(_ARRIVAL, self.reads[action], strict=True):
                    then = max(free, float(times[of[action.node]]))
                    waits.append(Wait(rank, cause, free, then))
                    free = then
            waits.append(Wait(rank, "straggler", free, start))
            if not warm and action.microbatch >= 0:
                waits, warm = [wait._replace(cause="warm-up") for wait in waits], True
            ended, free = end, end + self.host.after(action)
        waits.append(Wait(rank, "cool-down" if warm else "warm-up", ended, self.time))
        return [wait for wait in waits if wait.end > wait.start]

    def _instances(self, rank: int) -> dict[StageId, int]:
        """Stages of which a rank has actions -> its instance there."""
        stages = self.schedule.graph.stages
        return {n: int(np.nonzero(stages[n].grid == rank)[0][0]) for n in {a.node for a in self.schedule.of(rank)}}
