"""``Simulation``: times of every action of a schedule, and causes of every rank's waits. Pure.

Functions here measure bubbles left after filling, and waits inside actions (Optimus, table 1 and 5.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.schedule.action import Action, Schedule, StageId

Cause = Literal["warm-up", "host", "dependency", "boundary", "straggler", "cool-down"]
"""Why a rank is idle.

warm-up: it has not computed anything yet in this step, whatever it waits for (the whole step for a rank without work).
host: its main thread is busy between actions. dependency: its inputs are not computed yet. boundary: its inputs are
computed and on the way. straggler: its inputs have arrived, but another participating rank is not ready. cool-down: it
has run its last action.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)
_ARRIVAL: tuple[Cause, ...] = ("dependency", "boundary")
"""Causes of waits until rows are computed, and until they arrive."""


@dataclass(frozen=True)
class Host:
    """A model of the time that main threads spend besides actions, in which ranks neither compute nor wait."""

    begins: Mapping[int, float]
    """Rank -> seconds from the step's start until it can begin its first action; other ranks: 0."""
    after: Callable[[Action], float]
    """Function of an action: seconds from its end until its ranks can begin another."""
    closing: float
    """Seconds from the end of the last action of all ranks until the step is over."""


NO_HOST = Host({}, lambda action: 0.0, 0.0)


class Wait(NamedTuple):
    """A period in which a rank is idle; in seconds from the step's start."""

    rank: int
    cause: Cause
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """The times of a simulated step, in seconds from its start."""

    schedule: Schedule
    start: Mapping[Action, Float64[np.ndarray, "_instances"]]
    """Start of every action on each instance of its stage, in an order that can run."""
    end: Mapping[Action, Float64[np.ndarray, "_instances"]]
    """End of every action on each instance of its stage."""
    time: float
    """Duration of the step, including the main threads' work after the last action."""
    ranks: Int64[np.ndarray, "ranks"]
    """Global ranks of all stages, ascending."""
    busy: Float64[np.ndarray, "ranks"]
    """Seconds that each rank computes."""
    idle: Mapping[Cause, Float64[np.ndarray, "ranks"]]
    """Cause -> seconds that each rank is idle. With ``busy`` they add up to ``time``."""
    reads: Mapping[Action, tuple[Float64[np.ndarray, "_instances"], Float64[np.ndarray, "_instances"]]]
    """Action -> when its inputs from other stages were computed, and when they had arrived, on each instance."""
    host: Host
    """Main-thread times of the simulation."""

    @property
    def bubble(self) -> float:
        """Return the idle share of all ranks' time."""
        return float((self.time - self.busy).mean() / self.time) if self.time > 0 else 0.0

    @property
    def bubble_by_cause(self) -> dict[Cause, float]:
        """Return the idle share by cause; the shares add up to ``bubble``."""
        return {c: float(self.idle[c].mean() / self.time) if self.time > 0 else 0.0 for c in CAUSES}

    @cached_property
    def places(self) -> dict[int, int]:
        """Return rank -> its index in ``ranks``."""
        return {int(r): i for i, r in enumerate(self.ranks)}

    def seconds(self, action: Action) -> Float64[np.ndarray, "_instances"]:
        """Return the seconds of an action on each instance."""
        return self.end[action] - self.start[action]

    def of(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) of everything that one rank runs, in that order."""
        of = self._instances(rank)
        return [(a, float(self.start[a][of[a.node]]), float(self.end[a][of[a.node]])) for a in self.schedule.of(rank)]

    def waits(self, rank: int) -> list[Wait]:
        """Return the idle periods of one rank, in order; ``idle`` is their sum."""
        of, waits = self._instances(rank), list[Wait]()
        ended, free, warm = 0.0, self.host.begins.get(rank, 0.0), False
        for action, start, end in self.of(rank):
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
        """Return stage -> the rank's instance there, for every stage of which the rank has actions."""
        stages = self.schedule.graph.stages
        return {n: int(np.nonzero(stages[n].grid == rank)[0][0]) for n in {a.node for a in self.schedule.of(rank)}}


Collective = Literal["all-gather", "reduce-scatter", "tensor parallel", "context parallel"]
"""Collective inside an action: gathered parameters, summed gradients, rows of ranks that share matmuls, and keys and
values of ranks that share sequences."""
InActions = Callable[[Action], Mapping[Collective, Float64[np.ndarray, "instances"]]]
"""Function of an action: seconds, on every instance, in which its ranks wait for collectives."""


@dataclass(frozen=True)
class Filling:
    """A comparison of a step in which modules fill bubbles with the step without these modules; in seconds."""

    modules: tuple[str, ...]
    """Modules that fill bubbles."""
    alone: float
    """Time of the step without them."""
    step: float
    """Time of the step with them."""
    work: float
    """Seconds of their actions on a rank, see :func:`work_on_rank`."""

    @property
    def efficiency(self) -> float:
        """Return the share of the filling work in bubbles, which does not prolong the step (Optimus' scheduling
        efficiency).

        It is negative if filling costs more than the work itself, and 1 without work.
        """
        return 1.0 - (self.step - self.alone) / self.work if self.work > 0 else 1.0

    def __str__(self) -> str:
        return f"{self.efficiency:.0%} of the work of {' and '.join(self.modules)} in bubbles"


def work_on_rank(simulation: Simulation, modules: Collection[str]) -> float:
    """Return the seconds of all actions of some modules on one rank, averaged over the ranks that have any of them."""
    stages = {n: stage for n, stage in simulation.schedule.graph.stages.items() if n.module in modules}
    total = sum(
        float(simulation.seconds(action).sum()) * stages[action.node].grid.shape[1]
        for action in simulation.start
        if action.node in stages
    )
    return total / max(1, len(frozenset().union(*(stage.ranks for stage in stages.values()))))


def inside_actions(simulation: Simulation, waits: InActions) -> dict[Collective, float]:
    """Return the seconds that a rank waits inside actions, by collective, averaged over all ranks.

    They are part of a simulation's ``busy``.
    """
    stages = simulation.schedule.graph.stages
    waited: dict[Collective, float] = {"all-gather": 0.0, "reduce-scatter": 0.0, "tensor parallel": 0.0}
    for action in simulation.start:
        for collective, seconds in waits(action).items():
            waited.setdefault(collective, 0.0)
            waited[collective] += float(seconds.sum()) * stages[action.node].grid.shape[1] / len(simulation.ranks)
    return waited
