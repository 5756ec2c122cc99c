"""What hooks and plugins of Lightning find under HeteroStrategy, where it does a step its own way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from hetero_strategy.errors import ConfigError
from tests.distributed import scenario
from tests.distributed.harness import Pool, WorkerError
from tests.distributed.scenario import Job, Lit, data
from tests.distributed.test_own_modules import SHARDED, Own, Skipping

ONE = {"vision": {"ranks": [0]}, "audio": {"ranks": [0]}, "llm": {"ranks": [0]}}


class Looking(Lit):
    """Notes what it finds in hooks."""

    def __init__(self, job: Job, vocabulary: int) -> None:
        super().__init__(job, vocabulary)
        self.zeroed: list[bool] = []
        self.transferred = 0
        self.may: list[tuple[int, bool]] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zeroed.append(any(p.grad is not None for p in self.parameters()))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred += 1
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        may = self.trainer.strategy._stop.may
        self.may.append((self.trainer.fit_loop.epoch_loop.batch_idx, may is None or may()))


def looked(rank: int, world: int, job: Job, folder: str) -> tuple[list[bool], int, list[tuple[int, bool]]]:
    trainer, module, dm = scenario.build(job)
    module = Looking(job, module.vocabulary)
    trainer.fit(module, dm)
    path = f"{folder}/weights.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    (optimizer,) = trainer.optimizers
    before = {p: state["exp_avg"] for p, state in optimizer.state.items()}
    trainer.validate(module, dm, ckpt_path=path)  # which has nothing for an optimizer
    assert before and all(optimizer.state[p]["exp_avg"] is value for p, value in before.items())
    return module.zeroed, module.transferred, module.may


def test_hooks_find_what_lightning_promises(pool: Pool, tmp_path: Path) -> None:
    accumulating = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1}
    job = Job(str(data(tmp_path / "data")), ONE, steps=2, val="val.json", trainer=accumulating, capture=False)
    ((zeroed, transferred, may),) = pool.run(1, looked, job, str(tmp_path), group=False)
    assert zeroed == [False, True]  # the gradients of the step before are there
    assert transferred == 4 + len(may)
    inside, after = may[0], may[-1]
    assert inside == (2, False)  # a run does not end where a window of accumulation is half full
    assert after[1]


def refused(rank: int, world: int, job: Job) -> str:
    with pytest.raises(ConfigError) as error:
        trainer, module, dm = scenario.build(replace(job, trainer={"plugins": [AsyncCheckpointIO()]}))
        trainer.fit(module, dm)
    return str(error.value)


def test_a_plugin_for_checkpoints_is_refused(pool: Pool, tmp_path: Path) -> None:
    (message,) = pool.run(1, refused, Job(str(data(tmp_path)), ONE, steps=1), group=False)
    assert message.startswith("HeteroStrategy: the plugin AsyncCheckpointIO would write nothing")


def skipping(rank: int, world: int, job: Job) -> None:
    trainer, module, dm = scenario.build(job)
    own = Own(job, module.vocabulary)
    own.kind = Skipping
    trainer.validate(own, dm)


def test_blocks_that_do_not_run_are_refused_in_an_evaluation_too(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path)), batch=2, microbatches=1, precision="64-true", val="val.json")
    with pytest.raises(WorkerError, match=r"module 'vision': backbone.layers.0 did not run in a microbatch"):
        pool.run(2, skipping, job.on(vision=SHARDED, audio=SHARDED, llm=SHARDED), group=False, timeout=60)
