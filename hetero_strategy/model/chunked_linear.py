"""Tensor-parallel linear maps whose collectives run beside their matmuls, one chunk of rows after another.

The idea is StepCCL's (DistTrain, arXiv:2408.04275, section 6): a matmul and its collective are cut into pairs, and the
collective of one chunk travels while the next one is multiplied; as modules, not as one fused kernel. The collectives
are those of Megatron-LM's operators f and g (arXiv:1909.08053, section 3). In the graph each of them is two nodes, of
which one starts it and the other waits; the matmul lies between::

    columns:  rows -> _Enter -> _Columns -> _Join ->        rows:  rows -> _Rows -> _Join -> _Leave ->
                      weight -> _Weight -^                         weight -> _Weight -^

Gradients of weights are nodes of their own. Autograd takes the youngest node that is ready, so they are computed after
the last chunk's collective has started and before anyone waits for it; and a backward in two halves puts them off
without running a collective twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from typing_extensions import override

from hetero_strategy.errors import ModelError

Multiply = Callable[[Tensor, Tensor, Tensor | None, "_Cut", list[Tensor]], Tensor]


@dataclass(frozen=True)
class _Cut:
    """How rows lie on the ranks of a group, and into how many chunks they are cut."""

    group: dist.ProcessGroup
    chunks: int
    parts: int
    """Equal contiguous parts of the rows, one on each rank; 1: every rank has all rows."""

    def pieces(self, rows: int) -> list[slice]:
        """At most ``chunks`` slices of the rows of a part, none of them empty; the same on all ranks."""
        ends = [rows * i // self.chunks for i in range(self.chunks + 1)]
        return [slice(a, b) for a, b in pairwise(ends) if b > a]

    def parted(self, rows: Tensor) -> Tensor:
        """``[rows, width]`` as ``[parts, rows of a part, width]``."""
        return rows.reshape(self.parts, len(rows) // self.parts, rows.shape[1])


class _Sums:
    """Sums over ranks of a product of matrices, on their way; each rank gets its part of the rows."""

    def __init__(self, cut: _Cut, rows: Tensor, weight: Tensor, plus: Tensor | None) -> None:
        """Multiply rows ``[rows, m]`` and a weight ``[m, n]``, add ``[n]`` or ``[rows, n]``, and start the sums."""
        parted = cut.parted(rows)
        more = cut.parted(plus) if plus is not None and plus.dim() > 1 else None
        self._sums = rows.new_empty(parted.shape[1], weight.shape[1])
        self._works: list[Any] = []
        for piece in cut.pieces(parted.shape[1]):
            chunk, mine = parted[:, piece].flatten(0, 1), self._sums[piece]
            product = mine if cut.parts == 1 else rows.new_empty(len(chunk), weight.shape[1])
            if plus is None:
                torch.mm(chunk, weight, out=product)
            else:
                torch.addmm(plus if more is None else more[:, piece].flatten(0, 1), chunk, weight, out=product)
            if cut.parts == 1:
                work = dist.all_reduce(product, group=cut.group, async_op=True)
            else:
                work = dist.reduce_scatter_tensor(mine, product, group=cut.group, async_op=True)
            self._works.append(work)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._sums


class _Gathered:
    """The rows of all ranks, on their way."""

    def __init__(self, cut: _Cut, rows: Tensor) -> None:
        """Start to gather rows ``[rows of a part, width]``, all chunks at once: they travel one after another."""
        self._cut, self._coming = cut, list[tuple[slice, Tensor, Any]]()
        self.whole = rows if cut.parts == 1 else rows.new_empty(cut.parts * len(rows), rows.shape[1])
        """``[rows, width]``, filled as chunks arrive."""
        for piece in cut.pieces(len(rows)) if cut.parts > 1 else []:
            chunk = rows[piece].contiguous()
            arrived = rows.new_empty(cut.parts * len(chunk), rows.shape[1])
            work = dist.all_gather_into_tensor(arrived, chunk, group=cut.group, async_op=True)
            self._coming.append((piece, arrived, work))

    def arriving(self) -> Iterator[tuple[slice, Tensor]]:
        """Wait for one chunk after another, and put it where its rows belong."""
        parted = self._cut.parted(self.whole)
        while self._coming:
            piece, arrived, work = self._coming.pop(0)
            work.wait()
            parted[:, piece] = self._cut.parted(arrived)
            yield piece, arrived

    def times(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply what arrives with a weight ``[n, width]``; ``[rows, n]``."""
        if not self._coming:
            return F.linear(self.whole, weight, bias)
        product = self.whole.new_empty(len(self.whole), len(weight))
        for piece, chunk in self.arriving():
            self._cut.parted(product)[:, piece] = self._cut.parted(F.linear(chunk, weight, bias))
        return product


