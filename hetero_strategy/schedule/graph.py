"""Turn layouts and a step plan into the input of schedules: the graph of stages, a step's work, its costs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action, Kind, Span, Stage, StageGraph, StageId, StepWork


def stage_graph(
    modules: Sequence[str],
    edges: Sequence[tuple[str, str]],
    layouts: Mapping[str, ModuleLayout],
    trains: Mapping[StageId, bool],
    gathered: Collection[StageId] = (),
    whole: Collection[str] = (),
    row_shardings: Mapping[str, RowSharding] | None = None,
    apart: Collection[str] = (),
    balanced: Mapping[str, int] | None = None,
) -> StageGraph:
    """Make the graph of all stages of all modules.

    A frozen stage with something trainable upstream still carries gradients to it; one with nothing trainable upstream
    has no backward, and no gradients are sent to it.

    Args:
        modules: names of the modules in topological order.
        edges: (source, target) module names.
        layouts: resolved layouts.
        trains: whether a stage has a trainable parameter.
        gathered: stages whose parameters are gathered once per step.
        whole: modules whose backward is never divided.
        row_shardings: placement of rows, for modules whose rows are not on every rank of an instance.
        apart: modules whose instances act on their own where they share ranks with different stages.
        balanced: :attr:`Stage.balanced` by module.
    """
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
            experts = (balanced or {}).get(module, 0)
            stages[node] = Stage(
                grid, trains[node], upstream, node in gathered, module in whole, sharding, balanced=experts
            )
            if number:
                between.append((StageId(module, number - 1), node))
    return in_cohorts(StageGraph(stages, tuple(between), {m: layouts[m].pipeline for m in modules}), apart)


def in_cohorts(graph: StageGraph, apart: Collection[str]) -> StageGraph:
    """Split stages of some modules into cohorts of instances that share ranks with the same stages.

    If a module shares its ranks with a pipeline, its instances lie on ranks that idle at different times. Nothing ties
    instances within a step if their parameters are gathered once at its start and their gradients reduced once at its
    end. Then instances on ranks of one pipeline stage act together, and those on other stages act at their own times
    (Optimus, section 4.1, where every encoder has its own plan over the ranks of a language model's pipeline). A cohort
    is a node of the stage graph like any other.

    Args:
        graph: graph in which all instances of a stage act together.
        apart: modules whose instances nothing ties between UNSHARD and REDUCE; each has at least one cohort.
    """
    cohorts = {module: _cohorts(graph, module) for module in apart}
    nodes: dict[StageId, tuple[StageId, ...]] = {}
    stages: dict[StageId, Stage] = {}
    for stage_id, stage in graph.stages.items():
        members = cohorts.get(stage_id.module)
        if members is None:
            nodes[stage_id], stages[stage_id] = (stage_id,), stage
            continue
        nodes[stage_id] = tuple(stage_id._replace(cohort=k) for k in range(len(members)))
        for node, own in zip(nodes[stage_id], members, strict=True):
            stages[node] = replace(stage, grid=stage.grid[own], members=own)
    edges: list[tuple[StageId, StageId]] = []
    for source, target in graph.edges:
        if source.module == target.module:
            edges += zip(nodes[source], nodes[target], strict=True)
        else:
            edges += product(nodes[source], nodes[target])
    return StageGraph(stages, tuple(edges), graph.pipelines)


def _cohorts(graph: StageGraph, module: str) -> list[np.ndarray]:
    """Group the instances of a module whose ranks host the same stages."""
    hosted = np.zeros(1 + max(max(ranks) for ranks in graph.hosts.values()), dtype=np.int64)
    for number, ranks in enumerate(graph.hosts.values()):
        hosted[list(ranks)] = number
    grids = [hosted[graph.stages[stage_id].grid].tolist() for stage_id in graph.nodes_of(module)]
    instances: dict[tuple[frozenset[int], ...], list[int]] = {}
    for instance, rows in enumerate(zip(*grids, strict=True)):
        instances.setdefault(tuple(map(frozenset, rows)), []).append(instance)
    return [np.array(members) for members in instances.values()]


def work_of(plan: StepPlan, graph: StageGraph) -> StepWork:
    """Find the microbatches of a step, and the pairs of them between which rows flow."""
    spans = {
        module: tuple(
            Span(number, plan.assignments[module][number].first, plan.assignments[module][number].last)
            for number in plan.active(module)
        )
        for module in graph.pipelines
    }
    edges = dict.fromkeys((s.module, t.module) for s, t in graph.edges if s.module != t.module)
    idle: dict[StageId, frozenset[int]] = {}
    for module in graph.apart:
        units = np.array([np.diff(one.offsets) for one in plan.assignments[module]])  # [microbatches, instances]
        for nodes in graph.chains[module]:
            nothing = ~graph.stages[nodes[0]].own(units).any(axis=1)
            idle |= dict.fromkeys(nodes, frozenset(np.flatnonzero(nothing).tolist()))
    return StepWork(spans, {edge: tuple(plan.feeds(*edge)) for edge in edges}, idle)


@dataclass(frozen=True)
class StageCost:
    """The forward FLOPs of a stage on each rank of an instance, as a function of the lengths of its sequences."""

    per_row: float
    per_pair: float
    """FLOPs per square of a sequence's length, or of its mask."""
    recomputed: float = 0.0
    """Share of the forward that backward runs again."""

    def of(
        self, rows: Num[np.ndarray, "*instances"], squares: Num[np.ndarray, "*instances"]
    ) -> Float64[np.ndarray, "*instances"]:
        """Return the FLOPs of instances, from their rows and sums of squared lengths."""
        return self.per_row * rows + self.per_pair * squares


def forward_times(
    stages: Sequence[StageCost],
    rows: Float64[np.ndarray, "microbatches instances"],
    squares: Float64[np.ndarray, "microbatches instances"],
    whole: Float64[np.ndarray, "microbatches instances"] | None,
) -> list[Float64[np.ndarray, "microbatches instances"]]:
    """Return the forward time of every stage of a module, from the rows and the sums of squared lengths.

    Args:
        whole: time of the whole module, which its stages share in proportion to their FLOPs; None: return the FLOPs.
    """
    flops = [stage.of(rows, squares) for stage in stages]
    if whole is None:
        return flops
    total, equal = np.sum(flops, axis=0), np.full(rows.shape, 1 / len(stages))
    return [whole * np.divide(each, total, out=equal.copy(), where=total > 0) for each in flops]


class PlannedCosts:
    """The costs from which schedules are built: of every action on its slowest instance (in cohorts the mean), from a
    step plan.

    They have the unit of :attr:`StepPlan.loads`; without loads in the plan, they are FLOPs of a rank.
    """

    def __init__(self, plan: StepPlan, graph: StageGraph, stages: Mapping[StageId, StageCost]) -> None:
        self._graph = graph
        self._stages = stages
        self._forward: dict[StageId, np.ndarray] = {}
        for module in graph.pipelines:
            load = plan.loads.get(module)
            sizes = [sizes_of(plan, module, number) for number in range(len(plan.assignments[module]))]
            rows, squares = np.stack([r for r, _ in sizes]), np.stack([s for _, s in sizes])
            of_stages = [stages[n] for n in graph.nodes_of(module)]
            times = forward_times(of_stages, rows, squares, None if load is None else load.after)
            for nodes in graph.chains[module]:
                self._forward.update((n, graph.stages[n].own(x)) for n, x in zip(nodes, times, strict=True))
        self._usual = {node: usual(node, seconds).tolist() for node, seconds in self._forward.items()}

    def __call__(self, action: Action) -> float:
        if action.microbatch < 0:
            return 0.0
        return self._usual[action.node][action.microbatch] * self._times(action)

    def of_instances(self, action: Action) -> Float64[np.ndarray, "instances"]:
        """Return the cost on every instance; not for UNSHARD and REDUCE."""
        return self._forward[action.node][action.microbatch] * self._times(action)

    def _times(self, action: Action) -> float:
        return forwards(action.kind, self._graph.stages[action.node], self._stages[action.node.all_instances])


def usual(node: StageId, seconds: Float64[np.ndarray, "microbatches instances"]) -> Float64[np.ndarray, "microbatches"]:
    """Return the time that schedules assume for a node's actions.

    It is the time of the slowest instance, for which all others wait; for a cohort, whose instances go on independently
    and have even work over the step, the mean.
    """
    return seconds.max(axis=1, initial=0.0) if node.cohort < 0 else seconds.mean(axis=1)


def forwards(kind: Kind, stage: Stage, cost: StageCost) -> float:
    """Return the cost of an action in forwards.

    A backward costs one forward for the gradient of the rows, one for the gradient of the weights if they train, and
    the recomputed share.
    """
    if kind == "F":
        return 1
    return cost.recomputed + (1 + int(stage.trains) if kind == "B" else 1)


def sizes_of(
    plan: StepPlan, module: str, number: int
) -> tuple[Float64[np.ndarray, "instances"], Float64[np.ndarray, "instances"]]:
    """Return the rows and sums of squares of every instance in one of the module's microbatches."""
    assignment = plan.assignments[module][number]
    inner_rows = assignment.inner_rows.astype(np.float64)
    bounds = assignment.offsets
    squares = inner_rows * inner_rows if assignment.squares is None else assignment.squares
    sums = [np.diff(np.concatenate([[0.0], np.cumsum(x)])[bounds]) for x in (inner_rows, squares)]
    return sums[0] + assignment.padding, sums[1]
