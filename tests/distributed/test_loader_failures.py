"""Damaged files and killed workers in the middle of training on two ranks, against one process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.loading.context import TrainingContext
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.loader import Background, StepLoader, agreed
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed.scenario import Job, Lit, model_of, worst_gradient, worst_loss
from tests.distributed.scenario import Result as Ran
from tests.small_models import READING, digit_processors, kinds_of

LAYOUTS: dict[str, dict[str, Any]] = {"vision": {"ranks": [0]}, "audio": {"ranks": [1]}, "llm": {"ranks": [0, 1]}}
"""Rank 0 alone sees images, rank 1 recordings; both have labels of every second sample."""


class Loading(MultimodalDataModule):
    """The data module with options of the loader, and with data whose samples may be made mute."""

    options: dict[str, Any] = {}
    mute: tuple[int, ...] = ()

    def _loader(self, split: Any) -> StepLoader:
        steps = super()._loader(split).steps
        if self.mute:
            steps.index = muted(steps.index, self.mute)
        group = TrainingContext.of(self.trainer).group
        self._loaders[split] = StepLoader(steps, group=group, background=self._background, **self.options)
        return self._loaders[split]


def muted(index: DatasetIndex, samples: tuple[int, ...]) -> DatasetIndex:
    """The same data set, of which nothing is to be learnt from some samples."""
    loss, labels = np.array(index.loss), np.array(index.labels)
    for sample in samples:
        loss[index.offsets[sample] : index.offsets[sample + 1]], labels[sample] = False, 0
    return replace(index, loss=loss, labels=labels)


class Killing(L.Callback):
    """Kills this rank's loader worker before a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at and trainer.global_rank == 1:
            os.kill(trainer.datamodule._loaders["train"]._pool._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]


def fit(job: Job, options: dict[str, Any], mute: tuple[int, ...] = (), kill: int | None = None) -> tuple[Ran, Any]:
    folder = Path(job.folder)
    dm = Loading(
        train=folder / "train.json",
        model=lambda: model_of(job, vocabulary=512),
        tokenizer=folder / "tokenizer.json",
        processors=READING,
        global_batch_size=job.batch,
        microbatches=job.microbatches,
        seed=1,
        shuffle=False,
    )
    dm.options, dm.mute = options, mute
    strategy: Any = "auto" if job.layouts is None else HeteroStrategy(job.layouts)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if job.layouts is None else int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[] if job.layouts is None else [TorchElasticEnvironment()],
        max_steps=job.steps,
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[] if kill is None else [Killing(kill)],
    )
    module = Lit(job, dm.tokenizer.vocab_size)
    kept: dict[str, StepLoader] = {}
    teardown = dm.teardown

    def remember(stage: str | None = None) -> None:
        kept.update(dm._loaders)
        teardown(stage)

    dm.teardown = remember  # type: ignore[method-assign]
    trainer.fit(module, datamodule=dm)
    loader = kept["train"]
    metrics = [(float(a), float(b)) for a, b in module.metrics]
    return Ran([float(x) for x in module.losses], module.gradients, metrics, {}, {}), loader.skipped


def fit_on_rank(rank: int, world: int, *args: Any) -> tuple[Ran, Any]:
    multiprocessing.set_start_method("fork", force=True)  # as in a script; the harness's own would import all anew
    return fit(*args)


def fit_by_server(rank: int, world: int, *args: Any) -> tuple[Ran, Any]:
    """Workers are forked from a process that knows nothing of CUDA and NCCL."""
    multiprocessing.set_start_method("forkserver", force=True)
    return fit(*args)


@pytest.fixture
def damaged(scenario_data: Path, tmp_path: Path) -> tuple[Job, tuple[int, ...]]:
    """Data with an image and a recording cut in the middle, in the first steps, after they were indexed."""
    folder = tmp_path / "digits"
    shutil.copytree(scenario_data, folder)
    index = build_index(folder / "train.json", ChatTokenizer(folder), digit_processors(), progress=False)
    bad = []
    for module, least in (("vision", 1), ("audio", 9)):
        table = index.items[module]
        item = int(np.searchsorted(table.sample, least))
        path = index.path(module, item)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        bad.append(int(table.sample[item]))
    assert bad[0] < 8 <= bad[1] < 16  # one in the first step, one in the second
    return Job(str(folder), steps=4, batch=8, precision="64-true", shuffle=False), tuple(bad)


