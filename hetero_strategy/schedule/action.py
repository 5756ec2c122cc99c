"""A step's work as data: stages, their dependencies, actions, and the lists of actions that ranks run. Pure.

Names of actions are those of torch.distributed.pipelining (F, B, I, W, UNSHARD, REDUCE). Sends and receives are not
actions: rows leave right after the action that makes them and are waited for right before the action that reads them,
so both follow from the dependencies here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64, Num

from hetero_strategy import ragged
from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding
from hetero_strategy.layout.spec import Pipeline

Kind = Literal["F", "B", "I", "W", "UNSHARD", "REDUCE"]
"""F: forward. B: whole backward. I, W: backward for the input and for the weights. UNSHARD: all-gather of a stage's
parameters. REDUCE: sum of its gradients over data-parallel ranks."""


class StageId(NamedTuple):
    """A pipeline stage of one module."""

    module: str
    stage: int
    cohort: int = -1
    """Number of the module's cohort: a group of instances that acts on its own, see ``schedule.graph.in_cohorts``;
    -1: all act together."""

    def __str__(self) -> str:
        return f"{self.module}.{self.stage}" + ("" if self.cohort < 0 else f"@{self.cohort}")

    @property
    def all_instances(self) -> StageId:
        """Return the stage, without its cohort."""
        return StageId(self.module, self.stage)


class Action(NamedTuple):
    """A piece of work of one node; every rank of the node takes part."""

    kind: Kind
    node: StageId
    microbatch: int = -1
    """Microbatch of the node's module; -1 for UNSHARD and REDUCE."""

    def __str__(self) -> str:
        return f"{self.node} {self.kind}{'' if self.microbatch < 0 else self.microbatch}"


@dataclass(frozen=True, eq=False)
class Stage:
    """A node of the stage graph: all facts that schedules need."""

    grid: Int64[np.ndarray, "instances ranks"]
    """Global ranks of each instance."""
    trains: bool
    """Whether it has a trainable parameter."""
    backward: bool
    """Whether it has a backward: something in it or upstream of it trains."""
    sharded: bool = False
    """Whether its parameters are gathered once per step (UNSHARD) and its gradients reduced once (REDUCE)."""
    whole: bool = False
    """Whether its backward is never split into I and W: each half would repeat the forward if it is recomputed, the
    whole backward if it is compiled, and the fetch from the host if it is offloaded."""
    row_sharding: RowSharding = REPLICATED
    """Placement of an instance's rows on its ranks."""
    members: Int64[np.ndarray, "instances"] | None = None
    """Numbers of its instances in the module; None: all of them."""
    balanced: int = 0
    """Number of experts in a layer if the module has a loss on their balance, for which the choices of all its stages
    count together; 0: it has none."""

    def own(self, values: Num[np.ndarray, "*more all"]) -> Num[np.ndarray, "*more instances"]:
        """Select the values of its instances from values of all instances of the module."""
        return values if self.members is None else values[..., self.members]

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.grid.ravel().tolist())


@dataclass(frozen=True)
class StageGraph:
    """A graph of all stages of all modules and the rows that flow between them."""

    stages: Mapping[StageId, Stage]
    """Stages in topological order."""
    edges: tuple[tuple[StageId, StageId], ...]
    """Edges between neighbouring stages of a module, and from a module's last stage to the first stage of each module
    that it feeds."""
    pipelines: Mapping[str, Pipeline]

    @cached_property
    def incoming(self) -> dict[StageId, tuple[StageId, ...]]:
        return {n: tuple(s for s, t in self.edges if t == n) for n in self.stages}

    @cached_property
    def outgoing(self) -> dict[StageId, tuple[StageId, ...]]:
        return {n: tuple(t for s, t in self.edges if s == n) for n in self.stages}

    @cached_property
    def hosts(self) -> dict[tuple[StageId, ...], tuple[int, ...]]:
        """Return each set of nodes that share ranks -> the ranks that host exactly these nodes."""
        nodes, grids = tuple(self.stages), [stage.grid.ravel() for stage in self.stages.values()]
        ranks, place = np.unique(np.concatenate(grids), return_inverse=True)
        on = np.zeros((len(ranks), len(nodes)), dtype=bool)
        on[place, np.repeat(np.arange(len(nodes)), [grid.size for grid in grids])] = True
        _, first, number = np.unique(np.packbits(on, axis=1), axis=0, return_index=True, return_inverse=True)
        order, bounds = ragged.group_by(number.ravel(), len(first))
        hosted = {k: tuple(nodes[i] for i in np.flatnonzero(on[first[k]])) for k in np.argsort(first).tolist()}
        return {own: tuple(ranks[order[bounds[k] : bounds[k + 1]]].tolist()) for k, own in hosted.items()}

    @cached_property
    def chains(self) -> dict[str, tuple[tuple[StageId, ...], ...]]:
        """Return module -> its nodes, first stage first, of every cohort; one chain if all instances act together."""
        chains_of: dict[str, dict[int, list[StageId]]] = {module: {} for module in self.pipelines}
        for node in self.stages:
            chains_of[node.module].setdefault(node.cohort, []).append(node)
        return {module: tuple(map(tuple, chains.values())) for module, chains in chains_of.items()}

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Return, for each edge, the number of the first edge between the same two stages, of any cohorts."""
        first: dict[tuple[StageId, StageId], int] = {}
        pairs = ((source.all_instances, target.all_instances) for source, target in self.edges)
        return tuple(first.setdefault(pair, number) for number, pair in enumerate(pairs))

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """Return the modules whose instances act on their own: those with cohorts."""
        return tuple(dict.fromkeys(node.module for node in self.stages if node.cohort >= 0))

    @cached_property
    def filling(self) -> tuple[str, ...]:
        """Return the modules with cohorts that fill bubbles: all but one that ends a pipeline, which waits for it."""
        between = [(s.module, t.module) for s, t in self.edges if s.module != t.module]
        ends = {target for _, target in between} - {source for source, _ in between}
        return tuple(module for module in self.apart if module not in ends)

    @cached_property
    def balanced(self) -> tuple[str, ...]:
        """Return the modules with a loss on the balance of their experts."""
        return tuple(dict.fromkeys(node.module for node, stage in self.stages.items() if stage.balanced))

    def without(self, modules: Collection[str]) -> StageGraph:
        """Return the graph without some modules."""
        return StageGraph(
            {node: stage for node, stage in self.stages.items() if node.module not in modules},
            tuple(edge for edge in self.edges if all(node.module not in modules for node in edge)),
            {module: pipeline for module, pipeline in self.pipelines.items() if module not in modules},
        )

    def nodes_of(self, module: str) -> tuple[StageId, ...]:
        """Return the module's stages, first stage first, without cohorts."""
        return tuple(StageId(module, s) for s in range(self.pipelines[module].stages))

    def node_of(self, stage_id: StageId, rank: int) -> StageId:
        """Return the node of a stage that has a rank."""
        chains = self.chains[stage_id.module]
        return next(chain[stage_id.stage] for chain in chains if rank in self.stages[chain[stage_id.stage]].ranks)


