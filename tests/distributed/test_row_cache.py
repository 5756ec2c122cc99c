"""Rows of frozen encoders from disk: every step's gradients against one process, fp64, whatever is found."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from hetero_strategy.data.row_store import RECORD, RowSegment, RowStore
from hetero_strategy.errors import ConfigError
from hetero_strategy.monitor import ThroughputMonitor
from hetero_strategy.strategy import HeteroStrategy
from recipes.digits import write_digits
from tests.disks import small_disk_in
from tests.distributed import scenario
from tests.distributed.exact import NOTICED, differences, on, setting_of
from tests.distributed.harness import Pool, WorkerError
from tests.distributed.scenario import Job, Lit, build, datamodule
from tests.distributed.stepping import Setting, Stepped, batches_on_rank, reference

BATCHES = ((0, 1, 2, 3), (5, 6), (3, 2), (1,))
"""Steps of unequal size, some with items of earlier ones."""
LATER = ((2, 7, 4, 1, 5, 8), (8, 6), (3, 4, 1), (7, 2))
"""Of the next run: what is known and what is not take turns, with other items beside them."""
BACKBONE = {"freeze": ("vision.backbone",)}
PLACEMENTS: dict[str, tuple[dict[str, dict[str, Any]], str, dict[str, Any]]] = {
    "one rank": ({"vision": on(0), "llm": on(0)}, "1f1b", BACKBONE),
    "in turns with a pipeline": ({"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)}, "1f1b", BACKBONE),
    "sharded, gathered when it runs": (
        {"vision": on(0, 1, dp_shard=2), "llm": on(2)},
        "1f1b",
        {**BACKBONE, "reshard_after_forward": "always", "precision": "32-mixed"},
    ),
    "sharded, balanced, two encoders": (
        {"vision": on(0, 1, dp_shard=2), "audio": on(1, 2, dp_replicate=2), "llm": on(0, 1, 2, dp_shard=3)},
        "1f1b",
        {"freeze": ("vision", "audio.backbone"), "balance": {"policy": "auto"}, "tokens": {"vision": 8}},
    ),
    "a step ahead": (
        {"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)},
        "1f1b",
        {"freeze": ("vision",), "prefetch": {"vision": 1}, "fill": "fine"},
    ),
    "a step ahead, all but its end": (
        {"vision": on(0, 1), "llm": on(0, 1, pp=2)},
        "zb_h1",
        {**BACKBONE, "prefetch": {"vision": 1}, "fill": "fine", "pieces": {"vision": 2}, "vision_layers": 3},
    ),
    "the first of its pipeline's ranks": (
        {"vision": on(0, 1, pp=2), "llm": on(1, 2, pp=2)},
        "gpipe",
        {**BACKBONE, "recompute": {"vision": "whole"}},
    ),
}
OFTEN = ("one rank", "in turns with a pipeline", "a step ahead")
"""In `make test`, which leaves runs of epochs to `make test-all`."""


def kept(folders: dict[bool, str], folder: Path, placement: str, **more: Any) -> Setting:
    """A setting whose frozen encoders have caches."""
    layouts, schedule, options = PLACEMENTS[placement]
    setting = setting_of(folders, layouts, schedule, **{"batches": BATCHES, "microbatches": 2, **options, **more})
    return replace(setting, cache={part.split(".")[0]: str(folder) for part in setting.freeze})


def run(pool: Pool, setting: Setting) -> tuple[list[list[str]], list[list[Stepped]]]:
    """What differs from one process in each step, and what each rank saw."""
    wanted = [reference(setting, 2, step=k) for k in range(len(setting.batches))]
    runs = pool.run(setting.world, batches_on_rank, setting, wanted, timeout=240)
    assert not isinstance(runs[0], str), runs[0]
    bound = 1e-10 if setting.precision == "64-true" else 1e-5
    found = [differences(one, steps, bound) for one, steps in zip(wanted, zip(*runs, strict=True), strict=True)]
    return found, runs


def counted(runs: list[list[Stepped]]) -> tuple[int, int]:
    """Items found and missed, of all steps, modules and ranks."""
    found, missed = np.array([pair for steps in runs for pair in steps[-1].cached.values()]).sum(0)
    return int(found), int(missed)


@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=() if p in OFTEN else pytest.mark.full) for p in PLACEMENTS]
)
def test_every_step_is_that_of_one_process_whatever_is_found(
    pool: Pool, folders: dict[bool, str], tmp_path: Path, placement: str
) -> None:
    setting = kept(folders, tmp_path, placement)
    differing, first = run(pool, setting)
    assert not any(differing), differing
    assert counted(first)[1]
    differing, later = run(pool, replace(setting, batches=LATER))
    assert not any(differing), differing
    found, missed = counted(later)
    assert found and missed
    differing, last = run(pool, replace(setting, batches=LATER))
    assert not any(differing), differing
    assert counted(last) == (found + missed, 0)


@pytest.mark.full
def test_other_layouts_find_the_rows_and_changed_rows_would_be_noticed(
    pool: Pool, folders: dict[bool, str], tmp_path: Path
) -> None:
    run(pool, kept(folders, tmp_path, "one rank"))
    (folder,) = tmp_path.iterdir()
    for placement in ("in turns with a pipeline", "a step ahead"):
        differing, runs = run(pool, kept(folders, tmp_path, placement))
        assert not any(differing), differing
        assert counted(runs)[1] == 0
    _, runs = run(pool, kept(folders, tmp_path, "the first of its pipeline's ranks", batches=BATCHES[:1]))
    assert counted(runs)[0] == 0  # a part of the backbone makes other rows
    (index,) = folder.glob("*.index")
    records = np.frombuffer(index.read_bytes(), RECORD)
    store = RowStore(folder)
    store.refresh()
    RowSegment(folder).append(records["key"], [-store.read(r["key"][None], r["rows"][None]).rows for r in records])
    _, runs = run(pool, kept(folders, tmp_path, "one rank"))
    for step, errors in enumerate(step.errors for step in runs[0]):
        assert max(errors.values()) > NOTICED, f"step {step}"


# ---- whole runs ------------------------------------------------------------------------------------------------------

STAGES = {"vision": on(0, 1, dp_shard=2), "audio": on(0, 1), "llm": on(0, 1, pp=2)}
FROZEN = ("vision.backbone", "audio")
STEPS = 10
"""Two epochs of 60 samples, with two validations in each."""


@dataclass
class Ran:
    """What a rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    counts: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Items found and missed until the end of each epoch, by module."""
    said: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of the images that were found, by window."""
    skipped: int = 0
    """Samples, until the end of the last epoch."""


