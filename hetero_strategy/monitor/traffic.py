"""Bytes that ranks send each other at the edges of a step, from their step programs. Pure.

What they send is what the boundary's protocol asks for (see :mod:`hetero_strategy.boundary.route`): a row that a rank
has already does not move; a replica set that lacks a row gets it once, and its members pass their shares on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from hetero_strategy.schedule.compile import StepProgram


class Traffic(NamedTuple):
    """Bytes that move between ranks."""

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


def sent(
    rank: int,
    program: StepProgram,
    row_bytes: Sequence[int],
    ranks_per_node: int,
    edges: Collection[int] | None = None,
) -> Traffic:
    """Count the bytes that a rank sends in a step.

    Args:
        program: of the rank.
        row_bytes: of a row on each edge.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node.
        edges: numbers of those that are counted; None: all.
    """
    found = Traffic(0.0, 0.0)
    for one in program.transfers:
        for hop in (one.transfer.first, one.transfer.second):
            for peer, rows in hop.sends if edges is None or one.edge in edges else ():
                size = float(rows.size * row_bytes[one.edge])
                near = peer // ranks_per_node == rank // ranks_per_node
                found += Traffic(size, 0.0) if near else Traffic(0.0, size)
    return found
