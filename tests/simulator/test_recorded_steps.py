"""Steps made of known costs, transfers and main threads: what is fitted to them, and what is predicted of others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.monitor.timeline import from_measured
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.simulator.cluster import Links
from hetero_strategy.simulator.recorded_steps import (
    Fitted,
    Ran,
    durations,
    fitted_lines,
    links,
    points,
    predicted,
    together,
)
from hetero_strategy.simulator.result import Host, Simulation
from hetero_strategy.simulator.simulate import rows_between, simulate
from hetero_strategy.testing import Planned, Setting, planned

SETTING = Setting(
    "vision dp2 -> llm pp2 dp2",
    {"vision": ModuleLayout(ranks=[0, 1], dp_replicate=2), "llm": ModuleLayout(ranks=4, pp=2, dp_replicate=2)},
    microbatches=3,
)
LINKS = Links(latency=0.002, bandwidth=1e8)
CLOSING, BEGIN, AFTER = 0.004, 0.01, 0.0005
WORLD = range(4)
NODE = StageId("llm", 0)


def width(source: StageId, target: StageId) -> float:
    return 1024.0


@cache
def known(seed: int) -> Planned:
    return planned(SETTING, seed)


def step(seed: int, scatter: float = 0.0, slower: float = 1.0) -> tuple[Ran, Simulation]:
    """A step that took what the world's laws say; later ranks begin later."""
    given, random = known(seed), np.random.default_rng(seed)

    def cost(action: Action) -> np.ndarray:
        instances = len(given.schedule.graph.stages[action.node].grid)
        if action.microbatch < 0:
            return np.full(instances, 0.003 * slower)
        line = 0.002 + 2e-10 * given.costs.of_instances(action)
        return line * np.exp(scatter * random.normal(size=instances)) * slower

    host = Host({rank: BEGIN * (1 + rank) for rank in WORLD}, lambda action: AFTER, CLOSING)
    made = simulate(given.schedule, cost, LINKS, rows_between(given.plan, given.schedule.graph, width), host=host)
    events = {rank: made.of(rank) for rank in WORLD}
    for own in events.values():  # by the clock a rank is at a sum over ranks from when it comes to it
        for place in (i for i, (action, *_) in enumerate(own) if action.kind == "REDUCE"):
            own[place] = (own[place][0], own[place - 1][2] + AFTER, own[place][2])
    return Ran(given.plan, given.schedule, events, dict.fromkeys(WORLD, (0.0, made.time))), made


def test_what_a_step_was_made_of_is_found_again() -> None:
    steps = [step(seed)[0] for seed in range(3)]
    found = Fitted(steps, width)
    assert found.links.latency == pytest.approx(LINKS.latency, rel=0.05)
    assert found.links.bandwidth == pytest.approx(LINKS.bandwidth, rel=0.05)
    assert found.closing == pytest.approx(CLOSING)
    assert np.median(list(found.after.values())) == pytest.approx(AFTER), "some wait for a transfer behind another one"
    assert [begins[1] for begins in found.begins] == pytest.approx([2 * BEGIN] * 3)
    other, truth = step(7)
    predictions = [found.simulate(other.plan, other.schedule) for _ in range(2)]
    assert predictions[0].time == predictions[1].time == pytest.approx(truth.time, rel=0.02)
    assert predictions[0].bubble == pytest.approx(truth.bubble, abs=0.02)


def test_scatter_counts_where_ranks_wait_for_each_other_and_no_step_predicts_itself() -> None:
    steps = [step(seed, scatter=0.3)[0] for seed in range(8)]
    found = predicted(steps, width)
    measured = np.array([one.seconds for one in steps])
    ratio = np.median(measured) / np.median([one.time for one in found])
    assert ratio == pytest.approx(1.0, abs=0.15)

    def bare(one: Ran) -> float:
        """With means of actions and nothing else: what is left out is what this file is about."""
        fitted = Fitted([other for other in steps if other is not one], width)
        return simulate(one.schedule, lambda a: fitted.seconds(one.plan, one.schedule.graph, a)).time

    assert np.median(measured) / np.median([bare(one) for one in steps]) > ratio
    disturbed = [step(0, scatter=0.3, slower=5.0)[0], *steps[1:]]
    again = predicted(disturbed, width)
    assert again[0].time == found[0].time and again[1].time != found[1].time


