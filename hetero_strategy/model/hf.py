"""What all Hugging Face adapters share: configs, initialisation, precise norms."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.inputs import Packing


def hf_config(config_class: type, fields: Mapping[str, Any], who: str) -> Any:
    """A transformers config from keyword arguments.

    Raises:
        ModelError: a field the config does not have, or a value it refuses.
    """
    # A transformers config swallows any keyword as an attribute; a misspelt one must not pass.
    known = set(inspect.get_annotations(config_class)) | set(getattr(config_class, "attribute_map", {}))
    if unknown := set(fields) - known:
        raise ModelError(f"{who}: unknown field {sorted(unknown)}: {config_class.__name__} has {sorted(known)}")
    return parsed_config(config_class, fields, who)


def parsed_config(config_class: type, fields: Mapping[str, Any], who: str) -> Any:
    """A transformers config from keyword arguments or a config.json; its own complaints become ModelErrors."""
    try:
        return config_class(
            **{key: value for key, value in fields.items() if key not in ("model_type", "architectures")}
        )
    except Exception as fault:  # transformers raises several kinds
        raise ModelError(f"{who}: {' '.join(str(fault).split())}") from None


def initialize_hf(model: nn.Module, unit: nn.Module) -> None:
    """transformers' own rule for every submodule of a unit, children first.

    Flags that say "already initialised" lie here: they were set when the model was made on the meta device.
    """
    for module in unit.modules():
        things: list[Any] = [module, *module._parameters.values(), *module._buffers.values()]
        for thing in things:
            if getattr(thing, "_is_hf_initialized", False):
                thing._is_hf_initialized = False
    for module in reversed(list(unit.modules())):
        model._init_weights(module)  # type: ignore[operator]


def export_hf_config(config: Any, architecture: str) -> dict[str, Any]:
    """config.json of a model."""
    content: dict[str, Any] = config.to_dict()
    return {**content, "architectures": [architecture]}


def at_least_one_row(rows: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
    """``rows [T, width]`` and their packing, or one zero row where there is none.

    transformers' layers cannot reshape zero rows. Cut the result back to ``packing.rows``: gradients are then zero,
    and an instance without samples still takes part in its module's collectives.
    """
    if packing.rows:
        return rows, packing
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), Packing.of(np.ones(1, np.int64)).to(rows.device)


class PreciseRMSNorm(nn.Module):
    """transformers' RMSNorm, except that fp64 rows stay fp64 (there they go through fp32)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self.eps: float = norm.variance_epsilon  # type: ignore[assignment]

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise the last dimension."""
        precise = rows if rows.dtype == torch.float64 else rows.float()
        precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * precise.to(rows.dtype)


def make_norms_precise(model: nn.Module) -> None:
    """Replace every RMSNorm of a transformers model in place; names stay."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(owner, name, PreciseRMSNorm(child))
