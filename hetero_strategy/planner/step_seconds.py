"""Seconds of a step: of its actions, of the optimizer, of exposed collectives; short versions of long steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float64

from hetero_strategy.plan.deal_rows import RankWork
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan, UnitRuns
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StageId
from hetero_strategy.schedule.graph import sizes_of, usual
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.stage_times import NOTHING, StageTimes

Columns = TypeVar("Columns", StepMetadata, StepItems, UnitRuns)
MOST_FORWARDS = 1024
"""Forwards of all stages up to which a step is simulated whole."""
LEAST_SHARE = 1 / 16
"""Least share of a simulation that a short step counts as."""


class ActionSeconds:
    """A table of seconds of the actions of one step, filled on demand.

    Args:
        work: attention of the context-parallel ranks of modules that deal rows, of which the slowest one counts.
    """

    def __init__(
        self, plan: StepPlan, graph: StageGraph, times: Mapping[StageId, StageTimes], work: Mapping[str, RankWork]
    ) -> None:
        self._times, self._stages, self._work = times, graph.stages, work
        self._sizes = {
            (name, i): sizes_of(plan, name, i) for name, parts in plan.assignments.items() for i in range(len(parts))
        }
        self._known: dict[Action, np.ndarray] = {}

    def __call__(self, action: Action) -> np.ndarray:
        """Return the action's seconds on every instance."""
        if action not in self._known:  # asked for by the schedule, and again by its simulation
            self._known[action] = self.of_ranks(action).max(axis=1)
        return self._known[action]

    def of_ranks(self, action: Action) -> Float64[np.ndarray, "instances ranks"]:
        """Return the action's seconds on each context-parallel rank, or one column if ranks are even."""
        times = self._times[action.node]
        if action.microbatch < 0:
            count = np.zeros((len(self._stages[action.node].grid), 1))
            return times.seconds(action.kind, count, count)
        module, number, own = action.node.module, action.microbatch, self._stages[action.node].own
        rows, squares = self._sizes[module, number]
        if module not in self._work:
            return times.seconds(action.kind, own(rows)[:, None], own(squares)[:, None])
        squares, keys = (own(of[number].T).T for of in self._work[module])
        return times.seconds(action.kind, np.broadcast_to(own(rows)[:, None], squares.shape), squares, keys)

    def usual(self, action: Action) -> float:
        """Return the seconds by which orders rank the action, as in a run: gathers and sums count for nothing."""
        return 0.0 if action.microbatch < 0 else float(usual(action.node, self(action)[None])[0])


class After(NamedTuple):
    """The parts of the seconds by which a step is longer than its simulation."""

    gathers: float = 0.0
    """All-gathers of parameters for which first forwards wait."""
    sums: float = 0.0
    """Sums of gradients that end after the last action."""
    rest: float = 0.0
    """The optimizer, the sum of replicated gradients, and waits for shared cores."""

    @property
    def total(self) -> float:
        return sum(self)


def seconds_after(simulation: Simulation, times: Mapping[StageId, StageTimes]) -> After:
    """Return the seconds by which a step is longer than its simulation.

    The collectives of a rank run one after the other. Gathers begin with the step, and parameters of a stage arrive in
    pieces while its first forward runs: pieces missing at its end delay the step. A sum of gradients begins with the
    stage's last backward, block by block, or follows the last weight half of a backward; a sum over cohorts begins when
    all of them have reached it. The optimizer follows all sums of the rank.
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
    """Keep the actions that :func:`seconds_after` reads, and drop the idle times."""
    looked = {*_firsts(simulation).values(), *_lasts(simulation).values()}
    start, end = (
        {action: at for action, at in every.items() if action in looked or action.kind == "REDUCE"}
        for every in (simulation.start, simulation.end)
    )
    return replace(simulation, start=start, end=end, idle={}, reads={})


def work_of_ranks(
    schedule: Schedule, seconds: ActionSeconds, times: Mapping[StageId, StageTimes], ranks: int
) -> Float64[np.ndarray, "ranks"]:
    """Return the seconds of each rank's actions, and of the work after the last of them."""
    work, stages = np.zeros(ranks), schedule.graph.stages
    for action in schedule.starts:
        grid, of_ranks = stages[action.node].grid, seconds.of_ranks(action)
        work[grid] += np.repeat(of_ranks, grid.shape[1] // of_ranks.shape[1], axis=1)  # tensor-parallel ranks are even
    for stage, each in times.items():
        work[stages[stage].grid] += each.after
    return work


def _firsts(simulation: Simulation) -> dict[StageId, Action]:
    """Return the first forward of every stage, by start."""
    firsts: dict[StageId, Action] = {}
    for action in sorted((a for a in simulation.start if a.kind == "F"), key=lambda a: simulation.start[a].min()):
        firsts.setdefault(action.node, action)
    return firsts


def _lasts(simulation: Simulation) -> dict[StageId, Action]:
    """Return the last action of every stage that makes gradients of weights, by start."""
    lasts: dict[StageId, Action] = {}
    for action in sorted((a for a in simulation.start if a.kind in "BW"), key=lambda a: simulation.start[a].max()):
        lasts.pop(action.node, None)
        lasts[action.node] = action
    return lasts


class Took(NamedTuple):
    """The seconds of a simulated step."""

    seconds: float
    busiest: float
    """Seconds in which the busiest rank computes."""


def few(stages: int) -> int:
    """Return the microbatches up to which a step is simulated whole."""
    return max(2 * stages, MOST_FORWARDS // stages)


def share(microbatches: int, stages: int) -> float:
    """Return the share of a simulation that a step counts as: its forwards over those of a long step of few stages."""
    return max(LEAST_SHARE, stages * min(microbatches, few(stages)) / MOST_FORWARDS)


def first_samples(metadata: StepMetadata, count: int) -> StepMetadata:
    """Cut a global batch down to its first samples."""
    items, units = {}, {name: int(np.searchsorted(table.sample, count)) for name, table in metadata.items.items()}
    for name, table in metadata.items.items():
        cut = _some(table, slice(units[name]))
        if cut.placed is not None:
            cut = replace(cut, placed=_some(cut.placed, cut.placed.source < units[name]))
        runs = {source: (run, run.source < units.get(source, count)) for source, run in (table.given or {}).items()}
        cut_runs = {source: _some(run, fed & (run.target < units[name])) for source, (run, fed) in runs.items()}
        items[name] = replace(cut, given=cut_runs) if cut_runs else cut
    return replace(_some(metadata, slice(count)), items=items)


def _some(table: Columns, chosen: slice | Bool[np.ndarray, "rows"]) -> Columns:
    """Return some rows of all columns of a table."""
    columns = {f.name: getattr(table, f.name) for f in fields(table)}
    cut: dict[str, Any] = {key: value[chosen] for key, value in columns.items() if isinstance(value, np.ndarray)}
    return replace(table, **cut)


def during(times: StageTimes) -> tuple[object, ...]:
    """Return the part of a stage's times that its actions take, without collectives that overlap them or follow the
    last.
    """
    overlaps = times.once and times.overlapped
    collectives = () if overlaps else (times.gather, times.reduce, times.beside)
    lines = times.forward, times.input, times.weight, times.whole or NOTHING
    return *lines, times.keys, times.once, times.overlapped, *collectives
