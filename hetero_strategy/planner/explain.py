"""Why a plan takes as long as it does: where ranks compute, what they wait for, what crosses nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hetero_strategy.plan.ahead import computing
from hetero_strategy.planner.evaluate import Evaluator, Step
from hetero_strategy.planner.exposed import ExposedCollectives
from hetero_strategy.simulator.bubbles import Collective, Filling, inside_actions, work_on_rank
from hetero_strategy.simulator.rows import rows_between
from hetero_strategy.simulator.simulate import pairs


@dataclass(frozen=True)
class SharedRanks:
    """Ranks that host the same stages."""

    ranks: tuple[int, ...]
    stages: tuple[str, ...]
    busy: float
    """Share of the step in which they compute, on average."""


@dataclass(frozen=True)
class Explanation:
    """What a simulated step shows."""

    shares: Mapping[str, float]
    """Module -> share of all ranks' time that it computes."""
    bubbles: Mapping[str, float]
    """Cause -> share of all ranks' time; what is not computed."""
    collectives: Mapping[Collective, float]
    """Collective -> share of all ranks' time that they wait for it, in actions, where it is part of ``shares``, or
    outside of them."""
    optimizer: float
    """Share of the step that the optimizer and gradients summed after it take."""
    busiest: SharedRanks
    within: float
    """Bytes that ranks receive from ranks of their node in a step."""
    across: float
    """Bytes that they receive from other nodes."""

    def limit(self) -> str:
        """What to change first, in one sentence."""
        cause, share = max(self.bubbles.items(), key=lambda pair: pair[1])
        ranks = f"rank {self.busiest.ranks[0]}" if len(self.busiest.ranks) == 1 else f"{len(self.busiest.ranks)} ranks"
        computes = f"{' and '.join(self.busiest.stages)} keep {ranks} busy for {self.busiest.busy:.0%} of the step"
        if self.busiest.busy > 0.85:
            return f"compute: {computes}; only more or faster devices help"
        return f"{cause}: ranks wait {share:.0%} of the time for it; the busiest: {computes}"


def explain(evaluator: Evaluator, step: Step) -> Explanation:
    """Look at a step."""
    simulation, graph = step.simulation, step.placed.graph
    whole = step.seconds * len(simulation.ranks)
    shares = dict.fromkeys(evaluator.shape.modules, 0.0)
    for action in simulation.start:
        ranks = graph.stages[action.node].grid.shape[1]
        shares[computing(action.node.module)] += float(simulation.seconds(action).sum()) * ranks / whole
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
    """A step in which modules fill bubbles, before they did."""

    filling: Filling
    alone: Explanation
    """The step without these modules."""
    turns: Explanation
    """The step with them in turns, all their instances together."""
    in_turns: float
    """Seconds of that."""


def unfilled(evaluator: Evaluator, step: Step) -> Unfilled | None:
    """Simulate a step without what fills its bubbles, and with it in turns; None where nothing does."""
    placed, modules = step.placed, step.placed.graph.filling
    if not modules:
        return None
    alone = evaluator.simulated(placed.without(modules), step.plan)
    asked = replace(evaluator.asked, fill="auto", pieces={}, prefetch={}, tp_bubbles={})
    unasked = evaluator.on(cluster=evaluator.cluster, asked=asked)
    one_after_other = unasked.place(replace(placed.candidate, fill="none", pieces={}, prefetch={}))
    turns = unasked.step_of(one_after_other, step.plan.metadata, step.plan.microbatches)
    filling = Filling(modules, alone.seconds, step.seconds, work_of(step, modules))
    return Unfilled(filling, explain(evaluator, alone), explain(unasked, turns), turns.seconds)


def beside_collectives(evaluator: Evaluator, step: Step) -> tuple[dict[str, float], float] | None:
    """Simulate a step that is filled finely with bubbles of tensor parallelism filled, too; None where there are none,
    or ranks share cores.

    Returns:
        What a run is told, which is module -> share of its actions in which others can compute; and seconds of a step.
    """
    placed, layouts = step.placed, step.placed.placement.layouts
    parallel = [name for name, layout in layouts.items() if layout.tp > 1]
    fills = placed.graph.filling and placed.scheduling.fill == "fine"
    fills = fills and all(layout.cp == 1 for layout in layouts.values())  # whose waits are not told apart here
    if not (fills and parallel) or evaluator.cluster.shares_cores:
        return None
    again = evaluator.place(replace(placed.candidate, tp_bubbles=True))
    part, whole = evaluator.bubbles(again, step.plan), dict.fromkeys(parallel, 0.0)
    rooms = whole.copy()
    for action in (a for a in step.simulation.start if a.microbatch >= 0 and a.node.module in whole):
        whole[action.node.module] += float(step.simulation.seconds(action).sum())
        rooms[action.node.module] += float(part(action).sum())
    shares = {name: round(rooms[name] / whole[name], 3) for name in parallel if whole[name]}
    return shares, evaluator.simulated(again, step.plan).seconds


def work_of(step: Step, modules: Collection[str]) -> float:
    """Seconds of a rank's work for some modules, on average over the ranks that have any: of its actions, and of their
    collectives that run beside others.
    """
    stages = {n: stage for n, stage in step.placed.graph.stages.items() if n.module in modules}
    ranks = frozenset().union(*(stage.ranks for stage in stages.values()))
    beside = sum(
        (times.gather + times.reduce) * len(stages[node].ranks)
        for node, times in step.placed.times.items()
        if node in stages and times.overlapped
    )
    return work_on_rank(step.simulation, modules) + beside / max(1, len(ranks))


def _received(evaluator: Evaluator, step: Step) -> tuple[float, float]:
    """Bytes that ranks receive of rows within and across nodes."""
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
