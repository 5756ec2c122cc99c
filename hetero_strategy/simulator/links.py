"""How long rows take between the ranks of two stages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

Grid = Int64[np.ndarray, "_instances _ranks"]
"""Global ranks of every instance of a stage."""
Instances = Int64[np.ndarray, "*pairs"]
Between = Callable[[Instances, Instances], tuple[Float64[np.ndarray, "*pairs"], Float64[np.ndarray, "*pairs"]]]
"""Instances of a source and of a target, pair by pair -> seconds until the first byte arrives, and seconds per byte;
both 0 between the same ranks."""


@dataclass(frozen=True)
class Links:
    """Speed of the links between ranks (the alpha-beta model: latency + bytes / bandwidth).

    Args:
        latency: seconds until the first byte arrives.
        bandwidth: bytes per second into one rank, and out of one.
    """

    latency: float = 0.0
    bandwidth: float = np.inf

    def between(self, source: Grid, target: Grid) -> Between:
        """Links between the instances of two stages."""
        same = same_ranks(source, target)

        def of(first: Instances, second: Instances) -> tuple[np.ndarray, np.ndarray]:
            away = ~same(first, second)
            return self.latency * away, away / self.bandwidth

        return of


@dataclass(frozen=True, eq=False)
class Network:
    """Links that are faster within a node than between nodes.

    Args:
        within: for every node, links between its ranks.
        across: links between ranks of different nodes.
        ends: for every node, the rank after its last.
    """

    within: Sequence[Links]
    across: Links
    ends: Int64[np.ndarray, "nodes"]

    def nodes_of(self, ranks: Int64[np.ndarray, "*n"]) -> Int64[np.ndarray, "*n"]:
        """Number of the node that each rank is on."""
        return np.searchsorted(self.ends, ranks, side="right")

    def between(self, source: Grid, target: Grid) -> Between:
        """As :meth:`Links.between`; instances are on the nodes of their first ranks."""
        here, there = (self.nodes_of(grid[:, 0]) for grid in (source, target))
        latency = np.array([self.within[node].latency for node in here])
        bandwidth = np.array([self.within[node].bandwidth for node in here])
        same, across = same_ranks(source, target), self.across.between(source, target)

        def of(first: Instances, second: Instances) -> tuple[np.ndarray, np.ndarray]:
            near, away = here[first] == there[second], ~same(first, second)
            far = across(first, second)
            return np.where(near, latency[first] * away, far[0]), np.where(near, away / bandwidth[first], far[1])

        return of


def same_ranks(source: Grid, target: Grid) -> Callable[[Instances, Instances], Bool[np.ndarray, "*pairs"]]:
    """Whether two instances, pair by pair, have exactly the same global ranks, so that rows between them take no
    time.
    """
    first, second = np.sort(source, axis=1), np.sort(target, axis=1)
    if first.shape[1] != second.shape[1]:
        return lambda some, others: np.zeros(len(some), bool)
    return lambda some, others: (first[some] == second[others]).all(axis=1)
