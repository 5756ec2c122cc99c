"""What Lightning does to a LightningModule, it does under HeteroStrategy: each case against the one-process run."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, SumMetric

from hetero_strategy.errors import HeteroError
from hetero_strategy.model import MultimodalModel
from hetero_strategy.testing import Pool
from tests.distributed.probe import APART, PAIR, PIPELINED, Case, Probe, Seen, both, far, observe, ranked, whole
from tests.distributed.scenario import Job, datamodule
from tests.manifests import entry, write_manifest


class Manual(Probe):
    """Two optimizers by hand: one every step and clipped, one every second step."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([group], lr=0.5, momentum=0.9) for group in self.groups()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        encoders, llm = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        encoders.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(encoders, 0.01, "norm")
        encoders.step()
        if batch_idx % 2:
            llm.step()
            llm.zero_grad()


class OneGroup(Probe):
    """Encoders that one rank owns whole, and a sharded language model, in one group of one optimizer."""

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters()), "lr": 3e-3}]


class OwnStep(torch.optim.AdamW):
    """An optimizer of which nobody knows whether it treats every element alone."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnOptimizer(OneGroup):
    def configure_optimizers(self) -> Any:
        optimizer = OwnStep(self.groups(), **{self.case.optimizer.split()[1]: True})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watched(Probe):
    """Notes whether old gradients are alive while the schedule runs."""

    def on_train_start(self) -> None:
        super().on_train_start()
        executor = self.trainer.strategy._runner.executor
        run, self.old = executor.run, []

        def watching(*args: Any, **kwargs: Any) -> Any:
            self.seen.kept.append(any(old() is not None for old in self.old))
            return run(*args, **kwargs)

        executor.run = watching

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.old = [weakref.ref(p.grad) for p in self.parameters() if p.grad is not None]


class OwnZero(Watched):
    """Keeps gradients over steps, by its own zero_grad."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ByHand(Probe):
    """Clips by the norm of all gradients, as a person may."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        own = [p.grad for p in self.parameters() if p.grad is not None]
        norm = getattr(self.trainer.strategy, "grad_norm", lambda: torch.nn.utils.get_total_norm(own))()
        for gradient in own:
            gradient.mul_(0.1 / norm)
        self.log("norm", norm)


class LookingBack(Probe):
    """Runs the model once more after each batch, in the middle of windows of accumulation, too."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.log("after", self.model(args[1]).loss.detach())


