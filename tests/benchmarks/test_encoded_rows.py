"""The benchmark of encoded rows, with few pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import encoded_rows, loader
from hetero_strategy.testing import Pool


def measured(rank: int, world: int, folder: Path) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    loader.IMAGES[512] = 60
    return encoded_rows.main(["--rounds", "1", "--folder", str(folder)])


@pytest.mark.full
@pytest.mark.distributed
def test_both_ways_are_measured(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(1, measured, tmp_path, timeout=240, group=False)
    assert set(found) == {"live", "encoded"} and min(min(times) for times in found.values()) > 0


@pytest.mark.perf
@pytest.mark.distributed
def test_a_step_whose_rows_are_read_takes_less_of_the_processor(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(1, measured, tmp_path, timeout=240, group=False)
    _, processor, made = found["encoded"]
    assert processor < found["live"][1] / 2 and made < found["live"][2] / 2