def test_idle_means_the_same_of_what_ran_and_of_what_is_simulated() -> None:
    """A rank that comes first to a sum over ranks is at it, by the clock, while it waits for the last one."""
    ran, made = step(1)
    span = (0.0, ran.seconds)
    assert from_measured(together(ran.schedule, ran.events), span).bubble == pytest.approx(made.bubble)
    assert from_measured(ran.events, span).bubble < made.bubble - 0.02
    seconds = durations(ran.schedule, ran.events)
    assert seconds[Action("REDUCE", StageId("llm", 1))] == pytest.approx([0.003] * 2)
    of_rank_0 = [action for action, *_ in ran.events[0]]
    assert list(seconds)[: len(of_rank_0)] == of_rank_0, "predictions would be others in every process"


def test_transfers_have_a_bandwidth_only_where_it_shows() -> None:
    sizes = np.linspace(1e3, 1e6, 20)
    found = links([(size, 0.001 + size / 1e8) for size in sizes])
    assert found.latency == pytest.approx(0.001) and found.bandwidth == pytest.approx(1e8)
    noise = np.random.default_rng(0).exponential(0.002, 20)
    assert links(list(zip(sizes, noise, strict=True))) == Links(float(noise.mean()))
    assert links([(5.0, 0.5), (5.0, 1.5)]) == Links(1.0) and links([]) == Links()


def table(*seconds: tuple[float, float]) -> np.ndarray:
    """Points of (rows, seconds); no squares."""
    rows, took = np.array(seconds).T
    return np.column_stack([np.ones(len(rows)), rows, 0 * rows, took])


def test_a_line_is_found_again() -> None:
    forward, reduce = ((NODE, kind) for kind in ("F", "REDUCE"))
    half = table(*((rows, 0.5 + 2e-3 * rows) for rows in (100.0, 300.0, 700.0)))
    lines = fitted_lines([{forward: half[:1]}, {forward: half[1:], reduce: table((0.0, 0.25))}])
    assert lines[forward] == pytest.approx((0.5, 2e-3, 0.0)) and lines[reduce] == pytest.approx((0.25, 0.0, 0.0))
    ran = step(0)[0]
    found = Fitted([ran], width)
    assert found.seconds(ran.plan, ran.schedule.graph, Action("W", NODE, 0)).tolist() == [0.0, 0.0], "never measured"


def test_instances_without_rows_and_actions_of_no_time_fit_nothing() -> None:
    ran, _ = step(0)
    first, *others = ran.plan.assignments["vision"]
    count = len(first.units)
    alone = replace(first, offsets=np.array([0, count, count]), padding=np.zeros(2, np.int64))
    plan = replace(ran.plan, assignments={**ran.plan.assignments, "vision": (alone, *others)})
    forward, reduce = (StageId("vision", 0), "F"), (NODE, "REDUCE")
    assert len(points(ran._replace(plan=plan))[forward]) == len(points(ran)[forward]) - 1
    assert fitted_lines([{reduce: table((0.0, 0.0), (0.0, 0.25))}])[reduce] == pytest.approx((0.25, 0.0, 0.0))
    assert not fitted_lines([{reduce: table((0.0, 0.0))}])


def test_a_process_that_lost_the_processor_does_not_count() -> None:
    true = [(100.0 * k, 1e-3 * k) for k in range(1, 9)]
    line = fitted_lines([{(NODE, "F"): table(*true, (400.0, 1.0))}])[NODE, "F"]
    assert line.of(np.array([400.0]), np.zeros(1)) == pytest.approx([4e-3], rel=0.05)
