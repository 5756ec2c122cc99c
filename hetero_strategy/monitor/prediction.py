"""What steps should take, from what others took: recorded steps of all ranks, what is fitted to them, a simulation.

From the steps that ran come: seconds of actions (a line in planned FLOPs for every stage and kind, and how they scatter
around it), latency and bandwidth of transfers, and what the main thread of every rank does besides actions (making the
schedule and routes, posting receives, summing what the step yields). Where ranks wait for each other the slowest one
counts, so a step of means would be too short: actions are drawn as they scatter within a step, and the median is taken.

Where ranks share processors, actions are as slow as they were on average beside the others; who competes with whom
at a moment is not simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls
from scipy.stats import linregress

from hetero_strategy.plan.step_plan import StepPlan, edge_blocks
from hetero_strategy.schedule.action import Action, Kind, Schedule, StageId
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator import Host, Links, RowsSent, Simulation, simulate
from hetero_strategy.simulator.links import same_ranks
from hetero_strategy.simulator.profile import Profile, TimedForward

DRAWS = 15
"""Simulations of a step, of which the median one is taken."""
Events = Mapping[int, Sequence[tuple[Action, float, float]]]
"""By rank: (action, start, end) in seconds of one clock, in the order in which they ran."""
Widths = Callable[[StageId, StageId], float]
"""Bytes of a row between two nodes."""


class Ran(NamedTuple):
    """A recorded step on all ranks."""

    plan: StepPlan
    schedule: Schedule
    planned: PlannedCosts
    events: Events
    spans: Mapping[int, tuple[float, float]]
    """By rank: from when it was asked for the step until it had what the step yields; on the clock of events."""

    @property
    def begin(self) -> float:
        return min(begin for begin, _ in self.spans.values())

    @property
    def seconds(self) -> float:
        """From the first rank's begin to the last rank's end."""
        return max(end for _, end in self.spans.values()) - self.begin


def together(schedule: Schedule, events: Events, synchronous: Collection[StageId] = ()) -> Events:
    """Events that begin when all ranks have begun that must take part: those that come first wait for the last one.

    Ranks of an instance always begin together; all instances of a node do for UNSHARD and REDUCE, and for every action
    of ``synchronous`` nodes.
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
    """Seconds of every action, float64 ``[instances]``: from when all have begun until its last rank has ended."""
    seconds = {
        (action, rank): end - start
        for rank, own in together(schedule, events, synchronous).items()
        for action, start, end in own
    }
    return {
        action: np.array(
            [max(seconds[action, int(rank)] for rank in row) for row in schedule.graph.stages[action.node].grid]
        )
        for action in {action for action, _ in seconds}
    }


def rows_between(plan: StepPlan, widths: Widths = lambda source, target: 1.0) -> RowsSent:
    """Bytes between actions of a step, as `simulate` takes them; without widths their rows."""

    @cache
    def rows(source: Action, target: Action) -> np.ndarray:
        back = source.kind != "F"
        first, second = (target, source) if back else (source, target)
        width = widths(first.node, second.node)
        if first.node.module == second.node.module:
            return width * plan.assignments[first.node.module][first.microbatch].totals(inner=True)
        blocks = edge_blocks(plan, first.node.module, first.microbatch, second.node.module, second.microbatch)
        counts = [len(plan.assignments[a.node.module][a.microbatch].offsets) - 1 for a in (first, second)]
        sent = np.zeros((counts[0], counts[1]))
        np.add.at(sent, (blocks.source_instance, blocks.target_instance), width * blocks.rows)
        return sent.T if back else sent

    return rows


class Start(NamedTuple):
    """How one action of one rank came to begin."""

    rank: int
    before: Action | None
    """What the rank ran before; None: this is its first action."""
    free: float
    """When that had ended, or the rank was asked for the step."""
    sent: float
    """When the last of what it reads was sent by other ranks; -inf: it reads nothing of others."""
    size: float
    """Bytes of that, from all of them."""
    start: float


def starts(ran: Ran, rows: RowsSent) -> list[Start]:
    """Of all actions of a step, in seconds of the clock of its events."""
    dependencies, stages = ran.schedule.dependencies, ran.schedule.graph.stages
    ended = {(action, rank): end for rank, own in ran.events.items() for action, _, end in own}
    found = []
    for rank, own in ran.events.items():
        before: Action | None = None
        free = ran.spans[rank][0]
        for action, start, end in own:
            size, sent = 0.0, -np.inf
            grid = stages[action.node].grid
            mine = int(np.nonzero((grid == rank).any(axis=1))[0][0])
            for source in dependencies.crossing(action):
                theirs = stages[source.node].grid
                given = np.asarray(rows(source, action))
                column = given[:, mine] if given.ndim == 2 else np.where(np.arange(len(theirs)) == mine, given[mine], 0)
                away = ~same_ranks(theirs, grid[mine][None])[:, 0] & (column > 0)
                size += float(column[away].sum())
                sent = max(sent, *(ended[source, int(r)] for r in theirs[away].flat), -np.inf)
            found.append(Start(rank, before, free, sent, size, start))
            before, free = action, end
    return found


