"""Encoders that fill the bubbles of a pipeline on their ranks, and generators that go along with it: gradients against
one process, fp64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hetero_strategy.testing import Pool
from tests.distributed.exact import Given, compare, expected, on, run_together, setting_of
from tests.distributed.stepping import steps_on_rank

COUNTS = (4, 9)
"""Microbatches: some without items, one sample in each."""
FREEZE = {"freeze": ("vision",)}
PLACEMENTS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "an encoder on each stage": ({"vision": on(0, 1, 2), "llm": on(0, 1, 2, pp=3)}, {}),
    "encoders of two ranks over pp4": ({"vision": on(0, 1, 2, 3, tp=2), "llm": on(0, 1, 2, 3, pp=4)}, {}),
    "an encoder with tensor parallelism in pieces, and one without": (
        {"vision": on(0, 1, 2, 3, tp=2), "audio": on(0, 1, 2, 3), "llm": on(0, 1, 2, 3, tp=2, pp=2)},
        {"vision_layers": 3, "pieces": {"vision": 3}},
    ),
    "an encoder that is a pipeline, in pieces": (
        {"vision": on(0, 1, 2, 3, pp=2), "llm": on(0, 1, 2, 3, pp=4)},
        {"vision_layers": 4, "pieces": {"vision": 2}},
    ),
    "two encoders, one in pieces, one replicated": (
        {"vision": on(0, 1, 2), "audio": on(1, 2, dp_replicate=2), "llm": on(0, 1, 2, pp=3)},
        {"vision_layers": 3, "pieces": {"vision": 3}, "balance": {"policy": "auto"}},
    ),
    "frozen": ({"vision": on(0, 1), "audio": on(0, 1), "llm": on(0, 1, pp=2)}, FREEZE),
    "with a generator, beyond the pipeline": (
        {"vision": on(0, 1, 2), "llm": on(1, 2, pp=2), "draw": on(0)},
        {},
    ),
    "a generator on each stage": ({"vision": on(3), "llm": on(0, 1, 2, pp=3), "draw": on(0, 1, 2)}, {}),
    "an encoder and a generator of two ranks on pp2 dp2": (
        {"vision": on(0, 1, 2, 3), "llm": on(0, 1, 2, 3, pp=2), "draw": on(0, 1, 2, 3, tp=2)},
        {},
    ),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")
CHOSEN = {
    "an encoder on each stage": (("1f1b", "fine"), ("zb_h1", "decoupled")),
    "encoders of two ranks over pp4": (("1f1b", "fine"),),
    "an encoder with tensor parallelism in pieces, and one without": (("zb_h1", "fine"),),
    "an encoder that is a pipeline, in pieces": (("1f1b", "fine"),),
    "two encoders, one in pieces, one replicated": (("zb_h1", "fine"),),
    "frozen": (("zbv", "fine"),),
    "with a generator, beyond the pipeline": (("interleaved_1f1b", "fine"),),
    "a generator on each stage": (("1f1b", "fine"),),
    "an encoder and a generator of two ranks on pp2 dp2": (("zb_h1", "fine"),),
}
PAIRS = [(placement, *pair) for placement, pairs in CHOSEN.items() for pair in pairs]
"""A schedule of virtual stages gives them to all pipelines, and what has them does not fill."""
FILLS = ("fine", "decoupled")
OTHERS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "an encoder on each stage": (("interleaved_1f1b", "decoupled", 4), ("zbv", "fine", 9)),
    "encoders of two ranks over pp4": (("zb_h1", "decoupled", 9), ("interleaved_1f1b", "fine", 4)),
    "an encoder with tensor parallelism in pieces, and one without": (("gpipe", "decoupled", 9), ("zbv", "fine", 4)),
    "an encoder that is a pipeline, in pieces": (("gpipe", "fine", 4), ("zb_h1", "decoupled", 9)),
    "two encoders, one in pieces, one replicated": (("zbv", "decoupled", 9), ("1f1b", "fine", 4)),
    "frozen": (("gpipe", "fine", 9), ("interleaved_1f1b", "decoupled", 4)),
    "with a generator, beyond the pipeline": (("zb_h1", "fine", 9), ("zbv", "decoupled", 4)),
    "a generator on each stage": (("interleaved_1f1b", "decoupled", 9), ("zb_h1", "fine", 4)),
    "an encoder and a generator of two ranks on pp2 dp2": (("1f1b", "decoupled", 9), ("interleaved_1f1b", "fine", 4)),
}
"""Schedule, fill and microbatches: with the chosen ones each placement and each schedule has both fills."""


def check_placement(
    pool: Pool,
    folders: dict[bool, str],
    placement: str,
    ways: Sequence[tuple[str, str, Sequence[int], int]],
    run: Callable[..., Any] = steps_on_rank,
) -> None:
    """Check ways of a placement in one world: schedule, fill, microbatches, and those of damaged steps."""
    layouts, options = PLACEMENTS[placement]
    given: dict[str, Given] = {}
    for schedule, fill, counts, damages in ways:
        setting = setting_of(folders, layouts, schedule, fill=fill, **options)
        given[f"{schedule} {fill}"] = setting, expected(setting), counts, damages
    for name, runs in run_together(pool, given, run).items():
        setting, wanted, _, damages = given[name]
        compare(wanted, runs, name)
        lanes = runs[0].steps[0].lanes
        together = setting.fill == "decoupled" and placement == "a generator on each stage"
        assert together or any(action.node.cohort >= 0 for lane in lanes for action in lane.actions), name
        for lane in lanes if setting.fill != "fine" else ():
            fills = "".join(a.kind.lower() if a.node.cohort >= 0 else "P" for a in lane.actions if a.kind in "FBI")
            assert re.fullmatch("f*P*[bi]*", fills), (name, fills)  # around the pipeline
        assert bool(damages) == any("vision.0@1" in broken for broken in runs[0].damaged), name


@pytest.mark.full_cases(
    "a generator on each stage",
    "an encoder and a generator of two ranks on pp2 dp2",
    "an encoder on each stage",
    "an encoder with tensor parallelism in pieces, and one without",
    "with a generator, beyond the pipeline",
)
@pytest.mark.parametrize("placement", CHOSEN)
def test_gradients_are_those_of_one_process(pool: Pool, folders: dict[bool, str], placement: str) -> None:
    damages = int(placement == "an encoder on each stage")
    check_placement(pool, folders, placement, [(*pair, COUNTS, damages) for pair in CHOSEN[placement]])


def test_every_fill_is_in_every_placement_and_every_schedule() -> None:
    others = [(placement, *way[:2]) for placement, ways in OTHERS.items() for way in ways]
    assert not {*PAIRS} & {*others}
    assert {(p, f) for p, _, f in PAIRS + others} == {(p, f) for p in PLACEMENTS for f in FILLS}
    assert {(s, f) for _, s, f in PAIRS + others} == {(s, f) for s in SCHEDULES for f in FILLS}
    assert {p for p, s, _ in PAIRS + others if s in ("zb_h1", "zbv")} == {*PLACEMENTS}


@pytest.mark.full
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_schedules_in_every_placement(pool: Pool, folders: dict[bool, str], placement: str) -> None:
    check_placement(pool, folders, placement, [(s, fill, (count,), 0) for s, fill, count in OTHERS[placement]])
