"""Benchmarks of balancing, at small sizes: that they run, and that their figures say what they claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import balance, balanced_steps, node_rearrangement, step_plan


def test_balance_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "balance.json"
    balance.main(["--quick", "--rounds", "1", "--json", str(file)])
    assert "bound" in capsys.readouterr().out
    assert json.loads(file.read_text())["benchmark"] == "balance"


def test_step_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "loads.png"
    sizes = ["--instances", "16", "--samples", "20", "--rounds", "1", "--growth", "2"]
    found = step_plan.main([*sizes, "--json", str(file), "--picture", str(picture)])
    assert "OrchMLLM" in capsys.readouterr().out
    assert json.loads(file.read_text())["results"] == found and picture.stat().st_size > 10_000
    packed = [one for one in found if one["instances"] == 16 and one["rearrange"] == "home"]
    assert [one["microbatches"] for one in packed] == [1, 2, 4, 8]
    for one in found:
        assert one["total_ms"] == pytest.approx(one["plan_ms"] + one["compile_ms"]), "of one round"
        for module in step_plan.MODULES:
            assert 1.0 <= one["after"][module] <= one["before"][module] + 1e-9


@pytest.mark.full
@pytest.mark.distributed
def test_balanced_steps(pool, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    sizes = ["--rounds", "1", "--warmup", "0", "--batches", "1", "--scale", "0.34"]
    found = balanced_steps.main([*sizes, "--json", str(file)], pool)
    assert json.loads(file.read_text())["results"] == found
    assert found["as sampled"]["ratio"] == found["as sampled"]["expected"] == 1.0
    assert found["all"]["expected"] < min(1.0, found["llm only"]["expected"])
    assert found["as sampled"]["simulated"] == 1.0
    assert all(x < 1.1 for x in found["all"]["imbalance"].values())
    assert found["all"]["ratio"] == pytest.approx(found["all"]["step_ms"] / found["as sampled"]["step_ms"])


def test_node_rearrangement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nodes.json"
    node_rearrangement.main(["--seconds", "0", "--seeds", "1", "--repeats", "1", "--json", str(file)])
    assert "near home" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["benchmark"] == "node_rearrangement"
    for row in written["results"]["bytes"]:  # every module has figures, as the product places it
        assert row["permuted"] == (row["module"] == "audio") and (row["near"] == row["fast"]) == row["permuted"]
        assert 0 <= row["near"]["max"] <= row["fast"]["max"] < 1
