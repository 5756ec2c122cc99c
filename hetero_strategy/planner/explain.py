"""Explanation of a plan's seconds: compute of ranks, causes of waits, exposed collectives, traffic. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from hetero_strategy.planner.evaluate import Evaluator, Step
from hetero_strategy.planner.step_seconds import ActionSeconds
from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.cost_model import rank_collectives
from hetero_strategy.simulator.result import Collective, Filling, inside_actions, work_on_rank
from hetero_strategy.simulator.simulate import pairs, rows_between


@dataclass(frozen=True)
class SharedRanks:
    """A set of ranks that host the same stages."""

    ranks: tuple[int, ...]
    stages: tuple[str, ...]
    busy: float
    """Share of the step in which they compute, on average."""


@dataclass(frozen=True)
class Explanation:
    """The shares and traffic of a simulated step."""

    shares: Mapping[str, float]
    """Module -> share of all ranks' time that it computes."""
    bubbles: Mapping[str, float]
    """Cause -> share of all ranks' time in which they do not compute."""
    collectives: Mapping[Collective, float]
    """Collective -> share of all ranks' time that they wait for it, inside actions, where it is part of ``shares``, or
    outside."""
    optimizer: float
    """Share of the step that the optimizer and gradients summed after it take."""
    busiest: SharedRanks
    within: float
    """Bytes that ranks receive from ranks of their node in a step."""
    across: float
    """Bytes that they receive from other nodes."""

    def limit(self) -> str:
        """Return what to change first, in one sentence."""
        cause, share = max(self.bubbles.items(), key=lambda pair: pair[1])
        ranks = f"rank {self.busiest.ranks[0]}" if len(self.busiest.ranks) == 1 else f"{len(self.busiest.ranks)} ranks"
        computes = f"{' and '.join(self.busiest.stages)} keep {ranks} busy for {self.busiest.busy:.0%} of the step"
        if self.busiest.busy > 0.85:
            return f"compute: {computes}; only more or faster devices help"
        return f"{cause}: ranks wait {share:.0%} of the time for it; the busiest: {computes}"


def explain(evaluator: Evaluator, step: Step) -> Explanation:
    """Explain a simulated step."""
    simulation, graph = step.simulation, step.placed.graph
    whole = step.seconds * len(simulation.ranks)
    shares = dict.fromkeys(evaluator.shape.modules, 0.0)
    for action in simulation.start:
        ranks = graph.stages[action.node].grid.shape[1]
        shares[action.node.module] += float(simulation.seconds(action).sum()) * ranks / whole
    scale, after = simulation.time / step.seconds, step.after
    waits = inside_actions(simulation, ExposedCollectives(evaluator, step))
    waits["all-gather"] += after.gathers
    waits["reduce-scatter"] += after.sums
    lanes: list[SharedRanks] = []
    for stages, ranks in graph.hosts.items():
        busy = simulation.busy[[simulation.places[rank] for rank in ranks]]
        lanes.append(SharedRanks(ranks, tuple(map(str, stages)), float(busy.mean() / step.seconds)))
    within, across = _received(evaluator, step)
    return Explanation(
        shares,
        {cause: share * scale for cause, share in simulation.bubble_by_cause.items()},
        {name: seconds / step.seconds for name, seconds in waits.items()},
        after.rest / step.seconds,
        max(lanes, key=lambda lane: lane.busy),
        within,
        across,
    )


@dataclass(frozen=True)
class Unfilled:
    """A comparison of a step whose bubbles are filled by modules with two steps without filling."""

    filling: Filling
    alone: Explanation
    """The step without these modules."""
    turns: Explanation
    """The step with these modules in turns, all their instances together."""
    in_turns: float
    """Seconds of ``turns``."""


def unfilled(evaluator: Evaluator, step: Step) -> Unfilled | None:
    """Simulate a step without the modules that fill its bubbles, and with them in turns; return None if none fill."""
    placed, modules = step.placed, step.placed.graph.filling
    if not modules:
        return None
    alone = evaluator.simulated(placed.without(modules), step.plan)
    default_fill = replace(evaluator.asked, fill="auto", pieces={})
    unasked = evaluator.on(cluster=evaluator.cluster, asked=default_fill)
    one_after_other = unasked.place(replace(placed.candidate, fill="none", pieces={}))
    turns = unasked.step_of(one_after_other, step.plan.metadata, step.plan.microbatches)
    filling = Filling(modules, alone.seconds, step.seconds, work_of(step, modules))
    return Unfilled(filling, explain(evaluator, alone), explain(unasked, turns), turns.seconds)


