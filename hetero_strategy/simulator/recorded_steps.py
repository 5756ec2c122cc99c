"""Predict how long steps take, by fitting recorded steps of all ranks and simulating. Pure.

Three things are fitted: the seconds of actions (a line in rows and squared lengths for every stage and kind, and the
scatter around it), latency and bandwidth of transfers, and the time of every rank's main thread besides actions (making
the schedule and routes, posting receives, summing up the step's output). Where ranks wait for each other the slowest
one counts, so a step of means would be too short: actions are drawn with their scatter within a step, and the median of
several simulations is taken.

If ranks share processors, actions have their average speed under that load. Momentary competition is not simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy.optimize import nnls
from scipy.stats import linregress

from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action, Kind, Schedule, StageGraph, StageId
from hetero_strategy.schedule.graph import sizes_of
from hetero_strategy.simulator.cluster import Links, same_ranks
from hetero_strategy.simulator.fit_lines import fit
from hetero_strategy.simulator.result import Host, Simulation
from hetero_strategy.simulator.simulate import RowsSent, Widths, pairs, rows_between, simulate
from hetero_strategy.simulator.stage_times import NOTHING, Line

DRAWS = 15
"""Number of simulations of a step; the median one counts."""
Events = Mapping[int, Sequence[tuple[Action, float, float]]]
"""Rank -> (action, start, end) in seconds of one clock, in the order in which they ran."""


class Ran(NamedTuple):
    """A recorded step on all ranks."""

    plan: StepPlan
    schedule: Schedule
    events: Events
    spans: Mapping[int, tuple[float, float]]
    """Rank -> when it began the step and when it had the step's output, on the clock of the events."""

    @property
    def begin(self) -> float:
        """Return when the first rank began the step."""
        return min(begin for begin, _ in self.spans.values())

    @property
    def seconds(self) -> float:
        """Return the seconds from the first rank's begin to the last rank's end."""
        return max(end for _, end in self.spans.values()) - self.begin


def together(schedule: Schedule, events: Events, synchronous: Collection[StageId] = ()) -> Events:
    """Move starts of events to the time when all participating ranks have begun, because early ranks wait for the last.

    Ranks of an instance always begin together; all instances of a stage do for UNSHARD and REDUCE, and for every action
    of ``synchronous`` stages.
    """
    begun = {(action, rank): start for rank, own in events.items() for action, start, _ in own}
    starts: dict[tuple[Action, int], float] = {}
    for action in {action for action, _ in begun}:
        grid = schedule.graph.stages[action.node].grid
        own = np.array([[begun[action, int(rank)] for rank in row] for row in grid])
        last = own.max(axis=1)
        if action.microbatch < 0 or action.node in synchronous:
            last[:] = last.max()
        starts |= {(action, int(rank)): float(last[i]) for i, row in enumerate(grid) for rank in row}
    return {
        rank: [(action, min(starts[action, rank], end), end) for action, _, end in own] for rank, own in events.items()
    }


def durations(schedule: Schedule, events: Events, synchronous: Collection[StageId] = ()) -> dict[Action, np.ndarray]:
    """Return every action's seconds, from the time all its ranks have begun; float64 ``[instances]``."""
    seconds = {
        (action, rank): end - start
        for rank, own in together(schedule, events, synchronous).items()
        for action, start, end in own
    }
    return {
        action: np.array(
            [max(seconds[action, int(rank)] for rank in row) for row in schedule.graph.stages[action.node].grid]
        )
        for action in dict.fromkeys(action for action, _ in seconds)  # same order in every process
    }


Points = Mapping[tuple[StageId, Kind], Float64[np.ndarray, "points 4"]]
"""(stage, kind) -> the terms of :func:`terms` and the seconds of every instance of its actions."""


def terms(plan: StepPlan, graph: StageGraph, action: Action) -> Float64[np.ndarray, "instances 3"]:
    """Return one, the rows and the sum of squared lengths of every instance; no rows for UNSHARD and REDUCE."""
    stage = graph.stages[action.node]
    ones = np.ones(len(stage.grid))
    if action.microbatch < 0:
        return np.stack([ones, 0 * ones, 0 * ones], axis=1)
    return np.stack([ones, *map(stage.own, sizes_of(plan, action.node.module, action.microbatch))], axis=1)


def points(step: Ran, synchronous: Collection[StageId] = ()) -> Points:
    """Return the measured points of one step, without those of instances that had no rows to compute."""
    tables: dict[tuple[StageId, Kind], list[np.ndarray]] = defaultdict(list)
    for action, seconds in durations(step.schedule, step.events, synchronous).items():
        table = np.column_stack([terms(step.plan, step.schedule.graph, action), seconds])
        used = table if action.microbatch < 0 else table[table[:, 1] > 0]
        tables[action.node.all_instances, action.kind].append(used)
    joined = {key: np.concatenate(parts) for key, parts in tables.items()}
    return {key: table for key, table in joined.items() if len(table)}


