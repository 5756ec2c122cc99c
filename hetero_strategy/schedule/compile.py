"""``compile_step``: one rank's part of a step, ready to run. Pure.

A :class:`StepProgram` says, action by action, which transfers bring the rows that an action reads, which carry away
what it makes, and when each starts. Nothing that follows from the plan is left to be computed between two kernels.

When a transfer starts. All actions of a step start in one order (:attr:`Schedule.starts`) that every rank's list keeps
to. Both sides start a transfer right after the action that makes its rows, in that order: the ranks that made them at
once, the others before the first action of theirs that starts later. So the hosts of all ranks pass the step's actions
and transfers in one order, and none can wait for what another one does after it, even if every send and every receive
held up its host until the other side came. With NCCL, whose receives occupy the device until they are met, a step that
runs at all runs to its end.

What starts as one batch. NCCL takes one send to and one receive from each peer at a time, and the next ones only then:
in a batch of sends and of what others make later, a second send could wait for rows that are made from it. So a batch
is what one action makes for one edge, which all ranks of the edge start at the same place in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from hetero_strategy.boundary.route import (
    Route,
    RowIndex,
    Rows,
    Side,
    Transfer,
    route,
    stage_route,
)
from hetero_strategy.errors import LayoutError
from hetero_strategy.plan.step_plan import EdgeBlocks, EdgeRuns, StepPlan, edge_runs, slots
from hetero_strategy.schedule.action import Action, Schedule, Stage, StageGraph, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import PlannedCosts, StageCost, work_of

StageEdge = tuple[StageId, StageId]
NO_INDEX = np.zeros(0, dtype=np.int64)


TransferBatch = tuple[int, ...]
"""Numbers of transfers of one channel that start together."""


class RankTransfer(NamedTuple):
    """One direction of one edge between one microbatch of each side, on one rank."""

    edge: int
    """Number in :attr:`StageGraph.edges`."""
    backward: bool
    """Gradients travel, from the edge's target to its source."""
    microbatches: tuple[int, int]
    """Of the edge's source and of its target."""
    transfer: Transfer[Rows]


class RankAction(NamedTuple):
    """One action of one rank. Transfers are given by their numbers in the program."""

    action: Action
    sources: tuple[Action, ...] = ()
    """Whose rows or gradients it reads."""
    reads: tuple[int, ...] = ()
    """Transfers that bring them."""
    slots: tuple[Rows | None, ...] = ()
    """Of a module's first stage: which of its rows each of ``reads`` fills on this rank."""
    gives: tuple[int | None, ...] = ()
    """Transfers of what it makes: the same rows to each reader (F), or the gradient of each of its forward's ``reads``
    (B and I; None where nobody needs it)."""
    frees: tuple[int, ...] = ()
    """Transfers that are known to have arrived once ``reads`` have."""
    starts: tuple[TransferBatch, ...] = ()
    """Transfers that start after it, before the next action."""
    last: bool = False
    """No later action of its stage makes gradients of weights."""


@dataclass(frozen=True)
class StepProgram:
    """What one rank runs in one step."""

    train: bool
    actions: tuple[RankAction, ...]
    transfers: tuple[RankTransfer, ...]
    starts: tuple[TransferBatch, ...] = ()
    """Transfers that start before the first action."""
    index: Int64[np.ndarray, "rows"] = field(default_factory=lambda: NO_INDEX, compare=False)
    """The row numbers that :class:`Rows` of all transfers point to."""


@dataclass(frozen=True)
class StepCompiler:
    """Makes schedules and programs of a model's steps; a function of its arguments, the same on every rank.

    Args:
        graph: of all stages.
        costs: of every stage.
        config: with the schedule's name.
    """

    graph: StageGraph
    costs: Mapping[StageId, StageCost]
    config: ScheduleConfig

    def schedule(self, plan: StepPlan, *, train: bool) -> Schedule:
        """The schedule of a step of this plan."""
        costs = PlannedCosts(plan, self.graph, self.costs)
        return make_schedule(
            self.config.schedule,
            self.graph,
            work_of(plan, self.graph),
            costs,
            train=train,
            max_in_flight=self.config.max_in_flight,
            fill=self.config.fill,
            bubbles=costs.bubbles if self.config.tp_bubbles else None,
        )

    def program(self, plan: StepPlan, *, rank: int, train: bool) -> StepProgram:
        """The program of one rank for a step of this plan."""
        return compile_step(plan, self.schedule(plan, train=train), rank)


def compile_step(plan: StepPlan, schedule: Schedule, rank: int) -> StepProgram:
    """The program of one rank.

    Args:
        plan: of the step.
        schedule: made for the plan's work.
        rank: global rank.
    """
    return _Compiler(plan, schedule, rank).run()