@dataclass
class _Link:
    """What the nodes of one call leave for each other in a backward."""

    cut: _Cut
    sums: _Sums | None = None
    gathered: _Gathered | None = None

    def take(self) -> Any:
        taken, self.sums, self.gathered = self.sums or self.gathered, None, None
        return taken


def _token(like: Tensor, *shape: int) -> Tensor:
    """Stands in the graph for a tensor that nobody reads; it has no memory."""
    return like.new_zeros(()).expand(shape)


class _Enter(Function):
    """Rows of this rank to those that all ranks multiply. Backward waits for the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        return whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unread: Tensor) -> Any:
        return ctx.link.take().wait(), None, None


class _Columns(Function):
    """A token of the product, and the rows for other maps. Backward starts to sum the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, link: _Link) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight)
        ctx.link = link
        ctx.set_materialize_grads(False)
        return _token(whole, len(whole), len(weight)), whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient, others) = ctx.saved_tensors, gradients
        if gradient is None:  # only other maps' products are used
            gradient = others.new_zeros(len(others), len(weight))
        ctx.link.sums = _Sums(ctx.link.cut, gradient, weight, others)
        return _token(weight, len(gradient), weight.shape[1]), None, None


class _Rows(Function):
    """A token of the product. Backward multiplies its gradient as that arrives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, link: _Link) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.link = link
        return _token(rows, len(rows), len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unread: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return ctx.link.take().times(weight.t()), None, None


class _Leave(Function):
    """The sums of the product, which ``made`` holds. Backward starts to gather their gradient."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, made: list[Tensor], link: _Link) -> Tensor:
        ctx.link = link
        return made.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.link.gathered = _Gathered(ctx.link.cut, gradients[0])
        return ctx.link.gathered.whole, None, None


class _Weight(Function):
    """A token of the product. Backward is that for weight and bias."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, rows: Tensor, link: _Link) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.link = link
        return _token(rows, len(rows), len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (rows,), (gradient,), (weight, bias, *_) = ctx.saved_tensors, gradients, ctx.needs_input_grad
        if ctx.link.gathered is not None:  # nobody has waited for it, since the rows need no gradient
            list(ctx.link.take().arriving())
        return gradient.t() @ rows if weight else None, gradient.sum(0) if bias else None, None, None


class _Join(Function):
    """The product, which ``made`` holds. Backward goes on to what was multiplied and to the weight."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, weight: Tensor, made: list[Tensor]) -> Tensor:
        return made.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0], None


def _columns(rows: Tensor, weight: Tensor, bias: Tensor | None, cut: _Cut, taken: list[Tensor]) -> Tensor:
    """Multiply the rows of all ranks with this rank's columns. ``taken`` are the last such rows, here and gathered."""
    if taken and taken[0] is rows:
        return F.linear(taken[1], weight, bias)
    link = _Link(cut)
    with torch.no_grad():
        gathered = _Gathered(cut, _matrix(rows))
        product = gathered.times(weight, bias)
    whole = _Enter.apply(_matrix(rows), gathered.whole, link)
    of_weight = _Weight.apply(weight, bias, whole.detach(), link)
    token, whole = _Columns.apply(whole, weight.detach(), link)
    taken[:] = rows, whole
    return _Join.apply(token, of_weight, [product])


