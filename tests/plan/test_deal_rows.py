"""Which rows each context-parallel rank has: equally many, with even pairs, and few keys that travel."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.layout.row_sharding import RowOrder
from hetero_strategy.mask import BidirectionalItems, Causal, Full, ItemsAlone, MaskRule, Slices, Spans
from hetero_strategy.plan.deal_rows import Dealing, RankPieces, RowCost, deal_rows, pairs_and_keys
from hetero_strategy.plan.masks import AttentionRules
from hetero_strategy.plan.plan_step import ResolvedBalance, plan_step
from hetero_strategy.testing.plans import batch

RULES: tuple[MaskRule, ...] = (Causal(), Causal(5), BidirectionalItems(), ItemsAlone(), Full())
COSTS = RowCost(0, 1, 0), RowCost(100, 1, 0), RowCost(1, 1, 20)


def spans_of(lengths: np.ndarray, rng: np.random.Generator, share: float, mean: float) -> Spans:
    """Draw items that fill about a share of some sequences."""
    sequence, start, rows = list[int](), list[int](), list[int]()
    for number, length in enumerate(lengths.tolist()):
        at = 0
        while at < length:
            text, item = (max(1, int(rng.exponential(part * mean))) for part in ((1 - share) / share, 1.0))
            at += text
            if at + item > length:
                break
            sequence.append(number), start.append(at), rows.append(item)
            at += item
    columns = (np.array(column, np.int64) for column in (sequence, start, rows))
    return Spans(*columns, np.full(len(rows), "vision"))


def of_rank(pieces: RankPieces, total: int) -> np.ndarray:
    """Rank of each row."""
    return np.repeat(pieces.rank, np.diff(np.append(pieces.start, total)))


def seen(mask: Slices) -> np.ndarray:
    """Which keys each row sees, row by row, bool ``[T, T]``."""
    dense = np.zeros((mask.total, mask.total), bool)
    for row, rows, key, keys, low, high in zip(
        mask.row, mask.rows, mask.key, mask.keys, mask.low, mask.high, strict=True
    ):
        for d in range(rows):
            dense[row + d, key + d * low : key + keys - (rows - 1 - d) * high] = True
    return dense


@st.composite
def cases(draw: Any) -> tuple[np.ndarray, Slices, int]:
    ranks = draw(st.integers(2, 5))
    lengths = np.array([*draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)), 0], np.int64)
    lengths[-1] = ranks * max(1, -(-int(lengths.sum()) // ranks)) - lengths.sum()  # alignment rows
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    mask = draw(st.sampled_from(RULES)).slices(lengths, spans_of(lengths, rng, 0.5, 6.0))
    return lengths, mask, ranks


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(COSTS), st.sampled_from(["auto", "zigzag", "blocks"]))
def test_ranks_have_equally_many_rows_and_what_is_counted_is_so(
    case: tuple[np.ndarray, Slices, int], cost: RowCost, order: Any
) -> None:
    lengths, mask, ranks = case
    pieces = deal_rows(lengths, mask, ranks, cost, order)
    rank, dense = of_rank(pieces, mask.total), seen(mask)
    assert np.bincount(rank, minlength=ranks).tolist() == [mask.total // ranks] * ranks
    assert pieces.start[0] == 0 and (np.diff(pieces.start) > 0).all() and (np.diff(pieces.rank) != 0).all()
    pairs, keys = pairs_and_keys(pieces, mask, ranks)
    for r in range(ranks):
        mine = rank == r
        assert pairs[r] == dense[mine].sum()
        assert keys[r] == (dense[mine].any(axis=0) & ~mine).sum()
    if order == "auto":
        others = (pairs_and_keys(deal_rows(lengths, mask, ranks, cost, "zigzag"), mask, ranks), (pairs, keys))
        zigzag, own = (np.max(cost.of(mask.total / ranks, p, k)) for p, k in others)
        even = float(np.max(cost.of(mask.total / ranks, dense.sum() / ranks, 0.0)))
        parts = np.split(rank, np.cumsum(lengths)[:-1])
        longest_cut = max((len(part) for part in parts if len(set(part.tolist())) > 1), default=0)
        assert own <= max(zigzag, 1.05 * even) + 0.0101 * even + cost.pair * longest_cut  # chunks of whole rows


def test_short_sequences_stay_whole() -> None:
    lengths = np.array([30, 10, 20, 40, 20, 40, 30, 10])
    mask = Causal().slices(lengths, Spans.none())
    rank = of_rank(deal_rows(lengths, mask, 4, RowCost(100, 1, 10)), 200)
    assert all(len(set(own)) == 1 for own in np.split(rank, np.cumsum(lengths)[:-1]))


def test_a_long_sequence_is_cut_in_two_chunks_a_rank_over_the_fewest_ranks() -> None:
    lengths = np.array([80, *[4] * 20])
    mask = Causal().slices(lengths, Spans.none())
    pieces = deal_rows(lengths, mask, 4, RowCost(10000, 1, 10))
    long = pieces.start < 80
    assert len(set(pieces.rank[long])) == 2 and long.sum() == 3  # the two chunks in the middle are one piece


def test_masks_that_two_chunks_leave_uneven_are_cut_in_blocks() -> None:
    """Controls: two chunks a rank are uneven, and blocks dealt as one sequence send more keys of packed documents."""
    rng, ranks, cost = np.random.default_rng(0), 8, RowCost(0, 1, 0)
    ratios = {"auto": list[float](), "zigzag": list[float]()}
    for _ in range(10):
        mask = ItemsAlone().slices(np.array([16384]), spans_of(np.array([16384]), rng, 0.5, 1500.0))
        for order, found in ratios.items():
            pairs, _ = pairs_and_keys(deal_rows(np.array([16384]), mask, ranks, cost, order), mask, ranks)  # type: ignore[arg-type]
            found.append(pairs.max() / pairs.mean())
    assert max(ratios["auto"]) < 1.05 and np.mean(ratios["auto"]) < 1.01 < 1.2 < np.mean(ratios["zigzag"])


def test_packed_documents_are_even_and_few_of_their_keys_travel() -> None:
    rng, ranks, total, ratios = np.random.default_rng(1), 8, 65536, []
    for _ in range(40):
        lengths = np.clip(rng.lognormal(np.log(2000), 1.0, 200), 16, total).astype(np.int64)
        lengths = np.diff(np.minimum(np.append(0, np.cumsum(lengths)), total))
        mask = Causal().slices(lengths, Spans.none())
        both = []
        for order in ("auto", "blocks"):
            pairs, keys = pairs_and_keys(deal_rows(lengths, mask, ranks, RowCost(26700, 1, 625), order), mask, ranks)  # type: ignore[arg-type]
            both += [pairs.max() / pairs.mean(), keys.sum() / (total * (ranks - 1))]
        ratios.append(both)
    pairs, keys, _, by_blocks = np.mean(ratios, axis=0)
    assert pairs < 1.1 and keys < 0.35 < by_blocks


def orders(lengths: list[list[int]], order: Any = "auto", parts: int = 1) -> list[RowOrder]:
    """Deal instances with sequences of these lengths, causal, to two ranks each."""
    ends = np.array([n for each in lengths for n in each], np.int64)
    return Dealing(2, order).split(ends, np.array([len(each) for each in lengths]), None, parts)


@pytest.mark.parametrize("order", ["auto", "zigzag"])
@pytest.mark.parametrize("rules", [(Causal(),), (Causal(20), ItemsAlone())])
def test_work_of_a_plan_is_that_of_the_true_masks(rules: tuple[MaskRule, ...], order: Any) -> None:
    """Pairs and received keys of every rank, microbatch and instance, pair by pair; a window and items in turns."""
    metadata, ranks = batch(10, 3), 3
    attention = AttentionRules(rules, (1.0,) if len(rules) == 1 else (0.25, 0.75), ("vision",))
    dealing, shares = Dealing(ranks, order, RowCost(100, 1, 10), attention), attention.shares
    plan = plan_step(
        metadata, {"vision": 1, "llm": 2}, ("llm",), microbatches=2, row_multiple={"llm": 2 * ranks},
        balancing=ResolvedBalance(dealing={"llm": dealing}),
    )  # fmt: skip
    work, items = dealing.work(metadata, plan.assignments["llm"]), metadata.items["vision"]
    assert (work.keys > 0).any()
    for m, assignment in enumerate(plan.assignments["llm"]):
        for instance in range(2):
            lengths, total = assignment.inner_rows_of(instance), int(assignment.totals(inner=True)[instance])
            pairs, keys = np.zeros(ranks), np.zeros(ranks)
            for rule, share in zip(rules, shares, strict=True):
                dense, at = np.zeros((total, total), bool), 0
                for number, length in enumerate(lengths.tolist()):
                    units = assignment.of(instance)
                    own = items.sample == (units[number] if number < len(units) else -1)
                    columns = np.zeros(own.sum(), np.int64), items.start[own], items.edge_rows[own]
                    spans = Spans(*columns, np.full(own.sum(), "vision"))
                    dense[at : at + length, at : at + length] = seen(rule.slices(np.array([length]), spans))
                    at += length
                for rank, rows in enumerate(assignment.dealt(instance, ranks)):
                    pairs[rank] += share * dense[rows].sum()
                    keys[rank] += share * np.delete(dense[rows].any(axis=0), rows).sum()
            assert work.keys[m, instance] == pytest.approx(keys)
            assert work.squares[m, instance] == pytest.approx(ranks * (2 * pairs - total / ranks))


def test_microbatches_are_dealt_as_they_are_alone() -> None:
    lengths = [[30, 10], [2, 2], [], [40, 4, 4], [1, 1], [64]]
    both = orders(lengths[:3]) + orders(lengths[3:])
    for ours, alone in zip(orders(lengths, parts=2), both, strict=True):
        for name in ("first", "start", "place"):
            assert getattr(ours, name).tolist() == getattr(alone, name).tolist()


def test_a_long_sequence_of_another_instance_changes_no_order() -> None:
    lengths = np.arange(4, 21).tolist()
    ours, alone = orders([lengths, [1 << 20]])[0], orders([lengths])[0]
    assert ours.rows(0, sum(lengths)).tolist() == alone.rows(0, sum(lengths)).tolist()


def test_a_deal_is_made_of_every_instance() -> None:
    (order,) = orders([[8], [2, 2]])
    assert order.rows(0, 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5] and order.first.tolist() == [0, 8]
    assert sorted(order.rows(1, 4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["auto", "blocks", "zigzag"])
def test_an_instance_may_have_no_rows(order: Any) -> None:
    (dealt,) = orders([[], [0, 0], [4]], order)
    assert dealt.rows(0, 0).tolist() == dealt.rows(1, 0).tolist() == []
    assert dealt.first.tolist() == [0, 0, 0] and sorted(dealt.rows(2, 4).tolist()) == [0, 1, 2, 3]


@pytest.mark.perf
@pytest.mark.parametrize("kind", ["one", "documents", "items"])
def test_a_million_tokens_are_dealt_in_a_millisecond(kind: str) -> None:
    rng, total = np.random.default_rng(2), 1 << 20
    lengths = np.array([total])
    if kind == "documents":
        lengths = np.clip(rng.lognormal(np.log(2000), 1.0, 1000), 16, total).astype(np.int64)
        lengths = np.diff(np.minimum(np.append(0, np.cumsum(lengths)), total))
        lengths = lengths[lengths > 0]
    rule = ItemsAlone() if kind == "items" else Causal()
    mask = rule.slices(lengths, spans_of(lengths, rng, 0.5, 1500.0))
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        deal_rows(lengths, mask, 8, RowCost(26700, 1, 625))
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1e-3
