"""Encoders that fill the bubbles of a pipeline on their ranks, and generators that go along with it: gradients against
one process, fp64."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.harness import Pool
from tests.distributed.stepping import steps_on_rank

COUNTS = (4, 9)
"""Microbatches: some without items, one sample in each."""
FREEZE = {"freeze": ("vision",)}
PLACEMENTS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "an encoder on each stage": ({"vision": on(0, 1, 2), "llm": on(0, 1, 2, pp=3)}, {}),
    "encoders of two ranks over pp4": ({"vision": on(0, 1, 2, 3, tp=2), "llm": on(0, 1, 2, 3, pp=4)}, {}),
    "beside collectives of tensor parallelism": (
        {"vision": on(0, 1, 2, 3, tp=2), "audio": on(0, 1, 2, 3), "llm": on(0, 1, 2, 3, tp=2, pp=2)},
        {"vision_layers": 3, "pieces": {"vision": 3}, "tp_bubbles": {"llm": 0.6, "vision": 0.3}},
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
    "an encoder on each stage": (("1f1b", "fine"), ("zb_h1", "coarse"), ("zb_h1", "decoupled")),
    "encoders of two ranks over pp4": (("1f1b", "fine"),),
    "beside collectives of tensor parallelism": (("zb_h1", "fine"),),
    "an encoder that is a pipeline, in pieces": (("1f1b", "fine"),),
    "two encoders, one in pieces, one replicated": (("zb_h1", "fine"), ("1f1b", "search")),
    "frozen": (("zbv", "fine"),),
    "with a generator, beyond the pipeline": (("interleaved_1f1b", "fine"),),
    "a generator on each stage": (("1f1b", "fine"),),
    "an encoder and a generator of two ranks on pp2 dp2": (("zb_h1", "search"),),
}
PAIRS = [(placement, *pair) for placement, pairs in CHOSEN.items() for pair in pairs]
"""A schedule of virtual stages gives them to all pipelines, and what has them does not fill."""
FILLS = ("fine", "coarse", "search", "decoupled")


def fits(placement: str, schedule: str, fill: str) -> bool:
    if placement == "an encoder that is a pipeline, in pieces":
        return schedule not in ("interleaved_1f1b", "zbv")
    return placement != "beside collectives of tensor parallelism" or fill == "fine"


def others() -> dict[tuple[str, str], tuple[str, int]]:
    """Placement, schedule -> one more fill and number of microbatches, both in turns."""
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for i, placement in enumerate(PLACEMENTS):
        for j, schedule in enumerate(SCHEDULES):
            turns = (FILLS[(i + j + k) % len(FILLS)] for k in range(len(FILLS)))
            new = [f for f in turns if fits(placement, schedule, f) and (schedule, f) not in CHOSEN[placement]]
            if new:
                found[placement, schedule] = new[0], COUNTS[(i // 2 + j) % 2]
    return found


OTHERS = others()


def same(
    pool: Pool,
    folders: dict[bool, str],
    placement: str,
    schedule: str,
    fill: str,
    counts: Sequence[int] = COUNTS,
    damages: bool = False,
) -> None:
    layouts, options = PLACEMENTS[placement]
    setting = setting_of(folders, layouts, schedule, fill=fill, **options)
    wanted = expected(setting)
    runs = pool.run(setting.world, steps_on_rank, setting, wanted, counts, int(damages), timeout=240)
    compare(wanted, runs)
    together = fill in ("coarse", "decoupled") and placement == "a generator on each stage"
    assert together or any(action.node.cohort >= 0 for lane in runs[0].steps[0].lanes for action in lane.actions)
    for lane in runs[0].steps[0].lanes if fill in ("coarse", "decoupled") else ():
        fills = "".join(a.kind.lower() if a.node.cohort >= 0 else "P" for a in lane.actions if a.kind in "FBI")
        assert re.fullmatch("f*P*[bi]*", fills), fills  # around the pipeline
    if damages:
        assert any("vision.0@1" in name for name in runs[0].damaged)


@pytest.mark.parametrize(("placement", "schedule", "fill"), PAIRS)
def test_gradients_are_those_of_one_process(
    pool: Pool, folders: dict[bool, str], placement: str, schedule: str, fill: str
) -> None:
    same(pool, folders, placement, schedule, fill, damages=placement == "an encoder on each stage")


def test_every_fill_is_in_every_placement_and_every_schedule() -> None:
    every = {(p, s, f) for p in PLACEMENTS for s in SCHEDULES for f in FILLS if fits(p, s, f)}
    met = {*PAIRS, *((*key, fill) for key, (fill, _) in OTHERS.items())}
    for kept in ((0, 1), (0, 2), (1, 2)):
        assert {tuple(one[i] for i in kept) for one in every} == {tuple(one[i] for i in kept) for one in met}


@pytest.mark.full
@pytest.mark.parametrize(("placement", "schedule"), OTHERS)
def test_every_other_schedule_in_every_placement(
    pool: Pool, folders: dict[bool, str], placement: str, schedule: str
) -> None:
    fill, count = OTHERS[placement, schedule]
    same(pool, folders, placement, schedule, fill, (count,))