def _rows(rows: Tensor, weight: Tensor, bias: Tensor | None, cut: _Cut, taken: list[Tensor]) -> Tensor:
    """Sum the products of all ranks, each with its columns of the rows."""
    taken.clear()  # the columns before it are done
    rows, link = _matrix(rows), _Link(cut)
    of_weight = _Weight.apply(weight, bias, rows.detach(), link)
    token = _Rows.apply(rows, weight.detach(), link)
    token = _Join.apply(token, of_weight, [_token(rows, *token.shape)])
    with torch.no_grad():  # after all is saved, where a checkpoint's second run ends
        once = bias if dist.get_rank(cut.group) == 0 else None
        made = _Sums(cut, rows, weight.t(), once).wait()
    return _Leave.apply(token, [made], link)


def _matrix(rows: Tensor) -> Tensor:
    return (rows.to_local() if isinstance(rows, DTensor) else rows).flatten(0, -2)


class _Chunked(ParallelStyle):
    """A style whose linear maps multiply by a function; those of one plan share ``taken``."""

    def __init__(
        self,
        style: ColwiseParallel | RowwiseParallel,
        rows: Placement,
        chunks: int,
        multiply: Multiply,
        taken: list[Tensor],
    ) -> None:
        super().__init__()
        self._style, self._chunks, self._dim = style, chunks, rows.dim if isinstance(rows, Shard) else None
        self._multiply, self._taken = multiply, taken

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module).forward is not nn.Linear.forward:
            return self._style._apply(module, device_mesh)
        cut = _Cut(device_mesh.get_group(), self._chunks, 1 if self._dim is None else device_mesh.size())
        module.forward = partial(_forward, module, self._multiply, cut, self._dim, self._taken)
        return distribute_module(module, device_mesh, self._style._partition_linear_fn)


def _forward(linear: Any, multiply: Multiply, cut: _Cut, dim: int | None, taken: list[Tensor], rows: Tensor) -> Tensor:
    lead = rows.shape[:-2]
    if dim is not None and (dim % rows.dim() != len(lead) or lead.numel() != 1):
        raise ModelError(
            f"tp_chunks: ranks have parts of dimension {dim} of rows {list(rows.shape)}, the input of {linear}; let"
            " them have parts of the last but one, and all before it be 1, or set tp_chunks=1"
        )
    bias = None if linear.bias is None else linear.bias.to_local()
    product = multiply(rows, linear.weight.to_local(), bias, cut, taken)
    return product.view(*lead, -1, product.shape[1])


def chunked(plan: Mapping[str, ParallelStyle], chunks: int) -> dict[str, ParallelStyle]:
    """Return a plan whose linear maps cut rows into chunks, each of whose collectives runs beside the next matmul.

    Linear maps that take the same tensor one after another gather its rows once, and sum its gradients once. Styles
    whose rows lie in another way than torch's defaults, or sharded, stay as they are.

    Args:
        chunks: at most so many; fewer where there are fewer rows.
    """
    found, taken = dict(plan), list[Tensor]()
    for fqn, style in plan.items():
        if type(style) is ColwiseParallel and style.use_local_output and style.output_layouts == (Shard(-1),):
            found[fqn] = _Chunked(style, style.input_layouts[0], chunks, _columns, taken)
        elif type(style) is RowwiseParallel and style.use_local_output and style.input_layouts == (Shard(-1),):
            found[fqn] = _Chunked(style, style.output_layouts[0], chunks, _rows, taken)
    return found


def is_chunked(module: nn.Module) -> bool:
    """Whether a linear map cuts its rows into chunks."""
    return getattr(module.__dict__.get("forward"), "func", None) is _forward
