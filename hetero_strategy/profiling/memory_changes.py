"""Changes of memory at every action of a step, on every rank, including rows on their way between stages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.plan.step_plan import StepPlan, edge_runs
from hetero_strategy.profiling.stage_memory import StageBytes, StageNeeds
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StageId

BEFORE, DURING, AFTER = range(3)
"""Places at an action: for bytes freed first, for bytes needed while it runs, for bytes present once it has run."""
ALWAYS = -1
"""The place before all actions."""


class _Sorted(NamedTuple):
    """A table of changes by rank, then by place, then in the order of adding."""

    ranks: Int64[np.ndarray, "changes"]
    places: Int64[np.ndarray, "changes"]
    kinds: Int64[np.ndarray, "changes"]
    bytes: Float64[np.ndarray, "changes"]


class Changes:
    """A list of bytes that come and go: at place ``3 * n + m`` of the step's ``n``-th action to start.

    A rank's forward (action 0) keeps 8 bytes and needs 5 more while it runs; its backward (action 1) needs 6 and frees
    the 8. The peak is at place 4, with 8 bytes of activations and 6 of moment::

        place          1 (during 0)   2 (after 0)   4 (during 1)   5 (after 1)
        activations         +8                                          -8
        moment              +5             -5            +6             -6
        alive               13              8            14              0

    Args:
        kinds: purposes of bytes.
    """

    def __init__(self, kinds: Sequence[str], graph: StageGraph) -> None:
        self._kinds = {kind: i for i, kind in enumerate(kinds)}
        self._made: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        """Place, number of the kind, ranks, and bytes on each."""
        self._alike = alike(graph)
        self._here = {node: _some(stage.grid, self._alike) for node, stage in graph.stages.items()}

    def add(self, place: int, node: StageId, kind: str, amount: Float64[np.ndarray, "instances"]) -> None:
        """Change the bytes of a kind that a node's instances have on each of their ranks."""
        instances, ranks = self._here[node]
        size = amount[instances]
        (some,) = np.nonzero(size)
        if len(some):
            self._made.append((place, self._kinds[kind], ranks[some], size[some]))

    @cached_property
    def _all(self) -> _Sorted:
        """Return all changes, sorted; equal ranks appear as their first one."""
        changes = sorted(self._made, key=itemgetter(0))
        counts = [len(ranks) for _, _, ranks, _ in changes]
        ranks, sizes = (np.concatenate([one[i] for one in changes]) for i in (2, 3))
        order = ragged.argsort_small(ranks)
        places, kinds = (np.repeat([one[i] for one in changes], counts)[order] for i in (0, 1))
        return _Sorted(ranks[order], places, kinds, sizes[order])

    @cached_property
    def _alive(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rank and place of every sum of changes, and the bytes alive from there on."""
        every = self._all
        new = (np.diff(every.ranks, prepend=-1) != 0) | (np.diff(every.places, prepend=-9) != 0)
        first = np.flatnonzero(new)
        ranks = every.ranks[first]
        sums = np.cumsum(np.add.reduceat(every.bytes, first))
        begin = np.flatnonzero(np.diff(ranks, prepend=-1))
        before = np.insert(sums, 0, 0.0)[begin]
        return ranks, every.places[first], sums - np.repeat(before, np.diff(np.append(begin, len(ranks))))

    def at_peak(self, world: int) -> Float64[np.ndarray, "kinds ranks"]:
        """Return the bytes by kind at the peak of each rank."""
        ranks, places, alive = self._alive
        begin = np.flatnonzero(np.diff(ranks, prepend=-1))
        most = np.repeat(np.maximum.reduceat(alive, begin), np.diff(np.append(begin, len(ranks))))
        highest = np.flatnonzero(alive == most)
        peak = np.full(world, np.iinfo(np.int64).max)
        np.minimum.at(peak, ranks[highest], places[highest])
        every = self._all
        there = every.places <= peak[every.ranks]
        cells = every.kinds[there] * world + every.ranks[there]
        table = np.bincount(cells, every.bytes[there], len(self._kinds) * world).reshape(-1, world)
        table[:, : len(self._alike)] = table[:, self._alike]
        return table


def alike(graph: StageGraph) -> Int64[np.ndarray, "ranks"]:
    """Return for every rank the first rank that has the same instances of the same stages, and so the same actions."""
    world = 1 + max(int(stage.grid.max()) for stage in graph.stages.values())
    instances = np.full((len(graph.stages), world), -1, np.int64)
    for row, stage in zip(instances, graph.stages.values(), strict=True):
        row[stage.grid] = np.arange(len(stage.grid))[:, None]
    _, first, number = np.unique(instances, axis=1, return_index=True, return_inverse=True)
    return np.asarray(first[number.ravel()])


def _some(
    grid: Int64[np.ndarray, "instances ranks"], first: Int64[np.ndarray, "_world"]
) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of instances and their ranks, without ranks that equal an earlier one."""
    instance, place = np.nonzero(first[grid] == grid)
    return instance, grid[instance, place]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows between one microbatch of two stages, in bytes on each rank."""

    sent: Float64[np.ndarray, "sources"]
    """Bytes that each source instance made."""
    taken: Float64[np.ndarray, "targets"]
    """Bytes that each target instance receives."""
    source_apart: np.ndarray
    """bool ``[sources]``: some of its rows go to another rank."""
    target_apart: np.ndarray
    """bool ``[targets]``: some of its rows come from another rank."""
    source_same: np.ndarray
    """bool ``[sources]``: its rows are taken whole on the same rank, and need no more memory there."""
    target_same: np.ndarray
    """bool ``[targets]``: it takes a source's rows whole on the same rank."""


class _Edges:
    """A table of the rows of all edges of a step, computed on demand."""

    def __init__(self, plan: StepPlan, graph: StageGraph, widths: Mapping[tuple[StageId, StageId], float]) -> None:
        self._plan, self._graph, self._widths = plan, graph, widths
        members = {node: stage.members for node, stage in graph.stages.items()}
        self._runs = {
            (s, t): edge_runs(plan, s.module, t.module, members=(members[s], members[t]))
            for s, t in graph.edges
            if s.module != t.module
        }
        self._known: dict[tuple[StageId, StageId, int, int], _Rows] = {}
        self._shared: dict[tuple[StageId, StageId], np.ndarray] = {}

    def rows(self, source: StageId, target: StageId, p: int, t: int) -> _Rows:
        """Return the rows between microbatch ``p`` of the source and ``t`` of the target."""
        key = (source, target, p, t)
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _here(self, source: StageId, target: StageId) -> np.ndarray:
        """Return whether instances share a rank, bool ``[sources, targets]``, or ``[instances]`` within a module."""
        if (source, target) not in self._shared:
            a, b = (self._graph.stages[node].grid for node in (source, target))
            if source.module == target.module:
                shared = (a[:, :, None] == b[:, None, :]).any(axis=(1, 2))
            else:
                shared = (a[:, None, :, None] == b[None, :, None, :]).any(axis=(2, 3))
            self._shared[source, target] = shared
        return self._shared[source, target]

    def _found(self, source: StageId, target: StageId, p: int, t: int) -> _Rows:
        width = self._widths[source, target]
        first, second = (self._graph.stages[node] for node in (source, target))
        shares = (first.row_sharding.parts, second.row_sharding.parts)
        here = self._here(source, target)
        if source.module == target.module:
            totals = first.own(self._plan.assignments[source.module][p].totals(inner=True)).astype(np.float64)
            size = width / shares[0] * totals
            return _Rows(size, size, ~here, ~here, here, here)
        blocks = self._runs[source, target].between(p, t)
        rows = np.zeros(here.shape)
        np.add.at(rows, (blocks.source_instance, blocks.target_instance), blocks.rows)
        total = first.own(self._plan.assignments[source.module][p].totals()).astype(np.float64)
        in_order = np.ones(len(rows), bool)
        follow = np.flatnonzero(np.diff(blocks.source_instance, prepend=-1) == 0)
        in_order[blocks.source_instance[follow[blocks.source_start[follow] < blocks.source_start[follow - 1]]]] = False
        equal = here & (rows == total[:, None]) & (rows == rows.sum(axis=0)) & (rows > 0) & in_order[:, None]
        apart = (rows > 0) & ~here
        return _Rows(
            width / shares[0] * total, width / shares[1] * rows.sum(axis=0),
            apart.any(axis=1), apart.any(axis=0), equal.any(axis=1), equal.any(axis=0),
        )  # fmt: skip


class Walk:
    """A walk through a step's actions in the order of their starts, which notes the bytes that come and go.

    Args:
        widths: bytes of a row on every edge.
        holds_sent: whether sent rows stay until they are known to have arrived.
    """

    def __init__(
        self,
        plan: StepPlan,
        schedule: Schedule,
        widths: Mapping[tuple[StageId, StageId], float],
        sizes: Mapping[StageId, StageBytes],
        needs: Mapping[StageId, StageNeeds],
        holds_sent: bool,
        changes: Changes,
    ) -> None:
        self._schedule, self._sizes, self._needs, self._holds_sent = schedule, sizes, needs, holds_sent
        self._graph = schedule.graph
        self._edges = _Edges(plan, self._graph, widths)
        self._changes = changes
        self._at = {action: n for n, action in enumerate(self._schedule.starts)}
        self._dependencies = self._schedule.dependencies
        self._learnt: set[StageId] = set()
        """Nodes whose gradients exist."""
        self._whole: set[StageId] = set()
        """Nodes whose root weights are whole, if blocks are gathered with every microbatch."""

    def run(self) -> None:
        """Note all changes of the step."""
        for n, action in enumerate(self._schedule.starts):
            match action.kind:
                case "F":
                    self._forward(3 * n, action)
                case "B" | "I" | "W":
                    self._backward(3 * n, action)
                case _:
                    self._parameters(3 * n, action)

    def _add(self, place: int, node: StageId, kind: str, amount: float | np.ndarray) -> None:
        self._changes.add(place, node, kind, np.broadcast_to(amount, len(self._graph.stages[node].grid)).astype(float))

    def _while(self, place: int, node: StageId, amount: float | np.ndarray) -> None:
        """Add bytes for the time of an action."""
        self._add(place + DURING, node, "moment", amount)
        self._add(place + AFTER, node, "moment", -np.asarray(amount))

    def _parameters(self, place: int, action: Action) -> None:
        node, size = action.node, self._sizes[action.node]
        if action.kind == "UNSHARD":
            self._while(place, node, size.unshard)
            self._add(place + DURING, node, "gathered", float(size.gathered.sum()))
            return
        self._while(place, node, size.reduce)
        if size.gathered.any() and size.once:
            self._add(place + AFTER, node, "gathered", -float(size.gathered.sum()))
        whole = float(size.summed.sum()) if node in self._learnt else 0.0
        self._add(place + AFTER, node, "gradients", (size.sharded if self._graph.stages[node].trains else 0.0) - whole)

    def _forward(self, place: int, action: Action) -> None:
        node, m, needs, size = action.node, action.microbatch, self._needs[action.node], self._sizes[action.node]
        trained = self._schedule.train and self._graph.stages[node].backward
        if not size.once and node not in self._whole:
            self._whole.add(node)
            self._add(place + DURING, node, "gathered", float(size.gathered[-1]))
        kept = needs.kept[m] * trained
        self._while(place, node, needs.forward[m] - kept)
        self._add(place + DURING, node, "activations", kept)
        for source in self._dependencies.rows_from(node, m):
            rows = self._edges.rows(source.node, node, source.microbatch, m)
            came = 3 * self._at[source] + AFTER
            new = rows.taken * ~rows.target_same
            self._add(came, node, "rows", new * rows.target_apart)
            self._add(place + BEFORE, node, "rows", new * ~rows.target_apart)
            if not trained:
                self._add(place + AFTER, node, "rows", -new)
        self._give(place, node, m)

    def _give(self, place: int, node: StageId, m: int) -> None:
        """Hold a forward's rows until no reader on its ranks needs them."""
        readers = self._dependencies.readers(node, m)
        if not readers:
            return
        every = [self._edges.rows(node, target, m, t) for target, t in readers]
        sent = every[0].sent
        self._add(place + AFTER, node, "rows", sent)
        until = np.zeros(len(sent), np.int64)
        for rows, (target, t) in zip(every, readers, strict=True):
            read = self._at[Action("F", target, t)]
            taken = 3 * self._back(target, t, read) + AFTER
            until = np.maximum(until, np.where(rows.source_same, taken, 3 * read + BEFORE))
            if self._holds_sent:
                until = np.where(rows.source_apart, np.maximum(until, 3 * self._back(node, m, -2) + BEFORE), until)
        for end in np.unique(until).tolist():
            self._add(end if end > 0 else 3 * len(self._at), node, "rows", -sent * (until == end))

    def _back(self, node: StageId, m: int, otherwise: int) -> int:
        """Return the number of the action that goes backward through a node, or ``otherwise`` if none does."""
        for kind in ("B", "I"):
            if (action := Action(kind, node, m)) in self._at:
                return self._at[action]
        return otherwise if otherwise >= 0 else len(self._at)

    def _backward(self, place: int, action: Action) -> None:
        node, m, needs, size = action.node, action.microbatch, self._needs[action.node], self._sizes[action.node]
        first = node not in self._learnt and self._graph.stages[node].trains
        kept, halves = needs.kept[m], needs.halves[m]
        if action.kind == "W":
            self._while(place, node, float(size.made.sum()) if size.made.any() else 2 * size.single * (not first))
            self._add(place + AFTER, node, "activations", -halves)
        else:
            most = needs.first[m] if first and action.kind == "B" else needs.again[m]
            self._while(place, node, np.maximum(most - kept, 0.0))
            self._add(place + AFTER, node, "activations", -kept + (halves if action.kind == "I" else 0.0))
            self._gradients(place, node, m)
        if action.kind != "I" and first:
            self._learnt.add(node)
            self._add(place + AFTER, node, "gradients", float(size.summed.sum()))
        if node in self._whole and action.kind != "I":
            self._whole.discard(node)
            self._add(place + AFTER, node, "gathered", -float(size.gathered[-1]))

    def _gradients(self, place: int, node: StageId, m: int) -> None:
        """Free the gradients that came in and the rows that were read; add the gradients of these rows."""
        readers = self._dependencies.readers(node, m)
        for target, t in readers:
            rows = self._edges.rows(node, target, m, t)
            came = 3 * self._back(target, t, 0) + AFTER
            new = rows.sent * ~rows.source_same
            self._add(came, node, "rows", new * rows.source_apart)
            self._add(place + BEFORE, node, "rows", new * ~rows.source_apart)
            self._add(place + AFTER, node, "rows", -new)
        if len(readers) > 1:
            total = self._edges.rows(node, readers[0][0], m, readers[0][1]).sent
            self._while(place, node, total)
        for source in self._dependencies.rows_from(node, m):
            rows = self._edges.rows(source.node, node, source.microbatch, m)
            self._add(place + AFTER, node, "rows", -rows.taken * ~rows.target_same)
            if not self._graph.stages[source.node].backward:
                continue
            self._add(place + AFTER, node, "rows", rows.taken)
            back = 3 * self._back(source.node, source.microbatch, 0)
            alone = np.where(rows.target_same, back + AFTER, back + BEFORE)
            sent = 3 * len(self._at) if self._holds_sent else back + BEFORE
            until = np.where(rows.target_apart, sent, alone)
            for end in np.unique(until).tolist():
                self._add(end, node, "rows", -rows.taken * (until == end))
