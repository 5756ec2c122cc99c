"""Programs of all modules of a step, from the sinks up. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.pipeline import Pipeline
from hetero_strategy.schedule import programs
from hetero_strategy.schedule.action import StageGraph, StageId, StepWork
from hetero_strategy.schedule.action_index import ActionIndex
from hetero_strategy.schedule.policies import ModuleSteps, SchedulePolicy
from hetero_strategy.schedule.programs import BACKWARD, FORWARD, WEIGHT, RankProgram
from hetero_strategy.schedule.warmup import Link, caps, needs, tight

SLACK = 1
"""Step microbatches that a module runs ahead of what the modules that it feeds must have, so that they need not
wait.
"""


class LaneProgram(NamedTuple):
    """What the ranks of one pipeline coordinate run of one module, or of one of its cohorts."""

    nodes: tuple[StageId, ...]
    """Of the module, first stage first."""
    program: RankProgram
    fills: bool = False
    """It runs where its ranks have nothing else to do."""

    @property
    def at(self) -> StageId:
        """One of the nodes that it is for."""
        return self.nodes[self.program[0][1]]


def module_programs(
    policy: SchedulePolicy,
    graph: StageGraph,
    work: StepWork,
    numbers: ActionIndex,
    edges: Sequence[Link],
    bounds: Mapping[str, int],
) -> list[LaneProgram]:
    """Programs of every pipeline rank of every module with work.

    Cohorts have one of forwards and one of backwards, which fill: each goes on whenever it may. Where nobody reads
    their rows they have one in which backwards follow forwards, and the pipeline waits for it: it fills nothing.

    Args:
        policy: of the schedule; it orders modules that are trained.
        bounds: most microbatches in flight, by module.

    Raises:
        ScheduleError: a bound cannot be kept.
    """
    modules = list(dict.fromkeys(n.module for n in numbers.nodes))
    back = {n.module for n in numbers.nodes if numbers.backward[numbers.index[n]]}
    limits = caps(work, edges, bounds, [m for m in modules if m in back])
    still = tight(graph, edges)
    leads: dict[str, list[int]] = {}  # of the first stage
    depth: dict[str, int] = {}
    found: list[LaneProgram] = []
    for module in reversed(modules):
        pipeline = graph.pipelines[module]
        spans = work.microbatches[module]
        count = len(spans)
        if module not in back:
            found += [
                LaneProgram(nodes, programs.forwards(pipeline, r, numbers.count(nodes[0])), module in graph.filling)
                for nodes in graph.chains[module]
                for r in range(pipeline.pp)
            ]
            continue
        must, should, depth[module] = _demand(module, graph, work, edges, leads, depth, still)
        limit = limits[module]
        j = next((j for j in range(count) if must[j] > limit[j]), None)
        if j is not None:
            raise ScheduleError(
                f"{module} must hold {must[j] - j} microbatches before the backward of microbatch {spans[j].number}, "
                f"but max_in_flight allows {limit[j] - j}: raise it, or group fewer in the modules after it"
            )
        assert policy.programs is not None
        if graph.chains[module][0][0].cohort >= 0:
            leads[module] = must
            fills = module in graph.filling
            for nodes in graph.chains[module]:
                for r in range(pipeline.pp):
                    ways = _ways(pipeline.stages_of(r), numbers.count(nodes[0]), fills)
                    found += [LaneProgram(nodes, _kept(numbers, nodes, way), fills) for way in ways]
            continue
        made = policy.programs(ModuleSteps(module, pipeline, must, should, limit, depth[module]))
        _check(policy, module, pipeline, count, made)
        leads[module] = programs.leads_of(made[pipeline.rank_of(0)], 0)
        found += [
            LaneProgram(nodes, _kept(numbers, nodes, program)) for nodes in graph.chains[module] for program in made
        ]
    return [one for one in found if one.program]


def _ways(stages: Sequence[int], count: int, fills: bool) -> list[RankProgram]:
    """Programs of a cohort's rank: of forwards and of backwards, or of both."""
    forward, backward = [(FORWARD, s) for s in stages], [(BACKWARD, s) for s in reversed(stages)]
    ways = [forward, backward] if fills else [forward + backward]
    return [tuple((kind, s, j) for j in range(count) for kind, s in way) for way in ways]


def _kept(numbers: ActionIndex, nodes: Sequence[StageId], program: RankProgram) -> RankProgram:
    """A program without backwards and weight gradients that its stages do not have."""
    lines = [numbers.index[n] for n in nodes]
    silent = {s for s, i in enumerate(lines) if not numbers.backward[i]}
    whole = {s for s, i in enumerate(lines) if not numbers.split[i]}
    if not silent and not whole:
        return program
    return tuple(
        op for op in program if op[0] == FORWARD or (op[1] not in silent and (op[0] == BACKWARD or op[1] not in whole))
    )


