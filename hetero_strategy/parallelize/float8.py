"""Multiply in float8 (torchao) in blocks of some modules.

Inputs, weights and gradients are rounded to eight bits with a scale per row, and their products are kept in the compute
dtype. Weights, optimizer and checkpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, Self, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ConfigError, require
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.transform import OnPaper, Site, Transform

Recipe = Literal["rowwise", "rowwise_with_gw_hp"]
"""Recipes of torchao; the second multiplies gradients of weights in the compute dtype."""
EMULATED = ", emulated"
"""Suffix of a recipe: rounded like it, but multiplied in the compute dtype, on any device; slow."""
MULTIPLE = 16
"""Divisor of the sizes of matrices that GPUs multiply in float8. Rows, whose number is free, are padded."""
CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with float8."""


@dataclass(frozen=True)
class Float8(Transform):
    """A module's blocks multiply in float8."""

    name: ClassVar[str] = "float8"
    settings: ClassVar[str] = ", ".join(repr(f"{recipe}{end}") for end in ("", EMULATED) for recipe in get_args(Recipe))
    before_tp: ClassVar[bool] = True
    recipe: Recipe = "rowwise"
    emulated: bool = False
    """Whether numbers are rounded like the recipe's, but multiplied in the compute dtype, on any device; slow."""

    @override
    @classmethod
    def of(cls, setting: object) -> Self | None:
        recipe = str(setting).removesuffix(EMULATED)
        emulated = str(setting).endswith(EMULATED)
        return cls(cast(Recipe, recipe), emulated) if recipe in get_args(Recipe) else None

    @property
    @override
    def setting(self) -> str:
        return self.recipe + EMULATED * self.emulated

    @override
    def faults(self, module: OnPaper, layout: ModuleLayout, others: Mapping[str, Transform]) -> Iterator[str]:
        if layout.ep > 1:
            yield f"with ep={layout.ep}: experts multiply in the compute dtype alone; leave it out, or set ep=1"

    @override
    def check(self, name: str, module: Adapter, layout: ModuleLayout, dtype: torch.dtype, device: torch.device) -> None:
        refusal, tp = f"HeteroStrategy: float8 of '{name}'", layout.tp
        if not any(_fits(part, tp) for block in module.blocks().values() for part in block.modules()):
            raise ConfigError(
                f"{refusal}: none of its blocks has a linear map whose sizes, over tp={tp}, are multiples of"
                f" {MULTIPLE}; leave it out"
            )
        require("torchao", "float8", refusal)
        if self.emulated or device.type == "meta":
            return
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
            here = device.type if device.type != "cuda" else torch.cuda.get_device_name(device)
            raise ConfigError(
                f"{refusal} needs GPUs of compute capability 8.9 or more, and here is {here}; leave it out, or try what"
                f" it does to the loss with '{self.recipe}{EMULATED}'"
            )
        if dtype != torch.bfloat16:
            raise ConfigError(f"{refusal}: products are of bfloat16, and rows of {dtype}; set precision='bf16-mixed'")

    @override
    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        for stage in stages:
            stage.roundings = (*stage.roundings, (torch.finfo(torch.float8_e4m3fn).eps, self.name))
            apply_float8(stage, self, site.layout.tp, site.kept)


def apply_float8(stage: Adapter, how: Float8, tp: int, kept: Collection[nn.Module] = ()) -> None:
    """Replace linear maps in a stage's blocks by torchao's, which have the same parameters. Call it before tensor
    parallelism.

    Args:
        kept: layers that compute in the masters' dtype.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear_utils import swap_linear_layers

    config = replace(Float8LinearConfig.from_recipe_name(how.recipe), emulate=how.emulated, pad_inner_dim=True)
    inside = {id(part) for layer in kept for part in layer.modules()}
    replaced = partial(_linear().from_float, config=config)
    for block in stage.blocks().values():
        swap_linear_layers(block, replaced, module_filter_fn=lambda part, _: id(part) not in inside and _fits(part, tp))


@cache
def _linear() -> Any:
    """Return torchao's class, which is imported only if it is used."""
    from torchao.float8.float8_linear import Float8Linear

    class Float8LinearOfAnyRows(Float8Linear):
        """A linear map that also takes no rows, which an instance may have: they have no largest value to scale by."""

        @override
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) if rows.numel() else F.linear(rows, self.weight, self.bias)

    return Float8LinearOfAnyRows


def _fits(part: nn.Module, tp: int) -> bool:
    """Return whether a layer is a linear map that may multiply in float8, even if tensor parallelism cuts it."""
    if type(part) is not nn.Linear:
        return False
    return part.in_features % (MULTIPLE * tp) == 0 and part.out_features % (MULTIPLE * tp) == 0
