"""A run of recipes/train.py from end to end, and a killed one that goes on as if it had not been killed."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from hetero_strategy.checkpoint import describe
from hetero_strategy.errors import CheckpointError
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.testing import Pool
from recipes import cli
from recipes.train import to_report
from tests.recipes.commands import ROOT, SMALL, Ended, run_forked, run_on_ranks, start, wait_until_gone

STEPS, SAVED_EVERY = 18, 3
JOB = (
    *("layout=colocated", *SMALL, f"trainer.max_steps={STEPS}", "trainer.val_check_interval=9"),
    f"checkpoint.every_n_steps={SAVED_EVERY}",
)
"""Three epochs of 48 samples, in steps of 8."""


def rows(folder: Path, metric: str, version: int = 0) -> list[dict[str, str]]:
    """Lines of a run's log that have a metric, with all digits of it."""
    path = folder / "metrics" / f"version_{version}" / "metrics.csv"
    return [row for row in csv.DictReader(path.open()) if row.get(metric)]


def losses(folder: Path, version: int = 0) -> dict[int, str]:
    """Step -> training loss."""
    return {int(row["step"]): row["train/loss"] for row in rows(folder, "train/loss", version)}


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory, given: tuple[str, ...]) -> tuple[Path, Ended]:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    profiled = "monitor.profile={steps:[2,4],ranks:[1]}"
    return folder, run_on_ranks(pool, 2, folder, *JOB, profiled, *given)


def test_a_run_leaves_a_report(tmp_path: Path, whole: tuple[Path, Ended]) -> None:
    folder, result = whole
    assert result.code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == STEPS and report["processes"] == 2 and report["resumed"] is None
    assert (report["split"], report["samples"]) == ("test", 10) and "of 10 test samples" in result.output
    assert 0 <= report["exact_match"] <= 1 and report["loss"] > 0
    assert report["chosen_by"]["metric"] == "val/exact_match" and 0 <= report["chosen_by"]["value"] <= 1
    shown = [example["id"] for example in report["examples"]]
    assert all(name.startswith("test-") for name in shown), shown
    assert set(report["exact_match_by_kind"]) <= {"vision", "audio", "vision+audio", "text"}
    assert report["train_seconds"] > 0 and report["tokens_per_second"] > 0 and report["data_wait_seconds"] > 0
    spent = report["seconds"]
    assert min(spent[part] for part in ("step", "data", "checkpoint", "between", "validation")) > 0
    assert spent["step"] + spent["data"] + spent["checkpoint"] + spent["between"] == pytest.approx(
        report["train_seconds"], rel=0.02, abs=0.05
    )
    assert report["layouts"][2] == {"module": "llm", "ranks": "0-1", "degrees": "dp_shard=2"}
    assert report["active_parameters"] == report["parameters"]
    assert set(report["parameters"]) == {"vision", "audio", "llm"} and min(report["parameters"].values()) > 1000
    assert Path(report["checkpoint"]).is_dir() and len(report["examples"]) == 5
    assert {"question", "answer", "prediction", "files", "exact"} <= set(report["examples"][0])
    assert (folder / "examples.png").stat().st_size > 1000
    last = report["timeline"]
    assert last["measured_seconds"] > 0 and last["simulated_seconds"] > 0 and 0 <= last["measured_bubble"] < 1
    assert last["measured_seconds"] < report["train_seconds"], "of one clock"
    assert 0 < last["steps"] < STEPS and last["ratio"] > 0, "the first one warms up"
    assert (folder / "timeline.png").stat().st_size > 1000
    trace = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    ran = [{(e["tid"], e["name"]) for e in trace if e["ph"] == "X" and e["pid"] == pid} for pid in (0, 1)]
    assert ran[0] == ran[1], "simulated and measured are one schedule"
    costs = BalanceConfig.of({"costs": json.loads((folder / "balance.json").read_text())["costs"]}).costs
    assert set(costs) == {"vision", "audio", "llm"}
    for cost in costs.values():
        assert 0 < cost.alone(np.array([30]))[0] < 10, "seconds of a forward"
    python, _, arguments = report["resume"].partition(" ")
    assert shutil.which(python) and arguments == f"-m recipes.train resume={folder} trainer.max_steps={2 * STEPS}"
    assert result.output.count(f"-m recipes.train resume={folder}") == 2 and report["resume"] in result.output
    assert "exact match" in result.output and report["balance"]["workers"] == 0

    job = (f"run={folder}", "layout=single", "split=val", "monitor.progress_bar=false")
    again = run_forked(tmp_path / "again", *job, module="recipes.evaluate")
    assert again.code == 0, again.output
    evaluation = json.loads((tmp_path / "again" / "report.json").read_text())
    assert (evaluation["processes"], evaluation["split"], evaluation["samples"]) == (1, "val", 12)
    assert evaluation["exact_match"] == report["chosen_by"]["value"]
    (logged,) = rows(tmp_path / "again", "val/exact_match")
    assert float(logged["val/exact_match"]) == pytest.approx(evaluation["exact_match"], rel=1e-4)
    chosen = max(reversed(rows(folder, "val/loss")), key=lambda row: float(row["val/exact_match"]))
    assert evaluation["loss"] == pytest.approx(float(chosen["val/loss"]), rel=1e-4)


