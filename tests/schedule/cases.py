"""Stage graphs, work and a clock for tests of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.schedule.action import Action, Schedule, Span, Stage, StageGraph, StageId, StepWork
from hetero_strategy.schedule.graph import in_cohorts
from hetero_strategy.schedule.policies import schedule_policy


class Module(NamedTuple):
    ranks: Sequence[Sequence[int]]
    """Of each pipeline rank."""
    vpp: int = 1
    style: str = "loop"
    trains: bool | Sequence[bool] = True
    """Of all stages, or of each."""
    sharded: bool = False


def graph(modules: Mapping[str, Module], edges: Iterable[tuple[str, str]] = ()) -> StageGraph:
    """Of modules in topological order and (source, target) edges."""
    edges = list(edges)
    stages: dict[StageId, Stage] = {}
    links: list[tuple[StageId, StageId]] = []
    pipelines: dict[str, Pipeline] = {}
    for name, module in modules.items():
        pipeline = Pipeline(len(module.ranks), module.vpp, module.style)  # type: ignore[arg-type]
        pipelines[name] = pipeline
        trains = [module.trains] * pipeline.stages if isinstance(module.trains, bool) else list(module.trains)
        back = any(stages[StageId(s, pipelines[s].stages - 1)].backward for s, t in edges if t == name)
        for stage in range(pipeline.stages):
            back = back or trains[stage]
            grid = np.array([[r] for r in module.ranks[pipeline.rank_of(stage)]])
            stages[StageId(name, stage)] = Stage(grid, trains[stage], back, module.sharded)
        links += [(StageId(name, s), StageId(name, s + 1)) for s in range(pipeline.stages - 1)]
        links += [(StageId(s, pipelines[s].stages - 1), StageId(name, 0)) for s, t in edges if t == name]
    return StageGraph(stages, tuple(links), pipelines)


def chain(pp: int, vpp: int = 1, style: str = "loop") -> StageGraph:
    """One module, one rank per pipeline rank."""
    return graph({"llm": Module([[r] for r in range(pp)], vpp, style)})


def work(count: int, *modules: str, edges: Iterable[tuple[str, str]] = ()) -> StepWork:
    """``count`` microbatches, the same for all modules."""
    return StepWork(
        {m: tuple(Span(i, i, i) for i in range(count)) for m in modules or ("llm",)},
        {e: tuple((i, i) for i in range(count)) for e in edges},
    )


def listed(schedule: Schedule) -> list[str]:
    """Each lane as text, without modules."""
    return [" ".join(f"{a.kind}{a.microbatch}" for a in lane.actions if a.microbatch >= 0) for lane in schedule.lanes]


def uniform(f: float = 1, i: float = 1, w: float = 1) -> Callable[[Action], float]:
    """Costs by kind."""
    costs = {"F": f, "I": i, "W": w, "B": i + w}
    return lambda action: costs.get(action.kind, 0)


def clock(schedule: Schedule, cost: Callable[[Action], float]) -> dict[Action, tuple[float, float]]:
    """Start and end of every action when each lane runs its list and waits for its needs and for the node's ranks."""
    lists = [lane.actions for lane in schedule.lanes]
    homes: dict[Action, list[int]] = {}
    for i, actions in enumerate(lists):
        for action in actions:
            homes.setdefault(action, []).append(i)
    heads, free = [0] * len(lists), [0.0] * len(lists)
    times: dict[Action, tuple[float, float]] = {}
    moved = True
    while moved:
        moved = False
        for i in range(len(lists)):
            while heads[i] < len(lists[i]):
                action = lists[i][heads[i]]
                on = homes[action]
                before = schedule.dependencies.before(action)
                if any(heads[k] == len(lists[k]) or lists[k][heads[k]] != action for k in on):
                    break
                if any(b not in times for b in before):
                    break
                start = max([free[k] for k in on] + [times[b][1] for b in before])
                times[action] = (start, start + cost(action))
                for k in on:
                    free[k] = times[action][1]
                    heads[k] += 1
                moved = True
    assert len(times) == len(homes), "stuck"
    return times


def makespan(schedule: Schedule, cost: Callable[[Action], float]) -> float:
    return max(end for _, end in clock(schedule, cost).values())


def damaged(schedule: Schedule, lane: int, actions: Iterable[Action]) -> Schedule:
    """With another list in one lane."""
    lanes = list(schedule.lanes)
    lanes[lane] = replace(lanes[lane], actions=tuple(actions))
    return replace(schedule, lanes=tuple(lanes))


