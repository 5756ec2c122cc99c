"""``benchmarks.dry_run`` on small runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.dry_run import LargeRun, main


def test_large_runs_are_whole(tmp_path: Path) -> None:
    small = {"layers": 2, "pp": 2, "dim": 1024, "tp": 2, "encoder": (32, 1)}
    runs = [LargeRun(16, **small), LargeRun(24, apart=16, **small)]  # type: ignore[arg-type]
    found = main(["--json", str(tmp_path / "f.json")], runs)
    assert [one["built"] for one in found] == [4, 6]
    for one in found:
        assert not one["faults"]
        # Above 1: norms are on every tensor-parallel rank, and the ranks at a lane's ends are not its mean.
        assert one["shards"] == pytest.approx(1, abs=1e-2)
    assert json.loads((tmp_path / "f.json").read_text())["results"][1]["ranks"] == 24
