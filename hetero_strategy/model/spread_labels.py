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
from hetero_strategy.model.inputs import IGNORE, Movable, SequenceInputs


@dataclass(eq=False)
class SpreadLabels(Movable):
    """The labels of an instance, and those of them that one of its context-parallel ranks scores, n."""

    rank: int
    """Context-parallel coordinate of this rank."""
    ranks: int
    """Number of context-parallel ranks."""
    labels: np.ndarray
    """int64 ``[L, 4]``, on the host: rank that has the row, sequence, number among the labels of its sequence, and
    label; by rank, rows ascending."""
    own: np.ndarray
    """int64 ``[n, 2]``, on the host: sequence of each label that this rank scores, and its number there."""
    tokens: Tensor
    """int64 ``[n]``: these labels."""
    sequence: Tensor
    """int64 ``[n]``: their sequences."""
    sizes: tuple[Sizes, Sizes] | None
    """Rows sent to each rank, and received from it; None: each rank scores its own rows."""

    @staticmethod
    def of(rank: int, ranks: int, labels: Int64[np.ndarray, "labels 4"]) -> SpreadLabels:
        """Spread labels, of all ranks, for one rank; arguments are fields."""
        sent = _spread(np.bincount(labels[:, 0], minlength=ranks))
        scores = np.repeat(np.tile(np.arange(ranks), ranks), sent.reshape(-1))
        own = labels[scores == rank]
        stay = int(np.trace(sent)) == len(labels)
        sizes = None if stay else (tuple(sent[rank].tolist()), tuple(sent[:, rank].tolist()))
        sequence, tokens = (torch.from_numpy(own[:, column].copy()) for column in (1, 3))
        return SpreadLabels(rank, ranks, labels, own[:, 1:3], tokens, sequence, sizes)

    def silenced(self, bad: Bool[np.ndarray, "sequences"]) -> SpreadLabels:
        """Spread the labels that are not of bad sequences."""
        of_good = self.labels[~bad[self.labels[:, 1]]]
        return SpreadLabels.of(self.rank, self.ranks, of_good).to(self.tokens.device)

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
    has_label, sequence = inputs.labels.numpy() != IGNORE, inputs.packing.sequence.numpy()
    number, starts = ragged.offsets(has_label), ragged.starts(inputs.packing.lengths)
    owner, place = np.nonzero(has_label[dealt])
    row = dealt[owner, place]
    numbers = number[row] - number[starts[sequence[row]]]
    return SpreadLabels.of(
        rank, len(dealt), np.stack([owner, sequence[row], numbers, inputs.labels.numpy()[row]], axis=1)
    )


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
