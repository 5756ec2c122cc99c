"""Every order as the builder makes it: bubbles against their closed forms, memory against the bounds it states."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from hetero_strategy.layout.pipeline import Pipeline
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.simulator.links import Links
from hetero_strategy.simulator.result import CAUSES
from hetero_strategy.simulator.simulate import simulate
from tests.simulator.schedules import graph_of, work_of

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "UNSHARD": 0.0, "REDUCE": 0.0}
VISION, AUDIO = StageId("vision", 0), StageId("audio", 0)


def cost(action: Action) -> float:
    return COSTS[action.kind]


def pipeline(pp: int, vpp: int = 1, style: Literal["loop", "v"] = "loop") -> StageGraph:
    """One module on ``pp`` ranks."""
    layout = Pipeline(pp, vpp, style)
    graph = graph_of({StageId("llm", s): np.array([[layout.rank_of(s)]]) for s in range(layout.stages)})
    return replace(graph, pipelines={"llm": layout})


def scheduled(name: str, graph: StageGraph, microbatches: int) -> Schedule:
    return make_schedule(name, graph, work_of(graph, microbatches))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 3), (4, 8), (8, 8), (6, 13)])
def test_gpipe_and_1f1b(name: str, pp: int, microbatches: int) -> None:
    found = simulate(scheduled(name, pipeline(pp), microbatches), cost)
    assert found.time == 3 * microbatches + 3 * (pp - 1)
    assert found.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1), abs=1e-15)


@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_interleaved(pp: int, vpp: int, microbatches: int) -> None:
    """Narayanan et al. 2021: the bubble is a ``vpp``-th of 1F1B's; costs are of one of ``vpp`` chunks."""
    found = simulate(scheduled("interleaved_1f1b", pipeline(pp, vpp), microbatches), lambda a: cost(a) / vpp)
    assert found.time == pytest.approx(3 * microbatches + 3 * (pp - 1) / vpp, abs=1e-9)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_zb_h1(pp: int, microbatches: int) -> None:
    """Qi et al. 2024, table 2: a bubble of (p - 1)(F + I - W), with the memory of 1F1B's worst stage."""
    schedule = scheduled("zb_h1", pipeline(pp), microbatches)
    assert simulate(schedule, cost).time == 3 * microbatches + (pp - 1)
    assert max(schedule.in_flight.values()) <= pp


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_zbv_has_no_bubble_between_a_ranks_actions(pp: int, microbatches: int) -> None:
    found = simulate(scheduled("zbv", pipeline(pp, 2, "v"), microbatches), cost)
    assert found.time == 6 * microbatches + (pp - 1)
    inside = found.idle["dependency"] + found.idle["boundary"] + found.idle["straggler"]
    assert not inside.any()


def dag() -> StageGraph:
    """Two encoders of different depth beside one another, and an LLM of other widths; one encoder on LLM ranks."""
    grids = {
        StageId("vision", 0): np.array([[0], [1]]),
        StageId("vision", 1): np.array([[2], [3]]),
        AUDIO: np.array([[4], [5], [6]]),
        **{StageId("llm", s): np.arange(4 * s, 4 * s + 4).reshape(2, 2) + 4 for s in range(2)},
    }
    return graph_of(grids, (("vision", "llm"), ("audio", "llm")))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "sequential"])
@pytest.mark.parametrize("microbatches", [1, 5, 9])
def test_orders_of_a_dag_add_up(name: str, microbatches: int) -> None:
    found = simulate(scheduled(name, dag(), microbatches), cost, Links(0.125))
    total = sum(found.idle[cause] for cause in CAUSES) + found.busy
    np.testing.assert_allclose(total, found.time, rtol=1e-12)


def test_independent_encoders_run_beside_each_other() -> None:
    """On ranks of their own they take the time of one; on one rank the time of both."""

    def of(audio: int) -> float:
        grids = {VISION: np.array([[0]]), AUDIO: np.array([[audio]]), StageId("llm", 0): np.array([[2]])}
        graph = graph_of(grids, (("vision", "llm"), ("audio", "llm")))
        return simulate(scheduled("1f1b", graph, 16), lambda a: cost(a) * (0.1 if a.node.module == "llm" else 1)).time

    assert of(audio=1) / of(audio=0) < 0.55


def test_ten_thousand_ranks_with_encoders_on_all_of_them() -> None:
    """LLM pp16 dp78 tp8; one encoder replica on each of its 9984 ranks, another on half; 64 microbatches."""
    world = 9984
    grids = {VISION: np.arange(world)[:, None], AUDIO: np.arange(world // 2)[:, None]}
    grids |= {StageId("llm", s): np.arange(624).reshape(78, 8) + 624 * s for s in range(16)}
    schedule = scheduled("1f1b", graph_of(grids, (("vision", "llm"), ("audio", "llm"))), 64)
    begin = time.process_time()
    found = simulate(schedule, lambda a: 1e-3 * cost(a), Links(2e-5))
    assert time.process_time() - begin < 30
    assert len(found.ranks) == world
    np.testing.assert_allclose(sum(found.idle[c] for c in CAUSES) + found.busy, found.time, rtol=1e-9)
