"""Timelines: from a simulation or from measured events, as a trace and as a picture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.monitor import TimelineMonitor
from hetero_strategy.monitor.draw import WAITS, draw_timelines, timeline_figure
from hetero_strategy.monitor.timeline import Timeline, evenly, from_measured, from_simulation, write_trace
from hetero_strategy.monitor.timeline_monitor import meet_in_layers, rank_load
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.simulator.cluster import Links
from hetero_strategy.simulator.result import Filling, Simulation
from hetero_strategy.simulator.simulate import simulate
from tests.simulator.schedules import chain, random_schedule

COSTS = {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3, "UNSHARD": 5e-4, "REDUCE": 5e-4}


def simulated(stages: int = 4, microbatches: int = 8, instances: int = 1) -> Simulation:
    return simulate(chain(stages, microbatches, instances), lambda action: COSTS[action.kind])


def measured(simulation: Simulation, shift: float = 0.0) -> Timeline:
    """As if it had been measured, with a clock of its own."""
    events = {r: [(a, s + shift, e + shift) for a, s, e in simulation.of(r)] for r in simulation.ranks.tolist()}
    return from_measured(events, (shift, shift + simulation.time))


@pytest.mark.parametrize(
    ("degrees", "each_microbatch", "once"),
    [({}, True, False), ({"ep": 4}, True, True), ({"tp": 4, "ep": 4}, False, False), ({"tp": 2, "ep": 4}, True, True)],
)
def test_instances_meet_in_layers_for_weights_or_for_rows_of_experts(
    degrees: dict[str, int], each_microbatch: bool, once: bool
) -> None:
    layout = ModuleLayout(4, **degrees).resolved()
    assert meet_in_layers(layout, gathered_once=False) == each_microbatch
    assert meet_in_layers(layout, gathered_once=True) == once


def test_the_load_of_ranks_is_that_of_the_module_with_the_most_uneven_experts() -> None:
    rows = {"llm": torch.tensor([[5, 1, 1, 1], [2, 2, 3, 1]]), "draft": torch.tensor([[3, 1, 0, 0]])}
    layouts = {"llm": ModuleLayout(2, ep=2), "draft": ModuleLayout(2)}
    assert rank_load(rows, layouts) == 1.25  # 1.5 in the first layer, 1 in the second
    assert rank_load(rows, {**layouts, "draft": ModuleLayout(4, ep=4)}) == 3
    assert rank_load({"llm": torch.zeros(1, 4, dtype=torch.int64)}, layouts) == rank_load({}, layouts) == 1


def drawn(picture: Figure, *, idle: bool) -> list[PolyCollection]:
    found = [c for axes in picture.axes for c in axes.collections if isinstance(c, PolyCollection)]
    waits = {to_rgba(colour) for colour in WAITS.values()}
    return [c for c in found if (tuple(c.get_facecolor()[0]) in waits) == idle]


def boxes(picture: Figure, *, idle: bool = False) -> int:
    return sum(len(c.get_paths()) for c in drawn(picture, idle=idle))


def test_from_simulation_has_every_action_of_every_rank() -> None:
    found = from_simulation(simulated())
    assert found.ranks == (0, 1, 2, 3) and found.world == 4 and len(found.events) == 4 * 16
    assert found.time == pytest.approx(33e-3) and found.bubble == pytest.approx(3 / 11)
    last = found.events[-1]
    assert (last.rank, str(last.action)) == (3, "llm.3 B7")
    assert (last.start, last.end) == (pytest.approx(25e-3), pytest.approx(27e-3))


def test_measured_events_start_at_zero_and_have_the_same_bubble() -> None:
    simulation = simulated()
    found, same = measured(simulation, shift=1234.5), from_simulation(simulation)
    assert found.name == "measured" and found.ranks == same.ranks and found.world == 4
    assert found.time == pytest.approx(same.time) and found.bubble == pytest.approx(same.bubble)
    assert found.events[0].start == 0.0
    for one, other in zip(found.events, same.events, strict=True):
        assert one.action == other.action and one.end == pytest.approx(other.end)


def test_ranks_that_ran_nothing_count_as_idle() -> None:
    action = Action("F", StageId("llm", 0), 0)
    found = from_measured({0: [(action, 1.0, 2.0)], 5: []}, (1.0, 2.0))
    assert found.ranks == (0, 5) and found.bubble == 0.5
    assert from_measured({}, (0.0, 0.0)).events == ()
    spanned = from_measured({0: [(action, 1.0, 2.0)]}, span=(0.5, 4.5))
    assert (spanned.time, spanned.bubble, spanned.events[0].start) == (4.0, 0.75, 0.5)
    assert boxes(timeline_figure(found)) == 1


def test_what_filling_does_is_said_in_trace_and_picture(tmp_path: Path) -> None:
    simulation = simulate(random_schedule(5), lambda action: COSTS[action.kind])
    filling = Filling(("vision",), 0.5, 0.75, 1.0)
    filled, plain = from_simulation(simulation, filling=filling), from_simulation(simulation)
    write_trace(tmp_path / "trace.json", filled, plain)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    said = ["75% of the work of vision in bubbles" in e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert said == [True, False]
    titles = [axes.get_title(loc="right") for axes in timeline_figure(filled, plain).axes]
    assert titles[0] == f"75% of the work of vision in bubbles, alone 500 ms   ·   {titles[1]}"


def test_evenly() -> None:
    assert evenly([3, 1, 2], None) == evenly([3, 1, 2], 3) == (1, 2, 3)
    assert evenly(range(100), 4) == (0, 33, 66, 99)
    assert evenly(range(100), 1) == (0,)
    assert len(set(evenly(range(9984), 64))) == 64


def test_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    simulation = simulate(random_schedule(5), lambda action: COSTS[action.kind])
    first, second = from_simulation(simulation), measured(simulation)
    write_trace(tmp_path / "trace.json", first, second)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert {("thread_name", f"rank {r}") for r in first.ranks} <= names
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in processes] == ["simulated", "measured"]
    parts = {cause: part for cause, part in simulation.bubble_by_cause.items() if part >= 5e-4}
    assert parts and all(f"{cause} {part:.1%}" in processes[0] for cause, part in parts.items())
    assert "(" not in processes[1]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(first.events) + len(second.events)
    assert {e["ph"] for e in events} == {"X", "M"}
    assert all(e["dur"] > 0 and e["ts"] >= 0 and {"pid", "tid", "name", "cat", "args"} <= set(e) for e in complete)
    for event, found in zip(first.events, complete, strict=False):
        assert (found["pid"], found["tid"], found["name"]) == (0, event.rank, str(event.action))
        assert found["ts"] + found["dur"] == pytest.approx(1e6 * event.end)
        assert found["args"].get("microbatch", -1) == event.action.microbatch
        assert found["args"]["kind"] == event.action.kind
    for pid in (0, 1):  # on a thread, each event ends before the next starts
        for rank in first.ranks:
            own = [e for e in complete if (e["pid"], e["tid"]) == (pid, rank)]
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own))


@pytest.mark.parametrize("seed", range(3))
def test_picture_has_a_box_per_event(seed: int) -> None:
    simulation = simulate(random_schedule(seed), lambda action: COSTS[action.kind])
    one, two = from_simulation(simulation), measured(simulation)
    picture = timeline_figure(one, two, title="a step")
    assert boxes(picture) == len(one.events) + len(two.events)
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["simulated", "measured"]
    assert len({axes.get_xlim() for axes in picture.axes}) == 1
    assert f"bubble {simulation.bubble:.1%}" in picture.axes[0].get_title(loc="right")


@pytest.mark.parametrize("seed", range(3))
def test_idle_times_have_the_colours_of_their_causes(seed: int) -> None:
    simulation = simulate(random_schedule(seed), lambda action: COSTS[action.kind], Links(1e-3))
    one = from_simulation(simulation)
    picture = timeline_figure(one, measured(simulation))
    assert boxes(picture, idle=True) == len(one.waits) > 0
    causes = {cause for cause, part in simulation.bubble_by_cause.items() if part > 0}
    for collection in drawn(picture, idle=True):
        (cause,) = (n for n, colour in WAITS.items() if to_rgba(colour) == tuple(collection.get_facecolor()[0]))
        extents = collection.get_datalim(picture.axes[0].transData)
        own = [wait for wait in one.waits if wait.cause == cause]
        assert extents.x0 == pytest.approx(min(wait.start for wait in own))
        assert extents.x1 == pytest.approx(max(wait.end for wait in own))
        causes.remove(cause)
    assert not causes
    labels = [text.get_text() for text in picture.legends[0].get_texts()]
    assert "idle" in labels and sum(label.startswith("idle: ") for label in labels) == len(drawn(picture, idle=True))


def test_picture_has_numbers_where_they_fit() -> None:
    numbers = [text.get_text() for text in timeline_figure(from_simulation(simulated())).axes[0].texts]
    assert sorted(numbers) == sorted(str(i) for i in range(8) for _ in range(8))
    assert not timeline_figure(from_simulation(simulated(4, 200))).axes[0].texts


def test_kinds_and_modules_look_different() -> None:
    simulation = simulate(random_schedule(2), lambda action: COSTS[action.kind])
    kinds = {(e.action.node.module, e.action.kind) for e in from_simulation(simulation).events}
    looks = {
        (tuple(c.get_facecolor()[0]), c.get_hatch())
        for c in drawn(timeline_figure(from_simulation(simulation)), idle=False)
    }
    assert len(looks) >= len(kinds) > 6


def test_picture_of_many_ranks_shows_some_and_says_so() -> None:
    found = from_simulation(simulated(4, 2, instances=50))
    picture = timeline_figure(found)
    assert boxes(picture) == 64 * 4
    assert "64 of 200 ranks shown" in picture.axes[0].get_title(loc="right")
    few = from_simulation(simulated(4, 2, instances=50), most=8)
    assert few.world == 200 and few.bubble == found.bubble
    assert "8 of 200 ranks shown" in timeline_figure(few).axes[0].get_title(loc="right")


def test_draw_writes_png_and_svg(tmp_path: Path) -> None:
    found = from_simulation(simulated(2, 2))
    draw_timelines(tmp_path / "a.png", found, title="a step")
    draw_timelines(tmp_path / "a.svg", found)
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1000
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


def test_a_strategy_without_a_schedule_is_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace())
    module: Any = None
    with pytest.raises(ConfigError, match="SimpleNamespace has no schedule; use HeteroStrategy"):
        TimelineMonitor().on_train_start(trainer, module)
