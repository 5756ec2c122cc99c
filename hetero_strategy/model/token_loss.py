"""Look tokens up, and compute cross entropy and the likeliest tokens of logits, whole or split by tensor parallelism.

Split logits follow Megatron-LM (Shoeybi et al. 2019, section 3): ranks exchange three numbers per row, never logits.
When compiled, each direction reads the logits and writes no tensor of their size but their gradient, in their dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel
from typing_extensions import override


def token_loss(logits: Tensor, labels: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, in fp32 or fp64, and the likeliest token of every row.

    Args:
        logits: scores ``[n, vocabulary]``, plain or split over the last dimension; n may be 0.
        labels: token of every row, int64 ``[n]``, the same on all ranks that share the logits.
        backend: backend of ``torch.compile`` for computations on whole rows; None: do not compile.

    Returns:
        A scalar and int64 ``[n]``, the same on all ranks that share the logits.
    """
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        first = sum(chunk_sizes(logits.shape[-1], mesh.size())[: mesh.get_local_rank()])
        return _Rows.apply(logits.to_local(), labels, first, mesh.get_group(), backend)
    if backend is not None:
        return _Rows.apply(logits, labels, 0, None, backend)
    with torch.autocast(logits.device.type, enabled=False):
        loss = F.cross_entropy(_precise(logits), labels, reduction="sum")
    with torch.no_grad():
        return loss, logits.argmax(dim=-1)


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def chunk_sizes(size: int, ranks: int) -> list[int]:
    """Return the number of tokens, or other elements, of each rank, as torch.chunk deals them out."""
    most = -(-size // ranks)
    return [min(most, max(0, size - most * rank)) for rank in range(ranks)]


class _Rows(torch.autograd.Function):
    """A loss of logits ``[n, part]`` whose first token is ``first``; the ranks of ``group`` have the other parts."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup | None, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        own = labels - first
        own = torch.where((own >= 0) & (own < logits.shape[-1]), own, -1)
        best, likeliest, total, target = _run(_statistics, backend, logits.detach(), own)
        if group is not None:
            highest = best.clone()
            dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
            likeliest = torch.where(highest == best, likeliest + first, torch.iinfo(torch.int64).max)
            dist.all_reduce(likeliest, op=dist.ReduceOp.MIN, group=group)
            # In a part of only -inf the sum of exponentials would be NaN.
            shares = torch.where(highest == -torch.inf, 0.0, total * (highest - best).exp())
            sums = torch.stack([shares, torch.where(own < 0, 0.0, target - best)])
            dist.all_reduce(sums, group=group)
            total, below = sums
        else:
            below = target - best
        logarithm = total.log()
        ctx.backend = backend
        ctx.save_for_backward(logits, own, best, logarithm)
        ctx.mark_non_differentiable(likeliest)
        return (logarithm - below).sum(), likeliest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _run(_gradient, ctx.backend, *ctx.saved_tensors, grads[0]), None, None, None, None


def _statistics(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each row the highest logit, its index, the sum of exponentials below it, and the logit at ``own``."""
    values = _precise(logits)
    best = values.amax(dim=-1)
    total = (values - best[:, None]).exp().sum(dim=-1)
    target = values.gather(1, own.clamp(0)[:, None])[:, 0]
    return best, values.argmax(dim=-1), total, target


def _gradient(logits: Tensor, own: Tensor, best: Tensor, logarithm: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient of the summed loss: token probabilities, less 1 at ``own``, times ``factor``."""
    shares = (_precise(logits) - best[:, None] - logarithm[:, None]).exp()
    if torch.compiler.is_compiling():
        labelled = torch.arange(logits.shape[-1], device=own.device) == own[:, None]
        shares = shares - labelled.to(shares.dtype)
    else:
        shares.scatter_add_(1, own.clamp(0)[:, None], -(own >= 0)[:, None].to(shares.dtype))
    return (shares * factor).to(logits.dtype)


def _run(function: Callable[..., Any], backend: str | None, logits: Tensor, *rows: Tensor) -> Any:
    """Call a function, compiled for any number of rows."""
    if backend is None or len(logits) < 2:  # compiled code specialises on sizes 0 and 1
        return function(logits, *rows)
    for tensor in (logits, *rows):
        if tensor.dim():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function, backend)(logits, *rows)


@functools.cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend)


class VocabularyParallel(RowwiseParallel):
    """A ``RowwiseParallel`` of an ``nn.Embedding`` in which each rank makes only the gradient of its own tokens.

    DTensor's embedding (torch 2.13) gives every rank the gradient of the whole vocabulary, which is kept until the
    step's end. It still handles a vocabulary that the ranks do not divide. Rows are looked up as in Megatron-LM's
    ``VocabParallelEmbedding`` (arXiv:1909.08053, section 3).
    """

    @override
    def _partition_embedding_fn(self, name: str, module: nn.Embedding, device_mesh: DeviceMesh) -> None:
        super()._partition_embedding_fn(name, module, device_mesh)
        if module.num_embeddings % device_mesh.size() == 0:
            module.__class__ = _own_tokens(type(module))  # type: ignore[arg-type]


class _OwnTokens(nn.Embedding):
    @override
    def forward(self, ids: DTensor) -> Tensor:  # type: ignore[override]
        """Look up ids ``[...]``, the same on all ranks; rows ``[..., width]`` are zero for other ranks' tokens."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        part, mesh = weight.to_local(), weight.device_mesh
        first = mesh.get_local_rank() * len(part)
        own = ids.to_local() - first
        elsewhere = (own < 0) | (own >= len(part))
        padding = -1 if self.padding_idx is None else self.padding_idx - first
        here = padding if 0 <= padding < len(part) else None
        rows = F.embedding(own.masked_fill_(elsewhere, 0), part, here).masked_fill_(elsewhere[..., None], 0)
        return DTensor.from_local(rows, mesh, (Partial(),), run_check=False)


@functools.cache
def _own_tokens(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """Return a class whose ``nn.Embedding.forward`` is that of :class:`_OwnTokens`; some embeddings scale its rows."""
    return _OwnTokens if kind is nn.Embedding else type(kind.__name__, (kind, _OwnTokens), {})
