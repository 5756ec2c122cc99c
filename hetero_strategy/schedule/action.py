"""A step's work as data: stages, their dependencies, actions, and the lists of actions that ranks run. Pure.

Names of actions are torch.distributed.pipelining's (F, B, I, W, UNSHARD, REDUCE). Sends and receives are not actions:
rows leave right after the action that makes them and are waited for right before the action that reads them, so both
follow from the dependencies here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64, Num

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError, ScheduleError
from hetero_strategy.layout.pipeline import Pipeline
from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding

Kind = Literal["F", "B", "I", "W", "UNSHARD", "REDUCE"]
"""F: forward. B: whole backward. I, W: backward for the input and for the weights. UNSHARD: all-gather of a stage's
parameters. REDUCE: sum of its gradients over data-parallel ranks."""


class StageId(NamedTuple):
    """One pipeline stage of one module."""

    module: str
    stage: int
    cohort: int = -1
    """Which of the module's cohorts: instances that act on their own, see ``schedule.cohorts``; -1: all together."""

    def __str__(self) -> str:
        return f"{self.module}.{self.stage}" + ("" if self.cohort < 0 else f"@{self.cohort}")

    @property
    def all_instances(self) -> StageId:
        """The stage, whichever of its cohorts this is."""
        return StageId(self.module, self.stage)


class Action(NamedTuple):
    """One piece of work of one node; every rank of the node takes part."""

    kind: Kind
    node: StageId
    microbatch: int = -1
    """Of the node's module; -1 for UNSHARD and REDUCE."""

    def __str__(self) -> str:
        return f"{self.node} {self.kind}{'' if self.microbatch < 0 else self.microbatch}"


@dataclass(frozen=True, eq=False)
class Stage:
    """What an order must know of a node."""

    grid: Int64[np.ndarray, "instances ranks"]
    """Global ranks of each instance."""
    trains: bool
    """Has a trainable parameter."""
    backward: bool
    """Has a backward: something in it or upstream of it trains."""
    sharded: bool = False
    """Its parameters are gathered once per step (UNSHARD) and its gradients reduced once (REDUCE)."""
    whole: bool = False
    """Its backward is never divided in I and W: each half of what is recomputed would run the forward again, each half
    of what is compiled the whole backward, and each half of what is offloaded would fetch it from the host."""
    row_sharding: RowSharding = REPLICATED
    """How an instance's rows lie on its ranks."""
    members: Int64[np.ndarray, "instances"] | None = None
    """Which of the module's instances these are; None: all of them."""
    islands: Int64[np.ndarray, "instances"] | None = None
    """Number of the island of each, outside of which nobody exchanges rows with it; None: there is one."""

    def own(self, values: Num[np.ndarray, "*more all"]) -> Num[np.ndarray, "*more instances"]:
        """Those of its instances, of values for all instances of the module."""
        return values if self.members is None else values[..., self.members]

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.grid.ravel().tolist())

    @property
    def of_islands(self) -> Int64[np.ndarray, "islands ranks_of_island"]:
        """Global ranks in each island.

        Raises:
            ConfigError: islands have unequal numbers of these instances.
        """
        if self.islands is None:
            return self.grid.reshape(1, -1)
        shares = np.bincount(self.islands)
        if (shares != shares[0]).any():
            raise ConfigError(
                f"HeteroStrategy: islands={len(shares)}, of which instances that act together have"
                f" {', '.join(map(str, shares))}; use fewer islands, or lay instances of modules that share ranks alike"
            )
        return self.grid[np.argsort(self.islands, kind="stable")].reshape(len(shares), -1)


