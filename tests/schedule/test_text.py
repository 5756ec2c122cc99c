"""Schedules as a grid and as CSV, which torch's own pipelining reads."""

from __future__ import annotations

from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.text import grid, to_csv
from tests.schedule.cases import chain, work


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
