"""How many stages each module has and where they begin, after Cornstarch: exact enumeration.

What a step of such stages takes is estimated in closed form, or found by simulating the real schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.layers import Passes
from hetero_strategy.planner.partition import split
from hetero_strategy.schedule.action import Action, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.simulator.simulate import simulate

Edges = Sequence[tuple[str, str]]
"""(source module, target module) pairs."""


def topological(modules: Mapping[str, Passes], edges: Edges) -> list[str]:
    """Names of the modules, each after those that feed it.

    Raises:
        ValueError: an edge names an unknown module.
        graphlib.CycleError: there is no such order.
    """
    if unknown := {name for edge in edges for name in edge} - set(modules):
        raise ValueError(f"edges name {', '.join(sorted(unknown))}; the modules are {', '.join(modules)}")
    sorter = TopologicalSorter({name: [s for s, t in edges if t == name] for name in modules})
    return list(sorter.static_order())


def staged(passes: Passes, counts: Sequence[int]) -> Passes:
    """Times of stages of so many layers each.

    Raises:
        ValueError: a stage is empty, or the stages do not cover the layers.
    """
    if sum(counts) != len(passes.forward) or min(counts, default=0) < 1:
        raise ValueError(f"stages of {tuple(counts)} layers are no split of {len(passes.forward)} layers")
    starts = ragged.starts(np.asarray(counts))
    return Passes(*(np.add.reduceat(times, starts) for times in (passes.forward, passes.input, passes.weight)))


def as_if_trained(passes: Passes) -> Passes:
    """The same layers for a planner that knows nothing of frozen parts: every backward is twice its forward."""
    return Passes(passes.forward, passes.forward, passes.forward)


def estimate(modules: Mapping[str, Passes], edges: Edges, microbatches: int) -> float:
    """Seconds of a 1F1B step, in closed form: one microbatch through the longest path, the others at the slowest stage.

    Exact for a chain of equal stages. Where stages differ, but backward is in proportion to forward, it is never below
    what `simulated` finds and up to a quarter above. It may be below where one stage has the slowest forward and
    another the slowest backward, such as a frozen encoder before a trained one: a guide for choosing among many.

    Args:
        modules: name -> times of its stages, each stage on its own ranks.
        edges: between modules.
        microbatches: of the step; every module has as many.
    """
    finish: dict[str, float] = {}
    for name in topological(modules, edges):
        upstream = max((finish[s] for s, t in edges if t == name), default=0.0)
        finish[name] = upstream + float(modules[name].total.sum())
    slowest = max(float(p.total.max()) for p in modules.values())
    return max(finish.values()) + (microbatches - 1) * slowest


def simulated(modules: Mapping[str, Passes], edges: Edges, microbatches: int, schedule: str = "1f1b") -> float:
    """Seconds of a step by the schedule that ranks would run, every stage on its own rank, transfers free.

    Args:
        modules: name -> times of its stages.
        edges: between modules.
        microbatches: of the step; every module has as many.
        schedule: a name in ``schedule.policies`` for one stage per rank.
    """
    graph = one_stage_per_rank(modules, edges)
    numbers = tuple(Span(i, i, i) for i in range(microbatches))
    work = StepWork(dict.fromkeys(modules, numbers), {e: tuple((i, i) for i in range(microbatches)) for e in edges})

    def seconds(action: Action) -> float:
        times = modules[action.node.module]
        part = {"F": times.forward, "B": times.backward, "I": times.input, "W": times.weight}.get(action.kind)
        return 0.0 if part is None else float(part[action.node.stage])

    return simulate(make_schedule(schedule, graph, work, seconds), seconds).time


def one_stage_per_rank(modules: Mapping[str, Passes], edges: Edges) -> StageGraph:
    """The graph of stages that each have a rank of their own. A stage trains if its weight gradient takes time."""
    counts = {name: len(modules[name].forward) for name in topological(modules, edges)}
    first = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    layouts = {n: ModuleLayout(ranks=range(first[n], first[n] + pp), dp_shard=1, pp=pp) for n, pp in counts.items()}
    trains = {StageId(n, s): bool(modules[n].weight[s] > 0) for n, pp in counts.items() for s in range(pp)}
    return stage_graph(list(counts), edges, layouts, trains)


Seconds = Callable[[Mapping[str, Passes], Edges, int], float]
"""(times of every module's stages, edges, microbatches) -> seconds of a step: ``estimate`` or ``simulated``."""


@dataclass(frozen=True)
class Allocation:
    """Stages of every module."""

    splits: Mapping[str, tuple[int, ...]]
    """Layers of each stage."""
    seconds: float
    """Predicted for a step."""

    @property
    def stages(self) -> dict[str, int]:
        """How many each module has."""
        return {name: len(counts) for name, counts in self.splits.items()}


def allocate(
    modules: Mapping[str, Passes],
    edges: Edges,
    microbatches: int,
    *,
    total: int | None = None,
    ranges: Mapping[str, Sequence[int]] | None = None,
    seconds: Seconds = estimate,
) -> Allocation:
    """Stage counts with the fewest rank-seconds per step (step time x stages), every module split optimally.

    After Cornstarch's algorithm 1 (arXiv:2503.11367), which tries every stage count of the LLM, gives each encoder the
    count whose stages take as long, and keeps what has the least iteration time. Here every combination is tried, so
    nothing is lost to that rule. With ``total`` given, the fewest rank-seconds are the shortest step. Ties: fewer
    stages, then the first in the order of ``ranges``.

    Args:
        modules: name -> times of its layers.
        edges: between modules.
        microbatches: of the step.
        total: stages of all modules together; None: any.
        ranges: module -> stage counts to try; default: from 1 to the number of its layers.
        seconds: what a step takes.

    Raises:
        LayoutError: no combination has ``total`` stages with a layer in each.
    """
    tried = {name: range(1, len(p.forward) + 1) for name, p in modules.items()} | dict(ranges or {})
    counts = {name: [n for n in tried[name] if 1 <= n <= len(p.forward)] for name, p in modules.items()}

    @cache
    def best_split(name: str, stages: int) -> tuple[tuple[int, ...], Passes]:
        counts = split(modules[name].total, stages)
        return counts, staged(modules[name], counts)

    best: tuple[float, int, Allocation] | None = None
    for combination in itertools.product(*counts.values()):
        size = sum(combination)
        if total is not None and size != total:
            continue
        parts = {name: best_split(name, n) for name, n in zip(counts, combination, strict=True)}
        took = seconds({name: times for name, (_, times) in parts.items()}, edges, microbatches)
        if best is None or (took * size, size) < best[:2]:
            best = took * size, size, Allocation({name: split for name, (split, _) in parts.items()}, took)
    if best is None:
        limits = ", ".join(f"{name} {min(n, default=0)} to {max(n, default=0)}" for name, n in counts.items())
        raise LayoutError(f"no allocation of {total} stages: modules can have {limits}; change total or the ranges")
    return best[2]


def allocate_best(
    modules: Mapping[str, Passes],
    edges: Edges,
    microbatches: int,
    *,
    total: int | None = None,
    ranges: Mapping[str, Sequence[int]] | None = None,
) -> Allocation:
    """The frozen-aware allocation or the unaware one, whichever has fewer rank-seconds per step when simulated.

    The aware one has the faster slowest stage, but not always the faster step: in Cornstarch's own table 11 it loses in
    two rows of six. Choosing by simulation cannot lose to either.

    Arguments and errors are those of :func:`allocate`.
    """
    allocations = []
    for believed in (modules, {name: as_if_trained(p) for name, p in modules.items()}):
        splits = allocate(believed, edges, microbatches, total=total, ranges=ranges).splits
        really = {name: staged(modules[name], counts) for name, counts in splits.items()}
        allocations.append(Allocation(splits, simulated(really, edges, microbatches)))
    return min(allocations, key=lambda a: a.seconds * sum(a.stages.values()))
