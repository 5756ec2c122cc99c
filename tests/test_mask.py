"""Masks as slices, against masks written pair by pair, which share no code with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.mask import (
    BidirectionalItems,
    Causal,
    Full,
    ItemsAlone,
    Prefix,
    Slices,
    Spans,
    Words,
    rule_faults,
)
from hetero_strategy.testing.drawn_masks import DrawnMask


@pytest.mark.parametrize("part", range(5))
def test_slices_are_the_mask(part: int) -> None:
    """500 draws: the pairs of each row, the pairs and the keys between any edges; two slices never have one pair."""
    for seed in range(part, 500, 5):
        draw = DrawnMask(seed)
        rule, wanted = draw.case(seed // 5)
        slices = rule.slices(draw.lengths, draw.spans)
        total = len(wanted)
        low, high = slices.intervals()
        keys = np.arange(total)[:, None, None]
        seen = ((low <= keys) & (keys < high)).sum(1).T
        assert seen.tolist() == wanted.astype(int).tolist(), (seed, rule)
        edges = np.sort(draw.rng.integers(0, total + 1, 5))
        edges = np.append(edges, total) if seed % 2 else np.concatenate([[0], edges])
        between = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        assert slices.work(edges).tolist() == [int(wanted[a:b].sum()) for a, b in between]
        blocks, runs = slices.block_keys(edges)
        for block, (first, last) in enumerate(between):
            of_any = np.flatnonzero(np.diff(wanted[first:last].any(0).astype(int), prepend=0, append=0)).reshape(-1, 2)
            assert runs[blocks == block].tolist() == of_any.tolist()


def test_tables_grow_with_sequences_and_items_alone() -> None:
    """A million rows, an image in every 10,000."""
    items = Spans(*(np.arange(100) * 0, np.arange(100) * 10_000, np.full(100, 4_000), np.full(100, "vision")))
    for rule in (Causal(99), BidirectionalItems(window=99), ItemsAlone()):
        slices = rule.slices(np.array([1_000_000]), items)
        assert len(slices.row) <= 3 * (2 * 100 + 1)
        edges = np.arange(0, 1_000_001, 128)
        assert slices.work(np.append(edges, 1_000_000)).sum() == slices.work(np.array([0, 1_000_000]))[0]


def test_no_rows_have_no_slices() -> None:
    for lengths in (np.zeros(0, np.int64), np.zeros(2, np.int64)):
        for rule in (Causal(), Causal(3), Full(), ItemsAlone(), Words(lambda *_: np.zeros(0, np.int64))):
            slices = rule.slices(lengths, Spans.none())
            assert len(slices.row) == slices.total == 0 and slices.intervals()[0].shape == (1, 0)
            assert slices.work(np.array([0, 0])).tolist() == [0]
            assert [len(found) for found in slices.block_keys(np.array([0, 0]))] == [0, 0]


def test_faults_are_named() -> None:
    def items(*lines: tuple[int, int, int]) -> Spans:
        return Spans(*np.array(lines).T, np.full(len(lines), "vision"))

    lengths = np.array([4, 8])
    for window in (0, -1):
        with pytest.raises(ModelError, match=f"a window of {window} rows sees nothing"):
            Causal(window)
    with pytest.raises(ModelError, match="a window of 0 rows"):
        BidirectionalItems(window=0)
    with pytest.raises(
        DataError, match="vision: an item of 3 rows from row 2 leaves its sequence 0 of 4 rows: correct"
    ):
        ItemsAlone().slices(lengths, items((1, 0, 2), (0, 2, 3)))
    with pytest.raises(
        DataError, match="vision: an item of 3 rows from row 1 of sequence 1 overlaps the next: correct"
    ):
        BidirectionalItems().slices(lengths, items((1, 3, 2), (1, 1, 3)))
    with pytest.raises(DataError, match=r"attention='prefix' needs the rows before the first predicted .* index again"):
        Prefix().slices(lengths, items((1, 0, 2)))
    with pytest.raises(
        DataError, match=r"words of 12 rows are int64 \[12\] .* at most 62 .* int64 \[12\], the least -9"
    ):
        Words(lambda *_: np.full(12, 1 << 63, np.uint64).view(np.int64)).slices(lengths, Spans.none())
    with pytest.raises(DataError, match=r"these are int64 \[3\], the least 1"):
        Words(lambda *_: np.ones(3, np.int64)).slices(lengths, Spans.none())
    with pytest.raises(DataError, match="a mask of 6 rows has no slice of row 4"):
        Slices.of(np.array([0, 5]), np.array([4, 6]), 0, np.array([1, 1]), False, False, 6)
    with pytest.raises(DataError, match="row 0 begins a slice in which a row sees no key"):
        Slices.of(np.array([0]), np.array([4]), 0, np.array([3]), False, True, 4)
    assert [*rule_faults("llm", ItemsAlone(("visoin",)), ["audio", "vision"])] == [
        "llm: its attention is of items of 'visoin', but modules with files and an edge to it are audio, vision"
    ]
    without_comma: Any = "vision"
    assert not [*rule_faults("llm", ItemsAlone(without_comma), ["vision"])]
    assert not [*rule_faults("llm", ItemsAlone(("vision",)), ["vision"]), *rule_faults("llm", Causal(), [])]
