"""Bytes between actions are those of the transfers that ranks do."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.simulator.rows import rows_between
from hetero_strategy.simulator.simulate import pairs
from tests.planner.models import batch, cluster, model

RANKS = 8


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_receives_its_part_of_the_rows(tp: int, backward: bool) -> None:
    """Of the rows of a language model a tensor-parallel rank has a part; of those of the encoder every rank has all."""
    evaluator = Evaluator(model(), cluster(RANKS), [batch(16)], balance=BalanceConfig(reorder="none"))
    layouts = {"vision": ModuleLayout(range(4)), "llm": ModuleLayout(range(4, RANKS), tp=tp)}
    step = evaluator.step(evaluator.place(Candidate(layouts, microbatches=2)))
    width = evaluator.row_bytes(StageId("vision", 0), StageId("llm", 0))
    received = np.zeros(RANKS)
    for rank in range(RANKS):
        for transfer in compile_step(step.plan, step.schedule, rank).transfers:
            if transfer.microbatches == (0, 0) and transfer.backward == backward:
                both = (transfer.transfer.first, transfer.transfer.second)
                received[rank] += sum(rows.size for hop in both for _, rows in hop.receives) * width
    ends = [Action("F", StageId("vision", 0), 0), Action("F", StageId("llm", 0), 0)]
    if backward:
        ends = [Action("B", ends[1].node, 0), Action("B", ends[0].node, 0)]
    flow = pairs(rows_between(step.plan, step.placed.graph, evaluator.row_bytes)(*ends))
    grid = step.placed.graph.stages[ends[1].node].grid
    simulated = np.bincount(flow.target, flow.bytes, len(grid))
    assert simulated == pytest.approx(received[grid].mean(axis=1))
    assert simulated.all()
