"""Which instance, hence which node, computes which balanced mini-batch: bytes between nodes are the slow ones.

Post-balancing decides which items share an instance, not which instance that is. There are two ways to use this:

* ``place_items`` and, by integer program, ``place_by_program`` permute whole mini-batches over the instances (OrchMLLM
  section 5.2.2, algorithm 3). No load changes.
* ``balance_near_home`` balances so that only what a node has too much of leaves it. Batches change, loads hardly.

Pure numpy; only the integer program needs cvxpy.
"""
