"""Which activations a module's blocks do not keep, but compute again in backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hetero_strategy.errors import ConfigError
from hetero_strategy.model.attention import VARLEN
from hetero_strategy.parallelize.per_module import per_module

WAYS = "all, every 2 (or another number), all but matmuls, whole"
_ATEN = torch.ops.aten
_C10D = torch.ops._c10d_functional
MATMULS: list[Any] = [
    _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention.default, _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _C10D.reduce_scatter_tensor.default, _C10D.all_reduce.default,
]  # fmt: skip
"""Operators whose results are worth their memory: products of matrices, attention, and what tensor parallelism sums
over its ranks. What it gathers, which is as large as the rows of all of them, is gathered again.
"""
if VARLEN:
    MATMULS.append(torch.ops.torch_attn._varlen_attn.default)


@dataclass(frozen=True)
class SomeBlocks:
    """Which of a module's blocks an option is for."""

    every: int = 1
    """Of so many blocks it is for one, the first of them."""

    def __str__(self) -> str:
        """As a person says it."""
        return "all" if self.every == 1 else f"every {self.every}"

    def chosen(self, blocks: Sequence[str]) -> Collection[str]:
        """Those of a module's blocks, by FQN."""
        return blocks[:: self.every]


@dataclass(frozen=True)
class Recompute(SomeBlocks):
    """What of a module runs again in backward; the other blocks keep their activations."""

    keeps_matmuls: bool = False
    """What :data:`MATMULS` make is kept, and all else runs again. Plans take it for nothing, also the gathers of tensor
    parallelism.
    """
    whole: bool = False
    """The whole forward of a stage runs again, and nothing is kept but what came in."""

    def share(self, blocks: int) -> float:
        """Share of the forward of a module of so many equal blocks that runs again, in FLOPs."""
        if self.keeps_matmuls:
            return 0.0
        return ceil(blocks / self.every) / blocks if blocks else 1.0

    def __str__(self) -> str:
        """As a person says it."""
        if self.whole or self.keeps_matmuls:
            return "whole" if self.whole else "all but matmuls"
        return super().__str__()


def recomputes(given: Iterable[str] | Mapping[str, Any] | None) -> dict[str, Recompute]:
    """What a person says: nothing, module names, or module name -> one of :data:`WAYS`.

    Raises:
        ConfigError: another value.
    """
    said = per_module("recompute", given, "all")
    return {name: _recompute(name, way) for name, way in said.items()}


def every(way: Any) -> int | None:
    """Every how many blocks are meant by ``all`` and ``every 2``; None: something else is said."""
    number = re.fullmatch(r"every ([1-9]\d*)", str(way))
    return int(number[1]) if number else 1 if way == "all" else None


def _recompute(name: str, way: Any) -> Recompute:
    if (number := every(way)) is not None:
        return Recompute(number)
    if way not in ("all but matmuls", "whole"):
        raise ConfigError(f"HeteroStrategy: recompute of '{name}' is {way!r}; use one of: {WAYS}")
    return Recompute(keeps_matmuls=way == "all but matmuls", whole=way == "whole")


def decoupled(recompute: Mapping[str, Recompute], fill: str, filling: Iterable[str]) -> dict[str, Recompute]:
    """What runs again, with ``fill="decoupled"`` in modules that fill as a whole (Kimi K2.5, arXiv:2602.02276).

    Raises:
        ConfigError: another part of such a module is to run again.
    """
    if fill != "decoupled":
        return dict(recompute)
    again = {**dict.fromkeys(filling, Recompute(whole=True)), **recompute}
    for name in filling:
        if not again[name].whole:
            raise ConfigError(
                f"HeteroStrategy: recompute of '{name}' is '{recompute[name]}', but with fill='decoupled' its whole"
                f" forward runs again; leave '{name}' out of recompute, or take fill='coarse'"
            )
    return again


def apply_recompute(blocks: Iterable[nn.Module], how: Recompute) -> None:
    """Apply activation checkpointing to these blocks, without a wrapper module: parameter names stay as they are."""
    for block in blocks:
        vars(block)["_hetero_trains"] = any(p.requires_grad for p in block.parameters())
        compiled = block.__dict__.get("forward")
        if compiled is not None:
            block.forward = partial(_recomputed, block, compiled)
        else:  # one function for all blocks, so that they share what is compiled of it
            block.forward = MethodType(_all_but_matmuls if how.keeps_matmuls else _all, block)


def _all(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(block, type(block).forward, block, *args, **kwargs)


def _all_but_matmuls(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not _has_backward(block, args, kwargs):
        return forward(block, *args, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, MATMULS)
    return checkpoint(forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _has_backward(block, args, kwargs):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _has_backward(block: nn.Module, *given: Any) -> bool:
    """Whether a backward may come, as it does to no frozen block of frozen rows: torch 2.13 cannot compile what is to
    run again and has none, where it might draw random numbers, as attention does to torch.
    """
    if not torch.is_grad_enabled() or vars(block)["_hetero_trains"]:
        return torch.is_grad_enabled()
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(given))
