"""Distribute the rows of an instance over its ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

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

    With context parallelism a step plan puts the rows in an order before they are split, see :class:`RowOrder`.

    Args:
        parts: number of parts; divides the ranks of an instance.
        context: context-parallel ranks of an instance; divides ``parts``.
    """

    parts: int = 1
    context: int = 1

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


@dataclass(frozen=True, eq=False)
class RowOrder:
    """An order of the rows of each instance, in which its context-parallel ranks have equal contiguous parts.

    A *place* numbers a row in this order. Rows of a rank keep their order, so places of one part ascend with its rows.
    For example, an instance of 8 rows gives two ranks the rows 0, 1, 6, 7 and 2 to 5, in three pieces::

        start 0 2 6    place 0 4 2    rows by place 0 1 6 7 | 2 3 4 5
    """

    first: Int64[np.ndarray, "instances"]
    """First row of each instance among the rows of all."""
    start: Int64[np.ndarray, "pieces"]
    """First row of each piece among the rows of all instances, ascending."""
    place: Int64[np.ndarray, "pieces"]
    """Place of this row among the rows of all instances."""

    @classmethod
    def of(
        cls,
        totals: Int64[np.ndarray, "instances"],
        pieces: Int64[np.ndarray, "instances"],
        start: Int64[np.ndarray, "pieces"],
        rank: Int64[np.ndarray, "pieces"],
    ) -> RowOrder:
        """Build the order from the ranks of pieces.

        Args:
            totals, pieces: rows and number of pieces of each instance.
            start: first row of each piece in its instance, ascending.
            rank: context-parallel rank that has the piece.
        """
        first = ragged.starts(totals)
        instance = np.repeat(np.arange(len(totals)), pieces)
        start = start + first[instance]
        by_rank = ragged.argsort_small(instance * (int(rank.max(initial=0)) + 1) + rank)
        place = np.empty_like(start)
        place[by_rank] = ragged.starts(np.diff(np.append(start, totals.sum()))[by_rank])
        return cls(first, start, place)

    def among(self, instances: Int64[np.ndarray, "some"] | None) -> RowOrder:
        """Return the order of some instances, which are numbered by their places here; None: all."""
        return self if instances is None else replace(self, first=self.first[instances])

    def places(self, instance: int, rows: Int64[np.ndarray, "rows"]) -> Int64[np.ndarray, "rows"]:
        """Return the places of an instance's rows."""
        first = self.first[instance]
        piece = np.searchsorted(self.start, rows + first, side="right") - 1
        return rows + (self.place - self.start)[piece]

    def rows(self, instance: int, total: int) -> Int64[np.ndarray, "total"]:
        """Return the ``total`` rows of an instance by place."""
        rows = np.empty(total, np.int64)
        rows[self.places(instance, np.arange(total))] = np.arange(total)
        return rows

    def cut(
        self,
        instance: Int64[np.ndarray, "runs"],
        start: Int64[np.ndarray, "runs"],
        rows: Int64[np.ndarray, "runs"],
    ) -> Pieces:
        """Cut runs of rows at the ends of pieces; :attr:`Pieces.local` are places in the instance, parts are all 0."""
        begin = start + self.first[instance]
        first = np.searchsorted(self.start, begin, side="right") - 1
        last = np.searchsorted(self.start, begin + np.maximum(rows, 1) - 1, side="right") - 1
        run, piece = np.repeat(np.arange(len(rows)), last - first + 1), ragged.expand(first, last - first + 1)
        low = np.maximum(begin[run], self.start[piece])
        end = np.append(self.start[1:], np.iinfo(np.int64).max)[piece]
        high = np.minimum((begin + rows)[run], end)
        place = low + (self.place - self.start)[piece] - self.first[instance][run]
        return Pieces(run, low - begin[run], high - low, np.zeros_like(run), place)


def two_chunks(total: int, ranks: int) -> Int64[np.ndarray, "ranks rows"]:
    """Return the rows of each context-parallel rank: the rank's chunk from the start and its chunk from the end.

    This makes causal attention even if one sequence fills the rows (Llama 3, arXiv:2407.21783, section 3.3.2).
    """
    each, number = total // ranks, np.arange(ranks)[:, None]
    near = np.arange(each // 2) + number * (each // 2)
    far = np.arange(each - each // 2) + total - (number + 1) * (each - each // 2)
    return np.concatenate([near, far], axis=1)


def sharding(context: int = 1, parts: int = 1) -> RowSharding:
    """Return the sharding over ``context`` ranks, and of each rank's rows over ``parts``."""
    return RowSharding(context * parts, context)


REPLICATED = RowSharding()
"""Every rank of an instance has all of its rows."""
