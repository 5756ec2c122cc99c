"""Send rows to other ranks of a group, in sizes that the host knows; their gradients come back."""

from __future__ import annotations

from collections.abc import Callable
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
    return start_all_to_all(rows, sent, received, group)()


def start_all_to_all(rows: Tensor, sent: Sizes, received: Sizes, group: str) -> Callable[[], Tensor]:
    """Start :func:`all_to_all`, and return a function that waits and returns its result.

    What runs before that function runs while rows travel, and its backward while gradients travel: of nodes that are
    ready, autograd runs those of the latest forward first.
    """
    rows, travelling = _Start.apply(rows, sent, received, group)
    return lambda: _Finish.apply(rows, travelling, received, sent, group)


class _Start(torch.autograd.Function):
    """Rows that start to travel; backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sizes, received: Sizes, group: str) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        travelling = _started(rows, sent, received, group)
        ctx.mark_non_differentiable(travelling)
        return rows.view_as(rows), travelling  # a gradient has the shape of the rows that are sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return None if grads[0] is None else _waited(grads[0]), None, None, None


class _Finish(torch.autograd.Function):
    """Rows that have arrived; backward starts to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travelling: Tensor, *way: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.way = way
        return _waited(travelling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        return None if grads[0] is None else _started(grads[0], *ctx.way), None, None, None, None


def _started(rows: Tensor, sent: Sizes, received: Sizes, group: str) -> Tensor:
    op = torch.ops._c10d_functional.all_to_all_single
    travelling: Tensor = op(rows.contiguous(), [*received], [*sent], group)
    return travelling


def _waited(travelling: Tensor) -> Tensor:
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(travelling)
    return arrived
