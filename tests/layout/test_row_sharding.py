"""Where the rows of an instance lie, said in two ways: for runs and for rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(4, 8)), max_size=5))
def test_pieces_hold_the_rows_of_their_part(parts: int, runs: list[tuple[int, int, int]]) -> None:
    start, rows, size = (np.array([run[k] for run in runs], dtype=np.int64) for k in range(3))
    total = size * parts
    start = np.minimum(start, total - 1)
    rows = np.minimum(rows, total - start)
    sharding = RowSharding(parts)
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


def test_ranks_of_a_part_are_neighbours() -> None:
    instances = np.arange(8).reshape(2, 4)
    assert RowSharding(2).rank_sets(instances).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [RowSharding(2).part_of(place, 4) for place in range(4)] == [0, 0, 1, 1]
    assert REPLICATED.rank_sets(instances).tolist() == instances.tolist()
    assert RowSharding(4).rank_sets(instances).shape == (8, 1)
