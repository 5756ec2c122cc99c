"""Make the programs of all modules of a step, from the sinks up. Pure.

A backward waits for the backwards of the units that its rows went into, which wait for forwards, which wait for rows.
So the number of forwards before each backward is passed from a module to those that feed it, from sinks up. On a chain
this gives 1F1B's warm-ups (``stages - s - 1``), on several encoders of different depth Cornstarch's (encoder stages
after ``s`` + LLM stages). Bounds on microbatches in flight are passed the other way, from sources down.
``StepWork.feeds`` and the spans relate microbatches of the source to those of the target.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.schedule import programs
from hetero_strategy.schedule.action import Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.action_index import ActionIndex
from hetero_strategy.schedule.policies import ModuleSteps, SchedulePolicy
from hetero_strategy.schedule.programs import BACKWARD, FORWARD, WEIGHT, RankProgram

SLACK = 1
"""Step microbatches that a module runs ahead of the need of the modules that it feeds, so that they do not wait."""


class LaneProgram(NamedTuple):
    """The program of one module, or of one of its cohorts, on the ranks of one pipeline coordinate."""

    nodes: tuple[StageId, ...]
    """Nodes of the module, first stage first."""
    program: RankProgram
    fills: bool = False
    """Whether it runs when its ranks have no other work."""

    @property
    def at(self) -> StageId:
        """Return one of its nodes."""
        return self.nodes[self.program[0][1]]


def module_programs(
    policy: SchedulePolicy,
    graph: StageGraph,
    work: StepWork,
    numbers: ActionIndex,
    edges: Sequence[Link],
    bounds: Mapping[str, int],
) -> list[LaneProgram]:
    """Make the programs of every pipeline rank of every module with work.

    Cohorts have one program of forwards and one of backwards, which fill: each goes on whenever it may. If nobody reads
    their rows they have one program in which backwards follow forwards. The pipeline waits for it, so it fills nothing.

    Args:
        policy: policy of the schedule; it orders modules that are trained.
        bounds: most microbatches in flight, by module.
    """
    modules = list(dict.fromkeys(n.module for n in numbers.nodes))
    back = {n.module for n in numbers.nodes if numbers.backward[numbers.index[n]]}
    limits = caps(work, edges, bounds, [m for m in modules if m in back])
    still = tight(graph, edges)
    leads: dict[str, list[int]] = {}  # of the first stage
    depth: dict[str, int] = {}
    lane_programs: list[LaneProgram] = []
    for module in reversed(modules):
        pipeline = graph.pipelines[module]
        spans = work.microbatches[module]
        count = len(spans)
        if module not in back:
            lane_programs += [
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
                    lane_programs += [LaneProgram(nodes, _kept(numbers, nodes, way), fills) for way in ways]
            continue
        rank_programs = policy.programs(ModuleSteps(module, pipeline, must, should, limit, depth[module]))
        _check(policy, module, pipeline, count, rank_programs)
        leads[module] = programs.leads_of(rank_programs[pipeline.rank_of(0)], 0)
        lane_programs += [
            LaneProgram(nodes, _kept(numbers, nodes, program))
            for nodes in graph.chains[module]
            for program in rank_programs
        ]
    return [one for one in lane_programs if one.program]


def _ways(stages: Sequence[int], count: int, fills: bool) -> list[RankProgram]:
    """Make the programs of a cohort's rank: one of forwards and one of backwards, or one of both."""
    forward, backward = [(FORWARD, s) for s in stages], [(BACKWARD, s) for s in reversed(stages)]
    ways = [forward, backward] if fills else [forward + backward]
    return [tuple((kind, s, j) for j in range(count) for kind, s in way) for way in ways]


def _kept(numbers: ActionIndex, nodes: Sequence[StageId], program: RankProgram) -> RankProgram:
    """Return a program without backwards and weight gradients that its stages do not have."""
    lines = [numbers.index[n] for n in nodes]
    silent = {s for s, i in enumerate(lines) if not numbers.backward[i]}
    whole = {s for s, i in enumerate(lines) if not numbers.split[i]}
    if not silent and not whole:
        return program
    return tuple(
        op for op in program if op[0] == FORWARD or (op[1] not in silent and (op[0] == BACKWARD or op[1] not in whole))
    )


def _check(policy: SchedulePolicy, module: str, pipeline: Pipeline, count: int, made: Sequence[RankProgram]) -> None:
    """Refuse a policy's lists in which a forward or a backward is missing, repeated or too early."""
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
        needed = {FORWARD, BACKWARD} | {kind for kind, *_ in seen}  # either all W, or none: then they fill waits
        whole = {(kind, stage, place) for kind in needed for stage in stages for place in range(count)}
        for kind, stage, place in sorted(whole - seen)[:1]:
            raise ScheduleError(f"{where}: stage {stage} has no {kinds[kind]} of microbatch {place}")


