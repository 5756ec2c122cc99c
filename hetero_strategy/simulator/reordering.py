"""`Reorderer`: the order of a step's microbatches, found on the schedule that the step would run. Pure.

It is made once, goes to the loader's workers, and answers per step from what the step plan knows of sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.orchestrator import UnitSizes
from hetero_strategy.plan.reorder import SEARCHES, best_order, interval_order
from hetero_strategy.schedule.action import Action, Kind, Schedule, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import SPLIT, make_schedule
from hetero_strategy.schedule.graph import StageCost, forward_times, forwards
from hetero_strategy.simulator.replay import Replay

Table = Mapping[tuple[Kind, StageId], np.ndarray]
"""Time of every kind of work of every node per microbatch, float64 ``[microbatches]``."""


class Reorderer:
    """Finds in which order a step should run its microbatches.

    An order is judged with the cost of each action's slowest instance and transfers that take no time, where every
    module computes the microbatches of the step; one that groups or divides them otherwise is taken as if it did not.

    Two things may depend on the order: which microbatches a module skips, and how modules on the same ranks take turns.
    The search looks at a schedule without the first (a skipped microbatch takes no time there) and with turns as equal
    microbatches would take them; then the schedules of the order found and of the order as planned are really made and
    the better one is returned. So no order is returned that takes longer than the planned one.

    About 20 ms for 8 ranks and 32 microbatches on disjoint ranks; the first step of a length some more.

    Args:
        graph: stages of all modules.
        schedule: name of the schedule, one of ``schedule.build.SCHEDULES``.
        costs: forward FLOPs of every node: its part of the time that a module is said to take, or the time itself.
        max_in_flight: as for `make_schedule`.
        search: how, one of ``plan.reorder.SEARCHES``.

    Raises:
        ConfigError: ``search`` is not known, or a node has no cost.
    """

    def __init__(
        self,
        graph: StageGraph,
        schedule: str,
        costs: Mapping[StageId, StageCost],
        max_in_flight: Mapping[str, int] | None = None,
        search: str = "search",
    ) -> None:
        if search not in SEARCHES:
            raise ConfigError(f"search of orders of microbatches {search!r} is not known: take {', '.join(SEARCHES)}")
        if missing := [str(node) for node in graph.stages if node not in costs]:
            raise ConfigError(f"reordering needs the cost of every stage, but {', '.join(missing)} have none")
        self._graph = graph
        self._name = schedule
        self._costs = dict(costs)
        self._bounds = dict(max_in_flight or {})
        self._search = search
        self._alone = schedule not in SPLIT and all(len({n.module for n in nodes}) == 1 for nodes in graph.hosts)
        self._replays: dict[int, Replay] = {}

    @property
    def needed(self) -> bool:
        """Whether the order can matter: some ranks run other stages than others, and so may wait for them."""
        return self._search != "none" and len(self._graph.hosts) > 1

    def __call__(self, sizes: UnitSizes) -> np.ndarray:
        """The order, int64 ``[l]``: position ``k`` should run what is now microbatch ``order[k]``.

        Args:
            sizes: of every instance in every microbatch of the step. A microbatch in which all instances of a module
                have 0 rows is one that the module skips.

        Raises:
            ConfigError: a module has no sizes, or of other shapes.
            ScheduleError: no schedule can be made for such a step.
        """
        count = self._count(sizes)
        planned = np.arange(count)
        if not self.needed or count < 2:
            return planned
        table = self._table(sizes)
        active = {module: np.asarray((size.rows > 0).any(axis=1)) for module, size in sizes.items()}
        forward, backward = self._of_ranks(table, count)
        if self._search == "interval":
            best = interval_order(forward, backward)
        else:
            replay = self._replay(table, count)
            seconds = replay.table(table, count)
            best = best_order(
                lambda orders: replay.of_orders(seconds, orders), count, forward=forward, backward=backward
            )
            if self._alone and all(a.all() for a in active.values()):
                return best  # the schedule is the same for all orders, and the planned one was among them
        took = [self._time(table, active, order) for order in (planned, best)]
        return best if took[1] < took[0] else planned

    def _count(self, sizes: UnitSizes) -> int:
        """Microbatches of the step."""
        given = {m: [x for x in sizes[m] if x is not None] for m in self._graph.pipelines if m in sizes}
        shapes = {m: tuple(x.shape for x in given[m]) if m in given else "nothing" for m in self._graph.pipelines}
        counts = {x.shape[0] for arrays in given.values() for x in arrays if x.ndim == 2}
        if len(counts) != 1 or any(len(set(s)) != 1 or len(s[0]) != 2 for s in shapes.values()):
            raise ConfigError(
                f"reordering needs rows and squares [microbatches, instances] of every module, got {shapes}"
            )
        return int(counts.pop())

    def _table(self, sizes: UnitSizes) -> Table:
        found: dict[tuple[Kind, StageId], np.ndarray] = {}
        kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
        for module in self._graph.pipelines:
            nodes = self._graph.nodes_of(module)
            costs = [self._costs[node] for node in nodes]
            for node, cost, times in zip(nodes, costs, forward_times(costs, *sizes[module]), strict=True):
                slowest, stage = times.max(axis=1, initial=0.0), self._graph.stages[node]
                found |= {(kind, node): slowest * forwards(kind, stage, cost) for kind in kinds}
        return found

    def _of_ranks(self, table: Table, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward time of ranks that host the same nodes, each float64 ``[sets of ranks, count]``; the
        ranks of the first stages first.
        """
        place = {node: i for i, node in enumerate(self._graph.stages)}
        hosted = sorted(self._graph.hosts, key=lambda nodes: min(place[n] for n in nodes))
        both = np.zeros((2, len(hosted), count))
        for i, nodes in enumerate(hosted):
            for node in nodes:
                both[0, i] += table["F", node]
                both[1, i] += table["B", node] if self._graph.stages[node].backward else 0.0
        return both[0], both[1]

    def _replay(self, table: Table, count: int) -> Replay:
        """Of a step whose microbatches are all alike, with work for every module in all of them."""
        if self._alone and count in self._replays:
            return self._replays[count]
        everywhere = dict.fromkeys(self._graph.pipelines, np.ones(count, dtype=bool))
        mean = {name: np.full(count, times.mean()) for name, times in table.items()}
        replay = Replay(self._schedule(mean, everywhere, np.arange(count)))
        if self._alone:  # else it is this step's own, and a rank must not depend on which steps it saw before
            self._replays[count] = replay
        return replay

    def _time(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray) -> float:
        """Of the step with the schedule that is made for this order."""
        replay = Replay(self._schedule(table, active, order))
        return float(replay.of_orders(replay.table(table, len(order)), order[None])[0])

    def _schedule(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray) -> Schedule:
        there = {module: np.flatnonzero(active[module][order]).tolist() for module in self._graph.pipelines}
        edges = [(s.module, t.module) for s, t in self._graph.edges if s.module != t.module]
        feeds = {(s, t): tuple((k, k) for k in sorted({*there[s]} & {*there[t]})) for s, t in edges}
        work = StepWork({module: tuple(Span(k, k, k) for k in found) for module, found in there.items()}, feeds)
        seconds = {name: times[order].tolist() for name, times in table.items()}

        def cost(action: Action) -> float:
            return 0.0 if action.microbatch < 0 else seconds[action.kind, action.node][action.microbatch]

        return make_schedule(self._name, self._graph, work, cost, max_in_flight=self._bounds)
