"""Optimus: coarse filling around a pipeline, and encoders beside collectives, by hand and against one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.papers.optimus import MergeBeside, adjusted, beside_collectives, speed
from hetero_strategy.schedule.action import Action, StageGraph, StageId
from hetero_strategy.schedule.action_index import ActionIndex
from hetero_strategy.schedule.build import make_schedule, step_programs
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.schedule.policies import schedule_policy
from hetero_strategy.schedule.programs import duration, interleaved, one_forward_one_backward
from hetero_strategy.testing import Pool
from tests.distributed.stepping import data, steps_on_rank
from tests.distributed.test_filling import COUNTS, check_placement
from tests.schedule.cases import makespan, work

EDGES = [("vision", "llm")]
Seconds = Callable[[Action], float]


def stages(pp: int, *, tp: int = 1, pieces: int = 1, frozen: bool = False) -> StageGraph:
    """A language model over ``pp`` stages, and on each of their ranks instances of an encoder of ``tp`` ranks."""
    layouts = {"vision": ModuleLayout(pp, dp_shard=pp // tp, tp=tp), "llm": ModuleLayout(pp, pp=pp)}
    layouts = {name: layout.resolved(name) for name, layout in layouts.items()}
    layouts["vision"] = replace(layouts["vision"], vpp=pieces, pp_style="consecutive")
    trains = {StageId(n, s): n == "llm" or not frozen for n, x in layouts.items() for s in range(x.pipeline.stages)}
    return stage_graph(list(layouts), EDGES, layouts, trains, apart=["vision"])


def costs(vision: float, llm: float = 1.0) -> Seconds:
    """A forward's seconds; a backward takes twice as long, half of one that is divided."""
    return lambda a: (vision if a.node.module == "vision" else llm) * {"F": 1, "B": 2, "I": 1, "W": 1}.get(a.kind, 0)


def waits(cost: Seconds, llm: float, vision: float = 0.0) -> Seconds:
    """These shares of actions."""
    return lambda a: cost(a) * (vision if a.node.module == "vision" else llm)


def beside(graph: StageGraph, count: int, cost: Seconds, wait: Seconds, name: str = "1f1b") -> float:
    steps = work(count, "vision", "llm", edges=EDGES)
    return beside_collectives(name, graph, steps, cost, wait)[1]


def starts(graph: StageGraph, count: int, cost: Seconds, wait: Seconds, bounds: dict[str, int]) -> list[Action]:
    """Actions in the order in which they start beside each other."""
    numbers = ActionIndex(graph, work(count, "vision", "llm", edges=EDGES), train=True, splits=False, costs=cost)
    step = step_programs(schedule_policy("1f1b"), graph, work(count, "vision", "llm", edges=EDGES), numbers, bounds)
    order = MergeBeside(step, [0.0 if a is None else wait(a) for a in numbers.actions]).run()
    assert order is not None
    return [action for number in order if (action := numbers.actions[number]) is not None]


def test_coarse_is_around_the_pipeline() -> None:
    graph, steps = stages(4), work(8, "vision", "llm", edges=EDGES)
    schedule = make_schedule("1f1b", graph, steps, costs(0.05), fill="coarse")
    check(schedule)
    for rank in range(4):
        text = "".join(
            a.kind.lower() if a.node.module == "vision" else a.kind for a in schedule.of(rank) if a.microbatch >= 0
        )
        assert re.fullmatch("f{8}[FB]{16}b{8}", text)
    with pytest.raises(ScheduleError, match="fill='coarse' holds all microbatches of vision, max_in_flight allows 3"):
        make_schedule("1f1b", graph, steps, max_in_flight={"vision": 3}, fill="coarse")
    assert ScheduleConfig(fill="coarse").fills


def test_fine_takes_no_longer_than_coarse() -> None:
    for ratio, name in ((0.05, "1f1b"), (0.3, "1f1b"), (0.3, "zb_h1")):
        graph, steps, cost = stages(4, pieces=2), work(8, "vision", "llm", edges=EDGES), costs(ratio)
        fine, coarse = (
            makespan(make_schedule(name, graph, steps, cost, fill=fill), cost) for fill in ("fine", "coarse")
        )
        assert fine <= coarse * (1 + 1e-9)


def test_warm_ups_are_adjusted_as_in_figure_12() -> None:
    """On the first rank forwards 5 to 8 come after the first backward of the second stage, and none takes longer."""
    pipeline = ModuleLayout(4, pp=4, vpp=2).resolved("llm").pipeline
    before = interleaved(pipeline, 8, 0, tuple(range(1, 9)))
    after = adjusted(pipeline, before)

    def text(program: Sequence[tuple[int, int, int]]) -> str:
        return " ".join(f"{'FBW'[kind]}{place + 1}{'*' * (stage // 4)}" for kind, stage, place in program)

    assert text(before[0]).startswith("F1 F2 F3 F4 F1* F2* F3* F4* F5 F6 F7 B1* F8 B2*")
    assert text(after[0]).startswith("F1 F2 F3 F4 F1* F2* F3* F4* B1* F5 B2* F6 B3* F7 B4* B1 F8")
    assert duration(pipeline, after) == duration(pipeline, before)
    plain = tuple(one_forward_one_backward(stage, [min(8, j + 4 - stage) for j in range(8)]) for stage in range(4))
    assert adjusted(ModuleLayout(4, pp=4).resolved("llm").pipeline, plain) == plain


