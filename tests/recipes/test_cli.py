"""Command lines: which run folder they lead to, what goes together, and where configuration files are searched."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from hetero_strategy.errors import ConfigError
from recipes import cli
from recipes.layout_file import train_with
from tests.recipes.test_conf import compose


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what launchers set."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))] + ["RANK", "LOCAL_RANK"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def run_at(folder: Path) -> Path:
    """A run folder."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / cli.SAVED).write_text("a: 1")
    return folder


@pytest.mark.parametrize(
    ("set_by_slurm", "folder", "external"),
    [
        ({}, False, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, True, False),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, True, True),
        ({"SLURM_PROCID": "0"}, False, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFB)}, False, False),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"},
            False,
            False,
        ),
    ],
    ids=["no job", "one process of srun", "one of two", "batch script", "its step", "shell of four tasks"],
)
def test_what_srun_started_has_the_folder_of_its_job(
    environment: pytest.MonkeyPatch, set_by_slurm: dict[str, str], folder: bool, external: bool
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", **set_by_slurm}.items():
        environment.setenv(name, value)
    assert ('hydra.run.dir="out/slurm-7"' in cli.with_run_folder([], "out")) == folder
    assert cli.with_run_folder(["hydra.run.dir=mine"], "out") == ["hydra.run.dir=mine"]
    assert cli.external() == external


def test_runs_of_one_step_of_srun_have_folders_of_their_own(environment: pytest.MonkeyPatch) -> None:
    """Such as those that an agent of a sweep starts; a job that is queued again finds the one of before."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        environment.setenv(name, value)

    def folder(rank: int, *arguments: str) -> str:
        environment.setenv("SLURM_PROCID", str(rank))
        (found,) = (a for a in cli.with_run_folder([*arguments], "out") if a.startswith("hydra.run.dir="))
        return found

    assert folder(0) == 'hydra.run.dir="out/slurm-7.2"'
    first, second = folder(0, "seed=1"), folder(0, "seed=2")
    assert first != second and first == folder(1, "seed=1") and first.startswith('hydra.run.dir="out/slurm-7.2-')


def test_a_checkpoint_that_waited_for_its_successor_is_gone_on_from(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SLURM_PROCID", "SLURM_RESTART_COUNT"):
        environment.setenv(name, "1")
    assert cli.saved_before(tmp_path) is None
    (tmp_path / "hpc_ckpt_1.ckpt").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt.old").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last.ckpt.tmp-0a").mkdir()
    os.utime(tmp_path / "hpc_ckpt_1.ckpt", (1, 1))
    assert cli.saved_before(tmp_path) == tmp_path / "checkpoints" / "last.ckpt"


def test_a_run_goes_on_in_its_own_folder_alone(tmp_path: Path) -> None:
    run = run_at(tmp_path / "nullable" / "run")
    own = f'hydra.run.dir="{run}"'
    assert cli.resumed([f"resume={run}"]) == str(run) and cli.resumed(["resume=null"]) == ""
    assert cli.with_run_folder([f"resume={run}"]) == [f"resume={run}", own, "hydra.output_subdir=null"]
    assert cli.with_run_folder([own, f"resume={run}"]) == [own, f"resume={run}", "hydra.output_subdir=null"]
    with pytest.raises(ConfigError, match=r"a run continues in its own folder; leave out hydra.run.dir=other"):
        cli.with_run_folder([f"resume={run}", "hydra.run.dir=other"])
    for sweep in ("-m", "--multirun", "hydra.mode=MULTIRUN"):
        with pytest.raises(ConfigError, match="jobs of a multirun are new runs"):
            cli.with_run_folder([f"resume={run}", sweep])


def test_a_configuration_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed, or whose disk is full, while it is written keeps the one of before."""
    run, save = run_at(tmp_path / "run"), OmegaConf.save
    monkeypatch.setattr(cli, "rank", lambda: 0)

    def cut_short(content: Any, path: Path) -> None:
        path.write_text("a:")
        raise OSError("No space left on device")

    monkeypatch.setattr(cli.OmegaConf, "save", cut_short)
    with pytest.raises(OSError):
        cli.save_configuration(compose(), run)
    assert (run / cli.SAVED).read_text() == "a: 1"
    monkeypatch.setattr(cli.OmegaConf, "save", save)
    cli.save_configuration(OmegaConf.create({"a": 2}), run)
    assert OmegaConf.load(run / cli.SAVED) == {"a": 2} and len(list((run / ".hydra").iterdir())) == 2


def test_a_layout_file_is_found_beside_other_folders(tmp_path: Path) -> None:
    mine, plan = tmp_path / "mine", tmp_path / "a plan" / "layout"
    for folder in (mine / "seeds", plan):
        folder.mkdir(parents=True)
    (mine / "seeds" / "five.yaml").write_text("# @package _global_\nseed: 5\n")
    (plan / "planned.yaml").write_text("# @package _global_\nlayout: {llm: {ranks: [0]}}\n")
    given = ["+seeds=five", f"hydra.searchpath=[file://{mine}]", f"layout={plan}/planned.yaml"]
    found = cli.with_layout_file(given)
    assert [a for a in found if "searchpath" in a] == [f'hydra.searchpath=["file://{plan}/..","file://{mine}"]']
    cfg = compose(*found)
    assert (cfg.seed, cfg.layout.llm.ranks) == (5, [0])
    (plan / "planned.yaml").rename(plan / "single.yaml")
    with pytest.raises(ConfigError, match="conf/layout has one of this name, which hydra finds first; rename it"):
        cli.with_layout_file([f"layout={plan}/single.yaml"])
    assert cli.with_layout_file([f"layout={cli.CONF}/layout/single.yaml"])[0] == "layout=single"


def test_commands_to_copy_say_what_this_one_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the overrides of the run and of this command line, but without the ranks of the run and its layout file."""
    run = run_at(tmp_path / "run")
    asked = ["data=mine", "trainer.devices=2", "trainer.num_nodes=3", "trainer.devices_kept=1", "layout=planned"]
    asked += ["optimizer.lr=1e-3", "optimizer.lr=2e-3", "optimizer.lr=1e-3"]
    OmegaConf.save(OmegaConf.create(asked), run / cli.ASKED)

    config = SimpleNamespace(overrides=SimpleNamespace(task=["cluster=h100"]))
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: config)
    monkeypatch.setattr(cli.HydraConfig, "initialized", lambda: True)
    own = ("cluster", "trainer.devices", "trainer.num_nodes")
    words = shlex.split(train_with(tmp_path / "layout" / "planned.yaml", 4, own=own, run=run))
    rates = [word for word in words if word.startswith("optimizer.lr")]
    assert rates[-1] == "optimizer.lr=1e-3", "as the run that went back to it"
    assert "data=mine" in words and not [
        w for w in words if w.startswith(("cluster", "trainer.devices=", "trainer.num"))
    ]
    assert words[-2:] == [f"layout={tmp_path}/layout/planned.yaml", "data.module.microbatches=4"]
    words = shlex.split(train_with(tmp_path / "layout" / "planned.yaml", 4, own=own, run=run, nodes=2))
    assert [w for w in words if w.startswith("trainer.num")] == ["trainer.num_nodes=2"], "those of the plan"


def test_ranks_of_torchrun_run_no_sweep_each(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(cli.HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.MULTIRUN))
    environment.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="start it without torchrun or srun"):
        cli.one_message(lambda cfg: None)(OmegaConf.create())


def test_a_run_that_was_told_to_end_says_how_it_goes_on(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    environment.setattr(cli, "run_folder", lambda: tmp_path)
    environment.setattr(cli.HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.RUN))
    environment.delenv(cli.STARTED_BY, raising=False)

    @cli.one_message
    def task(cfg: Any) -> None:
        raise SIGTERMException

    with pytest.raises(SystemExit) as ended:
        task({"run": "outputs/of/a/run"})
    assert ended.value.code == 143
    assert capsys.readouterr().err == "\nerror: ended by SIGTERM\n", "an evaluation starts anew"
    with pytest.raises(SystemExit) as ended:
        task({})
    assert ended.value.code == 143
    how = cli.command("recipes.train", resume=tmp_path)
    assert f"error: ended by SIGTERM; {how} goes on" in capsys.readouterr().err
    environment.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        task({})
    assert ended.value.code == 143 and not capsys.readouterr().err, "one that torchrun started"
    environment.setenv(cli.STARTED_BY, "1")
    with pytest.raises(SIGTERMException) as ended:
        task({})
    assert not ended.value.code and not capsys.readouterr().err, "one that the first rank started and watches"
