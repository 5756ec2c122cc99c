"""What a model's blocks keep of the rows they compute, as functions of what a microbatch holds. Plain data.

``profiling.activations`` makes it from the real modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy import ragged
from hetero_strategy.model.inputs import Packing

FEATURES = (
    "row",
    "row of a packing that is moved",
    "row of its padded buckets",
    "pair of a bucket with a mask",
    "key of other context-parallel ranks that is seen",
    "key of all of them",
    "pair of a row and a key that it may see",
)
"""What activations grow with. The three after the first are those of attention in buckets: flash kernels take rows as
they lie. The last three are of context parallelism, where all but flash kernels take a mask of pairs.
"""
KEYS, ALL, PAIRS = range(4, 7)


def features(packing: Packing) -> Float64[np.ndarray, "features"]:
    """The :data:`FEATURES` of a packing."""
    moved, buckets = packing.gather is not None, packing.buckets
    padded = sum(b.count * b.length for b in buckets) if moved else 0
    pairs = sum(b.count * b.length**2 for b in buckets if b.mask is not None)
    return np.array([packing.rows, packing.rows if moved else 0, padded, pairs, 0, 0, 0], dtype=np.float64)


def features_in_context(
    lengths: Num[np.ndarray, "sequences"], cp: int, masked: bool
) -> Float64[np.ndarray, "features"]:
    """Those of the context-parallel rank that sees most keys.

    Args:
        masked: attention takes a mask, as it does but on CUDA in half precision.
    """
    total, starts = int(np.sum(lengths)), ragged.starts(np.asarray(lengths))
    own, begins = total / cp, np.arange(2 * cp) * total // (2 * cp)
    before = begins - starts[np.searchsorted(starts, begins, side="right") - 1]  # of each chunk's first sequence
    seen = own + float((before[:cp] + before[::-1][:cp]).max())
    found = np.zeros(len(FEATURES))
    found[[0, KEYS, ALL, PAIRS]] = own, seen - own, total, own / 2 * seen * masked
    return found


class HeadBytes(NamedTuple):
    """Bytes of the head: ``first`` per row up to the rows whose logits exist at once, ``more`` per row above."""

    first: float
    more: float

    def of(self, rows: np.ndarray, chunk: int) -> np.ndarray:
        """Bytes of so many labelled rows."""
        return self.first * np.minimum(rows, chunk) + self.more * np.maximum(rows - chunk, 0)


@dataclass(frozen=True)
class Head:
    """What the head and the loss of a language model need per labelled row, beside its blocks."""

    chunk: int
    """Rows whose logits exist at once."""
    kept: HeadBytes
    forward: HeadBytes
    backward: HeadBytes


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """Activations of every block of a module on one rank, in bytes per feature.

    What comes before the blocks is in the first, and what comes after them, but a language model's head, in the last.
    """

    kept: Float64[np.ndarray, "kinds blocks features"]
    """From forward until backward, without the block's input, by how tensor parallelism divides it: inside its columns;
    rows between them; inputs of columns, which every rank has whole."""
    later: float
    """More per row that a block keeps which is not the first of its stage: its input where it needs it, less what it
    has in common with those before it, such as tables of positions."""
    forward: Float64[np.ndarray, "blocks features"]
    """Most at a time in its forward, with what it keeps."""
    backward: Float64[np.ndarray, "blocks features"]
    """The same in its backward, with the gradient of its input, without that of its output."""
    halves: Float64[np.ndarray, "blocks features"]
    """Between the two halves of its backward."""
    stays: Float64[np.ndarray, "kinds blocks features"] | None = None
    """Of :attr:`kept` what stays on the device where the rest is in host memory; None: that is not known."""
    stays_later: float = 0.0
    """The same of :attr:`later`."""

    def on(self, tp: int, parts: int) -> BlockBytes:
        """On one of ``tp`` ranks, of which each has one of ``parts`` parts of the rows between columns."""
        left = np.array([1 / tp, 1 / parts, 1.0])
        kept = self.kept * left[:, None, None]
        before, after = (x[..., :KEYS].sum(axis=(0, 2)) for x in (self.kept, kept))
        less = np.divide(after, before, out=np.full(len(before), 1 / parts), where=before > 0)[:, None]
        stays = None if self.stays is None else self.stays * left[:, None, None]
        peaks = self.forward * less, self.backward * less, self.halves * less
        return BlockBytes(kept, self.later / parts, *peaks, stays, self.stays_later / parts)


@dataclass(frozen=True, eq=False)
class Activations:
    """Of one module."""

    blocks: Mapping[str, BlockBytes]
    """By what they run again: ``kept`` (nothing), ``all``, ``all but matmuls``."""
    row: float
    """Bytes of a row between blocks."""
    head: Head | None
    payload: float
    """Bytes of what the module is given besides rows, per row inside it."""