def fitted_lines(steps: Iterable[Points]) -> dict[tuple[StageId, Kind], Line]:
    """Fit the seconds of every stage's actions, by kind.

    Points whose ratio of measured to fitted seconds is more than twice the median are left out: they come from a
    preempted process. So are points of no time, such as a REDUCE that only waited.
    """
    tables: dict[tuple[StageId, Kind], list[np.ndarray]] = defaultdict(list)
    for step in steps:
        for key, table in step.items():
            tables[key].append(table)
    lines = {}
    for key, parts in sorted(tables.items()):
        table = np.concatenate(parts)
        table = table[table[:, 3] > 0]
        if not len(table):
            continue
        ratios = _ratios(table, fit(table[:, :3], table[:, 3])[0])
        usual = table[ratios <= 2 * np.median(ratios)]
        lines[key] = fit(usual[:, :3], usual[:, 3])[0]
    return lines


def stages_of(lines: Mapping[tuple[StageId, Kind], Line]) -> dict[StageId, dict[Kind, Line]]:
    """Return the lines of each stage's computing actions by kind."""
    stages: dict[StageId, dict[Kind, Line]] = defaultdict(dict)
    for (node, kind), line in lines.items():
        if kind in ("F", "B", "I", "W"):
            stages[node][kind] = line
    return dict(stages)


def _ratios(table: Float64[np.ndarray, "points 4"], line: Line) -> Float64[np.ndarray, "points"]:
    """Return measured over fitted seconds."""
    seconds = table[:, :3] @ np.array(line)
    return np.divide(table[:, 3], seconds, out=np.ones(len(table)), where=seconds > 0)


class Start(NamedTuple):
    """The times that decide when one action of one rank begins."""

    rank: int
    before: Action | None
    """The rank's previous action; None for its first one."""
    free: float
    """Time at which the previous action had ended, or the rank began the step."""
    sent: float
    """Time at which other ranks had sent everything that the action reads; -inf if it reads nothing from other ranks.
    """
    size: float
    """Bytes that the action reads from other ranks."""
    start: float
    """Time at which the action began."""


def starts(ran: Ran, rows: RowsSent) -> list[Start]:
    """Return what decided the start of each action of a step, in seconds of the clock of its events."""
    dependencies, stages = ran.schedule.dependencies, ran.schedule.graph.stages
    ended = {(action, rank): end for rank, own in ran.events.items() for action, _, end in own}
    begun = []
    for rank, own in ran.events.items():
        before: Action | None = None
        free = ran.spans[rank][0]
        for action, start, end in own:
            size, sent = 0.0, -np.inf
            grid = stages[action.node].grid
            instance = int(np.nonzero((grid == rank).any(axis=1))[0][0])
            for source in dependencies.crossing(action):
                theirs = stages[source.node].grid
                flow = pairs(rows(source, action))
                away = (flow.target == instance) & (flow.bytes > 0)
                away[away] = ~same_ranks(theirs, grid)(flow.source[away], flow.target[away])
                size += float(flow.bytes[away].sum())
                sent = max(sent, *(ended[source, int(r)] for r in theirs[flow.source[away]].flat), -np.inf)
            begun.append(Start(rank, before, free, sent, size, start))
            before, free = action, end
    return begun


