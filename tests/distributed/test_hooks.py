"""What hooks and plugins of Lightning find under HeteroStrategy, where it does a step its own way."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torchmetrics import SumMetric

from hetero_strategy.checkpoint import describe, saving
from hetero_strategy.errors import ConfigError, HeteroError, ModelError
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed import scenario
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
        self.transferred, self.last = self.transferred + 1, batch
        return batch

    def on_train_end(self) -> None:
        assert self.model(self.last).loss > 0

    def on_fit_end(self) -> None:
        with pytest.raises(ModelError, match="on_fit_end, teardown and what follows fit are too late"):
            self.model(self.last)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        may = self.trainer.strategy._stop.may
        self.may.append((self.trainer.fit_loop.epoch_loop.batch_idx, may is None or may()))


def slowly(*given: Any, write: Any = saving._write) -> None:
    time.sleep(0.3)
    write(*given)


def looked(rank: int, world: int, job: Job, folder: str) -> tuple[list[bool], int, list[tuple[int, bool]]]:
    trainer, module, dm = scenario.build(job)
    module = Looking(job, module.vocabulary)
    trainer.fit(module, dm)
    path = f"{folder}/weights.ckpt"
    with patch.object(saving, "_write", slowly):
        trainer.save_checkpoint(path, weights_only=True)
    assert describe(path).step == 2  # nobody waits for one in the background after a run, or hears that it failed
    (optimizer,) = trainer.optimizers
    before = {p: state["exp_avg"] for p, state in optimizer.state.items()}
    trainer.validate(module, dm, ckpt_path=path)  # which has nothing for an optimizer
    assert before and all(optimizer.state[p]["exp_avg"] is value for p, value in before.items())
    return module.zeroed, module.transferred, module.may


def test_hooks_find_what_lightning_promises(pool: Pool, tmp_path: Path) -> None:
    accumulating = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1}
    job = Job(str(data(tmp_path / "data")), ONE, steps=2, val="val.json", trainer=accumulating, capture=False)
    job = replace(job, strategy={"async_checkpoint": True})
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


@pytest.mark.full
def test_blocks_that_do_not_run_are_refused_in_an_evaluation_too(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path)), batch=2, microbatches=1, precision="64-true", val="val.json")
    with pytest.raises(WorkerError, match=r"module 'vision': backbone.layers.0 did not run in a microbatch"):
        pool.run(2, skipping, job.on(vision=SHARDED, audio=SHARDED, llm=SHARDED), group=False, timeout=240)


class Failing(Lit):
    """Raises in its fourth step, after a checkpoint of the second."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise ValueError("a damaged batch")
        return super().training_step(batch, batch_idx)


def failed(rank: int, world: int, job: Job, folder: str) -> None:
    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_last="link", save_on_exception=True)
    trainer, module, dm = scenario.build(
        replace(job, trainer={"callbacks": [saving], "enable_checkpointing": True, "accumulate_grad_batches": 1})
    )
    with pytest.raises(ValueError, match="a damaged batch"):
        trainer.fit(Failing(job, module.vocabulary), dm)


def test_an_exception_leaves_the_last_checkpoint_the_last_one(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path / "data")), ONE, steps=4, capture=False)
    pool.run(1, failed, job, str(tmp_path / "run"), group=False)
    last = tmp_path / "run" / "last.ckpt"
    assert last.is_symlink() and (last / "metadata.json").exists() and "step=2" in str(last.resolve())


class Early(Lit):
    """Asks in setup for what needs the loaders."""

    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches


class Evaluating(Lit):
    """First in a step that asks for no gradients, which may be."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            assert self.model(batch).loss > 0
        return super().training_step(batch, batch_idx)


class Unsaved(Lit):
    def __init__(self, job: Job, vocabulary: int) -> None:
        super().__init__(job, vocabulary)
        self.save_hyperparameters({"make": data})


class Counted(Lit):
    """Metrics that are no children of the module count each global batch once all the same."""

    def __init__(self, job: Job, vocabulary: int) -> None:
        super().__init__(job, vocabulary)
        self.by_name = {"train": [SumMetric()]}

    def on_fit_start(self) -> None:
        self.late = SumMetric()

    def on_train_start(self) -> None:
        mine = torch.tensor([self.global_rank + 1])
        reduced = [self.trainer.strategy.reduce(mine, reduce_op=op) for op in ("sum", torch.distributed.ReduceOp.SUM)]
        mean = self.trainer.strategy.reduce(mine.double())
        self.reduced = [mine.tolist() == [self.global_rank + 1], *(x.tolist() for x in reduced), mean.tolist()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.by_name["train"][0].update(1)
        self.late.update(1)
        return super().training_step(batch, batch_idx)


class Prodigy(torch.optim.SGD):
    """As a person's optimizer, which may look at all parameters."""


class Untrained(Lit):
    def configure_optimizers(self) -> None: ...


class Unknown(Lit):
    def configure_optimizers(self) -> Any:
        return Prodigy(self.parameters(), 1e-3)


class Beside(Callback):
    def __init__(self) -> None:
        self.metric = SumMetric()

    def on_train_batch_end(self, *_: Any) -> None:
        self.metric.update(1)


