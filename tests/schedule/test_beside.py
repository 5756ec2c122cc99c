"""What fills runs beside actions whose ranks wait for collectives: by hand, and against the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hetero_strategy import HeteroStrategy
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StageId
from hetero_strategy.schedule.beside import speed
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.simulator.bubbles import work_on_rank
from hetero_strategy.simulator.result import Simulation
from hetero_strategy.simulator.simulate import simulate
from tests.schedule.cases import work

EDGES = [("vision", "llm")]
Seconds = Callable[[Action], float]


def stages(pp: int, *, tp: int = 1, pieces: int = 1, frozen: bool = False) -> StageGraph:
    """A language model over ``pp`` stages, and on each of their ranks instances of an encoder of ``tp`` ranks."""
    layouts = {"vision": ModuleLayout(pp, dp_shard=pp // tp, tp=tp), "llm": ModuleLayout(pp, pp=pp)}
    layouts = {name: layout.resolved(name) for name, layout in layouts.items()}
    layouts["vision"] = replace(layouts["vision"], vpp=pieces)
    trains = {StageId(n, s): n == "llm" or not frozen for n, x in layouts.items() for s in range(x.pipeline.stages)}
    return stage_graph(list(layouts), EDGES, layouts, trains, apart=["vision"])


def costs(vision: float, llm: float = 1.0) -> Seconds:
    """A forward's seconds; a backward takes twice as long, half of one that is divided."""
    return lambda a: (vision if a.node.module == "vision" else llm) * {"F": 1, "B": 2, "I": 1, "W": 1}.get(a.kind, 0)


def bubbles(cost: Seconds, llm: float, vision: float = 0.0) -> Seconds:
    """These shares of actions."""
    return lambda a: cost(a) * (vision if a.node.module == "vision" else llm)


def both(graph: StageGraph, count: int, cost: Seconds, part: Seconds, name: str = "1f1b",
         bounds: dict[str, int] | None = None) -> tuple[Schedule, Simulation]:  # fmt: skip
    """A schedule, which has no fault, and its simulation."""
    steps = work(count, "vision", "llm", edges=EDGES)
    made = make_schedule(name, graph, steps, cost, bubbles=part, max_in_flight=bounds)
    check(made)
    return made, simulate(made, cost, bubbles=part)


@pytest.mark.parametrize(
    ("spare", "compute", "expected"),
    [(1.0, 1.0, 1.0), (0.5, 1.0, 0.5), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.25, 0.5, 1 / 2.5)],
)
def test_speed(spare: float, compute: float, expected: float) -> None:
    assert speed(spare, compute) == pytest.approx(expected)


def test_a_step_by_hand() -> None:
    """The pipeline waits for 2 seconds of encoding on each of its ranks, and has nothing to fill then."""
    graph, cost = stages(2, frozen=True), costs(2.0, 4.0)
    _, found = both(graph, 1, cost, bubbles(cost, 0.0))
    assert found.time == 2 + 2 * 4 + 2 * 8
    of_cohorts = {a.node.cohort: (float(found.start[a][0]), float(found.end[a][0])) for a in found.beside}
    assert of_cohorts == {0: (0.0, 2.0), 1: (0.0, 2.0)}
    # A trained encoder's backward follows the last backward of the first stage, at full speed.
    trained = both(stages(2), 1, cost, bubbles(cost, 0.0))[1]
    assert trained.time == 2 + 2 * 4 + 2 * 8 + 4


def test_bubbles_inside_actions_are_used() -> None:
    """One microbatch's encoding fits into half of the four seconds for which the stage computes the one before."""
    graph, cost = stages(2, frozen=True), costs(2.0, 4.0)
    for share, ends in ((0.5, 2 + 4), (0.25, 2 + 4 + 1)):
        _, found = both(graph, 2, cost, bubbles(cost, share))
        second = Action("F", StageId("vision", 0, 0), 1)
        assert found.end[second].tolist() == [ends]
        assert found.used.tolist() == [share * 4, 0.0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("pp", "tp", "pieces"), [(2, 1, 1), (4, 2, 1), (4, 1, 3), (4, 4, 2)])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.3, 0.2), (0.9, 0.5)])
