"""Sweeps: what runs, what is compared, and a sweep that was killed and went on."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record
from wandb.wandb_agent import Agent

from hetero_strategy.errors import ConfigError
from recipes import build, cli, comparison, jobs, sweep, terminal
from tests.recipes.commands import ROOT, SMALL, wait_until_gone
from tests.recipes.test_conf import compose

SWEEPS = sorted(path.stem for path in Path(cli.CONF, "sweep").glob("*.yaml"))
PLACED = [
    {"module": "vision", "ranks": "0", "degrees": "one rank"},
    {"module": "llm", "ranks": "0-1", "degrees": "dp_shard=2"},
]


def job(number: int, *settings: str, **more: Any) -> jobs.Job:
    return jobs.Job(["python", "-m", "recipes.train", "--config-dir=a=b", *settings], str(number), **more)


@pytest.fixture
def compared(tmp_path: Path) -> jobs.Sweep:
    """Two jobs that are done and one that failed, on paper."""
    report = {
        "exact_match": 0.5,
        "split": "test",
        "loss": 1.25,
        "tokens_per_second": 4000.0,
        "processes": 2,
        "layouts": PLACED,
    }
    found = [
        job(
            0, "layout=single", "lr=1", "n=3", state="done", seconds=9.6, code=0, report=report | {"exact_match": None}
        ),
        job(1, "layout=colocated", "lr=1", "n=3", state="done", seconds=20.2, code=0, report=report),
        job(2, "layout=colocated", "lr=2", "n=3", state="failed", seconds=3.0, code=1, message="lr is $2, too | much"),
    ]
    made = jobs.prepare(tmp_path / "swept", "a/b", found)
    (made.folder / "0").mkdir()
    return made


def test_table_and_picture_say_what_differed(compared: jobs.Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared.differences()[1] == {"layout": "colocated", "lr": "1"}
    columns, rows = comparison.table(compared)
    assert columns[:4] == ["job", "layout", "lr", "state"] and columns[-1] == "where modules lived"
    where = "vision 0; llm 0-1 dp_shard=2"
    assert rows[1] == ["1", "colocated", "1", "done", "0.500", "1.2500", "4,000", "20 s", "2", "test", where]
    assert rows[0][4] == "" and rows[2] == ["2", "colocated", "2", "failed", "", "", "", "3 s", "", "", ""]
    comparison.show(compared, terminal.console(width=100))
    said = capsys.readouterr().out
    assert "job 2 failed: layout=colocated lr=2, exit code 1: lr is $2, too | much" in said
    assert "job 0, 1: vision 0; llm 0-1 dp_shard=2" in said
    written = (compared.folder / "sweep.md").read_text().splitlines()
    assert len(written) == 7 and written[3].startswith("| 1 | colocated | 1 | done | 0.500 |")
    assert "Job 2 failed: layout=colocated lr=2, exit code 1" in written[6]
    with Image.open(compared.folder / "sweep.png") as picture:
        assert picture.width > 900 and len(picture.convert("RGB").getcolors(10**6) or []) > 10


def test_brackets_of_messages_and_settings_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.cli, "external", lambda: False)
    found = [job(number, f"model.freeze=[/{name}]", state="done") for number, name in enumerate(("llm", "audio"))]
    made = jobs.prepare(tmp_path / "swept", "a/b", found)
    assert jobs.run(made) is None
    assert "[/llm]" in capsys.readouterr().out
    made.jobs[1].state, made.jobs[1].message = "failed", "[/__w/pytorch/gloo/pair.cc:538] Connection closed"
    comparison.show(made, terminal.console(width=200))
    assert "job 1 failed: model.freeze=[/audio], exit code None: [/__w/pytorch/gloo/pair.cc" in capsys.readouterr().out


def test_a_folder_goes_on_with_its_own_jobs_only(compared: jobs.Sweep) -> None:
    same = [job(0, "layout=single", "lr=1", "n=3")]
    again = jobs.prepare(compared.folder, "other", same)
    assert again == compared and [one.state for one in again.jobs] == ["done", "done", "failed"]
    with pytest.raises(ConfigError, match=r"holds a sweep of other jobs.*resume="):
        jobs.prepare(compared.folder, "other", [job(0, "layout=tp")])
    longer = jobs.prepare(compared.folder, "other", [job(2, *compared.jobs[2].command[4:]), job(3, "lr=9")], first=2)
    assert [one.folder for one in longer.jobs] == ["0", "1", "2", "3"]


def test_a_job_goes_on_at_its_checkpoint(compared: jobs.Sweep) -> None:
    folder = compared.folder / "0"
    assert jobs.command_of(compared.jobs[0], folder) == [*compared.jobs[0].command, f'hydra.run.dir="{folder}"']
    (folder / ".hydra").mkdir()
    (folder / cli.SAVED).write_text("a: 1")
    assert jobs.command_of(compared.jobs[0], folder)[-1].startswith("hydra.run.dir")
    (folder / "checkpoints" / "last.ckpt").mkdir(parents=True)
    assert jobs.command_of(compared.jobs[0], folder) == [*compared.jobs[0].command[:4], f'resume="{folder}"']


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("fine\nerror: lr: too large\nrank 1: another rank stopped; ending\n", 1, "lr: too large"),
        ("error: a.json: 1 fault; mend:\n  sample 'x': bad\n", 1, "a.json: 1 fault; mend: sample 'x': bad"),
        (
            "Traceback (most recent call last):\n  x\ntorch.OutOfMemoryError: CUDA\n50%\r60%",
            1,
            "torch.OutOfMemoryError: CUDA",
        ),
        ("something\nlast words\n", 2, "last words"),
        ("", 1, "it said nothing"),
        ("error: lr: too large", -9, "ended by SIGKILL"),
    ],
)
def test_why_a_job_failed(output: str, code: int, message: str) -> None:
    assert jobs.cause(output, code) == message


@pytest.mark.parametrize(
    ("program", "code", "reported", "state", "message"),
    [
        ("recipes.train", 0, True, "done", None),
        ("recipes.train", 0, False, "failed", "it left no report.json"),
        ("recipes.plan", 0, False, "done", None),
        ("recipes.train", 143, False, "failed", "ended by SIGTERM; train goes on"),
    ],
)
def test_a_job_without_its_report_is_not_done(
    tmp_path: Path, program: str, code: int, reported: bool, state: str, message: str | None
) -> None:
    ended = jobs.Job(["python", "-m", program, "seed=1"], "0", code=code)
    if reported:
        (tmp_path / "report.json").write_text('{"loss": 1.0, "steps": 3, "drawings": 0}')
    jobs.conclude(ended, "step 3\nerror: ended by SIGTERM; train goes on\n" if code else "", tmp_path)
    assert (ended.state, ended.message) == (state, message)
    assert ended.report == ({"loss": 1.0, "steps": 3} if reported else None)


# ---- Weights & Biases' format ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SWEEPS)
def test_parameters_are_fields(name: str) -> None:
    """Every sweep of conf/ forms command lines that compose, whatever its values."""
    found = sweep.read(name)
    found["method"] = "random"
    for settings in sweep.expand(found, 4, random.Random(0)):
        formed = sweep.command(found, settings)
        assert formed[:4] == ["/usr/bin/env", "python", "-m", "recipes.train"]
        cfg = compose(*formed[4:])
        build.check_configuration(cfg)
        build.placement(cfg)
        assert cfg.logger.group == found["name"] and str(cfg.optimizer.lr) == str(settings["optimizer.lr"])


def test_values_reach_hydra_as_what_they_are(tmp_path: Path) -> None:
    values = [None, ["llm"], {"llm": "every 2", "vision": True}, [None, {"llm": 1}]]
    given = {"method": "grid", "program": "p", "command": ["${args_no_hyphens}"]}
    given["parameters"] = {"strategy.recompute": {"values": values}, "strategy.pieces": {"value": None}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(given))
    found = sweep.read(str(tmp_path / "mine.yaml"))
    made = [compose(*sweep.command(found, one)).strategy for one in sweep.expand(found, 0, random.Random())]
    assert [OmegaConf.to_container(one)["recompute"] for one in made] == values
    assert all(one.pieces is None for one in made)


def test_a_sweep_is_registered_where_its_agent_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    told: list[Any] = []
    monkeypatch.setattr("wandb.sweep", lambda sweep, **whose: told.append(whose) or "id")
    monkeypatch.setattr("wandb.agent", lambda sweep, count, **whose: told.append(whose))
    sweep._register({"project": "p", "entity": "team"}, 1)
    assert told == [{"project": "p", "entity": "team"}] * 2


def test_grid_and_random_search() -> None:
    rng = random.Random(0)
    wide = (
        {"min": 1, "max": 3},
        {"min": 0.0, "max": 1.0},
        {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0},
    )
    rare = {"values": ["a", "b"], "probabilities": [0.0, 1.0]}
    parameters = dict(zip(("whole", "real", "log"), wide, strict=True)) | {"one": {"value": 7}, "rare": rare}
    drawn = sweep.expand({"method": "random", "parameters": parameters}, 200, rng)
    assert len(drawn) == 200 and {d["whole"] for d in drawn} == {1, 2, 3} and {d["one"] for d in drawn} == {7}
    assert {d["rare"] for d in drawn} == {"b"} and all(0 <= d["real"] <= 1 for d in drawn)
    assert 0.3 < sum(d["log"] < 1e-2 for d in drawn) / 200 < 0.7, "evenly over powers of ten"
    listed = {"method": "grid", "parameters": {"a": {"values": [1, 2]}, "b": {"value": 3}, "c": {"values": [4, 5]}}}
    grid = sweep.expand(listed, 0, rng)
    assert [tuple(one.values()) for one in grid] == [(1, 3, 4), (1, 3, 5), (2, 3, 4), (2, 3, 5)]
    assert sweep.expand(listed, 3, rng) == grid[:3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "bayes"}, "method=bayes needs Weights & Biases' server.*method=random"),
        ({"method": "random"}, "give count=<runs>"),
        ({"parameters": {"a": {"min": 0, "max": 1}}}, "parameters a: a grid needs values"),
        ({"early_terminate": {}}, "early_terminate needs Weights & Biases' server"),
        ({"parameters": {"a": {"mu": 0, "sigma": 1}}}, r"parameters.a: \['mu', 'sigma'\] needs"),
        (
            {"parameters": {"a": {"min": 1, "max": 2, "distribution": "q_beta"}}, "method": "random"},
            "distribution q_beta",
        ),
    ],
)
def test_what_the_server_alone_can_do_is_refused(given: dict[str, Any], message: str) -> None:
    base = {"method": "grid", "parameters": {"a": {"values": [1]}}}
    with pytest.raises(ConfigError, match=message):
        sweep.expand(base | given, 3 if "distribution" in message else 0, random.Random(0))


def test_online_only_for_who_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for mode, key, found in (("offline", "k", False), ("online", "", True), ("", "k", True), ("", "", False)):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_API_KEY", key)
        assert sweep.online() is found
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert sweep.online()


# ---- processes -------------------------------------------------------------------------------------------------------


SIX = [*SMALL, "trainer.max_steps=6", "checkpoint.every_n_steps=2", "report.examples=1"]


@pytest.fixture(scope="module")
def killed(given: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A sweep that is killed in its first job and goes on."""
    folder = tmp_path_factory.mktemp("swept")
    values = "layout=single,digits_draw,colocated"
    command = [sys.executable, "-m", "recipes.train", "-m", values, f"hydra.sweep.dir={folder}", *given, *SIX]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 400
    while not (folder / "0" / "checkpoints" / "last.ckpt" / "checkpoint.json").exists() and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    said = process.communicate()[0]
    left = wait_until_gone(folder)
    state = [one["state"] for one in json.loads((folder / jobs.STATE).read_text())["jobs"]]
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        failed = jobs.run(jobs.Sweep.load(folder))
    finally:
        os.chdir(here)
    return {"folder": folder, "said": said, "left": left, "state": state, "failed": str(failed)}


