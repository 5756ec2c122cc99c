"""Context parallelism: each rank of an instance has a part of its rows, and attends to the keys of all rows.

Keys and values of a layer are gathered over the ranks, and their gradients are scattered back and summed, as in Llama 3
(arXiv:2407.21783, section 3.3.2). All other operations of a language model treat rows separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetero_strategy import ragged
from hetero_strategy.errors import ModelError
from hetero_strategy.model.head_exchange import HeadExchange
from hetero_strategy.model.inputs import IGNORE, ModuleInputs, Movable, Packing, SequenceInputs


@dataclass(eq=False)
class Context(Movable):
    """The keys that the rows of one rank see, among the T keys that are gathered rank by rank.

    A segment is a run of the rank's rows that follow each other in one sequence. It sees the keys of its sequence up to
    its own last row; by a rule's mask rows may see later keys, too.
    """

    rank: int
    """Context-parallel coordinate of this rank."""
    ranks: int
    """Number of context-parallel ranks."""
    keys: Tensor
    """int64 ``[K]``: the gathered keys that any row sees, in the order of rows."""
    ends: Tensor
    """int64 ``[rows]``: place after each row's own key among the K keys."""
    by_segments: bool
    """Whether no sequence has more than two segments, whose keys are laid out for kernels of packed sequences. More
    segments of one sequence would repeat its keys too often."""
    of_segments: Tensor
    """int64: the gathered keys that each segment sees, end to end; none unless :attr:`by_segments`."""
    turns: tuple[Tensor, Tensor]
    """int64: places in :attr:`of_segments` of the first segment of each sequence and of the second; no key is twice in
    a turn."""
    offsets: tuple[Tensor, Tensor]
    """int32 ``[segments + 1]``: first row and first key of each segment, for the same kernels."""
    extents: tuple[Tensor, Tensor]
    """``[longest, 0]``, without data: most rows and most keys of a segment."""
    group: str = ""
    """Name of the ranks' process group, once they run."""

    def seen(self, gathered: Tensor) -> Tensor:
        """Return the keys that rows see ``[K, ...]``, from gathered ones ``[T, ...]``."""
        seen: Tensor = _Seen.apply(gathered, self.keys)
        return seen

    def seen_by_segments(self, gathered: Tensor) -> Tensor:
        """Return the keys that segments see, end to end, from gathered ones ``[T, ...]``."""
        seen: Tensor = _Seen.apply(gathered, self.of_segments, *self.turns)
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


def in_context(
    inputs: ModuleInputs, rank: int, dealt: Int64[np.ndarray, "ranks rows"], *, by_heads: bool = False
) -> SequenceInputs:
    """Return the part of an instance's inputs of one context-parallel rank.

    Sequences keep their numbers and lengths, rows their labels, positions and columns.

    Args:
        dealt: rows of each rank, ascending.
        by_heads: whether ranks exchange rows for heads, and have contiguous parts, rather than gather keys.

    Raises:
        ModelError: the inputs are not plain token sequences.
    """
    ranks = len(dealt)
    if type(inputs) is not SequenceInputs:  # other fields may have one entry per row, too
        raise ModelError(
            f"cp={ranks} of a module that takes {type(inputs).__name__}: it is for SequenceInputs, whose columns hold"
            " more numbers of each row; set cp=1"
        )
    packing, own = inputs.packing, dealt[rank]
    sequence, labelled = packing.sequence.numpy(), np.flatnonzero(inputs.labels.numpy() != IGNORE)
    of, count = sequence[labelled], np.bincount(sequence[labelled], minlength=len(packing.lengths))
    own_labels = np.stack([of, np.arange(len(of)) - ragged.starts(count)[of]], axis=1)
    own_rows = torch.from_numpy(own)
    part = replace(packing, positions=packing.positions[own_rows], sequence=packing.sequence[own_rows], alike=False)
    if by_heads:
        part = replace(part, masks={}, context=HeadExchange(rank, ranks, packing))
    else:
        part = _with_keys(part, packing, rank, dealt)
    return replace(inputs.cut(own_rows), packing=part, own_labels=own_labels[np.isin(labelled, own)])


def _with_keys(part: Packing, packing: Packing, rank: int, dealt: Int64[np.ndarray, "ranks rows"]) -> Packing:
    """Return the packing of a rank's rows with the keys that they see; ``packing``: that of all rows."""
    ranks, own = dealt.shape[0], dealt[rank]
    place = np.empty(dealt.size, np.int64)
    place[dealt.reshape(-1)] = np.arange(dealt.size)
    sequence, starts = packing.sequence.numpy(), ragged.starts(packing.lengths)
    first = np.flatnonzero((np.diff(own, prepend=-2) != 1) | (np.diff(sequence[own], prepend=-1) != 0))
    of, rows = sequence[own[first]], np.diff(np.append(first, len(own)))
    # Segments of a sequence follow each other, and the last of them sees all keys that the others see.
    last = np.flatnonzero(np.diff(of, append=-1))
    number = ragged.within(np.diff(np.append(-1, last)))
    by_segments = int(number.max(initial=0)) < 2
    begins, lengths = starts[of], (own[first] + rows - starts[of]) * by_segments
    turn = np.repeat(number, lengths)
    runs, seen = np.flatnonzero(np.diff(sequence[own], prepend=-1)), [own + 1]
    seen += [mask[1].numpy().max(axis=0)[own] for mask in packing.masks.values()]
    counts = np.maximum.reduceat(np.max(seen, axis=0), runs) - begins[last]
    keys = torch.from_numpy(ragged.expand(begins[last], counts))
    shift = np.repeat(ragged.starts(counts) - begins[last], np.diff(np.append(runs, len(own))))
    moved = torch.from_numpy(shift.astype(np.int32))
    offsets = [torch.from_numpy(ragged.offsets(each).astype(np.int32)) for each in (rows, lengths)]
    extents = [torch.empty(int(each.max(initial=0)), 0, dtype=torch.float32) for each in (rows, lengths)]
    context = Context(
        rank,
        ranks,
        keys=torch.from_numpy(place)[keys],
        ends=torch.from_numpy(own + 1 + shift),
        by_segments=by_segments,
        of_segments=torch.from_numpy(place[ragged.expand(begins, lengths)]),
        turns=(torch.from_numpy(np.flatnonzero(turn == 0)), torch.from_numpy(np.flatnonzero(turn == 1))),
        offsets=(offsets[0], offsets[1]),
        extents=(extents[0], extents[1]),
    )
    masks = {window: mask[..., torch.from_numpy(own)] + moved for window, mask in packing.masks.items()}
    return replace(part, offsets=offsets[0], masks=masks, context=context)


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
    """A gather ``rows[index]``; its backward adds gradients turn by turn, no two to one row at once, so that sums have
    one order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, *turns: Tensor) -> Tensor:
        ctx.save_for_backward(index, *turns)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, *turns = ctx.saved_tensors
        total = grads[0].new_zeros(ctx.shape)
        if not turns:
            total.index_copy_(0, index, grads[0])
        for turn in turns:
            total.index_add_(0, index[turn], grads[0][turn])
        return total, None, *(None for _ in turns)
