"""What a step waits for besides its actions, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.row_sharding import REPLICATED
from hetero_strategy.model.spec import ModelSpec, ModuleSpec
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.deal_rows import RankWork
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator, Step
from hetero_strategy.planner.explain import work_of
from hetero_strategy.planner.step_seconds import ActionSeconds, seconds_after, work_of_ranks
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.simulator.cluster import Cluster, Device, Links
from hetero_strategy.simulator.cost_model import CostModel, Overlap
from hetero_strategy.simulator.stage_times import Line
from hetero_strategy.testing.plans import cluster, generator

BLOCKS, LLM = 4, StageId("llm", 0)
SHAPE = ModelSpec(
    {
        "llm": ModuleSpec(
            per_row=np.full(BLOCKS, 1.0), per_pair=np.zeros(BLOCKS), parameters=np.full(BLOCKS, 1000),
            trained=np.full(BLOCKS, 1000), trained_share=np.ones(BLOCKS), has_blocks=True, width=1, edge_width=1,
            tp=(1,), row_shardings={1: REPLICATED}, samplewise=True, stored=np.zeros((BLOCKS, 2, 2, 2), np.int64),
            largest=np.zeros(BLOCKS, np.int64), buffers=0, moved=np.zeros(BLOCKS),
        )
    },
    (),
)  # fmt: skip


def step(
    overlap: Overlap, bandwidth: float, pp: int = 1, microbatches: int = 4, schedule: str = "1f1b", cp: int = 1
) -> Step:
    device = Device("toy", flops=1.0, memory=1e9, memory_bandwidth=28000.0, matmul=1.0, attention=1.0)
    toys = Cluster(device, 1, 2 * pp, Links(0.0, bandwidth), Links())
    tokens = np.full(2 * microbatches, 10)
    batch = StepMetadata(0, 0, np.arange(len(tokens)), tokens, tokens - 1, {})
    evaluator = Evaluator(CostModel(SHAPE, toys, overlap=overlap), [batch])
    layout = ModuleLayout(2 * pp, dp_shard=2 // cp, cp=cp, pp=pp, split=(BLOCKS // pp,) * pp)
    return evaluator.step(
        evaluator.place(Candidate({"llm": layout}, microbatches, schedule, reshard_after_forward="never"))
    )


FORWARD, BACKWARD = 40.0, 70.0
"""Seconds of 10 rows in 4 blocks, of which the first makes no gradient of its rows."""
ADAM = 4 * 1000 / 2 * 28 / 28000.0


def test_collectives_of_their_own_are_added_to_compute() -> None:
    found = step(Overlap(), bandwidth=100.0)
    gather, reduce = 4000 * 2 / 2 / 100.0, 4000 * 4 / 2 / 100.0
    assert found.seconds == pytest.approx(gather + 4 * (FORWARD + BACKWARD) + reduce + ADAM)


def test_each_context_parallel_rank_works_for_its_own_pairs_and_the_slowest_counts() -> None:
    found, one = step(Overlap(), bandwidth=100.0, cp=2), Line(0.0, 0.0, 1.0)
    times = {
        node: replace(of, forward=one, input=one, weight=one, gather=0.0, reduce=0.0)
        for node, of in found.placed.times.items()
    }
    squares = np.tile([1.0, 3.0], (4, 1, 1))
    seconds = ActionSeconds(found.plan, found.placed.graph, times, {"llm": RankWork(squares, 0 * squares)})
    assert seconds(Action("B", LLM, 0)).tolist() == [6.0]
    assert work_of_ranks(found.schedule, seconds, {}, 2).tolist() == [4 * 3.0, 4 * 9.0]


def test_fast_collectives_beside_compute_take_no_time() -> None:
    found = step(Overlap(dp=True), bandwidth=200.0)  # 20 s beside a forward of 40, 40 s beside a backward of 70
    assert found.seconds == pytest.approx(4 * (FORWARD + BACKWARD) + ADAM)


def test_of_slow_collectives_the_rest_is_waited_for() -> None:
    found = step(Overlap(dp=True), bandwidth=50.0)  # 80 s beside a forward of 40, 160 s beside a backward of 70
    assert found.seconds == pytest.approx((80 - FORWARD) + 4 * (FORWARD + BACKWARD) + (160 - BACKWARD) + ADAM)


def test_what_travels_beside_compute_is_work_of_its_module() -> None:
    found = step(Overlap(dp=True), bandwidth=50.0)
    assert work_of(found, ("llm",)) == pytest.approx(4 * (FORWARD + BACKWARD) + 80 + 160)
    assert work_of(found, ()) == 0.0


def test_sums_follow_the_last_half_of_a_backward() -> None:
    """Two stages, each with a sum of 80 s: what makes gradients of weights is in halves in the second one's last."""
    found = step(Overlap(dp=True), bandwidth=50.0, pp=2, schedule="zb_h1")
    simulation = found.simulation
    lasts = {node: [a for a in simulation.end if a.node == node and a.kind == "W"] for node in found.placed.times}
    ends = {node: max(float(simulation.end[a].max()) for a in actions) for node, actions in lasts.items() if actions}
    assert ends
    times = {s: replace(t, gather=0.0, after=0.0, reduce=80.0 * (s in ends)) for s, t in found.placed.times.items()}
    assert seconds_after(simulation, times).total == pytest.approx(max(ends.values()) + 80 - simulation.time)


def test_sums_of_a_stage_run_beside_what_other_stages_do() -> None:
    """Two stages, each with a sum of 80 s: the second's begins with its last backward, before that of the first."""
    found = step(Overlap(dp=True), bandwidth=50.0, pp=2)
    times = {s: replace(t, reduce=t.reduce if s.stage else 0.0, gather=0.0) for s, t in found.placed.times.items()}
    rows = 0.4
    assert seconds_after(found.simulation, times).total == pytest.approx(max(80 - 40 - 30 - rows, 0.0) + ADAM / 2)


def test_later_stages_have_more_time_to_gather() -> None:
    """Two stages of half the model, each 40 s to gather: the first has a forward of 20, the second 40."""
    found = step(Overlap(dp=True), bandwidth=50.0, pp=2)
    reduce = 80.0 - 30.0  # beside the first stage's backward, which ends the step
    assert found.after.total == pytest.approx((40 - 20) + reduce + ADAM / 2)


def test_the_latest_stage_delays_the_step() -> None:
    found = step(Overlap(dp=True), bandwidth=50.0, pp=2)
    times = {s: replace(t, reduce=0.0, after=0.0) for s, t in found.placed.times.items()}
    alone = seconds_after(found.simulation, times).total
    first, second = sorted(times)
    later = {first: times[first], second: replace(times[second], gather=10 * times[second].gather)}
    assert alone == pytest.approx(20.0)
    assert seconds_after(found.simulation, later).total == pytest.approx(400 - 40 - 0.4)  # rows travel for 0.4 s


def test_instances_on_their_own_that_train_nothing_have_no_sum_to_wait_for() -> None:
    """A frozen generator passes gradients on to the language model."""
    shape, data = generator(trains=False)
    evaluator = Evaluator(CostModel(shape, cluster(4)), [data], balance=BalanceConfig(reorder="none"))
    layouts = {"llm": ModuleLayout(4, pp=4), "draw": ModuleLayout(4, dp_shard=4)}
    found = evaluator.step(evaluator.place(Candidate(layouts, 8, fill="fine")))
    assert "draw" in found.placed.graph.apart
    assert {a.node.module for a in found.simulation.start if a.kind == "B"} == {"llm", "draw"}
    assert {a.node.module for a in found.simulation.start if a.kind == "REDUCE"} == {"llm"}
