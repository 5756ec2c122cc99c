"""Lightning's precision plugins over modules on many meshes: one global norm, one loss scale.

Clipping uses the gradients of all modules on all ranks, and an overflow anywhere skips the optimizer step everywhere.
Mixed precision is a matter of storage, not of an autocast region: see :class:`Storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer
from typing_extensions import override

from hetero_strategy.errors import ConfigError
from hetero_strategy.parallelize.gradients import Owned, clip_by_norm, clip_by_value, local
from hetero_strategy.parallelize.storage import Storage

OwnedBy = Callable[[Optimizer], Sequence[Owned]]
"""Function that returns an optimizer's parameters that this rank owns."""


class _GlobalClipping:
    owned_by: OwnedBy
    norm_device: torch.device
    last_norm: torch.Tensor | None = None
    """Global norm before the last clipping."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.last_norm = clip_by_norm(self.owned_by(optimizer), float(clip_val), self.norm_device)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self.owned_by(optimizer), float(clip_val))


class HeteroPrecision(_GlobalClipping, Precision):
    """A plugin for 32-true."""


class HeteroMixedPrecision(_GlobalClipping, MixedPrecision):
    """A plugin for bf16-mixed and 16-mixed: fp32 masters; gathering and computing in half precision."""

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        yield


class HeteroHalfPrecision(_GlobalClipping, HalfPrecision):
    """A plugin for bf16-true and 16-true, not for training."""


class HeteroDoublePrecision(_GlobalClipping, DoublePrecision):
    """A plugin for 64-true."""


_STAND_IN: dict[type, type] = {
    Precision: HeteroPrecision,
    MixedPrecision: HeteroMixedPrecision,
    HalfPrecision: HeteroHalfPrecision,
    DoublePrecision: HeteroDoublePrecision,
}


def stand_in(plugin: Precision) -> Precision:
    """Return the plugin that does the same over many meshes."""
    if isinstance(plugin, _GlobalClipping):
        return plugin
    if type(plugin) not in _STAND_IN:
        names = "32-true, bf16-mixed, bf16-true, 16-mixed, 16-true or 64-true"
        raise ConfigError(f"HeteroStrategy: precision plugin {type(plugin).__name__} is not supported; use {names}")
    kind = _STAND_IN[type(plugin)]
    replacement: Precision = object.__new__(kind)
    replacement.__dict__.update(plugin.__dict__)
    scaler = getattr(replacement, "scaler", None)
    if scaler is not None:
        synced = SyncedGradScaler(scaler._device, enabled=scaler.is_enabled())
        synced.load_state_dict(scaler.state_dict())
        replacement.scaler = synced  # type: ignore[attr-defined]
    return replacement


def storage_of(plugin: Precision, keep_fp32: Sequence[str] = ()) -> Storage:
    """Return the dtypes in which the model's parameters are kept and compute."""
    compute = master = torch.float32
    match plugin:
        case MixedPrecision():
            compute = torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
        case HalfPrecision():
            compute = master = torch.bfloat16 if plugin.precision == "bf16-true" else torch.float16
        case DoublePrecision():
            compute = master = torch.float64
    return Storage(compute, master, tuple(keep_fp32))


def check_trainable(plugin: Precision, *, fit: bool) -> None:
    """Refuse to train weights that have no fp32 copy."""
    if fit and isinstance(plugin, HalfPrecision):
        mixed = plugin.precision.replace("true", "mixed")
        raise ConfigError(
            f"HeteroStrategy: precision='{plugin.precision}' keeps no fp32 weights, and most updates are smaller than"
            f" half precision can add; train with precision='{mixed}', which computes and gathers in the same dtype"
        )


def seed_scale(plugin: Precision, device: torch.device) -> torch.Tensor | None:
    """Return the factor of losses before backward, a scalar tensor; None if losses are not scaled."""
    scaler = getattr(plugin, "scaler", None)
    enabled = isinstance(scaler, SyncedGradScaler) and scaler.is_enabled()
    return scaler.scale_tensor(device) if enabled else None  # type: ignore[union-attr]


class SyncedGradScaler(torch.amp.GradScaler):
    """A GradScaler whose overflow check covers all ranks: they skip a step together or not at all."""

    def scale_tensor(self, device: torch.device) -> torch.Tensor:
        """Return the current scale, a scalar tensor; no host sync."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale and note whether any rank has a non-finite one.

        Works on local shards, so parameters of several meshes may share an optimizer.
        """
        if not self._enabled:
            return
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not torch.amp.grad_scaler.OptState.READY:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        grads = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = grads[0].device if grads else torch.device(self._device)
        inverse = self.scale_tensor(device).double().reciprocal().float()
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        for dtype in {g.dtype for g in grads}:
            torch._amp_foreach_non_finite_check_and_unscale_([g for g in grads if g.dtype == dtype], found_inf, inverse)
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        state["found_inf_per_device"] = {device: found_inf}
        state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
