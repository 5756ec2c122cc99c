"""Context parallelism by heads: ranks that have parts of the rows exchange them for parts of the heads, and back.

Attention then sees all rows of an instance in their order, whatever its mask and kernel (DeepSpeed Ulysses,
arXiv:2309.14509). With 2 ranks, 4 rows and 2 heads, by row and head::

    rank 0 has 0a 0b 1a 1b    attends with 0a 1a 2a 3a    has again 0a 0b 1a 1b
    rank 1 has 2a 2b 3a 3b    attends with 0b 1b 2b 3b    has again 2a 2b 3a 3b

Each rank sends ``(ranks - 1) / ranks`` of its queries, keys, values and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_strategy.errors import ModelError
from hetero_strategy.model.all_to_all import all_to_all
from hetero_strategy.model.inputs import Movable, Packing

_C10D = torch.ops._c10d_functional


class ContextRanks(Movable):
    """A base of the ways in which context-parallel ranks exchange rows."""

    rank: int
    """Context-parallel coordinate of this rank."""
    ranks: int
    """Number of context-parallel ranks."""
    group: str
    """Name of the ranks' process group, once they run."""

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all ranks' rows ``[T, ...]``, rank by rank, from this rank's ``[T / ranks, ...]``; a collective,
        without a gradient.
        """
        return self.arrived(_C10D.all_gather_into_tensor(rows.contiguous(), self.ranks, self.group))

    def summed(self, numbers: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; a collective, without a gradient."""
        return self.arrived(_C10D.all_reduce(numbers, "sum", self.group))

    def arrived(self, sending: Tensor) -> Tensor:
        """Wait for rows that are on their way, and return them."""
        rows: Tensor = _C10D.wait_tensor(sending)
        return rows


@dataclass(eq=False)
class HeadExchange(ContextRanks):
    """The ranks that share the rows of an instance, in equal contiguous parts, and divide the heads of attention."""

    rank: int
    ranks: int
    whole: Packing
    """Packing of all rows; alignment rows of the last parts may follow."""
    group: str = ""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange own rows of all heads, ``[1, heads, rows, width]``, for all rows of own heads; a collective.

        Key heads are repeated until each rank has those of its query heads.
        """
        heads, key_heads = query.shape[1], key.shape[1]
        if heads % self.ranks:
            raise ModelError(f"cp_form='heads': {heads} heads on a rank cannot be divided over cp={self.ranks} ranks")
        times = lcm(key_heads, self.ranks) // key_heads
        if times > 1:
            key, value = (rows.repeat_interleave(times, dim=1) for rows in (key, value))
        shapes = [(rows.shape[1] // self.ranks, rows.shape[3]) for rows in (query, key, value)]
        by_rank = [rows[0].unflatten(0, (self.ranks, -1)).transpose(1, 2) for rows in (query, key, value)]
        sent = torch.cat([rows.flatten(2) for rows in by_rank], dim=2)
        arrived = self._exchanged(sent).flatten(0, 1)[: self.whole.rows]
        parts = arrived.split([count * width for count, width in shapes], dim=1)
        query, key, value = (
            part.unflatten(1, of).transpose(0, 1)[None] for part, of in zip(parts, shapes, strict=True)
        )
        return query, key, value

    def to_rows(self, out: Tensor, rows: int) -> Tensor:
        """Exchange all rows of own heads for this rank's ``rows`` of all heads; a collective."""
        by_row = out[0].transpose(0, 1).flatten(1)
        if padding := self.ranks * rows - self.whole.rows:
            by_row = F.pad(by_row, (0, 0, 0, padding))
        arrived = self._exchanged(by_row.unflatten(0, (self.ranks, rows))).transpose(0, 1)
        return arrived.unflatten(2, out.shape[1::2]).flatten(1, 2).transpose(0, 1)[None]

    def own(self, by_head: Tensor) -> Tensor:
        """Return the entries of this rank's heads, from ``[heads]``."""
        return by_head.unflatten(0, (self.ranks, -1))[self.rank]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Exchange parts ``[ranks, ...]``, one for each rank, for one from each rank."""
        each = (1,) * self.ranks
        return all_to_all(parts, each, each, self.group)
