"""Filling bubbles: figures of the benchmarks at small sizes, and real steps that take what is simulated."""

from __future__ import annotations

import pytest

from benchmarks import filled_steps, filling
from tests.distributed.harness import Pool


def test_an_encoder_in_bubbles_takes_less_than_in_turns() -> None:
    case = filling.Case("small", (6, 512), (16, 1024), 16, 2, 8, 2, 64, 512, 1024, 4, 2)
    found = filling.measure(case)
    assert found.least <= found.fine <= found.coarse * (1 + 1e-9)
    assert found.alone <= found.beside < found.fine < 0.92 * found.turns
    assert found.computed[1] < found.computed[2] <= 1
    assert found.efficiency(found.alone) == 1.0
    assert found.efficiency(found.alone + found.encoder) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("schedule", filled_steps.SCHEDULES)
def test_an_encoder_with_much_work_costs_little(schedule: str) -> None:
    """An encoder with 0.6 of the work of a pipeline whose last stage is the longest: at least 15% less than in turns,
    and less than a quarter of what it computes more than the pipeline alone.
    """
    alone, turns = (filled_steps.simulated(schedule, "none", ratio) for ratio in (0.0, 0.6))
    fine = filled_steps.simulated(schedule, "fine", 0.6)
    least = filled_steps.least(0.6)
    assert fine < 0.85 * turns
    assert least <= fine and fine - alone < 0.27 * (least - filled_steps.least(0.0))


@pytest.mark.parametrize("schedule", filled_steps.SCHEDULES)
def test_a_frozen_encoder_that_works_a_step_ahead_costs_less_still(schedule: str) -> None:
    alone = filled_steps.simulated(schedule, "fine", 0.0)
    _, fine, early = (filled_steps.simulated(schedule, way, 0.6, frozen=True) for way in filled_steps.WAYS)
    assert early == pytest.approx(alone, rel=1e-3) and alone < 0.99 * fine


@pytest.mark.perf
@pytest.mark.timeout(900)
def test_real_steps_take_what_is_simulated(pool: Pool) -> None:
    for name, figures in filled_steps.main(["--rounds", "3"], pool).items():
        for measured, simulated in zip(figures["measured"], figures["simulated"], strict=True):
            assert abs(measured / simulated - 1) < filled_steps.GOAL, name
        if "0.6" in name:
            assert figures["measured"][-1] < 0.85 * figures["measured"][0], name
