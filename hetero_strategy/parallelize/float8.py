"""Which modules' blocks multiply in float8 (torchao): inputs, weights and gradients are rounded to eight bits with a
scale per row, and their products kept in the compute dtype. Weights, optimizer and checkpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ConfigError, require
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.kernels import device_name
from hetero_strategy.parallelize.per_module import per_module

RECIPES = ("rowwise", "rowwise_with_gw_hp")
"""Of torchao; the second multiplies gradients of weights in the compute dtype."""
EMULATED = ", emulated"
"""Added to a recipe: rounded alike, multiplied in the compute dtype, on any device; slow."""
MULTIPLE = 16
"""Of the sizes of matrices that GPUs multiply in float8. Rows, of which there are any number, are padded."""
CAPABILITY = (8, 9)
"""Of the first GPUs that do."""


def float8s(given: Iterable[str] | Mapping[str, str] | None) -> dict[str, str]:
    """What a person says: nothing, module names, or module name -> recipe.

    Raises:
        ConfigError: another recipe.
    """
    return per_module("float8", given, RECIPES[0], (*RECIPES, *(one + EMULATED for one in RECIPES)))


def use_float8(
    recipes: Mapping[str, str],
    modules: Mapping[str, Adapter],
    layouts: Mapping[str, ModuleLayout],
    compute: torch.dtype,
    device: torch.device,
) -> None:
    """Tell modules to multiply in float8, before they are parallelised.

    Args:
        recipes: of :func:`float8s`.
        compute: dtype of rows and of weights that compute.

    Raises:
        ConfigError: unknown modules; none of a module's linear maps has sizes that fit; the device, the precision or
            what is installed cannot do it.
    """
    for name, recipe in recipes.items():
        refusal = f"HeteroStrategy: float8 of '{name}'"
        if name not in modules:
            raise ConfigError(f"{refusal}: there is no such module; the modules are {', '.join(modules)}")
        if layouts[name].tp_chunks > 1:
            raise ConfigError(f"{refusal}: its layout has tp_chunks={layouts[name].tp_chunks}; set tp_chunks=1")
        tp = layouts[name].tp
        parts = (part for block in modules[name].blocks().values() for part in block.modules())
        if not any(_fits(part, tp) for part in parts):
            raise ConfigError(
                f"{refusal}: none of its blocks has a linear map whose sizes, over tp={tp}, are multiples of"
                f" {MULTIPLE}; leave '{name}' out"
            )
        require("torchao", "float8", refusal)
        if recipe.endswith(EMULATED):
            continue
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
            raise ConfigError(
                f"{refusal} needs GPUs of compute capability 8.9 or more, and here is {device_name(device)}; leave it"
                f" out, or try what it does to the loss with float8={{'{name}': '{recipe}{EMULATED}'}}"
            )
        if compute != torch.bfloat16:
            raise ConfigError(f"{refusal}: products are of bfloat16, and rows of {compute}; set precision='bf16-mixed'")
    for name, recipe in recipes.items():
        modules[name].float8 = recipe


def apply_float8(stage: Adapter, recipe: str, tp: int, kept: Collection[nn.Module] = ()) -> None:
    """Replace linear maps in a stage's blocks by torchao's, which have the same parameters. Before tensor parallelism.

    Args:
        kept: layers that compute in the masters' dtype.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear_utils import swap_linear_layers

    config = Float8LinearConfig.from_recipe_name(recipe.removesuffix(EMULATED))
    config = replace(config, emulate=recipe.endswith(EMULATED), pad_inner_dim=True)
    inside = {id(part) for layer in kept for part in layer.modules()}
    replaced = partial(_linear().from_float, config=config)
    for block in stage.blocks().values():
        swap_linear_layers(block, replaced, module_filter_fn=lambda part, _: id(part) not in inside and _fits(part, tp))


@cache
def _linear() -> Any:
    """torchao's class, which is imported only where it is used."""
    from torchao.float8.float8_linear import Float8Linear

    class Float8LinearOfAnyRows(Float8Linear):
        """Of no rows too, which an instance may have: they have no largest value to scale by."""

        @override
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) if rows.numel() else F.linear(rows, self.weight, self.bias)

    return Float8LinearOfAnyRows


def _fits(part: nn.Module, tp: int) -> bool:
    """Whether a layer is a linear map that may multiply in float8, also where tensor parallelism cuts either side."""
    if type(part) is not nn.Linear:
        return False
    return part.in_features % (MULTIPLE * tp) == 0 and part.out_features % (MULTIPLE * tp) == 0
