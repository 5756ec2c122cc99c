"""Deal the rows of instances to their context-parallel ranks, for any attention masks. Pure, deterministic.

All ranks of an instance get equally many rows. A sequence stays whole on one rank if its rows and pairs fit there,
because its keys then need not travel; a longer one is cut for the fewest ranks that hold it. Two chunks a rank, one
from either end, make its pairs even under a causal mask. Under other masks it is cut in blocks: each rank gets heavy
and light ones, and blocks change places until the ranks are even. (Cornstarch, arXiv:2503.11367, section 4.3, deals
blocks without regard to sequences, and ranks get unequal rows.)

Two sequences of 6 and 2 rows on two ranks, causal::

    row    0 1 2 3 4 5 | 6 7      pairs of rank 0: rows 0 1 4 5, 14 of 24 pairs; a chunk from either end of the first
    rank   0 0 1 1 0 0   1 1      pairs of rank 1: rows 2 3, and the second sequence whole

All instances of a step are dealt at once, in arrays. Only sequences in blocks are cut one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.layout.row_sharding import RowOrder
from hetero_strategy.layout.spec import ContextOrder
from hetero_strategy.mask import Slices
from hetero_strategy.plan.deal_instances import Instances
from hetero_strategy.plan.deal_instances import RankPieces as RankPieces
from hetero_strategy.plan.deal_instances import RowCost as RowCost
from hetero_strategy.plan.masks import ALIGNMENT, CAUSAL, AttentionRules, Masks
from hetero_strategy.plan.step_plan import Assignment, StepMetadata


class RankWork(NamedTuple):
    """The attention of each context-parallel rank of all instances, whose ranks have equally many rows."""

    squares: Float64[np.ndarray, "microbatches instances ranks"]
    """Squares that cost as much as this rank's pairs, times ranks: twice these pairs less the rows of its instance."""
    keys: Float64[np.ndarray, "microbatches instances ranks"]
    """Keys that the rank's rows see and that it receives from other ranks, in the mean of attentions."""


