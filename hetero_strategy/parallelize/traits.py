"""Traits of a parameter, such as whether it trains, that must stay when parallelising puts another in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hetero_strategy.errors import ModelError


@dataclass(frozen=True)
class Traits:
    """What one parameter is, besides its values."""

    shape: torch.Size
    """Shape of the whole parameter."""
    dtype: torch.dtype
    requires_grad: bool
    hooks: bool
    """Whether a hook is called with its gradient."""
    attributes: dict[str, Any]
    """Attributes that were set on the tensor, such as a factor of the learning rate."""

    @staticmethod
    def of(parameter: nn.Parameter) -> Traits:
        """Return those of a parameter as it is now."""
        hooks = bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        return Traits(parameter.shape, parameter.dtype, parameter.requires_grad, hooks, dict(vars(parameter)))


def restore_traits(before: Mapping[str, Traits], parameters: Mapping[str, nn.Parameter]) -> None:
    """Give new parameters the ``requires_grad`` and attributes of those that they replace.

    Torch's sequence parallel style forgets that a parameter is frozen, and moving one off the meta device forgets its
    attributes.
    """
    for name, parameter in parameters.items():
        if name in before:
            parameter.requires_grad_(before[name].requires_grad)
            parameter.__dict__.update(before[name].attributes)


def check_traits(module: str, before: Mapping[str, Traits], parameters: Mapping[str, nn.Parameter]) -> None:
    """Compare parameters with what they were.

    Raises:
        ModelError: a trait changed; the message names module, parameter and trait.
    """
    for name, parameter in parameters.items():
        if name not in before:
            raise ModelError(f"module '{module}': parallelising made a parameter '{name}' that was not there before")
        was, now = asdict(before[name]), asdict(Traits.of(parameter))
        now["attributes"] = {key: value for key, value in now["attributes"].items() if key in was["attributes"]}
        for trait, value in was.items():
            if value != now[trait]:
                raise ModelError(
                    f"module '{module}': {trait} of parameter '{name}' was {value} and is {now[trait]} once it is"
                    " parallelised; set it in another way, such as MultimodalModel(freeze=...), or change gradients in"
                    " on_after_backward"
                )
