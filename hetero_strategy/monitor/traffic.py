"""Rows that move between ranks at an edge, within and between nodes, counted from a step plan alone. Pure.

Counted is what the boundary's protocol sends (see :mod:`hetero_strategy.boundary.route`): a row that a rank has already
does not move; a replica set that lacks a row gets it once, and its members pass their shares on. The sum is
:func:`hetero_strategy.boundary.route.least_rows`. Unlike routes this counts for all ranks at once without writing out
rows, so that it works for thousands of instances.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_strategy.boundary.route import Side
from hetero_strategy.plan.step_plan import EdgeBlocks

_MOST_LINKS = 1 << 22
"""Most pairs of ranks looked at together, which bounds memory."""


class Traffic(NamedTuple):
    """Rows or bytes that move between ranks."""

    within: float
    """Between ranks of one node."""
    between: float
    """Between ranks of different nodes."""

    def __add__(self, other: object) -> Traffic:
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.within + other.within, self.between + other.between)

    def times(self, factor: float) -> Traffic:
        return Traffic(self.within * factor, self.between * factor)


def traffic(blocks: EdgeBlocks, source: Side, target: Side, ranks_per_node: int, *, backward: bool = False) -> Traffic:
    """Count the rows that one direction of an edge moves between ranks in one microbatch of each side.

    The sum is exact. Its parts are exact up to one row per group of rows with the same ranks on both sides, where
    replicas share the sending and the rows do not divide by their number.

    Args:
        blocks: runs of rows that cross the edge.
        source, target: how rows lie on the ranks of either side.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node.
        backward: whether to count gradient rows on their way back.
    """
    if not len(blocks.rows):
        return Traffic(0.0, 0.0)
    one = source.cut(blocks.source_start, blocks.rows, blocks.source_instance)
    two = target.cut(blocks.target_start[one.run] + one.offset, one.rows, blocks.target_instance[one.run])
    run = one.run[two.run]
    here = blocks.source_instance[run] * source.parts + one.part[two.run]
    there = blocks.target_instance[run] * target.parts + two.part
    keys = len(target.rank_sets)
    pairs, number = np.unique(here * keys + there, return_inverse=True)
    count = np.bincount(number, weights=two.rows, minlength=len(pairs))
    from_key, to_key = np.divmod(pairs, keys)
    turn = from_key // source.parts + to_key // target.parts
    holders, needers = source.rank_sets[from_key], target.rank_sets[to_key]
    if backward:
        holders, needers = needers, holders
    total = Traffic(0.0, 0.0)
    step = max(1, _MOST_LINKS // (needers.shape[1] * max(needers.shape[1], holders.shape[1])))
    for i in range(0, len(count), step):
        part = slice(i, i + step)
        within, between = _links(holders[part], needers[part], turn[part], ranks_per_node)
        total += Traffic(float(within @ count[part]), float(between @ count[part]))
    return total


def _links(
    holders: np.ndarray, needers: np.ndarray, turn: np.ndarray, ranks_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Moves of one row from each set of holders to its needers, within and between nodes, float64 ``[n]`` each."""
    has = (needers[:, :, None] == holders[:, None, :]).any(axis=2)
    having, size = has.sum(axis=1), needers.shape[1]
    node = needers // ranks_per_node
    away = node[:, :, None] != node[:, None, :]  # [n, sender, receiver]
    # Some needers have the row: each of them sends an equal share to every one that lacks it.
    shares = has[:, :, None] & ~has[:, None, :]
    # None has it: needer k gets its share of the rows from a holder and passes it on to all others.
    none = having == 0
    shares[none] = ~np.eye(size, dtype=bool)
    weight = 1.0 / np.where(none, size, having)
    between = (shares & away).sum(axis=(1, 2)) * weight
    within = (shares & ~away).sum(axis=(1, 2)) * weight
    if none.any():
        giver = (np.arange(size)[None, :] + turn[none, None]) % holders.shape[1]
        entry = np.take_along_axis(holders[none], giver, axis=1) // ranks_per_node != node[none]
        between[none] += entry.mean(axis=1)
        within[none] += 1.0 - entry.mean(axis=1)
    return within, between
