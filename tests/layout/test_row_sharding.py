"""Where the rows of an instance lie, said in two ways: for runs and for rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.layout.row_sharding import REPLICATED, ContextSharding, RowSharding, sharding

WAYS = st.builds(sharding, st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=200, deadline=None)
@given(WAYS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(4, 8)), max_size=5))
def test_pieces_hold_the_rows_of_their_part(sharding: RowSharding, runs: list[tuple[int, int, int]]) -> None:
    parts = sharding.parts
    start, rows, size = (np.array([run[k] for run in runs], dtype=np.int64) for k in range(3))
    total = size * sharding.multiple
    start = np.minimum(start, total - 1)
    rows = np.minimum(rows, total - start)
    cut = sharding.cut(start, rows, total)
    for run in range(len(runs)):
        found = [
            (int(cut.part[k]), int(cut.local[k]) + row)
            for k in np.flatnonzero(cut.run == run)
            for row in range(cut.rows[k])
        ]
        expected = []
        for row in range(start[run], start[run] + rows[run]):
            places = [sharding.local(np.array([row]), int(total[run]), part) for part in range(parts)]
            (part,) = (part for part, place in enumerate(places) if len(place))  # one part has it
            expected.append((part, int(places[part][0])))
            assert places[part][0] < sharding.rows(int(total[run]))
        assert found == expected


def test_each_context_parallel_rank_has_a_chunk_from_either_end() -> None:
    two, rows = sharding(2, 1), np.arange(8)
    assert two == ContextSharding(2, 2) and sharding(1, 3) == RowSharding(3)
    assert [np.r_[two.chunks(8, rank)].tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert two.local(rows[[0, 6]], 8, 0).tolist() == [0, 2] and two.local(rows[[3, 4, 6]], 8, 1).tolist() == [1, 2]
    both = sharding(2, 2)  # sequence parallelism inside
    assert [both.local(rows, 8, part).tolist() for part in range(4)] == [[0, 1]] * 4
    assert both.local(np.array([6, 7]), 8, 1).tolist() == [0, 1]
    assert [sharding(*way).multiple for way in ((1, 3), (2, 1), (2, 2), (2, 3), (3, 4))] == [3, 4, 4, 12, 12]


def test_ranks_of_a_part_are_neighbours() -> None:
    instances = np.arange(8).reshape(2, 4)
    assert RowSharding(2).rank_sets(instances).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [RowSharding(2).part_of(place, 4) for place in range(4)] == [0, 0, 1, 1]
    assert REPLICATED.rank_sets(instances).tolist() == instances.tolist()
    assert RowSharding(4).rank_sets(instances).shape == (8, 1)
