"""What Lightning does to a LightningModule, it does under HeteroStrategy: each case against the one-process run."""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from hetero_strategy.errors import ConfigError
from hetero_strategy.strategy import HeteroStrategy
from tests.distributed.harness import Pool
from tests.distributed.scenario import Job, Lit, data, datamodule

Layouts = dict[str, dict[str, Any]]

APART: Layouts = {
    "vision": {"ranks": [0, 1]},
    "audio": {"ranks": [2]},
    "llm": {"ranks": [1, 2], "tp": 2},
}
"""Three ranks: FSDP, a whole module, tensor parallel with replicated norms; rank 2 has sharded and whole parameters."""
PAIR: Layouts = {"vision": {"ranks": [0]}, "audio": {"ranks": [1]}, "llm": {"ranks": [0, 1]}}
"""Two ranks that each own a module the other one lacks."""


@dataclass(frozen=True)
class Case:
    """One run and what to see in it; the same object describes the run in one process."""

    job: Job
    layouts: Layouts | str | None = None
    lit: str = "Probe"
    optimizer: str = "sgd"
    trainer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    """Arguments of a GradScaler for fp16 on CPU."""
    save: str | None = None
    load: str | None = None


@dataclass
class Seen:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    """Whether gradients of the step before were alive when a step's work began."""
    metrics: dict[str, float] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)
    kernels: list[Any] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full values of what this rank owns."""
    owned = {n: p for n, p in module.named_parameters() if not p.is_meta}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in owned.items()}


class Probe(Lit):
    """An ordinary module that remembers what Lightning did."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case.job, vocabulary)
        self.case = case
        self.seen = Seen()

    def on_train_start(self) -> None:
        self.seen.start = whole(self)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.samples.append(batch.plan.samples.tolist())
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer: Any, *how: Any, **more: Any) -> None:
        if isinstance(self.trainer.strategy, HeteroStrategy):
            super().configure_gradient_clipping(optimizer, *how, **more)
            norm = self.trainer.precision_plugin.last_norm
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            super().configure_gradient_clipping(optimizer, *how, **more)
        self.seen.norms.append(math.nan if norm is None else float(norm))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.seen.rates.append([g["lr"] for o in optimizers for g in o.param_groups])
        self.seen.kernels = [(g.get("foreach"), g.get("fused")) for o in optimizers for g in o.param_groups]
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.seen.scales.append(scaler.get_scale())

    def groups(self) -> list[dict[str, Any]]:
        """The language model at a tenth of the encoders' rate."""
        encoders = [p for n, p in self.named_parameters() if ".llm." not in n]
        llm = [p for n, p in self.named_parameters() if ".llm." in n]
        rate = 0.5 if self.case.optimizer.startswith("sgd") else 3e-3
        return [{"params": encoders, "lr": rate}, {"params": llm, "lr": rate / 10, "weight_decay": 0.1}]

    def configure_optimizers(self) -> Any:
        kind, _, how = self.case.optimizer.partition(" ")
        make = functools.partial(torch.optim.SGD, momentum=0.9) if kind == "sgd" else torch.optim.AdamW
        optimizer = make(self.groups(), **({how: True} if how in ("foreach", "fused") else {}))
        if how == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, mode="max")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


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


class Overflow(Probe):
    """At step 2 one gradient, which exists on one rank only, overflows."""

    def on_after_backward(self) -> None:
        if len(self.losses) == 3:
            for name, p in self.named_parameters():
                if name.endswith("audio.projector.0.weight") or (".audio." in name and name.endswith("weight")):
                    if p.grad is not None:
                        p.grad.view(-1)[0] = math.inf
                    return


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


