"""Modules whose instances act on their own: ranks have even work over the step, of all modules on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_strategy.layout.placement import place
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.orchestrator import ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan
from hetero_strategy.planner.context import model_context
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph

SAMPLES, MICROBATCHES, INSTANCES = 64, 16, 4
COSTS = {"llm": Cost(1.0), "vision": Cost(0.5)}


def planned(
    beside: np.ndarray | None,
    seed: int = 0,
    budget: int | None = None,
    policy: str = "auto",
    speeds: tuple[float, ...] = (),
) -> StepPlan:
    """A sample has one image; four instances see four of these in a microbatch."""
    rows, numbers = np.random.default_rng(seed).integers(2, 40, SAMPLES), np.arange(SAMPLES)
    items = {"vision": StepItems(numbers, rows, np.zeros_like(rows), 4 * rows)}
    metadata = StepMetadata(0, seed, numbers, rows + 8, np.full(SAMPLES, 8), items)
    balancing = ResolvedBalance(
        policy={"llm": "auto", "vision": policy},
        speeds={"vision": speeds} if speeds else {},
        costs=COSTS,
        budget={} if budget is None else {"vision": budget},
        beside={} if beside is None else {"vision": {"llm": beside}},
    )
    return plan_step(metadata, {"vision": INSTANCES, "llm": 1}, ["llm"], microbatches=MICROBATCHES, balancing=balancing)


def work(plan: StepPlan) -> np.ndarray:
    """Of each instance over the step."""
    total: np.ndarray = plan.loads["vision"].after.sum(axis=0)
    return total


def test_work_is_even_over_the_step_and_not_in_each_microbatch() -> None:
    apart = planned(np.zeros(INSTANCES))
    assert work(apart).max() < 1.03 * work(apart).mean()
    each = apart.loads["vision"].after
    assert (each.max(axis=1) > 1.5 * each.mean(axis=1)).any()
    units = np.concatenate([a.units for a in apart.assignments["vision"]])
    assert sorted(units.tolist()) == list(range(SAMPLES))


@pytest.mark.parametrize("shares", [(0.0, 0.1, 0.2, 0.3), (0.5, 0.5, 0.5, 0.6), (0.0, 0.0, 0.0, 9.0)])
def test_ranks_that_do_more_for_others_get_less(shares: tuple[float, ...]) -> None:
    plan = planned(np.array(shares))
    of_llm = float(plan.loads["llm"].after.sum())
    total = work(plan) + of_llm * np.array(shares)
    could = (work(plan).sum() + of_llm * np.array(shares)[:3].sum()) / 3
    if shares[3] == 9.0:
        assert work(plan)[3] == 0 and total[:3].max() < 1.03 * could
    else:
        assert np.ptp(total) < 0.05 * total.max()


@pytest.mark.parametrize("asked", [{"policy": "round_robin"}, {"policy": "none"}, {"speeds": (1.0, 1.0, 2.0, 2.0)}])
def test_what_was_asked_for_is_obeyed(asked: dict[str, Any]) -> None:
    shares = np.array([0.0, 0.0, 0.0, 9.0])
    for one, other in zip(*(planned(beside, **asked).assignments["vision"] for beside in (None, shares)), strict=True):
        assert np.array_equal(one.units, other.units) and np.array_equal(one.offsets, other.offsets)


def test_a_budget_is_kept() -> None:
    plan = planned(np.array([0.0, 9.0, 9.0, 9.0]), budget=256)
    assert max(a.totals(inner=True).max() for a in plan.assignments["vision"]) <= 256
    assert work(planned(np.array([0.0, 9.0, 9.0, 9.0])))[0] > work(plan)[0]


def test_what_else_a_rank_does_is_of_its_stages() -> None:
    """An LLM whose last stage has half of its work, below an encoder with an instance on each rank and one beside."""
    layouts = {
        "vision": ModuleLayout(range(4), dp_shard=4).resolved("vision"),
        "llm": ModuleLayout(range(3), pp=3).resolved("llm"),
    }
    stages = [StageId("vision", 0), *(StageId("llm", s) for s in range(3))]
    graph = stage_graph(list(layouts), [("vision", "llm")], layouts, dict.fromkeys(stages, True), apart=["vision"])
    costs = dict(zip(stages, (StageCost(1, 0), StageCost(1, 0), StageCost(1, 0), StageCost(2, 0)), strict=True))
    given = graph, costs, ["llm"], ScheduleConfig("1f1b", fill="fine"), place(layouts, 4), 8
    np.testing.assert_allclose(model_context(*given).beside["vision"]["llm"], [0.25, 0.25, 0.5, 0.0])
    frozen = {**dict.fromkeys(stages, True), stages[0]: False}
    silent = stage_graph(list(layouts), [("vision", "llm")], layouts, frozen, apart=["vision"])
    beside = model_context(silent, *given[1:]).beside["vision"]["llm"]
    np.testing.assert_allclose(beside, [0.75, 0.75, 1.5, 0.0])  # three times a forward, of which the encoder has one
