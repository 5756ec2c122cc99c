"""Context parallelism: each rank of an instance has a part of its rows, and attends to the keys of all rows.

Keys and values of a layer travel to the ranks whose rows see them, see :mod:`~hetero_strategy.model.key_exchange`. All
other operations of a language model treat rows separately.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.errors import ModelError
from hetero_strategy.model.head_exchange import ContextRanks, HeadExchange
from hetero_strategy.model.inputs import ModuleInputs, Packing, SequenceInputs
from hetero_strategy.model.seen_keys import DealtPieces, SeenKeys, Segments, causal_runs, mask_runs, seen_keys
from hetero_strategy.model.spread_labels import spread_labels

_C10D = torch.ops._c10d_functional


@dataclass(eq=False)
class Context(ContextRanks):
    """The keys that the rows of one rank see, and the exchange with the ranks that have the other rows.

    A segment is a run of the rank's rows that follow each other in one sequence. It sees the keys of its sequence up to
    its own last row; by a rule's mask rows may see later keys, too.
    """

    rank: int
    ranks: int
    keys: Mapping[int | None, SeenKeys]
    """Window of layers -> the keys that their rows see; None: layers without a window, or with one that is not here."""
    by_segments: bool
    """Whether no sequence has more than two segments, whose keys are laid out for kernels of packed sequences. More
    segments of one sequence would repeat its keys too often."""
    offsets: Tensor
    """int32 ``[segments + 1]``: first row of each segment, for the same kernels."""
    extent: Tensor
    """``[longest, 0]``, without data: most rows of a segment."""
    group: str = ""

    def keys_of(self, window: int | None) -> SeenKeys:
        """Return the keys that rows see in layers of a window."""
        keys = self.keys.get(window) or self.keys.get(None)
        if keys is None:
            raise ModelError(f"a layer has window={window}, and its model's attention knows windows {[*self.keys]}")
        return keys

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Begin to send rows ``[sum(sent), width]`` to the ranks in turn, and return those that arrive from them,
        ``[sum(received), width]``, which are there after :meth:`arrived`; a collective, without a gradient.
        """
        sending: Tensor = _C10D.all_to_all_single(rows.contiguous(), list(received), list(sent), self.group)
        return sending


def in_context(
    inputs: ModuleInputs,
    rank: int,
    dealt: Int64[np.ndarray, "ranks rows"],
    windows: Collection[int | None] = (),
    *,
    by_heads: bool = False,
    scores: bool = True,
) -> SequenceInputs:
    """Return the part of an instance's inputs of one context-parallel rank.

    Sequences keep their numbers and lengths, rows their labels, positions and columns.

    Args:
        dealt: rows of each rank, ascending.
        windows: windows of the layers, None for those without one; empty: not known.
        by_heads: whether ranks exchange rows for heads, and have contiguous parts, rather than send keys.
        scores: whether the rank has the head, which needs labels.

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
    own_rows = torch.from_numpy(own)
    part = replace(packing, positions=packing.positions[own_rows], sequence=packing.sequence[own_rows], alike=False)
    if by_heads:
        part = replace(part, masks={}, context=HeadExchange(rank, ranks, packing))
    else:
        part = _with_keys(part, packing, rank, dealt, windows or (None,))
    spread = spread_labels(inputs, rank, dealt) if scores else None
    return replace(inputs.cut(own_rows), packing=part, spread=spread)


def _with_keys(
    part: Packing, packing: Packing, rank: int, dealt: np.ndarray, windows: Collection[int | None]
) -> Packing:
    """Return the packing of a rank's rows with the keys that they see; ``packing``: that of all rows."""
    own, own_rows = dealt[rank], torch.from_numpy(dealt[rank])
    segments = _segments(packing, own)
    by_segments = int(segments.number.max(initial=0)) < 2
    keys, masks = dict[int | None, SeenKeys](), dict[int | None, Tensor]()
    pieces = DealtPieces.of(dealt)
    for window in packing.masks or windows:
        mask = packing.masks.get(window)
        runs = causal_runs(pieces, packing.lengths, window) if mask is None else mask_runs(pieces, mask.numpy())
        shape = segments if by_segments and mask is None else None
        keys[window], before = seen_keys(pieces, runs, rank, shape, window)
        if mask is not None:
            masks[window] = torch.from_numpy(before(mask[..., own_rows].numpy()).astype(np.int32))
    offsets = torch.from_numpy(ragged.offsets(segments.rows).astype(np.int32))
    extent = torch.empty(int(segments.rows.max(initial=0)), 0, dtype=torch.float32)
    context = Context(rank, len(dealt), keys, by_segments, offsets, extent)
    return replace(part, offsets=offsets, masks=masks, context=context)


def _segments(packing: Packing, own: Int64[np.ndarray, "rows"]) -> Segments:
    """Cut a rank's rows into segments."""
    sequence = packing.sequence.numpy()[own]
    start = np.flatnonzero((np.diff(own, prepend=-2) != 1) | (np.diff(sequence, prepend=-1) != 0))
    of = sequence[start]
    # Segments of a sequence follow each other.
    last = np.flatnonzero(np.diff(of, append=-1))
    number = ragged.within(np.diff(np.append(-1, last)))
    return Segments(own[start], np.diff(np.append(start, len(own))), ragged.starts(packing.lengths)[of], number)