@dataclass(frozen=True)
class StageGraph:
    """All stages of all modules and what flows between them."""

    stages: Mapping[StageId, Stage]
    """In topological order."""
    edges: tuple[tuple[StageId, StageId], ...]
    """Between neighbouring stages of a module, and from a module's last stage to the first one of each module that it
    feeds.
    """
    pipelines: Mapping[str, Pipeline]

    @cached_property
    def incoming(self) -> dict[StageId, tuple[StageId, ...]]:
        return {n: tuple(s for s, t in self.edges if t == n) for n in self.stages}

    @cached_property
    def outgoing(self) -> dict[StageId, tuple[StageId, ...]]:
        return {n: tuple(t for s, t in self.edges if s == n) for n in self.stages}

    @cached_property
    def hosts(self) -> dict[tuple[StageId, ...], tuple[int, ...]]:
        """Sets of nodes that share ranks -> the ranks that host exactly those."""
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
        """Module -> its nodes, first stage first, of every cohort; one chain where all instances act together."""
        found: dict[str, dict[int, list[StageId]]] = {module: {} for module in self.pipelines}
        for node in self.stages:
            found[node.module].setdefault(node.cohort, []).append(node)
        return {module: tuple(map(tuple, chains.values())) for module, chains in found.items()}

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """For each edge, the number of the first one between the same two stages, of whichever cohorts."""
        first: dict[tuple[StageId, StageId], int] = {}
        pairs = ((source.all_instances, target.all_instances) for source, target in self.edges)
        return tuple(first.setdefault(pair, number) for number, pair in enumerate(pairs))

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """Modules whose instances act on their own: those with cohorts."""
        return tuple(dict.fromkeys(node.module for node in self.stages if node.cohort >= 0))

    @cached_property
    def filling(self) -> tuple[str, ...]:
        """Those of them that fill bubbles: all but what ends a pipeline, which waits for them."""
        between = [(s.module, t.module) for s, t in self.edges if s.module != t.module]
        ends = {target for _, target in between} - {source for source, _ in between}
        return tuple(module for module in self.apart if module not in ends)

    def without(self, modules: Collection[str]) -> StageGraph:
        """The graph without some modules; itself, with what is known of it, without none."""
        if not modules:
            return self
        return StageGraph(
            {node: stage for node, stage in self.stages.items() if node.module not in modules},
            tuple(edge for edge in self.edges if all(node.module not in modules for node in edge)),
            {module: pipeline for module, pipeline in self.pipelines.items() if module not in modules},
        )

    def nodes_of(self, module: str) -> tuple[StageId, ...]:
        """The module's stages, first stage first, without cohorts."""
        return tuple(StageId(module, s) for s in range(self.pipelines[module].stages))

    def node_of(self, stage_id: StageId, rank: int) -> StageId:
        """The node of a stage that has a rank."""
        chains = self.chains[stage_id.module]
        return next(chain[stage_id.stage] for chain in chains if rank in self.stages[chain[stage_id.stage]].ranks)


class Span(NamedTuple):
    """One microbatch of one module, and which microbatches of the step (of samples) its units belong to."""

    number: int
    first: int
    last: int


@dataclass(frozen=True)
class StepWork:
    """Which microbatches a step has; from the step plan, so the same on every rank."""

    microbatches: Mapping[str, tuple[Span, ...]]
    """By module: those in which it has any work, ascending."""
    feeds: Mapping[tuple[str, str], tuple[tuple[int, int], ...]]
    """By module edge: (source microbatch, target microbatch) pairs between which rows flow."""
    idle: Mapping[StageId, frozenset[int]] = field(default_factory=dict)
    """Nodes of cohorts -> microbatches of their module in which they have nothing, and therefore no action."""

    def of(self, node: StageId) -> tuple[Span, ...]:
        """The microbatches that a node works at."""
        idle = self.idle.get(node, frozenset())
        return tuple(span for span in self.microbatches.get(node.module, ()) if span.number not in idle)


@dataclass(frozen=True)
class Lane:
    """Ranks that run the same list of actions."""

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """For one step: every rank's ordered list of actions. Make it with ``schedule.build.make_schedule``."""

    name: str
    """Of what it was made by."""
    graph: StageGraph
    work: StepWork
    split: frozenset[StageId]
    """Nodes whose backward is I and W; the others have B."""
    train: bool
    lanes: tuple[Lane, ...]
    """Disjoint; ranks without work are in none."""
    in_flight: Mapping[StageId, int]
    """Most microbatches whose activations a node may hold at once: from F until B, or W where split."""
    known_starts: tuple[Action, ...] | None = None
    """See :attr:`starts`; None: they follow from the lists."""

    @cached_property
    def starts(self) -> tuple[Action, ...]:
        """All actions of the step in the order in which they start, if possible by time; every list keeps to it.

        Raises:
            ScheduleError: the lists wait for each other.
        """
        return running_order(self) if self.known_starts is None else self.known_starts

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """Rank -> number of its lane."""
        return {rank: i for i, lane in enumerate(self.lanes) for rank in lane.ranks}

    def of(self, rank: int) -> tuple[Action, ...]:
        """The list of one rank."""
        lane = self.lane_of.get(rank)
        return () if lane is None else self.lanes[lane].actions

    @cached_property
    def dependencies(self) -> Dependencies:
        return Dependencies(self.graph, self.work, self.split)