def test_skipped_samples_train_as_samples_without_labels(
    pool: Pool, scenario_data: Path, damaged: tuple[Job, tuple[int, ...]]
) -> None:
    job, bad = damaged
    intact = replace(job, folder=str(scenario_data))
    expected, _ = fit(intact, {}, bad)
    alone, counted = fit(job, {"on_error": "skip"})
    assert counted == 2
    on_two = pool.run(2, fit_on_rank, job.on(**LAYOUTS), {"on_error": "skip", "workers": Workers(1)}, group=False)
    for ran, of in ([alone], "one process"), ([ran for ran, _ in on_two], "two"):
        assert worst_loss(expected, ran) < 1e-9, of
        assert worst_gradient(expected, ran)[0] < 1e-8, of
        assert all(np.allclose(r.metrics, expected.metrics) for r in ran)
    assert [counts for _, counts in on_two] == [2, 2]  # both ranks count both
    control, _ = fit(intact, {})
    assert worst_gradient(expected, [control])[0] > 1e-3 and worst_loss(expected, [control]) > 1e-3


@pytest.mark.full
def test_stop_takes_the_job_down_with_its_own_message(pool: Pool, damaged: tuple[Job, tuple[int, ...]]) -> None:
    job, bad = damaged
    with pytest.raises(WorkerError) as error:
        pool.run(2, fit_on_rank, job.on(**LAYOUTS), {"workers": Workers(1)}, group=False)
    assert error.value.error == "DataError"
    assert error.value.rank == 0 and f"train-{bad[0]:06d}.png" in str(error.value)  # the rank that reads images
    assert f"sample 'train-{bad[0]:06d}'" in str(error.value) and "on_error='skip'" in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("fitted", [fit_on_rank, fit_by_server])
def test_killed_workers(pool: Pool, scenario_data: Path, fitted: Any) -> None:
    """Killed in the third of nine steps: in a busy process the worker may be some steps ahead."""
    job = Job(str(scenario_data), steps=9, batch=8, precision="64-true", shuffle=False).on(**LAYOUTS)
    with pytest.raises(WorkerError, match=r"(?s)loader worker 0 of 1 was killed by SIGKILL.*of epoch 0") as error:
        pool.run(2, fitted, job, {"workers": Workers(1)}, (), 2, group=False)
    assert error.value.error == "DataError" and error.value.rank == 1


# ---- collectives in the loading thread ------------------------------------------------------------------------------


class Uneven(StepDataset):
    """Takes its time on one rank, then on the other."""

    rank = 0

    def __getitem__(self, place: Any) -> Any:
        time.sleep(0.01 * ((place[1] + self.rank) % 2))
        return super().__getitem__(place)


def turns_on_rank(rank: int, world: int, folder: str, workers: int) -> list[tuple[str, int, int]]:
    """Train and val loaders take turns, are left early and closed, with a collective in the thread at every batch."""
    multiprocessing.set_start_method("fork", force=True)
    group = dist.new_group(backend="gloo")
    index = build_index(Path(folder) / "train.json", ChatTokenizer(Path(folder)), digit_processors(), progress=False)
    modules = ("vision", "audio", "llm")
    ran: list[tuple[str, int, int]] = []

    def same(name: str) -> Callable[[Any], Any]:
        def finish(batch: Any) -> Any:
            mine = (name, batch.plan.metadata.epoch, batch.plan.metadata.step)
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, mine, group=group)
            assert everyone == [mine] * world, everyone
            ran.append(mine)
            return agreed(batch, group)

        return finish

    background = Background()
    loaders = {}
    for name in ("train", "val"):
        edges = (("vision", "llm"), ("audio", "llm"))
        options: dict[str, Any] = {"kinds": kinds_of(modules), "global_batch_size": 10}
        steps = Uneven(index, digit_processors(), edges, RankView.whole(modules), **options)
        steps.rank = rank
        loaders[name] = StepLoader(
            steps,
            workers=Workers(workers),
            on_error="skip",
            finish=same(name),
            group=group,
            background=background,
        )
    for epoch in range(2):
        loaders["train"].set_epoch(epoch)
        for number, _ in enumerate(loaders["train"]):
            dist.all_reduce(torch.ones(1))  # training's own collectives beside it
            if number % 3 == 1:
                for count, _ in enumerate(loaders["val"]):
                    if count == 2:
                        break
            if number == 7:
                break
    for loader in loaders.values():
        loader.close()
    background.close()
    dist.barrier()
    return ran


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1])
def test_collectives_of_loaders_that_take_turns_meet(pool: Pool, scenario_data: Path, workers: int) -> None:
    first, second = pool.run(2, turns_on_rank, str(scenario_data), workers)
    assert first == second and len(first) > 2 * 8 + 3 * 2 * 3
