"""From layouts and a step plan to what orders are built from: the graph of stages, a step's work, its costs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.ahead import ahead, computing
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action, Kind, Span, Stage, StageGraph, StageId, StepWork
from hetero_strategy.schedule.cohorts import in_cohorts


def stage_graph(
    modules: Sequence[str],
    edges: Sequence[tuple[str, str]],
    layouts: Mapping[str, ModuleLayout],
    trains: Mapping[StageId, bool],
    gathered: Collection[StageId] = (),
    whole: Collection[str] = (),
    row_shardings: Mapping[str, RowSharding] | None = None,
    apart: Collection[str] = (),
    early: Collection[str] = (),
    islands: Mapping[str, np.ndarray] | None = None,
) -> StageGraph:
    """All stages of all modules, and what some modules' first stages do for the next step.

    A frozen stage with something trainable upstream still carries gradients to it; one with nothing trainable upstream
    has no backward, and no gradients are sent to it.

    Args:
        modules: in topological order.
        edges: (source, target) module names.
        layouts: resolved.
        trains: whether a stage has a trainable parameter.
        gathered: stages whose parameters are gathered once per step.
        whole: modules whose backward is never divided.
        row_shardings: of modules whose rows are not on every rank of an instance.
        apart: modules whose instances act on their own where they share ranks with different stages.
        early: modules whose first stage, with nothing trainable in it, also works for the next step.
        islands: see :func:`~hetero_strategy.layout.islands.islands_of`.

    Raises:
        ConfigError: instances that act together are not equally many in all islands.
    """
    once_more = {ahead(module): StageId(module, 0) for module in early}
    if once_more:
        layouts = {**layouts, **{name: layouts[of.module].first_stage() for name, of in once_more.items()}}
        trains = {**trains, **{StageId(name, 0): False for name in once_more}}
        gathered = {*gathered, *(StageId(name, 0) for name, of in once_more.items() if of in gathered)}
        shared = row_shardings or {}
        row_shardings = {**shared, **{n: shared.get(of.module, REPLICATED) for n, of in once_more.items()}}
        known = islands or {}
        islands = {**known, **{n: known[of.module] for n, of in once_more.items() if of.module in known}}
        modules, apart = (*once_more, *modules), {*apart, *once_more}
    stages: dict[StageId, Stage] = {}
    between: list[tuple[StageId, StageId]] = []
    for module in modules:
        layout = layouts[module]
        last_of = {s: StageId(s, layouts[s].pipeline.stages - 1) for s, t in edges if t == module}
        between += [(node, StageId(module, 0)) for node in last_of.values()]
        upstream = any(stages[node].backward for node in last_of.values())
        for number in range(layout.pipeline.stages):
            node = StageId(module, number)
            upstream = upstream or trains[node]
            grid = layout.stage_grid(number)
            sharding = (row_shardings or {}).get(module, REPLICATED)
            own = (islands or {}).get(module)
            stages[node] = Stage(grid, trains[node], upstream, node in gathered, module in whole, sharding, islands=own)
            if number:
                between.append((StageId(module, number - 1), node))
    graph = in_cohorts(StageGraph(stages, tuple(between), {m: layouts[m].pipeline for m in modules}), apart)
    for stage in graph.stages.values():
        stage.of_islands  # noqa: B018 (that there are such is checked)
    return graph


def work_of(plan: StepPlan, graph: StageGraph) -> StepWork:
    """Which microbatches a step has, and between which of them rows flow."""
    spans = {
        module: tuple(
            Span(number, plan.assignments[module][number].first, plan.assignments[module][number].last)
            for number in plan.active(module)
        )
        for module in graph.pipelines
        if module in plan.assignments
    }
    edges = dict.fromkeys((s.module, t.module) for s, t in graph.edges if s.module != t.module)
    idle: dict[StageId, frozenset[int]] = {}
    for module in {*graph.apart} & {*spans}:
        if computing(module) not in graph.apart:
            continue  # in the next step all instances will look for what they computed
        units = np.array([np.diff(one.offsets) for one in plan.assignments[module]])  # [microbatches, instances]
        for nodes in graph.chains[module]:
            nothing = ~graph.stages[nodes[0]].own(units).any(axis=1)
            idle |= dict.fromkeys(nodes, frozenset(np.flatnonzero(nothing).tolist()))
    return StepWork(spans, {edge: tuple(plan.feeds(*edge)) for edge in edges}, idle)


@dataclass(frozen=True)
class StageCost:
    """Forward FLOPs of a stage on each rank of an instance, as a function of the lengths of its sequences."""

    per_row: float
    per_pair: float
    """Per square of a sequence's length."""
    recomputed: float = 0.0
    """Share of the forward that backward runs again."""
    tp_bubbles: float = 0.0
    """Share of its actions in which its ranks wait for tensor-parallel collectives."""

    def of(
        self, rows: Num[np.ndarray, "*instances"], squares: Num[np.ndarray, "*instances"]
    ) -> Float64[np.ndarray, "*instances"]:
        """FLOPs of instances with so many rows and so large sums of squared lengths."""
        return self.per_row * rows + self.per_pair * squares


