"""A LightningModule that remembers what Lightning did with it, run in one process or on ranks."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.tensor import DTensor

from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.testing import Pool
from tests.distributed.scenario import Job, Lit, datamodule

Layouts = dict[str, dict[str, Any]]

APART: Layouts = {
    "vision": {"ranks": [0, 1]},
    "audio": {"ranks": [2]},
    "llm": {"ranks": [1, 2], "tp": 2},
}
"""Three ranks: FSDP, a whole module, tensor parallel with replicated norms; rank 2 has sharded and whole parameters."""
PAIR: Layouts = {"vision": {"ranks": [0]}, "audio": {"ranks": [1]}, "llm": {"ranks": [0, 1]}}
"""Two ranks that each own a module the other one lacks."""
PIPELINED: Layouts = {"vision": {"ranks": [0, 1]}, "audio": {"ranks": [1]}, "llm": {"ranks": [0, 1], "pp": 2}}
"""Two ranks that each own a stage of the language model."""


@dataclass(frozen=True)
class Case:
    """One run and what to see in it; the same object describes the run in one process."""

    job: Job
    layouts: Layouts | str | None = None
    lit: type[Probe] | None = None
    """Kind of LightningModule; None: :class:`Probe`."""
    optimizer: str = "sgd"
    trainer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    """Arguments of a GradScaler for fp16 on CPU."""
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
            norm = None
            if self.trainer.gradient_clip_val and self.trainer.gradient_clip_algorithm != "value":
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


def ranked(case: Case) -> tuple[L.Trainer, Probe, Any]:
    job = case.job
    plugins: list[Any] = []
    strategy: Any = "auto"
    devices = 1
    if case.layouts is not None:
        devices = int(os.environ["WORLD_SIZE"])
        plugins.append(TorchElasticEnvironment())
        strategy = case.layouts if isinstance(case.layouts, str) else HeteroStrategy(case.layouts, **job.strategy)
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
    return trainer, (case.lit or Probe)(case, dm.tokenizer.vocab_size), dm


def observe(case: Case) -> Seen:
    trainer, lit, dm = ranked(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(lit, datamodule=dm, ckpt_path=case.load)
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
        world, on_rank, {n: replace(c, layouts=layouts) for n, c in cases.items()}, timeout=360, group=False
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
