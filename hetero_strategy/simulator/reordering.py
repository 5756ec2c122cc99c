"""``Reorderer``: choose the order of a step's microbatches on the schedule that the step would run. Pure.

It is made once, sent to the loader's workers, and called for each step with the sizes of the step plan. A ``Replay``
times one schedule with many sets of durations at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import ScheduleError
from hetero_strategy.plan.plan_step import UnitSizes
from hetero_strategy.plan.reorder import SEARCHES, best_order
from hetero_strategy.schedule.action import Action, Kind, Schedule, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import StageCost, forward_times, forwards, usual
from hetero_strategy.schedule.policies import schedule_policy

Table = Mapping[tuple[Kind, StageId], Float64[np.ndarray, "microbatches"]]
"""(kind, stage) -> time of that work in each microbatch."""
BLOCK = 128
"""Candidates per block, so that their times stay in the processor's cache."""


class Reorderer:
    """A search for the order in which a step runs its microbatches.

    An order is judged by the cost of each action's slowest instance (the mean for cohorts), as if transfers took no
    time.

    Two things may depend on the order: which microbatches a module skips, and how modules on the same ranks take turns.
    The search uses a schedule in which skipped microbatches take no time and turns are those of equal microbatches. If
    the real schedule may differ, the schedules of the best and of the planned order are made and the better order is
    returned, so the result is never judged worse than the planned order.

    It takes about 20 ms for 8 ranks and 32 microbatches on disjoint ranks, and more for the first step of a length.

    Args:
        schedule: a name in ``schedule.policies``.
        costs: forward FLOPs of every stage. Stages share their module's time in this proportion if the time is known;
            else FLOPs are the time.
        max_in_flight, fill: as in ``make_schedule``.
        search: a name in ``plan.reorder.SEARCHES``.
    """

    def __init__(
        self,
        graph: StageGraph,
        schedule: str,
        costs: Mapping[StageId, StageCost],
        max_in_flight: Mapping[str, int] | None = None,
        search: str = "search",
        fill: str = "fine",
    ) -> None:
        self._graph = graph
        self._name = schedule
        self._costs = dict(costs)
        self._bounds = dict(max_in_flight or {})
        self._orders = search != "none"
        self._search = SEARCHES[search]
        self._fill = fill
        self._alone = not schedule_policy(schedule).splits_backward and all(
            len({s.module for s in hosted}) == 1 for hosted in graph.hosts
        )
        self._replays: dict[int, Replay] = {}

    @property
    def needed(self) -> bool:
        """Return whether the order can matter, because some ranks run other stages and may wait for each other."""
        return self._orders and len(self._graph.hosts) > 1

    def __call__(self, sizes: UnitSizes) -> Int64[np.ndarray, "microbatches"]:
        """Find the order: position ``k`` should run the present microbatch ``order[k]``.

        Args:
            sizes: module -> its work in every microbatch of the step. The module skips a microbatch in which all its
                instances have 0 rows.

        Returns:
            The best order; the planned order if no schedule can be made here. The step's own schedule may have fewer
            microbatches of a module and so keep bounds that this one breaks; else it raises the error.
        """
        planned = np.arange(len(next(iter(sizes.values())).rows))
        if not self.needed or len(planned) < 2:
            return planned
        try:
            return self._best(sizes, planned)
        except ScheduleError:
            return planned

    def _best(self, sizes: UnitSizes, planned: np.ndarray) -> np.ndarray:
        """Return the order that the search finds, or the planned one if the step is no faster with it."""
        count, table = len(planned), self._table(sizes)
        active = {module: np.asarray((size.rows > 0).any(axis=1)) for module, size in sizes.items()}
        replay = self._replay(table, count)
        seconds = replay.table(table, count)
        search = self._search or best_order
        best = search(lambda orders: replay.of_orders(seconds, orders), *self._of_ranks(table, count))
        if self._alone and all(a.all() for a in active.values()):  # the schedule is the same for all orders
            times = replay.of_orders(seconds, np.array([planned, best])).tolist()
        else:
            times = [self._time(table, active, order) for order in (planned, best)]
        return best if times[1] < times[0] else planned

    def _table(self, sizes: UnitSizes) -> Table:
        table: dict[tuple[Kind, StageId], np.ndarray] = {}
        kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
        for module in self._graph.pipelines:
            stage_ids = self._graph.nodes_of(module)
            costs = [self._costs[s] for s in stage_ids]
            times = forward_times(costs, *sizes[module])
            for nodes in self._graph.chains[module]:
                for node, cost, seconds in zip(nodes, costs, times, strict=True):
                    stage = self._graph.stages[node]
                    once = usual(node, stage.own(seconds))
                    table |= {(kind, node): once * forwards(kind, stage, cost) for kind in kinds}
        return table

    def _of_ranks(self, table: Table, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sum the forward and backward time of each set of ranks that host the same stages, starting with the first
        stages.

        Both are float64 ``[sets of ranks, count]``.
        """
        index = {stage_id: i for i, stage_id in enumerate(self._graph.stages)}
        hosted = sorted(self._graph.hosts, key=lambda stage_ids: min(index[s] for s in stage_ids))
        both = np.zeros((2, len(hosted), count))
        for i, stage_ids in enumerate(hosted):
            for s in stage_ids:
                both[0, i] += table["F", s]
                both[1, i] += table["B", s] if self._graph.stages[s].backward else 0.0
        return both[0], both[1]

    def _replay(self, table: Table, count: int) -> Replay:
        """Return the replay of a step of equal microbatches, with work for every module in all of them."""
        if self._alone and count in self._replays:
            return self._replays[count]
        everywhere = dict.fromkeys(self._graph.pipelines, np.ones(count, dtype=bool))
        mean = {name: np.full(count, times.mean()) for name, times in table.items()}
        replay = Replay(self._schedule(mean, everywhere, np.arange(count)))
        if self._alone:  # else it depends on this step, and ranks may have seen different steps
            self._replays[count] = replay
        return replay

    def _time(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray) -> float:
        """Return the time of the step with the schedule of this order."""
        replay = Replay(self._schedule(table, active, order))
        return float(replay.of_orders(replay.table(table, len(order)), order[None])[0])

    def _schedule(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray) -> Schedule:
        """Make the schedule of a step that runs its microbatches in this order."""
        worked = {module: np.flatnonzero(active[module][order]).tolist() for module in self._graph.pipelines}
        edges = [(s.module, t.module) for s, t in self._graph.edges if s.module != t.module]
        feeds = {(s, t): tuple((k, k) for k in sorted({*worked[s]} & {*worked[t]})) for s, t in edges}
        work = StepWork({module: tuple(Span(k, k, k) for k in own) for module, own in worked.items()}, feeds)
        seconds = {name: times[order].tolist() for name, times in table.items()}

        def cost(action: Action) -> float:
            return 0.0 if action.microbatch < 0 else seconds[action.kind, action.node][action.microbatch]

        return make_schedule(self._name, self._graph, work, cost, max_in_flight=self._bounds, fill=self._fill)


class Replay:
    """A schedule compiled to arrays; make it once and call it often.

    It is the longest path that :func:`simulate` walks action by action, with the candidates as a numpy axis:
    independent actions run in one operation. Transfers take no time here, and the instances of a stage run an action
    together.

    Its times equal ``simulate(schedule, costs, synchronous=<all stages>).time`` with each action's slowest instance as
    its cost. This is exactly ``simulate(schedule, costs).time`` if every stage has one instance, or if the instances of
    a stage take equal time and are in the same lanes. Otherwise it is never less: here actions wait for all instances,
    there for some.

    Raises:
        ScheduleError: ``schedule.starts`` does not agree with the lists.
    """

    def __init__(self, schedule: Schedule) -> None:
        try:
            before, level = _predecessors(schedule)
        except KeyError:
            schedule.check_starts()
            raise
        self.actions: tuple[Action, ...] = tuple(sorted(schedule.starts, key=level.__getitem__))
        """Every action once, in an order in which they can run."""
        index = {action: i for i, action in enumerate(self.actions)}
        self._levels = _levels([level[a] for a in self.actions], [[index[b] for b in before[a]] for a in self.actions])
        self._last = np.array(sorted({index[lane.actions[-1]] for lane in schedule.lanes if lane.actions}), np.int64)
        self.lines: tuple[tuple[Kind, StageId], ...] = tuple(dict.fromkeys((a.kind, a.node) for a in self.actions))
        """Kinds of work: the rows of a table of costs."""
        line = {name: i for i, name in enumerate(self.lines)}
        self._line = np.array([line[a.kind, a.node] for a in self.actions], np.int64)
        self._position = np.array([max(0, a.microbatch) for a in self.actions], np.int64)

    def table(
        self, costs: Mapping[tuple[Kind, StageId], Float64[np.ndarray, "microbatches"] | float], microbatches: int
    ) -> Float64[np.ndarray, "lines microbatches"]:
        """Return the table of costs for ``of_orders``.

        Args:
            costs: seconds of every kind of work per microbatch of the step; UNSHARD and REDUCE (one number for all)
                take no time if they are left out.
        """
        table = np.zeros((len(self.lines), microbatches))
        for i, name in enumerate(self.lines):
            if name in costs or name[0] not in ("UNSHARD", "REDUCE"):
                table[i] = costs[name]
        return table

    def of_orders(
        self, table: Float64[np.ndarray, "lines microbatches"], orders: Int64[np.ndarray, "candidates microbatches"]
    ) -> Float64[np.ndarray, "candidates"]:
        """Return the seconds of the step, with costs from ``table``, when position ``k`` runs microbatch ``orders[:,
        k]``.
        """
        times = np.empty(len(orders))
        cells = self._line * table.shape[1] + self._position
        for a in range(0, len(orders), BLOCK):
            block = np.ascontiguousarray(orders[a : a + BLOCK].T)
            by_cell = table.take(block, axis=1).reshape(-1, block.shape[1])
            ends = self._run(by_cell.take(cells, axis=0))
            times[a : a + BLOCK] = ends[self._last].max(axis=0, initial=0.0)
        return times

    def _run(self, durations: np.ndarray) -> np.ndarray:
        """Turn durations ``[actions, candidates]`` into ends, in place."""
        for start, stop, before in self._levels:
            ready = durations.take(before[0], axis=0)
            for more in before[1:]:
                np.maximum(ready, durations.take(more, axis=0), out=ready)
            durations[start:stop] += ready
        return durations


def _predecessors(schedule: Schedule) -> tuple[dict[Action, list[Action]], dict[Action, int]]:
    """Return action -> actions that it waits for, and action -> most actions in a row before it.

    Raises:
        KeyError: ``starts`` does not agree with the lists.
    """
    before = {action: list(schedule.dependencies.crossing(action)) for action in schedule.starts}
    for lane in schedule.lanes:  # F before B, and I before W, of one stage: lanes have this order
        for first, second in zip(lane.actions, lane.actions[1:], strict=False):
            if first not in before[second]:
                before[second].append(first)
    level: dict[Action, int] = {}
    for action in schedule.starts:
        level[action] = max((level[b] + 1 for b in before[action]), default=0)
    return before, level


def _levels(level: list[int], before: list[list[int]]) -> list[tuple[int, int, np.ndarray]]:
    """Return levels that wait for earlier ones: first action, last + 1, and their predecessors, int64 ``[most,
    actions]``.
    """
    levels = []
    start = 0
    for stop in range(1, len(level) + 1):
        if stop < len(level) and level[stop] == level[start]:
            continue
        most = max(map(len, before[start:stop]))
        if most:  # shorter lists repeat their first entry
            padded = [b + [b[0]] * (most - len(b)) for b in before[start:stop]]
            levels.append((start, stop, np.ascontiguousarray(np.array(padded, np.int64).T)))
        start = stop
    return levels
