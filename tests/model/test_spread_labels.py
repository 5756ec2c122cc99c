"""Labelled rows that context-parallel ranks share out among each other before the head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.model import spread_labels
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import IGNORE, Packing, SequenceInputs
from hetero_strategy.model.spread_labels import SpreadLabels

LABELLED = {
    "at the end of one sequence": ([48], lambda row: row >= 41),
    "in one row": ([20, 28], lambda row: row == 20),
    "nowhere": ([48], lambda row: row < 0),
    "in most rows of short sequences": ([5, 0, 9, 2, 32], lambda row: row % 3 > 0),
    "in all rows": ([24, 24], lambda row: row >= 0),
}


def inputs_of(labelled: str) -> SequenceInputs:
    """Rows whose tokens are their numbers, and labels 100 above."""
    lengths, has_label = LABELLED[labelled]
    ids = torch.arange(48)
    return SequenceInputs(ids, torch.where(has_label(ids), ids + 100, IGNORE), Packing.of(np.array(lengths)))


def spread_of(inputs: SequenceInputs) -> SpreadLabels:
    assert inputs.spread is not None
    return inputs.spread


def exchanged(parts: list[SequenceInputs]) -> list[torch.Tensor]:
    """Tokens of the rows that each rank scores: what an all-to-all makes of sizes."""
    for own in parts:
        assert own.labelled is not None
    rows = [own.ids[own.labelled] for own in parts if own.labelled is not None]
    sizes = [spread_of(own).sizes for own in parts]
    if None in sizes:
        assert sizes == [None] * len(parts)
        return rows
    sent = [one.split(list(way[0])) for one, way in zip(rows, sizes, strict=True) if way is not None]
    for rank, way in enumerate(sizes):
        assert way is not None and [len(pieces[rank]) for pieces in sent] == list(way[1])
    return [torch.cat([pieces[rank] for pieces in sent]) for rank in range(len(parts))]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("order", ["two chunks", "any rows"])
@pytest.mark.parametrize("labelled", LABELLED)
def test_each_rank_scores_as_many_rows_with_their_labels(labelled: str, order: str, ranks: int) -> None:
    whole = inputs_of(labelled)
    drawn = np.random.default_rng(ranks).permutation(48).reshape(ranks, -1)
    dealt = two_chunks(48, ranks) if order == "two chunks" else np.sort(drawn, axis=1)
    parts = [in_context(whole, rank, dealt) for rank in range(ranks)]
    check(whole, parts)
    total = len(whole.labels[whole.labels != IGNORE])
    assert max(len(spread_of(own).tokens) for own in parts) == -(-total // ranks)
    for bad in ([True], [False, True, True]):
        sequences = np.array(bad[: len(whole.packing.lengths)])
        check(whole.silenced(sequences), [own.silenced(sequences) for own in parts])


def check(whole: SequenceInputs, parts: list[SequenceInputs]) -> None:
    """Each label is scored once, by the rank to which its row goes."""
    assert whole.labelled is not None
    of = whole.packing.sequence[whole.labelled].tolist()
    numbers = {row: [s, of[:at].count(s)] for at, (row, s) in enumerate(zip(whole.labelled.tolist(), of, strict=True))}
    scored = exchanged(parts)
    assert sum(map(len, scored)) == len(numbers)
    for rows, own in zip(scored, parts, strict=True):
        spread = spread_of(own)
        assert spread.tokens.tolist() == (rows + 100).tolist()
        assert spread.own.tolist() == [numbers[row] for row in rows.tolist()]
        assert spread.sequence.tolist() == spread.own[:, 0].tolist()


@pytest.mark.parametrize("counts", [[9, 0, 0], [0, 0, 1], [4, 4, 1], [5, 5, 3], [0, 0], [3, 8, 2, 2], [7]])
def test_no_more_rows_travel_than_need_to(counts: list[int]) -> None:
    """Ranks send what they have above their share, and nothing where that makes no rank's share smaller."""
    given = np.array(counts)
    sent = spread_labels._spread(given)
    most = -(-sum(counts) // len(counts))
    assert (sent.sum(1) == given).all() and sent.sum(0).max() == most
    moved = int(sent.sum() - np.trace(sent))
    if max(counts) == most:
        assert moved == 0
    else:
        few = sorted(np.maximum(given - sum(counts) // len(counts), 0).tolist(), reverse=True)
        assert moved == sum(few) - np.minimum(few, 1)[: sum(counts) % len(counts)].sum()
        assert np.ptp(sent.sum(0)) <= 1
