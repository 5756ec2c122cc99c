"""Any layout, same gradients: every placement against the one-process run of the same LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.testing import Pool
from tests.distributed.scenario import Job, Result, build, train, train_on_rank, worst_gradient, worst_loss

CURVE = 1e-5
"""Relative difference of any loss of up to 20 steps, fp32."""
FP32, FP64 = 1e-5, 1e-10
"""Relative error of any parameter's first-step gradient."""


@dataclass(frozen=True)
class Case:
    world: int
    layouts: dict[str, dict[str, Any]]
    options: dict[str, Any]


def case(world: int, options: dict[str, Any] | None = None, **layouts: dict[str, Any]) -> Case:
    return Case(world, layouts, options or {})


def on(*ranks: int, **degrees: int) -> dict[str, Any]:
    return {"ranks": list(ranks), **degrees}


CASES = {
    "colocated, equal": case(2, vision=on(0, 1), audio=on(0, 1), llm=on(0, 1)),
    "vision dp4, llm tp2 dp2": case(4, vision=on(0, 1, 2, 3), audio=on(0, 1, 2, 3), llm=on(0, 1, 2, 3, tp=2)),
    "disjoint dp3 to dp2": case(5, vision=on(0, 1, 2), audio=on(2, dp_shard=1), llm=on(3, 4)),
    "tp2 to tp1": case(3, vision=on(0, 1, tp=2), audio=on(0, 1, tp=2), llm=on(2)),
    "tp1 to tp2": case(3, vision=on(0), audio=on(0), llm=on(1, 2, tp=2)),
    "mixed": case(3, vision=on(0, 1), audio=on(2), llm=on(0, 1)),
    "partly overlapping, replicated": case(
        3, vision=on(0, 1, dp_replicate=2), audio=on(1, 2), llm=on(0, 2, dp_replicate=2)
    ),
    "hybrid sharding": case(4, vision=on(0, 1, 2, 3, dp_replicate=2), audio=on(3), llm=on(0, 1, 2, 3, dp_replicate=2)),
    "idle rank": case(4, vision=on(0, 3), audio=on(3), llm=on(0, 1, tp=2)),
    "pipelined": case(4, vision=on(0, 1, pp=2), audio=on(1), llm=on(2, 3, pp=2)),
    "frozen encoder": case(3, {"freeze": ("vision", "audio.backbone")}, vision=on(0), audio=on(0, 1), llm=on(1, 2)),
    "recompute": case(
        2, {"strategy": {"transforms": {"vision": {"recompute": "all"}, "llm": [Recompute()]}}},
        vision=on(0, 1, tp=2), audio=on(0), llm=on(0, 1),
    ),
    "two language_models": case(
        3, {"language_models": ("llm", "caption")}, vision=on(0, 1), audio=on(2), llm=on(1, 2, tp=2), caption=on(0)
    ),
    "context and tensor parallel": case(
        4, vision=on(0, 1, 2, 3), audio=on(0), llm=on(0, 1, 2, 3, cp=2, tp=2)
    ),
    "context parallel stages": case(
        4, {"lm": "hf_qwen3"}, vision=on(0, 1), audio=on(2), llm=on(0, 1, 2, 3, cp=2, pp=2)
    ),
    "context parallel of three": case(3, {"lm": "hf_qwen3"}, vision=on(0, 2), audio=on(1), llm=on(0, 1, 2, cp=3)),
    "context parallel replicas": case(
        4, vision=on(0, 1), audio=on(2, 3), llm=on(0, 1, 2, 3, cp=2, dp_replicate=2)
    ),
    "hf qwen3 fsdp": case(2, {"lm": "hf_qwen3"}, vision=on(0, 1), audio=on(1), llm=on(0, 1)),
}  # fmt: skip
"""Sizes that do not divide, tensor parallel on both sides, mixed and idle ranks. A frozen language model, stages that
are sharded and rows that are replicated are in test_pipeline_options."""
CURVES = ("tp1 to tp2",)
"""Where many steps are followed; test_resume does so with stages, and test_pipeline damages exchanges there."""
STEPS = 3
"""Of the others: the last ones see what the optimizer did."""


