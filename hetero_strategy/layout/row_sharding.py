"""Distribute the rows of an instance over its ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from typing_extensions import override

from hetero_strategy import ragged


class Pieces(NamedTuple):
    """The runs of rows, cut so that every piece is in one part, in the order of the runs."""

    run: Int64[np.ndarray, "pieces"]
    """Number of the piece's run."""
    offset: Int64[np.ndarray, "pieces"]
    """First row of the piece in its run."""
    rows: Int64[np.ndarray, "pieces"]
    part: Int64[np.ndarray, "pieces"]
    local: Int64[np.ndarray, "pieces"]
    """First row of the piece among the rows of its part."""


@dataclass(frozen=True)
class RowSharding:
    """A split of an instance's rows into equal contiguous parts, the ``j``-th part on the ``j``-th set of its ranks.

    The sets are neighbouring ranks of an instance, and the ranks of a set are replicas: each has all rows of its part.
    With one part every rank has every row; with a part for each rank no two ranks have the same rows (sequence
    parallelism).

    A subclass such as :class:`ContextSharding` places rows differently: it overrides :meth:`cut` for runs and
    :meth:`local` for rows.

    Args:
        parts: number of parts; divides the ranks of an instance.
    """

    parts: int = 1

    @property
    def multiple(self) -> int:
        """Return a number that divides the rows of every instance."""
        return self.parts

    def rank_sets(self, instances: Int64[np.ndarray, "instances ranks"]) -> Int64[np.ndarray, "sets replicas"]:
        """Return the global ranks that have the same rows, from the ranks of each instance."""
        return instances.reshape(len(instances) * self.parts, -1)

    def part_of(self, place: int, ranks: int) -> int:
        """Return the part of the rank at position ``place`` among the ``ranks`` of its instance."""
        return place * self.parts // ranks

    def rows(self, total: int) -> int:
        """Return the rows of one part of an instance with ``total`` rows."""
        return total // self.parts

    def local(self, rows: Int64[np.ndarray, "rows"], total: int, part: int) -> Int64[np.ndarray, "local"]:
        """Return the members of ``rows`` that are in a part, as row numbers of the part."""
        if self.parts == 1:
            return rows
        size = total // self.parts
        return rows[(rows >= part * size) & (rows < (part + 1) * size)] - part * size

    def cut(
        self, start: Int64[np.ndarray, "runs"], rows: Int64[np.ndarray, "runs"], total: Int64[np.ndarray, "runs"]
    ) -> Pieces:
        """Cut runs of rows at the borders of parts.

        Args:
            start, rows: first row of each run among the rows of its instance, and number of rows.
            total: rows of the run's instance.
        """
        if self.parts == 1:
            zeros = np.zeros(len(rows), np.int64)
            return Pieces(np.arange(len(rows)), zeros, rows, zeros, start)
        size = np.maximum(total // self.parts, 1)
        first, last = start // size, (start + np.maximum(rows, 1) - 1) // size
        count = last - first + 1
        run = np.repeat(np.arange(len(rows)), count)
        part = ragged.expand(first, count)
        begin = part * size[run]
        low, high = np.maximum(start[run], begin), np.minimum((start + rows)[run], begin + size[run])
        return Pieces(run, low - start[run], high - low, part, low - begin)


@dataclass(frozen=True)
class ContextSharding(RowSharding):
    """A split of rows for context parallelism into ``2 * context`` equal chunks.

    Rank ``j`` has the ``j``-th chunk from the start and the ``j``-th from the end, in this order, which balances causal
    attention if one sequence fills the rows (Llama 3, arXiv:2407.21783, section 3.3.2). With more parts, each rank's
    rows are split again.

    Args:
        context: context-parallel ranks of an instance; divides ``parts``.
    """

    context: int = 1

    @property
    @override
    def multiple(self) -> int:
        return lcm(self.parts, 2 * self.context)

    def chunks(self, total: int, rank: int) -> tuple[slice, slice]:
        """Return the two chunks of an instance's rows that a context-parallel rank has."""
        size, other = total // (2 * self.context), 2 * self.context - 1 - rank
        return slice(rank * size, (rank + 1) * size), slice(other * size, (other + 1) * size)

    @override
    def local(self, rows: Int64[np.ndarray, "rows"], total: int, part: int) -> Int64[np.ndarray, "local"]:
        return super().local(self._turned(rows, np.full(len(rows), total)), total, part)

    @override
    def cut(
        self, start: Int64[np.ndarray, "runs"], rows: Int64[np.ndarray, "runs"], total: Int64[np.ndarray, "runs"]
    ) -> Pieces:
        one = RowSharding(2 * self.context).cut(start, rows, total)
        totals = total[one.run]
        two = super().cut(self._turned(start[one.run] + one.offset, totals), one.rows, totals)
        return two._replace(run=one.run[two.run], offset=one.offset[two.run] + two.offset)

    def _turned(self, rows: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Return row numbers in an order in which the two chunks of each rank are neighbours, rank by rank."""
        size = np.maximum(total // (2 * self.context), 1)
        chunk = rows // size
        place = np.where(chunk < self.context, 2 * chunk, 4 * self.context - 1 - 2 * chunk)
        return rows + (place - chunk) * size


def sharding(context: int = 1, parts: int = 1) -> RowSharding:
    """Return the sharding over ``context`` ranks, and of each rank's rows over ``parts``."""
    return RowSharding(parts) if context == 1 else ContextSharding(context * parts, context)


REPLICATED = RowSharding()
"""Every rank of an instance has all of its rows."""
