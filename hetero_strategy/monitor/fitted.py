"""Costs of modules from measured steps, as balancing takes them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch.distributed as dist

from hetero_strategy.layout.placement import Coordinate
from hetero_strategy.plan.balance import Cost, fit_cost
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import StageId


def fitted_costs(executor: Executor, group: dist.ProcessGroup | None) -> dict[str, Cost] | None:
    """Seconds of every module's forward as a function of its items, fitted to the recorded steps of all ranks.

    Give them to ``balance.costs`` of the next run where FLOPs say too little of time: small items, slow kernels. A
    collective over all ranks, after training; waits for the device.

    Args:
        executor: of this rank.
        group: of all ranks, on the host.

    Returns:
        By module, on rank 0; None on the others. Modules that never ran are left out.
    """
    seen: dict[StageId, list[tuple[np.ndarray, float]]] = defaultdict(list)
    steps = list(executor.recorder.steps)
    for step in steps[1:] or steps:  # the first one warms up
        for action, start, end in step.events():
            where = executor.coordinates.get(action.node.module)
            if action.kind == "F" and isinstance(where, Coordinate):
                assignment = step.plan.assignments[action.node.module][action.microbatch]
                seen[action.node].append((assignment.inner_rows_of(where.instance), end - start))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(dict(seen), ranks if executor.rank == 0 else None, group=group)
    if executor.rank:
        return None
    every: dict[StageId, list[tuple[np.ndarray, float]]] = defaultdict(list)
    for found in ranks:
        for node, samples in found.items():
            every[node] += samples
    made: dict[str, list[Cost]] = defaultdict(list)
    for node, samples in sorted(every.items()):
        made[node.module].append(fit_cost([lengths for lengths, _ in samples], [seconds for _, seconds in samples]))
    return {
        module: Cost(*(sum(getattr(cost, part) for cost in stages) for part in ("linear", "quadratic", "fixed")))
        for module, stages in made.items()
    }
