"""How long rows take between the ranks of two stages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Links:
    """Speed of the links between ranks (the alpha-beta model: latency + bytes / bandwidth).

    Args:
        latency: seconds until the first byte arrives, between ranks of one node.
        bandwidth: bytes per second into one rank, from ranks of its own node.
        inter_latency: seconds between nodes; None: as within one.
        inter_bandwidth: bytes per second into one rank from other nodes; None: as within one.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node; None: all ranks are on one.

    Rows between two instances with exactly the same ranks (colocated modules, the turn of a V-shaped pipeline) take no
    time.
    """

    latency: float = 0.0
    bandwidth: float = np.inf
    inter_latency: float | None = None
    inter_bandwidth: float | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        latencies = (self.latency, self.inter_latency or 0.0)
        bandwidths = (self.bandwidth, 1.0 if self.inter_bandwidth is None else self.inter_bandwidth)
        if min(latencies) < 0 or min(bandwidths) <= 0 or (self.ranks_per_node or 1) < 1:
            raise ValueError(f"latencies must be >= 0, bandwidths and ranks_per_node > 0: {self}")

    def between(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latency (seconds) and seconds per byte, each float64 ``[source instances, target instances]``.

        Args:
            source, target: global ranks, int64 ``[instances, ranks per instance]``.
        """
        away = np.zeros((len(source), len(target)), dtype=bool)
        if self.ranks_per_node is not None:
            a, b = source // self.ranks_per_node, target // self.ranks_per_node
            low = np.minimum.outer(a.min(axis=1), b.min(axis=1))
            high = np.maximum.outer(a.max(axis=1), b.max(axis=1))
            away = low != high
        inter_latency = self.latency if self.inter_latency is None else self.inter_latency
        inter_bandwidth = self.bandwidth if self.inter_bandwidth is None else self.inter_bandwidth
        latency = np.where(away, inter_latency, self.latency)
        per_byte = np.where(away, 1.0 / inter_bandwidth, 1.0 / self.bandwidth)
        same = same_ranks(source, target)
        latency[same] = per_byte[same] = 0.0
        return latency, per_byte


def same_ranks(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Bool ``[source instances, target instances]``: whether two instances have exactly the same ranks."""
    numbers: dict[bytes, int] = {}
    keys = [[numbers.setdefault(np.sort(row).tobytes(), len(numbers)) for row in grid] for grid in (source, target)]
    return np.equal.outer(*(np.array(k) for k in keys))
