"""``simulate``: compute the times of a schedule. Pure: numpy over the schedule that the runtime runs.

All instances of a stage run the same actions, so an action is simulated for all of them at once. Instances are coupled
only by shared ranks, rows between modules, and collectives of all instances. Times then follow as a longest path from
any order in which the actions can run: one visit per action, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import ScheduleError
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks, places_among
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StageId
from hetero_strategy.simulator.cluster import Between, Links, Network
from hetero_strategy.simulator.result import CAUSES, NO_HOST, Cause, Host, Simulation

_WAITS: tuple[Cause, ...] = ("host", "dependency", "boundary", "straggler")

ActionCosts = Callable[[Action], float | Float64[np.ndarray, "instances"]]
"""Function of an action: seconds, one number or one for each instance of its stage."""


class Sent(NamedTuple):
    """The rows between instances of two modules, pair by pair."""

    source: Int64[np.ndarray, "pairs"]
    """Sending instance."""
    target: Int64[np.ndarray, "pairs"]
    """Receiving instance, which waits for the sender."""
    bytes: Float64[np.ndarray, "pairs"]
    """Bytes into one rank of the receiver."""


RowsSent = Callable[[Action, Action], Float64[np.ndarray, "instances"] | Sent]
"""(source action, reading action) -> bytes that one rank of the reading action's stage receives.