@pytest.mark.full
def test_a_run_that_fills_bubbles_says_how_much_lies_there(pool: Pool, tmp_path: Path, given: tuple[str, ...]) -> None:
    layout = ("layout=colocated", "layout.llm.dp_shard=1", "layout.llm.pp=2", "strategy.fill=fine")
    result = run_on_ranks(pool, 2, tmp_path / "run", *SMALL, *layout, *given)
    assert result.code == 0, result.output
    said = json.loads((tmp_path / "run" / "report.json").read_text())["timeline"]["filling"]
    assert re.fullmatch(r"-?\d+% of the work of vision and audio in bubbles", said)
    assert f"; {said}, simulated" in " ".join(result.output.split())
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    assert [said in e["args"]["name"] for e in trace if e["name"] == "process_name"] == [True, False]


@pytest.mark.full
def test_a_run_imports_what_registers_its_schedule_and_policy(
    pool: Pool, tmp_path: Path, given: tuple[str, ...]
) -> None:
    named = ("strategy.schedule=own_schedule", "data.module.balance.policy=own_policy")
    run_folder, own = tmp_path / "run", "imports=[tests.recipes.own_names]"
    ended = run_forked(run_folder, *SMALL, *given, "layout=single", own, *named)
    assert ended.code == 0, ended.output
    assert OmegaConf.load(run_folder / ".hydra" / "config.yaml").imports == ["tests.recipes.own_names"]
    again = run_forked(tmp_path / "again", f"run={run_folder}", "monitor.progress_bar=false", module="recipes.evaluate")
    assert again.code == 0 and "exact match" in again.output, again.output


@pytest.mark.full  # tests/distributed/test_auto.py trains what is planned
def test_the_planner_chooses_where_the_layout_is_auto(pool: Pool, tmp_path: Path, given: tuple[str, ...]) -> None:
    brief = ("imports=[tests.planner.brief_plans]", f"++hydra.job.env_set.XDG_CACHE_HOME={tmp_path}")
    ended = run_on_ranks(pool, 2, tmp_path / "run", *given, *SMALL, "layout=auto", "trainer.devices=2", *brief)
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    assert found["processes"] == 2 and [one["module"] for one in found["layouts"]] == ["vision", "audio", "llm"]
    said = re.search(r"layouts='auto': \d+ candidates.*\n((?:  .*\n)+)", ended.output)
    assert said is not None, ended.output
    planned = [f"{one['module']}: ranks {one['ranks']}, {one['degrees']}" for one in found["layouts"]]
    assert [line.strip() for line in said[1].splitlines()][:3] == planned


