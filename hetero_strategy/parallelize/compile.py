"""Which modules' blocks torch compiles: one by one, each for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves

from hetero_strategy.model.inputs import Movable, tensors_of
from hetero_strategy.parallelize.per_module import per_module

BACKENDS = ("inductor", "aot_eager", "eager")
"""Of ``torch.compile``; the last two show what is wrong where the first fails."""


def compiles(given: Iterable[str] | Mapping[str, str] | None) -> dict[str, str]:
    """What a person says: nothing, module names, or module name -> backend.

    Raises:
        ConfigError: another backend.
    """
    return per_module("compile", given, BACKENDS[0], BACKENDS)


def apply_compile(blocks: Iterable[nn.Module], backend: str) -> None:
    """Compile blocks that take rows ``[..., T, width]`` first; blocks of one class and size share what is compiled.

    Numbers of rows, sequences and table entries are dynamic from the first call; all that follows from weights is not.
    """
    for block in blocks:
        block.forward = _compiled(block.forward, backend)


def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    fast = torch.compile(forward, backend=backend)
    seen: set[bool] = set()

    def run(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Compiled code treats sizes of 0 and 1 apart from all others: they would be compiled again, and are soon done.
        if rows.shape[-2] < 2:
            return forward(rows, *args, **kwargs)
        if isinstance(rows, AsyncCollectiveTensor):
            # Compiled code takes the result of an unfinished collective for the tensor that it wraps, and gradients
            # get lost (pytorch#184980).
            rows = rows.clone()
        if torch.is_grad_enabled() not in seen:  # each is compiled once
            seen.add(torch.is_grad_enabled())
            _mark_dynamic([rows, args, kwargs])
        return fast(rows, *args, **kwargs)

    return run


def _mark_dynamic(given: Any) -> None:
    """Tell torch which sizes change from call to call: all but the last one of rows, all of an index."""
    for leaf in tree_leaves(given):
        for tensor in tensors_of(leaf) if isinstance(leaf, Movable) else [leaf]:
            while isinstance(tensor, Tensor):
                dims = tensor.dim() - tensor.is_floating_point() - tensor.is_complex()
                torch._dynamo.maybe_mark_dynamic(tensor, [d for d in range(dims) if tensor.shape[d] > 1])
                tensor = tensor._base  # of which a view's size is a function
