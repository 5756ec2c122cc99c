"""Which ranks may ever exchange rows at an edge, whatever a step plan says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_strategy.layout.row_sharding import RowSharding


@dataclass(frozen=True)
class Meetings:
    """Sets of ranks of which each rank of one side may exchange rows with each rank of the other side.

    Args:
        one, other: global ranks, int64 ``[sets, ranks]``; a row of ``one`` meets the same row of ``other``.
    """

    one: np.ndarray
    other: np.ndarray

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
        """Number of pairs of different ranks; sets of one side have no rank in common."""
        pairs = 0
        for one, other in zip(self.one, self.other, strict=True):
            both = len(np.intersect1d(one, other))
            pairs += len(one) * len(other) - both - both * (both - 1) // 2
        return pairs


def first_hop(source: np.ndarray, target: np.ndarray, *, within: RowSharding | None) -> Meetings:
    """Meetings of two stages.

    Between stages of one module rows keep their instance and their part of it.
    Between modules any instance may send to any other: balancing decides that anew in every step.

    Args:
        source, target: global ranks of either stage, int64 ``[instances, ranks]``.
        within: how rows lie on an instance's ranks, if the two are stages of one module; None: of two.
    """
    if within is None:
        return Meetings(source.reshape(1, -1), target.reshape(1, -1))
    return Meetings(within.rank_sets(source), within.rank_sets(target))


def second_hop(receiver: np.ndarray) -> Meetings:
    """Meetings among the replicas of each instance that receives, int64 ``[instances, ranks]``."""
    return Meetings(receiver, receiver)
