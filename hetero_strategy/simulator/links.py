"""How long rows take between the ranks of two stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

Grid = Int64[np.ndarray, "instances ranks"]
"""Global ranks of every instance of a stage."""
Between = Float64[np.ndarray, "source_instances target_instances"]


@dataclass(frozen=True)
class Links:
    """Speed of the links between ranks (the alpha-beta model: latency + bytes / bandwidth).

    Args:
        latency: seconds until the first byte arrives.
        bandwidth: bytes per second into one rank.
    """

    latency: float = 0.0
    bandwidth: float = np.inf

    def between(self, source: Grid, target: Grid) -> tuple[Between, Between]:
        """Seconds until the first byte arrives, and seconds per byte; both 0 between the same ranks."""
        away = ~same_ranks(source, target)
        return self.latency * away, away / self.bandwidth


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

    def between(self, source: Grid, target: Grid) -> tuple[Between, Between]:
        """As :meth:`Links.between`; instances are on the nodes of their first ranks."""
        nodes = [self.nodes_of(grid[:, 0]) for grid in (source, target)]
        here, away = np.equal.outer(*nodes), ~same_ranks(source, target)
        near = [self.within[node] for node in nodes[0]]
        latency, bandwidth = (np.array(n)[:, None] for n in zip(*((n.latency, n.bandwidth) for n in near), strict=True))
        far = self.across.between(source, target)
        return np.where(here, latency * away, far[0]), np.where(here, away / bandwidth, far[1])


def same_ranks(
    source: Int64[np.ndarray, "source_instances source_ranks"],
    target: Int64[np.ndarray, "target_instances target_ranks"],
) -> Bool[np.ndarray, "source_instances target_instances"]:
    """Whether two instances have exactly the same global ranks, so that rows between them take no time."""
    numbers: dict[bytes, int] = {}
    keys = [[numbers.setdefault(np.sort(row).tobytes(), len(numbers)) for row in grid] for grid in (source, target)]
    return np.equal.outer(*(np.array(k) for k in keys))
