"""How much of a step's actions its ranks wait for collectives. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float64

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.ahead import computing
from hetero_strategy.planner.action_seconds import ActionSeconds
from hetero_strategy.planner.evaluate import Evaluator, Step
from hetero_strategy.planner.times import rank_collectives
from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.bubbles import Collective


class ExposedCollectives:
    """Seconds of a step's actions, on every instance, in which its ranks wait for collectives.

    They are what an action takes longer than it would on links without latency and of any bandwidth, so that what runs
    beside compute does not count. UNSHARD and REDUCE are such waits as a whole. A backward that gathers and reduces in
    every microbatch waits for both in proportion to what they take, and so do ranks of tensor and context parallelism.
    """

    def __init__(self, evaluator: Evaluator, step: Step) -> None:
        placed, plan = step.placed, step.plan
        unlinked = placed.unlinked or evaluator.unlinked(placed.candidate)
        whole_weights = {node: replace(times, once=True) for node, times in placed.times.items()}
        self._times = placed.times
        self._keys = {
            name: _share_of_keys(evaluator, name, layout)
            for name, layout in placed.placement.layouts.items()
            if layout.cp > 1
        }
        self._seconds = ActionSeconds(plan, placed)
        self._with_whole_weights = ActionSeconds(plan, replace(placed, times=whole_weights))
        self._without_links = ActionSeconds(plan, replace(placed, times=unlinked))

    def __call__(self, action: Action) -> Mapping[Collective, Float64[np.ndarray, "instances"]]:
        """Of one action."""
        seconds, times = self._seconds(action), self._times[action.node]
        if action.microbatch < 0:
            return {"all-gather" if action.kind == "UNSHARD" else "reduce-scatter": seconds}
        whole = self._with_whole_weights(action)
        data, reduce = seconds - whole, 0.0 if action.kind == "F" else times.reduce
        gathers = times.gather / (times.gather + reduce) if times.gather + reduce else 0.0
        rows, keys = whole - self._without_links(action), self._keys.get(computing(action.node.module))
        found: dict[Collective, Float64[np.ndarray, "instances"]] = {
            "all-gather": gathers * data,
            "reduce-scatter": (1.0 - gathers) * data,
            "tensor parallel": rows * (1.0 - (keys or 0.0)),
        }
        return found if keys is None else found | {"context parallel": rows * keys}


def _share_of_keys(evaluator: Evaluator, name: str, layout: ModuleLayout) -> float:
    """Of a module's collectives over the ranks of an instance, what context parallelism has."""
    cluster = evaluator.cluster.on(layout.ranks)
    of = rank_collectives(evaluator.shape.modules[name], layout, cluster, evaluator.precision)
    rows, keys = (line.fixed + line.per_row for line in of)
    return keys / (rows + keys) if rows + keys else 0.0
