"""Who may meet whom, against pairs counted one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.boundary.pairs import Meetings


@st.composite
def grids(draw: st.DrawFn) -> np.ndarray:
    instances, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(9)))[: instances * size]
    return np.array(ranks).reshape(instances, size)


def plain(meetings: Meetings) -> set[tuple[int, int]]:
    rows = zip(meetings.sources.tolist(), meetings.targets.tolist(), strict=True)
    return {(a, b) for source, target in rows for a, b in product(source, target) if a != b}


@given(source=grids(), target=grids())
def test_pairs_and_peers(source: np.ndarray, target: np.ndarray) -> None:
    between = Meetings(source.reshape(1, -1), target.reshape(1, -1))
    assert plain(between) == {(a, b) for a in source.flat for b in target.flat if a != b}
    for meetings in (between, Meetings(target, target)):
        expected = plain(meetings)
        assert meetings.count == len(expected)
        for rank in range(10):
            assert meetings.peers(rank) == {b for a, b in expected if a == rank}
            assert meetings.back.peers(rank) == {a for a, b in expected if b == rank}