class Shares(DummyLogger):
    """Notes which share of items was found in each window."""

    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self.ran = ran

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.ran.shares += [value for name, value in metrics.items() if name == "throughput/vision/cached_share"]


class Watched(L.Callback):
    """Notes what happens; saves a checkpoint in the first epoch; changes one frozen weight."""

    def __init__(self, ran: Ran, save: str | None, change: str | None) -> None:
        self.ran, self.save, self.change = ran, save, change

    def _changed(self, trainer: L.Trainer, when: str) -> None:
        if when == self.change:
            weight = trainer.lightning_module.model.modules_by_name["vision"].backbone.model.post_layernorm.bias
            with torch.no_grad():
                (weight.to_local() if hasattr(weight, "to_local") else weight).flatten()[:1] += 0.25

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._changed(trainer, "before")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            self._changed(trainer, "during")
            if self.save:
                trainer.save_checkpoint(self.save)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ran.validation.append(float(trainer.callback_metrics["val/loss"]))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        keepers = trainer.strategy.row_caches.keepers
        self.ran.skipped = trainer.train_dataloader.skipped
        self.ran.counts.append({name: (keeper.found, keeper.missed) for name, keeper in keepers.items()})


def ran(
    rank: int,
    world: int,
    job: Job,
    save: str | None = None,
    change: str | None = None,
    options: dict[str, Any] | None = None,
    largest: int | None = None,
) -> Ran:
    """A run whose ranks read for themselves, where the options do not say otherwise.

    Args:
        rank, world: of this process.
        job: what runs.
        save: a checkpoint of the third step.
        change: when a frozen weight changes, ``before`` or ``during`` the run.
        options: of the data module.
        largest: bytes that a file of this process may have.
    """
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    found, heard = Ran(), logging.Handler()
    heard.emit = lambda record: found.said.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("hetero_strategy", "lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).addHandler(heard)
        logging.getLogger(name).setLevel(logging.INFO)
    callbacks = [Watched(found, save, change), ThroughputMonitor(every_n_steps=2)]
    trainer, module, dm = build(replace(job, trainer={**job.trainer, "callbacks": callbacks, "logger": Shares(found)}))
    for option, value in (options or {}).items():
        setattr(dm, option, value)
    trainer.fit(module, datamodule=dm, ckpt_path=job.resume)
    found.losses = [float(x) for x in module.losses]
    return found


def job_of(folder: Path, **strategy: Any) -> Job:
    trainer = {"val_check_interval": 0.5, "max_epochs": 2, "default_root_dir": str(folder)}
    return Job(
        str(folder), STAGES, STEPS, precision="64-true", freeze=FROZEN, val="val.json", trainer=trainer,
        strategy={"fill": "fine", **strategy}, capture=False,
    )  # fmt: skip


WORKER = {"num_workers": 1}
"""Options of the data module."""


def close(ones: list[float], others: list[float]) -> bool:
    return len(ones) == len(others) and bool(np.allclose(ones, others, rtol=1e-10, atol=0))


def total(runs: list[Ran], epoch: int) -> tuple[int, int]:
    """Items found and missed by all ranks in an epoch."""
    until = [np.array([pair for run in runs for pair in run.counts[e].values()]).sum(0) for e in range(epoch + 1)]
    found, missed = until[epoch] - (until[epoch - 1] if epoch else 0)
    return int(found), int(missed)


def items_of(folder: Path, *manifests: str) -> int:
    samples = [s for m in manifests for s in json.loads((folder / m).read_text())]
    count = lambda given: len(given) if isinstance(given, list) else given is not None  # noqa: E731
    return sum(count(s.get(key)) for s in samples for key in ("image", "audio"))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), train=60, val=12, seed=3, progress=False)


