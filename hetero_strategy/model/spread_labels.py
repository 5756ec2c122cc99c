"""Spread the labelled rows of an instance over its context-parallel ranks before the head, so that all compute alike.

Labels lie unevenly on these ranks, such as at the end of a long sequence. Every rank knows all labels of its instance,
so the host knows the sizes of messages. Example of three ranks with 5, 0 and 2 labelled rows, a to g::

    rank 0 keeps a b c and sends d e to rank 1; rank 2 keeps f g
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.model.all_to_all import Sizes, all_to_all
from hetero_strategy.model.inputs import IGNORE, Movable, SequenceInputs, host_index


@dataclass(eq=False)
class SpreadLabels(Movable):
    """The n labels that one context-parallel rank of an instance scores, and the way of their rows."""

    own: np.ndarray
    """int64 ``[n, 2]``, on the host: sequence of each label that this rank scores, and its number there."""
    tokens: Tensor
    """int64 ``[n]``: these labels."""
    sequence: Tensor
    """int64 ``[n]``: their sequences."""
    leaving: np.ndarray
    """int64, on the host: sequences of the labels of this rank's rows, which it sends in this order."""
    sizes: tuple[Sizes, Sizes] | None
    """Rows sent to each rank, and received from it; None: each rank scores its own rows."""

    def silenced(self, bad: Bool[np.ndarray, "sequences"]) -> SpreadLabels:
        """Return the labels that are not of bad sequences; the ranks that score them stay."""
        scored, leaving = ~bad[self.own[:, 0]], ~bad[self.leaving]
        at, sizes = host_index(np.flatnonzero(scored), self.tokens), self.sizes
        if sizes is not None:
            sizes = _among(sizes[0], leaving), _among(sizes[1], scored)
        return SpreadLabels(self.own[scored], self.tokens[at], self.sequence[at], self.leaving[leaving], sizes)

    def scored(self, rows: Tensor, group: str) -> Tensor:
        """Return the rows that this rank scores ``[n, width]``, from its labelled rows; a collective if rows move.

        Args:
            group: name of the process group of the context-parallel ranks.
        """
        return rows if self.sizes is None else all_to_all(rows, *self.sizes, group)


def spread_labels(inputs: SequenceInputs, rank: int, dealt: Int64[np.ndarray, "ranks rows"]) -> SpreadLabels:
    """Spread the labels of an instance's inputs for one of its context-parallel ranks.

    Args:
        dealt: rows of each rank, ascending.
    """
    ranks, labels = len(dealt), inputs.labels.numpy()
    has_label, of_row = labels != IGNORE, inputs.packing.sequence.numpy()
    owner, place = np.nonzero(has_label[dealt])
    row = dealt[owner, place]
    sent = _spread(np.bincount(owner, minlength=ranks))
    scored = row[np.repeat(np.tile(np.arange(ranks), ranks), sent.reshape(-1)) == rank]
    sequence, before = of_row[scored], ragged.offsets(has_label)
    number = before[scored] - before[ragged.starts(inputs.packing.lengths)[sequence]]
    stay = int(np.trace(sent)) == len(row)
    return SpreadLabels(
        own=np.stack([sequence, number], axis=1),
        tokens=torch.from_numpy(labels[scored]),
        sequence=torch.from_numpy(sequence),
        leaving=of_row[row[owner == rank]],
        sizes=None if stay else (tuple(sent[rank].tolist()), tuple(sent[:, rank].tolist())),
    )


def _among(sizes: Sizes, chosen: Bool[np.ndarray, "rows"]) -> Sizes:
    """Return the numbers of chosen rows among runs of these sizes."""
    return tuple(np.diff(ragged.offsets(chosen)[ragged.offsets(np.array(sizes))]).tolist())


def _spread(counts: Int64[np.ndarray, "ranks"]) -> Int64[np.ndarray, "ranks ranks"]:
    """Return the rows that each rank sends to each: those above an equal share, if some rank has more than that.

    >>> _spread(np.array([5, 0, 2]))
    array([[3, 2, 0],
           [0, 0, 0],
           [0, 0, 2]])
    """
    ranks, total = len(counts), int(counts.sum())
    share = np.full(ranks, total // ranks)
    share[np.argsort(-counts, kind="stable")[: total % ranks]] += 1
    kept = np.minimum(counts, share)
    if counts.max() <= share.max():
        return np.diag(counts)
    more, less = ragged.offsets(counts - kept), ragged.offsets(share - kept)
    low, high = np.maximum.outer(more[:-1], less[:-1]), np.minimum.outer(more[1:], less[1:])
    return np.maximum(high - low, 0) + np.diag(kept)
