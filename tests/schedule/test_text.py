"""Schedules as a grid and as CSV, which torch's own pipelining reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.policies import schedules
from hetero_strategy.schedule.text import from_csv, grid, to_csv
from tests.schedule.cases import cases, chain, work


def test_a_grid() -> None:
    assert grid(make_schedule("1f1b", chain(2), work(2))).splitlines() == [
        "rank 0        rank 1",
        "0F0",
        "0F1           1F0",
        "              1B0",
        "0B0           1F1",
        "              1B1",
        "0B1           1REDUCE_GRAD",
        "0REDUCE_GRAD",
    ]


def test_a_line_per_rank() -> None:
    assert to_csv(make_schedule("zb_h1", chain(2), work(2))) == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@pytest.mark.parametrize("name", [n for n in schedules() if n != "eager_1f1b"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_again(name: str, data: st.DataObject) -> None:
    stages, steps = data.draw(cases(name))
    made = make_schedule(name, stages, steps)
    if len(stages.pipelines) > 1:
        again = from_csv(to_csv(made), name, stages, steps)
        assert sorted(again.lanes, key=lambda lane: lane.ranks) == sorted(made.lanes, key=lambda lane: lane.ranks)
        check(again)


def test_refusals() -> None:
    made = chain(2)
    for text, message in (
        ("0F0\n1X0\n", "'1X0' names no action"),
        ("0F0\nhello\n", "'hello' is no action"),
        ("0F0\n", "1 lists for 2 sets of ranks"),
    ):
        with pytest.raises(ScheduleError, match=message):
            from_csv(text, "mine", made, work(1))
