"""``exchange``: rows of one layout to another layout, as a differentiable function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from hetero_strategy.boundary.route import Route, RowIndex, Transfer
from hetero_strategy.boundary.transport import Channel, Transport


@dataclass(frozen=True)
class Boundary:
    """What :func:`exchange` needs on this rank.

    Args:
        route: which rows go where, see :func:`hetero_strategy.boundary.route.route`.
        forward, backward: where rows and their gradients travel; no gradients come back without the second, which is
            then left out on all ranks.
    """

    route: Route
    forward: Channel
    backward: Channel | None


def exchange(rows: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    """Source rows ``[n, width]`` of this rank to the target rows ``[m, width]`` that this rank needs; differentiable.

    A collective over the ranks of both sides, forward and, with a backward channel, backward: a rank whose rows need no
    gradient, as it has none, takes part too. A rank of only one side gives, or gets, no rows.
    """
    if boundary.backward is None:
        return cross(boundary.route.forward, boundary.forward, rows.detach())
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    return _Exchange.apply(rows, boundary)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, boundary: Boundary) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.boundary = boundary
        moved = cross(boundary.route.forward, boundary.forward, rows)
        return moved.view_as(moved) if moved is rows else moved

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def]
        boundary = ctx.boundary
        return cross(boundary.route.backward, boundary.backward, gradient.contiguous()), None


def cross(transfer: Transfer, channel: Channel, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[type-arg]
    """One transfer from end to end on a rank of either side: ``[inputs, width] -> [outputs, width]``."""
    index = RowIndex()
    packed = index.pack(transfer)
    transport = Transport([(channel, packed)], torch.from_numpy(index.array()).to(channel.device))
    transport.give(0, rows)
    transport.start([[0]])
    moved = transport.take(0)
    transport.drain()
    return moved