class Reweighted(Probe):
    """Gives its model other weights of losses after the first step."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.model.loss_weights = {"llm": 0.5}


class Finding(Probe):
    lr = 3e-3


def optimization(folder: Path) -> dict[str, Case]:
    job = Job(str(folder), steps=4, batch=8, precision="64-true", capture=False)
    val = replace(job, val="val.json", steps=-1)
    return {
        "clip by norm": Case(job, trainer={"gradient_clip_val": 0.1}),
        "clip by value": Case(job, trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        "clip by hand": Case(job, lit=ByHand, optimizer="adamw"),
        "accumulate": Case(
            replace(job, steps=-1),
            lit=LookingBack,
            trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "limit_train_batches": 5, "max_epochs": 2},
        ),
        "accumulation scheduler": Case(
            replace(job, steps=-1),
            trainer={
                "callbacks": [GradientAccumulationScheduler({1: 3})],
                "limit_train_batches": 3,
                "max_epochs": 2,
            },
        ),
        "loss factor": Case(replace(job, loss_factor=3.0)),
        "other weights": Case(job, lit=Reweighted),
        "rate finder": Case(
            job,
            lit=Finding,
            optimizer="adamw",
            trainer={"callbacks": [LearningRateFinder(1e-3, 1e-2, num_training_steps=2, update_attr=False)]},
        ),
        "plateau": Case(
            val, optimizer="sgd plateau", trainer={"limit_train_batches": 1, "limit_val_batches": 1, "max_epochs": 4}
        ),
        "manual": Case(replace(job, steps=-1), lit=Manual, trainer={"limit_train_batches": 4, "max_epochs": 1}),
        "adamw": Case(job, optimizer="adamw"),
        "foreach": Case(job, optimizer="adamw foreach"),
        "fused": Case(job, optimizer="adamw fused", trainer={"gradient_clip_val": 0.1}),
    }


TOLERANCE = 1e-8


def check_optimization(runs: dict[str, tuple[Seen, list[Seen]]]) -> None:
    for name, (expected, found) in runs.items():
        assert far(expected, found) < TOLERANCE, name
        for seen in found:
            assert seen.rates == expected.rates, name
            assert seen.norms == pytest.approx(expected.norms, rel=1e-10, nan_ok=True), name
            assert seen.samples == expected.samples, name


OTHERS = ("clip by value", "clip by hand", "accumulation scheduler", "other weights", "rate finder", "adamw")
"""What needs no comparison with the rest."""


@pytest.mark.full
def test_other_optimization_is_as_in_one_process(pool: Pool, scenario_data: Path) -> None:
    cases = optimization(scenario_data)
    check_optimization(both(pool, {name: cases[name] for name in OTHERS}, APART, 3))
    pipelined = ("clip by norm", "manual")
    check_optimization(both(pool, {name: cases[name] for name in pipelined}, PIPELINED, 2))


@pytest.mark.full
def test_optimization_is_as_in_one_process(pool: Pool, scenario_data: Path) -> None:
    cases = {name: case for name, case in optimization(scenario_data).items() if name not in OTHERS}
    runs = both(pool, cases, APART, 3)
    check_optimization(runs)
    norms = runs["clip by norm"][0].norms
    assert len(norms) == 4 and min(norms) > 0.2, "nothing was clipped"
    assert len(runs["accumulate"][0].norms) == 2 * 3, "two whole windows and a short one per epoch"
    assert len({tuple(r) for r in runs["clip by norm"][0].rates}) == 4, "the rate does not move"
    assert len({r[0] for r in runs["plateau"][0].rates}) > 2, "the plateau was never seen"

    # What would go wrong is seen.
    plain, clipped, tripled = (runs[n][0] for n in ("accumulate", "clip by norm", "loss factor"))
    assert far(clipped, runs["loss factor"][1]) > 1e3 * TOLERANCE
    assert far(tripled, runs["clip by norm"][1]) > 1e3 * TOLERANCE
    assert plain.losses[0] == clipped.losses[0]

    # Rank 2 owns both kinds of parameters, in different groups.
    for how in ("foreach", "fused"):
        expected, found = runs[how]
        assert expected.kernels == [(how == "foreach" or None, how == "fused" or None)] * 2
        assert {str(s.kernels) for s in found} == {str(found[0].kernels)}, how


def kernels(rank: int, world: int, scenario_data: str) -> dict[str, Any]:
    """Why shards: torch's multi-tensor kernels over sharded and whole parameters at once."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    raised = {}
    for how in ("foreach", "fused"):
        sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        plain, elsewhere = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, device="meta"))
        for p in (sharded, plain):
            p.grad = torch.ones_like(p)
        for name, params in {
            "mixed": [sharded, plain],
            "sharded": [sharded, elsewhere],
            "plain": [plain, elsewhere],
        }.items():
            try:
                torch.optim.AdamW(params, **{how: True}).step()
                raised[f"{how} {name}"] = ""
            except RuntimeError as error:
                raised[f"{how} {name}"] = str(error)
    job = Job(scenario_data, steps=3, batch=8, precision="64-true", capture=False)
    chosen = {}
    for how in ("foreach", "fused"):
        for name, layouts in {"one kind": {n: {"ranks": [0, 1]} for n in PAIR}, "mixed": PAIR}.items():
            seen = observe(Case(job, layouts, optimizer=f"adamw {how}"))
            chosen[f"{how} {name}"] = (seen.kernels, any("foreach/fused is off" in w for w in seen.warned), seen.losses)
        one = observe(Case(job, PAIR, lit=OneGroup, optimizer=f"adamw {how}"))
        unasked = observe(Case(job, PAIR, lit=OneGroup, optimizer="adamw"))
        other = observe(Case(job, PAIR, lit=OwnOptimizer, optimizer=f"adamw {how}"))
        for name, seen in {"one group": one, "unasked": unasked, "other optimizer": other}.items():
            chosen[f"{how} {name}"] = (seen.kernels, any("foreach/fused is off" in w for w in seen.warned), seen.losses)
    return {"torch": raised, "chosen": chosen}