def ranked(case: Case) -> tuple[L.Trainer, Probe, Any]:
    job = case.job
    plugins: list[Any] = []
    strategy: Any = "auto"
    devices = 1
    if case.layouts is not None:
        devices = int(os.environ["WORLD_SIZE"])
        plugins.append(TorchElasticEnvironment())
        strategy = case.layouts if isinstance(case.layouts, str) else HeteroStrategy(case.layouts)
    precision: dict[str, Any] = {"precision": job.precision}
    if case.scaler:
        scaler = torch.amp.GradScaler("cpu", **case.scaler)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler=scaler))
        precision = {}
    options = {
        "max_steps": job.steps,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        **precision,
        **case.trainer,
    }
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins, **options)
    dm = datamodule(job)
    return trainer, globals()[case.lit](case, dm.tokenizer.vocab_size), dm


def observe(case: Case) -> Seen:
    trainer, lit, dm = ranked(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(lit, datamodule=dm, ckpt_path=case.load)
    if case.save is not None:
        trainer.save_checkpoint(case.save)
    lit.seen.end = whole(lit)
    lit.seen.losses = [float(x) for x in lit.losses]
    lit.seen.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    lit.seen.warned = [str(w.message) for w in caught]
    return lit.seen


def on_rank(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Seen]:
    return {name: observe(case) for name, case in cases.items()}


def both(pool: Pool, cases: dict[str, Case], layouts: Layouts, world: int) -> dict[str, tuple[Seen, list[Seen]]]:
    """Every case in one process, and in one world: name -> (expected, by rank)."""
    runs = pool.run(
        world, on_rank, {n: replace(c, layouts=layouts) for n, c in cases.items()}, timeout=170, group=False
    )
    return {name: (observe(case), [run[name] for run in runs]) for name, case in cases.items()}


def far(expected: Seen, found: Sequence[Seen]) -> float:
    """Worst relative difference of any loss and any parameter's change, over ranks; every parameter is looked at."""
    worst, names = 0.0, set()
    for seen in found:
        assert len(seen.losses) == len(expected.losses)
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(seen.losses, expected.losses, strict=True)))
        for name, end in seen.end.items():
            names.add(name)
            change = (expected.end[name] - expected.start[name]).norm()
            if not name.endswith("k_proj.bias") and change:  # its gradient is zero: rounding noise is what moves it
                worst = max(worst, float((end - expected.end[name]).norm() / change))
    assert names == set(expected.end)
    return worst


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data(tmp_path_factory.mktemp("lightning") / "digits")


