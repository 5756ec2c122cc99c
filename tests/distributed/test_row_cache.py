"""Rows of frozen encoders from disk: every step's gradients against one process, fp64, whatever is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.data.row_store import RECORD, RowSegment, RowStore
from tests.distributed.exact import NOTICED, differences, on, setting_of
from tests.distributed.harness import Pool
from tests.distributed.stepping import Setting, Stepped, batches_on_rank, data, reference

BATCHES = ((0, 1, 2, 3), (5, 6), (7, 2), (1,))
"""Steps of unequal size, some with items of earlier ones."""
LATER = ((2, 4, 0, 8, 1), (7, 5), (3, 6, 1, 2), (8, 4))
"""Of the next run: some items are known and some are not, and others are beside them."""
BACKBONE = {"freeze": ("vision.backbone",)}
PLACEMENTS: dict[str, tuple[dict[str, dict[str, Any]], str, dict[str, Any]]] = {
    "one rank": ({"vision": on(0), "llm": on(0)}, "1f1b", BACKBONE),
    "in turns with a pipeline": ({"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)}, "1f1b", BACKBONE),
    "sharded, gathered when it runs": (
        {"vision": on(0, 1, dp_shard=2), "llm": on(2)},
        "1f1b",
        {**BACKBONE, "reshard_after_forward": "always", "precision": "32-mixed"},
    ),
    "sharded, balanced, two encoders": (
        {"vision": on(0, 1, dp_shard=2), "audio": on(1, 2, dp_replicate=2), "llm": on(0, 1, 2, dp_shard=3)},
        "1f1b",
        {"freeze": ("vision", "audio.backbone"), "balance": {"policy": "auto"}, "tokens": {"vision": 8}},
    ),
    "a step ahead": (
        {"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)},
        "1f1b",
        {"freeze": ("vision",), "prefetch": {"vision": 1}, "fill": "fine"},
    ),
    "a step ahead, all but its end": (
        {"vision": on(0, 1), "llm": on(0, 1, pp=2)},
        "zb_h1",
        {**BACKBONE, "prefetch": {"vision": 1}, "fill": "fine", "pieces": {"vision": 2}, "vision_layers": 3},
    ),
    "the first of its pipeline's ranks": (
        {"vision": on(0, 1, pp=2), "llm": on(1, 2, pp=2)},
        "gpipe",
        {**BACKBONE, "recompute": {"vision": "whole"}},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Data without drawings."""
    return {False: data(tmp_path_factory.mktemp("cache"))}


def cached(placement: str, folders: dict[bool, str], folder: Path) -> Setting:
    """A setting whose frozen encoders have caches."""
    layouts, schedule, options = PLACEMENTS[placement]
    setting = setting_of(folders, layouts, schedule, **{"batches": BATCHES, "microbatches": 2, **options})
    named = {part.split(".")[0]: str(folder) for part in setting.freeze}
    return replace(setting, cache=named)


def run(pool: Pool, setting: Setting) -> tuple[list[list[str]], list[list[Stepped]]]:
    """What differs from one process in each step, and what each rank saw."""
    wanted = [reference(setting, 2, step=k) for k in range(len(setting.batches))]
    runs = pool.run(setting.world, batches_on_rank, setting, wanted, timeout=120)
    assert not isinstance(runs[0], str), runs[0]
    bound = 1e-10 if setting.precision == "64-true" else 1e-5
    found = [differences(one, steps, bound) for one, steps in zip(wanted, zip(*runs, strict=True), strict=True)]
    return found, runs


def counted(runs: list[list[Stepped]]) -> tuple[int, int]:
    """Items found and missed, of all steps, modules and ranks."""
    found, missed = np.array([pair for steps in runs for pair in steps[-1].cached.values()]).sum(0)
    return int(found), int(missed)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_step_is_that_of_one_process_whatever_is_found(
    pool: Pool, folders: dict[bool, str], tmp_path: Path, placement: str
) -> None:
    setting = cached(placement, folders, tmp_path)
    differing, first = run(pool, setting)
    assert not any(differing), differing
    assert counted(first)[0] == 0 or setting.prefetch or True
    differing, later = run(pool, replace(setting, batches=LATER))
    assert not any(differing), differing
    found, missed = counted(later)
    assert found and missed
    differing, last = run(pool, replace(setting, batches=LATER))
    assert not any(differing), differing
    assert counted(last) == (found + missed, 0)
