"""The benchmarks of pipelines run at a tiny size and say what they should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import pipeline_timing
from benchmarks.pipelines import Gathered
from hetero_strategy.schedule.check import check
from hetero_strategy.simulator.recorded_steps import durations
from hetero_strategy.testing import planned


@pytest.mark.parametrize("setting", pipeline_timing.SETTINGS, ids=lambda s: s.name)
def test_settings_have_schedules_that_check(setting) -> None:  # type: ignore[no-untyped-def]
    for seed in pipeline_timing.SEEDS:
        known = planned(setting, seed)
        check(known.schedule)
        assert known.schedule.name == setting.schedule


def ran(known, seconds: dict) -> Gathered:  # type: ignore[no-untyped-def, type-arg]
    """A step that took exactly what its simulation says, 2 ms of latency included."""
    simulation = pipeline_timing.simulated(known, seconds, 0.002)
    events = {int(r): simulation.of(int(r)) for r in simulation.ranks}
    return Gathered(0, simulation.time, (0.0, simulation.time), events, 0.0)


@pytest.mark.parametrize("setting", pipeline_timing.SETTINGS, ids=lambda s: s.name)
def test_a_step_gives_back_the_costs_and_the_latency_it_was_made_of(setting) -> None:  # type: ignore[no-untyped-def]
    known = planned(setting, 0)
    random = np.random.default_rng(0)
    actions = sorted({a for lane in known.schedule.lanes for a in lane.actions})
    stages = known.schedule.graph.stages
    costs = {a: random.uniform(0.01, 0.03, len(stages[a.node].grid)) for a in actions}
    step = pipeline_timing.ran(known, ran(known, costs))
    for action, found in durations(step.schedule, step.events).items():
        np.testing.assert_allclose(found, costs[action], rtol=1e-9, atol=1e-12)
    waits = pipeline_timing.latencies(step)
    assert waits and all(wait == pytest.approx(0.002) for wait in waits)


def test_fitted_costs_predict_another_batch() -> None:
    setting = pipeline_timing.SETTINGS[0]
    one, other = planned(setting, 0), planned(setting, 1)

    def law(known):  # type: ignore[no-untyped-def]
        actions = {a for lane in known.schedule.lanes for a in lane.actions}
        return {a: 0.001 + (1e-10 * known.costs.of_instances(a) if a.microbatch >= 0 else 0.0) for a in actions}

    step = pipeline_timing.ran(one, ran(one, law(one)))
    found, expected = pipeline_timing.fitted(other, [step]), law(other)
    for action, seconds in expected.items():
        np.testing.assert_allclose(found[action], seconds, rtol=1e-3)


@pytest.mark.full
@pytest.mark.distributed
def test_pipeline_timing(pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "timing.json"
    arguments = f"--steps 2 --warmup 1 --scale 0.25 --settings zbv --timeline {tmp_path} --json {file}"
    pipeline_timing.main(arguments.split(), pool)
    assert "goal: repeat within 10% of 1" in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    (one,) = results["settings"]
    assert all(len(one["ratios"][f]) == 4 and min(one["ratios"][f]) > 0 for f in pipeline_timing.FIGURES)
    assert len(list(tmp_path.glob("*.png"))) == 1
    assert len(list(tmp_path.glob("llm*.json"))) == 1


@pytest.mark.perf
def test_a_simulation_with_the_costs_of_its_own_step_tells_most_of_its_time(pool) -> None:  # type: ignore[no-untyped-def]
    found = pipeline_timing.main(["--steps", "2", "--warmup", "1", "--scale", "0.25", "--settings", "zbv"], pool)
    (one,) = found["settings"]
    assert min(one["ratios"]["own"]) > 0.9
