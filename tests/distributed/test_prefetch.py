"""Frozen encoders that work for the next step: every step's gradients against one process, fp64."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_strategy.plan.ahead import ahead
from tests.distributed.exact import NOTICED, differences, on, setting_of
from tests.distributed.harness import Pool
from tests.distributed.stepping import Stepped, batches_on_rank, data, reference

BATCHES = ((0, 1, 2, 3, 4), (5, 6), (7, 2, 8), (1,))
"""Steps of unequal size; the last one has no other after it."""
AHEAD = {"freeze": ("vision",), "prefetch": {"vision": 1}, "batches": BATCHES, "microbatches": 3}
PLACEMENTS: dict[str, tuple[dict[str, dict[str, Any]], str, dict[str, Any]]] = {
    "on each stage": ({"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)}, "1f1b", {}),
    "in other bubbles than a trained one": (
        {"vision": on(0, 1), "audio": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)},
        "zb_h1",
        {"fill": "fine"},
    ),
    "disjoint, sharded": ({"vision": on(0, 1, dp_shard=2), "llm": on(2)}, "1f1b", {"precision": "32-mixed"}),
    "all but its end, in pieces": (
        {"vision": on(0, 1), "llm": on(0, 1, pp=2)},
        "zb_h1",
        {"freeze": ("vision.backbone",), "fill": "fine", "pieces": {"vision": 2}, "vision_layers": 3},
    ),
    "the first of its pipeline's ranks": (
        {"vision": on(0, 1, pp=2), "llm": on(1, 2, pp=2)},
        "1f1b",
        {"freeze": ("vision.backbone",)},
    ),
    "wide, two ahead, balanced": (
        {"vision": on(0, 1, tp=2), "audio": on(1), "llm": on(0, 1, pp=2)},
        "gpipe",
        {
            "freeze": ("vision", "audio"),
            "prefetch": {"vision": 1, "audio": 1},
            "tokens": {"vision": 8},
            "balance": {"policy": "auto"},
        },
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Data without drawings."""
    return {False: data(tmp_path_factory.mktemp("prefetch"))}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_step_is_that_of_one_process(pool: Pool, folders: dict[bool, str], placement: str) -> None:
    layouts, schedule, options = PLACEMENTS[placement]
    setting = setting_of(folders, layouts, schedule, **{**AHEAD, **options})
    wanted = [reference(setting, setting.microbatches, step=k) for k in range(len(BATCHES))]
    runs: list[list[Stepped]] = pool.run(setting.world, batches_on_rank, setting, wanted, timeout=120)
    bound = 1e-10 if setting.precision == "64-true" else 1e-5
    for k, steps in enumerate(zip(*runs, strict=True)):
        assert not (found := differences(wanted[k], steps, bound)), f"step {k}: {'; '.join(found[:4])}"
        ran = {action.node.module for lane in steps[0].lanes for action in lane.actions}
        assert (ahead("vision") in ran) == (k + 1 < len(BATCHES))
        assert steps[0].plan.held == (frozenset(setting.prefetch) if k else frozenset())
    if placement == "on each stage":
        broken = pool.run(setting.world, batches_on_rank, setting, wanted, "held", timeout=120)
        for k in range(len(BATCHES)):
            worst = max(error for steps in broken for error in steps[k].errors.values())
            assert (worst > NOTICED) == (k > 0)