SAVES = """
import os, signal, sys, time
def told(*_):
    print("told", flush=True)
    time.sleep(1)
    open("saved", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
open("up", "w").close()
time.sleep(60)
"""
DRIVES = """
import sys
from pathlib import Path
from recipes import jobs
jobs.run(jobs.prepare(Path.cwd(), "s", [jobs.Job([sys.executable, "-c", sys.argv[1]], "0")]))
"""


@pytest.mark.parametrize(
    ("whom", "told"), [(os.kill, signal.SIGTERM), (os.kill, signal.SIGHUP), (os.killpg, signal.SIGTERM)]
)
def test_a_job_may_save_when_the_sweep_is_told_to_end(tmp_path: Path, whom: Any, told: signal.Signals) -> None:
    command, paths = [sys.executable, "-c", DRIVES, SAVES], {**os.environ, "PYTHONPATH": str(ROOT)}
    hears = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    driver = subprocess.Popen(
        command, cwd=tmp_path, env=paths, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=hears,
    )  # fmt: skip
    try:
        while not (tmp_path / "up").exists():
            assert driver.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        whom(driver.pid, told)
        assert driver.wait(30) == 143
    finally:
        driver.kill()
    assert (tmp_path / "saved").exists() and "told" in (tmp_path / "0" / jobs.OUTPUT).read_text()
    assert jobs.Sweep.load(tmp_path).jobs[0].state == "running", "it goes on"


