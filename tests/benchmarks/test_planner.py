"""The planner's benchmark runs, and its figures hold on a few problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import planner


@pytest.mark.full
def test_small_problems(tmp_path: Path) -> None:
    found = planner.main(["--sizes", "--problems", "1", "--larger", "1", "--json", str(tmp_path / "found.json")])
    for name in ("best", "best_of_more_ranks"):
        assert found[name]["problems"] >= 1
        assert found[name]["within_1_percent"] == found[name]["problems"]
    assert (tmp_path / "found.json").stat().st_size > 100