class Dependencies:
    """What must have run before an action, and where rows cross."""

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
        """Forwards whose rows F of this node reads."""
        found = []
        for source in self._graph.incoming[node]:
            if source.module == node.module:
                found.append(Action("F", source, microbatch))
            else:
                numbers = self._sources.get((source.module, node.module), {}).get(microbatch, ())
                found += [Action("F", source, p) for p in numbers if p not in self._idle.get(source, ())]
        return tuple(found)

    def readers(self, node: StageId, microbatch: int) -> tuple[tuple[StageId, int], ...]:
        """Nodes, and their microbatches, that read the rows of F of this node."""
        found = []
        for target in self._graph.outgoing[node]:
            if target.module == node.module:
                found.append((target, microbatch))
            else:
                numbers = self._targets.get((node.module, target.module), {}).get(microbatch, ())
                found += [(target, t) for t in numbers if t not in self._idle.get(target, ())]
        return tuple(found)

    def crossing(self, action: Action) -> tuple[Action, ...]:
        """Actions of other nodes whose rows or gradient rows this one reads."""
        if action.kind == "F":
            return self.rows_from(action.node, action.microbatch)
        if action.kind in ("B", "I"):
            readers = self.readers(action.node, action.microbatch)
            return tuple(Action("I" if target in self._split else "B", target, t) for target, t in readers)
        return ()

    def local(self, action: Action) -> tuple[Action, ...]:
        """The action of the same node and microbatch that must come before: F before B or I, I before W."""
        if action.kind in ("B", "I"):
            return (Action("F", action.node, action.microbatch),)
        if action.kind == "W":
            return (Action("I", action.node, action.microbatch),)
        return ()

    def before(self, action: Action) -> tuple[Action, ...]:
        """All of them."""
        return (*self.local(action), *self.crossing(action))


def running_order(schedule: Schedule) -> tuple[Action, ...]:
    """Every action once, after all it depends on and after what any of its ranks runs before it.

    An action runs when it is next in the lists of all ranks of its stage and what it reads has run.

    Raises:
        ScheduleError: some actions never become next on all ranks of their stage.
    """
    lists = [lane.actions for lane in schedule.lanes]
    hosts: dict[StageId, list[int]] = {}
    for number, of_ranks in enumerate(schedule.lanes):
        for stage_id, stage in schedule.graph.stages.items():
            if of_ranks.ranks[0] in stage.ranks:
                hosts.setdefault(stage_id, []).append(number)
    dependencies = schedule.dependencies
    waits: dict[Action, int] = {}  # for how many actions, and for how many lanes
    frees: dict[Action, list[Action]] = {}
    for number, actions in enumerate(lists):
        for action in actions:
            if number not in hosts.get(action.node, ()):
                raise ScheduleError(f"rank {schedule.lanes[number].ranks[0]} runs {action} but does not host its stage")
            if action in waits:
                continue
            before = dependencies.before(action)
            waits[action] = len(before) + len(hosts.get(action.node, ()))
            for source in before:
                frees.setdefault(source, []).append(action)
    place = [0] * len(lists)
    order: list[Action] = []
    ready: deque[Action] = deque()

    def count_down(action: Action) -> None:
        waits[action] -= 1
        if waits[action] == 0:
            ready.append(action)

    for actions in lists:
        if actions:
            count_down(actions[0])
    while ready:
        action = ready.popleft()
        order.append(action)
        for reader in frees.get(action, ()):
            count_down(reader)
        for lane in hosts[action.node]:
            place[lane] += 1
            if place[lane] < len(lists[lane]):
                count_down(lists[lane][place[lane]])
    if any(place[lane] < len(actions) for lane, actions in enumerate(lists)):
        raise ScheduleError(f"schedule {schedule.name!r} cannot run: its lists wait for each other, see schedule.check")
    return tuple(order)
