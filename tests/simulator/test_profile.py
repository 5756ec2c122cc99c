"""Costs from measured actions: lines are found again, disturbed samples do not matter, instances keep their own."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.step_plan import Assignment, StepItems, StepMetadata, StepPlan
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.graph import PlannedCosts, StageCost, stage_graph
from hetero_strategy.simulator.profile import Profile, TimedAction

NODE = StageId("llm", 0)


TEN = StageCost(10.0, 0.0)


def planned(lengths: list[list[int]], cost: StageCost = TEN) -> PlannedCosts:
    """One microbatch of an LLM whose instances have sequences of these lengths."""
    rows = np.array([n for one in lengths for n in one], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lengths])])
    count = len(rows)
    none: dict[str, StepItems] = {}
    metadata = StepMetadata(0, 0, np.arange(count), rows, np.ones(count, np.int64), none)
    assignment = Assignment(np.arange(count), rows, rows, offsets, np.zeros(len(lengths), np.int64), 0, 0)
    layout = ModuleLayout(ranks=len(lengths)).resolved()
    graph = stage_graph(["llm"], [], {"llm": layout}, {NODE: True})
    return PlannedCosts(StepPlan(metadata, 1, {"llm": (assignment,)}), graph, {NODE: cost})


def test_a_line_is_found_again() -> None:
    samples = [TimedAction(NODE, "F", flops, 0.5 + 2e-3 * flops) for flops in (100.0, 300.0, 700.0)]
    samples += [TimedAction(NODE, "REDUCE", 0.0, 0.25)]
    profile = Profile(samples)
    seconds = profile.costs(planned([[10, 20], [50]]), Action("F", NODE, 0))
    assert seconds == pytest.approx([0.5 + 2e-3 * 300, 0.5 + 2e-3 * 500])
    assert profile.costs(planned([[1]]), Action("REDUCE", NODE)) == pytest.approx(0.25)
    assert profile.costs(planned([[1]]), Action("W", NODE, 0)) == pytest.approx([0.0]), "it was never measured"


def test_a_process_that_lost_the_processor_does_not_count() -> None:
    true = [TimedAction(NODE, "F", 100.0 * k, 1e-3 * k) for k in range(1, 9)]
    disturbed = [TimedAction(NODE, "F", 400.0, 1.0)]
    cost = Profile(true + disturbed).costs(planned([[40]]), Action("F", NODE, 0))
    assert cost == pytest.approx([4e-3], rel=0.05)


def test_planned_costs_follow_what_runs() -> None:
    costs = planned([[10, 10], [20]], StageCost(1.0, 0.5))
    assert costs.of_instances(Action("F", NODE, 0)) == pytest.approx([20 + 0.5 * 200, 20 + 0.5 * 400])
    assert costs(Action("B", NODE, 0)) == pytest.approx(2 * (20 + 0.5 * 400)), "the slowest instance, two forwards"
    recomputed = planned([[10]], StageCost(1.0, 0.0, recomputed=True))
    assert recomputed(Action("B", NODE, 0)) == pytest.approx(30.0)
    assert recomputed(Action("UNSHARD", NODE)) == 0.0
