"""Where the rows of an instance lie, said in two ways: for runs and for rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.layout.row_sharding import REPLICATED, RowOrder, RowSharding, sharding, two_chunks

WAYS = st.builds(sharding, st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=200, deadline=None)
@given(WAYS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(4, 8)), max_size=5))
def test_pieces_hold_the_rows_of_their_part(sharding: RowSharding, runs: list[tuple[int, int, int]]) -> None:
    parts = sharding.parts
    start, rows, size = (np.array([run[k] for run in runs], dtype=np.int64) for k in range(3))
    total = size * sharding.parts
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
    assert two_chunks(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert two_chunks(6, 2).tolist() == [[0, 4, 5], [1, 2, 3]]
    assert two_chunks(5, 1).tolist() == [[0, 1, 2, 3, 4]]


def test_places_of_rows_are_those_of_their_pieces() -> None:
    """Two instances of 8 and 4 rows, each on two ranks."""
    order = RowOrder.of(*(np.array(column) for column in ([8, 4], [3, 2], [0, 2, 6, 0, 2], [0, 1, 0, 1, 0])))
    assert order.rows(0, 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5] and order.rows(1, 4).tolist() == [2, 3, 0, 1]
    assert order.among(np.array([1])).rows(0, 4).tolist() == order.rows(1, 4).tolist()
    cut = order.cut(np.array([1, 0]), np.array([1, 1]), np.array([3, 6]))
    assert cut.run.tolist() == [0, 0, 1, 1, 1] and cut.rows.tolist() == [1, 2, 1, 4, 1]
    assert cut.offset.tolist() == [0, 1, 0, 1, 5] and cut.local.tolist() == [3, 0, 1, 4, 2]


def test_ranks_of_a_part_are_neighbours() -> None:
    instances = np.arange(8).reshape(2, 4)
    assert RowSharding(2).rank_sets(instances).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [RowSharding(2).part_of(place, 4) for place in range(4)] == [0, 0, 1, 1]
    assert REPLICATED.rank_sets(instances).tolist() == instances.tolist()
    assert RowSharding(4).rank_sets(instances).shape == (8, 1)
