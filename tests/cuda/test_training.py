"""One process, every module on one device: training there is training on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from hetero_strategy.checkpoint import describe, load
from hetero_strategy.testing import Pool, WorkerError
from tests.cuda.devices import EVERYWHERE
from tests.distributed.scenario import Job, Lit, build, data, train, train_on_rank, worst_gradient, worst_loss

CLOSE = {"32-true": 1e-3, "bf16-mixed": 0.1}
"""Relative error of any parameter's first gradient, in the 2-norm, beside fp32 on the CPU."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    alone = {"ranks": [0]}
    folder = data(tmp_path_factory.mktemp("cuda") / "digits")
    return Job(str(folder), steps=2, batch=8).on(vision=alone, audio=alone, llm=alone)


def on(device: str, job: Job, precision: str = "32-true") -> Job:
    return replace(job, precision=precision, trainer={**job.trainer, "accelerator": device})


@EVERYWHERE
@pytest.mark.parametrize("precision", list(CLOSE))
def test_a_step_is_that_of_the_cpu(job: Job, pool: Pool, precision: str, device: str) -> None:
    reference = train(replace(job, layouts=None))
    run = lambda job: pool.run(1, train_on_rank, on(device, job, precision), group=False, timeout=150)  # noqa: E731
    found = run(job)
    assert worst_loss(reference, found) < 0.05 * CLOSE[precision] + 1e-4
    assert worst_gradient(reference, found)[0] < CLOSE[precision]
    if precision == "32-true":  # negative control: rows of one edge are shifted
        assert worst_gradient(reference, run(replace(job, damage="forward:0")))[0] > CLOSE["bf16-mixed"]


class Watched(Lit):
    """Whatever waits for the device between a batch and the end of its step is an error, but in the first step, which
    makes kernels, memory and optimizer states, and in steps before which plans are compared: 2, 4, 8 and so on.
    """

    waits = False
    """On purpose."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1).bit_count() > 1:
            torch.cuda.set_sync_debug_mode("error")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.waits:
            float(loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def watched(rank: int, world: int, job: Job, waits: bool) -> int:
    trainer, plain, datamodule = build(job)
    module = Watched(job, plain.vocabulary)
    module.waits = waits
    trainer.fit(module, datamodule=datamodule)
    return trainer.global_step


@pytest.mark.cuda
def test_no_step_waits_for_the_device(job: Job, pool: Pool) -> None:
    quiet = replace(on("cuda", job, "bf16-mixed"), steps=7, capture=False)
    assert pool.run(1, watched, quiet, False, group=False, timeout=150) == [7]
    with pytest.raises(WorkerError, match="synchroniz"):  # negative control
        pool.run(1, watched, quiet, True, group=False, timeout=150)


class Keep(L.Callback):
    """Saves what was loaded, before anything changes it, or what was trained."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def kept(rank: int, world: int, job: Job, path: str) -> None:
    train(replace(job, trainer={**job.trainer, "callbacks": [Keep(path, 2)]}))


def tensors(path: str) -> dict[str, torch.Tensor]:
    """A checkpoint's, on the CPU."""
    made = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in describe(path).tensors.items()}
    load(made, path)
    return made


@pytest.mark.full_cases("cpu")
@EVERYWHERE
def test_checkpoints_move_between_devices(job: Job, pool: Pool, device: str, tmp_path: Path) -> None:
    """Written there, loaded and written on the CPU, and the same once more there: bit by bit."""
    paths = [str(tmp_path / name) for name in ("there", "cpu", "back")]
    for number, (path, where) in enumerate(zip(paths, (device, "cpu", device), strict=True)):
        resume = paths[number - 1] if number else None
        moved = replace(on(where, job, "bf16-mixed"), steps=3, resume=resume)
        pool.run(1, kept, moved, path, group=False, timeout=150)
    first, second, third = map(tensors, paths)
    assert first.keys() == second.keys() == third.keys()
    assert any(name.startswith("optim.") for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) and torch.equal(tensor, third[name]), name