@pytest.mark.full
def test_multi_tensor_kernels_are_used_where_torch_can(pool: Pool, scenario_data: Path) -> None:
    results = pool.run(2, kernels, str(scenario_data))
    for rank, result in enumerate(results):
        for name, error in result["torch"].items():
            assert ("mixed torch.Tensor and DTensor" in error) == ("mixed" in name), (name, error)
        for how in ("foreach", "fused"):
            asked = (True, None) if how == "foreach" else (None, True)
            one, one_warned, one_losses = result["chosen"][f"{how} one kind"]
            mixed, mixed_warned, mixed_losses = result["chosen"][f"{how} mixed"]
            assert one == [asked, asked] and not one_warned
            # Encoders are whole, the language model is sharded: no group has both.
            assert mixed == [asked, asked] and not mixed_warned, rank
            both_kinds, both_warned, both_losses = result["chosen"][f"{how} one group"]
            unasked, unasked_warned, unasked_losses = result["chosen"][f"{how} unasked"]
            assert both_kinds == [asked] and unasked == [(None, True)] and not both_warned and not unasked_warned
            loops, loops_warned, loops_losses = result["chosen"][f"{how} other optimizer"]
            assert loops == [(False, False)]  # asked or not: on CUDA torch would choose foreach by itself
            assert loops_warned == (rank == 0)
            assert both_losses == pytest.approx(loops_losses, rel=1e-10)
            assert unasked_losses == pytest.approx(loops_losses, rel=1e-10)
            assert mixed_losses == pytest.approx(one_losses, rel=1e-10)


def memory(rank: int, world: int, scenario_data: str) -> dict[str, Seen]:
    job = Job(scenario_data, steps=-1, batch=8, precision="64-true", capture=False)
    windows = {"accumulate_grad_batches": 2, "limit_train_batches": 5, "max_epochs": 1}
    return {
        "every step": observe(Case(job, PAIR, lit=Watched, trainer={"limit_train_batches": 3, "max_epochs": 1})),
        "windows": observe(Case(job, PAIR, lit=Watched, trainer=windows)),
        "own zero_grad": observe(Case(job, PAIR, lit=OwnZero, trainer={"limit_train_batches": 4, "max_epochs": 1})),
    }


@pytest.mark.full
def test_old_gradients_do_not_outlive_their_use(pool: Pool, scenario_data: Path) -> None:
    for result in pool.run(2, memory, str(scenario_data), group=False):
        assert result["every step"].kept == [False] * 3
        assert result["windows"].kept == [False, True, False, True, False]
        assert result["own zero_grad"].kept == [False, True, True, True]


# ---- a whole life --------------------------------------------------------------------------------------------------


class Remember(DummyLogger):
    """Keeps what is logged, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        self.rows.append({k: float(v) for k, v in metrics.items()})


class Counted(torch.optim.SGD):
    """An optimizer with a state beside the parameters'."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "steps"})


class OwnState(Probe):
    """Changes what is saved of it and of its optimizer, and what is loaded, wherever torch and Lightning let it."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.told: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = Counted(self.groups(), momentum=0.9)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "hooked": torch.arange(3.0)})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self.told.append(state.pop("hooked").tolist()))
        return optimizer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = {name: value for name, value in super().state_dict(*args, **kwargs).items() if "audio" not in name}
        return {**found, "added": torch.full((2,), 0.5), "words": "plain"}

    def load_state_dict(self, state_dict: Any, strict: bool = True, **more: Any) -> Any:
        self.told.append((sorted(state_dict), state_dict["added"].tolist(), state_dict["words"]))
        found = {name: value for name, value in state_dict.items() if name not in ("added", "words")}
        return super().load_state_dict(found, strict=False)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["param_groups"][1]["lr"] = 0.03
        weights = checkpoint["state_dict"]
        for name in [name for name in weights if "vision" in name]:
            weights[name] = weights[name] * 0.5
        del weights[next(name for name in weights if ".llm." in name and name.endswith("norm.weight"))]

    def on_train_end(self) -> None:
        self.told.append(self.optimizers().optimizer.steps)


class Reset(OwnState):
    """Begins with a new optimizer."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []


