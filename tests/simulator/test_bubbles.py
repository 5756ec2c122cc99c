"""What filling leaves of bubbles and what ranks wait for inside actions, by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.schedule.action import Action, Schedule, StageId
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.simulator.result import Collective, Filling, inside_actions, work_on_rank
from hetero_strategy.simulator.simulate import simulate
from tests.simulator.schedules import graph_of, schedule_of, work_of

Encodes = Mapping[tuple[int, int], float]
"""(rank, microbatch) -> seconds of a frozen encoder's forward; others take no time."""


def one_f_one_b(encodes: Encodes | None) -> Schedule:
    """Two stages on two ranks, two microbatches, and on each rank an instance of a frozen encoder before all else."""
    layouts = {"vision": ModuleLayout(2, dp_shard=2), "llm": ModuleLayout(2, pp=2)}
    layouts = {name: layout.resolved(name) for name, layout in layouts.items()}
    first, second = StageId("llm", 0), StageId("llm", 1)
    trains = {StageId("vision", 0): False, first: True, second: True}
    graph = stage_graph(list(layouts), [("vision", "llm")], layouts, trains, apart=["vision"])
    before = [Action("F", StageId("vision", 0, rank), i) for i in range(2) for rank in range(2)]
    forwards = [Action("F", first, 0), Action("F", first, 1), Action("F", second, 0)]
    rest = [("B", second, 0), ("F", second, 1), ("B", first, 0), ("B", second, 1), ("B", first, 1)]
    after = [Action(kind, node, i) for kind, node, i in rest]  # type: ignore[arg-type]
    if encodes is None:
        graph, before = graph.without(graph.filling), []
    order = [a for a in before if a.microbatch == 0] + forwards[:1]
    order += [a for a in before if a.microbatch == 1] + forwards[1:] + after
    return schedule_of(graph, work_of(graph, 2), order)


def seconds(encodes: Encodes | None, action: Action) -> float:
    if action.node.module == "vision":
        return (encodes or {}).get((action.node.cohort, action.microbatch), 0.0)
    return 1.0 if action.kind == "F" else 2.0


@pytest.mark.parametrize(
    ("encodes", "time", "efficiency", "waits"),
    [
        ({(1, 1): 1.0}, 9.0, 1.0, [3, 0]),  # all of it while the second rank waits for its first rows
        ({(0, 0): 0.5, (1, 1): 1.5}, 9.5, 0.5, [3, 0]),  # the pipeline waits for the first half second
        ({(0, 0): 1.0, (1, 0): 1.0}, 10.0, 0.0, [3, 1]),  # both ranks encode before anything can run
        ({(0, 0): 1.0, (1, 1): 4.0}, 12.0, -0.2, [5, 0]),  # the second microbatch waits for what is far too long
    ],
)
def test_the_share_of_work_in_bubbles(encodes: Encodes, time: float, efficiency: float, waits: list[float]) -> None:
    alone = simulate(one_f_one_b(None), lambda action: seconds(None, action))
    assert alone.time == 9.0
    assert {c: v.tolist() for c, v in alone.idle.items() if v.any()} == {
        "warm-up": [0, 1],
        "dependency": [3, 0],
        "cool-down": [0, 2],
    }
    filled = simulate(one_f_one_b(encodes), lambda action: seconds(encodes, action))
    assert filled.time == time
    work = work_on_rank(filled, ("vision",))
    assert work == sum(encodes.values()) / 2
    found = Filling(("vision",), alone.time, filled.time, work)
    assert found.efficiency == pytest.approx(efficiency)
    assert str(found) == f"{efficiency:.0%} of the work of vision in bubbles"
    assert {c: v.tolist() for c, v in filled.idle.items() if v.any()} == {"dependency": waits, "cool-down": [0, 2]}


def test_work_is_that_of_ranks_that_have_it() -> None:
    """An encoder of 3 s on one of the three ranks of a language model's only instance."""
    vision, llm = StageId("vision", 0), StageId("llm", 0)
    graph = graph_of({vision: np.array([[0]]), llm: np.array([[0, 1, 2]])}, [("vision", "llm")])
    schedule = schedule_of(graph, work_of(graph, 1), [Action("F", vision, 0), Action("F", llm, 0)])
    found = simulate(schedule, lambda action: 3.0 if action.node == vision else 6.0)
    assert work_on_rank(found, ("vision",)) == 3.0
    assert work_on_rank(found, ("llm",)) == 6.0
    assert work_on_rank(found, ("vision", "llm")) == 7.0
    assert work_on_rank(found, ()) == 0.0
    assert Filling((), 9.0, 9.0, 0.0).efficiency == 1.0
    waits = inside_actions(found, lambda action: {"tensor parallel": np.array([1.5 if action.node == llm else 0.0])})
    assert waits["tensor parallel"] == 1.5


def test_waits_inside_actions_are_summed_over_actions() -> None:
    """Two of three seconds of the second stage's backwards, on one of two ranks."""
    alone = simulate(one_f_one_b(None), lambda action: seconds(None, action))

    def waits(action: Action) -> dict[Collective, np.ndarray]:
        return {"tensor parallel": np.array([1.5 if action.node.stage and action.kind == "B" else 0.0])}

    assert inside_actions(alone, waits) == {"all-gather": 0.0, "reduce-scatter": 0.0, "tensor parallel": 1.5}
