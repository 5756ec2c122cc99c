"""Rows that move between ranks at an edge, within and between nodes, counted from a step plan alone. Pure.

Counted is what the boundary's protocol sends (see :mod:`hetero_strategy.boundary.route`): a row that a rank has already
does not move; a replica set that lacks a row gets it once, and its members pass their shares on. The sum is
:func:`hetero_strategy.boundary.route.least_rows`. Unlike routes this counts for all ranks at once without writing out
rows, so that it works for thousands of instances.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_strategy.plan.step_plan import EdgeBlocks
from hetero_strategy.schedule.action import Stage

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


def traffic(
    blocks: EdgeBlocks, totals: tuple[np.ndarray, np.ndarray], source: Stage, target: Stage, ranks_per_node: int
) -> tuple[Traffic, Traffic]:
    """Count the rows that an edge moves between ranks, and the gradient rows that it moves back.

    The sums are exact. Their parts are exact up to one row per microbatch and group of rows with the same ranks on both
    sides, where replicas share the sending and the rows do not divide by their number.

    Args:
        blocks: runs of rows that cross the edge, in any number of microbatches.
        totals: rows that the run's instance has in the run's microbatch, on either side, int64 ``[runs]`` each.
        source, target: how rows lie on the ranks of either side.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node.
    """
    one = source.row_sharding.cut(blocks.source_start, blocks.rows, totals[0])
    two = target.row_sharding.cut(blocks.target_start[one.run] + one.offset, one.rows, totals[1][one.run])
    run, (parts, target_parts) = one.run[two.run], (stage.row_sharding.parts for stage in (source, target))
    here = blocks.source_instance[run] * parts + one.part[two.run]
    there = blocks.target_instance[run] * target_parts + two.part
    sets, target_sets = (stage.row_sharding.rank_sets(stage.grid) for stage in (source, target))
    pairs, number = np.unique(here * len(target_sets) + there, return_inverse=True)
    count = np.bincount(number, weights=two.rows, minlength=len(pairs))
    from_key, to_key = np.divmod(pairs, len(target_sets))
    turn = from_key // parts + to_key // target_parts
    forward, back = Traffic(0.0, 0.0), Traffic(0.0, 0.0)
    step = max(1, _MOST_LINKS // max(sets.shape[1], target_sets.shape[1]) ** 2)
    for i in range(0, len(count), step):
        part = slice(i, i + step)
        holders, needers = sets[from_key[part]], target_sets[to_key[part]]
        forward += _links(holders, needers, turn[part], ranks_per_node, count[part])
        back += _links(needers, holders, turn[part], ranks_per_node, count[part])
    return forward, back


def _links(
    holders: np.ndarray, needers: np.ndarray, turn: np.ndarray, ranks_per_node: int, count: np.ndarray
) -> Traffic:
    """Moves of so many rows from each set of holders to its needers."""
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
    return Traffic(float(within @ count), float(between @ count))