class Fitted:
    """What steps cost on this machine, fitted to steps that ran.

    Args:
        steps: at least one.
        widths: bytes of rows.
        synchronous: nodes all of whose instances begin their actions together.
    """

    def __init__(self, steps: Sequence[Ran], widths: Widths, synchronous: Collection[StageId] = ()) -> None:
        self._widths, self._synchronous = widths, synchronous
        taken = [list(samples(step, synchronous)) for step in steps]
        self.profile = Profile(sample for own in taken for sample in own)
        self._scatter = [self.profile.scatter(own) for own in taken]
        found = [starts(step, rows_between(step.plan, widths)) for step in steps]
        self.links = links(transfers(one for own in found for one in own))
        self.after = self._after(one for own in found for one in own)
        self.begins = [self._begins(step, own) for step, own in zip(steps, found, strict=True)]
        """By step."""
        ends = [max((end for own in step.events.values() for *_, end in own), default=step.begin) for step in steps]
        self.closing = float(np.mean([step.begin + step.seconds - end for step, end in zip(steps, ends, strict=True)]))

    def _waited(self, one: Start) -> bool:
        """Whether an action had to wait for rows of other ranks."""
        return one.sent + self.links.latency + one.size / self.links.bandwidth > one.free

    def _after(self, found: Iterable[Start]) -> dict[tuple[StageId, Kind], float]:
        """Seconds from the end of an action to the beginning of the next one where that waited for nothing."""
        after: dict[tuple[StageId, Kind], list[float]] = defaultdict(list)
        for one in found:
            if one.before is not None and not self._waited(one):
                after[one.before.node, one.before.kind].append(one.start - one.free)
        return {key: float(np.mean(seconds)) for key, seconds in after.items()}

    def _begins(self, step: Ran, found: Sequence[Start]) -> dict[int, float]:
        """Rank -> seconds from the step's start until it could begin its first action; where that waits, as others."""
        own = {one.rank: one.start - one.free for one in found if one.before is None and not self._waited(one)}
        usual = float(np.mean(list(own.values()))) if own else 0.0
        return {rank: asked - step.begin + own.get(rank, usual) for rank, (asked, _) in step.spans.items()}

    @property
    def begin(self) -> float:
        """Seconds from a step's start until a rank can begin its first action, in the mean."""
        return float(np.mean([seconds for begins in self.begins for seconds in begins.values()]))

    def simulate(self, plan: StepPlan, schedule: Schedule, planned: PlannedCosts, draws: int = DRAWS) -> Simulation:
        """The median of several simulations of a step, with actions and beginnings as they scattered in some other one.

        In one other step at a time: what disturbs a machine disturbs many actions at once.
        """
        random = np.random.default_rng(0)
        rows = rows_between(plan, self._widths)

        def one() -> Simulation:
            like = random.integers(len(self.begins))
            costs = self.profile.drawn(planned, schedule, self._scatter[like], random, self._synchronous)
            host = Host(self.begins[like], lambda action: self.after.get((action.node, action.kind), 0.0), self.closing)
            return simulate(schedule, costs.__getitem__, self.links, rows, synchronous=self._synchronous, host=host)

        return sorted((one() for _ in range(draws)), key=lambda simulation: simulation.time)[draws // 2]


def samples(step: Ran, synchronous: Collection[StageId] = ()) -> Iterable[TimedForward]:
    """What every instance took for every action."""
    for action, seconds in durations(step.schedule, step.events, synchronous).items():
        flops = step.planned.of_instances(action) if action.microbatch >= 0 else np.zeros(len(seconds))
        for each, taken in zip(flops, seconds, strict=True):
            yield TimedForward(action.node, action.kind, float(each), float(taken))


def transfers(found: Iterable[Start]) -> list[tuple[float, float]]:
    """(bytes, seconds) from the end of what sent them to the start of what was waiting for them on other ranks."""
    return [(one.size, max(0.0, one.start - one.sent)) for one in found if one.sent > one.free]


def links(transfers: Sequence[tuple[float, float]]) -> Links:
    """Latency and bandwidth, both at least 0, by least squares through (bytes, seconds).

    Where larger transfers are not seen to take longer (a slope above two standard errors), all of it is latency.
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
    """Every step, simulated with what is fitted to the others; a single one with what is fitted to itself."""
    others = [[*steps[:i], *steps[i + 1 :]] or list(steps) for i in range(len(steps))]
    return [
        Fitted(rest, widths, synchronous).simulate(step.plan, step.schedule, step.planned)
        for step, rest in zip(steps, others, strict=True)
    ]
