"""Recompute activations of a module's blocks in backward instead of keeping them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from types import MethodType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from hetero_strategy.errors import Count
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.attention import VARLEN
from hetero_strategy.model.experts import kept_routes
from hetero_strategy.parallelize.fsdp import begin_backward
from hetero_strategy.parallelize.transform import Site, Transform

_ATEN = torch.ops.aten
_C10D = torch.ops._c10d_functional
MATMULS: list[Any] = [
    _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention.default, _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _C10D.reduce_scatter_tensor.default, _C10D.all_reduce.default,
]  # fmt: skip
"""Operators whose results are worth their memory: products of matrices, attention, and sums of tensor parallelism over
its ranks. Gathers of tensor parallelism, as large as the rows of all its ranks, and flex_attention run again."""
MATMULS.append(torch.ops.hetero.attend_in_blocks.default)
if VARLEN:
    MATMULS.append(torch.ops.torch_attn._varlen_attn.default)


def every(setting: object) -> int | None:
    """Return the number n in ``every n``, 1 for ``all``; None for any other value."""
    number = re.fullmatch(r"every ([1-9]\d*)", str(setting))
    return int(number[1]) if number else 1 if setting == "all" else None


@dataclass(frozen=True)
class SomeBlocks(Transform):
    """A transform of a choice of a module's blocks."""

    settings: ClassVar[str] = "all, every 2 (or another number)"
    splits_backward: ClassVar[bool] = False
    every: Count = 1
    """Number of blocks of which the first is chosen."""

    @override
    @classmethod
    def of(cls, setting: object) -> Self | None:
        return None if (number := every(setting)) is None else cls(number)

    @property
    @override
    def setting(self) -> str:
        return "all" if self.every == 1 else f"every {self.every}"

    @override
    def on_block(self, number: int) -> Transform | None:
        return None if number % self.every else replace(self, every=1)

    def chosen(self, stage: Adapter, blocks: Sequence[str]) -> list[nn.Module]:
        """Return the chosen ones of a stage's blocks; ``blocks``: FQNs of all blocks of its module."""
        chosen = {*blocks[:: self.every]}
        return [block for fqn, block in stage.blocks().items() if fqn in chosen]


@dataclass(frozen=True)
class Recompute(SomeBlocks):
    """Activations are computed again in backward, instead of being kept, by a choice of a module's blocks."""

    name: ClassVar[str] = "recompute"
    settings: ClassVar[str] = f"{SomeBlocks.settings}, all but matmuls, whole"
    keeps_matmuls: bool = False
    """Whether results of :data:`MATMULS` are kept, and all other operators run again. Plans assume no cost for it, nor
    for the gathers of tensor parallelism."""
    whole: bool = False
    """Whether the whole forward of a stage runs again, and only its input is kept."""

    @override
    @classmethod
    def of(cls, setting: object) -> Self | None:
        if setting in ("all but matmuls", "whole"):
            return cls(keeps_matmuls=setting == "all but matmuls", whole=setting == "whole")
        return super().of(setting)

    @property
    @override
    def setting(self) -> str:
        if self.whole or self.keeps_matmuls:
            return "whole" if self.whole else "all but matmuls"
        return super().setting

    @property
    @override
    def of_blocks(self) -> bool:
        return not self.whole

    @override
    @classmethod
    def choices(cls, blocks: int) -> Sequence[Self]:
        return [cls(n) for n in (4, 3, 2, 1) if n <= blocks]

    @override
    def on_block(self, number: int) -> Transform | None:
        return None if self.whole else super().on_block(number)

    @property
    @override
    def keeps_input_alone(self) -> bool:
        return self.whole

    @override
    def kept(self, numbers: Float64[np.ndarray, "kinds=4"], width: int) -> Float64[np.ndarray, "kinds=4"]:
        # Results of matmuls and attention are 3 + 1 + 1 + 4 + 1 of 17 numbers, and the input is 1.
        return numbers * 11 / 17 if self.keeps_matmuls else np.array([0.0, width, 0.0, 0.0])

    @override
    def recomputed(self, blocks: int) -> tuple[float, float]:
        if self.keeps_matmuls:
            return 0.0, 0.0
        return (ceil(blocks / self.every) / blocks if blocks else 1.0), float(self.whole)

    @override
    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        for stage in stages:
            apply_recompute([stage] if self.whole else self.chosen(stage, site.blocks), self)


def apply_recompute(blocks: Iterable[nn.Module], how: Recompute) -> None:
    """Apply activation checkpointing to these blocks, without a wrapper module: parameter names stay as they are."""
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)  # known once a mixture is made
    if fallback is not None and fallback.default not in MATMULS:
        MATMULS.append(fallback.default)
    for block in blocks:
        vars(block)["_hetero_trains"] = any(p.requires_grad for p in block.parameters())
        vars(block)["_hetero_keeps_routes"] = any("exchange" in vars(part) for part in block.modules())
        compiled = block.__dict__.get("forward")
        if compiled is not None:
            block.forward = partial(_recomputed, block, compiled)
        else:  # one function for all blocks, so that they share its compiled code
            block.forward = MethodType(_all_but_matmuls if how.keeps_matmuls else _all, block)


def _all(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(block, type(block).forward, block, *args, **kwargs)


def _all_but_matmuls(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not _has_backward(block, args, kwargs):
        return forward(block, *args, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, MATMULS)
    if vars(block)["_hetero_keeps_routes"]:
        contexts = partial(_with_routes, block, contexts)
    return checkpoint(forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _with_routes(block: nn.Module, contexts: Callable[[], Any]) -> tuple[Any, ...]:
    """Return contexts of a forward and of its recompute in which routes of experts are kept, too."""
    forward, again = zip(kept_routes(), contexts(), strict=True)
    return _both(None, *forward), _both(block, *again)


@contextmanager
def _both(again: nn.Module | None, first: Any, second: Any) -> Iterator[None]:
    """Enter two contexts, those of a recompute once the backward of all of a block's parts has begun.

    Else FSDP would take a part for the root of a forward, whose operators were not in the first one, which fails: the
    gradients of shared experts may begin a recompute before there are gradients of routed experts.
    """
    if again is not None:
        begin_backward(again)
    with first, second:
        yield


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _has_backward(block, args, kwargs):
        return forward(*args, **kwargs)
    if vars(block)["_hetero_keeps_routes"]:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=kept_routes, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _has_backward(block: nn.Module, *given: Any) -> bool:
    """Return whether a backward may come; frozen blocks of frozen rows have none.

    torch 2.13 cannot compile a checkpoint without backward if it might draw random numbers, as attention seems to.
    """
    if not torch.is_grad_enabled() or vars(block)["_hetero_trains"]:
        return torch.is_grad_enabled()
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(given))
