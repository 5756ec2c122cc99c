"""How long steps should take, from recorded steps of all ranks, what is fitted to them, and a simulation.

Fitted to the steps that ran are the seconds of actions (a line in planned FLOPs for every stage and kind, and how they
scatter around it), latency and bandwidth of transfers, and the time of every rank's main thread besides actions (making
the schedule and routes, posting receives, summing up the step's output). Where ranks wait for each other the slowest
one counts, so a step of means would be too short: actions are drawn as they scatter within a step, and the median of
several simulations is taken.

Where ranks share processors, actions are as slow as they were on average beside the others. Who competes with whom at a
moment is not simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import linregress

from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action, Kind, Schedule, StageId
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator.links import Links, same_ranks
from hetero_strategy.simulator.profile import Profile, TimedAction, fit_line
from hetero_strategy.simulator.result import Host, Simulation
from hetero_strategy.simulator.rows import Widths, rows_between
from hetero_strategy.simulator.simulate import RowsSent, pairs, simulate

DRAWS = 15
"""Simulations of a step, of which the median one is taken."""
Events = Mapping[int, Sequence[tuple[Action, float, float]]]
"""Rank -> (action, start, end) in seconds of one clock, in the sequence in which they ran."""


class Ran(NamedTuple):
    """A recorded step on all ranks."""

    plan: StepPlan
    schedule: Schedule
    planned: PlannedCosts
    events: Events
    spans: Mapping[int, tuple[float, float]]
    """Rank -> when it was asked for the step and when it had the step's output, on the clock of the events."""

    @property
    def begin(self) -> float:
        """When the first rank was asked for the step."""
        return min(begin for begin, _ in self.spans.values())

    @property
    def seconds(self) -> float:
        """Seconds from the first rank's begin to the last rank's end."""
        return max(end for _, end in self.spans.values()) - self.begin