def agent_runs(folder: Path, more: list[str]) -> tuple[subprocess.Popen[bytes], list[str], Path]:
    """What the agent of Weights & Biases starts for the first run of conf/sweep/layouts.yaml, and what we would."""
    config = yaml.safe_load(Path(cli.CONF, "sweep", "layouts.yaml").read_text())
    config["command"] += [*more, f"hydra.run.dir={folder}"]
    settings = {name: parameter["values"][0] for name, parameter in config["parameters"].items()}
    args = {name: {"value": value} for name, value in settings.items()}
    before = dict(os.environ)
    path = f"{Path(sys.executable).parent}:{before['PATH']}"
    os.environ |= {"WANDB_SWEEP_ID": "s123", "WANDB_PROJECT": config["project"], "WANDB_DIR": str(folder)}
    os.environ |= {"PATH": path, "PYTHONPATH": str(ROOT)}
    try:
        agent = Agent(None, None)
        agent._sweep_command = config["command"]
        agent._command_run({"run_id": "r456", "args": args, "program": config["program"]})
    finally:
        os.environ.clear()
        os.environ |= before
    return agent._run_processes["r456"]._popen, sweep.command(config, settings), folder


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_sweep_goes_on(killed: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """And what is done is not run again."""
    said, folder = killed["said"], killed["folder"]
    assert "jobs: 3" in said and f"-m recipes.train resume={folder}" in said
    assert "elapsed: layout=single" in said and "run folder" in said, "what a job says is shown"
    assert not killed["left"] and killed["state"] == ["running", "waiting", "waiting"]
    first, refused, last = jobs.Sweep.load(folder).jobs
    assert [first.state, refused.state, last.state] == ["done", "failed", "done"]
    assert first.report and last.report and (first.report["processes"], last.report["processes"]) == (1, 2)
    assert first.report["steps"] == last.report["steps"] == 6
    assert "from" in (folder / "0" / jobs.OUTPUT).read_text().split("run folder")[2], "goes on at its checkpoint"
    assert refused.code == 1 and "'audio'" in str(refused.message)
    assert f"1 of 3 jobs failed: layout=digits_draw, exit code 1: {refused.message}" in killed["failed"]
    assert "| 2 | colocated | done |" in (folder / "sweep.md").read_text() and (folder / "sweep.png").is_file()
    found = jobs.Sweep.load(folder)
    found.jobs = [found.jobs[0], found.jobs[2]]
    capfd.readouterr()
    assert jobs.run(found) is None
    said = capfd.readouterr().out
    assert "elapsed" not in said and "done" in said and "failed" not in said


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_agent_of_weights_and_biases_runs_a_job(tmp_path: Path, given: tuple[str, ...]) -> None:
    process, formed, folder = agent_runs(tmp_path, [*given, *SIX])
    assert process.args == formed and formed[4:6] == ["layout=single", "optimizer.lr=0.001"]
    assert process.wait(300) == 0
    assert json.loads((folder / "report.json").read_text())["steps"] == 6
    (run,) = folder.glob("wandb/offline-run-*-r456/run-r456.wandb")
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
