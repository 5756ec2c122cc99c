"""Context parallelism: each rank of an instance has two chunks of its rows, and attends to the keys of all rows.

Keys and values of a layer are gathered over the ranks, and their gradients are scattered back and summed, as in Llama 3
(arXiv:2407.21783, section 3.3.2). All other operations of a language model treat rows separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetero_strategy import ragged
from hetero_strategy.errors import ModelError
from hetero_strategy.layout.row_sharding import ContextSharding
from hetero_strategy.model.inputs import IGNORE, ModuleInputs, Movable, SequenceInputs


@dataclass(eq=False)
class Context(Movable):
    """The keys that the rows of one rank see: K of the T keys that are gathered rank by rank, some of them twice.

    A segment is the part of one sequence in a chunk of the rank's rows. It sees the keys of its sequence up to its own
    last row.
    """

    rank: int
    """Context-parallel coordinate of this rank."""
    ranks: int
    """Number of context-parallel ranks."""
    keys: tuple[Tensor, Tensor]
    """int64: the gathered keys that the segments of each chunk see, end to end; none twice for one chunk."""
    positions: Tensor
    """int64 ``[K]``: position of each key in its sequence."""
    sequence: Tensor
    """int64 ``[K]``: number of each key's sequence."""
    offsets: tuple[Tensor, Tensor]
    """int32 ``[segments + 1]``: first row and first key of each segment, for kernels of packed sequences."""
    extents: tuple[Tensor, Tensor]
    """``[longest, 0]``, without data: most rows and most keys of a segment."""
    group: str = ""
    """Name of the ranks' process group, once they run."""

    def seen(self, gathered: Tensor) -> Tensor:
        """Return the keys that segments see, end to end, from gathered ones ``[T, ...]``."""
        seen: Tensor = _Seen.apply(gathered, *self.keys)
        return seen

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all ranks' rows ``[T, ...]``, rank by rank, from this rank's ``[T / ranks, ...]``; a collective."""
        gathered: Tensor = _Gathered.apply(rows, self.ranks, self.group)
        return gathered

    def summed(self, numbers: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; a collective, without a gradient."""
        c10d = torch.ops._c10d_functional
        total: Tensor = c10d.wait_tensor(c10d.all_reduce(numbers, "sum", self.group))
        return total


def in_context(inputs: ModuleInputs, rank: int, ranks: int) -> SequenceInputs:
    """Return the part of an instance's inputs of one of ``ranks`` context-parallel ranks, see :class:`ContextSharding`.

    Sequences keep their numbers and lengths, rows their labels, positions and columns.

    Raises:
        ModelError: the inputs are not plain token sequences, or their rows do not divide.
    """
    if type(inputs) is not SequenceInputs:  # other fields may have one entry per row, too
        raise ModelError(
            f"cp={ranks} of a module that takes {type(inputs).__name__}: it is for SequenceInputs, whose columns hold"
            " more numbers of each row; set cp=1"
        )
    packing, lie = inputs.packing, ContextSharding(ranks, ranks)
    total = packing.rows
    if left := total % lie.multiple:
        raise ModelError(f"cp={ranks} of {total} rows leaves {left}: give a multiple of {lie.multiple}")
    by_rank = [np.r_[lie.chunks(total, each)] for each in range(ranks)]
    gathered = np.concatenate(by_rank)
    place = np.empty_like(gathered)
    place[gathered] = np.arange(total)
    sequence = packing.sequence.numpy()
    starts = ragged.starts(packing.lengths)
    rows, lengths, keys = [], [], []
    for chunk in lie.chunks(total, rank):
        of, count = np.unique(sequence[chunk], return_counts=True)
        length = chunk.start + np.cumsum(count) - starts[of]
        keys.append(ragged.expand(starts[of], length))
        rows.append(count)
        lengths.append(length)
    segments = [np.concatenate(of) for of in (rows, lengths)]
    own_rows, seen = torch.from_numpy(by_rank[rank]), torch.from_numpy(np.concatenate(keys))
    offsets = [torch.from_numpy(ragged.offsets(each).astype(np.int32)) for each in segments]
    extents = [torch.empty(int(each.max(initial=0)), 0, dtype=torch.float32) for each in segments]
    context = Context(
        rank,
        ranks,
        keys=(torch.from_numpy(place[keys[0]]), torch.from_numpy(place[keys[1]])),
        positions=packing.positions[seen],
        sequence=packing.sequence[seen],
        offsets=(offsets[0], offsets[1]),
        extents=(extents[0], extents[1]),
    )
    labelled = np.flatnonzero(inputs.labels.numpy() != IGNORE)
    of, count = sequence[labelled], np.bincount(sequence[labelled], minlength=len(starts))
    own_labels = np.stack([of, np.arange(len(of)) - ragged.starts(count)[of]], axis=1)
    return replace(
        inputs.cut(own_rows),
        packing=replace(
            packing,
            positions=packing.positions[own_rows],
            sequence=packing.sequence[own_rows],
            offsets=offsets[0],
            alike=False,
            buckets=(),
            gather=None,
            restore=None,
            context=context,
        ),
        own_labels=own_labels[np.isin(labelled, by_rank[rank])],
    )


class _Gathered(torch.autograd.Function):
    """A gather of all ranks' rows; gradients are summed on the rows' own rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.all_gather_into_tensor(rows.contiguous(), ranks, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        c10d = torch.ops._c10d_functional
        summed = c10d.reduce_scatter_tensor(grads[0].contiguous(), "sum", ctx.ranks, ctx.group)
        return c10d.wait_tensor(summed), None, None


class _Seen(torch.autograd.Function):
    """A gather ``rows[near + far]``; its backward never adds two gradients to a row at once, so sums have one order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, near: Tensor, far: Tensor) -> Tensor:
        ctx.save_for_backward(near, far)
        ctx.shape = rows.shape
        return rows.index_select(0, torch.cat([near, far]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        near, far = ctx.saved_tensors
        one, two = grads[0].split([len(near), len(far)])
        total = one.new_zeros(ctx.shape).index_copy_(0, near, one)
        return total.index_add_(0, far, two), None, None
