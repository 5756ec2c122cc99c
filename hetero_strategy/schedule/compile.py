"""Compile one rank's part of a step, ready to run (``compile_step``). Pure.

A :class:`StepProgram` says, action by action, which transfers bring the rows that an action reads, which transfers
carry away its output, and when each starts. Everything that follows from the plan is computed before the first kernel.

Start of a transfer. All actions of a step start in one order (:attr:`Schedule.starts`) that every rank's list keeps to.
Both sides start a transfer in that order, right after the action that makes its rows: the ranks that made them at once,
all other ranks before their first action that starts later. So the hosts of all ranks pass the step's actions and
transfers in one order, and no host can wait for later work of another, even if every send and every receive blocked its
host until the other side came. With NCCL, whose receives occupy the device until they are met, a step that runs at all
runs to its end.

Batches of transfers. NCCL takes one send to and one receive from each peer at a time, and the next ones only after
that. In a batch that mixes sends with later output of other ranks, a second send could wait for rows that are made from
it. So a batch is the output of one action for one edge, and all ranks of the edge start it at the same place in that
order.

Choices of experts. The loss on their balance counts the choices of all layers together. Between stages of a module with
that loss each transfer has a companion in its batch: with rows travel the counts of the stages so far, with gradients
the counts of all stages, which the last stage has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
from hetero_strategy.layout.row_sharding import RowOrder, RowSharding
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
    """A transfer in one direction of one edge between one microbatch of each side, on one rank."""

    edge: int
    """Number of the edge in :attr:`StageGraph.edges`."""
    backward: bool
    """Whether gradients travel, from the edge's target to its source."""
    microbatches: tuple[int, int]
    """Microbatches of the edge's source and of its target."""
    transfer: Transfer[Rows]
    numbers: int = 0
    """Size, in numbers of fp64, of the one row of choices of experts that travels; 0: rows of the edge travel."""

    def size(self, rows: int, row_bytes: Sequence[int]) -> float:
        """Return the bytes of rows, from those of a row on each edge."""
        return float(rows * (8 * self.numbers or row_bytes[self.edge]))


class RankAction(NamedTuple):
    """An action of one rank. Transfers are given by their numbers in the program."""

    action: Action
    sources: tuple[Action, ...] = ()
    """Actions whose rows or gradients it reads."""
    reads: tuple[int, ...] = ()
    """Transfers that bring these rows or gradients."""
    slots: tuple[Rows | None, ...] = ()
    """Rows that each of ``reads`` fills on this rank, in a module's first stage."""
    gives: tuple[int | None, ...] = ()
    """Transfers of its output: the same rows to each reader (F), or the gradient of each of its forward's ``reads`` (B
    and I; None if nobody needs it)."""
    frees: tuple[int, ...] = ()
    """Transfers that are known to have arrived once ``reads`` have."""
    choices: tuple[int | None, int | None] = (None, None)
    """Transfers that bring the choices of experts of neighbouring stages, and that carry them on with its output."""
    starts: tuple[TransferBatch, ...] = ()
    """Transfers that start after it, before the next action."""
    last: bool = False
    """Whether no later action of its stage makes gradients of weights."""


@dataclass(frozen=True)
class StepProgram:
    """A program: the actions and transfers of one rank in one step."""

    train: bool
    actions: tuple[RankAction, ...]
    transfers: tuple[RankTransfer, ...]
    starts: tuple[TransferBatch, ...] = ()
    """Transfers that start before the first action."""
    index: Int64[np.ndarray, "rows"] = field(default_factory=lambda: NO_INDEX, compare=False)
    """Row numbers to which :class:`Rows` of all transfers point."""


