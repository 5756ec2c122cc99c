"""Bytes between the actions of a step, from its plan. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from hetero_strategy.plan.step_plan import StepPlan, edge_blocks
from hetero_strategy.schedule.action import Action, StageGraph, StageId
from hetero_strategy.simulator.simulate import RowsSent

Widths = Callable[[StageId, StageId], float]
"""(source stage, target stage) -> bytes of a row between them."""


def rows_between(plan: StepPlan, graph: StageGraph, widths: Widths = lambda source, target: 1.0) -> RowsSent:
    """Bytes between actions of a step, as ``simulate`` takes them; numbers of rows without widths."""

    @cache
    def rows(source: Action, target: Action) -> np.ndarray:
        back = source.kind != "F"
        first, second = (target, source) if back else (source, target)
        width = widths(first.node, second.node)
        if first.node.module == second.node.module:
            totals = plan.assignments[first.node.module][first.microbatch].totals(inner=True)
            return np.asarray(width * graph.stages[first.node].own(totals))
        blocks = edge_blocks(plan, first.node.module, first.microbatch, second.node.module, second.microbatch)
        counts = [len(plan.assignments[a.node.module][a.microbatch].offsets) - 1 for a in (first, second)]
        sent = np.zeros((counts[0], counts[1]))
        np.add.at(sent, (blocks.source_instance, blocks.target_instance), width * blocks.rows)
        sent = graph.stages[second.node].own(graph.stages[first.node].own(sent.T).T)
        return sent.T if back else sent

    return rows
