"""What a step waits for besides its actions: the optimizer, and collectives that took longer than compute. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy.planner.times import StageTimes
from hetero_strategy.schedule.action import Action, Schedule, StageId
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.simulate import ActionCosts


class After(NamedTuple):
    """Seconds by which a step is longer than its simulation."""

    gathers: float = 0.0
    """All-gathers of parameters for which first forwards wait."""
    sums: float = 0.0
    """Sums of gradients that end after the last action."""
    rest: float = 0.0
    """The optimizer, the sum of replicated gradients, and what ranks wait for cores that they share."""

    @property
    def total(self) -> float:
        return sum(self)


def seconds_after(simulation: Simulation, times: Mapping[StageId, StageTimes]) -> After:
    """Seconds by which a step is longer than its simulation.

    The collectives of a rank run one after the other. Gathers begin with the step, and parameters of a stage arrive in
    pieces while its first forward runs: what is missing at its end delays the step. A sum of gradients begins with the
    stage's last backward, block by block, or follows the last of its halves for the weights; that of cohorts begins
    when all of them have come to it. The optimizer follows all sums of the rank.
    """
    stages = simulation.schedule.graph.stages
    ranks = np.zeros(int(simulation.ranks.max()) + 1)
    gathered, late = ranks.copy(), 0.0
    for stage, action in _firsts(simulation).items():
        if times[stage].overlapped and times[stage].gather:
            gathered[stages[stage].grid] += times[stage].gather
            late = max(late, float((gathered[stages[stage].grid].max(axis=1) - simulation.end[action]).max()))
    reduced, after = ranks.copy(), ranks.copy()
    together: dict[StageId, float] = {}  # when all cohorts of a stage have come to their sum
    for action in (a for a in simulation.start if a.kind == "REDUCE"):
        stage = action.node.all_instances
        together[stage] = max(together.get(stage, 0.0), float(simulation.start[action].max()))
    for stage, action in _lasts(simulation).items():
        grid = stages[stage].grid
        if times[stage].overlapped and times[stage].reduce:
            begins = (simulation.start if action.kind == "B" else simulation.end)[action]
            if stage.cohort >= 0:
                begins = np.full_like(begins, together[stage.all_instances])
            reduced[grid] = np.maximum(reduced[grid], begins[:, None]) + times[stage].reduce
    for stage, each in times.items():
        after[stages[stage].grid] += each.after
    rest = float(after.max())
    ends = float((np.maximum(reduced, simulation.time) + after).max())
    return After(late, ends - rest - simulation.time, rest)


def thinned(simulation: Simulation) -> Simulation:
    """Of its actions those at which :func:`seconds_after` looks, and without what ranks waited for."""
    looked = {*_firsts(simulation).values(), *_lasts(simulation).values()}
    start, end = (
        {action: at for action, at in every.items() if action in looked or action.kind == "REDUCE"}
        for every in (simulation.start, simulation.end)
    )
    return replace(simulation, start=start, end=end, idle={}, reads={}, beside={})


def work_of_ranks(
    schedule: Schedule, seconds: ActionCosts, times: Mapping[StageId, StageTimes], ranks: int
) -> Float64[np.ndarray, "ranks"]:
    """Seconds of each rank's actions, and of what follows the last of them."""
    work, stages = np.zeros(ranks), schedule.graph.stages
    for action in schedule.starts:
        work[stages[action.node].grid] += np.reshape(seconds(action), (-1, 1))
    for stage, each in times.items():
        work[stages[stage].grid] += each.after
    return work


def _firsts(simulation: Simulation) -> dict[StageId, Action]:
    """First forward of every stage, by start."""
    firsts: dict[StageId, Action] = {}
    for action in sorted((a for a in simulation.start if a.kind == "F"), key=lambda a: simulation.start[a].min()):
        firsts.setdefault(action.node, action)
    return firsts


def _lasts(simulation: Simulation) -> dict[StageId, Action]:
    """Last action of every stage that makes gradients of weights, by start."""
    lasts: dict[StageId, Action] = {}
    for action in sorted((a for a in simulation.start if a.kind in "BW"), key=lambda a: simulation.start[a].max()):
        lasts.pop(action.node, None)
        lasts[action.node] = action
    return lasts