@dataclass(frozen=True)
class StepCompiler:
    """A compiler of schedules and programs of a model's steps, which are the same on every rank.

    Args:
        graph: graph of all stages.
        costs: cost of every stage.
        config: schedule options.
    """

    graph: StageGraph
    costs: Mapping[StageId, StageCost]
    config: ScheduleConfig

    def schedule(self, plan: StepPlan, *, train: bool) -> Schedule:
        """Return the schedule of a step of this plan."""
        costs = PlannedCosts(plan, self.graph, self.costs)
        return make_schedule(
            self.config.schedule,
            self.graph,
            work_of(plan, self.graph),
            costs,
            train=train,
            max_in_flight=self.config.max_in_flight,
            fill=self.config.fill,
        )

    def program(self, plan: StepPlan, *, rank: int, train: bool) -> StepProgram:
        """Return the program of one rank for a step of this plan."""
        return compile_step(plan, self.schedule(plan, train=train), rank)


def compile_step(plan: StepPlan, schedule: Schedule, rank: int) -> StepProgram:
    """Compile the program of one rank.

    Args:
        plan: plan of the step.
        schedule: schedule made for the plan's work.
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
        self.numbers: dict[tuple[StageEdge, int, int, bool], tuple[int, int | None]] = {}
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
            gives, choices = self.given(action), self.choices(action)
            if action in listed:
                if action.kind in ("B", "W"):
                    last[action.node] = len(actions)
                actions.append(self.read(action)._replace(gives=gives, choices=choices))
                starts.append([])
            starts[-1] += self.batches(n for n in (*gives, choices[1]) if n is not None and self.moves(n))
        final = set(last.values())
        return StepProgram(
            self.schedule.train,
            tuple(one._replace(starts=tuple(starts[k + 1]), last=k in final) for k, one in enumerate(actions)),
            tuple(self.transfers),
            tuple(starts[0]),
            self.index.array(),
        )

    def given(self, action: Action) -> tuple[int | None, ...]:
        """Return the transfers of an action's output in which this rank takes part."""
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
        """Return an action of this rank with the transfers that it reads."""
        stage, microbatch = action.node, action.microbatch
        sources = self.dependencies.crossing(action)
        if action.kind == "F":
            numbers = [self.number((s.node, stage), s.microbatch, microbatch) for s in sources]
            filled = tuple(self.filled((s.node, stage), s.microbatch, microbatch) for s in sources)
            return RankAction(action, sources, tuple(there for there, _ in numbers), filled)
        numbers = [self.number((stage, s.node), microbatch, s.microbatch) for s in sources]
        reads = tuple(back for _, back in numbers if back is not None)
        return RankAction(action, sources, reads, frees=tuple(there for there, _ in numbers))

    def choices(self, action: Action) -> tuple[int | None, int | None]:
        """Return the transfers of :attr:`RankAction.choices` in which this rank takes part."""
        node, microbatch = action.node, action.microbatch
        if not (self.schedule.train and self.graph.stages[node].balanced and action.kind in ("F", "B", "I")):
            return None, None
        back = action.kind != "F"
        edges = [(node._replace(stage=node.stage - 1), node), (node, node._replace(stage=node.stage + 1))]
        arriving, leaving = (
            self.number(edge, microbatch, microbatch, choices=True)[back] if edge in self.edges else None
            for edge in (edges[::-1] if back else edges)
        )
        return arriving, leaving

    def moves(self, number: int) -> bool:
        """Return whether a transfer has messages in its first hop."""
        first = self.transfers[number].transfer.first
        return bool(first.sends or first.receives)

    def batches(self, numbers: Iterable[int]) -> list[TransferBatch]:
        """Group the output transfers of one action by edge."""
        by_edge: dict[int, list[int]] = {}
        for number in numbers:
            by_edge.setdefault(self.transfers[number].edge, []).append(number)
        return [tuple(batch) for batch in by_edge.values()]

    def number(self, edge: StageEdge, source: int, target: int, *, choices: bool = False) -> tuple[int, int | None]:
        """Return the numbers of the transfers between two microbatches: rows, and their gradients if wanted; or of
        their ``choices``: counts and probabilities of each expert there, counts back.
        """
        key = (edge, source, target, choices)
        if key not in self.numbers:
            count, stage = len(self.transfers), self.graph.stages[edge[0]]
            both = self.seat_to_seat(edge) if choices else self.routed(edge, source, target)
            at, pair, experts = self.edges[edge], (source, target), stage.balanced * choices
            self.transfers.append(RankTransfer(at, False, pair, self.index.pack(both.forward), 2 * experts))
            comes_back = self.schedule.train and stage.backward
            if comes_back:
                self.transfers.append(RankTransfer(at, True, pair, self.index.pack(both.backward), experts))
            self.numbers[key] = (count, count + 1 if comes_back else None)
        return self.numbers[key]

    def seat_to_seat(self, edge: StageEdge) -> Route:
        """Return a route between two stages of a module that has one row for each rank."""
        source, target = (
            Side(grid, np.full(len(grid), grid.shape[1]), RowSharding(grid.shape[1]))
            for grid in (self.graph.stages[node].grid for node in edge)
        )
        return stage_route(source, target, self.rank)

    def routed(self, edge: StageEdge, p: int, t: int) -> Route:
        """Return the route between microbatch ``p`` of an edge's source and ``t`` of its target."""
        source, target = edge
        if source.module == target.module:
            return stage_route(self.side(source, p, inner=True), self.side(target, t, inner=True), self.rank)
        blocks, side = self.blocks(edge, p, t), self.side(target, t, inner=True)
        return route(blocks, self.side(source, p, inner=False), side, self.rank)

    def blocks(self, edge: StageEdge, p: int, t: int) -> EdgeBlocks:
        """Return the runs of rows that leave or enter this rank's instances."""
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
        """Return the rows of this rank that an edge fills; None without the target here, and between stages of a
        module.
        """
        source, target = edge
        side = self.side(target, t, inner=True)
        instance, part = side.seat(self.rank)
        if instance < 0 or source.module == target.module:
            return None
        rows = side.local(slots(self.blocks(edge, p, t), instance), instance, part)
        return self.index.rows(rows, always=True)

    def side(self, stage_id: StageId, microbatch: int, *, inner: bool) -> Side:
        """Return the placement of rows on a stage's ranks, inside the module (``inner``) or on its edges."""
        key = (stage_id.module, microbatch, inner)
        assignment = self.plan.assignments[stage_id.module][microbatch]
        if key not in self.totals:
            self.totals[key] = assignment.totals(inner=inner)
        try:
            return rows_on(self.graph.stages[stage_id], self.totals[key], assignment.order)
        except LayoutError as error:
            raise LayoutError(f"module '{stage_id.module}' in microbatch {microbatch}: {error}") from None


