"""Which ranks may ever exchange rows at an edge, whatever a step plan says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class Meetings:
    """Sets of global ranks: each in a row of ``sources`` may send to every other one in the same row of ``targets``.

    Sets of one side have no rank in common.
    """

    sources: Int64[np.ndarray, "sets ranks"]
    targets: Int64[np.ndarray, "sets other_ranks"]

    def __bool__(self) -> bool:
        """Whether any two different ranks meet."""
        return self.sources.shape[1] > 1 or self.targets.shape[1] > 1 or bool((self.sources != self.targets).any())

    @property
    def ranks(self) -> list[int]:
        """All of them, ascending."""
        return [int(rank) for rank in np.union1d(self.sources, self.targets)]

    @property
    def back(self) -> Meetings:
        """The other way round."""
        return Meetings(self.targets, self.sources)

    def peers(self, rank: int) -> set[int]:
        """To whom a rank may send."""
        return {int(other) for other in self.targets[(self.sources == rank).any(axis=1)].ravel()} - {rank}

    @property
    def count(self) -> int:
        """Number of pairs of a rank and one to which it may send."""
        both = sum(len(np.intersect1d(one, other)) for one, other in zip(self.sources, self.targets, strict=True))
        return self.sources.size * self.targets.shape[1] - both