@pytest.fixture(scope="module")
def plain(pool: Pool, digits: Path) -> Ran:
    """The run without a cache."""
    return pool.run(2, ran, job_of(digits), timeout=300)[0]


@pytest.fixture(scope="module")
def in_its_turn(pool: Pool, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ran]]:
    """A run with caches and a loader worker on each rank: the folder of its rows, beside what it saved, and the run."""
    folder = tmp_path_factory.mktemp("turn") / "rows"
    job = job_of(digits, cache={"vision": folder, "audio": folder})
    return folder, pool.run(2, ran, job, str(folder.parent / "saved"), None, WORKER, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("how", ["in its turn", "ahead"])
def test_a_run_over_epochs_validations_and_a_resume(
    pool: Pool, digits: Path, plain: Ran, tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    """What is computed is bit by bit that of a run without; what is read was computed beside other items."""
    if how == "ahead":
        folder, options, ahead = tmp_path / "rows", {}, {"prefetch": {"audio": 1}}
        job = job_of(digits, cache={"vision": folder, "audio": folder}, **ahead)
        first: list[Ran] = pool.run(2, ran, job, str(tmp_path / "saved"), timeout=300)
    else:
        folder, first = request.getfixturevalue("in_its_turn")
        options, job = WORKER, job_of(digits, cache={"vision": folder, "audio": folder})
    path = str(folder.parent / "saved")
    train, both = items_of(digits, "train.json"), items_of(digits, "train.json", "val.json")
    for one in first:
        assert len(one.losses) == STEPS and one.losses[:5] == plain.losses[:5]
        assert close(one.losses, plain.losses) and close(one.validation, plain.validation)
    validations = 2 * (both - train)
    assert sum(total(first, 0)) == sum(total(first, 1)) == train + validations
    assert total(first, 0)[0] == (both - train) and total(first, 1)[1] <= 6
    assert sum(total(first, 1)) - total(first, 1)[1] >= 0.9 * train
    assert [said for one in first for said in one.said if f"cache of 'vision' in {folder}" in said and "0 of" in said]
    resumed = pool.run(2, ran, replace(job, resume=path), None, None, options, timeout=300)
    assert len(plain.shares) == 0 and [one.shares for one in first] == [first[0].shares] * 2
    assert first[0].shares[0] == 0 and len(first[0].shares) == 5 and min(first[0].shares[3:]) > 0.7
    for one in resumed:
        assert set(one.shares) == {1.0}
        assert close(one.losses, plain.losses[3:])
        assert close(one.validation[-3:], plain.validation[-3:])
    assert total(resumed, 0)[1] == total(resumed, 1)[1] == 0


@pytest.mark.full
def test_a_changed_weight_is_a_miss_and_one_that_changes_meanwhile_ends_the_run(
    pool: Pool, digits: Path, plain: Ran, in_its_turn: tuple[Path, list[Ran]], tmp_path: Path
) -> None:
    job, folder = job_of(digits), tmp_path / "rows"
    keeping = job_of(digits, cache={"vision": folder, "audio": folder})
    shutil.copytree(in_its_turn[0], folder)
    assert len(list(folder.iterdir())) == 2
    changed = pool.run(2, ran, job, None, "before", timeout=300)[0]
    assert not close(changed.losses, plain.losses)
    runs = pool.run(2, ran, keeping, None, "before", timeout=300)
    assert close(runs[0].losses, changed.losses) and close(runs[0].validation, changed.validation)
    assert sum(run.counts[0]["audio"][1] for run in runs) == 0
    assert sum(run.counts[0]["vision"][1] for run in runs) > 0 and len(list(folder.iterdir())) == 3
    with pytest.raises(WorkerError, match="weights of 'vision' have changed since this fit began"):
        pool.run(2, ran, keeping, None, "during", timeout=300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 KiB of its own."""
    with small_disk_in(tmp_path, "48k") as place:
        yield place


def stored(folder: Path) -> int:
    """Items in all caches of a folder."""
    stores = [RowStore(path) for path in folder.iterdir()]
    for store in stores:
        store.refresh()
    return sum(map(len, stores))


def filled(pool: Pool, job: Job, plain: Ran, message: str, folder: Path, largest: int | None = None) -> list[Ran]:
    """A run whose rows do not all fit, which goes on and says so once on each rank and module."""
    runs: list[Ran] = pool.run(2, ran, job, None, None, None, largest, timeout=300)
    for one in runs:
        assert close(one.losses, plain.losses) and close(one.validation, plain.validation)
        said = [text for text in one.said if message in text]
        assert 1 <= len(said) <= len(one.counts[0]) and "the other ones are computed from here on" in said[0]
        assert not any("not written" in text for text in one.said)
    assert stored(folder)
    return runs


@pytest.mark.full
def test_a_full_disk_ends_writing_and_nothing_else(pool: Pool, digits: Path, plain: Ran, small_disk: Path) -> None:
    folder = small_disk / "rows"
    job = job_of(digits, cache={"vision": folder, "audio": folder})
    filled(pool, job, plain, "No space left on device", folder)
    assert os.statvfs(small_disk).f_bavail == 0
    there = stored(folder)
    again = filled(pool, job, plain, "No space left on device", folder)  # full from the start
    assert stored(folder) == there and total(again, 0)[0] > 0 and total(again, 1)[1] > 6
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    runs: list[Ran] = pool.run(2, ran, job, timeout=300)
    assert close(runs[0].losses, plain.losses) and total(runs, 1)[1] <= 6
    assert stored(folder) == items_of(digits, "train.json", "val.json")


@pytest.mark.full
def test_a_file_that_may_not_grow_ends_writing(pool: Pool, digits: Path, plain: Ran, tmp_path: Path) -> None:
    """A quota; also where a file system cannot be mounted."""
    job = job_of(digits, cache={"vision": tmp_path, "audio": tmp_path})
    filled(pool, job, plain, "File too large", tmp_path, largest=25_000)


@pytest.mark.full
def test_two_runs_at_once_share_a_folder(pool: Pool, digits: Path, plain: Ran, tmp_path: Path) -> None:
    job = job_of(digits, cache={"vision": tmp_path, "audio": tmp_path})
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(each.run, 2, ran, job, None, None, WORKER, timeout=400) for each in (pool, Pool())]
        runs: list[Ran] = [one for future in both for one in future.result()]
    for one in runs:
        assert close(one.losses, plain.losses) and close(one.validation, plain.validation)
    for folder in tmp_path.iterdir():
        assert len(list(folder.glob("*.index"))) >= 2  # each wrote files of its own
    assert stored(tmp_path) == items_of(digits, "train.json", "val.json")
    later: list[Ran] = pool.run(2, ran, job, None, None, WORKER, timeout=300)
    assert close(later[0].losses, plain.losses) and total(later, 0)[1] == total(later, 1)[1] == 0


@pytest.mark.full
def test_what_could_not_be_read_is_not_kept_and_a_mended_file_is_read_again(
    pool: Pool, digits: Path, plain: Ran, tmp_path: Path
) -> None:
    folder, skip = tmp_path / "data", {"on_error": "skip"}
    shutil.copytree(digits, folder)
    job = job_of(folder)
    datamodule(job).prepare_data()
    keeping = job_of(folder, cache={"vision": tmp_path / "rows", "audio": tmp_path / "rows"})
    sample = next(s for s in json.loads((folder / "train.json").read_text()) if isinstance(s.get("image"), str))
    image = folder / sample["image"]
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    damaged: list[Ran] = pool.run(2, ran, job, None, None, skip, timeout=300)
    runs: list[Ran] = pool.run(2, ran, keeping, None, None, skip, timeout=300)
    assert not close(damaged[0].losses, plain.losses)
    for one, other in zip(damaged, runs, strict=True):
        assert close(one.losses, other.losses) and one.skipped == other.skipped == 2
    image.write_bytes(whole)
    runs = pool.run(2, ran, keeping, timeout=300)
    assert close(runs[0].losses, plain.losses) and 1 <= total(runs, 0)[1] <= 3  # it, and what it was with


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "trained": (
        {"freeze": ("audio",)},
        {},
        r"'vision', whose backbone has parameters that train \(of \d+ in its first",
    ),
    "no such module": ({}, {"cache": {"image": "rows"}}, r"cache names 'image'; the modules are vision, audio, llm"),
    "no encoder": ({}, {"cache": {"llm": "rows"}}, r"cache names 'llm', a \w+; only rows of an Encoder's backbone"),
    "wide": ({"layouts": {**STAGES, "vision": on(0, 1, tp=2)}}, {}, r"'vision', which has tp=2 cp=1: ranks of an"),
    "all to all": ({}, {"payload": "all_to_all"}, r"names 'vision', whose items are not looked for before they are"),
    "dropout": ({}, {"dropout": 0.1}, r"names 'vision', but backbone\.\S+ has attention_dropout=0.1 in training mode"),
    "before": ({}, {"before": True}, r"cache names 'vision', whose before= changes its inputs"),
}


def refused(rank: int, world: int, job: Job, options: dict[str, Any]) -> Ran:
    """A run of a model with something in it that the cache cannot see."""

    def made(job: Job, vocabulary: int) -> Any:
        model = scenario.model_of(replace(job), vocabulary)
        vision: Any = model.modules_by_name["vision"]
        if "dropout" in options:
            vision.backbone.model.encoder.layers[1].self_attn.attention_dropout = options["dropout"]
        if "before" in options:
            vision.before = lambda inputs: inputs
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lit, "configure_model", lambda self: setattr(self, "model", made(self.job, self.vocabulary)))
        return ran(rank, world, job, None, None, {n: v for n, v in options.items() if n == "payload"})


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused(pool: Pool, digits: Path, tmp_path: Path, case: str) -> None:
    job, given, message = REFUSED[case]
    names = given.get("cache", {"vision": "rows"})
    made = replace(job_of(digits, cache={n: tmp_path / f for n, f in names.items()}), **job)
    with pytest.raises(WorkerError, match=message) as error:
        pool.run(2, refused, made, given, timeout=240)
    assert error.value.error == "ConfigError"


def test_a_folder_that_cannot_be_written_is_refused_when_the_strategy_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/rows")):
        with pytest.raises(ConfigError, match=f"cache of 'vision' in {folder}: .*give another folder"):
            HeteroStrategy(cache={"vision": folder})
