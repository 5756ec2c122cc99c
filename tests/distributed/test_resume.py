"""A checkpoint of one layout in any other, of other pipelines too: parameters and Adam moments bit by bit, and the same
next losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from hetero_strategy.testing import Pool, WorkerError
from tests.distributed.scenario import Job, Lit, build, data, train, train_on_rank

SAVED_AT = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fewer ranks, disjoint": (3, {"vision": {"ranks": [0]}, "audio": {"ranks": [1]}, "llm": {"ranks": [2]}}),
    "one rank": (1, {"vision": {"ranks": [0]}, "audio": {"ranks": [0]}, "llm": {"ranks": [0]}}),
    "more ranks, other degrees": (
        5,
        {
            "vision": {"ranks": [0, 4], "pp": 2},
            "audio": {"ranks": [1, 2], "dp_replicate": 2},
            "llm": {"ranks": [0, 1, 2, 3], "dp_replicate": 2},
        },
    ),
    "colocated": (2, {"vision": {"ranks": 2}, "audio": {"ranks": 2}, "llm": {"ranks": 2, "tp": 2}}),
}
FIRST: dict[str, Any] = {
    "vision": {"ranks": [0, 1, 2]},
    "audio": {"ranks": [3]},
    "llm": {"ranks": [0, 1, 2, 3], "tp": 2, "pp": 2},
}


class Keep(L.Callback):
    """Full parameters and optimizer state that this rank owns: at the start, or beside a checkpoint."""

    def __init__(self, save: str | None) -> None:
        self.save = save
        self.state: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state = full_state(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self.save and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.save)
            self.state = full_state(trainer, pl_module)


def full_state(trainer: L.Trainer, module: L.LightningModule) -> dict[str, torch.Tensor]:
    def full(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    state = {}
    for name, p in module.named_parameters():
        if not p.is_meta:
            state[name] = full(p)
            for key, value in trainer.optimizers[0].state.get(p, {}).items():
                state[f"{name}/{key}"] = full(value)
    return state


def run(rank: int, world: int, job: Job, save: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    keep = Keep(save)
    result = train_on_rank(rank, world, replace(job, trainer={**job.trainer, "callbacks": [keep]}))
    return result.losses, keep.state


@pytest.mark.full
@pytest.mark.parametrize("background", [False, True])
def test_any_layout_continues_the_curve(pool: Pool, tmp_path: Path, background: bool) -> None:
    folder = data(tmp_path / "digits")
    job = Job(str(folder), steps=SAVED_AT, capture=False)
    path = str(tmp_path / "saved")
    first = replace(job, layouts=FIRST, strategy={"async_checkpoint": background})
    saved: dict[str, torch.Tensor] = {}
    for _, state in pool.run(4, run, first, path, timeout=240):
        for name, value in state.items():
            assert torch.equal(saved.setdefault(name, value), value), f"replicas of {name} differ"
    whole = train(replace(job, steps=SAVED_AT + 2))
    assert any(name.endswith("exp_avg_sq") for name in saved)
    for name in ("colocated",) if background else LAYOUTS:
        world, layouts = LAYOUTS[name]
        again = replace(job, layouts=layouts, steps=SAVED_AT + 2, resume=path)
        seen = set()
        for losses, state in pool.run(world, run, again, None, timeout=240):
            for key, value in state.items():
                assert torch.equal(value, saved[key]), f"{name}: {key}"
            seen |= set(state)
            assert losses == pytest.approx(whole.losses[SAVED_AT:], rel=1e-6), name
        assert seen == set(saved), name


def test_a_changed_checkpoint_is_noticed(pool: Pool, tmp_path: Path) -> None:
    """Negative control: other weights do not continue the curve; nor do those of a disk that lost a bit, unless one
    insists.
    """
    folder = data(tmp_path / "digits")
    job = Job(str(folder), steps=SAVED_AT, capture=False)
    whole = train(replace(job, steps=SAVED_AT + 2))
    path = str(tmp_path / "saved")
    pool.run(1, run, replace(job, layouts=LAYOUTS["one rank"][1], lr=4e-3), path, timeout=120)
    again = replace(job, layouts=LAYOUTS["one rank"][1], steps=SAVED_AT + 2, resume=path)
    file = Path(path, "rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with pytest.raises(WorkerError, match=r"CheckpointError: .*rank-00000\.safetensors is damaged: bytes .* of 'optim"):
        pool.run(1, run, again, None, timeout=120)
    insisting = replace(again, strategy={"verify_checkpoints": False})
    ((losses, _),) = pool.run(1, run, insisting, None, timeout=120)
    assert losses != pytest.approx(whole.losses[SAVED_AT:], rel=1e-6)


class Counts(Lit):
    """Asks how many steps there will be, as schedules of learning rates do."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 9
        return super().configure_optimizers()


class Seen(L.Callback):
    """Epoch and step of every batch."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        self.steps.append((batch.plan.metadata.epoch, batch.plan.metadata.step))


def seen_on_rank(rank: int, world: int, job: Job, folder: str) -> dict[str, list[tuple[int, int]]]:
    def go(to: str, resume: str | None = None) -> list[tuple[int, int]]:
        seen = Seen()
        every = ModelCheckpoint(Path(folder, to), "{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"max_epochs": 3, "limit_train_batches": 3, "enable_checkpointing": True, "callbacks": [seen, every]}
        trainer, module, loaded = build(replace(job, trainer=options))
        trainer.fit(Counts(job, module.vocabulary), loaded, ckpt_path=resume and str(Path(folder, f"{resume}.ckpt")))
        return seen.steps

    return {
        "whole": go("whole"),
        "in an epoch": go("other", "whole/step=2"),
        "at its end": go("again", "whole/step=3"),
        "and in the next": go("other", "again/step=5"),
    }


@pytest.mark.parametrize("steps", [-1, pytest.param(9, marks=pytest.mark.full)])
def test_a_run_of_some_epochs_goes_on_with_the_next_samples(pool: Pool, tmp_path: Path, steps: int) -> None:
    """However often, and where somebody has asked how many steps there will be."""
    job = Job(str(data(tmp_path / "data")), LAYOUTS["one rank"][1], steps, capture=False)
    (seen,) = pool.run(1, seen_on_rank, job, str(tmp_path / "run"), timeout=300)
    whole = seen.pop("whole")
    assert whole == [(epoch, step) for epoch in range(3) for step in range(3)]
    assert list(seen.values()) == [whole[2:], whole[3:], whole[5:]]
