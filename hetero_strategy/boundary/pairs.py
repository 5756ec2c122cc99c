"""Which ranks may ever exchange rows at an edge, whatever a step plan says. Pure."""

from __future__ import annotations

import numpy as np

Pairs = frozenset[tuple[int, int]]
"""(smaller rank, larger rank)."""


def first_hop(source: np.ndarray, target: np.ndarray, *, same_module: bool, row_sharded: bool) -> Pairs:
    """Pairs between two stages.

    Between stages of one module rows keep their instance and, where each rank has rows of its own, their place in it.
    Between modules any instance may send to any other: balancing decides that anew in every step.

    Args:
        source, target: global ranks of either stage, int64 ``[instances, ranks]``.
        same_module: the two are stages of one module.
        row_sharded: ranks of an instance have rows of their own.
    """
    if not same_module:
        return _pairs(source.reshape(1, -1), target.reshape(1, -1))
    if row_sharded or source.shape[1] == 1:
        return _pairs(source.reshape(-1, 1), target.reshape(-1, 1))
    return _pairs(source, target)


def second_hop(receiver: np.ndarray) -> Pairs:
    """Pairs among the replicas of each instance that receives, int64 ``[instances, ranks]``."""
    return _pairs(receiver, receiver)


def _pairs(one: np.ndarray, other: np.ndarray) -> Pairs:
    """Every rank of a row with every rank of the same row of the other side."""
    found = np.stack(np.broadcast_arrays(one[:, :, None], other[:, None, :])).reshape(2, -1)
    found = np.unique(np.sort(found[:, found[0] != found[1]], axis=0), axis=1)
    return frozenset(zip(*found.tolist(), strict=True))