class Span(NamedTuple):
    """A microbatch of one module, and the first and last microbatch of the step (of samples) with its units."""

    number: int
    first: int
    last: int


@dataclass(frozen=True)
class StepWork:
    """A step's microbatches; they follow from the step plan, so they are the same on every rank."""

    microbatches: Mapping[str, tuple[Span, ...]]
    """Microbatches in which a module has any work, ascending, by module."""
    feeds: Mapping[tuple[str, str], tuple[tuple[int, int], ...]]
    """Pairs (source microbatch, target microbatch) between which rows flow, by module edge."""
    idle: Mapping[StageId, frozenset[int]] = field(default_factory=dict)
    """Nodes of cohorts -> microbatches of their module in which they have no unit, and therefore no action."""

    def of(self, node: StageId) -> tuple[Span, ...]:
        """Return the microbatches that a node works at."""
        idle = self.idle.get(node, frozenset())
        return tuple(span for span in self.microbatches.get(node.module, ()) if span.number not in idle)


@dataclass(frozen=True)
class Lane:
    """A set of ranks that run the same list of actions."""

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """A schedule of one step: every rank's ordered list of actions. Make it with ``schedule.build.make_schedule``."""

    name: str
    """Name of the policy that made it."""
    graph: StageGraph
    work: StepWork
    split: frozenset[StageId]
    """Nodes whose backward is I and W; all other nodes have B."""
    train: bool
    lanes: tuple[Lane, ...]
    """Disjoint lanes; ranks without work are in none."""
    in_flight: Mapping[StageId, int]
    """Most microbatches whose activations a node may hold at once: from F until B, or W if it is split."""
    starts: tuple[Action, ...]
    """All actions of the step in the order in which they start, if possible by time.

    It must agree with the lists; :func:`hetero_strategy.schedule.check.check` proves it.
    """

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """Return rank -> number of its lane."""
        return {rank: i for i, lane in enumerate(self.lanes) for rank in lane.ranks}

    def of(self, rank: int) -> tuple[Action, ...]:
        """Return the list of one rank."""
        lane = self.lane_of.get(rank)
        return () if lane is None else self.lanes[lane].actions

    @cached_property
    def dependencies(self) -> Dependencies:
        return Dependencies(self.graph, self.work, self.split)

    def check_starts(self) -> None:
        """Check that ``starts`` is one order of all actions that every list keeps to, with dependencies first.

        Raises:
            ScheduleError: it names an action that is missing, repeated or too early.
        """
        place = {action: i for i, action in enumerate(self.starts)}
        listed = {action for lane in self.lanes for action in lane.actions}
        if len(place) != len(self.starts) or place.keys() != listed:
            raise ScheduleError(f"starts names {len(self.starts)} actions, the step has {len(listed)}")
        for lane in self.lanes:
            for before, action in pairwise(lane.actions):
                if place[before] > place[action]:
                    raise ScheduleError(f"{action} starts before {before}, which rank {lane.ranks[0]} runs first")
        for action in self.starts:
            for need in self.dependencies.before(action):
                if need not in place:
                    raise ScheduleError(f"{action} needs {need}, which no rank runs")
                if place[need] > place[action]:
                    raise ScheduleError(f"{action} starts before {need}, which it needs")

    def grid(self) -> str:
        """Print every rank's list as a column, each action on the line of its earliest start.

        Ranks with the same list share a column. A cell is torch's: the stage's number, the kind of action, the
        microbatch (``1F0``, ``0UNSHARD``). If there are several modules, the module's name and a dot come first
        (``llm.1F0``), and ``@`` names a cohort (``vision.0@1F0``).

        Raises:
            ScheduleError: ``starts`` does not agree with the lists.
        """
        self.check_starts()
        step: dict[Action, int] = {}
        free = [0] * len(self.lanes)
        lanes: dict[Action, list[int]] = {}
        for k, lane in enumerate(self.lanes):
            for action in lane.actions:
                lanes.setdefault(action, []).append(k)
        for action in self.starts:
            before = [step[need] + 1 for need in self.dependencies.before(action)]
            step[action] = max([*before, *(free[k] for k in lanes[action])])
            for k in lanes[action]:
                free[k] = step[action] + 1
        columns = [{step[a]: self._cell(a) for a in lane.actions} for lane in self.lanes]
        heads = [f"rank {x.ranks[0]}" + f" and {len(x.ranks) - 1} more" * (len(x.ranks) > 1) for x in self.lanes]
        widths = [max([len(head), *map(len, column.values())]) for head, column in zip(heads, columns, strict=True)]
        rows = [heads, *([column.get(i, "") for column in columns] for i in range(max(free, default=0)))]
        return "\n".join("  ".join(f"{x:<{n}}" for x, n in zip(row, widths, strict=True)).rstrip() for row in rows)

    def to_csv(self) -> str:
        """Print the lists as CSV, a line per lane; torch's pipelining runtime reads it for one pipelined module.

        That runtime gathers and reduces by itself, so UNSHARD and REDUCE are left out if there is one module.
        """
        alone = len(self.graph.pipelines) == 1
        lanes = sorted(self.lanes, key=lambda lane: lane.ranks)
        lines = [[self._cell(a) for a in lane.actions if not alone or a.microbatch >= 0] for lane in lanes]
        return "".join(",".join(cells) + "\n" for cells in lines)

    def _cell(self, action: Action) -> str:
        kind, (module, stage, cohort), number = action
        name = "" if len(self.graph.pipelines) == 1 else f"{module}."
        kind_of_torch = "REDUCE_GRAD" if kind == "REDUCE" else kind
        return f"{name}{stage}{'' if cohort < 0 else f'@{cohort}'}{kind_of_torch}{'' if number < 0 else number}"