class _Compiler:
    def __init__(self, plan: StepPlan, schedule: Schedule, rank: int) -> None:
        self.plan, self.schedule, self.rank = plan, schedule, rank
        self.graph: StageGraph = schedule.graph
        own = {s for s, stage in self.graph.stages.items() if rank in stage.ranks}
        self.edges = {edge: k for k, edge in enumerate(self.graph.edges) if own.intersection(edge)}
        self.near = own.union(*self.edges)
        self.dependencies = schedule.dependencies
        self.index = RowIndex()
        self.transfers: list[RankTransfer] = []
        self.numbers: dict[tuple[StageEdge, int, int], tuple[int, int | None]] = {}
        self.runs: dict[StageEdge, EdgeRuns] = {}
        self.totals: dict[tuple[str, int, bool], np.ndarray] = {}

    def run(self) -> StepProgram:
        listed = set(self.schedule.of(self.rank))
        actions: list[RankAction] = []
        starts: list[list[TransferBatch]] = [[]]
        last: dict[StageId, int] = {}
        for action in self.schedule.starts:
            if action.node not in self.near:
                continue
            gives = self.given(action)
            if action in listed:
                if action.kind in ("B", "W"):
                    last[action.node] = len(actions)
                actions.append(self.read(action)._replace(gives=gives))
                starts.append([])
            starts[-1] += self.batches(n for n in gives if n is not None and self.moves(n))
        final = set(last.values())
        return StepProgram(
            self.schedule.train,
            tuple(one._replace(starts=tuple(starts[k + 1]), last=k in final) for k, one in enumerate(actions)),
            tuple(self.transfers),
            tuple(starts[0]),
            self.index.array(),
        )

    def given(self, action: Action) -> tuple[int | None, ...]:
        """Transfers of what an action makes that this rank has a part in."""
        stage, microbatch = action.node, action.microbatch
        if action.kind == "F":
            readers = self.dependencies.readers(stage, microbatch)
            return tuple(self.number((stage, e), microbatch, n)[0] for e, n in readers if (stage, e) in self.edges)
        if action.kind not in ("B", "I"):
            return ()
        sources = self.dependencies.rows_from(stage, microbatch)
        return tuple(
            self.number((s.node, stage), s.microbatch, microbatch)[1] if (s.node, stage) in self.edges else None
            for s in sources
        )

    def read(self, action: Action) -> RankAction:
        """An action of this rank with what it reads."""
        stage, microbatch = action.node, action.microbatch
        sources = self.dependencies.crossing(action)
        if action.kind == "F":
            numbers = [self.number((s.node, stage), s.microbatch, microbatch) for s in sources]
            filled = tuple(self.filled((s.node, stage), s.microbatch, microbatch) for s in sources)
            return RankAction(action, sources, tuple(there for there, _ in numbers), filled)
        numbers = [self.number((stage, s.node), microbatch, s.microbatch) for s in sources]
        reads = tuple(back for _, back in numbers if back is not None)
        return RankAction(action, sources, reads, frees=tuple(there for there, _ in numbers))

    def moves(self, number: int) -> bool:
        """Whether a transfer has messages in its first hop."""
        first = self.transfers[number].transfer.first
        return bool(first.sends or first.receives)

    def batches(self, numbers: Iterable[int]) -> list[TransferBatch]:
        """What one action makes, edge by edge."""
        found: dict[int, list[int]] = {}
        for number in numbers:
            found.setdefault(self.transfers[number].edge, []).append(number)
        return [tuple(batch) for batch in found.values()]

    def number(self, edge: StageEdge, source: int, target: int) -> tuple[int, int | None]:
        """Numbers of the transfers between two microbatches: of rows, and of their gradients where they are wanted."""
        key = (edge, source, target)
        if key not in self.numbers:
            there, back, made = self.routed(edge, source, target), None, len(self.transfers)
            self.transfers.append(
                RankTransfer(self.edges[edge], False, (source, target), self.index.pack(there.forward))
            )
            if self.schedule.train and self.graph.stages[edge[0]].backward:
                back = made + 1
                self.transfers.append(
                    RankTransfer(self.edges[edge], True, (source, target), self.index.pack(there.backward))
                )
            self.numbers[key] = (made, back)
        return self.numbers[key]

    def routed(self, edge: StageEdge, p: int, t: int) -> Route:
        """The route between microbatch ``p`` of an edge's source and ``t`` of its target."""
        source, target = edge
        if source.module == target.module:
            return stage_route(self.side(source, p, inner=True), self.side(target, t, inner=True), self.rank)
        blocks, side = self.blocks(edge, p, t), self.side(target, t, inner=True)
        return route(blocks, self.side(source, p, inner=False), side, self.rank)

    def blocks(self, edge: StageEdge, p: int, t: int) -> EdgeBlocks:
        """Runs of rows that leave or enter this rank's instances."""
        if edge not in self.runs:
            (source, target), stages = edge, self.graph.stages
            near = (
                self.side(source, 0, inner=False).seat(self.rank)[0],
                self.side(target, 0, inner=False).seat(self.rank)[0],
            )
            members = (stages[source].members, stages[target].members)
            self.runs[edge] = edge_runs(self.plan, source.module, target.module, near, members)
        return self.runs[edge].between(p, t)

    def filled(self, edge: StageEdge, p: int, t: int) -> Rows | None:
        """Rows of this rank that an edge fills; None on ranks without the target and between stages of a module."""
        source, target = edge
        side = self.side(target, t, inner=True)
        instance, part = side.seat(self.rank)
        if instance < 0 or source.module == target.module:
            return None
        rows = side.sharding.local(slots(self.blocks(edge, p, t), instance), int(side.totals[instance]), part)
        return self.index.rows(rows, always=True)

    def side(self, stage_id: StageId, microbatch: int, *, inner: bool) -> Side:
        """How rows lie on a stage's ranks: those inside the module, or those that cross its edges."""
        key = (stage_id.module, microbatch, inner)
        if key not in self.totals:
            self.totals[key] = self.plan.assignments[stage_id.module][microbatch].totals(inner=inner)
        try:
            return rows_on(self.graph.stages[stage_id], self.totals[key])
        except LayoutError as error:
            raise LayoutError(f"module '{stage_id.module}' in microbatch {microbatch}: {error}") from None


def rows_on(stage: Stage, totals: Int64[np.ndarray, "instances"]) -> Side:
    """How rows lie on a stage's ranks; ``totals``: rows of each instance."""
    return Side(stage.grid, totals if stage.members is None else totals[stage.members], stage.row_sharding)
