"""Several runs with one command: hydra's multirun, and what an agent of Weights & Biases starts for conf/sweep."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.wandb_agent import Agent

from hetero_strategy.testing import Pool
from recipes import build, cli
from tests.recipes.commands import ROOT, SMALL, run_forked, wait_until_gone
from tests.recipes.test_conf import compose

SWEEPS = sorted(Path(cli.CONF, "sweep").glob("*.yaml"))
SIX = [*SMALL, "trainer.max_steps=6", "checkpoint.every_n_steps=2", "report.examples=1"]


def drawn(parameter: Mapping[str, Any], rng: random.Random) -> Any:
    """A value that Weights & Biases may choose for a parameter."""
    if values := parameter.get("values", [parameter["value"]] if "value" in parameter else []):
        return rng.choice(values)
    low, high = parameter["min"], parameter["max"]
    return rng.randint(low, high) if isinstance(low, int) else rng.uniform(low, high)


@pytest.mark.full
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_parameters_are_fields(path: Path) -> None:
    """Every sweep of conf/ forms command lines that compose, whatever its values."""
    sweep, rng = yaml.safe_load(path.read_text()), random.Random(0)
    for _ in range(4):
        settings = {name: drawn(parameter, rng) for name, parameter in sweep["parameters"].items()}
        args = create_sweep_command_args({"args": {name: {"value": value} for name, value in settings.items()}})
        command = create_sweep_command(sweep["command"])
        assert command[2:6] == ["-m", "${program}", "${args_no_hyphens}", "logger=wandb"]
        cfg = compose(*args["args_no_hyphens"], *command[5:])
        build.check_configuration(cfg)
        build.placement(cfg)
        assert cfg.logger.group == sweep["name"] and str(cfg.optimizer.lr) == str(settings["optimizer.lr"])


@pytest.mark.full
def test_each_job_of_a_multirun_has_the_processes_of_its_layout(
    pool: Pool, tmp_path: Path, given: tuple[str, ...]
) -> None:
    """A job that fails is named, and does not keep the next one from running."""
    jobs = ("hydra.mode=MULTIRUN", f"hydra.sweep.dir={tmp_path}", "layout=digits_draw,colocated")
    ended = run_forked(tmp_path / "all", *jobs, *given, *SIX, timeout=450)
    output = ended.output
    assert ended.code == 1, output
    reports = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/report.json")}
    assert {job: (report["steps"], report["processes"]) for job, report in reports.items()} == {"1": (6, 2)}
    assert f"job 0 of {tmp_path} ended with code 1" in output and "'audio'" in output
    assert "#1 : layout=colocated" in output and "Traceback" not in output


@pytest.mark.full
def test_a_multirun_that_is_told_to_end_lets_its_job_save(tmp_path: Path, given: tuple[str, ...]) -> None:
    many = ("trainer.max_steps=500", "checkpoint.every_n_steps=400", "trainer.val_check_interval=500")
    command = [sys.executable, "-m", "recipes.train", "--multirun", f"hydra.sweep.dir={tmp_path}"]
    command += ["layout=single,colocated", *given, *SMALL, *many]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began = tmp_path / "0" / "metrics"
    while not list(began.glob("*/metrics.csv")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert (tmp_path / "0" / "checkpoints" / "last.ckpt").is_dir() and not (tmp_path / "1").exists(), output
    assert f"resume={tmp_path / '0'} goes on" in output and not wait_until_gone(tmp_path)


def agent_runs(folder: Path, more: list[str]) -> subprocess.Popen[bytes]:
    """What the agent of Weights & Biases starts for the first run of conf/sweep/layouts.yaml."""
    config = yaml.safe_load(Path(cli.CONF, "sweep", "layouts.yaml").read_text())
    config["command"] += [*more, f"hydra.run.dir={folder}"]
    args = {name: {"value": parameter["values"][0]} for name, parameter in config["parameters"].items()}
    before = dict(os.environ)
    path = f"{Path(sys.executable).parent}:{before['PATH']}"
    os.environ |= {"WANDB_SWEEP_ID": "s123", "WANDB_PROJECT": config["project"], "WANDB_DIR": str(folder)}
    os.environ |= {"WANDB_MODE": "offline", "PATH": path, "PYTHONPATH": str(ROOT)}
    try:
        agent = Agent(None, None)
        agent._sweep_command = config["command"]
        agent._command_run({"run_id": "r456", "args": args, "program": config["program"]})
    finally:
        os.environ.clear()
        os.environ |= before
    return agent._run_processes["r456"]._popen


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_agent_of_weights_and_biases_runs_a_job(tmp_path: Path, given: tuple[str, ...]) -> None:
    process = agent_runs(tmp_path, [*given, *SIX])
    assert process.wait(300) == 0
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 6
    (run,) = tmp_path.glob("wandb/offline-run-*-r456/run-r456.wandb")
    found = records(run)
    (began,) = (record.run for record in found if record.HasField("run"))
    assert (began.run_group, began.sweep_id, began.project) == ("layouts", "s123", "hetero_strategy")
    config = {item.key: json.loads(item.value_json) for record in found for item in record.config.update}
    assert config["configuration"]["optimizer"]["lr"] == 0.001 and config["layouts"]["llm"] == "0 one rank"
    logged = {item.key or item.nested_key[0] for record in found for item in record.history.item}
    assert {f"throughput/{name}/rows_per_second" for name in ("vision", "audio", "llm")} <= logged
    assert {"val/exact_match", "val/loss", "timeline", "balance"} <= logged
    pictures = {path.name.split("_")[0] for path in run.parent.glob("files/media/images/*.png")}
    assert pictures == {"timeline", "balance"}


def records(path: Path) -> list[Record]:
    """The records of a run of Weights & Biases, which are in LevelDB's log format: pieces in blocks of 32 KiB."""
    raw, place, found, pieces = path.read_bytes(), 7, [], b""
    while place + 7 <= len(raw):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        size, kind = int.from_bytes(raw[place + 4 : place + 6], "little"), raw[place + 6]
        pieces += raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(pieces))
            pieces = b""
    return found
