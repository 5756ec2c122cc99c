"""``Reorderer``: finds the order of a step's microbatches on the schedule that the step would run. Pure.

It is made once, goes to the loader's workers, and answers for each step from the sizes that the step plan knows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import ScheduleError
from hetero_strategy.plan.orchestrator import UnitSizes
from hetero_strategy.plan.reorder import best_order, interval_order
from hetero_strategy.schedule.action import Action, Kind, Schedule, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import StageCost, forward_times, forwards, usual
from hetero_strategy.schedule.policies import schedule_policy
from hetero_strategy.simulator.replay import Replay

Table = Mapping[tuple[Kind, StageId], Float64[np.ndarray, "microbatches"]]
"""(kind, stage) -> time of that work in each microbatch."""


class Reorderer:
    """Finds in which order a step should run its microbatches.

    An order is judged by the cost of each action's slowest instance (of cohorts the mean), as if transfers took no time
    and every module, even one that runs a step ahead, computed the microbatches of the step.

    Two things may depend on the order: which microbatches a module skips, and how modules on the same ranks take turns.
    The search looks at a schedule in which skipped microbatches run in no time and turns are taken as for equal
    microbatches. Where it may differ, the schedules of the order found and of the planned order are made and the better
    one is returned, so that none takes longer than the planned one as judged here. With ``fill="search"`` they are made
    as for ``fine``; the better one is searched, and so is an order that suits what was found.

    It takes about 20 ms for 8 ranks and 32 microbatches on disjoint ranks, and more for the first step of a length.

    Args:
        schedule: a name in ``schedule.policies``.
        costs: forward FLOPs of every stage, in proportion to which stages share the time of their module where one is
            known; otherwise they are the time.
        max_in_flight, fill: as for ``make_schedule``.
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
        self._search = search
        self._fill = "fine" if fill == "search" else fill
        self._searches = fill == search == "search"
        self._alone = (
            fill != "search"
            and not schedule_policy(schedule).splits_backward
            and all(len({s.module for s in hosted}) == 1 for hosted in graph.hosts)
        )
        self._replays: dict[int, Replay] = {}

    @property
    def needed(self) -> bool:
        """Whether the order can matter, because some ranks run other stages than others and may wait for them."""
        return self._search != "none" and len(self._graph.hosts) > 1

    def __call__(self, sizes: UnitSizes) -> Int64[np.ndarray, "microbatches"]:
        """Find the order: position ``k`` should run what is now microbatch ``order[k]``.

        Args:
            sizes: module -> its work in every microbatch of the step. The module skips a microbatch in which all its
                instances have 0 rows.

        Returns:
            The planned order where no schedule can be made of it: that of the step may have fewer microbatches of a
            module, and keep bounds that this one does not, or says why it can not.
        """
        planned = np.arange(len(next(iter(sizes.values())).rows))
        if not self.needed or len(planned) < 2:
            return planned
        try:
            return self._best(sizes, planned)
        except ScheduleError:
            return planned

    def _best(self, sizes: UnitSizes, planned: Int64[np.ndarray, "microbatches"]) -> Int64[np.ndarray, "microbatches"]:
        count, table = len(planned), self._table(sizes)
        active = {module: np.asarray((size.rows > 0).any(axis=1)) for module, size in sizes.items()}
        forward, backward = self._of_ranks(table, count)
        if self._search == "interval":
            best = interval_order(forward, backward)
        else:
            replay = self._replay(table, count)
            seconds = replay.table(table, count)
            best = best_order(lambda orders: replay.of_orders(seconds, orders), forward, backward)
            if self._alone and all(a.all() for a in active.values()):
                return best  # the schedule is the same for all orders, and the planned one was among them
        times = [self._time(table, active, order, self._fill) for order in (planned, best)]
        order = best if times[1] < times[0] else planned
        return self._again(table, active, order) if self._searches else order

    def _again(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray) -> np.ndarray:
        """An order that suits the schedule that a search finds for this one; this one where that takes no less."""
        everywhere = {module: np.ones_like(own) for module, own in active.items()}
        replay = Replay(self._schedule(table, everywhere, order, "search"))
        seconds = replay.table(table, len(order))
        forward, backward = self._of_ranks(table, len(order))
        moves = best_order(lambda m: replay.of_orders(seconds, order[m]), forward[:, order], backward[:, order])
        times = [self._time(table, active, each, "search") for each in (order, order[moves])]
        return order[moves] if times[1] < times[0] else order

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
        """Forward and backward time of each set of ranks that host the same stages, ranks of the first stages first.

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
        """The replay of a step whose microbatches are all alike, with work for every module in all of them."""
        if self._alone and count in self._replays:
            return self._replays[count]
        everywhere = dict.fromkeys(self._graph.pipelines, np.ones(count, dtype=bool))
        mean = {name: np.full(count, times.mean()) for name, times in table.items()}
        replay = Replay(self._schedule(mean, everywhere, np.arange(count), self._fill))
        if self._alone:  # else it is this step's own, and a rank must not depend on which steps it saw before
            self._replays[count] = replay
        return replay

    def _time(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray, fill: str) -> float:
        """Time of the step with the schedule that is made for this order."""
        replay = Replay(self._schedule(table, active, order, fill))
        return float(replay.of_orders(replay.table(table, len(order)), order[None])[0])

    def _schedule(self, table: Table, active: Mapping[str, np.ndarray], order: np.ndarray, fill: str) -> Schedule:
        """Make the schedule of a step that runs its microbatches in this order."""
        worked = {module: np.flatnonzero(active[module][order]).tolist() for module in self._graph.pipelines}
        edges = [(s.module, t.module) for s, t in self._graph.edges if s.module != t.module]
        feeds = {(s, t): tuple((k, k) for k in sorted({*worked[s]} & {*worked[t]})) for s, t in edges}
        work = StepWork({module: tuple(Span(k, k, k) for k in own) for module, own in worked.items()}, feeds)
        seconds = {name: times[order].tolist() for name, times in table.items()}

        def cost(action: Action) -> float:
            return 0.0 if action.microbatch < 0 else seconds[action.kind, action.node][action.microbatch]

        return make_schedule(self._name, self._graph, work, cost, max_in_flight=self._bounds, fill=fill)
