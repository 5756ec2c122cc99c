"""Bytes that items bring from where they are to where they are computed."""

from __future__ import annotations

import numpy as np


def volumes(size: np.ndarray, source: np.ndarray, batch: np.ndarray, sources: int, batches: int) -> np.ndarray:
    """Bytes of each source in each batch, float64 ``[sources, batches]`` (the cost matrix of OrchMLLM's algorithm 3).

    Args:
        size: bytes of each item, ``[n]``.
        source: of each item, int64 ``[n]``: the instance that read it; or, for rows that an encoder sends on, the
            instance they go to (direction does not change a volume). Nodes may stand for their instances where only
            totals matter.
        batch: balanced mini-batch of each item, int64 ``[n]``.
        sources: how many there are.
        batches: how many there are.
    """
    key = source * batches + batch
    return np.bincount(key, weights=size, minlength=sources * batches).reshape(sources, batches)


def bytes_between(volume: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Bytes that each source sends to other nodes, float64 ``[sources]``.

    Args:
        volume: float64 ``[sources, batches]``.
        source_node: node of each source, int64 ``[sources]``.
        slot_node: node of each slot, int64 ``[slots]``.
        slots: slot of each batch, int64 ``[batches]``.
    """
    away = source_node[:, None] != slot_node[slots][None, :]
    sent: np.ndarray = np.where(away, volume, 0.0).sum(axis=1)
    return sent


def item_bytes_between(
    size: np.ndarray, source: np.ndarray, slot: np.ndarray, source_node: np.ndarray, slot_node: np.ndarray
) -> np.ndarray:
    """:func:`bytes_between` of items (size, source and slot each ``[n]``), without a matrix; float64 ``[sources]``."""
    away = source_node[source] != slot_node[slot]
    return np.bincount(source[away], weights=size[away], minlength=len(source_node)).astype(np.float64)
