"""How the rows of a module lie on the ranks of one instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from hetero_strategy import ragged


class Pieces(NamedTuple):
    """Runs of rows, cut so that every piece lies in one part, in the order of the runs."""

    run: Int64[np.ndarray, "pieces"]
    """Number of the run."""
    offset: Int64[np.ndarray, "pieces"]
    """First row of the piece in its run."""
    rows: Int64[np.ndarray, "pieces"]
    part: Int64[np.ndarray, "pieces"]
    local: Int64[np.ndarray, "pieces"]
    """First row of the piece among the rows of its part."""


@dataclass(frozen=True)
class RowSharding:
    """An instance's rows as equal contiguous parts, the ``j``-th of them on the ``j``-th set of its ranks.

    The sets are neighbouring ranks of an instance, and the ranks of a set are replicas: each has all rows of its part.
    With one part every rank has every row; with a part for each rank no two have the same (sequence parallelism).

    Another way to lay rows out, such as the two chunks that each rank of context parallelism has, is a subclass that
    says where a row is: :meth:`cut` for runs, :meth:`local` for rows.

    Args:
        parts: divides the ranks of an instance, and its rows.
    """

    parts: int = 1

    def rank_sets(self, instances: Int64[np.ndarray, "instances ranks"]) -> Int64[np.ndarray, "sets replicas"]:
        """Return the global ranks that have the same rows, from those of each instance."""
        return instances.reshape(len(instances) * self.parts, -1)

    def part_of(self, place: int, ranks: int) -> int:
        """Return the part that the rank at a place among the ``ranks`` of its instance has."""
        return place * self.parts // ranks

    def rows(self, total: int) -> int:
        """Return the rows of one part of an instance with so many rows."""
        return total // self.parts

    def local(self, rows: Int64[np.ndarray, "rows"], total: int, part: int) -> Int64[np.ndarray, "local"]:
        """Return those of an instance's rows that lie in a part, as row numbers of the part."""
        if self.parts == 1:
            return rows
        size = total // self.parts
        return rows[(rows >= part * size) & (rows < (part + 1) * size)] - part * size

    def cut(
        self, start: Int64[np.ndarray, "runs"], rows: Int64[np.ndarray, "runs"], total: Int64[np.ndarray, "runs"]
    ) -> Pieces:
        """Cut runs of rows where another part begins.

        Args:
            start, rows: first row of each run among the rows of its instance, and how many.
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


REPLICATED = RowSharding()
"""Every rank of an instance has all of its rows."""