def in_a_circle(graph: StageGraph, made: Sequence[LaneProgram]) -> str | None:
    """Return the module whose own lists wait for each other, if there is one."""
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
    """Return the forwards that must and that should come before each backward, and the pipeline ranks that follow in
    other modules.

    ``leads`` and ``depth`` are those of the modules that it feeds; on edges in ``still`` it need not run ahead.
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
    """Return the action numbers of a program."""
    base = [numbers.first[numbers.index[node]] for node in one.nodes]
    return [kind * numbers.units + base[stage] + j for kind, stage, j in one.program]


def most(numbers: ActionIndex, made: Sequence[LaneProgram], bounds: Mapping[str, int]) -> list[int]:
    """Return the microbatches that each node may hold if W fills waits: as many as 1F1B holds on the module's worst
    stage.
    """
    worst: dict[str, int] = {}
    for nodes, program, fills in made:
        module = nodes[0].module
        if fills:
            worst[module] = numbers.units
        elif any(op[0] == BACKWARD for op in program):
            worst[module] = max(worst.get(module, 1), programs.held(program))
    lists = zip(numbers.nodes, numbers.backward, strict=True)
    return [
        min(worst.get(n.module, 1), bounds.get(n.module, numbers.units) if back else numbers.units) for n, back in lists
    ]


@dataclass(frozen=True)
class Link:
    """A module edge, in places (of microbatches among those with work) instead of numbers.

    Args:
        source, target: names of the modules.
        first_target, last_target: first and last target place that each source place feeds, -1 for none.
        forwards: number of source places that the first ``n`` target places need, by ``n``; ``[n + 1]``.
    """

    source: str
    target: str
    first_target: tuple[int, ...]
    last_target: tuple[int, ...]
    forwards: tuple[int, ...]


def links(graph: StageGraph, work: StepWork) -> list[Link]:
    """Return the links of all module edges between modules with work."""
    module_links = []
    places = {m: {s.number: i for i, s in enumerate(spans)} for m, spans in work.microbatches.items()}
    pairs = dict.fromkeys((s.module, t.module) for s, t in graph.edges if s.module != t.module)
    for source, target in pairs:
        if not work.microbatches.get(source) or not work.microbatches.get(target):
            continue
        first = [-1] * len(places[source])
        last = first.copy()
        needed = [0] * len(places[target])
        for p, q in work.feeds.get((source, target), ()):
            i, k = places[source][p], places[target][q]
            first[i] = k if first[i] < 0 else min(first[i], k)
            last[i] = max(last[i], k)
            needed[k] = max(needed[k], i + 1)
        module_links.append(Link(source, target, tuple(first), tuple(last), tuple(accumulate([0, *needed], max))))
    return module_links


def needs(
    link: Link, source: Sequence[Span], target: Sequence[Span], leads: Sequence[int], slack: int
) -> tuple[list[int], list[int]]:
    """Return the source forwards that must and that should come before each source backward.

    Args:
        source, target: spans of the link's two modules.
        leads: forwards of the target's first stage before its backward, by target place.
        slack: step microbatches that the source should be ahead of the necessary minimum, so that the target need not
            wait.
    """
    must, should = [], []
    firsts = [s.first for s in source]
    for k in link.last_target:
        ahead = 0 if k < 0 else leads[k]
        must.append(link.forwards[ahead])
        reach = target[ahead - 1].last + slack if ahead else -1
        should.append(bisect_right(firsts, reach) if slack else 0)
    return must, should


def caps(
    work: StepWork, edges: Sequence[Link], bounds: Mapping[str, int], bounded: Sequence[str]
) -> dict[str, list[int]]:
    """Return the most forwards of every module that may come before each of its backwards.

    Args:
        bounds: most microbatches in flight of a module's stages.
        bounded: modules with backwards, in topological order.
    """
    limits: dict[str, list[int]] = {}
    for module in bounded:
        spans = work.microbatches[module]
        cap = [min(len(spans), j + bounds.get(module, len(spans))) for j in range(len(spans))]
        for link in edges:
            if link.target != module or link.source not in limits:
                continue
            for i, k in enumerate(link.last_target):
                if k >= 0:
                    reach = bisect_right(link.forwards, limits[link.source][i]) - 1
                    if reach <= k:
                        raise ScheduleError(
                            f"{module} microbatch {spans[k].number} needs {link.forwards[k + 1] - i} microbatches of "
                            f"{link.source} at once, but max_in_flight allows {limits[link.source][i] - i}: raise it, "
                            f"or put more items in one microbatch of {link.source}"
                        )
                    cap[k] = min(cap[k], reach)
        limits[module] = list(accumulate(reversed(cap), min))[::-1]
    return limits


def tight(graph: StageGraph, edges: Sequence[Link]) -> frozenset[tuple[str, str]]:
    """Return the module edges on which running ahead gains nothing: all later work is on the same ranks, so nothing
    waits.
    """
    ranks = {m: [graph.stages[n].ranks for chain in graph.chains[m] for n in chain] for m in graph.pipelines}
    alone: dict[str, bool] = {}
    for module in reversed(dict.fromkeys(n.module for n in graph.stages)):
        alone[module] = len(ranks[module]) == 1 and all(
            alone[e.target] and ranks[e.target] == ranks[module] for e in edges if e.source == module
        )
    return frozenset((e.source, e.target) for e in edges if alone[e.source] and alone[e.target])
