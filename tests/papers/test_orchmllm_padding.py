"""OrchMLLM's policies for modules that pad, against their algorithms written item by item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.papers.orchmllm_padding import conv_transformer, padded
from hetero_strategy.plan.balance import Cost, balance
from tests.plan.plain import batches, falling, heap_greedy

lists = st.lists(st.integers(1, 9) | st.integers(1, 2000), min_size=1, max_size=80)


def test_they_are_asked_for_by_name() -> None:
    lengths = np.array([3, 9, 5, 5, 1, 2])
    order = np.argsort(-lengths, kind="stable")
    for name, policy in (("padded", padded), ("conv_transformer", conv_transformer)):
        assert balance(lengths, 3, Cost(), policy=name)[order].tolist() == policy(lengths[order], 3).tolist()
    assert len(padded(np.zeros(0, np.int64), 3)) == len(conv_transformer(np.zeros(0, np.int64), 3)) == 0


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12))
def test_padded_is_algorithm_2(lengths: list[int], bins: int) -> None:
    lengths = sorted(lengths, reverse=True)
    where = padded(np.array(lengths), bins)
    made = [sorted(batch) for batch in batches(lengths, where.tolist(), bins) if batch]
    assert made == algorithm_2(lengths, bins)


@settings(deadline=None)
@given(lengths=lists, bins=st.integers(1, 12))
def test_conv_is_algorithm_5(lengths: list[int], bins: int) -> None:
    lengths = sorted(lengths, reverse=True)
    where = conv_transformer(np.array(lengths), bins)
    assert where.tolist() == algorithm_5(lengths, bins)


def algorithm_2(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """OrchMLLM algorithm 2; the search's right end from the longest item, and the batches of the bound found."""
    rows = sorted(int(x) for x in lengths)

    def least_batches(bound: int) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for row in rows:
            if (len(made[-1]) + 1) * row > bound:
                made.append([])
            made[-1].append(row)
        return made

    left, right = rows[-1], rows[-1] * (len(rows) // bins + 1)
    while left < right:
        middle = (left + right) // 2
        if len(least_batches(middle)) <= bins:
            right = middle
        else:
            left = middle + 1
    return least_batches(right)


def algorithm_5(lengths: Sequence[int], bins: int) -> list[int]:
    """OrchMLLM algorithm 5 with at most ``bins`` batches in its first phase."""
    order = falling(lengths)
    unpadded = batches(lengths, heap_greedy(lengths, order, bins), bins)
    bound = max(sum(batch) for batch in unpadded)
    where = [-1] * len(lengths)
    made, done, size = 0, 0, 0
    for item in order:
        if size and (size + 1) * lengths[item] > bound:
            if made + 1 >= bins:
                break
            made, size = made + 1, 0
        where[item] = made
        size += 1
        done += 1
    start = [sum(lengths[i] for i in order[:done] if where[i] == number) for number in range(bins)]
    rest = heap_greedy(lengths, order[done:], bins, start)
    return [first if first >= 0 else second for first, second in zip(where, rest, strict=True)]
