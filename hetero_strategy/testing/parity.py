"""Parity: the losses and gradients of a world of processes against those of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class Trained(L.Callback):
    """Losses and gradients of a run. As a callback it records them."""

    losses: list[float] = field(default_factory=list)
    """Loss of each step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step: whole tensors in fp64 of the parameters that this rank owns."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Record the gradients."""
        self.gradients = self.gradients or gradients_of(dict(pl_module.named_children()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss."""
        self.losses.append(float(outputs["loss"]))


def gradients_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return copies of all gradients by parameter, whole and in fp64; a collective if some are sharded."""
    own = {f"{n}.{fqn}": p.grad for n, module in modules.items() for fqn, p in module.named_parameters()}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in own.items() if g is not None}
    return {name: g.detach().double().cpu().clone() for name, g in whole.items()}


def train(module: L.LightningModule, data: L.LightningDataModule, *, steps: int = 3, **trainer: Any) -> Trained:
    """Train for a few steps on the CPU in fp64 and return the losses and the first gradients.

    Args:
        module: LightningModule, with the same seed in every run.
        data: data module.
        steps: number of steps.
        trainer: further arguments of the Trainer: ``strategy``, ``devices`` in a world of :class:`Pool`, or
            ``precision``.
    """
    callback = Trained()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": 1, "precision": "64-true", "limit_val_batches": 0, **quiet, **trainer}
    L.Trainer(max_steps=steps, callbacks=[callback], enable_model_summary=False, **options).fit(module, data)
    return Trained(callback.losses, callback.gradients)


def relative_errors(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor], small: float = 0.0
) -> dict[str, float]:
    """Return the relative error of each gradient in the 2-norm; infinite if none is expected.

    Args:
        gradients: gradients by parameter.
        expected: gradients of one process.
        small: share of the largest expected gradient; gradients below it are judged as if they were that large, because
            they may be rounding noise.
    """
    least = small * max((float(g.norm()) for g in expected.values()), default=0.0)
    errors = {}
    for name, gradient in gradients.items():
        size = name
        if name.endswith(("k_proj.bias", "wk.bias")):  # softmax ignores a shift of all keys: this gradient is noise
            size = name.replace("bias", "weight")
        wanted = expected.get(name)
        within = max(float(expected[size].norm()), least) or 1.0 if wanted is not None else 1.0
        errors[name] = float("inf") if wanted is None else float((gradient - wanted).norm()) / within
    return errors


def differences(expected: Trained, ranks: Sequence[Trained], bound: float = 1e-10) -> list[str]:
    """Return a sentence for each difference between one process and a world; none if they are equal.

    Args:
        expected: losses and gradients of one process.
        ranks: those of each rank of the world.
        bound: largest relative error of a loss or of a gradient.
    """
    missing = set(expected.gradients).difference(*(rank.gradients for rank in ranks))
    faults = [f"no rank has a gradient of {name}" for name in sorted(missing)]
    for number, rank in enumerate(ranks):
        if len(rank.losses) != len(expected.losses):
            faults.append(f"rank {number} has {len(rank.losses)} losses, not {len(expected.losses)}")
        for step, (loss, wanted) in enumerate(zip(rank.losses, expected.losses, strict=False)):
            if not abs(loss - wanted) <= bound * abs(wanted):
                faults.append(f"loss of step {step} on rank {number} is {loss}, not {wanted}")
        errors = relative_errors(rank.gradients, expected.gradients, 1e-5)
        faults += [f"gradient of {n} on rank {number} is off by {e:.2g}" for n, e in errors.items() if not e <= bound]
    return faults
