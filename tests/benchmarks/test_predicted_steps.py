"""Predicted beside measured steps: what is compared with what, and that a few layouts come out near each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import predicted_steps
from benchmarks.predicted_steps import SETTINGS, Timed, measured, replayed, summary
from hetero_strategy.testing import Pool, planned

DISJOINT = next(s for s in SETTINGS if s.name == "digits: disjoint")


def step(begin: float, end: float, machine: float, seconds: float = 0.0) -> Timed:
    actions = {a: seconds for lane in planned(DISJOINT, 0).schedule.lanes for a in lane.actions} if seconds else {}
    return Timed(begin, end, machine, 0.5, sum(actions.values()), actions)


def test_there_are_thirty_layouts_of_different_names() -> None:
    assert len({s.name for s in SETTINGS}) == len(SETTINGS) == 30
    assert {s.world for s in SETTINGS} == {2, 4, 8}


def test_steps_that_lost_least_are_measured() -> None:
    quiet, loud = (0.0, 1.0, 1.0), (0.0, 5.0, 9.0)
    ranks = [[step(*one) for one in (loud, quiet, loud, quiet, quiet, loud)] for _ in range(2)]
    assert measured(ranks).seconds == 1.0
    assert measured(ranks).lost == 0.0


def test_a_schedule_is_replayed_with_the_least_seconds_of_its_actions() -> None:
    ranks = [[step(0.0, 9.0, 9.0, 0.1), step(0.0, 9.0, 9.0, 0.2)]] * 2
    schedule = planned(DISJOINT, 0).schedule
    longest = max(len(lane.actions) for lane in schedule.lanes)
    assert longest * 0.1 <= replayed(DISJOINT, ranks) < 2 * longest * 0.1


def test_errors_are_shares_of_what_was_measured() -> None:
    one = {"predicted": 1.1, "measured": 1.0, "predicted_alone": 0.5, "alone": 1.0, "lost": 0.1}
    two = {"predicted": 1.5, "measured": 2.0, "predicted_alone": 2.0, "alone": 2.0, "lost": 0.3}
    found = summary({"one": one, "two": two})
    assert found["rank correlation"] == pytest.approx(1.0)
    assert found["worst error"] == pytest.approx(0.25)
    assert found["median error"] == pytest.approx(0.175)
    assert found["alone: worst error"] == pytest.approx(0.5)


@pytest.mark.perf
def test_steps_take_as_long_as_predicted(pool: Pool, tmp_path: Path) -> None:
    arguments = ["--only", "larger: ", "--seconds", "1", "--json", str(tmp_path / "figures.json")]
    found = predicted_steps.main(arguments, pool)
    assert len(found["layouts"]) == 15
    assert found["rank correlation"] > 0.9 and found["median error"] < 0.1
    assert (tmp_path / "figures.json").exists()