class Fitted:
    """A model of the costs of steps, fitted to steps that ran.

    Args:
        steps: recorded steps, at least one.
        synchronous: stages whose instances all begin their actions together.
    """

    def __init__(self, steps: Sequence[Ran], widths: Widths, synchronous: Collection[StageId] = ()) -> None:
        self._widths, self._synchronous = widths, synchronous
        measured = [points(step, synchronous) for step in steps]
        self.lines = fitted_lines(measured)
        self._scatter = [
            {key: _ratios(table, self.lines[key]) for key, table in own.items() if key in self.lines}
            for own in measured
        ]
        by_step = [starts(step, rows_between(step.plan, step.schedule.graph, widths)) for step in steps]
        begun = [start for own in by_step for start in own]
        self.links = links(transfers(begun))
        self.after = self._after(begun)
        self.begins = [self._begins(step, own) for step, own in zip(steps, by_step, strict=True)]
        """For each step, rank -> seconds until it could begin its first action."""
        ends = [max((end for own in step.events.values() for *_, end in own), default=step.begin) for step in steps]
        self.closing = float(np.mean([step.begin + step.seconds - end for step, end in zip(steps, ends, strict=True)]))

    def _waited(self, action: Start) -> bool:
        """Return whether an action had to wait for rows of other ranks."""
        return action.sent + self.links.latency + action.size / self.links.bandwidth > action.free

    def _after(self, begun: Iterable[Start]) -> dict[tuple[StageId, Kind], float]:
        """Return (stage, kind) -> mean seconds from an action's end to the start of a next one that did not wait."""
        after: dict[tuple[StageId, Kind], list[float]] = defaultdict(list)
        for s in begun:
            if s.before is not None and not self._waited(s):
                after[s.before.node, s.before.kind].append(s.start - s.free)
        return {key: float(np.mean(seconds)) for key, seconds in after.items()}

    def _begins(self, step: Ran, begun: Sequence[Start]) -> dict[int, float]:
        """Return rank -> seconds from the step's start until its first action could begin; the mean if that action
        waits.
        """
        first = (s for s in begun if s.before is None)
        own = {s.rank: s.start - s.free for s in first if not self._waited(s)}
        usual = float(np.mean(list(own.values()))) if own else 0.0
        return {rank: start - step.begin + own.get(rank, usual) for rank, (start, _) in step.spans.items()}

    def seconds(self, plan: StepPlan, graph: StageGraph, action: Action) -> Float64[np.ndarray, "instances"]:
        """Return the fitted seconds of an action on every instance; 0 without rows, and if it was never measured."""
        line = self.lines.get((action.node.all_instances, action.kind), NOTHING)
        features = terms(plan, graph, action)
        return np.asarray(features @ np.array(line)) * ((features[:, 1] > 0) | (action.microbatch < 0))

    def _drawn(
        self, plan: StepPlan, schedule: Schedule, step: int, random: np.random.Generator
    ) -> dict[Action, Float64[np.ndarray, "_instances"]]:
        """Draw the seconds of all actions, on every instance, that scatter around their lines as in a recorded step.

        Each instance is drawn independently, except for actions that all run together: UNSHARD, REDUCE and those of
        synchronous stages.
        """
        costs = {}
        for action in dict.fromkeys(action for lane in schedule.lanes for action in lane.actions):
            seconds = self.seconds(plan, schedule.graph, action)
            as_one = action.microbatch < 0 or action.node in self._synchronous
            ratios = self._scatter[step].get((action.node.all_instances, action.kind), np.ones(1))
            count = 1 if as_one else len(seconds)
            costs[action] = seconds * random.choice(ratios, count, replace=count > len(ratios))
        return costs

    def simulate(self, plan: StepPlan, schedule: Schedule, draws: int = DRAWS) -> Simulation:
        """Simulate a step several times and take the median.

        In each simulation actions and begins scatter as in one recorded step, because a disturbance affects many
        actions at once.
        """
        random = np.random.default_rng(0)
        rows = rows_between(plan, schedule.graph, self._widths)

        def draw() -> Simulation:
            like = int(random.integers(len(self.begins)))
            costs = self._drawn(plan, schedule, like, random)
            host = Host(self.begins[like], lambda action: self.after.get((action.node, action.kind), 0.0), self.closing)
            return simulate(schedule, costs.__getitem__, self.links, rows, synchronous=self._synchronous, host=host)

        return sorted((draw() for _ in range(draws)), key=lambda simulation: simulation.time)[draws // 2]


def transfers(begun: Iterable[Start]) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of transfers, from the end of the sending action to the start of the waiting one."""
    return [(s.size, max(0.0, s.start - s.sent)) for s in begun if s.sent > s.free]


def links(transfers: Sequence[tuple[float, float]]) -> Links:
    """Fit latency and bandwidth, both at least 0, to transfers (bytes, seconds) by least squares.

    If the slope is at most two standard errors above 0, all time is latency.
    """
    if not transfers:
        return Links()
    sizes, seconds = np.array(transfers).T
    if np.ptp(sizes) == 0 or (line := linregress(sizes, seconds)).slope <= 2 * line.stderr:
        return Links(float(seconds.mean()))
    unit = sizes.max()
    (latency, slope), _ = nnls(np.stack([np.ones(len(sizes)), sizes / unit], axis=1), seconds)
    return Links(float(latency), float(unit / slope) if slope > 0 else np.inf)


def predicted(steps: Sequence[Ran], widths: Widths, synchronous: Collection[StageId] = ()) -> list[Simulation]:
    """Simulate every step with the fit of the other steps, and a single step with its own fit."""
    others = [[*steps[:i], *steps[i + 1 :]] or list(steps) for i in range(len(steps))]
    return [
        Fitted(rest, widths, synchronous).simulate(step.plan, step.schedule)
        for step, rest in zip(steps, others, strict=True)
    ]
