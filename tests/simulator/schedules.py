"""Small schedules made by hand, so that the simulator is tested without the builder of orders."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.schedule.action import Action, Lane, Schedule, Span, Stage, StageGraph, StageId, StepWork


def graph_of(grids: Mapping[StageId, np.ndarray], edges: Sequence[tuple[str, str]] = ()) -> StageGraph:
    """All stages train. ``edges``: between modules, last stage to first."""
    stages = {node: Stage(np.asarray(grid), True, True) for node, grid in grids.items()}
    count = {m: sum(n.module == m for n in grids) for m in dict.fromkeys(n.module for n in grids)}
    inner = [(StageId(m, s), StageId(m, s + 1)) for m, c in count.items() for s in range(c - 1)]
    outer = [(StageId(a, count[a] - 1), StageId(b, 0)) for a, b in edges]
    return StageGraph(stages, (*inner, *outer), {m: Pipeline(c) for m, c in count.items()})


def work_of(graph: StageGraph, microbatches: int) -> StepWork:
    """Every module has all microbatches of the step; rows flow between equal numbers."""
    spans = tuple(Span(i, i, i) for i in range(microbatches))
    feeds = {(a.module, b.module): tuple((i, i) for i in range(microbatches)) for a, b in graph.edges if a[0] != b[0]}
    return StepWork(dict.fromkeys(graph.pipelines, spans), feeds)


def schedule_of(graph: StageGraph, work: StepWork, order: Iterable[Action], split: Iterable[StageId] = ()) -> Schedule:
    """Every rank's list is the part of ``order`` (a total order) that its stages have."""
    hosted: dict[int, tuple[StageId, ...]] = {}
    for node, stage in graph.stages.items():
        for rank in stage.ranks:
            hosted[rank] = (*hosted.get(rank, ()), node)
    total = tuple(order)
    lanes = [
        Lane(tuple(sorted(r for r in hosted if hosted[r] == nodes)), tuple(a for a in total if a.node in nodes))
        for nodes in dict.fromkeys(hosted.values())
    ]
    return Schedule("by hand", graph, work, frozenset(split), True, tuple(lanes), {}, total)


def in_order(draft: Schedule) -> Schedule:
    """With starts that every list keeps to, dependencies first."""
    lists = [deque(lane.actions) for lane in draft.lanes]
    lanes = Counter(action for own in lists for action in own)
    starts: dict[Action, None] = {}
    while any(lists):
        heads = [own[0] for own in lists if own]
        before = draft.dependencies.before
        action = next(a for a in heads if heads.count(a) == lanes[a] and starts.keys() >= {*before(a)})
        starts[action] = None
        for own in lists:
            if own and own[0] == action:
                own.popleft()
    return replace(draft, starts=tuple(starts))


def chain(stages: int, microbatches: int, instances: int = 1, tp: int = 1) -> Schedule:
    """1F1B on one module."""
    size = instances * tp
    grids = {StageId("llm", s): np.arange(size).reshape(instances, tp) + s * size for s in range(stages)}
    graph = graph_of(grids)
    lanes = []
    for node, stage in graph.stages.items():
        ahead = min(microbatches, stages - node.stage - 1)
        actions = [Action("F", node, i) for i in range(ahead)]
        for i in range(microbatches):
            actions += [Action("F", node, i + ahead)] if i + ahead < microbatches else []
            actions += [Action("B", node, i)]
        lanes.append(Lane(tuple(int(r) for r in stage.grid.flat), tuple(actions)))
    return in_order(Schedule("1f1b", graph, work_of(graph, microbatches), frozenset(), True, tuple(lanes), {}, ()))


def random_schedule(seed: int) -> Schedule:
    """Two encoders and an LLM on random, possibly shared ranks; a random order that can run; some nodes split."""
    rng = random.Random(seed)
    ranks = rng.choice((4, 6, 8))
    grids: dict[StageId, np.ndarray] = {}
    for module in ("vision", "audio", "llm"):
        tp, instances = rng.choice((1, 2)), rng.choice((1, 2))
        for stage in range(rng.choice((1, 2))):
            grids[StageId(module, stage)] = np.array(rng.sample(range(ranks), tp * instances)).reshape(instances, tp)
    for stage in (n for n in list(grids) if n.stage == 1):  # instances are the module's, not the stage's
        first = grids[StageId(stage.module, 0)]
        grids[stage] = np.array(rng.sample(range(ranks), first.size)).reshape(first.shape)
    graph = graph_of(grids, (("vision", "llm"), ("audio", "llm")))
    work = work_of(graph, rng.choice((1, 2, 3)))
    split = frozenset(n for n in grids if rng.random() < 0.3)
    numbers = range(len(work.microbatches["llm"]))
    actions = [Action(k, n, i) for n in grids for i in numbers for k in (("F", "I", "W") if n in split else ("F", "B"))]
    actions += [Action(kind, n) for n in grids for kind in ("UNSHARD", "REDUCE")]
    draft = Schedule("draft", graph, work, split, True, (), {}, ())
    done: list[Action] = []
    while len(done) < len(actions):
        ran = set(done)

        def ready(action: Action, ran: set[Action] = ran) -> bool:
            if action in ran or action.kind == "UNSHARD":
                return action not in ran
            if action.kind == "REDUCE":
                return all(a in ran for a in actions if a.node == action.node and a.kind != "REDUCE")
            unsharded = Action("UNSHARD", action.node) in ran
            return unsharded and all(a in ran for a in draft.dependencies.before(action))

        done.append(rng.choice([a for a in actions if ready(a)]))
    return schedule_of(graph, work, done, split)
