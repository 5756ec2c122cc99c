"""Splits against every possible split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.layout.split_layers import split, split_into


def every_split(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(int(n) for n in np.diff([0, *cuts, layers]))


def stage_costs(work: Sequence[float], counts: Sequence[int]) -> list[float]:
    ends = [0, *itertools.accumulate(counts)]
    return [sum(work[a:b]) for a, b in itertools.pairwise(ends)]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_split_is_the_best_of_all(data: st.DataObject) -> None:
    stages, first = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    work = data.draw(st.lists(st.integers(0, 30).map(float), min_size=stages + first - 1, max_size=10))
    made = split(work, stages, first)
    assert len(made) == stages and sum(made) == len(work) and min(made) >= 1 and made[0] >= first
    if not sum(work):
        return  # nothing to compare: even in layers, see below
    keys = {
        s: (max(c := stage_costs(work, s)), sum(x * x for x in c))
        for s in every_split(len(work), stages)
        if s[0] >= first
    }
    least = min(keys.values())
    assert keys[made] == pytest.approx(least, rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1e-6, 1e3), min_size=5, max_size=9), st.integers(1, 5))
def test_largest_stage_of_any_float_costs(work: list[float], stages: int) -> None:
    least = min(max(stage_costs(work, s)) for s in every_split(len(work), stages))
    assert max(stage_costs(work, split(work, stages))) == pytest.approx(least, rel=1e-6)


def test_literal_splits() -> None:
    assert split([1.0] * 8, 4) == (2, 2, 2, 2)
    assert split([0.1] * 7, 3) == (2, 2, 3)  # earlier stages hold more activations
    assert split([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == (1, 5)
    assert split([0.0] * 6, 3) == (2, 2, 2)
    assert split([1.0, 1.0, 1.0, 1.0, 4.0], 3) == (2, 2, 1)  # not (3, 1, 1), whose largest stage is as small


def test_times_scale_splits_do_not() -> None:
    work = np.random.default_rng(0).uniform(0.5, 2.0, 48)
    assert split(work, 7) == split(work * 1e-9, 7) == split(work * 1e9, 7)


def test_impossible_splits() -> None:
    with pytest.raises(LayoutError, match="3 layers cannot be split into 4 stages: use 3 stages"):
        split([1.0] * 3, 4)
    with pytest.raises(LayoutError, match=r"4 layers, of which the first 3 are one stage's, .* 3 stages: use 2 stages"):
        split([1.0] * 4, 3, first=3)
    with pytest.raises(LayoutError, match="-1 stages"):
        split([1.0], -1)
    for wrong in ([1.0, -1.0], [1.0, np.nan]):
        with pytest.raises(ValueError, match="finite"):
            split(wrong, 1)


def test_consecutive_stages_are_parts_of_what_a_rank_has() -> None:
    """Six equal layers on two ranks are three and three, also where each rank cuts its own in two."""
    assert split_into(Pipeline(2, 2, "loop"), [1.0] * 6) == (1, 1, 2, 2)
    assert split_into(Pipeline(2, 2, "consecutive"), [1.0] * 6) == (1, 2, 1, 2)
    assert split_into(Pipeline(2, 2, "consecutive"), [1.0] * 6, 2) == (2, 1, 1, 2)
    assert split_into(Pipeline(2, 2, "consecutive"), [1.0, 1.0, 1.0, 1.0, 6.0, 4.0]) == (2, 2, 1, 1)
    with pytest.raises(LayoutError, match="1 layers cannot be split into 2 stages"):
        split_into(Pipeline(2, 2, "consecutive"), [9.0, 1.0, 1.0])
