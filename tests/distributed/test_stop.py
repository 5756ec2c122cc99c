"""SIGTERM on any rank ends all of them after the same step, with a checkpoint from which the run goes on."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hetero_strategy.checkpoint import describe, saving
from hetero_strategy.runtime.agreement import Stop
from hetero_strategy.strategy import HeteroStrategy, ending
from hetero_strategy.strategy.ending import stop_together
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed.scenario import Job, build, data, train, train_on_rank

STEPS, TOLD_AT = 5, 2
LAYOUTS: dict[str, dict[str, Any]] = {"vision": {"ranks": [0]}, "audio": {"ranks": [1]}, "llm": {"ranks": 2}}


class TellLate(L.Callback):
    """Tells this process to end when its fit is over, and counts what is evaluated then."""

    def __init__(self) -> None:
        self.evaluated = 0

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, *given: Any) -> None:
        self.evaluated += 1


def told_late(rank: int, world: int, job: Job) -> list[int]:
    """Batches of evaluations: of one that the signal ends, and of another one."""
    late, counted = TellLate(), []
    trainer, module, dm = build(replace(job, trainer={"callbacks": [late], "limit_val_batches": 2}))
    trainer.fit(module, dm)
    late.evaluated = 0
    with pytest.raises(SIGTERMException):
        trainer.validate(module, dm, verbose=False)
    counted.append(late.evaluated)
    trainer.validate(module, dm, verbose=False)
    return [*counted, late.evaluated]


class Tell(L.Callback):
    """Tells this rank to end in the middle of a step, and counts steps."""

    def __init__(self, me: bool) -> None:
        self.me, self.steps = me, 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.me and batch_idx == TOLD_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.steps = trainer.global_step


def told(rank: int, world: int, job: Job, whom: int, folder: str) -> tuple[bool, int, int]:
    """Whether a rank ended as one that was told, after how many steps of the optimizer, and broadcasts in them."""
    tell, sent, broadcast = Tell(rank == whom), list[int](), dist.broadcast

    def counted(*given: Any, **options: Any) -> Any:
        sent.append(tell.steps)
        return broadcast(*given, **options)

    callbacks = [ModelCheckpoint(folder, "last", save_on_exception=True, every_n_epochs=1000), tell]
    job = replace(job, trainer={**job.trainer, "callbacks": callbacks, "enable_checkpointing": True})
    with patch.object(dist, "broadcast", counted):
        try:
            train_on_rank(rank, world, job)
        except SIGTERMException:
            return True, tell.steps, sum(0 < step < TOLD_AT for step in sent)
    return False, tell.steps, 0


@pytest.mark.full_cases("2-1")
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "whom"), [pytest.param(2, 0, marks=pytest.mark.full), (2, 1), (1, 0)])
def test_all_ranks_end_after_the_same_step(pool: Pool, tmp_path: Path, world: int, whom: int) -> None:
    job = Job(str(data(tmp_path / "data")), LAYOUTS if world == 2 else {}, steps=STEPS, capture=False)
    assert pool.run(world, told, job, whom, str(tmp_path), group=False) == [(True, TOLD_AT + 1, 0)] * world
    saved = str(tmp_path / "last.ckpt")
    assert describe(saved).step == TOLD_AT + 1
    whole, rest = (pool.run(world, train_on_rank, j, group=False)[0].losses for j in (job, replace(job, resume=saved)))
    assert len(whole) == STEPS and rest == whole[TOLD_AT + 1 :]


@pytest.mark.full
@pytest.mark.distributed
def test_no_rank_ends_in_the_middle_of_a_window_of_accumulation(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint has no gradients."""
    windows = {"accumulate_grad_batches": 4}
    job = Job(str(data(tmp_path / "data")), LAYOUTS, steps=2, capture=False, trainer=windows)
    assert pool.run(2, told, job, 1, str(tmp_path), group=False) == [(True, 1, 0)] * 2
    saved = str(tmp_path / "last.ckpt")
    whole, rest = (pool.run(2, train_on_rank, j, group=False)[0].losses for j in (job, replace(job, resume=saved)))
    assert len(whole) == 8 and rest == whole[4:]


