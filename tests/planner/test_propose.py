"""Megatron-LM's usual layout around a language model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.propose import rigid_layouts
from hetero_strategy.planner.search import Planner
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.testing.plans import batch, cluster, generator, model


def planner(ranks: int) -> Planner:
    made = model((4, 256), (8, 512))
    shape = replace(made, modules={**made.modules, "llm": replace(made.modules["llm"], keys=256)})
    given = {"balance": BalanceConfig(reorder="none"), "microbatches": 2, "simulations": 4}
    return Planner(CostModel(shape, cluster(ranks)), [batch(8)], **given)  # type: ignore[arg-type]


def test_encoders_lie_in_the_first_stage_with_an_instance_for_each_of_the_language_model() -> None:
    made = planner(16)
    llm = ModuleLayout(16, pp=2, dp_shard=2, cp=2, tp=2).resolved()
    around = rigid_layouts(made.evaluator.shape, made.estimates, llm)
    assert around["vision"].ranks == (0, 1, 4, 5) and (around["vision"].tp, around["vision"].dp_shard) == (2, 2)
    first, last = around["llm"].split or ()
    assert first + last == 8 and first < last
    lightest = rigid_layouts(made.evaluator.shape, made.estimates, llm, lighter=3.0)["llm"].split or ()
    assert lightest[0] < first


def test_the_best_of_them_is_found_and_no_faster_than_a_plan() -> None:
    """Of all that fit, simulated as plans are."""
    made = planner(4)
    peer, best = made.rigid(), made.plan().best
    assert peer is not None and peer.seconds >= best.seconds
    layouts = peer.candidate.layouts
    assert layouts["vision"].dp == layouts["llm"].dp and {*layouts["vision"].ranks} <= {*layouts["llm"].ranks}
    assert (
        len(layouts["llm"].ranks) == 4
        and (made.estimates.needed(peer.candidate, in_step=True) <= made.estimates.memory).all()
    )
    made.estimates.memory = float(np.finfo(float).tiny)
    assert made.rigid() is None


def test_generators_have_no_usual_place() -> None:
    shape, data = generator()
    assert Planner(CostModel(shape, cluster(4)), [data], balance=BalanceConfig(reorder="none")).rigid() is None