class Shadows(Lit):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = {name: p.detach().clone() for name, p in self.named_parameters() if not p.is_meta}


class Renames(Lit):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {n.removeprefix("model."): v for n, v in super().state_dict(*args, **kwargs).items()}


class Signs(Lit):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "rank": torch.full((2,), self.global_rank)}


class Scores(Callback):
    """A number that ranks round apart."""

    def __init__(self, rank: int) -> None:
        self.best = torch.tensor(0.5 + 1e-7 * rank)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}


class Uploads(Callback):
    """Of one rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"sent": ["first.ckpt"]}


class Averages(Callback):
    """Of the weights that a rank owns, or of what all ranks know."""

    def __init__(self, *, owned: bool) -> None:
        self.owned, self.averages = owned, dict[str, torch.Tensor]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        known = {"step": torch.tensor(trainer.global_step)}
        weights = {name: p.detach().clone() for name, p in pl_module.named_parameters() if not p.is_meta}
        self.averages = known | (weights if self.owned else {})

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}


def said(rank: int, world: int, job: Job, folder: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def attempt(name: str, kind: type[Lit], options: dict[str, Any], *, alone: bool = False) -> Any:
        trainer, module, dm = scenario.build(replace(job, trainer=options))
        made = kind(job, module.vocabulary)
        try:
            trainer.fit(made, train_dataloaders=dm.train_dataloader()) if alone else trainer.fit(made, dm)
        except HeteroError as error:
            found[name] = str(error)
        return made

    attempt("early", Early, {"max_epochs": 1, "max_steps": -1})
    attempt("evaluating", Evaluating, {})
    attempt("unsaved", Unsaved, {"callbacks": [ModelCheckpoint(folder)], "enable_checkpointing": True})
    attempt("alone", Lit, {}, alone=True)
    for owned in (True, False):
        saving = {"callbacks": [Averages(owned=owned), ModelCheckpoint(folder)], "enable_checkpointing": True}
        attempt(f"averages, {owned=}", Lit, saving)
    for name, kind in {"shadows": Shadows, "renames": Renames, "signs": Signs}.items():
        attempt(name, kind, {"callbacks": [ModelCheckpoint(folder)], "enable_checkpointing": True})
    kept = [Scores(rank), Averages(owned=False), ModelCheckpoint(folder)] + [Uploads()] * (not rank)
    attempt("scores and uploads", Lit, {"callbacks": kept, "enable_checkpointing": True})
    beside = Beside()
    counted = attempt("", Counted, {"callbacks": [beside]})
    found["reduced"] = str(counted.reduced)
    found["counted"] = (
        f"{counted.by_name['train'][0].compute():g} {beside.metric.compute():g} {counted.late.compute():g}"
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        attempt("", Unknown, {})
        attempt("", Untrained, {})
        within = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, train_time_interval=None)
        options = {"callbacks": [within], "enable_checkpointing": True, "accumulate_grad_batches": 2}
        evaluating = {"val_check_interval": 2, "limit_val_batches": 1}
        trainer, module, dm = scenario.build(replace(job, val="val.json", trainer=options | evaluating))
        trainer.fit(placed := Midway(job, module.vocabulary), dm)
        placed.state_dict()
    found["warned"] = " ".join(str(one.message) for one in warned)
    return found


class Midway(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.trainer.save_checkpoint(str(Path(self.trainer.checkpoint_callback.dirpath) / "midway.ckpt"))


@pytest.mark.full
def test_what_a_person_may_ask_for_in_vain_is_said_and_metrics_count_once(pool: Pool, tmp_path: Path) -> None:
    layouts = {"vision": {"ranks": [0]}, "audio": {"ranks": [0]}, "llm": {"ranks": [1]}}
    job = Job(str(data(tmp_path / "data")), layouts, steps=2, capture=False)
    first, second = pool.run(2, said, job, str(tmp_path / "run"), group=False, timeout=300)
    warned = first.pop("warned")
    second.pop("warned")  # rank 0 speaks
    assert first == second
    assert "Prodigy steps as it is" in warned and "_MockOptimizer" not in warned
    assert "midway.ckpt is saved between batches whose gradients add up" in warned
    assert warned.count("has on this one a part, or nothing, of llm; for all weights use trainer.save_checkpoint") == 1
    assert "It is recommended to use `self.log(" not in warned
    assert first.pop("counted") == "2 2 2"
    assert first.pop("reduced") == "[True, [3], [3], [1.5]]"
    for name, words in {
        "early": "ask in configure_optimizers()",
        "evaluating": "the model is in evaluation mode in training_step",
        "unsaved": "hyper_parameters.make",
        "alone": "this loader is of a MultimodalDataModule that the Trainer does not know",
        "averages, owned=True": "tensors in the state of Averages differ between ranks",
        "shadows": "tensors in the state of shadow differ between ranks",
        "renames": "a tensor of which ranks have parts, under a name that the module does not have",
        "signs": "tensors in the state of state_dict()['rank'] differ between ranks",
    }.items():
        assert words in first.pop(name), name
    assert not first