def rows_on(stage: Stage, totals: Int64[np.ndarray, "instances"], order: RowOrder | None = None) -> Side:
    """Return the placement of rows on a stage's ranks; ``totals``, ``order``: rows of each instance and their order."""
    if order is not None:
        order = order.among(stage.members)
    return Side(stage.grid, totals if stage.members is None else totals[stage.members], stage.row_sharding, order)


class Traffic(NamedTuple):
    """The bytes that move between ranks."""

    within: float
    """Between ranks of one node."""
    between: float
    """Between ranks of different nodes."""

    def __add__(self, other: object) -> Traffic:
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.within + other.within, self.between + other.between)

    def times(self, factor: float) -> Traffic:
        return Traffic(self.within * factor, self.between * factor)


def sent(
    rank: int,
    program: StepProgram,
    row_bytes: Sequence[int],
    ranks_per_node: int,
    edges: Collection[int] | None = None,
) -> Traffic:
    """Count the bytes that a rank sends in a step.

    A row that a rank already has does not move; a replica set that lacks a row receives it once, and its members pass
    their shares on (:mod:`hetero_strategy.boundary.route`).

    Args:
        program: step program of the rank.
        row_bytes: bytes of a row on each edge.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node.
        edges: numbers of the counted edges; None: all.
    """
    traffic = Traffic(0.0, 0.0)
    for one in program.transfers:
        for hop in (one.transfer.first, one.transfer.second):
            for peer, rows in hop.sends if edges is None or one.edge in edges else ():
                size = one.size(rows.size, row_bytes)
                near = peer // ranks_per_node == rank // ranks_per_node
                traffic += Traffic(size, 0.0) if near else Traffic(0.0, size)
    return traffic
