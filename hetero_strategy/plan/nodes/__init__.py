"""Which instance, hence which node, computes which balanced mini-batch: bytes between nodes are the slow ones.

Post-balancing decides which items share an instance, not which instance that is. There are two ways to use this:

* :func:`place_items` and, by integer program, :func:`place_by_program` permute whole mini-batches over the instances
  (OrchMLLM section 5.2.2, algorithm 3). No load changes.
* :func:`balance_near_home` balances so that only what a node has too much of leaves it. Batches change, loads hardly.

Pure numpy; only the integer program needs cvxpy.
"""

from __future__ import annotations

from hetero_strategy.plan.nodes.near_home import balance_near_home
from hetero_strategy.plan.nodes.placement_ilp import PlacementSolution, place_by_program, solve_placement
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import volumes

__all__ = [
    "PlacementSolution",
    "balance_near_home",
    "place_by_program",
    "place_items",
    "solve_placement",
    "volumes",
]
