"""Bytes between the actions of a step, from its plan. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from hetero_strategy.plan.step_plan import StepPlan, edge_blocks, places_among
from hetero_strategy.schedule.action import Action, StageGraph, StageId
from hetero_strategy.simulator.simulate import RowsSent, Sent

Widths = Callable[[StageId, StageId], float]
"""(source stage, target stage) -> bytes of a row between them."""


def rows_between(plan: StepPlan, graph: StageGraph, widths: Widths = lambda source, target: 1.0) -> RowsSent:
    """Bytes between actions of a step into one rank that reads, which has a part of an instance's rows at most, as
    ``simulate`` takes them; numbers of rows without widths.
    """

    @cache
    def totals(module: str, microbatch: int) -> np.ndarray:
        """Rows of every instance of a module."""
        return plan.assignments[module][microbatch].totals(inner=True)

    @cache
    def pairs(source: str, p: int, target: str, t: int) -> Sent:
        """Rows between all instances of two modules."""
        blocks = edge_blocks(plan, source, p, target, t)
        bins = len(plan.assignments[target][t].offsets) - 1
        pair, number = np.unique(blocks.source_instance * bins + blocks.target_instance, return_inverse=True)
        return Sent(*np.divmod(pair, bins), np.bincount(number, blocks.rows, len(pair)))

    @cache
    def rows(source: Action, target: Action) -> np.ndarray | Sent:
        back = source.kind != "F"
        (a, p), (b, t) = ((x.node, x.microbatch) for x in ((target, source) if back else (source, target)))
        width = widths(a, b) / graph.stages[target.node].row_sharding.parts
        if a.module == b.module:
            return np.asarray(width * graph.stages[a].own(totals(a.module, p)))
        sent = pairs(a.module, p, b.module, t)
        first, from_here = places_among(sent.source, graph.stages[a].members)
        second, to_here = places_among(sent.target, graph.stages[b].members)
        kept = from_here & to_here & (sent.bytes > 0)
        first, second, size = first[kept], second[kept], width * sent.bytes[kept]
        return Sent(second, first, size) if back else Sent(first, second, size)

    return rows
