"""`python -m recipes.train` from end to end, and a killed run that goes on."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hetero_strategy.data.balancing import Balance
from tests.recipes.commands import SMALL, run, start, wait_until_gone

pytestmark = pytest.mark.slow


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss, over all parts of a run."""
    found = {}
    for path in sorted(folder.glob("metrics/version_*/metrics.csv")):
        for row in csv.DictReader(path.open()):
            if row.get("train/loss"):
                found[int(row["step"])] = float(row["train/loss"])
    return found


def test_a_run_leaves_a_report(tmp_path: Path, given: tuple[str, ...]) -> None:
    result = run(tmp_path, "layout=colocated", *given, *SMALL)
    assert result.code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 3 and report["processes"] == 2 and report["samples"] == 12
    assert 0 <= report["exact_match"] <= 1 and report["val_loss"] > 0
    assert set(report["exact_match_by_kind"]) <= {"vision", "audio", "vision+audio", "text"}
    assert report["train_seconds"] > 0 and report["tokens_per_second"] > 0 and report["data_wait_seconds"] > 0
    spent = report["seconds"]
    assert min(spent[part] for part in ("step", "data", "checkpoint", "between", "validation")) > 0
    assert spent["step"] + spent["data"] + spent["checkpoint"] + spent["between"] == pytest.approx(
        report["train_seconds"], abs=0.05
    )
    assert report["layouts"][2] == {"module": "llm", "ranks": "0-1", "degrees": "dp_shard=2"}
    assert set(report["parameters"]) == {"vision", "audio", "llm"} and min(report["parameters"].values()) > 1000
    assert Path(report["checkpoint"]).is_dir() and len(report["examples"]) == 5
    assert {"question", "answer", "prediction", "files", "exact"} <= set(report["examples"][0])
    assert (tmp_path / "examples.png").stat().st_size > 1000
    last = report["timeline"]
    assert last["measured_seconds"] > 0 and last["simulated_seconds"] > 0 and 0 <= last["measured_bubble"] < 1
    assert last["measured_seconds"] < report["train_seconds"], "of one clock"
    assert last["steps"] == 2 and last["ratio"] > 0, "the first one warms up"
    assert last["host_before"] > 0 and last["host_after"] > 0, "schedule and routes, sums over ranks"
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    ran = [{(e["tid"], e["name"]) for e in trace if e["ph"] == "X" and e["pid"] == pid} for pid in (0, 1)]
    assert ran[0] == ran[1], "simulated and measured are one schedule"
    costs = Balance.of({"costs": json.loads((tmp_path / "balance.json").read_text())["costs"]}).costs
    assert set(costs) == {"vision", "audio", "llm"}
    for cost in costs.values():
        assert 0 < cost.alone(np.array([30]))[0] < 10, "seconds of a forward"
    python, _, arguments = report["resume"].partition(" ")
    assert shutil.which(python) and arguments == f"-m recipes.train resume={tmp_path}"
    assert result.output.count(report["resume"]) == 2 and "exact match" in result.output

    again = run(
        tmp_path / "again", f"run={tmp_path}", "layout=single", "monitor.progress_bar=false", module="recipes.evaluate"
    )
    assert again.code == 0, again.output
    evaluation = json.loads((tmp_path / "again" / "report.json").read_text())
    assert evaluation["processes"] == 1 and evaluation["exact_match"] == report["exact_match"]
    assert evaluation["val_loss"] == pytest.approx(report["val_loss"], rel=1e-4)


def test_killed_and_resumed_is_the_same_curve(tmp_path: Path, given: tuple[str, ...]) -> None:
    job = ("layout=colocated", *given, *SMALL, "trainer.max_steps=9", "checkpoint.every_n_steps=3")
    whole = start(tmp_path / "whole", *job)
    folder = tmp_path / "killed"
    process = start(folder, *job, "trainer.limit_val_batches=0")
    end = time.monotonic() + 90
    while not (folder / "checkpoints" / "last.ckpt" / "checkpoint.json").exists() and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not wait_until_gone(folder)

    output, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, output
    resumed = run(folder, f"resume={folder}")
    assert resumed.code == 0, resumed.output
    expected, found = losses(tmp_path / "whole"), losses(folder)
    assert set(expected) == set(range(9))
    later = {step: loss for step, loss in found.items() if step >= 3}
    assert max(later) == 8 and later == pytest.approx({step: expected[step] for step in later}, rel=1e-5)
    assert json.loads((folder / "report.json").read_text())["steps"] == 9