def resume(case: Case, folder: str) -> dict[str, Any]:
    """Losses of a run that goes on, and what its hooks have found."""
    path, seen = f"{folder}/own", dict[str, Any]()
    trainer, first, dm = ranked(replace(case, lit=OwnState))
    trainer.fit(first, dm)
    trainer.save_checkpoint(path)
    for kind in (OwnState, Reset):
        trainer, lit, dm = ranked(replace(case, lit=kind, job=replace(case.job, steps=4)))
        trainer.fit(lit, dm, ckpt_path=path)
        seen[kind.__name__] = (lit.told, [float(x) for x in lit.losses], lit.seen.rates)
    return seen


class Evaluated(Probe):
    """Logs an evaluation as README does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(batch)
        self.log("val/loss", out.loss, batch_size=out.loss_tokens)
        self.log("val/by samples", out.loss)
        self.log("val/accuracy", out.accuracy, batch_size=out.loss_tokens)
        self.log("val/exact_match", out.exact_match, batch_size=out.labelled_samples)
        self.log_dict({f"val/{name}": x for name, x in out.losses.items()}, batch_size=out.counts["llm"])


def evaluate(case: Case, folder: Path) -> dict[str, Any]:
    """What is logged of five answers of one word and two of forty, by the size of batches."""
    answers = ["7", "7", "1 " * 40, "7", "7", "2 " * 40, "7"]
    folder.mkdir()
    samples = [entry(str(i), f"question {i}", answer) for i, answer in enumerate(answers)]
    write_manifest(folder, *samples, name="val.json")
    write_manifest(folder, *samples[:2], *samples[3:5], name="train.json")
    shutil.copy(Path(case.job.folder) / "tokenizer.json", folder)
    job = replace(case.job, folder=str(folder), batch=4, steps=8)
    trainer, lit, dm = ranked(replace(case, lit=Evaluated, job=job, trainer={"check_val_every_n_epoch": None}))
    trainer.fit(lit, dm)
    return {f"by {n}": trainer.validate(lit, datamodule(job, eval_batch_size=n), verbose=False) for n in (7, 4, 1)}


class Logging(Probe):
    """Logs in every way there is."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.total = SumMetric()
        self.average = MeanMetric()
        self.stages: list[str] = []
        self.register_buffer("steps", torch.zeros(()))
        self.statistics = torch.nn.BatchNorm1d(3, affine=False)

    def configure_model(self) -> None:
        if self.model is None:
            self.register_buffer("factor", torch.full((2,), 0.5))
            self.kept, self.values = SumMetric(), CatMetric()
            for metric in (self.kept, self.values):
                metric.persistent(True)
        super().configure_model()

    def on_train_start(self) -> None:
        super().on_train_start()
        beside = (self.steps, self.statistics.running_mean, self.factor, self.kept.sum_value, *self.values.value)
        self.began = [x.tolist() for x in beside]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.stages.append("train")
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        self.factor *= self.factor
        self.statistics.running_mean += len(batch)
        self.kept(len(batch))
        self.values.update(loss.detach())
        for how in ("mean", "sum", "max", "min"):
            self.log(f"train/{how}", loss, on_step=False, on_epoch=True, reduce_fx=how, sync_dist=True)
        self.log("train/both", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch))
        self.log("train/count", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.total(len(batch))
        self.average(loss, len(batch))
        self.log("train/samples", self.total, on_step=False, on_epoch=True)
        self.log("train/average", self.average, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.stages.append("val")
        out = self.model(batch)
        self.log("val/loss", out.loss)
        self.log_dict({"val/exact": out.exact_match, "val/accuracy": out.accuracy}, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.model(batch).loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).predictions


def live(case: Case, folder: str) -> dict[str, Any]:
    """Validate, fit until stopped early, test the best, predict, fit on, and go on from the last checkpoint."""
    told: dict[str, Any] = {}
    job = case.job

    def fresh() -> tuple[L.Trainer, Logging, Any, ModelCheckpoint, Remember]:
        saving = ModelCheckpoint(
            f"{folder}/kept", "{epoch}-{step}", monitor="val/loss", mode="max", save_top_k=2, save_last=True
        )
        callbacks: list[Callback] = [
            EarlyStopping("val/loss", mode="max", patience=2),
            saving,
            LearningRateMonitor("step"),
            ModelSummary(max_depth=3),
            TQDMProgressBar(),
        ]
        options = {
            "max_steps": -1,
            "max_epochs": 8,
            "limit_train_batches": 3,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 2,
            "callbacks": callbacks,
            "logger": Remember(),
            "log_every_n_steps": 1,
            "enable_progress_bar": True,
            "enable_checkpointing": True,
            "enable_model_summary": True,
            "default_root_dir": folder,
        }
        trainer, lit, dm = ranked(replace(case, lit=Logging, trainer=options))
        dm.manifests["test"] = dm.manifests["predict"] = (Path(job.folder) / "val.json",)
        assert isinstance(lit, Logging)
        return trainer, lit, dm, saving, options["logger"]  # type: ignore[return-value]

    def note(name: str, trainer: L.Trainer, lit: Logging) -> None:
        told[f"{name} metrics"] = {k: float(v) for k, v in sorted(trainer.callback_metrics.items())}
        told[f"{name} bar"] = {k: float(v) for k, v in trainer.progress_bar_metrics.items()}
        told[f"{name} place"] = (trainer.current_epoch, trainer.global_step)
        told[f"{name} losses"] = [float(x) for x in lit.losses]
        told[f"{name} stages"] = " ".join(lit.stages)
        told[f"{name} began"] = lit.began

    trainer, lit, dm, saving, logger = fresh()
    told["validated"] = trainer.validate(lit, dm)
    trainer.fit(lit, dm)
    note("fit", trainer, lit)
    told["best"] = [os.path.basename(p) for p in (saving.best_model_path, saving.last_model_path)]
    told["top"] = {os.path.basename(p): float(v) for p, v in saving.best_k_models.items()}
    told["files"] = sorted(os.listdir(f"{folder}/kept"))
    told["revalidated"] = trainer.validate(lit, dm)
    told["tested"] = trainer.test(lit, dm, ckpt_path="best")
    told["predicted"] = [runs.values.tolist() for runs in trainer.predict(lit, dm, ckpt_path="last") or ()]
    told["summary"] = [ModelSummary(max_depth=2)._summary(trainer, lit).total_parameters]
    trainer.early_stopping_callback.wait_count = -2  # type: ignore[union-attr]
    trainer.should_stop = False
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    trainer.fit(lit, dm)
    note("again", trainer, lit)

    other, lit, dm, _, more = fresh()
    other.fit_loop.max_epochs = trainer.current_epoch + 1
    other.early_stopping_callback.patience = 100  # type: ignore[union-attr]
    other.fit(lit, dm, ckpt_path="last")
    note("resumed", other, lit)
    told["rows"] = logger.rows + more.rows
    bar = trainer.progress_bar_callback.train_progress_bar  # type: ignore[union-attr]
    told["progress"] = (bar.n, bar.total) if trainer.is_global_zero else None
    return told


def live_on(rank: int, world: int, case: Case, folder: str) -> dict[str, Any]:
    return live(case, f"{folder}/life") | resume(case, folder) | evaluate(case, Path(folder) / f"short{rank}")


def flat(told: Any) -> list[Any]:
    if isinstance(told, dict):
        return [x for k in told for x in (k, *flat(told[k]))]
    if isinstance(told, (list, tuple)):
        return [x for part in told for x in flat(part)]
    return [told]


@pytest.fixture(scope="module")
def lived(scenario_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole life in one process."""
    job = Job(str(scenario_data), batch=8, val="val.json", precision="64-true", capture=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return live_on(0, 1, Case(job), str(tmp_path_factory.mktemp("one")))


@pytest.mark.full
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(PIPELINED, id="pipelined"),
        pytest.param("hetero", id="registered"),
    ],
)
def test_a_whole_life(pool: Pool, scenario_data: Path, lived: dict[str, Any], tmp_path: Path, layouts: Any) -> None:
    expected, job = lived, Job(str(scenario_data), batch=8, val="val.json", precision="64-true", capture=False)
    found = pool.run(2, live_on, Case(job, layouts), str(tmp_path), timeout=300, group=False)
    assert found[0]["progress"] == expected["progress"] and found[1]["progress"] is None
    for rank, told in enumerate(found):
        for name, value in expected.items():
            if name == "progress":
                continue
            assert len(flat(told[name])) == len(flat(value)), (rank, name, told[name], value)
            for a, b in zip(flat(told[name]), flat(value), strict=True):
                assert a == (pytest.approx(b, rel=1e-9) if isinstance(b, float) else b), (rank, name)
    assert expected["fit place"][0] < 8, "it was never stopped early"
    assert expected["fit stages"].startswith("val val val val train train train val val"), expected["fit stages"]
    assert len(expected["top"]) == 2 and "last.ckpt" in expected["files"]
    assert expected["fit metrics"]["train/count"] == 3.0
    assert expected["resumed losses"]
    (together,), *parts = (expected[f"by {n}"] for n in (7, 4, 1))
    assert together["val/exact_match"] == pytest.approx(5 / 7), "nothing was learnt"
    for (part,) in parts:
        by_samples = part["val/by samples"]
        assert by_samples != pytest.approx(together["val/loss"], rel=1e-4), "any weight would do"
        assert part == pytest.approx({**together, "val/by samples": by_samples}, rel=1e-6)
    began = expected["resumed began"]
    assert began[0] > 3 and len(began) == 4 + began[0], "nothing beside the model was restored"


# ---- refusals ------------------------------------------------------------------------------------------------------


class InInit(Probe):
    """Builds its model where it gets values at once."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.configure_model()


class Outside(Probe):
    """Has a parameter that no layout places."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.temperature = torch.nn.Parameter(torch.ones(()))


class Counting(Probe):
    """Has a buffer that the checkpoint lacks."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.register_buffer("count", torch.tensor(7.0))


class Lenient(Counting):
    strict_loading = False


class Fewer(Probe):
    """Has an optimizer of fewer parameters than were saved."""

    def groups(self) -> list[dict[str, Any]]:
        return super().groups()[1:]


class Unfreezing(Probe):
    """Changes its mind about what trains."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.vision.requires_grad_(False)


class Swapping(Probe):
    """The same with as many that train as before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for module, trains in ((self.model.vision, False), (self.model.audio, True)):
                next(module.parameters()).requires_grad_(trains)


class Hooked(Probe):
    """Changes gradients where they are made."""

    def on_fit_start(self) -> None:
        next(self.model.llm.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))


class Joining(Probe):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Copied(Probe):
    def on_fit_start(self) -> None:
        AveragedModel(self.model)


class Compiled(Probe):
    def configure_model(self) -> None:
        super().configure_model()
        if isinstance(self.model, MultimodalModel):
            self.model = torch.compile(self.model)


class WatchedGradients(Probe):
    """W&B's hooks, which its logger sets on one rank."""

    how = "gradients"

    def on_fit_start(self) -> None:
        if self.global_rank == 0:
            from wandb.integration.torch.wandb_torch import TorchHistory  # seconds

            getattr(TorchHistory(), f"add_log_{self.how}_hook")(self.model, log_freq=1)


class WatchedParameters(WatchedGradients):
    how = "parameters"


class Norms(Probe):
    """Takes a rank's parameters for the model's, as in one process."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in self.parameters() if p.grad is not None], 0.1)


class Listed(Probe):
    """Its own DataLoader over the steps of the data module."""

    shuffled = False

    def train_dataloader(self) -> Any:
        dm = datamodule(self.job)
        dm.trainer = self.trainer
        dm.setup("fit")
        return DataLoader(dm.train_dataloader().steps, batch_size=None, shuffle=self.shuffled)


class Shuffled(Listed):
    shuffled = True


class Lists(Probe):
    """Batches that are no batches."""

    def train_dataloader(self) -> Any:
        return DataLoader([1.0, 2.0, 3.0, 4.0], batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch).loss


def refuse(rank: int, world: int, scenario_data: str) -> dict[str, str]:
    job = Job(scenario_data, steps=2, batch=8, capture=False)
    case = Case(job, PAIR)
    said: dict[str, str] = {}

    def attempt(name: str, case: Case, act: Callable[[L.Trainer, Probe, Any], Any] | None = None) -> None:
        try:
            trainer, lit, dm = ranked(case)
            act(trainer, lit, dm) if act else trainer.fit(lit, dm)
            said[name] = ""
        except HeteroError as error:
            said[name] = str(error)

    unfinished: dict[str, Callback] = {
        "EMAWeightAveraging": EMAWeightAveraging(),
        "StochasticWeightAveraging": StochasticWeightAveraging(1e-2),
        "BackboneFinetuning": BackboneFinetuning(),
    }
    for name, callback in unfinished.items():
        attempt(name, replace(case, trainer={"callbacks": [callback]}))
    address, link = ModelCheckpoint("memory://run"), ModelCheckpoint(save_last="link")
    attempt("address", replace(case, trainer={"callbacks": [address], "enable_checkpointing": True}))
    attempt("logger", replace(case, trainer={"logger": CSVLogger("memory://logs"), "enable_checkpointing": True}))
    behind = replace(job, strategy={"async_checkpoint": True})
    attempt("link", replace(case, job=behind, trainer={"callbacks": [link], "enable_checkpointing": True}))
    attempt("by time", replace(case, trainer={"val_check_interval": "00:00:30:00", "check_val_every_n_epoch": None}))
    said["early"] = str(torch.distributed.is_initialized())
    attempt("in init", replace(case, lit=InInit))
    attempt("outside", replace(case, lit=Outside))
    attempt("unfreezing", replace(case, lit=Unfreezing))
    attempt("swapping", replace(case, lit=Swapping, job=replace(job, freeze=("audio",))))
    attempt("hooked", replace(case, lit=Hooked))
    attempt("joining", replace(case, lit=Joining))
    attempt("copied", replace(case, lit=Copied))
    attempt("compiled", replace(case, lit=Compiled))
    attempt("watched gradients", replace(case, lit=WatchedGradients))
    attempt("watched parameters", replace(case, lit=WatchedParameters))
    tensor_parallel = {**PAIR, "llm": {"ranks": [0, 1], "tp": 2}}
    attempt("anomaly", replace(case, layouts=tensor_parallel, trainer={"detect_anomaly": True}))
    with pytest.raises(RuntimeError) as mixed:
        observe(replace(case, lit=Norms))
    said["norms"] = mixed.value.__notes__[0]
    attempt("lists", replace(case, lit=Lists), lambda t, lit, dm: t.fit(lit))
    attempt("shuffled", replace(case, lit=Shuffled), lambda t, lit, dm: t.fit(lit))
    attempt("save at", case, lambda t, lit, dm: (t.fit(lit, dm), t.save_checkpoint("memory://run/a.ckpt")))
    attempt("load from", case, lambda t, lit, dm: t.fit(lit, dm, ckpt_path="memory://run/a.ckpt"))
    attempt("storage", case, lambda t, lit, dm: (t.fit(lit, dm), t.save_checkpoint("/x", storage_options=object())))

    def twice(trainer: L.Trainer, lit: Probe, dm: Any) -> None:
        trainer.fit(lit, dm)
        ranked(case)[0].fit(lit, dm)

    attempt("another trainer", case, twice)

    def two_modules(trainer: L.Trainer, lit: Probe, dm: Any) -> None:
        trainer.fit(lit, dm)
        trainer.fit_loop.epoch_loop.max_steps = 4
        other = ranked(case)[1]
        trainer.fit(other, dm)
        assert [len(lit.losses), len(other.losses)] == [2, 2]
        assert whole(other).keys() == whole(lit).keys() and not other.seen.start.keys() - whole(other).keys()

    attempt("two modules", case, two_modules)
    plain = str(Path(scenario_data).parent / "plain.ckpt")

    def resumed(trainer: L.Trainer, lit: Probe, dm: Any) -> None:
        trainer.fit(lit, dm, ckpt_path=plain)
        assert trainer.global_step == 2 and not lit.losses and float(lit.count) == 7.0

    def from_weights(trainer: L.Trainer, lit: Probe, dm: Any) -> None:
        trainer.fit(lit, dm)
        trainer.save_checkpoint(f"{plain}.weights", weights_only=True)
        trainer, other, dm = ranked(case)
        trainer.validate(other, dm, ckpt_path=f"{plain}.weights", verbose=False)
        trained, begun = whole(lit), whole(other)
        assert all(torch.equal(value, trained[name]) for name, value in begun.items())
        trainer.fit(other, dm)
        trainer, other, dm = ranked(case)
        trainer.fit(other, dm, ckpt_path=f"{plain}.weights")

    attempt("weights", case, from_weights)
    attempt("saved", case, lambda t, lit, dm: (t.fit(lit, dm), t.save_checkpoint(plain)))
    attempt("optimizer", replace(case, optimizer="adamw"), lambda t, lit, dm: t.fit(lit, dm, ckpt_path=plain))
    attempt("fewer", replace(case, lit=Fewer), lambda t, lit, dm: t.fit(lit, dm, ckpt_path=plain))
    attempt("lacking", replace(case, lit=Counting), resumed)
    attempt("lenient", replace(case, lit=Lenient), resumed)
    uploading = Remember()
    uploading._log_model = "all"  # type: ignore[attr-defined]
    seen = observe(replace(case, trainer={"callbacks": [ThroughputMonitor(batch_size_fn=len)], "logger": uploading}))
    said["throughput"] = " ".join(seen.warned)
    listed = ranked(replace(case, lit=Listed, job=replace(job, shuffle=False)))
    listed[0].fit(listed[1])
    said["order"] = str(listed[1].seen.samples)
    return said


@pytest.mark.full
def test_what_cannot_be_done_is_said(pool: Pool, scenario_data: Path) -> None:
    first, second = pool.run(2, refuse, str(scenario_data), timeout=240, group=False)
    assert all(
        words in first["throughput"] for words in ("hetero_strategy.monitor.ThroughputMonitor", "none is uploaded")
    )
    del first["throughput"]
    second.pop("throughput")  # rank 0 speaks
    assert first == second
    for name, words in {
        "EMAWeightAveraging": "copies the whole model",
        "StochasticWeightAveraging": "copies the model before it is built",
        "BackboneFinetuning": "MultimodalModel(freeze=...)",
        "address": "checkpoints cannot lie at memory://run",
        "logger": "checkpoints cannot lie at memory://logs",
        "link": "save_last='link') with async_checkpoint=True",
        "by time": "val_check_interval is a time of 1800 s",
        "early": "False",
        "in init": "has values already",
        "outside": "parameter 'temperature' of Outside lies outside",
        "another trainer": "has values already",
        "unfreezing": "with several optimizers leave out toggle_optimizer()",
        "swapping": "requires_grad of a parameter was changed",
        "hooked": "of module 'llm' has a hook for its gradient",
        "weights": "plain.ckpt.weights holds the model alone",
        "optimizer": "plain.ckpt was saved with another optimizer than AdamW",
        "fewer": "plain.ckpt: optimizer 0 was saved with states of 'model.",
        "joining": "LBFGS joins all parameters to one vector",
        "copied": "a copy of a model that a strategy has placed",
        "compiled": "torch.compile around the MultimodalModel of Compiled",
        "watched gradients": "W&B's watch() sees one rank's part",
        "watched parameters": "W&B's watch() sees one rank's part",
        "anomaly": "detect_anomaly=True with tp=2 of module 'llm'",
        "norms": "trainer.strategy.grad_norm(), called on every rank, is the norm of all gradients",
        "lists": "got a Tensor",
        "shuffled": "DataLoader(shuffle=True)",
        "storage": "storage_options",
        "save at": "checkpoints cannot lie at memory://run/a.ckpt",
        "load from": "checkpoints cannot lie at memory://run/a.ckpt",
        "lacking": "plain.ckpt lacks 1 tensors of the model: model.count",
        "order": str([list(range(8)), list(range(8, 16))]),
    }.items():
        assert words in first.pop(name), name
    assert first == {"two modules": "", "saved": "", "lenient": ""}
