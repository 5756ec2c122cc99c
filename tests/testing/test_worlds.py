"""Worlds return results by rank, and say which rank failed, where and why."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from hetero_strategy.testing import Pool, WorkerError

pytestmark = pytest.mark.distributed


def share(rank: int, world: int, scale: float) -> tuple[torch.Tensor, int]:
    x = torch.tensor([rank * scale])
    dist.all_reduce(x)
    return x, os.getpid()


def raise_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        print("a word before the fall")
        raise LookupError(f"rank {rank} has had enough")
    dist.barrier()


def raise_everywhere(rank: int, world: int) -> None:
    raise LookupError("all agree")


def sleep_on(rank: int, world: int, late: int) -> None:
    if rank == late:
        time.sleep(600)


def exit_on(rank: int, world: int, gone: int) -> None:
    if rank == gone:
        os._exit(7)
    dist.barrier()


def not_picklable(rank: int, world: int) -> Any:
    return lambda: rank


def environment(rank: int, world: int) -> tuple[bool, str, str]:
    return dist.is_initialized(), os.environ["RANK"], os.environ["MASTER_PORT"]


def fit(rank: int, world: int, directory: str) -> tuple[int, int]:
    class Line(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.ranks = self.trainer.world_size
            return super().training_step(batch, batch_idx)

    model = Line()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_steps=1,
        limit_val_batches=0,
        default_root_dir=directory,
        **options,
    )
    trainer.fit(model)
    return trainer.global_rank, model.ranks


@pytest.mark.full_cases("8")
@pytest.mark.parametrize("world", [1, 3, 8])
def test_results_come_by_rank(pool: Pool, world: int) -> None:
    results = pool.run(world, share, 2.0)
    assert [x.item() for x, _ in results] == [float(world * (world - 1))] * world
    assert len({pid for _, pid in results}) == world


def test_an_error_is_shown_at_once_with_its_rank_and_traceback(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 3 raised") as caught:
        pool.run(3, raise_on, 1)  # the others wait in a barrier
    assert time.monotonic() - start < 30
    text = str(caught.value)
    assert "LookupError: rank 1 has had enough" in text
    assert "in raise_on" in text
    assert "a word before the fall" in text
    assert "[0, 2] were still at work" in text
    assert (caught.value.rank, caught.value.error) == (1, "LookupError")
    assert len(pool.run(3, share, 1.0)) == 3


def test_an_error_on_all_ranks_is_one_error(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="LookupError: all agree") as caught:
        pool.run(2, raise_everywhere)
    assert "failed too" in str(caught.value)


@pytest.mark.full
def test_a_hang_is_killed_and_says_who_and_where(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 2 did not finish within 3 s.* \[1\]") as caught:
        pool.run(2, sleep_on, 1, timeout=3)
    assert time.monotonic() - start < 15
    assert "in sleep_on" in str(caught.value)
    assert len(pool.run(2, share, 1.0)) == 2


def test_a_dead_rank_is_reported(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 0 of 2 died with exit code 7"):
        pool.run(2, exit_on, 0)


def test_a_result_that_cannot_travel_is_an_error(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        pool.run(1, not_picklable)


def test_without_a_group_there_is_only_the_environment(pool: Pool) -> None:
    results = pool.run(2, environment, group=False)
    assert [r[:2] for r in results] == [(False, "0"), (False, "1")]
    assert results[0][2] == results[1][2]
    assert pool.run(1, environment)[0][0]


def test_a_trainer_takes_the_processes_for_its_own(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, fit, str(tmp_path), group=False) == [(0, 2), (1, 2)]