@pytest.mark.parametrize(("vpp", "ratio", "most"), [(1, 0.5, 1.0), (2, 0.3, 1.0), (2, 0.6, 0.95), (3, 0.5, 1.0)])
def test_a_filled_step_is_no_longer_with_adjusted_warm_ups(vpp: int, ratio: float, most: float) -> None:
    layouts = {"vision": ModuleLayout(4, dp_shard=4), "llm": ModuleLayout(4, pp=4, vpp=vpp)}
    layouts = {name: layout.resolved(name) for name, layout in layouts.items()}
    trains = {StageId(n, s): True for n, x in layouts.items() for s in range(x.pipeline.stages)}
    graph, cost = stage_graph(list(layouts), EDGES, layouts, trains, apart=["vision"]), costs(ratio * vpp)
    name, steps = "1f1b" if vpp == 1 else "interleaved_1f1b", work(8, "vision", "llm", edges=EDGES)
    made = {fill: make_schedule(name, graph, steps, cost, fill=fill) for fill in ("fine", "adjusted")}
    check(made["adjusted"])
    assert makespan(made["adjusted"], cost) <= most * makespan(made["fine"], cost) * (1 + 1e-9)
    if most < 1:  # the encoder's fifth microbatch is due later: after the first backward of the rank that reads it
        due = {
            fill: [a for a in one.of(0) if a.node.module == "llm"].index(Action("F", StageId("llm", 0), 4))
            for fill, one in made.items()
        }
        assert due["adjusted"] > due["fine"]


def steps_of_coarse(*given: Any) -> Any:
    """Run steps in a process that knows the fill, since it imports this module."""
    return steps_on_rank(*given)


@pytest.mark.full
def test_gradients_with_coarse_are_those_of_one_process(pool: Pool, tmp_path: Any) -> None:
    folders = {draws: data(tmp_path / f"data-{draws}", draws=draws) for draws in (False, True)}
    ways = [("zb_h1", "coarse", COUNTS, 1)]
    check_placement(pool, folders, "an encoder on each stage", ways, steps_of_coarse)


@pytest.mark.parametrize(
    ("spare", "compute", "expected"),
    [(1.0, 1.0, 1.0), (0.5, 1.0, 0.5), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.25, 0.5, 1 / 2.5)],
)
def test_speed(spare: float, compute: float, expected: float) -> None:
    assert speed(spare, compute) == pytest.approx(expected)


def test_a_step_by_hand() -> None:
    """The pipeline waits for 2 seconds of encoding on each of its ranks, and has nothing to fill then."""
    cost = costs(2.0, 4.0)
    assert beside(stages(2, frozen=True), 1, cost, waits(cost, 0.0)) == 2 + 2 * 4 + 2 * 8
    # A trained encoder's backward follows the last backward of the first stage, at full speed.
    assert beside(stages(2), 1, cost, waits(cost, 0.0)) == 2 + 2 * 4 + 2 * 8 + 4


@pytest.mark.parametrize(("share", "late"), [(0.5, 0.0), (0.25, 1.0), (0.0, 2.0)])
def test_waits_inside_actions_are_used(share: float, late: float) -> None:
    """The second microbatch's 2 seconds of encoding fit into half of the four of the first one's forward; what does not
    fit into a smaller share of these delays the second forward.
    """
    cost = costs(2.0, 4.0)
    taken = beside(stages(2, frozen=True), 2, cost, waits(cost, share), "gpipe")
    assert taken == pytest.approx(2 + 3 * 4 + 3 * 8 + late)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("pp", "tp", "pieces"), [(2, 1, 1), (4, 2, 1), (4, 1, 3), (4, 4, 2)])
def test_more_room_and_no_longer_steps(name: str, pp: int, tp: int, pieces: int) -> None:
    graph, cost = stages(pp, tp=tp, pieces=pieces), costs(0.37 / pieces)
    times = [beside(graph, 8, cost, waits(cost, share, share / 2), name) for share in (0.0, 0.3, 0.6, 0.9)]
    alone = makespan(make_schedule(name, graph.without(["vision"]), work(8, "llm"), cost), cost)
    assert all(a >= b - 1e-9 for a, b in pairwise(times)) and times[-1] < times[0]
    assert alone <= times[-1]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_what_it_is_worth(name: str) -> None:
    """At most the step that is filled finely, at least the pipeline alone."""
    graph, cost, steps = stages(4), costs(0.5), work(12, "vision", "llm", edges=EDGES)
    fine, least = beside_collectives(name, graph, steps, cost, waits(cost, 0.8))
    assert fine == pytest.approx(makespan(make_schedule(name, graph, steps, cost, fill="fine"), cost))
    alone = makespan(make_schedule(name, graph.without(["vision"]), work(12, "llm"), cost), cost)
    assert alone <= least < 0.97 * fine and least <= alone + 4 * 0.5 * 1.5
    assert beside_collectives(name, graph, steps, cost, waits(cost, 0.0))[1] <= fine


def test_bounds_on_memory_are_kept() -> None:
    graph, cost = stages(4), costs(0.1)

    def most(found: Sequence[Action]) -> int:
        held, worst = dict[StageId, int](), 0
        for action in found:
            if action.node.module == "vision" and action.kind in "FB":
                held[action.node] = held.get(action.node, 0) + (1 if action.kind == "F" else -1)
                worst = max(worst, held[action.node])
        return worst

    assert most(starts(graph, 12, cost, waits(cost, 0.5), {"vision": 3})) == 3
    assert most(starts(graph, 12, cost, waits(cost, 0.5), {})) > 3