@dataclass(frozen=True)
class Dealing:
    """How the rows of a module's instances are dealt to their context-parallel ranks.

    Args:
        ranks: context-parallel ranks of an instance.
        order, cost: see :func:`deal_rows`.
        attention: rules by which rows see each other.
    """

    ranks: int
    order: ContextOrder = "auto"
    cost: RowCost = RowCost()  # noqa: RUF009 - immutable
    attention: AttentionRules = CAUSAL

    def orders(self, metadata: StepMetadata, assignments: Sequence[Assignment]) -> list[RowOrder]:
        """Return the order of the rows of all instances in each microbatch."""
        lengths, count, masks = self._sequences(metadata, assignments)
        if all((np.diff(a.offsets) <= 1).all() for a in assignments):  # alignment rows are dealt with the only sample
            lengths, count = np.diff(ragged.offsets(lengths)[ragged.offsets(count)]), np.ones_like(count)
        return self.split(lengths, count, masks, len(assignments))

    def work(self, metadata: StepMetadata, assignments: Sequence[Assignment]) -> RankWork:
        """Return the work of all ranks in each microbatch, whose assignments have an order."""
        lengths, count, masks = self._sequences(metadata, assignments)
        instances = self._instances(lengths, count, masks)
        totals = instances.totals
        orders = [a.order for a in assignments if a.order is not None]
        assert len(orders) == len(assignments), "rows were not dealt"
        ahead = ragged.offsets(totals)[np.arange(len(orders)) * (len(count) // len(orders))]
        start, place = (
            np.concatenate([column + rows for column, rows in zip(columns, ahead, strict=True)])
            for columns in ([order.start for order in orders], [order.place for order in orders])
        )
        instance = instances.of_rows(start)
        rank = (place - instances.first[instance]) // (totals // self.ranks)[instance]
        pairs, keys = instances.pairs_and_keys(RankPieces(start, rank))
        shape = len(orders), -1, self.ranks
        squares = 2.0 * self.ranks * pairs - totals[:, None]
        return RankWork(squares.reshape(shape), keys.reshape(shape))

    def _instances(self, lengths: np.ndarray, count: np.ndarray, masks: Callable[[], Masks] | None) -> Instances:
        instance = np.repeat(np.arange(len(count)), count)
        totals = np.bincount(instance, lengths, len(count)).astype(np.int64)
        return Instances(lengths, instance, totals, self.ranks, self.cost, masks)

    def _sequences(
        self, metadata: StepMetadata, assignments: Sequence[Assignment]
    ) -> tuple[np.ndarray, np.ndarray, Callable[[], Masks] | None]:
        """Return the rows of all sequences, those of alignment rows included, their number in each instance of each
        microbatch, and what makes their masks, None if they are causal.
        """
        padding = np.concatenate([a.padding for a in assignments])
        sizes = np.concatenate([np.diff(a.offsets) for a in assignments])
        count = sizes + (padding > 0)
        samples, lengths = np.full(int(count.sum()), ALIGNMENT), np.zeros(int(count.sum()), np.int64)
        places = ragged.expand(ragged.starts(count), sizes)
        samples[places] = np.concatenate([a.units for a in assignments])
        lengths[places] = np.concatenate([a.inner_rows for a in assignments])
        lengths[(np.cumsum(count) - 1)[padding > 0]] = padding[padding > 0]
        masks = None if self.attention.causal else partial(self.attention.masks, metadata, samples, lengths)
        return lengths, count, masks

    def split(
        self, lengths: np.ndarray, count: np.ndarray, masks: Callable[[], Masks] | None, parts: int
    ) -> list[RowOrder]:
        """Deal instances with ``count`` sequences each, and return the order of each of ``parts`` equal groups; masks
        as in :class:`Instances`.
        """
        dealt = self._instances(lengths, count, masks)
        start, rank = dealt.dealt(self.order)
        ends = np.searchsorted(start, ragged.offsets(dealt.totals))
        pieces, first = np.diff(ends), dealt.first
        order = RowOrder.of(dealt.totals, pieces, start - np.repeat(first, pieces), rank)
        orders, instances = list[RowOrder](), len(count) // parts
        for of_group in (slice(m * instances, (m + 1) * instances) for m in range(parts)):
            own, ahead = slice(ends[of_group.start], ends[of_group.stop]), first[of_group][:1]
            orders.append(RowOrder(order.first[of_group] - ahead, order.start[own] - ahead, order.place[own] - ahead))
        return orders


def deal_rows(
    lengths: Int64[np.ndarray, "sequences"],
    mask: Slices,
    ranks: int,
    cost: RowCost = RowCost(),  # noqa: B008 - immutable
    order: ContextOrder = "auto",
) -> RankPieces:
    """Return the pieces of an instance's rows for each of its ranks, equally many rows a rank.

    Args:
        lengths: rows of each sequence; ``ranks`` divides their sum.
        mask: what the rows see.
        cost: time of a rank, of which the busiest has the least.
        order: ``zigzag``: two chunks a rank, one from either end; ``blocks``: blocks of equal pairs, without regard to
            sequences; ``auto``: whole sequences first, or one of the other two if the busiest rank takes less time.
    """
    causal = len(mask.row) == np.count_nonzero(lengths) and bool(mask.high.all()) and not mask.low.any()
    return _alone(lengths, None if causal else mask, ranks, cost).dealt(order)


def pairs_and_keys(
    pieces: RankPieces, mask: Slices, ranks: int
) -> tuple[Float64[np.ndarray, "ranks"], Float64[np.ndarray, "ranks"]]:
    """Count the pairs of each rank's rows, and the keys that these see and the rank lacks."""
    one = _alone(np.array([mask.total]), mask, ranks, RowCost())
    pairs, keys = one.pairs_and_keys(pieces)
    return pairs[0], keys[0]


def _alone(lengths: np.ndarray, mask: Slices | None, ranks: int, cost: RowCost) -> Instances:
    """Return one instance; None: a causal mask."""
    masks = None if mask is None else lambda: Masks((mask,))
    return Instances(lengths, np.zeros(len(lengths), np.int64), np.array([int(lengths.sum())]), ranks, cost, masks)
