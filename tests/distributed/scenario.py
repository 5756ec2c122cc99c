"""A small real training job that runs under any strategy: real files, real encoders, torchtitan's Llama 3."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.distributed.tensor import DTensor

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model import MultimodalModel
from hetero_strategy.testing import gradients_of, relative_errors
from hetero_strategy.zoo import hf_causal_lm, hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from recipes.digits import write_digits
from tests.distributed.damage import damaged
from tests.distributed.stepping import LANGUAGE_MODELS
from tests.small_models import READING

WIDTH = 32


@dataclass(frozen=True)
class Job:
    """One run; everything a rank needs to build it."""

    folder: str
    layouts: dict[str, dict[str, Any]] | str | None = None
    """None: ``strategy="auto"`` on one device; ``auto``: HeteroStrategy plans them."""
    steps: int = 20
    batch: int = 12
    microbatches: int | str = 2
    precision: str = "32-true"
    lm: str = "titan"
    """Kind of the language models; several kinds, with spaces between, for several of them."""
    language_models: tuple[str, ...] = ("llm",)
    freeze: tuple[str, ...] = ()
    manifest: str = "train.json"
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    damage: str = ""
    seed: int = 5
    lr: float = 3e-3
    shuffle: bool = True
    val: str | None = None
    resume: str | None = None
    callbacks: tuple[str, ...] = ()
    loss_factor: float = 1.0
    capture: bool = True

    def on(self, **layouts: dict[str, Any]) -> Job:
        """The same job in these layouts."""
        return replace(self, layouts=layouts)


def data(folder: Path) -> Path:
    """Small digits data, written once."""
    return write_digits(folder, train=120, val=24, seed=3, progress=False)


def language_model(kind: str, vocabulary: int) -> Any:
    if kind == "titan":
        return titan_llama(
            vocab_size=vocabulary, dim=WIDTH, n_layers=2, n_heads=4, n_kv_heads=4, multiple_of=16, max_seq_len=512
        )
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = partial(hf_causal_lm, model_type="qwen3_moe", **experts)
    biased = partial(LANGUAGE_MODELS["biased"], tie_word_embeddings=False)
    make: Any = {"hf_llama": hf_llama, "hf_qwen3": hf_qwen3, "mixture": mixture, "biased": biased}[kind]
    return make(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
    )


def model_of(job: Job, vocabulary: int) -> MultimodalModel:
    modules: dict[str, Any] = {
        "vision": siglip2_encoder(
            out_width=WIDTH, merge=2, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_channels=1, patch_size=8, num_patches=16,
        ),
        "audio": whisper_encoder(
            out_width=WIDTH, d_model=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=64,
            num_mel_bins=40, max_source_positions=256,
        ),
    }  # fmt: skip
    for name, kind in zip(job.language_models, itertools.cycle(job.lm.split())):
        modules[name] = language_model(kind, vocabulary)
    edges = [(e, c) for e in ("vision", "audio") for c in job.language_models]
    return MultimodalModel(modules, edges, freeze=job.freeze, seed=11)


class Lit(L.LightningModule):
    """What a person writes."""

    def __init__(self, job: Job, vocabulary: int) -> None:
        super().__init__()
        self.job = job
        self.vocabulary = vocabulary
        self.model: MultimodalModel | None = None
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.metrics: list[tuple[float, float]] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = model_of(self.job, self.vocabulary)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.model(batch)
        self.losses.append(out.loss.detach().clone())
        self.metrics.append((out.accuracy.detach().clone(), out.exact_match.detach().clone()))
        self.log("train/loss", out.loss, prog_bar=True)
        return out.loss * self.job.loss_factor

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(batch)
        self.log("val/loss", out.loss, batch_size=len(batch))
        self.log("val/exact", out.exact_match, batch_size=len(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.job.capture and not self.gradients:
            self.gradients = gradients_of(dict(self.named_children()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.job.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Result:
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    metrics: list[tuple[float, float]]
    logged: dict[str, float]
    owned: dict[str, torch.Tensor]
    """Full parameters that this rank owns, after the run."""


def datamodule(job: Job, model: Callable[..., MultimodalModel] = model_of, **options: Any) -> MultimodalDataModule:
    folder = Path(job.folder)
    return MultimodalDataModule(
        train=folder / job.manifest,
        val=folder / job.val if job.val else None,
        model=lambda: model(job, vocabulary=512),
        tokenizer=folder / "tokenizer.json",
        processors=READING,
        global_batch_size=job.batch,
        microbatches=job.microbatches,
        seed=1,
        shuffle=job.shuffle,
        **options,
    )


def build(job: Job) -> tuple[L.Trainer, Lit, MultimodalDataModule]:
    from hetero_strategy.strategy import HeteroStrategy

    dm = datamodule(job)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": job.steps,
        "precision": job.precision,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        **job.trainer,
    }
    if job.layouts is None:
        trainer = L.Trainer(devices=1, strategy="auto", **options)
    else:
        layouts: Any = job.layouts
        if not isinstance(layouts, str):
            layouts = {n: ModuleLayout.from_config(n, v) for n, v in layouts.items()} or None
        world = int(os.environ.get("WORLD_SIZE", "1"))
        plugins = [TorchElasticEnvironment()] if "TORCHELASTIC_RUN_ID" in os.environ else []
        placed = {"devices": world, "strategy": HeteroStrategy(layouts, **job.strategy), "plugins": plugins}
        trainer = L.Trainer(**{**placed, **options})
    return trainer, Lit(job, dm.tokenizer.vocab_size), dm


def train(job: Job) -> Result:
    trainer, module, dm = build(job)
    with damaged(job.damage):
        trainer.fit(module, datamodule=dm, ckpt_path=job.resume)
    owned = {}
    for name, p in module.named_parameters():
        if not p.is_meta:
            owned[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
    return Result(
        [float(x) for x in module.losses],
        module.gradients,
        [(float(a), float(b)) for a, b in module.metrics],
        {k: float(v) for k, v in trainer.callback_metrics.items()},
        owned,
    )


def train_on_rank(rank: int, world: int, job: Job) -> Result:
    return train(job)


def worst_gradient(reference: Result, results: Sequence[Result]) -> tuple[float, str]:
    """Return the largest relative error of a gradient on a rank that owns it; each parameter must have an owner."""
    seen = set[str]().union(*(result.gradients for result in results))
    assert seen == set(reference.gradients), sorted(set(reference.gradients) ^ seen)
    errors = [
        (error if error == error else float("inf"), f"{name} on rank {rank}")
        for rank, result in enumerate(results)
        for name, error in relative_errors(result.gradients, reference.gradients).items()
    ]
    return max(errors, default=(0.0, ""))


def worst_loss(reference: Result, results: Sequence[Result]) -> float:
    """Largest relative difference of any step's loss on any rank."""
    assert all(len(r.losses) == len(reference.losses) for r in results)
    return max(abs(a - b) / abs(b) for r in results for a, b in zip(r.losses, reference.losses, strict=True))
