"""Which instance, hence which node, computes which balanced mini-batch: bytes between nodes are the slow ones.

Post-balancing decides which items share an instance, not which instance that is. There are two ways to use this:

* :func:`place_batches` and :func:`place_items` permute whole mini-batches over the instances (OrchMLLM section 5.2.2,
  algorithm 3). No load changes.
* :func:`balance_near_home` balances so that only what a node has too much of leaves it. Batches change, loads hardly.

Pure numpy; only the integer program needs cvxpy.
"""

from __future__ import annotations

import numpy as np

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.nodes.near_home import balance_near_home
from hetero_strategy.plan.nodes.placement_ilp import PlacementSolution, solve_placement
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import item_bytes_between, volumes

__all__ = [
    "METHODS",
    "PlacementSolution",
    "balance_near_home",
    "item_bytes_between",
    "place_batches",
    "place_items",
    "solve_placement",
    "volumes",
]

METHODS = {
    "auto": "the fast method",
    "fast": "proposals of batches to nodes, then swaps for the sources that send most; milliseconds at any size",
    "ilp": "the integer program of OrchMLLM's algorithm 3 to optimality; seconds, for small sizes and comparison",
}


def place_batches(
    volume: np.ndarray,
    source_node: np.ndarray,
    slot_node: np.ndarray,
    *,
    method: str = "auto",
    classes: np.ndarray | None = None,
    time_limit: float = 60.0,
) -> np.ndarray:
    """Choose a slot (an instance) for each balanced mini-batch, such that sources send little to other nodes.

    The aim is the least maximum over sources of bytes to other nodes (OrchMLLM section 5.2.2). No method is worse in
    this than leaving batch ``b`` on slot ``b``; the fast one is no worse in the total either.

    Args:
        volume: bytes of each source in each batch, float64 ``[sources, batches]`` (:func:`volumes`).
        source_node: node of each source, int64 ``[sources]``.
        slot_node: node of each slot (of its first rank), int64 ``[batches]``: there are as many slots as batches.
        method: a name in :data:`METHODS`.
        classes: class (speed) of each slot and of the batch balanced for it, int64 ``[batches]``: a batch stays in its
            class. None: all are alike.
        time_limit: seconds that the integer program may take.

    Returns:
        The slot of each batch, a permutation, int64 ``[batches]``.

    Raises:
        ConfigError: the method is unknown, shapes do not fit, or the integer program is not solved in time.
    """
    if method not in METHODS:
        raise ConfigError(f"data.nodes: method {method!r} is not one of {', '.join(METHODS)}")
    volume = np.asarray(volume, dtype=np.float64)
    if volume.shape != (len(source_node), len(slot_node)):
        raise ConfigError(
            f"data.nodes: volume has shape {volume.shape}, but there are {len(source_node)} sources and "
            f"{len(slot_node)} slots; give one row per source and one column per batch, as many batches as slots"
        )
    if method != "ilp":
        source, batch = np.nonzero(volume)
        return place_items(volume[source, batch], source, batch, source_node, slot_node, classes=classes)
    solution = solve_placement(volume, source_node, slot_node, classes=classes, time_limit=time_limit)
    if not solution.optimal or solution.slots is None:
        # What a search holds when it is stopped depends on the processor's speed, and ranks would disagree (law 7).
        raise ConfigError(
            f"data.nodes: method 'ilp' did not solve {len(slot_node)} batches on {len(np.unique(slot_node))} nodes in "
            f"{time_limit:g} s; use method 'fast', or a larger time_limit"
        )
    return solution.slots
