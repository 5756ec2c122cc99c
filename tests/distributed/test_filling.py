"""Encoders that fill the bubbles of a pipeline on their ranks, and generators that go along with it: gradients against
one process, fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.harness import Pool
from tests.distributed.stepping import Reference, Run, Setting, data, steps_on_rank

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
    "an encoder that is a pipeline": ({"vision": on(0, 1, 2, 3, pp=2), "llm": on(0, 1, 2, 3, pp=4)}, {}),
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
    "an encoder that is a pipeline": (("gpipe", "coarse"),),
    "two encoders, one in pieces, one replicated": (("zb_h1", "fine"), ("1f1b", "search")),
    "frozen": (("zbv", "fine"),),
    "with a generator, beyond the pipeline": (("interleaved_1f1b", "fine"),),
    "a generator on each stage": (("1f1b", "fine"),),
    "an encoder and a generator of two ranks on pp2 dp2": (("zb_h1", "search"),),
}
PAIRS = [(placement, *pair) for placement, pairs in CHOSEN.items() for pair in pairs]
"""A schedule of virtual stages gives them to all pipelines, and what has them does not fill."""
OTHERS = {
    (placement, schedule): [
        fill
        for fill in ("coarse", "fine", "search", "decoupled")
        if (schedule, fill) not in CHOSEN[placement]
        and not (placement == "an encoder that is a pipeline" and schedule in ("interleaved_1f1b", "zbv"))
        and not (placement == "beside collectives of tensor parallelism" and fill != "fine")
    ]
    for placement in PLACEMENTS
    for schedule in SCHEDULES
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Data without and with drawings."""
    root = tmp_path_factory.mktemp("filling")
    return {draws: data(root / str(draws), draws=draws) for draws in (False, True)}


def filled(rank: int, world: int, settings: list[Setting], wanted: Reference, damages: int) -> list[Run]:
    return [steps_on_rank(rank, world, setting, wanted, COUNTS, damages) for setting in settings]


def same(
    pool: Pool, folders: dict[bool, str], placement: str, schedule: str, fills: Sequence[str], damages: bool = False
) -> None:
    layouts, options = PLACEMENTS[placement]
    settings = [setting_of(folders, layouts, schedule, fill=fill, **options) for fill in fills]
    wanted = expected(settings[0])
    ranks = pool.run(settings[0].world, filled, settings, wanted, int(damages), timeout=120)
    for fill, *runs in zip(fills, *ranks, strict=True):
        compare(wanted, runs)
        together = fill in ("coarse", "decoupled") and placement == "a generator on each stage"
        assert together or any(action.node.cohort >= 0 for lane in runs[0].steps[0].lanes for action in lane.actions)
        if damages:
            assert any("vision.0@1" in name for name in runs[0].damaged)


@pytest.mark.parametrize(("placement", "schedule", "fill"), PAIRS)
def test_gradients_are_those_of_one_process(
    pool: Pool, folders: dict[bool, str], placement: str, schedule: str, fill: str
) -> None:
    same(pool, folders, placement, schedule, [fill], damages=placement == "an encoder on each stage")


@pytest.mark.full
@pytest.mark.parametrize(("placement", "schedule"), [key for key, fills in OTHERS.items() if fills])
def test_every_other_schedule_in_every_placement(
    pool: Pool, folders: dict[bool, str], placement: str, schedule: str
) -> None:
    same(pool, folders, placement, schedule, OTHERS[placement, schedule])