Within a module rows go from instance i to instance i, in all of them. Between modules an instance waits only for
instances that send it rows.
"""


def pairs(rows: Float64[np.ndarray, "instances"] | Sent) -> Sent:
    """Return rows pair by pair, within a module too."""
    return rows if isinstance(rows, Sent) else Sent(np.arange(len(rows)), np.arange(len(rows)), rows)


Widths = Callable[[StageId, StageId], float]
"""(source stage, target stage) -> bytes of a row between them."""


def rows_between(plan: StepPlan, graph: StageGraph, widths: Widths = lambda source, target: 1.0) -> RowsSent:
    """Return a function for ``simulate``: bytes between actions of a step into one reading rank, which has at most a
    part of an instance's rows; numbers of rows without widths.
    """

    @cache
    def totals(module: str, microbatch: int) -> np.ndarray:
        """Return the rows of every instance of a module."""
        return plan.assignments[module][microbatch].totals(inner=True)

    @cache
    def sent_rows(source: str, p: int, target: str, t: int) -> Sent:
        """Return the rows between all instances of two modules."""
        blocks = edge_blocks(plan, source, p, target, t)
        bins = len(plan.assignments[target][t].offsets) - 1
        pair, number = np.unique(blocks.source_instance * bins + blocks.target_instance, return_inverse=True)
        return Sent(*np.divmod(pair, bins), np.bincount(number, blocks.rows, len(pair)))

    @cache
    def rows(source: Action, target: Action) -> np.ndarray | Sent:
        back = source.kind != "F"
        (a, p), (b, t) = ((x.node, x.microbatch) for x in ((target, source) if back else (source, target)))
        width = widths(a, b) / graph.stages[target.node].row_sharding.parts
        if a.module == b.module:
            return np.asarray(width * graph.stages[a].own(totals(a.module, p)))
        sent = sent_rows(a.module, p, b.module, t)
        first, from_here = places_among(sent.source, graph.stages[a].members)
        second, to_here = places_among(sent.target, graph.stages[b].members)
        kept = from_here & to_here & (sent.bytes > 0)
        first, second, size = first[kept], second[kept], width * sent.bytes[kept]
        return Sent(second, first, size) if back else Sent(first, second, size)

    return rows


def simulate(
    schedule: Schedule,
    costs: ActionCosts,
    links: Links | Network | None = None,
    rows: RowsSent | None = None,
    synchronous: Collection[StageId] = (),
    host: Host = NO_HOST,
) -> Simulation:
    """Compute start and end of every action on every instance, and what its ranks waited for.

    An action of an instance starts when all its ranks have finished the earlier actions of their lists and its inputs
    have arrived. Transfers occupy no rank. Transfers between the same two stages (or others on exactly the same ranks)
    reach an instance in sequence, and transfers of one action share the links that they leave and enter. UNSHARD and
    REDUCE that take time start together on all instances of their stage.

    Args:
        schedule: schedule whose ``starts`` must agree with its lists; :func:`hetero_strategy.schedule.check.check`
            proves it.
        costs: seconds of an action.
        links: speed of transfers; None: they take no time.
        rows: bytes of a transfer; None: only latencies count, and between modules all instances wait for all instances.
        synchronous: stages whose actions all start together on all instances (FSDP that gathers per microbatch).
        host: times of main threads besides actions; default: 0.

    Raises:
        ScheduleError: an action starts before one that it needs.
        ValueError: costs or bytes are negative or of another shape.
    """
    readers = _readers(schedule)
    account = _Account(schedule, host)
    transfers = _Transfers(schedule, links or Links(), rows)
    start: dict[Action, np.ndarray] = {}
    end: dict[Action, np.ndarray] = {}

    for action in schedule.starts:
        grid = account.grids[action.node]
        cost = np.asarray(costs(action), dtype=np.float64)
        if cost.shape not in ((), (len(grid),)) or not (cost >= 0).all():
            raise ValueError(f"cost of {action} must be >= 0, a number or [{len(grid)}] (instances), got {cost}")
        computed, arrived = transfers.inbox.pop(action, (None, None))
        begin = account.free[grid].max(axis=1)
        if arrived is not None:
            begin = np.maximum(begin, arrived)
        if action.node in synchronous or (action.microbatch < 0 and cost.any()):
            begin = np.full_like(begin, begin.max())
        start[action], end[action] = begin, begin + cost
        account.run(action, begin, end[action], computed, arrived)
        for reader in readers[action]:
            transfers.send(action, reader, end[action])
    return account.close(start, end)


def _readers(schedule: Schedule) -> dict[Action, list[Action]]:
    """Return every action -> actions of other stages that read its rows, in the order in which they start.

    Raises:
        ScheduleError: an action starts before one that it needs.
    """
    readers: dict[Action, list[Action]] = {}
    dependencies = schedule.dependencies
    for action in schedule.starts:
        sources = dependencies.crossing(action)
        # If B reads gradients, their chain began with B of a later stage, so F of B's own stage has started too.
        for need in sources or dependencies.local(action):
            if need not in readers:
                raise ScheduleError(f"{action} starts before {need}, which it needs; see schedule.check")
        for source in sources:
            readers[source].append(action)
        readers[action] = []
    return readers


class _Account:
    """A ledger of when each rank is free and what it waited for. Arrays have one entry per rank."""

    def __init__(self, schedule: Schedule, host: Host) -> None:
        self._schedule = schedule
        self._host = host
        stages = schedule.graph.stages
        self.ranks = np.unique(np.concatenate([s.grid.ravel() for s in stages.values()]))
        """Global ranks of all stages, ascending."""
        self.grids = {stage_id: np.searchsorted(self.ranks, stage.grid) for stage_id, stage in stages.items()}
        """Stage -> indices of its ranks in the arrays here, int64 ``[instances, ranks per instance]``."""
        count = len(self.ranks)
        self.free = np.zeros(count)
        """Time at which each rank can begin its next action."""
        for rank, begin in host.begins.items():
            self.free[self.ranks == rank] = begin
        self._ended = self.free.copy()
        self._busy = np.zeros(count)
        self._idle = {cause: np.zeros(count) for cause in CAUSES}
        self._idle["host"] += self.free
        self._warm = np.zeros(count, dtype=bool)
        self._cold_stages = set(stages)
        self._reads: dict[Action, tuple[np.ndarray, np.ndarray]] = {}

    def run(
        self,
        action: Action,
        start: Float64[np.ndarray, "instances"],
        end: Float64[np.ndarray, "instances"],
        computed: Float64[np.ndarray, "instances"] | None,
        arrived: Float64[np.ndarray, "instances"] | None,
    ) -> None:
        """Book an action. Its inputs from other stages were ``computed`` and ``arrived`` at these times; None: no
        inputs.
        """
        grid = self.grids[action.node]
        free = self.free[grid]
        if computed is not None and arrived is not None:
            self._reads[action] = computed, arrived
            here = np.maximum(free, computed[:, None])
            self._idle["dependency"][grid] += here - free
            free = np.maximum(free, arrived[:, None])
            self._idle["boundary"][grid] += free - here
        self._idle["straggler"][grid] += start[:, None] - free
        if action.microbatch >= 0 and action.node in self._cold_stages:
            self._warm_up(grid)
            self._cold_stages.discard(action.node)
        self._busy[grid] += (end - start)[:, None]
        after = self._host.after(action)
        self._idle["host"][grid] += after
        self._ended[grid] = end[:, None]
        self.free[grid] = end[:, None] + after

    def _warm_up(self, grid: np.ndarray) -> None:
        """Rebook waits of ranks that compute for the first time as warm-up."""
        cold = grid[~self._warm[grid]]
        self._warm[cold] = True
        for cause in _WAITS:
            self._idle["warm-up"][cold] += self._idle[cause][cold]
            self._idle[cause][cold] = 0.0

    def close(
        self,
        start: dict[Action, Float64[np.ndarray, "_instances"]],
        end: dict[Action, Float64[np.ndarray, "_instances"]],
    ) -> Simulation:
        """Make the result once all actions are booked."""
        time = float(self._ended.max(initial=0.0)) + self._host.closing
        self._idle["host"] -= self.free - self._ended
        rest = time - self._ended
        self._idle["cool-down"] += np.where(self._warm, rest, 0.0)
        self._idle["warm-up"] += np.where(self._warm, 0.0, rest)
        return Simulation(self._schedule, start, end, time, self.ranks, self._busy, self._idle, self._reads, self._host)


@dataclass(frozen=True)
class _Way:
    """The links from the instances of one stage to those of another stage."""

    links: Between
    latency: np.ndarray
    """Seconds from instance to instance within a module, float64 ``[instances]``."""
    per_byte: np.ndarray
    """Seconds per byte from instance to instance within a module, float64 ``[instances]``."""
    nothing: np.ndarray | Sent
    """Default without ``rows``: 0 bytes, between modules from every instance to every other one."""
    leaves: float
    """Bytes that leave a rank of the source for each byte that enters a rank of the target, between modules: rows enter
    an instance once, and the sending instance's ranks share them."""
    last: np.ndarray
    """Time at which the last transfer arrived, float64 ``[target instances]``; shared by stages on the same two grids.
    """


