"""Schedules that a search makes shorter: proven by the checker, never longer than without it, the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.policies import schedules
from tests.schedule.cases import cases, chain, makespan, work
from tests.schedule.test_cohorts import EDGES, costs, stages

Cost = Callable[[Action], float]


def ragged(seed: int) -> Cost:
    """Times of microbatches that differ up to tenfold, by node; none of what is done once a step."""

    def cost(action: Action) -> float:
        if action.microbatch < 0:
            return 0.0
        node = action.node
        key = [seed, node.stage, node.cohort + 1, action.microbatch, len(node.module)]
        return float(np.random.default_rng(key).lognormal(0, 0.6)) * (1 + (action.kind == "B"))

    known: dict[Action, float] = {}
    return lambda action: known.setdefault(action, cost(action))


def cohorts(pp: int, count: int) -> tuple[StageGraph, StepWork]:
    """An encoder on every rank of a pipeline."""
    graph = stages(ModuleLayout(range(pp), dp_shard=pp), ModuleLayout(range(pp), pp=pp))
    return graph, work(count, "vision", "llm", edges=EDGES)


def text(schedule: Schedule, rank: int) -> str:
    """A rank's list; the encoder's actions in lower case."""
    names = ((a.kind if a.node.module == "llm" else a.kind.lower(), a.microbatch) for a in schedule.of(rank))
    return " ".join(f"{kind}{number}" for kind, number in names if number >= 0)


def test_what_it_finds_by_hand() -> None:
    """Three ranks, four microbatches: f3 before B2 fills no bubble of rank 2, but the other ranks wait for it."""
    graph, steps = cohorts(3, 4)
    fine, found = (make_schedule("1f1b", graph, steps, costs(1.0), fill=fill) for fill in ("fine", "search"))
    assert (makespan(fine, costs(1.0)), makespan(found, costs(1.0))) == (26, 25)
    assert text(fine, 2) == "f0 f1 f2 F0 B0 F1 B1 F2 B2 f3 b0 F3 B3 b1 b2 b3"
    assert text(found, 2) == "f0 f1 f2 F0 B0 F1 B1 F2 f3 B2 b0 F3 B3 b1 b2 b3"


@pytest.mark.parametrize("name", [name for name in schedules() if name != "sequential"])
@given(st.data())
@settings(max_examples=25, deadline=None, phases=(Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
def test_any_graph_is_no_longer_and_holds_no_more(name: str, data: st.DataObject) -> None:
    graph, steps = data.draw(cases(name))
    cost = ragged(data.draw(st.integers(0, 99)))
    bounds = data.draw(st.sampled_from([{}, {"llm": 3}, {"vision": 2}]))
    bounds = {module: bound for module, bound in bounds.items() if module in graph.pipelines}

    def of(fill: str) -> Schedule | None:
        try:
            return make_schedule(name, graph, steps, cost, max_in_flight=bounds, fill=fill)
        except ScheduleError:
            return None

    fine, coarse, found = of("fine"), of("coarse"), of("search")
    assert (fine is None) == (found is None)
    if fine is None or found is None:
        return
    check(found)
    for other in (fine, coarse):
        assert other is None or makespan(found, cost) <= makespan(other, cost) * (1 + 1e-9)
    for node, held in found.in_flight.items():
        assert held <= bounds.get(node.module, max(one.in_flight[node] for one in (fine, coarse) if one))
    again = of("search")
    assert again is not None and again.starts == found.starts


@pytest.mark.parametrize(("name", "least"), [("1f1b", 0.017), ("zb_h1", 0.007)])
def test_it_gains_on_ragged_microbatches(name: str, least: float) -> None:
    """In the mean of some steps; the floor is half of what was measured."""
    graph, steps = cohorts(6, 12)
    ratios = []
    for seed in range(6):
        fine, found = (
            makespan(make_schedule(name, graph, steps, ragged(seed), fill=fill), ragged(seed))
            for fill in ("fine", "search")
        )
        ratios.append(found / fine)
    assert max(ratios) <= 1 + 1e-9 and np.mean(ratios) < 1 - least


def test_a_bound_is_used() -> None:
    """A stage may hold more than its schedule needs where ``max_in_flight`` says so."""
    graph, steps, cost = chain(4), work(12), ragged(5)
    fine, own, more = (
        make_schedule("1f1b", graph, steps, cost, fill=fill, max_in_flight=bounds)
        for fill, bounds in (("fine", {}), ("search", {}), ("search", {"llm": 8}))
    )
    assert own.in_flight == fine.in_flight
    assert 4 < max(more.in_flight.values()) <= 8
    assert makespan(more, cost) < makespan(own, cost) <= makespan(fine, cost)


def test_the_same_in_every_process() -> None:
    code = """
from tests.schedule.test_shorten import cohorts, ragged
from hetero_strategy.schedule.build import make_schedule
print(*make_schedule("zb_h1", *cohorts(3, 6), ragged(1), fill="search").starts)
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] and said[0].count(b"vision") > 18