def work_of(step: Step, modules: Collection[str]) -> float:
    """Return the seconds of a rank's work for some modules, on average over the ranks that have any: of its actions,
    and of its collectives that overlap other work.
    """
    stages = {n: stage for n, stage in step.placed.graph.stages.items() if n.module in modules}
    ranks = frozenset().union(*(stage.ranks for stage in stages.values()))
    overlapped = sum(
        (times.gather + times.reduce) * len(stages[node].ranks)
        for node, times in step.placed.times.items()
        if node in stages and times.overlapped
    )
    return work_on_rank(step.simulation, modules) + overlapped / max(1, len(ranks))


def _received(evaluator: Evaluator, step: Step) -> tuple[float, float]:
    """Return the bytes of rows that ranks receive within and across nodes."""
    graph = step.placed.graph
    rows, stages = rows_between(step.plan, graph, evaluator.row_bytes), graph.stages
    within = across = 0.0
    for action in step.simulation.start:
        for source in step.schedule.dependencies.crossing(action):
            grids = [stages[a.node].grid for a in (source, action)]
            nodes = [evaluator.cluster.network.nodes_of(grid[:, 0]) for grid in grids]
            flow = pairs(rows(source, action))
            moved = flow.bytes * grids[1].shape[1]
            away = nodes[0][flow.source] != nodes[1][flow.target]
            same = grids[0][flow.source, 0] == grids[1][flow.target, 0]
            across += float(moved[away].sum())
            within += float(moved[~away & ~same].sum())
    return within, across


class ExposedCollectives:
    """A function of a step's actions: seconds, on every instance, in which its ranks wait for collectives.

    An action waits for what it takes longer than on links without latency and of infinite bandwidth, so collectives
    that overlap compute do not count. UNSHARD and REDUCE are such waits as a whole. A backward that gathers and reduces
    in every microbatch waits for both in proportion to their seconds, and so does an action for tensor parallelism and
    for rows that context-parallel ranks exchange for heads. Ranks of context parallelism else wait for keys.
    """

    def __init__(self, evaluator: Evaluator, step: Step) -> None:
        placed, plan = step.placed, step.plan
        work = evaluator.rank_work(placed, plan)
        unlinked = evaluator.unlinked(placed.candidate)
        whole_weights = {node: replace(times, once=True) for node, times in placed.times.items()}
        without_keys = {node: replace(times, keys=None) for node, times in whole_weights.items()}
        self._times, self._layouts = placed.times, placed.layouts
        self._collectives = {
            name: rank_collectives(evaluator.shape.modules[name], layout, evaluator.cluster, evaluator.precision)
            for name, layout in placed.layouts.items()
        }
        self._seconds, self._with_whole_weights, self._without_keys, self._without_links = (
            ActionSeconds(plan, placed.graph, times, work)
            for times in (placed.times, whole_weights, without_keys, unlinked)
        )

    def __call__(self, action: Action) -> Mapping[Collective, Float64[np.ndarray, "instances"]]:
        """Return the waits of one action by collective."""
        seconds, times = self._seconds(action), self._times[action.node]
        if action.microbatch < 0:
            return {"all-gather" if action.kind == "UNSHARD" else "reduce-scatter": seconds}
        whole = self._with_whole_weights(action)
        data, reduce = seconds - whole, 0.0 if action.kind == "F" else times.reduce
        gathers = times.gather / (times.gather + reduce) if times.gather + reduce else 0.0
        rows, (tp, heads) = self._without_keys(action), self._collectives[action.node.module]
        linked, all_rows = rows - self._without_links(action), tp.per_row + heads.per_row
        exchanged = linked * (heads.per_row / all_rows if all_rows else 0.0)
        waits: dict[Collective, Float64[np.ndarray, "instances"]] = {
            "all-gather": gathers * data,
            "reduce-scatter": (1.0 - gathers) * data,
            "tensor parallel": linked - exchanged,
        }
        if self._layouts[action.node.module].cp > 1:
            waits["context parallel"] = whole - rows + exchanged
        return waits
