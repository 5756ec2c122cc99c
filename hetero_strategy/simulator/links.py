"""How long rows take between the ranks of two stages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64


@dataclass(frozen=True)
class Links:
    """Speed of the links between ranks (the alpha-beta model: latency + bytes / bandwidth).

    Args:
        latency: seconds until the first byte arrives.
        bandwidth: bytes per second into one rank.
    """

    latency: float = 0.0
    bandwidth: float = np.inf


def same_ranks(
    source: Int64[np.ndarray, "source_instances source_ranks"],
    target: Int64[np.ndarray, "target_instances target_ranks"],
) -> Bool[np.ndarray, "source_instances target_instances"]:
    """Whether two instances have exactly the same global ranks, so that rows between them take no time."""
    numbers: dict[bytes, int] = {}
    keys = [[numbers.setdefault(np.sort(row).tobytes(), len(numbers)) for row in grid] for grid in (source, target)]
    return np.equal.outer(*(np.array(k) for k in keys))