class Dependencies:
    """The dependencies of actions, and the edges that rows cross."""

    def __init__(self, graph: StageGraph, work: StepWork, split: frozenset[StageId]) -> None:
        self._graph = graph
        self._split = split
        self._idle = work.idle
        self._sources: dict[tuple[str, str], dict[int, list[int]]] = {}
        self._targets: dict[tuple[str, str], dict[int, list[int]]] = {}
        for edge, pairs in work.feeds.items():
            for source, target in pairs:
                self._sources.setdefault(edge, {}).setdefault(target, []).append(source)
                self._targets.setdefault(edge, {}).setdefault(source, []).append(target)

    def rows_from(self, node: StageId, microbatch: int) -> tuple[Action, ...]:
        """Return the forwards whose rows F of this node reads."""
        forwards = []
        for source in self._graph.incoming[node]:
            if source.module == node.module:
                forwards.append(Action("F", source, microbatch))
            else:
                numbers = self._sources.get((source.module, node.module), {}).get(microbatch, ())
                forwards += [Action("F", source, p) for p in numbers if p not in self._idle.get(source, ())]
        return tuple(forwards)

    def readers(self, node: StageId, microbatch: int) -> tuple[tuple[StageId, int], ...]:
        """Return the nodes, and their microbatches, that read the rows of F of this node."""
        reading = []
        for target in self._graph.outgoing[node]:
            if target.module == node.module:
                reading.append((target, microbatch))
            else:
                numbers = self._targets.get((node.module, target.module), {}).get(microbatch, ())
                reading += [(target, t) for t in numbers if t not in self._idle.get(target, ())]
        return tuple(reading)

    def crossing(self, action: Action) -> tuple[Action, ...]:
        """Return the actions of other nodes whose rows or gradient rows this action reads."""
        if action.kind == "F":
            return self.rows_from(action.node, action.microbatch)
        if action.kind in ("B", "I"):
            readers = self.readers(action.node, action.microbatch)
            return tuple(Action("I" if target in self._split else "B", target, t) for target, t in readers)
        return ()

    def local(self, action: Action) -> tuple[Action, ...]:
        """Return the earlier action of the same node and microbatch: F before B or I, I before W."""
        if action.kind in ("B", "I"):
            return (Action("F", action.node, action.microbatch),)
        if action.kind == "W":
            return (Action("I", action.node, action.microbatch),)
        return ()

    def before(self, action: Action) -> tuple[Action, ...]:
        """Return every action that must finish before this one may start."""
        return (*self.local(action), *self.crossing(action))