def optimization(folder: Path) -> dict[str, Case]:
    job = Job(str(folder), steps=4, batch=8, precision="64-true", capture=False)
    val = replace(job, val="val.json", steps=-1)
    return {
        "clip by norm": Case(job, trainer={"gradient_clip_val": 0.1}),
        "clip by value": Case(job, trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        "accumulate": Case(
            replace(job, steps=-1),
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
        "plateau": Case(
            val, optimizer="sgd plateau", trainer={"limit_train_batches": 1, "limit_val_batches": 1, "max_epochs": 4}
        ),
        "manual": Case(replace(job, steps=-1), lit="Manual", trainer={"limit_train_batches": 4, "max_epochs": 1}),
        "adamw": Case(job, optimizer="adamw"),
        "foreach": Case(job, optimizer="adamw foreach"),
        "fused": Case(job, optimizer="adamw fused", trainer={"gradient_clip_val": 0.1}),
    }


def test_optimization_is_as_in_one_process(pool: Pool, digits: Path) -> None:
    runs = both(pool, optimization(digits), APART, 3)
    tolerance = 1e-8
    for name, (expected, found) in runs.items():
        assert far(expected, found) < tolerance, name
        for seen in found:
            assert seen.rates == expected.rates, name
            assert seen.norms == pytest.approx(expected.norms, rel=1e-10, nan_ok=True), name
            assert seen.samples == expected.samples, name
    norms = runs["clip by norm"][0].norms
    assert len(norms) == 4 and min(norms) > 0.2, "nothing was clipped"
    assert len(runs["accumulate"][0].norms) == 2 * 3, "two whole windows and a short one per epoch"
    assert len({tuple(r) for r in runs["clip by norm"][0].rates}) == 4, "the rate does not move"
    assert len({r[0] for r in runs["plateau"][0].rates}) > 2, "the plateau was never seen"

    # What would go wrong is seen.
    plain, clipped, tripled = (runs[n][0] for n in ("accumulate", "clip by norm", "loss factor"))
    assert far(clipped, runs["loss factor"][1]) > 1e3 * tolerance
    assert far(tripled, runs["clip by norm"][1]) > 1e3 * tolerance
    assert plain.losses[0] == clipped.losses[0]

    # Rank 2 owns both kinds of parameters, in different groups; every rank loops where any has to.
    for how in ("foreach", "fused"):
        expected, found = runs[how]
        assert expected.kernels == [(how == "foreach" or None, how == "fused" or None)] * 2
        assert {str(s.kernels) for s in found} == {str(found[0].kernels)}, how


def kernels(rank: int, world: int, digits: str) -> dict[str, Any]:
    """Why loops: torch's multi-tensor kernels over sharded and whole parameters at once."""
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
    job = Job(digits, steps=3, batch=8, precision="64-true", capture=False)
    chosen = {}
    for how in ("foreach", "fused"):
        for name, layouts in {"one kind": {n: {"ranks": [0, 1]} for n in PAIR}, "mixed": PAIR}.items():
            seen = observe(Case(job, layouts, optimizer=f"adamw {how}"))
            chosen[f"{how} {name}"] = (seen.kernels, any("foreach/fused is off" in w for w in seen.warned), seen.losses)
    return {"torch": raised, "chosen": chosen}


def test_multi_tensor_kernels_are_used_where_torch_can(pool: Pool, digits: Path) -> None:
    results = pool.run(2, kernels, str(digits))
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
            assert mixed_losses == pytest.approx(one_losses, rel=1e-10)


def precision(folder: Path, path: Path) -> dict[str, Case]:
    job = Job(str(folder), steps=4, batch=8, capture=False)
    high = {"init_scale": 2.0**26, "backoff_factor": 0.25, "growth_interval": 3}
    fine = {"init_scale": 1024.0, "growth_interval": 3}
    clip = {"gradient_clip_val": 0.5}
    return {
        "32-true": Case(job, trainer=clip),
        "bf16-mixed": Case(replace(job, precision="bf16-mixed"), optimizer="adamw", trainer=clip),
        "bf16-true": Case(replace(job, precision="bf16-true"), optimizer="adamw"),
        "64-true": Case(replace(job, precision="64-true"), optimizer="adamw"),
        "16-mixed": Case(job, scaler=fine, trainer=clip | {"accumulate_grad_batches": 2}),
        "16-mixed, fused": Case(job, optimizer="adamw fused", scaler=fine, trainer=clip),
        "16-mixed, scale too high": Case(replace(job, steps=8), scaler=high),
        "16-mixed, overflow on one rank": Case(job, lit="Overflow", scaler=fine),
        "16-mixed, off": Case(job, scaler={"enabled": False}),
    }


def test_precision_is_as_in_one_process(pool: Pool, digits: Path, tmp_path: Path) -> None:
    runs = both(pool, precision(digits, tmp_path), APART, 3)
    tolerances = {"64-true": 1e-12, "32-true": 1e-5, "bf16-true": 2e-2}
    for name, (expected, found) in runs.items():
        for seen in found:
            assert len(seen.losses) == len(expected.losses), name
            tolerance = tolerances.get(name, 2e-3)
            assert seen.losses == pytest.approx(expected.losses, rel=tolerance), name
            assert seen.scales == expected.scales, name
            assert seen.rates == expected.rates, name
            if name not in ("bf16-true",):
                assert seen.norms == pytest.approx(expected.norms, rel=1e-2, nan_ok=True), name
    backoffs = runs["16-mixed, scale too high"][0].scales
    assert backoffs[0] < 2.0**26 and backoffs[-1] in backoffs[:-1], "no overflow, or nothing but overflows"
    assert runs["16-mixed, overflow on one rank"][0].scales == [1024.0, 1024.0, 512.0, 512.0]
    half, full = runs["bf16-mixed"][1][0].losses, runs["64-true"][1][0].losses
    assert half != pytest.approx(full, rel=1e-6), "bf16 was not used"


def resumed(rank: int, world: int, digits: str, path: str) -> dict[str, Any]:
    job = Job(digits, steps=6, batch=8, capture=False)
    options = {"init_scale": 256.0, "growth_interval": 2}
    case = Case(job, PAIR, scaler=options, trainer={"limit_train_batches": 9})
    straight = observe(case)
    observe(replace(case, job=replace(job, steps=3), save=path))
    again = observe(replace(case, scaler={**options, "init_scale": 8.0}, load=path))
    return {"straight": straight, "again": again}


def test_the_loss_scale_survives_a_checkpoint(pool: Pool, digits: Path, tmp_path: Path) -> None:
    for result in pool.run(2, resumed, str(digits), str(tmp_path / "c.ckpt"), group=False):
        straight, again = result["straight"], result["again"]
        assert straight.scales == [256.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]
        assert again.scales == straight.scales[3:]
        assert again.losses == pytest.approx(straight.losses[3:], rel=1e-6)


def memory(rank: int, world: int, digits: str) -> dict[str, Seen]:
    job = Job(digits, steps=-1, batch=8, precision="64-true", capture=False)
    windows = {"accumulate_grad_batches": 2, "limit_train_batches": 5, "max_epochs": 1}
    return {
        "every step": observe(Case(job, PAIR, lit="Watched", trainer={"limit_train_batches": 3, "max_epochs": 1})),
        "windows": observe(Case(job, PAIR, lit="Watched", trainer=windows)),
        "own zero_grad": observe(Case(job, PAIR, lit="OwnZero", trainer={"limit_train_batches": 4, "max_epochs": 1})),
    }


def test_old_gradients_do_not_outlive_their_use(pool: Pool, digits: Path) -> None:
    for result in pool.run(2, memory, str(digits), group=False):
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


class Logging(Probe):
    """Logs in every way there is."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.total = SumMetric()
        self.average = MeanMetric()
        self.stages: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.stages.append("train")
        loss = super().training_step(batch, batch_idx)
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

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return self.model(batch).predictions.values.tolist()


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
        trainer, lit, dm = ranked(replace(case, lit="Logging", trainer=options))
        dm.manifests["test"] = dm.manifests["predict"] = Path(job.folder) / "val.json"
        assert isinstance(lit, Logging)
        return trainer, lit, dm, saving, options["logger"]  # type: ignore[return-value]

    def note(name: str, trainer: L.Trainer, lit: Logging) -> None:
        told[f"{name} metrics"] = {k: float(v) for k, v in sorted(trainer.callback_metrics.items())}
        told[f"{name} bar"] = {k: float(v) for k, v in trainer.progress_bar_metrics.items()}
        told[f"{name} place"] = (trainer.current_epoch, trainer.global_step)
        told[f"{name} losses"] = [float(x) for x in lit.losses]
        told[f"{name} stages"] = " ".join(lit.stages)

    trainer, lit, dm, saving, logger = fresh()
    told["validated"] = trainer.validate(lit, dm)
    trainer.fit(lit, dm)
    note("fit", trainer, lit)
    told["best"] = [os.path.basename(p) for p in (saving.best_model_path, saving.last_model_path)]
    told["top"] = {os.path.basename(p): float(v) for p, v in saving.best_k_models.items()}
    told["files"] = sorted(os.listdir(f"{folder}/kept"))
    told["revalidated"] = trainer.validate(lit, dm)
    told["tested"] = trainer.test(lit, dm, ckpt_path="best")
    told["predicted"] = trainer.predict(lit, dm, ckpt_path="last")
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
    return live(case, folder)


def flat(told: Any) -> list[Any]:
    if isinstance(told, dict):
        return [x for k in told for x in (k, *flat(told[k]))]
    if isinstance(told, (list, tuple)):
        return [x for part in told for x in flat(part)]
    return [told]


@pytest.mark.parametrize("strategy", ["layouts", "hetero"])
def test_a_whole_life(pool: Pool, digits: Path, tmp_path: Path, strategy: str) -> None:
    job = Job(str(digits), batch=8, val="val.json", precision="64-true", capture=False)
    expected = live(Case(job), str(tmp_path / "one"))
    case = Case(job, PAIR if strategy == "layouts" else "hetero")
    found = pool.run(2, live_on, case, str(tmp_path / "two"), timeout=120, group=False)
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


# ---- refusals ------------------------------------------------------------------------------------------------------


class InInit(Probe):
    """Builds its model where it gets values at once."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.configure_model()


class Unfreezing(Probe):
    """Changes its mind about what trains."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.vision.requires_grad_(False)


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


def refuse(rank: int, world: int, digits: str) -> dict[str, str]:
    job = Job(digits, steps=2, batch=8, capture=False)
    case = Case(job, PAIR)
    said: dict[str, str] = {}

    def attempt(name: str, case: Case, act: Callable[[L.Trainer, Probe, Any], Any] | None = None) -> None:
        try:
            trainer, lit, dm = ranked(case)
            act(trainer, lit, dm) if act else trainer.fit(lit, dm)
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)

    unfinished: dict[str, Callback] = {
        "EMAWeightAveraging": EMAWeightAveraging(),
        "StochasticWeightAveraging": StochasticWeightAveraging(1e-2),
        "BackboneFinetuning": BackboneFinetuning(),
    }
    for name, callback in unfinished.items():
        attempt(name, replace(case, trainer={"callbacks": [callback]}))
    said["early"] = str(torch.distributed.is_initialized())
    attempt("in init", replace(case, lit="InInit"))
    attempt("unfreezing", replace(case, lit="Unfreezing"))
    attempt("lists", replace(case, lit="Lists"), lambda t, lit, dm: t.fit(lit))
    attempt("shuffled", replace(case, lit="Shuffled"), lambda t, lit, dm: t.fit(lit))
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
        assert other.losses[0] == lit.losses[0]

    attempt("two modules", case, two_modules)
    seen = observe(replace(case, trainer={"callbacks": [ThroughputMonitor(batch_size_fn=len)], "logger": Remember()}))
    said["throughput"] = " ".join(seen.warned)
    listed = ranked(replace(case, lit="Listed"))
    listed[0].fit(listed[1])
    said["order"] = str(listed[1].seen.samples)
    return said


def test_what_cannot_be_done_is_said(pool: Pool, digits: Path) -> None:
    first, second = pool.run(2, refuse, str(digits), timeout=90, group=False)
    assert "hetero_strategy.monitor.ThroughputMonitor" in first.pop("throughput")
    second.pop("throughput")  # rank 0 speaks
    assert first == second
    for name, words in {
        "EMAWeightAveraging": "copies the whole model",
        "StochasticWeightAveraging": "copies the model before it is built",
        "BackboneFinetuning": "MultimodalModel(freeze=...)",
        "early": "False",
        "in init": "has values already",
        "another trainer": "has values already",
        "unfreezing": "requires_grad of a parameter was changed",
        "lists": "got a Tensor",
        "shuffled": "DataLoader(shuffle=True)",
        "storage": "storage_options",
        "order": str([list(range(8)), list(range(8, 16))]),
    }.items():
        assert words in first.pop(name), name
    assert first == {"two modules": ""}
