"""Cross entropy of logits and the likeliest tokens, also where tensor parallelism has split the vocabulary.

Split logits follow Megatron-LM (Shoeybi et al. 2019, section 3): ranks exchange three numbers per row, never logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, in fp32 or fp64, and the likeliest token of every row.

    Args:
        logits: ``[n, vocabulary]``, plain or split over its last dimension; n may be 0.
        labels: int64 ``[n]``, a token for every row, the same on all ranks that share the logits.

    Returns:
        A scalar and int64 ``[n]``, the same on all those ranks.
    """
    if isinstance(logits, DTensor):
        mesh, local = logits.device_mesh, logits.to_local()
        first = sum(_sizes(logits.shape[-1], mesh.size())[: mesh.get_local_rank()])
        return _Split.apply(_precise(local), labels, first, mesh.get_group())
    with torch.autocast(logits.device.type, enabled=False):
        loss = F.cross_entropy(_precise(logits), labels, reduction="sum")
    with torch.no_grad():
        return loss, logits.argmax(dim=-1)


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _sizes(vocabulary: int, ranks: int) -> list[int]:
    """How many tokens each rank has, as torch.chunk deals them out."""
    most = -(-vocabulary // ranks)
    return [min(most, max(0, vocabulary - most * rank)) for rank in range(ranks)]


class _Split(torch.autograd.Function):
    """Of this rank's logits ``[n, part]``, whose first token is ``first``."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        highest, place = logits.max(dim=-1)
        best = highest.clone()
        dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
        likeliest = torch.where(highest == best, place + first, torch.iinfo(torch.int64).max)
        dist.all_reduce(likeliest, op=dist.ReduceOp.MIN, group=group)
        inside = (labels >= first) & (labels < first + logits.shape[-1])
        place = torch.where(inside, labels - first, 0)[:, None]
        shares = (logits - best[:, None]).exp()
        target = torch.where(inside, (logits.gather(1, place)[:, 0] - best), 0.0)
        sums = torch.stack([shares.sum(dim=-1), target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(shares.div_(sums[0][:, None]), place, inside)
        ctx.mark_non_differentiable(likeliest)
        return (sums[0].log() - sums[1]).sum(), likeliest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        shares, place, inside = ctx.saved_tensors
        gradient = shares.scatter_add(1, place, -inside[:, None].to(shares.dtype))
        return gradient.mul_(grads[0]), None, None, None
