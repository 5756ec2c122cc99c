"""Context parallelism of encoders: blocks run on a part of an instance's rows, everything around them on all rows.

The first block of a stage takes its rank's part, and the rows of all parts are gathered after the last one. So rows at
edges and between stages are replicated, as over tensor-parallel ranks. Two ranks, 5 rows of an item::

    embedding 0 1 2 3 4    blocks of rank 0: 0 1 2    blocks of rank 1: 3 4 and padding    merger 0 1 2 3 4

Each rank has the whole gradient of a stage's output. It counts ``1 / cp`` of it, and the last block's rows count it
``cp`` times, so that the sum over ranks is right for parameters inside and outside of blocks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.head_exchange import HeadExchange
from hetero_strategy.model.inputs import Packing


def divide_rows(stage: Adapter, rank: int, ranks: int) -> None:
    """Let the blocks of a stage run on this rank's part of the rows, and exchange heads in attention.

    Args:
        stage: a stage of an encoder; its ``context_group`` must be set before it runs.
        rank: context-parallel coordinate of this rank.
        ranks: number of context-parallel ranks.
    """
    if stage.random_numbers is not None:
        stage.random_numbers.part_of_rows = rank
    blocks = list(stage.blocks().values())
    for block in blocks:
        enter = partial(_enter, stage, rank, ranks, is_first=block is blocks[0])
        block.register_forward_pre_hook(enter, with_kwargs=True)
    blocks[-1].register_forward_hook(_leave, with_kwargs=True)
    stage.register_forward_hook(lambda *call: _Counted.apply(call[-1], 1 / ranks))


class _Part(NamedTuple):
    """A rank's part of the rows of an instance."""

    context: HeadExchange

    @property
    def total(self) -> int:
        """Return the rows of the instance."""
        return self.context.whole.rows

    @property
    def rows(self) -> int:
        """Return the rows of each part, padding included."""
        return -(-self.total // self.context.ranks)

    @property
    def start(self) -> int:
        """Return the first row of the part."""
        return min(self.context.rank * self.rows, self.total)

    def of(self, rows: Tensor) -> Tensor:
        """Return this rank's part ``[..., rows, width]`` of rows ``[..., total, width]``: a view unless padded."""
        own = rows.narrow(-2, self.start, min(self.rows, self.total - self.start))
        return F.pad(own, (0, 0, 0, lacking)) if (lacking := self.rows - own.shape[-2]) else own

    def whole(self, own: Tensor) -> Tensor:
        """Gather the parts of all ranks; a collective."""
        *lead, _, width = own.shape
        gathered = self.context.gather(own.reshape(-1, width))
        return gathered[: self.total].reshape(*lead, self.total, width)


def _enter(
    stage: Adapter,
    rank: int,
    ranks: int,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_first: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut the rows of a stage's first block, and in all blocks the tables with an entry for each row."""
    leaves, form = tree_flatten((args, kwargs))
    packing = next((packing for leaf in leaves if (packing := _packing(leaf)) is not None), None)
    first = next((number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    shape: tuple[int, ...] = () if first is None else leaves[first].shape
    if packing is None or len(shape) < 2 or (is_first and shape[-2] != packing.rows):
        raise ModelError(
            f"module '{stage.name}': cp={ranks}, but {type(block).__name__} takes rows {list(shape)} with"
            f" {'no packing' if packing is None else f'a packing of {packing.rows} rows'}; set cp=1, or let its rows"
            " meet in packed_attention alone"
        )
    part = _Part(HeadExchange(rank, ranks, packing, stage.context_group))
    for number, leaf in enumerate(leaves):
        if number == first:
            leaves[number] = _Own.apply(leaf, part, not stage.first_stage) if is_first else leaf
        elif isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[-2] == part.total:
            leaves[number] = part.of(leaf)
        elif (own := _packing(leaf)) is not None:
            exchanging = replace(own, context=HeadExchange(rank, ranks, own, stage.context_group))
            leaves[number] = exchanging if own is leaf else replace(leaf, packing=exchanging)
    changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, form)
    return changed


def _leave(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Gather the rows behind a stage's last block."""
    leaves = tree_flatten((args, kwargs))[0]
    packing = next(packing for leaf in leaves if (packing := _packing(leaf)) is not None)
    assert isinstance(packing.context, HeadExchange)
    part = _Part(packing.context)
    if isinstance(output, Tensor):
        return _Whole.apply(output, part)
    return (_Whole.apply(output[0], part), *output[1:])


def _packing(leaf: Any) -> Packing | None:
    """Return the packing of an argument, which may be a mask that has one."""
    packing = getattr(leaf, "packing", leaf)
    return packing if isinstance(packing, Packing) else None


class _Own(torch.autograd.Function):
    """This rank's part of all rows. The gradient of the others' is 0 in a first stage, and else gathered, because the
    stage before takes the whole.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: _Part, gathers: bool) -> Tensor:
        ctx.part, ctx.gathers = part, gathers
        return part.of(rows).clone()  # no view, which would keep all rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        part, gradient = ctx.part, grads[0]
        if ctx.gathers:
            return part.whole(gradient), None, None
        own = gradient.narrow(-2, 0, min(part.rows, part.total - part.start))
        return F.pad(own, (0, 0, part.start, part.total - part.start - own.shape[-2])), None, None


class _Whole(torch.autograd.Function):
    """The rows of all ranks; see the module's head for the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: _Part) -> Tensor:
        ctx.part = part
        return part.whole(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.part.of(grads[0]) * ctx.part.context.ranks, None


class _Counted(torch.autograd.Function):
    """A copy of rows whose gradient counts in part."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: float) -> Tensor:
        ctx.share = share
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.share, None