def test_a_profiled_run_leaves_a_trace_of_its_steps(whole: tuple[Path, Ended]) -> None:
    folder, _ = whole
    assert [path.name for path in (folder / "profile").glob("*.json")] == ["rank1.json"]
    trace = json.loads((folder / "profile" / "rank1.json").read_text())
    timeline = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    ran = Counter(e["name"] for e in timeline if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 1))
    seen = Counter(e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation")
    assert ran and {name: seen[name] for name in ran} == dict.fromkeys(ran, 2), "two steps, by the timeline's names"
    assert trace["distributedInfo"]["rank"] == 1


def killed_at_random(folder: Path, given: tuple[str, ...], seed: int) -> str:
    """Start the job and kill its first process somewhere in the steps between one of its first four checkpoints and
    the next one, or while either is written; returns what it printed.
    """
    chance = random.Random(seed)
    process = start(folder, *JOB, *given)
    last, seen = folder / "checkpoints" / "last.ckpt", [time.monotonic()]
    for number in range(1, chance.randint(1, 4) + 1):
        while saved_step(last) < number * SAVED_EVERY:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        seen.append(time.monotonic())
    interval = seen[-1] - seen[-2] if len(seen) > 2 else 0.3
    time.sleep(chance.random() * interval)
    os.kill(process.pid, signal.SIGKILL)
    return process.communicate()[0]


def saved_step(checkpoint: Path) -> int:
    """Optimizer steps of a checkpoint, 0 while there is none."""
    try:
        return describe(checkpoint).step or 0
    except CheckpointError:
        return 0


@pytest.mark.full
def test_killed_and_resumed_is_the_same_run(tmp_path: Path, whole: tuple[Path, Ended], given: tuple[str, ...]) -> None:
    seed = int(os.environ.get("KILL_SEED", secrets.randbelow(10**6)))
    print(f"repeat with KILL_SEED={seed}")
    folder = tmp_path / "run"
    output = killed_at_random(folder, given, seed)
    assert not wait_until_gone(folder) and not (folder / "report.json").exists(), output
    step = saved_step(folder / "checkpoints" / "last.ckpt")
    assert step in range(SAVED_EVERY, STEPS, SAVED_EVERY)
    print(f"killed after the checkpoint of step {step}")

    (command,) = re.findall(r"^resume +(.+)$", output, re.M)
    resumed = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "torchao" not in resumed.stderr  # nor what other libraries say of themselves
    report = json.loads((folder / "report.json").read_text())
    epoch, place = divmod(step, 6)
    order = np.random.Generator(np.random.PCG64([0, epoch])).permutation(48)
    samples = [f"train-{number:06d}" for number in order[8 * place : 8 * place + 8]]
    assert report["resumed"] == {"step": step, "epoch": epoch, "samples": samples}
    assert f"goes on     at step {step} (epoch {epoch}), with samples {samples[0]}, " in resumed.stdout

    found, expected = losses(folder, version=1), losses(whole[0])
    assert list(expected) == list(range(STEPS)) and len(set(expected.values())) == STEPS
    assert found == {number: loss for number, loss in expected.items() if number >= step}
    unbroken = json.loads((whole[0] / "report.json").read_text())
    for name in ("steps", "exact_match", "loss", "chosen_by", "examples"):
        assert report[name] == unbroken[name], name


@pytest.mark.full
def test_processes_that_torchrun_starts_again_go_on(
    tmp_path: Path, whole: tuple[Path, Ended], given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is killed after the first checkpoint; losses are those of a run that nobody stopped."""
    folder, launcher = tmp_path / "run", ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    process = start(folder, *JOB, *given, launcher=launcher)
    while not saved_step(folder / "checkpoints" / "last.ckpt"):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    step = json.loads((folder / "report.json").read_text())["resumed"]["step"]
    assert step in range(SAVED_EVERY, STEPS, SAVED_EVERY)
    expected = losses(whole[0])
    assert losses(folder, version=1) == {number: loss for number, loss in expected.items() if number >= step}


@pytest.mark.parametrize(("best", "last", "named"), [("b", "l", "b"), ("", "l", "l"), ("", "", "/r/hpc_ckpt_1.ckpt")])
def test_the_report_is_of_the_checkpoint_that_it_names(best: str, last: str, named: str) -> None:
    kept = [SimpleNamespace(best_model_path=path) for path in (best, last)]
    trainer: Any = SimpleNamespace(checkpoint_callbacks=kept)
    assert to_report(trainer, Path("/r/hpc_ckpt_1.ckpt")) == named


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / cli.SAVED).write_text("")
    assert cli.last_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        cli.last_checkpoint(tmp_path / "checkpoints" / "last.ckpt")


@pytest.mark.full
def test_a_finished_run_is_trained_on_by_the_line_that_it_prints(
    pool: Pool, tmp_path: Path, given: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    first = run_forked(folder, "layout=single", *SMALL, *given)
    assert first.code == 0, first.output
    said = re.findall(r"^resume +(.+)$", first.output, re.M)[-1]
    assert shlex.split(said)[-2:] == [f"resume={folder}", "trainer.max_steps=6"]
    kept = json.loads((folder / "report.json").read_text())

    over = run_forked(folder, f"resume={folder}")
    assert over.code == 0, over.output
    again = json.loads((folder / "report.json").read_text())
    for name in ("steps", "train_seconds", "timeline", "memory", "exact_match", "loss", "resume"):
        assert again[name] == kept[name], name

    more = run_forked(folder, f"resume={folder}", "trainer.max_steps=5")
    assert more.code == 0, more.output
    report = json.loads((folder / "report.json").read_text())
    assert (report["steps"], report["steps_here"], report["resumed"]["step"]) == (5, 2, 3)
    assert re.search(r"training +5 steps, 2 of them here, [\d.]+ s, [\d.]+ steps/s, \d+ tokens/s", more.output)
    assert report["resume"].endswith("trainer.max_steps=10")
