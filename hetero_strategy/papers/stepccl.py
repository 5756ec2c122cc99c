"""Tensor-parallel linear maps whose collectives overlap with their matmuls, chunk by chunk of rows.

Importing this file registers the transform ``tp_chunks``. The idea is StepCCL's (DistTrain, arXiv:2408.04275, section
6): a matmul and its collective are cut into pairs, and the collective of one chunk travels while the next chunk is
multiplied; here in modules, not in one fused kernel. The collectives are Megatron-LM's operators f and g
(arXiv:1909.08053, section 3). In the graph each collective is two nodes, one that starts it and one that waits, with
the matmul in between::

    columns:  rows -> _Enter -> _Columns -> _Join ->        rows:  rows -> _Rows -> _Join -> _Leave ->
                      weight -> _Weight -^                         weight -> _Weight -^

Gradients of weights are nodes of their own. Autograd takes the youngest ready node, so they are computed after the last
chunk's collective has started and before any node waits for it. A backward in two halves can postpone them without
running a collective twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

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

from hetero_strategy.errors import ConfigError, Count, ModelError, is_whole
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import OnPaper, Site, Transform
from hetero_strategy.parallelize.transforms import register_transform

Multiply = Callable[[Tensor, Tensor, Tensor | None, "_Cut", list[Tensor]], Tensor]


@dataclass(frozen=True)
class _Cut:
    """A split of rows over the ranks of a group, and into chunks."""

    group: dist.ProcessGroup
    chunks: int
    parts: int
    """Equal contiguous parts of the rows, one on each rank; 1: every rank has all rows."""

    def pieces(self, rows: int) -> list[slice]:
        """Return at most ``chunks`` slices of the rows of a part, none of them empty; the same on all ranks."""
        ends = [rows * i // self.chunks for i in range(self.chunks + 1)]
        return [slice(a, b) for a, b in pairwise(ends) if b > a]

    def parted(self, rows: Tensor) -> Tensor:
        """View ``[rows, width]`` as ``[parts, rows of a part, width]``."""
        return rows.reshape(self.parts, len(rows) // self.parts, rows.shape[1])


class _Sums:
    """The sums over ranks of a matrix product, in flight; each rank gets its part of the rows."""

    def __init__(self, cut: _Cut, rows: Tensor, weight: Tensor, plus: Tensor | None) -> None:
        """Multiply rows ``[rows, m]`` and a weight ``[m, n]``, add ``[n]`` or ``[rows, n]``, and start the sums."""
        parted = cut.parted(rows)
        more = cut.parted(plus) if plus is not None and plus.dim() > 1 else None
        self._sums = rows.new_empty(parted.shape[1], weight.shape[1])
        self._works: list[Any] = []
        for piece in cut.pieces(parted.shape[1]):
            chunk, own = parted[:, piece].flatten(0, 1), self._sums[piece]
            product = own if cut.parts == 1 else rows.new_empty(len(chunk), weight.shape[1])
            if plus is None:
                torch.mm(chunk, weight, out=product)
            else:
                torch.addmm(plus if more is None else more[:, piece].flatten(0, 1), chunk, weight, out=product)
            if cut.parts == 1:
                work = dist.all_reduce(product, group=cut.group, async_op=True)
            else:
                work = dist.reduce_scatter_tensor(own, product, group=cut.group, async_op=True)
            self._works.append(work)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._sums


class _Gathered:
    """The rows of all ranks, in flight."""

    def __init__(self, cut: _Cut, rows: Tensor) -> None:
        """Start to gather rows ``[rows of a part, width]``: all chunks at once, which travel in sequence."""
        self._cut, self._coming = cut, list[tuple[slice, Tensor, Any]]()
        self.whole = rows if cut.parts == 1 else rows.new_empty(cut.parts * len(rows), rows.shape[1])
        """``[rows, width]``, filled as chunks arrive."""
        for piece in cut.pieces(len(rows)) if cut.parts > 1 else []:
            chunk = rows[piece].contiguous()
            arrived = rows.new_empty(cut.parts * len(chunk), rows.shape[1])
            work = dist.all_gather_into_tensor(arrived, chunk, group=cut.group, async_op=True)
            self._coming.append((piece, arrived, work))

    def arriving(self) -> Iterator[tuple[slice, Tensor]]:
        """Wait for one chunk after another, and copy it to its rows."""
        parted = self._cut.parted(self.whole)
        while self._coming:
            piece, arrived, work = self._coming.pop(0)
            work.wait()
            parted[:, piece] = self._cut.parted(arrived)
            yield piece, arrived

    def times(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply arriving rows with a weight ``[n, width]``; return ``[rows, n]``."""
        if not self._coming:
            return F.linear(self.whole, weight, bias)
        product = self.whole.new_empty(len(self.whole), len(weight))
        for piece, chunk in self.arriving():
            self._cut.parted(product)[:, piece] = self._cut.parted(F.linear(chunk, weight, bias))
        return product


@dataclass
class _Link:
    """The state that the nodes of one call pass to each other in a backward."""

    cut: _Cut
    sums: _Sums | None = None
    gathered: _Gathered | None = None

    def take(self) -> Any:
        taken, self.sums, self.gathered = self.sums or self.gathered, None, None
        return taken


