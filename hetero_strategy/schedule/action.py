"""A step's work as data: stages, their dependencies, actions, and the lists of actions that ranks run. Pure.

Names of actions are torch.distributed.pipelining's (F, B, I, W, UNSHARD, REDUCE). Sends and receives are not actions:
rows leave right after the action that makes them and are waited for right before the action that reads them, so both
follow from the dependencies here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from hetero_strategy.layout.pipeline import Pipeline

Kind = Literal["F", "B", "I", "W", "UNSHARD", "REDUCE"]
"""F: forward. B: whole backward. I, W: backward for the input and for the weights. UNSHARD: all-gather of a stage's
parameters. REDUCE: sum of its gradients over data-parallel ranks."""


class StageId(NamedTuple):
    """One pipeline stage of one module."""

    module: str
    stage: int

    def __str__(self) -> str:
        return f"{self.module}.{self.stage}"


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

    grid: np.ndarray
    """Global ranks, int64 ``[instances, ranks per instance]``."""
    trains: bool
    """Has a trainable parameter."""
    backward: bool
    """Has a backward: something in it or upstream of it trains."""
    sharded: bool = False
    """Its parameters are gathered once per step (UNSHARD) and its gradients reduced once (REDUCE)."""
    whole: bool = False
    """Its backward is never divided in I and W: with recompute each half would run the forward again."""

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(int(r) for r in self.grid.flat)


@dataclass(frozen=True)
class StageGraph:
    """All stages of all modules and what flows between them."""

    stages: Mapping[StageId, Stage]
    """In topological order."""
    edges: tuple[tuple[StageId, StageId], ...]
    """Between neighbouring stages of a module, and from a module's last stage to its consumer's first."""
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
        hosted: dict[int, list[StageId]] = {}
        for node, stage in self.stages.items():
            for rank in sorted(stage.ranks):
                hosted.setdefault(rank, []).append(node)
        found: dict[tuple[StageId, ...], list[int]] = {}
        for rank in sorted(hosted):
            found.setdefault(tuple(hosted[rank]), []).append(rank)
        return {nodes: tuple(ranks) for nodes, ranks in found.items()}

    def nodes_of(self, module: str) -> tuple[StageId, ...]:
        """The module's nodes, first stage first."""
        return tuple(StageId(module, s) for s in range(self.pipelines[module].stages))


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
        self._active = {m: {s.number for s in spans} for m, spans in work.microbatches.items()}
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
                found += [Action("F", source, p) for p in numbers]
        return tuple(found)

    def readers(self, node: StageId, microbatch: int) -> tuple[tuple[StageId, int], ...]:
        """Nodes, and their microbatches, that read the rows of F of this node."""
        found = []
        for target in self._graph.outgoing[node]:
            if target.module == node.module:
                found.append((target, microbatch))
            else:
                numbers = self._targets.get((node.module, target.module), {}).get(microbatch, ())
                found += [(target, t) for t in numbers]
        return tuple(found)

    def gradients_from(self, node: StageId, microbatch: int) -> tuple[Action, ...]:
        """Backwards (B or I) whose gradient rows B or I of this node reads."""
        return tuple(
            Action("I" if target in self._split else "B", target, t) for target, t in self.readers(node, microbatch)
        )

    def crossing(self, action: Action) -> tuple[Action, ...]:
        """Actions of other nodes whose rows or gradient rows this one reads."""
        if action.kind == "F":
            return self.rows_from(action.node, action.microbatch)
        if action.kind in ("B", "I"):
            return self.gradients_from(action.node, action.microbatch)
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
