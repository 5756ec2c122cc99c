"""Why a plan takes as long as it does: waits for collectives by hand, and steps before their bubbles are filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.explain import ExposedCollectives, explain, unfilled
from hetero_strategy.schedule.action import Action, Kind, StageId
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.balance_context import ROW_ALIGNMENT
from hetero_strategy.simulator.cluster import Links
from hetero_strategy.simulator.cost_model import SEPARATE, CostModel, Overlap
from hetero_strategy.simulator.result import inside_actions
from hetero_strategy.testing.plans import batch, cluster, model, module

PLAIN = BalanceConfig(reorder="none")
ROWS, WIDTH, BLOCKS, LATENCY, BANDWIDTH = 8, 256, 4, 1e-5, 1e10
PARAMETERS = BLOCKS * 12 * WIDTH**2
LLM = StageId("llm", 0)


def ring(size: float, collectives: int = 1) -> float:
    """Seconds of so many collectives of two ranks, of ``size`` bytes together."""
    return collectives * LATENCY + size / 2 / BANDWIDTH


def waits(candidate: Candidate, overlap: Overlap = SEPARATE, keys: int = 0) -> dict[Kind, dict[str, float]]:
    """Kind of action -> collective -> seconds, of a language model with a sample of 8 rows for each instance."""
    shape = ModelSpec({"llm": replace(module(BLOCKS, WIDTH, samplewise=True), keys=keys)}, ())
    tokens = np.full(candidate.layouts["llm"].resolved().dp, ROWS)
    data = StepMetadata(0, 0, np.arange(len(tokens)), tokens, tokens - 1, {})
    evaluator = Evaluator(CostModel(shape, cluster(2), overlap=overlap), [data])
    step = evaluator.step(evaluator.place(candidate))
    exposed = ExposedCollectives(evaluator, step)
    found: dict[Kind, dict[str, float]] = {}
    for action in step.simulation.start:
        found[action.kind] = {name: float(seconds[0]) for name, seconds in exposed(action).items()}
    return found


@pytest.mark.parametrize("again", [0, 1])
def test_rows_of_tensor_parallel_ranks_are_waited_for_in_forward_backward_and_what_is_recomputed(again: int) -> None:
    transforms = {"llm": [Recompute()]} if again else {}
    layouts = {"llm": ModuleLayout(2, tp=2)}
    found = waits(Candidate(layouts, transforms=transforms))
    of_block = 4 * ring(2 * (2 * ROW_ALIGNMENT) * WIDTH)  # the 8 rows are filled up
    assert found["F"]["tensor parallel"] == pytest.approx(BLOCKS * of_block)
    # No gradient has to reach the rows of the first block.
    assert found["B"]["tensor parallel"] == pytest.approx((BLOCKS - 1 + again * BLOCKS) * of_block)
    assert not any(seconds[name] for seconds in found.values() for name in seconds if name != "tensor parallel")
    beside = waits(Candidate(layouts, transforms=transforms), Overlap(tp=True))
    assert 0 < beside["F"]["tensor parallel"] < found["F"]["tensor parallel"]


def test_keys_of_context_parallel_ranks_are_waited_for_in_forward_and_twice_in_backward() -> None:
    """Of 8 rows rank 0 has 0 1 6 7 and lacks 2 to 5; attention hides all groups of heads but one of four."""
    found = waits(Candidate({"llm": ModuleLayout(2, cp=2)}, reshard_after_forward="never"), keys=6)
    of_block = LATENCY + 4 * 2 * 6 / BANDWIDTH / 4
    assert found["F"]["context parallel"] == pytest.approx(BLOCKS * of_block)
    assert found["B"]["context parallel"] == pytest.approx(2 * BLOCKS * of_block), "the first block's, too"
    assert not any(found[kind]["tensor parallel"] for kind in ("F", "B"))
    found = waits(Candidate({"llm": ModuleLayout(2, cp=2, cp_form="heads")}, reshard_after_forward="never"), keys=6)
    assert found["F"]["context parallel"] > 0 == found["F"]["tensor parallel"]


def test_parameters_and_gradients_are_waited_for_once() -> None:
    layouts = {"llm": ModuleLayout(2, dp_shard=2)}
    found = waits(Candidate(layouts, reshard_after_forward="never"))
    assert found["UNSHARD"] == {"all-gather": pytest.approx(ring(2 * PARAMETERS, BLOCKS))}
    assert found["REDUCE"] == {"reduce-scatter": pytest.approx(ring(4 * PARAMETERS, BLOCKS))}
    assert not any({**found["F"], **found["B"]}.values())


def test_or_in_every_microbatch_as_far_as_they_take_longer_than_compute() -> None:
    found = waits(Candidate({"llm": ModuleLayout(2, dp_shard=2)}, reshard_after_forward="always"))
    launch, matmul, attention = 1e-5, 1e12 * 0.5, 1e12 * 0.4
    forward = BLOCKS * (launch + ROWS * 24.0 * WIDTH**2 / matmul + ROWS**2 * 4.0 * WIDTH / attention)
    gather, reduce = ring(2 * PARAMETERS, BLOCKS), ring(4 * PARAMETERS, BLOCKS)
    assert gather > forward
    assert found["F"]["all-gather"] == pytest.approx(gather - forward)
    assert found["F"]["reduce-scatter"] == found["F"]["tensor parallel"] == 0.0
    backward = found["B"]["all-gather"] + found["B"]["reduce-scatter"]
    assert found["B"]["reduce-scatter"] / backward == pytest.approx(reduce / (gather + reduce))
    assert 0 < backward < gather + reduce


def test_steps_before_their_bubbles_are_filled() -> None:
    """Equal samples on links that take no time: the pipeline alone has its closed form."""
    samples, pp, rows = 8, 4, 128
    numbers, tokens = np.arange(samples), np.full(samples, 2 * rows)
    items = StepItems(numbers, np.full(samples, rows), np.zeros(samples, np.int64), np.full(samples, 4 * rows))
    free = replace(cluster(pp), within=Links(), across=Links())
    data = StepMetadata(0, 0, numbers, tokens, tokens - 1, {"vision": items})
    evaluator = Evaluator(CostModel(model(), free), [data], balance=PLAIN)
    layouts = {"vision": ModuleLayout(pp, dp_replicate=pp), "llm": ModuleLayout(pp, pp=pp, split=(2,) * pp)}
    candidate = Candidate(layouts, samples, schedule="1f1b", fill="fine")
    step = evaluator.step(evaluator.place(candidate))
    found = unfilled(evaluator, step)
    assert found is not None and found.filling.modules == ("vision",)
    seconds = [float(ExposedCollectives(evaluator, step)._seconds(Action(k, LLM, 0))[0]) for k in ("F", "B")]
    optimizer = step.placed.times[LLM].after
    assert found.filling.alone == pytest.approx((samples + pp - 1) * sum(seconds) + optimizer)
    assert found.alone.shares["vision"] == 0.0 and found.alone.shares["llm"] > 0.6
    assert found.in_turns == pytest.approx(evaluator.seconds(replace(candidate, fill="none")))
    work = explain(evaluator, step).shares["vision"] * step.seconds
    assert found.filling.work == pytest.approx(work)
    assert found.filling.step == step.seconds
    assert found.filling.alone < step.seconds < found.in_turns
    assert 0.1 < found.filling.efficiency < 1.0
    assert unfilled(evaluator, evaluator.step(evaluator.place(replace(candidate, fill="none")))) is None
    for fill in ("fine", "decoupled"):  # as a person asks: in turns all the same
        told = evaluator.on(cluster=free, asked=ScheduleConfig(fill=fill))
        asked = unfilled(told, told.step(told.place(candidate)))
        assert asked is not None and asked.turns == found.turns
    decoupled = unfilled(evaluator, evaluator.step(evaluator.place(replace(candidate, fill="decoupled"))))
    assert decoupled is not None and decoupled.in_turns == found.in_turns  # there encoders compute nothing again


def test_what_is_waited_for_inside_actions_and_outside_of_them() -> None:
    evaluator = Evaluator(CostModel(model(), cluster(4)), [batch(16)], balance=PLAIN)
    layouts = {"vision": ModuleLayout(4, dp_shard=2, tp=2), "llm": ModuleLayout(4, pp=2, tp=2)}
    step = evaluator.step(evaluator.place(Candidate(layouts, 8, fill="fine")))
    found = explain(evaluator, step)
    seconds = inside_actions(step.simulation, ExposedCollectives(evaluator, step))
    seconds["all-gather"] += step.after.gathers
    seconds["reduce-scatter"] += step.after.sums
    assert step.after.sums > 0 and found.optimizer == step.after.rest / step.seconds
    assert found.collectives == {name: pytest.approx(n / step.seconds) for name, n in seconds.items()}
    assert found.collectives["reduce-scatter"] > 0 and found.collectives["tensor parallel"] > 0.01
    assert sum(found.collectives.values()) < sum(found.shares.values())