def _check(policy: SchedulePolicy, module: str, pipeline: Pipeline, count: int, made: Sequence[RankProgram]) -> None:
    """Refuse a policy's lists in which a forward or a backward is missing, comes twice or comes too early."""
    if made is None or len(made) != pipeline.pp:
        lists = "no lists" if made is None else f"{len(made)} lists"
        raise ScheduleError(f"schedule {policy.name!r} gave {lists} for {module}, which has {pipeline.pp} ranks")
    kinds = {FORWARD: "forward", BACKWARD: "backward"} | ({WEIGHT: "weight gradient"} if policy.splits_backward else {})
    for rank, program in enumerate(made):
        stages = pipeline.stages_of(rank)
        where = f"schedule {policy.name!r}, {module}, rank {rank}"
        seen: set[programs.Op] = set()
        for op in program:
            if not isinstance(op, tuple) or len(op) != 3 or op[0] not in kinds:
                allowed = ", ".join(f"{kind}: {name}" for kind, name in kinds.items())
                raise ScheduleError(f"{where}: {op!r} is no (kind, stage, microbatch) with a kind of {allowed}")
            kind, stage, place = op
            fault = ""
            if stage not in stages or not 0 <= place < count:
                fault = f"is none of stages {list(stages)} and {count} microbatches"
            elif op in seen:
                fault = "comes twice"
            elif kind != FORWARD and (kind - 1, stage, place) not in seen:
                fault = f"comes before the {kinds[kind - 1]} that it needs"
            if fault:
                raise ScheduleError(f"{where}: the {kinds[kind]} of microbatch {place} in stage {stage} {fault}")
            seen.add(op)
        needed = {FORWARD, BACKWARD} | {kind for kind, *_ in seen}  # W all or none, which then fill waits
        whole = {(kind, stage, place) for kind in needed for stage in stages for place in range(count)}
        for kind, stage, place in sorted(whole - seen)[:1]:
            raise ScheduleError(f"{where}: stage {stage} has no {kinds[kind]} of microbatch {place}")


def in_a_circle(graph: StageGraph, made: Sequence[LaneProgram]) -> str | None:
    """The module whose own lists wait for each other, if there is one."""
    for module, pipeline in graph.pipelines.items():
        lists = [one.program for one in made if one.at.module == module and not one.fills]
        if len(lists) == pipeline.pp > 1 and programs.duration(pipeline, lists) is None:
            return module
    return None


def _demand(
    module: str,
    graph: StageGraph,
    work: StepWork,
    edges: Sequence[Link],
    leads: Mapping[str, Sequence[int]],
    depth: Mapping[str, int],
    still: Collection[tuple[str, str]],
) -> tuple[list[int], list[int], int]:
    """Forwards that must and that should come before each backward, and pipeline ranks that follow in other modules.

    ``leads`` and ``depth`` are those of the modules that it feeds; on edges that stand ``still`` it need not run ahead.
    """
    spans = work.microbatches[module]
    must, should, deepest = list(range(1, len(spans) + 1)), [0] * len(spans), 0
    for e in edges:
        if e.source == module:
            spare = 0 if (e.source, e.target) in still else SLACK
            low, high = needs(e, spans, work.microbatches[e.target], leads[e.target], spare)
            must = list(map(max, must, low))
            should = list(map(max, should, high))
            if spare:
                deepest = max(deepest, depth[e.target] + graph.pipelines[e.target].pp)
    must = list(accumulate(must, max))
    return must, list(accumulate(map(max, must, should), max)), deepest


def listed(numbers: ActionIndex, one: LaneProgram) -> list[int]:
    """Action numbers of a program."""
    base = [numbers.first[numbers.index[node]] for node in one.nodes]
    return [kind * numbers.units + base[stage] + j for kind, stage, j in one.program]


def most(numbers: ActionIndex, made: Sequence[LaneProgram], bounds: Mapping[str, int]) -> list[int]:
    """Per node, microbatches it may hold where W fills waits: what 1F1B holds on the module's worst stage."""
    worst: dict[str, int] = {}
    for nodes, program, fills in made:
        module = nodes[0].module
        if fills:
            worst[module] = numbers.units
        elif any(op[0] == BACKWARD for op in program):
            worst[module] = max(worst.get(module, 1), programs.held(program))
    held = zip(numbers.nodes, numbers.backward, strict=True)
    return [
        min(worst.get(n.module, 1), bounds.get(n.module, numbers.units) if back else numbers.units) for n, back in held
    ]