def forward_times(
    stages: Sequence[StageCost],
    rows: Float64[np.ndarray, "microbatches instances"],
    squares: Float64[np.ndarray, "microbatches instances"],
    whole: Float64[np.ndarray, "microbatches instances"] | None,
) -> list[Float64[np.ndarray, "microbatches instances"]]:
    """Time of the forward of every stage of a module, from the rows and the sums of squared lengths.

    Args:
        whole: time of the whole module, which its stages share in proportion to their FLOPs; None: the FLOPs are it.
    """
    flops = [stage.of(rows, squares) for stage in stages]
    if whole is None:
        return flops
    total, equal = np.sum(flops, axis=0), np.full(rows.shape, 1 / len(stages))
    return [whole * np.divide(each, total, out=equal.copy(), where=total > 0) for each in flops]


class PlannedCosts:
    """Cost of every action on its slowest instance (of cohorts the mean), from a step plan: what orders are built with.

    In the units of :attr:`StepPlan.loads`, measured costs and unequal speeds included; FLOPs of a rank where the plan
    says no loads.
    """

    def __init__(self, plan: StepPlan, graph: StageGraph, stages: Mapping[StageId, StageCost]) -> None:
        self._graph = graph
        self._stages = stages
        self._forward: dict[StageId, np.ndarray] = {}
        for module in graph.pipelines:
            if module not in plan.assignments:
                continue
            load = plan.loads.get(module)
            sizes = [sizes_of(plan, module, number) for number in range(len(plan.assignments[module]))]
            rows, squares = np.stack([r for r, _ in sizes]), np.stack([s for _, s in sizes])
            of_stages = [stages[n] for n in graph.nodes_of(computing(module))]  # of which the first may run ahead
            times = forward_times(of_stages, rows, squares, None if load is None else load.after)
            times = [0.0 * x if plan.holds(module, number) else x for number, x in enumerate(times)]
            for nodes in graph.chains[module]:
                self._forward.update((n, graph.stages[n].own(x)) for n, x in zip(nodes, times, strict=False))
        self._usual = {node: usual(node, found).tolist() for node, found in self._forward.items()}

    def __call__(self, action: Action) -> float:
        if action.microbatch < 0:
            return 0.0
        return self._usual[action.node][action.microbatch] * self._times(action)

    def of_instances(self, action: Action) -> Float64[np.ndarray, "instances"]:
        """The same of every instance; not for UNSHARD and REDUCE."""
        return self._forward[action.node][action.microbatch] * self._times(action)

    def bubbles(self, action: Action) -> float:
        """Part of an action in which its ranks wait for tensor-parallel collectives."""
        return self(action) * self._stages[action.node.all_instances].tp_bubbles

    def _times(self, action: Action) -> float:
        return forwards(action.kind, self._graph.stages[action.node], self._stages[action.node.all_instances])


def usual(node: StageId, seconds: Float64[np.ndarray, "microbatches instances"]) -> Float64[np.ndarray, "microbatches"]:
    """What orders take a node's actions for: the slowest instance, which the others wait for; of a cohort, whose
    instances go on when they like and have even work over the step, the mean.
    """
    return seconds.max(axis=1, initial=0.0) if node.cohort < 0 else seconds.mean(axis=1)


def forwards(kind: Kind, stage: Stage, cost: StageCost) -> float:
    """How many forwards an action costs: a backward one for the gradient of the rows, one for the gradient of the
    weights, where they train, and what of it is recomputed.
    """
    if kind == "F":
        return 1
    return cost.recomputed + (1 + int(stage.trains) if kind == "B" else 1)


def sizes_of(
    plan: StepPlan, module: str, number: int
) -> tuple[Float64[np.ndarray, "instances"], Float64[np.ndarray, "instances"]]:
    """Rows and sums of squared lengths of every instance in one of the module's microbatches."""
    assignment = plan.assignments[module][number]
    inner_rows = assignment.inner_rows.astype(np.float64)
    bounds = assignment.offsets
    sums = [np.diff(np.concatenate([[0.0], np.cumsum(x)])[bounds]) for x in (inner_rows, inner_rows * inner_rows)]
    return sums[0] + assignment.padding, sums[1]
