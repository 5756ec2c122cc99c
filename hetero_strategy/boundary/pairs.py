"""Which ranks may ever exchange rows at an edge, whatever a step plan says. Pure."""

from __future__ import annotations

from collections.abc import Iterable
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


def components(ways: Iterable[Meetings]) -> list[tuple[int, ...]]:
    """List the smallest rank sets, each of more than one, such that no rank meets one of another set; ascending.

    Two stages of two ranks each, which pass rows on in pairs:
    sources ``[[0], [1]]``, targets ``[[2], [3]]`` -> ``[(0, 2), (1, 3)]``.
    """
    joined: dict[int, set[int]] = {}
    for way in ways:
        for sources, targets in zip(way.sources.tolist(), way.targets.tolist(), strict=True):
            ranks = {*sources, *targets}
            for rank in [*ranks]:
                ranks |= joined.get(rank, set())
            joined.update(dict.fromkeys(ranks, ranks))
    sets = {id(ranks): ranks for ranks in joined.values()}
    return sorted(tuple(sorted(ranks)) for ranks in sets.values() if len(ranks) > 1)