def together(schedule: Schedule, events: Events, synchronous: Collection[StageId] = ()) -> Events:
    """Move starts of events to when all ranks have begun that must take part, as the first ones wait for the last.

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
    """Seconds of every action, from when all have begun until its last rank has ended; float64 ``[instances]``."""
    seconds = {
        (action, rank): end - start
        for rank, own in together(schedule, events, synchronous).items()
        for action, start, end in own
    }
    return {
        action: np.array(
            [max(seconds[action, int(rank)] for rank in row) for row in schedule.graph.stages[action.node].grid]
        )
        for action in dict.fromkeys(action for action, _ in seconds)  # in the same order in every process
    }


class Start(NamedTuple):
    """How one action of one rank came to begin."""

    rank: int
    before: Action | None
    """What the rank ran before; None: this is its first action."""
    free: float
    """When that had ended, or when the rank was asked for the step."""
    sent: float
    """When other ranks had sent all that the action reads; -inf: it reads nothing of others."""
    size: float
    """Bytes that the action reads from other ranks."""
    start: float
    """When the action began."""
    apart: bool = False
    """It ran on a stream of its own."""


def starts(ran: Ran, rows: RowsSent, apart: Collection[str] = ()) -> list[Start]:
    """Find how all actions of a step came to begin, in seconds of the clock of its events.

    Args:
        apart: modules that run on a stream of their own, in its own sequence.
    """
    dependencies, stages = ran.schedule.dependencies, ran.schedule.graph.stages
    ended = {(action, rank): end for rank, own in ran.events.items() for action, _, end in own}
    begun = []
    for rank, own in ran.events.items():
        last: dict[bool, tuple[Action | None, float]] = {}
        for action, start, end in own:
            before, free = last.get(action.node.module in apart, (None, ran.spans[rank][0]))
            size, sent = 0.0, -np.inf
            grid = stages[action.node].grid
            instance = int(np.nonzero((grid == rank).any(axis=1))[0][0])
            for source in dependencies.crossing(action):
                theirs = stages[source.node].grid
                flow = pairs(rows(source, action))
                away = (flow.target == instance) & (flow.bytes > 0)
                if (source.node.module in apart) == (action.node.module in apart):
                    away[away] = ~same_ranks(theirs, grid)(flow.source[away], flow.target[away])
                size += float(flow.bytes[away].sum())
                sent = max(sent, *(ended[source, int(r)] for r in theirs[flow.source[away]].flat), -np.inf)
            begun.append(Start(rank, before, free, sent, size, start, action.node.module in apart))
            last[action.node.module in apart] = action, end
    return begun


class Fitted:
    """What steps cost here, fitted to steps that ran.

    Args:
        steps: recorded steps, at least one.
        synchronous: stages all of whose instances begin their actions together.
        apart: modules that run on a stream of their own; what they take there is measured beside the others.
    """

    def __init__(
        self,
        steps: Sequence[Ran],
        widths: Widths,
        synchronous: Collection[StageId] = (),
        apart: Collection[str] = (),
    ) -> None:
        self._widths, self._synchronous, self._apart = widths, synchronous, apart
        timed = [list(samples(step, synchronous)) for step in steps]
        self.profile = Profile(sample for own in timed for sample in own)
        self._scatter = [self.profile.scatter(own) for own in timed]
        by_step = [starts(step, rows_between(step.plan, step.schedule.graph, widths), apart) for step in steps]
        begun = [start for own in by_step for start in own]
        self.links = links(transfers(begun))
        self.after = self._after(begun)
        self.begins = [self._begins(step, own) for step, own in zip(steps, by_step, strict=True)]
        """For each step, rank -> seconds until it could begin its first action."""
        ends = [max((end for own in step.events.values() for *_, end in own), default=step.begin) for step in steps]
        self.closing = float(np.mean([step.begin + step.seconds - end for step, end in zip(steps, ends, strict=True)]))

    def _waited(self, action: Start) -> bool:
        """Whether an action had to wait for rows of other ranks."""
        return action.sent + self.links.latency + action.size / self.links.bandwidth > action.free

    def _after(self, begun: Iterable[Start]) -> dict[tuple[StageId, Kind], float]:
        """(stage, kind) -> mean seconds from an action's end to the start of a next one that waited for nothing."""
        after: dict[tuple[StageId, Kind], list[float]] = defaultdict(list)
        for s in begun:
            if s.before is not None and not self._waited(s):
                after[s.before.node, s.before.kind].append(s.start - s.free)
        return {key: float(np.mean(seconds)) for key, seconds in after.items()}

    def _begins(self, step: Ran, begun: Sequence[Start]) -> dict[int, float]:
        """Rank -> seconds from the step's start until it could begin its first action; the mean where that waits."""
        first = (s for s in begun if s.before is None and not s.apart)
        own = {s.rank: s.start - s.free for s in first if not self._waited(s)}
        usual = float(np.mean(list(own.values()))) if own else 0.0
        return {rank: asked - step.begin + own.get(rank, usual) for rank, (asked, _) in step.spans.items()}

    @property
    def begin(self) -> float:
        """Mean seconds from a step's start until a rank can begin its first action."""
        return float(np.mean([seconds for begins in self.begins for seconds in begins.values()]))

    def simulate(self, plan: StepPlan, schedule: Schedule, planned: PlannedCosts, draws: int = DRAWS) -> Simulation:
        """Simulate a step several times and take the median.

        In each simulation actions and begins scatter as in one recorded step, because what disturbs ranks disturbs many
        actions at once.
        """
        random = np.random.default_rng(0)
        rows = rows_between(plan, schedule.graph, self._widths)

        def draw() -> Simulation:
            like = random.integers(len(self.begins))
            costs = self.profile.drawn(planned, schedule, self._scatter[like], random, self._synchronous)
            host = Host(self.begins[like], lambda action: self.after.get((action.node, action.kind), 0.0), self.closing)
            beside = costs.__getitem__ if self._apart else None  # as fast as measured, whatever runs beside
            together = self._synchronous
            return simulate(
                schedule, costs.__getitem__, self.links, rows, synchronous=together, host=host, bubbles=beside
            )

        return sorted((draw() for _ in range(draws)), key=lambda simulation: simulation.time)[draws // 2]


def samples(step: Ran, synchronous: Collection[StageId] = ()) -> Iterable[TimedAction]:
    """What every instance took for every action, beside its planned FLOPs."""
    for action, seconds in durations(step.schedule, step.events, synchronous).items():
        flops = step.planned.of_instances(action) if action.microbatch >= 0 else np.zeros(len(seconds))
        for planned, measured in zip(flops, seconds, strict=True):
            yield TimedAction(action.node.all_instances, action.kind, float(planned), float(measured))


def transfers(begun: Iterable[Start]) -> list[tuple[float, float]]:
    """(bytes, seconds) of transfers, from the end of what sent them to the start of what waited for them elsewhere."""
    return [(s.size, max(0.0, s.start - s.sent)) for s in begun if s.sent > s.free]


def links(transfers: Sequence[tuple[float, float]]) -> Links:
    """Fit latency and bandwidth, both at least 0, to transfers (bytes, seconds) by least squares.

    Where larger transfers do not take longer by more than two standard errors of the slope, all is latency.
    """
    if not transfers:
        return Links()
    sizes, seconds = np.array(transfers).T
    if np.ptp(sizes) == 0 or (line := linregress(sizes, seconds)).slope <= 2 * line.stderr:
        return Links(float(seconds.mean()))
    latency, slope = fit_line(np.array(transfers))
    return Links(latency, 1.0 / slope if slope > 0 else np.inf)


def predicted(
    steps: Sequence[Ran], widths: Widths, synchronous: Collection[StageId] = (), apart: Collection[str] = ()
) -> list[Simulation]:
    """Simulate every step with what is fitted to the others, a single one with what is fitted to itself."""
    others = [[*steps[:i], *steps[i + 1 :]] or list(steps) for i in range(len(steps))]
    return [
        Fitted(rest, widths, synchronous, apart).simulate(step.plan, step.schedule, step.planned)
        for step, rest in zip(steps, others, strict=True)
    ]
