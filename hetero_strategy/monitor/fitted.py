"""What is fitted to measured steps for later runs: costs of modules for balancing, seconds of stages for planning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np
import torch.distributed as dist

from hetero_strategy.layout.placement import Coordinate
from hetero_strategy.monitor.measure import gather_on_first
from hetero_strategy.monitor.prediction import Ran, durations
from hetero_strategy.plan.ahead import computing
from hetero_strategy.plan.balance import Cost, fit_cost
from hetero_strategy.planner.times import Line
from hetero_strategy.profiling.blocks import fit
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import Kind, StageId
from hetero_strategy.schedule.graph import sizes_of


def fitted_stages(steps: Iterable[Ran], synchronous: Collection[StageId] = ()) -> dict[StageId, dict[Kind, Line]]:
    """Fit the seconds of every stage's actions, by kind, to the rows and squared lengths that instances had."""
    points: dict[tuple[StageId, Kind], list[np.ndarray]] = defaultdict(list)
    for step in steps:
        for (kind, node, microbatch), seconds in durations(step.schedule, step.events, synchronous).items():
            if microbatch >= 0 and not step.plan.holds(node.module, node.stage):
                stage = step.schedule.graph.stages[node]
                rows, squares = map(stage.own, sizes_of(step.plan, node.module, microbatch))
                points[_computed(node), kind].append(
                    np.stack([np.ones(len(rows)), rows, squares, seconds], axis=1)[rows > 0]
                )
    stages: dict[StageId, dict[Kind, Line]] = defaultdict(dict)
    for (node, kind), found in sorted(points.items()):
        if len(table := np.concatenate(found)):
            stages[node][kind] = fit(table[:, :3], table[:, 3])[0]
    return dict(stages)


def _computed(node: StageId) -> StageId:
    """The stage of the model that a node computes, for this step or the next one."""
    return node.all_instances._replace(module=computing(node.module))


def fitted_costs(executor: Executor, group: dist.ProcessGroup | None) -> dict[str, Cost] | None:
    """Fit the seconds of every module's forward, as a function of its items, to the recorded steps of all ranks.

    They are meant for ``balance.costs`` of the next run where FLOPs say too little about time (small items, slow
    kernels). This is a collective over ``group``, all ranks on the host, after training, and waits for the device.

    Returns:
        Module -> its cost, on rank 0; None on the others. Modules that never ran, or beside others, are left out.
    """
    seen: list[tuple[StageId, np.ndarray, float]] = []
    steps = list(executor.recorder.steps)
    for step in steps[1:] or steps:  # the first one warms up
        for action, start, end in step.events():
            coordinate = executor.coordinates.get(action.node.module)
            held = step.plan.holds(action.node.module, action.node.stage)
            beside = executor.side is not None and executor.side.of(action.node.module) is not None
            if action.kind == "F" and isinstance(coordinate, Coordinate) and not held and not beside:
                assignment = step.plan.assignments[action.node.module][action.microbatch]
                seen.append((_computed(action.node), assignment.inner_rows_of(coordinate.instance), end - start))
    ranks = gather_on_first(seen, group)
    if ranks is None:
        return None
    lengths: dict[StageId, list[np.ndarray]] = defaultdict(list)
    seconds: dict[StageId, list[float]] = defaultdict(list)
    for node, rows, took in chain.from_iterable(ranks):
        lengths[node].append(rows)
        seconds[node].append(took)
    costs: dict[str, list[Cost]] = defaultdict(list)
    for node in sorted(lengths):
        costs[node.module].append(fit_cost(lengths[node], seconds[node]))
    return {
        module: Cost(*(sum(getattr(cost, part) for cost in stages) for part in ("linear", "quadratic", "fixed")))
        for module, stages in costs.items()
    }
