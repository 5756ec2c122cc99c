"""Which kernels an optimizer may use over parameters of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from lightning.fabric.utilities import rank_zero_warn
from torch.optim import Optimizer

from hetero_strategy.parallelize.gradients import Owned


def choose_kernels(optimizers: Iterable[Optimizer], owned: Mapping[int, Owned], agree: Callable[[bool], bool]) -> None:
    """Let an optimizer loop over parameters where one of its groups has sharded and unsharded ones on some rank.

    Multi-tensor kernels take either kind, not both; on CUDA torch would choose them unasked. All ranks do the same, or
    copies of a parameter would drift apart by rounding.

    Args:
        optimizers: in the same order on all ranks.
        owned: this rank's parameters by ``id``.
        agree: a collective that returns whether any rank passes true.
    """
    optimizers = list(optimizers)
    for optimizer in optimizers:
        # Otherwise Lightning and torch leave unscaling to the optimizer, which only looks at this rank's gradients.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            cast(Any, optimizer)._step_supports_amp_scaling = False
    for group in (g for o in optimizers for g in o.param_groups):
        if group.get("foreach", False) is False and not group.get("fused"):
            continue
        kinds = {type(owned[id(p)].parameter) for p in group["params"] if id(p) in owned}
        if agree(len(kinds) > 1):
            if group.get("foreach") or group.get("fused"):
                rank_zero_warn("foreach/fused is off where sharded and unsharded parameters share a group")
            group["foreach"] = False
            if "fused" in group:
                group["fused"] = False