def _token(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor without memory that stands in the graph for values that nobody reads."""
    return like.new_zeros(()).expand(shape)


class _Enter(Function):
    """A node from this rank's rows to the rows that all ranks multiply. Backward waits for the sums of gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        return whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unread: Tensor) -> Any:
        return ctx.link.take().wait(), None, None


class _Columns(Function):
    """A node that returns a token of the product, and the rows for other maps. Backward starts to sum all gradients."""

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
    """A node that returns a token of the product. Backward multiplies its gradient as it arrives."""

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
    """A node that returns the summed product, held in ``made``. Backward starts to gather its gradient."""

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
    """A node that returns a token of the product. Backward computes gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, rows: Tensor, link: _Link) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.link = link
        return _token(rows, len(rows), len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (rows,), (gradient,), (weight, bias, *_) = ctx.saved_tensors, gradients, ctx.needs_input_grad
        if ctx.link.gathered is not None:  # nobody has waited for it, because the rows need no gradient
            list(ctx.link.take().arriving())
        return gradient.t() @ rows if weight else None, gradient.sum(0) if bias else None, None, None


class _Join(Function):
    """A node that returns the product, held in ``made``. Backward goes on to the multiplied rows and to the weight."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, weight: Tensor, made: list[Tensor]) -> Tensor:
        return made.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0], None


def _columns(rows: Tensor, weight: Tensor, bias: Tensor | None, cut: _Cut, taken: list[Tensor]) -> Tensor:
    """Multiply the rows of all ranks with this rank's columns. ``taken``: the last rows, here and gathered."""
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
    taken.clear()  # the columns before are done
    rows, link = _matrix(rows), _Link(cut)
    of_weight = _Weight.apply(weight, bias, rows.detach(), link)
    token = _Rows.apply(rows, weight.detach(), link)
    token = _Join.apply(token, of_weight, [_token(rows, *token.shape)])
    with torch.no_grad():  # after all tensors are saved, where a checkpoint's second run ends
        once = bias if dist.get_rank(cut.group) == 0 else None
        sums = _Sums(cut, rows, weight.t(), once).wait()
    return _Leave.apply(token, [sums], link)


def _matrix(rows: Tensor) -> Tensor:
    return (rows.to_local() if isinstance(rows, DTensor) else rows).flatten(0, -2)


class _Chunked(ParallelStyle):
    """A style whose linear maps multiply by a function; all maps of one plan share ``taken``."""

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
            " them have parts of the last but one, and all before it be 1, or leave tp_chunks out"
        )
    bias = None if linear.bias is None else linear.bias.to_local()
    product = multiply(rows, linear.weight.to_local(), bias, cut, taken)
    return product.view(*lead, -1, product.shape[1])


def chunked(plan: Mapping[str, ParallelStyle], chunks: int) -> dict[str, ParallelStyle]:
    """Return a plan whose linear maps cut rows into chunks; each chunk's collective overlaps with the next matmul.

    Consecutive linear maps of the same tensor gather its rows once, and sum its gradients once. Styles with other
    layouts of rows than torch's defaults or sharded rows stay unchanged.

    Args:
        chunks: most chunks; fewer if there are fewer rows.
    """
    styles, taken = dict(plan), list[Tensor]()
    for fqn, style in plan.items():
        if type(style) is ColwiseParallel and style.use_local_output and style.output_layouts == (Shard(-1),):
            styles[fqn] = _Chunked(style, style.input_layouts[0], chunks, _columns, taken)
        elif type(style) is RowwiseParallel and style.use_local_output and style.input_layouts == (Shard(-1),):
            styles[fqn] = _Chunked(style, style.output_layouts[0], chunks, _rows, taken)
    return styles


@dataclass(frozen=True)
class ChunkedTensorParallel(Transform):
    """Each chunk's tensor-parallel collectives overlap with the next chunk's matmuls."""

    name: ClassVar[str] = "tp_chunks"
    settings: ClassVar[str] = "a whole number of at least 2"
    before_tp: ClassVar[bool] = True
    chunks: Count
    """Most chunks of a microbatch's rows."""

    @override
    @classmethod
    def of(cls, setting: object) -> Self | None:
        return cls(int(str(setting))) if is_whole(setting, 2) else None

    @property
    @override
    def setting(self) -> int:
        return self.chunks

    @override
    def faults(self, module: OnPaper, layout: ModuleLayout, others: Mapping[str, Transform]) -> Iterator[str]:
        if layout.tp == 1:
            yield f"is {self.chunks} with tp=1: nothing is exchanged; leave it out, or set tp above 1"
        again = others.get(Recompute.name)
        if isinstance(again, Recompute) and again.keeps_matmuls:
            yield (
                "does not go with recompute='all but matmuls': sums of chunks take the place of what matmuls make;"
                " leave one of them out"
            )
        for other in ("compile", "float8"):
            if other in others:
                yield f"does not go with {other}, which would replace its linear maps; leave one of them out"

    @override
    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        for stage in stages:
            stage.tp_styles = partial(chunked, chunks=self.chunks)  # type: ignore[method-assign]
            stage.apply_tp = partial(_apply_tp, site.name, stage)  # type: ignore[method-assign]


register_transform(ChunkedTensorParallel)


def _apply_tp(name: str, stage: Adapter, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism and check that linear maps were cut."""
    del stage.apply_tp
    stage.apply_tp(mesh)
    if not any(getattr(vars(part).get("forward"), "func", None) is _forward for part in stage.modules()):
        raise ConfigError(
            f"HeteroStrategy: tp_chunks of '{name}': {type(stage).__name__}.apply_tp cuts none of its linear maps; give"
            " tp_styles(plan) to parallelize_module there, or leave tp_chunks out"
        )
