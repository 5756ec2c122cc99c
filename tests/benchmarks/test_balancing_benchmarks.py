"""Benchmarks of balancing, at small sizes: that they run, and that their figures say what they claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import balance, step_plan


def test_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "balance.json"
    balance.main(["--quick", "--rounds", "1", "--seconds", "0", "--seeds", "1", "--json", str(file)])
    assert "near home" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["benchmark"] == "balance" and written["settings"]["seeds"] == 1 and written["machine"]["torch"]
    for row in written["results"]["between nodes"]:  # every module has figures, as the product places it
        assert 0 <= row["near"]["max"] < 1 and 0 < row["fast"]["max"] < 1
        assert row["near"]["max"] <= row["fast"]["max"]


@pytest.mark.full
def test_step_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    sizes = ["--instances", "16", "--samples", "20", "--rounds", "1", "--growth", "2"]
    found = step_plan.main([*sizes, "--json", str(file)])
    assert "OrchMLLM" in capsys.readouterr().out
    assert json.loads(file.read_text())["results"] == found
    packed = [one for one in found if one["instances"] == 16 and one["rearrange"] == "home"]
    assert [one["microbatches"] for one in packed] == [1, 2, 4, 8]
    for one in found:
        assert one["total_ms"] == pytest.approx(one["plan_ms"] + one["compile_ms"]), "of one round"
        for module in step_plan.MODULES:
            assert 1.0 <= one["after"][module] <= one["before"][module] + 1e-9
