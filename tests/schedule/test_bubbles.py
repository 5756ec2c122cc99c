"""Bubbles of the orders on uniform costs equal their closed forms, exactly."""

from __future__ import annotations

from itertools import accumulate

import pytest

from hetero_strategy.schedule.build import make_schedule
from tests.schedule.cases import chain, clock, makespan, uniform, work

DEPTHS = range(2, 9)


def counts(pp: int) -> list[int]:
    return [pp, pp + 1, 2 * pp - 1, 2 * pp, 3 * pp + 2]


@pytest.mark.parametrize("pp", DEPTHS)
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_1f1b_and_gpipe_lose_one_microbatch_per_further_stage(name: str, pp: int) -> None:
    """(p - 1) (F + B)."""
    for count in (1, 2, *counts(pp)):
        schedule = make_schedule(name, chain(pp), work(count))
        assert makespan(schedule, uniform(3, 4, 2)) == (count + pp - 1) * 9


@pytest.mark.parametrize("pp", DEPTHS)
@pytest.mark.parametrize("vpp", [2, 3])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(pp: int, vpp: int) -> None:
    """(p - 1) (F + B) / v, also where ``pp`` does not divide the microbatches. F and B are of one of v stages here."""
    for count in counts(pp):
        schedule = make_schedule("interleaved_1f1b", chain(pp, vpp), work(count))
        assert makespan(schedule, uniform(3, 4, 2)) == (count * vpp + pp - 1) * 9
        assert max(schedule.in_flight.values()) <= max(2 * pp, count if count < 3 * pp else 0) + vpp


@pytest.mark.parametrize("pp", DEPTHS)
@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 11, 9), (3, 2, 2), (2, 2, 1), (4, 5, 3)])
def test_zb_h1_lets_w_fill_waits_in_the_memory_of_1f1b(pp: int, costs: tuple[int, int, int]) -> None:
    """(p - 1) (F + I - W) (Qi et al. 2024, table 1) and ``pp`` microbatches on every stage."""
    f, i, w = costs
    for count in counts(pp):
        schedule = make_schedule("zb_h1", chain(pp), work(count), uniform(f, i, w))
        assert makespan(schedule, uniform(f, i, w)) == count * (f + i + w) + (pp - 1) * (f + i - w)
        assert max(schedule.in_flight.values()) <= pp


@pytest.mark.parametrize("pp", range(1, 9))
def test_zbv_has_no_bubble_inside_a_rank(pp: int) -> None:
    """With F = I = W every rank works without a pause from its first to its last action, in 1F1B's memory."""
    for count in (2 * pp - 1, 2 * pp, 2 * pp + 1, 4 * pp):
        schedule = make_schedule("zbv", chain(pp, 2, "v"), work(count))
        times = clock(schedule, uniform())
        for lane in schedule.lanes:
            spans = [times[a] for a in lane.actions]
            assert max(end for _, end in spans) - min(start for start, _ in spans) == 6 * count
            kept = accumulate(1 if a.kind == "F" else -1 if a.kind in "BW" else 0 for a in lane.actions)
            assert max(kept) <= 2 * pp  # of half a rank's layers each


def test_w_filling_is_what_shrinks_the_bubble() -> None:
    """Negative control: the same costs without the split lose more."""
    split = make_schedule("zb_h1", chain(4), work(8))
    whole = make_schedule("1f1b", chain(4), work(8))
    assert makespan(split, uniform()) < makespan(whole, uniform())