def test_what_orders_are_built_with_is_what_is_simulated(
    name: str, pp: int, tp: int, pieces: int, shares: tuple[float, float]
) -> None:
    """Actions start in the order of the simulated clock, whose work is all there."""
    graph, cost = stages(pp, tp=tp, pieces=pieces), costs(0.37 / pieces)
    made, found = both(graph, 8, cost, bubbles(cost, *shares), name)
    starts = [float(found.start[a].min()) for a in made.starts if a.microbatch >= 0]
    assert all(a <= b + 1e-9 for a, b in pairwise(starts))
    assert work_on_rank(found, ["vision"]) == pytest.approx(8 * 3 * 0.37)
    for rank in range(pp):
        own = [a for a in made.of(rank) if a.node.module == "llm"]
        assert all(found.end[a] <= found.start[b] + 1e-9 for a, b in pairwise(own))
    assert found.busy + sum(found.idle.values()) == pytest.approx([found.time] * pp)
    assert all((seconds >= -1e-9).all() for seconds in found.idle.values())


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_instances_that_take_longer_are_waited_for_where_their_rows_are_needed(slow: float) -> None:
    """Two instances of the pipeline; orders know the mean of the encoders of each stage."""
    layouts = {"vision": ModuleLayout(4, dp_shard=4), "llm": ModuleLayout(4, pp=2, dp_shard=2)}
    layouts = {name: layout.resolved(name) for name, layout in layouts.items()}
    trains = {StageId(n, s): True for n, x in layouts.items() for s in range(x.pipeline.stages)}
    graph = stage_graph(list(layouts), EDGES, layouts, trains, apart=["vision"])
    mean = costs((1 + slow) / 8)
    made = make_schedule("1f1b", graph, work(8, "vision", "llm", edges=EDGES), mean, bubbles=bubbles(mean, 0.3))

    def each(action: Action) -> np.ndarray:
        own = np.array([2.0, 2.0 * slow]) / (1 + slow) if action.node.module == "vision" else np.ones(2)
        return own * mean(action)

    found = simulate(made, each, bubbles=lambda action: each(action) * (0.3 if action.node.module == "llm" else 0.0))
    assert all((seconds >= -1e-9).all() for seconds in found.idle.values())
    for rank in range(4):
        instance = rank % 2
        first, second = (
            [a for a in made.of(rank) if (a.node.module == "llm") == llm and a.microbatch >= 0] for llm in (True, False)
        )
        for own in (first, second):
            assert all(found.end[a][instance] <= found.start[b][instance] + 1e-9 for a, b in pairwise(own))
        # What ran beside others went on no faster than these let it.
        for action in second:
            begin, end = found.start[action][instance], found.end[action][instance]
            spans = [(found.start[a][instance], found.end[a][instance]) for a in first]
            busy = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans)
            assert (end - begin) - 0.7 * busy == pytest.approx(each(action)[instance])


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_more_bubbles_and_no_longer_steps(name: str) -> None:
    graph, cost = stages(4), costs(0.5)
    times = [both(graph, 12, cost, bubbles(cost, share), name)[1].time for share in (0.0, 0.2, 0.4, 0.8)]
    assert all(a >= b for a, b in pairwise(times)) and times[-1] < 0.97 * times[0]
    steps = work(12, "vision", "llm", edges=EDGES)
    serial = simulate(make_schedule(name, graph, steps, cost, fill="fine"), cost).time
    alone = graph.without(["vision"])
    least = simulate(make_schedule(name, alone, work(12, "llm"), cost), cost).time
    assert times[0] <= serial and least <= times[-1] <= least + 4 * cost(Action("F", StageId("vision", 0), 0)) * 1.5


def test_bounds_on_memory_are_kept() -> None:
    graph, cost = stages(4), costs(0.1)
    made, _ = both(graph, 12, cost, bubbles(cost, 0.5), bounds={"vision": 3})
    assert max(most for node, most in made.in_flight.items() if node.module == "vision") == 3
    free, _ = both(graph, 12, cost, bubbles(cost, 0.5))
    assert max(most for node, most in free.in_flight.items() if node.module == "vision") > 3


@pytest.mark.parametrize(
    ("given", "fill", "message"),
    [
        ({"llm": 1.5}, "fine", "share of each module's time"),
        ({"llm": True}, "fine", "share of each module's time"),
        ({"llm": "much"}, "fine", "share of each module's time"),
        ({"llm": 0.1}, "search", "fill='search': encoders run in these bubbles with fill='fine'"),
        ({"llm": 0.1}, "auto", "fill='auto': encoders run"),
    ],
)
def test_what_is_refused(given: dict[str, float], fill: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(fill=fill, tp_bubbles=given)


@pytest.mark.parametrize("options", [{"async_tp": True}, {"layouts": "auto"}])
def test_what_would_share_buffers_or_is_planned_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        HeteroStrategy(fill="fine", tp_bubbles={"llm": 0.1}, **options)


def test_bubbles_of_what_has_none_are_refused() -> None:
    config = ScheduleConfig(fill="fine", tp_bubbles={"llm": 0.1})
    layouts = {"vision": ModuleLayout(4, dp_shard=4), "llm": ModuleLayout(4, pp=2, tp=2)}
    config.check_bubbles(["vision"], layouts)
    with pytest.raises(ConfigError, match="no module feeds a pipeline"):
        config.check_bubbles([], layouts)
    with pytest.raises(ConfigError, match="names 'llm'; modules with tp above 1 are none"):
        config.check_bubbles(["vision"], {**layouts, "llm": ModuleLayout(4, pp=4)})