_references: dict[str, Result] = {}


def reference(job: Job) -> Result:
    key = repr(job)
    if key not in _references:
        _references[key] = train(job)
    return _references[key]


def several(rank: int, world: int, jobs: list[Job]) -> list[Result]:
    return [train_on_rank(rank, world, job) for job in jobs]


def run_on_ranks(pool: Pool, case: Case, jobs: list[Job]) -> list[tuple[Result, ...]]:
    """Job -> what every rank made of it."""
    runs = pool.run(case.world, several, [replace(job, layouts=case.layouts) for job in jobs], timeout=240)
    return list(zip(*runs, strict=True))


def exact_steps(scenario_data: Path, case: Case) -> Job:
    return Job(str(scenario_data), steps=STEPS, precision="64-true", **case.options)


@pytest.fixture(scope="module")
def exactly(pool: Pool, scenario_data: Path) -> Callable[[str], tuple[Result, ...]]:
    """Case -> what every rank made of its steps; all cases of one size in one world, which the first of them starts."""
    found: dict[str, tuple[Result, ...]] = {}

    def of(name: str) -> tuple[Result, ...]:
        if name not in found:
            alike = [other for other, case in CASES.items() if case.world == CASES[name].world]
            jobs = [replace(exact_steps(scenario_data, CASES[n]), layouts=CASES[n].layouts) for n in alike]
            runs = pool.run(CASES[name].world, several, jobs, timeout=300)
            found.update(zip(alike, zip(*runs, strict=True), strict=True))
        return found[name]

    return of


@pytest.mark.full_cases("vision dp4, llm tp2 dp2")
@pytest.mark.parametrize("name", CASES)
def test_same_gradients(exactly: Callable[[str], tuple[Result, ...]], scenario_data: Path, name: str) -> None:
    """Of the first step, and the same losses of all, in double precision."""
    expected, found = reference(exact_steps(scenario_data, CASES[name])), exactly(name)
    error, where = worst_gradient(expected, found)
    assert error <= FP64, where
    assert worst_loss(expected, found) <= FP64
    for result in found:
        np.testing.assert_allclose(result.metrics, expected.metrics, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", CURVES)
def test_same_curve_and_damage_is_noticed(pool: Pool, scenario_data: Path, name: str) -> None:
    """Of more steps than an epoch has, in single precision; a broken exchange shows in the first step's gradients."""
    chosen = CASES[name]
    curve = Job(str(scenario_data), steps=12, **chosen.options)
    exact = replace(curve, steps=1, precision="64-true")
    broken = [replace(exact, damage=f"{direction}:0") for direction in ("forward", "backward")]
    found, *by_damage = run_on_ranks(pool, chosen, [curve, *broken])
    expected = reference(curve)
    assert worst_loss(expected, found) <= CURVE
    error, where = worst_gradient(expected, found)
    assert error <= FP32, where
    for result in found:
        np.testing.assert_allclose(result.metrics, expected.metrics, atol=1e-6)
    for job, damaged in zip(broken, by_damage, strict=True):
        error, _ = worst_gradient(reference(exact), damaged)
        assert error > 1e-3, f"{job.damage} went unnoticed"


def where_values_are(rank: int, world: int, job: Job) -> dict[str, str]:
    trainer, module, datamodule = build(job)
    trainer.fit(module, datamodule=datamodule)
    return {name: p.device.type for name, p in module.named_parameters()}


def test_values_exist_only_where_owned(pool: Pool, scenario_data: Path) -> None:
    layouts = {"vision": on(0), "audio": on(1), "llm": on(1, 2)}
    ranks = pool.run(3, where_values_are, Job(str(scenario_data), steps=1, capture=False, layouts=layouts), timeout=120)
    for rank, found in enumerate(ranks):
        for name, device in found.items():
            module = name.split(".")[1]
            assert device == ("cpu" if rank in layouts[module]["ranks"] else "meta"), f"{name} on rank {rank}"
