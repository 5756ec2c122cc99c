"""Compile blocks of modules with torch, one by one, each for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.inputs import Movable, tensors_of
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import OnPaper, Site, Transform

Backend = Literal["inductor", "aot_eager", "eager"]
"""Backends of ``torch.compile``; the last two help to find the fault if the first fails."""


@dataclass(frozen=True)
class Compile(Transform):
    """A module's blocks and its loss are compiled by torch, for any number of rows."""

    name: ClassVar[str] = "compile"
    settings: ClassVar[str] = ", ".join(get_args(Backend))
    splits_backward: ClassVar[bool] = False
    warms_up: ClassVar[bool] = True
    backend: Backend = "inductor"

    @override
    @classmethod
    def of(cls, setting: object) -> Self | None:
        return cls(cast(Backend, setting)) if setting in get_args(Backend) else None

    @property
    @override
    def setting(self) -> str:
        return self.backend

    @override
    def faults(self, module: OnPaper, layout: ModuleLayout, others: Mapping[str, Transform]) -> Iterator[str]:
        again = others.get(Recompute.name)
        assert isinstance(again, Recompute | None)
        if layout.tp > 1 and not module.tp_compiles:
            yield f"with tp={layout.tp}: torch's compiler fails on its tensor-parallel layers; set tp=1 or leave it out"
        elif layout.tp > 1 and again is not None and again.keeps_matmuls:
            yield (
                f"with tp={layout.tp}: torch's compiler fails on recompute='all but matmuls' there; set recompute to"
                " 'all' or 'every 2'"
            )
        elif layout.tp == 1 and self.backend == "eager" and again is not None and not again.whole:
            yield (
                "is 'eager', with which torch would draw other random numbers when blocks run again in backward; use"
                " 'aot_eager', or leave recompute out"
            )

    @override
    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        for stage in stages:
            stage.compiled_by = self.backend
            apply_compile(stage.blocks().values(), self.backend)


def apply_compile(blocks: Iterable[nn.Module], backend: str) -> None:
    """Compile blocks that take rows ``[..., T, width]`` first; blocks of one class and size share compiled code.

    Numbers of rows, sequences and table entries are dynamic from the first call; sizes that follow from weights are
    not.
    """
    for block in blocks:
        block.forward = _compiled(block.forward, backend)


def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    fast = torch.compile(forward, backend=backend)
    seen: set[bool] = set()

    def run(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Sizes of 0 and 1 are special to compiled code: they would compile again, and run fast anyway.
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
                tensor = tensor._base  # a view's size is a function of its base's