class Stops(L.Callback):
    """Some ranks ask the Trainer to stop in their second step."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop |= self.asks and trainer.global_step == 2


def stops(rank: int, world: int, job: Job, ranks: tuple[int, ...]) -> int:
    trainer, module, dm = build(replace(job, trainer={"callbacks": [Stops(rank in ranks)]}))
    with patch.object(ending, "TO_COME", 5.0):
        trainer.fit(module, dm)
    return trainer.global_step


@pytest.mark.distributed
@pytest.mark.full
def test_all_ranks_stop_where_each_asks_for_it_and_one_alone_is_refused(pool: Pool, tmp_path: Path) -> None:
    """The others train on meanwhile, or validate, and a backend may end the process over what then meets."""
    job = Job(str(data(tmp_path / "data")), LAYOUTS, steps=STEPS, capture=False)
    assert pool.run(2, stops, job, (0, 1), group=False) == [2, 2]
    with pytest.raises(WorkerError, match=r"rank 0 set trainer.should_stop in step 2, and ranks \[1\] did not"):
        pool.run(2, stops, job, (0,), group=False)


class Requeue(Tell):
    """Tells this rank in the middle of a step, of a validation if there is one, that its job will be queued again."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.me and batch_idx == TOLD_AT and not sum(trainer.num_val_batches):
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_validation_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *given: Any) -> None:
        _, batch_idx, *_ = given
        if self.me and batch_idx == 0 and trainer.global_step == TOLD_AT + 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif batch_idx == 1:
            saved = Path(trainer.default_root_dir) / "hpc_ckpt_1.ckpt" / "checkpoint.json"
            assert saved.exists() == (trainer.global_step > TOLD_AT), "before the next batch of the validation"


def requeued(rank: int, world: int, job: Job, whom: int, folder: str, background: bool) -> int:
    """Steps of a run in a SLURM job, whose `scontrol` writes down what it is told."""
    os.environ |= {
        "SLURM_NTASKS": str(world), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": str(world), "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train", "PATH": f"{folder}/bin:{os.environ['PATH']}",
    }  # fmt: skip
    callbacks = [Requeue(rank == whom)]
    options = {"callbacks": callbacks, "default_root_dir": folder, "plugins": [SLURMEnvironment()], "devices": world}
    job = replace(
        job,
        trainer={
            **job.trainer,
            **options,
            "strategy": HeteroStrategy(job.layouts or None, async_checkpoint=background),
        },
    )
    with patch.object(saving, "_write", slowly):
        train(job)
    return callbacks[0].steps


def slowly(*given: Any, write: Any = saving._write) -> None:
    time.sleep(2)
    write(*given)


@pytest.mark.full_cases("2-0-False", "2-1-True")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "whom", "validates"),
    [(1, 0, False), (2, 0, False), (2, 1, True), pytest.param(2, 1, False, marks=pytest.mark.full)],
)
def test_a_slurm_job_that_is_queued_again_is_saved_between_steps(
    pool: Pool, tmp_path: Path, world: int, whom: int, validates: bool
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    saved = str(tmp_path / "hpc_ckpt_1.ckpt")
    scontrol.write_text(f'#!/bin/sh\nls {saved}/checkpoint.json >> {tmp_path}/told\necho "$@" >> {tmp_path}/told\n')
    scontrol.chmod(0o755)
    job = Job(str(data(tmp_path / "data")), LAYOUTS if world == 2 else {}, steps=STEPS, capture=False)
    if validates:
        job = replace(job, val="val.json", trainer={"val_check_interval": TOLD_AT + 1})
    found = pool.run(world, requeued, job, whom, str(tmp_path), world == 1, group=False)
    assert found == [STEPS] * world, "it goes on until SLURM ends it"
    assert (tmp_path / "told").read_text().splitlines() == [f"{saved}/checkpoint.json", "requeue 17"]
    assert describe(saved).step == TOLD_AT + 1
    whole, rest = (pool.run(world, train_on_rank, j, group=False)[0].losses for j in (job, replace(job, resume=saved)))
    assert rest == whole[TOLD_AT + 1 :]


@pytest.mark.distributed
def test_a_signal_to_end_after_the_last_batch_ends_what_comes_next(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path / "data")), {}, steps=1, capture=False, val="val.json")
    assert pool.run(1, told_late, job, group=False) == [[1, 3]]


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_an_evaluation_that_is_queued_again_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str
) -> None:
    """Nor is a signal lost that came after the last batch of training."""
    trainer, stop = L.Trainer(default_root_dir=tmp_path, accelerator="cpu", barebones=True), Stop()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    trainer.state.fn = TrainerFn.FITTING
    stop_together(trainer, stop)
    connector = trainer._signal_connector
    with patch.object(signal_connector, "call", return_value=0) as told:
        connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        assert stop.requeue and not told.called
        trainer.state.fn = {"validate": TrainerFn.VALIDATING, "test": TrainerFn.TESTING}.get(fn, TrainerFn.PREDICTING)
        with pytest.warns(UserWarning, match=f"queued again: {fn} saves nothing, and"):
            stop_together(trainer, stop)
        told.assert_called_once_with(["scontrol", "requeue", "17"])
        with pytest.warns(UserWarning, match=f"{fn} saves nothing"):
            connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        assert told.call_count == 2 and not stop.requeue
    assert not os.listdir(tmp_path) and "save_checkpoint" not in vars(trainer)