@st.composite
def units(
    draw: st.DrawFn, count: int, target: Sequence[Span], most: int = 3
) -> tuple[list[Span], list[tuple[int, int]]]:
    """Microbatches of an encoder (or generator) of ``count`` step microbatches, and which of a neighbour's they touch.

    Items of the step in their order, cut anywhere: units that group microbatches, split them, or do both.
    """
    items = [mb for mb in range(count) for _ in range(draw(st.integers(0, most)))]
    if draw(st.booleans()):  # one unit per microbatch
        cuts = [i for i in range(1, len(items)) if items[i] != items[i - 1]]
    else:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(items) - 1)), max_size=2 * count)) - {len(items)})
    bounds = [0, *cuts, len(items)] if items else []
    spans, feeds = [], []
    for number, (a, b) in enumerate(pairwise(bounds)):
        spans.append(Span(number, items[a], items[b - 1]))
        touched = {t.number for t in target for mb in items[a:b] if t.first <= mb <= t.last}
        feeds += [(number, t) for t in sorted(touched)]
    return spans, feeds


@st.composite
def drawn(draw: st.DrawFn, world: int, pp: int, vpp: int = 1, style: str = "loop", *, even: bool = False) -> Module:
    """A module on any ranks; ``even``: with as many instances in every stage."""
    pp = min(pp, world)
    owner = [draw(st.integers(-1, pp - 1)) for _ in range(world)]
    order_ = draw(st.permutations(range(world)))
    for place, rank in enumerate(order_[:pp]):
        owner[rank] = place
    trains = [draw(st.booleans()) for _ in range(pp * vpp)] if draw(st.booleans()) else draw(st.booleans())
    ranks: list[Sequence[int]] = [[r for r in range(world) if owner[r] == p] for p in range(pp)]
    if even:
        instances = draw(st.integers(1, world // pp))
        ranks = [order_[p * instances : (p + 1) * instances] for p in range(pp)]
    return Module(ranks, vpp, style, trains, draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn, schedule: str, most: int = 9) -> tuple[StageGraph, StepWork]:
    """Any graph: up to three encoders, some in cohorts, an LLM, perhaps a generator, on any ranks; any work."""
    count = draw(st.integers(1, most))
    world = draw(st.integers(1, 6))
    modules: dict[str, Module] = {}
    edges: list[tuple[str, str]] = []

    virtual = schedule_policy(schedule).virtual
    interleaves = virtual == "loop" or (virtual == "any" and draw(st.booleans()))
    vpp = draw(st.integers(2, 3)) if interleaves else 2 if virtual == "v" else 1
    step = tuple(Span(i, i, i) for i in range(count))
    microbatches = {"llm": step}
    feeds: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}
    apart: list[str] = []
    for name in ("vision", "audio", "video")[: draw(st.integers(0, 3))]:
        pp, pieces = draw(st.integers(1, 3)), 1
        if draw(st.booleans()):
            apart.append(name)
            pieces = draw(st.integers(1, 3)) if pp == 1 else 1
        modules[name] = draw(drawn(world, pp, pieces, even=name in apart))
        edges.append((name, "llm"))
        spans, fed = draw(units(count, step))
        microbatches[name], feeds[name, "llm"] = tuple(spans), tuple(fed)
    modules["llm"] = draw(drawn(world, draw(st.integers(1, 4)), vpp, "v" if virtual == "v" else "loop"))
    if draw(st.booleans()):
        pp = draw(st.integers(1, 2))
        if pp == 1 and draw(st.booleans()):
            apart.append("draw")
        modules["draw"] = draw(drawn(world, pp, even="draw" in apart))
        edges.append(("llm", "draw"))
        spans, fed = draw(units(count, step))
        microbatches["draw"], feeds["llm", "draw"] = tuple(spans), tuple((t, s) for s, t in fed)
        if "vision" in modules and draw(st.booleans()):  # a second consumer of one encoder
            edges.append(("vision", "draw"))
            pairs = [
                (v.number, d.number)
                for v in microbatches["vision"]
                for d in spans
                if v.first <= d.last and d.first <= v.last
            ]
            feeds["vision", "draw"] = tuple(pairs)
    cohorts = in_cohorts(graph(modules, edges), apart)
    return cohorts, StepWork(microbatches, feeds, draw(idling(cohorts, microbatches)))


@st.composite
def idling(
    draw: st.DrawFn, cohorts: StageGraph, microbatches: Mapping[str, Sequence[Span]]
) -> dict[StageId, frozenset[int]]:
    """Cohorts that have nothing in some microbatches, in each of which another one has something."""
    idle: dict[StageId, set[int]] = {node: set() for node in cohorts.stages if node.cohort >= 0}
    for module in cohorts.apart:
        chains = cohorts.chains[module]
        for number in (span.number for span in microbatches[module] if draw(st.booleans())):
            busy = draw(st.sets(st.integers(0, len(chains) - 1), min_size=1))
            for node in (node for k, chain in enumerate(chains) if k not in busy for node in chain):
                idle[node].add(number)
    return {node: frozenset(numbers) for node, numbers in idle.items()}
