"""Which ranks may ever exchange rows at an edge, whatever a step plan says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class Meetings:
    """Sets of global ranks: each rank in a row of ``one`` may exchange rows with each in the same row of ``other``."""

    one: Int64[np.ndarray, "sets ranks"]
    other: Int64[np.ndarray, "sets other_ranks"]

    def __bool__(self) -> bool:
        """Whether any two different ranks meet."""
        return self.one.shape[1] > 1 or self.other.shape[1] > 1 or bool((self.one != self.other).any())

    @property
    def ranks(self) -> list[int]:
        """All of them, ascending."""
        return [int(rank) for rank in np.union1d(self.one, self.other)]

    def partners(self, rank: int) -> set[int]:
        """Whom a rank meets."""
        met = [b[(a == rank).any(axis=1)].ravel() for a, b in ((self.one, self.other), (self.other, self.one))]
        return {int(other) for other in np.concatenate(met)} - {rank}

    @property
    def count(self) -> int:
        """Number of pairs of different ranks, counted in each set; sets of one side have no rank in common."""
        pairs = 0
        for one, other in zip(self.one, self.other, strict=True):
            both = len(np.intersect1d(one, other))
            pairs += len(one) * len(other) - both - both * (both - 1) // 2
        return pairs
