"""Context parallelism by heads: ranks that have parts of the rows exchange them for parts of the heads, and back.

Attention then sees all rows of an instance in their order, whatever its mask and kernel (DeepSpeed Ulysses,
arXiv:2309.14509). With 2 ranks, 4 rows and 2 heads, by row and head::

    rank 0 has 0a 0b 1a 1b    attends with 0a 1a 2a 3a    has again 0a 0b 1a 1b
    rank 1 has 2a 2b 3a 3b    attends with 0b 1b 2b 3b    has again 2a 2b 3a 3b

Each rank sends ``(ranks - 1) / ranks`` of its queries, keys, values and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetero_strategy.errors import ModelError
from hetero_strategy.model.inputs import Movable, Packing


@dataclass(eq=False)
class HeadExchange(Movable):
    """The ranks that share the rows of an instance, in equal contiguous parts, and divide the heads of attention."""

    rank: int
    """Context-parallel coordinate of this rank."""
    ranks: int
    """Number of context-parallel ranks."""
    whole: Packing
    """Packing of all rows; alignment rows of the last parts may follow."""
    group: str = ""
    """Name of the ranks' process group, once they run."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange own rows of all heads, ``[1, heads, rows, width]``, for all rows of own heads; a collective.

        Key heads are repeated until each rank has those of its query heads.
        """
        heads, key_heads = query.shape[1], key.shape[1]
        if heads % self.ranks:
            raise ModelError(f"cp_form='heads': {heads} heads on a rank cannot be divided over cp={self.ranks} ranks")
        times = lcm(key_heads, self.ranks) // key_heads
        if times > 1:
            key, value = (rows.repeat_interleave(times, dim=1) for rows in (key, value))
        shapes = [(rows.shape[1] // self.ranks, rows.shape[3]) for rows in (query, key, value)]
        by_rank = [rows[0].transpose(0, 1).unflatten(1, (self.ranks, -1)).flatten(2) for rows in (query, key, value)]
        arrived = self._exchanged(torch.cat(by_rank, dim=2).transpose(0, 1)).flatten(0, 1)[: self.whole.rows]
        parts = arrived.split([count * width for count, width in shapes], dim=1)
        first, second, third = (
            part.unflatten(1, of).transpose(0, 1)[None] for part, of in zip(parts, shapes, strict=True)
        )
        return first, second, third

    def to_rows(self, out: Tensor, rows: int) -> Tensor:
        """Exchange all rows of own heads for this rank's ``rows`` of all heads; a collective."""
        by_row = F.pad(out[0].transpose(0, 1).flatten(1), (0, 0, 0, self.ranks * rows - self.whole.rows))
        arrived = self._exchanged(by_row.unflatten(0, (self.ranks, rows))).transpose(0, 1)
        return arrived.unflatten(2, out.shape[1::2]).flatten(1, 2).transpose(0, 1)[None]

    def own(self, by_head: Tensor) -> Tensor:
        """Return the entries of this rank's heads, from ``[heads]``."""
        return by_head.unflatten(0, (self.ranks, -1))[self.rank]

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all ranks' rows ``[T, ...]`` in their order; a collective, without a gradient."""
        c10d = torch.ops._c10d_functional
        gathered: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(rows.contiguous(), self.ranks, self.group))
        return gathered

    def summed(self, numbers: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; a collective, without a gradient."""
        c10d = torch.ops._c10d_functional
        total: Tensor = c10d.wait_tensor(c10d.all_reduce(numbers, "sum", self.group))
        return total

    def _exchanged(self, parts: Tensor) -> Tensor:
        exchanged: Tensor = _Exchanged.apply(parts, self.group)
        return exchanged


class _Exchanged(torch.autograd.Function):
    """Parts ``[ranks, ...]``, one for each rank, in exchange for one from each rank; gradients go back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(parts: Tensor, group: str) -> Tensor:
    c10d, each = torch.ops._c10d_functional, [1] * len(parts)
    arrived: Tensor = c10d.wait_tensor(c10d.all_to_all_single(parts.contiguous(), each, each, group))
    return arrived
