"""Send rows to other ranks of a group, in sizes that the host knows; their gradients come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Sizes = tuple[int, ...]


def all_to_all(rows: Tensor, sent: Sizes, received: Sizes, group: str) -> Tensor:
    """Return the rows ``[sum(received), ...]`` that ranks of a group send here, in their order; a collective.

    Backward is one, too, and runs on the ranks whose loss depends on the rows: on all of the group or on none.

    Args:
        rows: rows for each rank end to end, ``[sum(sent), ...]``.
        sent, received: rows sent to each rank, and received from it.
        group: name of the process group.
    """
    arrived: Tensor = _AllToAll.apply(rows, sent, received, group)
    return arrived


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sizes, received: Sizes, group: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.way = received, sent, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return None if grads[0] is None else _exchanged(grads[0], *ctx.way), None, None, None


def _exchanged(rows: Tensor, sent: Sizes, received: Sizes, group: str) -> Tensor:
    c10d = torch.ops._c10d_functional
    arrived: Tensor = c10d.wait_tensor(c10d.all_to_all_single(rows.contiguous(), [*received], [*sent], group))
    return arrived
