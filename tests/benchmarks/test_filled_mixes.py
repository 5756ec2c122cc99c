"""The benchmark of searched schedules: its bound holds, and a tiny run says what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import filled_mixes


@pytest.mark.parametrize("schedule", filled_mixes.SCHEDULES)
@pytest.mark.parametrize(("workload", "ratio"), [("lognormal", 0.15), ("llava", 0.6)])
def test_nothing_takes_less_than_the_bound(schedule: str, workload: str, ratio: float) -> None:
    found = filled_mixes.measure(workload, schedule, 3, ratio, 1)
    for name in filled_mixes.CONTENDERS:
        assert 1 - 1e-9 <= found[name] < 2
    assert found["both"] <= found["search"] * (1 + 1e-9) <= found["fine"] * (1 + 2e-9)


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mixes.json"
    filled_mixes.main(f"--seeds 1 --ranks 2 --workloads laion --json {file}".split())
    assert "worst search" in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert [line["steps"] for line in results["mixes"]] == [3, 3]
    (line,) = results["37B"]
    assert 0 < line["search"] <= line["order"] < 1
    assert 0 < line["filled both"] < line["static"] < 1