class _Transfers:
    """The rows on their way to actions that have not run yet."""

    def __init__(self, schedule: Schedule, links: Links | Network, rows: RowsSent | None) -> None:
        self.inbox: dict[Action, tuple[np.ndarray, np.ndarray]] = {}
        """Action -> when its inputs were computed and when they have arrived, each float64 ``[instances]``."""
        self._stages = schedule.graph.stages
        self._links = links
        self._rows = rows
        self._ways: dict[tuple[StageId, StageId], _Way] = {}
        self._last: dict[tuple[object, ...], np.ndarray] = {}

    def _way(self, source: StageId, target: StageId) -> _Way:
        if (source, target) not in self._ways:
            a, b = self._stages[source].grid, self._stages[target].grid
            direct = source.module == target.module
            links = self._links.between(a, b)
            own = np.arange(len(b) if direct else 0)
            nothing: np.ndarray | Sent = np.zeros(len(own))
            if self._rows is None and not direct:
                nothing = Sent(*np.divmod(np.arange(len(a) * len(b)), len(b)), np.zeros(len(a) * len(b)))
            leaves = self._stages[target].row_sharding.parts / a.shape[1]
            last = self._last.setdefault((direct, a.shape, a.tobytes(), b.shape, b.tobytes()), np.zeros(len(b)))
            self._ways[source, target] = _Way(links, *links(own, own), nothing, leaves, last)
        return self._ways[source, target]

    def send(self, source: Action, target: Action, end: np.ndarray) -> None:
        """Book the rows that ``target`` reads from ``source``, which ends at ``end``, float64 ``[instances]``."""
        way = self._way(source.node, target.node)
        size = way.nothing if self._rows is None else self._rows(source, target)
        if isinstance(size, Sent):
            computed, arrived = _across(way, size, end)
        elif np.shape(size) == way.latency.shape:
            computed, arrived = end, np.maximum(way.last, end + way.latency) + size * way.per_byte
        else:
            raise ValueError(f"bytes from {source} to {target} must be {way.latency.shape}, got {np.shape(size)}")
        np.maximum(way.last, arrived, out=way.last)
        before = self.inbox.get(target)
        if before is not None:
            computed, arrived = np.maximum(before[0], computed), np.maximum(before[1], arrived)
        self.inbox[target] = computed, arrived


def _across(way: _Way, sent: Sent, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when each instance's inputs from another module were computed and have arrived; 0 without inputs."""
    latency, per_byte = way.links(sent.source, sent.target)
    left = end[sent.source]
    computed, ready = np.zeros((2, len(way.last)))
    np.maximum.at(computed, sent.target, left)
    np.maximum.at(ready, sent.target, left + latency)
    seconds = sent.bytes * per_byte
    wire = np.bincount(sent.target, seconds, len(way.last))
    leaving = np.bincount(sent.source, seconds * way.leaves)
    np.maximum.at(wire, sent.target, leaving[sent.source])
    receives = np.bincount(sent.target, minlength=len(way.last)) > 0
    return computed, np.where(receives, np.maximum(way.last, ready) + wire, 0.0)
