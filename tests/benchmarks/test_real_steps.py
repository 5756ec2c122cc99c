"""Variants of real steps: settings differ in what they are compared for, and a tiny run prints what it should."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import real_steps
from benchmarks.pipelines import DISTURBED
from hetero_strategy.plan.step_plan import ModuleLoad
from hetero_strategy.testing import Pool, Setting, planned


def cases(comparison: str) -> dict[str, dict[str, Setting]]:
    return {case.name: dict(case.variants) for case in real_steps.COMPARISONS[comparison]()}


def flops(setting: Setting) -> float:
    """Of the slowest instance of every module, summed over the step."""
    known = planned(setting, 0)
    return sum(known.costs(action) for action in known.schedule.of(0) if action.microbatch >= 0)


def test_balance_evens_the_loads_of_every_module() -> None:
    variants = cases("balanced")[""]
    assert flops(variants["all"]) < min(flops(variants["as sampled"]), flops(variants["llm only"]))
    loads = planned(variants["all"], 0).plan.loads
    assert all(ModuleLoad.imbalance(load.after) < 1.1 for load in loads.values())


def test_modalities_differ_in_place_only() -> None:
    chain, parallel = cases("modalities")[""].values()
    assert parallel.plan(0).metadata.tokens.tolist() == chain.plan(0).metadata.tokens.tolist()
    known = planned(parallel, 0)
    work = {m: sum(known.costs(a) for a in known.schedule.of(r) if a.node.module == m)
            for r, m in ((0, "vision"), (1, "audio"), (1, "llm"))}  # fmt: skip
    assert work["vision"] == pytest.approx(work["audio"], rel=0.1) and work["llm"] < 0.2 * work["vision"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_encoder_with_much_work_costs_little(schedule: str) -> None:
    """An encoder with 0.6 of the work of a pipeline: at least 15% less than in turns."""
    turns, fine = (real_steps.paced_seconds(planned(s, 0)) for s in cases("filled")[f"{schedule}, 0.6"].values())
    assert fine < 0.85 * turns


def test_a_repeated_encoder_costs_its_share() -> None:
    """With context parallelism of 2, less what is uneven."""
    rigid, colocated = (real_steps.paced_seconds(planned(s, 0)) for s in cases("repeated")["e 37%"].values())
    assert rigid / colocated - 1 == pytest.approx(0.6 / 1.6, abs=0.1)


def run(pool: Pool, comparison: str, only: str = "") -> Any:
    options = ["--rounds", "1", "--warmup", "0", "--scale", "0.25"]
    return real_steps.main([comparison, "--only", only, *options], pool)


@pytest.mark.distributed
def test_modalities_run(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    chain, parallel = run(pool, "modalities")["modalities"].values()
    assert chain["ratio"] == chain["simulated"] == 1 and parallel["ratio"] > 0
    assert "measured / simulated" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.distributed
def test_other_comparisons_run(pool: Pool) -> None:
    some = {"balanced": "", "microbatches": "small, disjoint", "filled": "zb_h1, 0.15, frozen", "repeated": "23"}
    for comparison, only in some.items():
        (variants,) = run(pool, comparison, only).values()
        assert all(figures["ratio"] > 0 and figures["simulated"] > 0 for figures in variants.values())


@pytest.mark.perf
@pytest.mark.timeout(900)
def test_paced_steps_take_what_is_simulated(pool: Pool) -> None:
    for comparison in ("filled", "repeated"):
        for name, variants in real_steps.main([comparison, "--rounds", "3"], pool).items():
            for figures in variants.values():
                assert abs(figures["over_simulated"] - 1) < 0.1, name


@pytest.mark.perf
def test_modalities_gain(pool: Pool) -> None:
    """The goal is 0.65; here is room for a machine's noise."""
    chain, parallel = real_steps.main(["modalities"], pool)["modalities"].values()
    if (lost := max(chain["lost"], parallel["lost"])) > DISTURBED:
        pytest.skip(f"two processors were not free: ranks lost {lost:.0%} of a step to other processes")
    assert parallel["ratio"] <= 0.75
