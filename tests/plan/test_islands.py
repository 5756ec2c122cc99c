"""Islands: what a sample needs stays among instances that may meet, and work is as even as without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.common import ragged_step
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.islands import islands_of
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.orchestrator import Near, plan_step
from hetero_strategy.plan.packing import level_islands
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks

INSTANCES = {"vision": 24, "audio": 12, "llm": 12, "caption": 12}
COUNTS = (1, 2, 3, 4, 6, 12)
BESIDE = {"vision": {"llm": np.linspace(0.0, 0.5, 24)}}


def layout(instances: int, first: int = 0, **degrees: Any) -> ModuleLayout:
    shards = int(np.prod(list(degrees.values()), initial=1))
    ranks = range(first, first + instances * shards)
    return ModuleLayout(ranks, dp_replicate=instances, dp_shard=1, **degrees).resolved()


LAYOUTS = {
    "vision": layout(24),
    "audio": layout(12, 24),
    "llm": layout(12, 0, pp=2),
    "caption": layout(12, 36),
}


def planned(count: int, microbatches: int = 2, samples: int = 240, **options: Any) -> StepPlan:
    draws = {name: lambda rng, n: rng.integers(1, 40, n) for name in ("vision", "audio")}
    metadata = ragged_step(5, samples, draws, items=(0, 3), text=(16, 64))
    islands = islands_of(LAYOUTS, "llm", count)
    homes = np.arange(12)
    near = {"vision": Near(np.arange(24) % 12, homes, "llm")} if options.pop("near", True) else {}
    beside = BESIDE if options.pop("fills", False) else {}
    rows = options.pop("microbatch_rows", None)
    context = ModelContext(dict.fromkeys(INSTANCES, Cost(1.0, 0.001)), near, beside=beside, islands=islands)
    balancing = BalanceConfig.of(options).resolve(INSTANCES, context)
    return plan_step(
        metadata, INSTANCES, ["llm", "caption"], microbatches=microbatches, balancing=balancing, microbatch_rows=rows
    )


def crossings(plan: StepPlan, islands: dict[str, np.ndarray]) -> int:
    """Blocks of rows that leave an island, of all edges."""
    left = 0
    for source in ("vision", "audio"):
        for target in ("llm", "caption"):
            for one, other in plan.feeds(source, target):
                blocks = edge_blocks(plan, source, one, target, other)
                ends = islands[source][blocks.source_instance], islands[target][blocks.target_instance]
                left += int((ends[0] != ends[1]).sum())
    return left


OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "as sampled": {"policy": "none"},
    "encoders as sampled": {"policy": {"vision": "none", "audio": "none"}},
    "whole batches are permuted": {"rearrange": "permute"},
    "by integer program": {"rearrange": "ilp"},
    "nothing is near": {"near": False},
    "speeds": {"speeds": {"vision": [1.0, 2.0] * 12, "llm": [1.0, 1.5, 2.0] * 4}},
    "a budget": {"budget": {"vision": 60}},
    "joined microbatches": {"microbatch_rows": {"vision": 400, "audio": "equal"}},
    "over the step": {"fills": True},
    "over the step in a budget": {"fills": True, "budget": {"vision": 60}},
    "microbatches by budget": {"microbatches": None, "budget": {"llm": 700}},
}


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_rows_stay_in_their_island(options: dict[str, Any], count: int) -> None:
    plan = planned(count, **options)
    islands = islands_of(LAYOUTS, "llm", count)
    assert crossings(plan, islands) == 0
    for module, units in {"vision": len(plan.metadata.items["vision"].sample), "llm": 240, "caption": 240}.items():
        spread = np.concatenate([a.units for a in plan.assignments[module]])
        assert sorted(spread.tolist()) == list(range(units))
    if limit := options.get("budget", {}).get("vision"):
        assert max(int(a.totals().max()) for a in plan.assignments["vision"]) <= limit


def test_without_islands_rows_go_anywhere() -> None:
    """The negative control."""
    assert crossings(planned(1), islands_of(LAYOUTS, "llm", 4)) > 100


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("count", "bound"), [(2, 1.02), (4, 1.04)])
def test_work_is_nearly_as_even(count: int, bound: float, microbatches: int) -> None:
    """An island of three instances has less to choose from than one of six."""
    options = {"microbatches": microbatches, "samples": 2400}
    whole, apart = planned(1, **options), planned(count, **options)
    assert np.array_equal(np.sort(whole.loads["llm"].after), np.sort(apart.loads["llm"].after))  # samples change places
    for module in ("vision", "audio", "caption"):
        load = apart.loads[module].after
        assert (load.max(axis=1) / load.mean(axis=1)).max() < bound, module


def test_places_are_chosen_for_all_modules_at_once() -> None:
    """What is heavy for one module is light for the other: each has even work, not only their sum."""
    draws = np.random.default_rng(3).uniform(0.0, 1.0, (2, 48))
    work = np.stack([draws, 1.5 - draws])
    place = level_islands(work, np.arange(48).reshape(4, 12))
    assert (np.sort(place, axis=1) == np.arange(48)).all()

    def worst(island: np.ndarray) -> float:
        sums = np.array([[np.bincount(i, w) for i, w in zip(island, one, strict=True)] for one in work])
        return float((sums.max(axis=2) / sums.mean(axis=2)).max())

    assert worst(place // 12) < 1.03 < 1.1 < worst(np.tile(np.arange(48) // 12, (2, 1)))


def test_modules_on_shared_ranks_share_islands() -> None:
    """The encoder's instances lie on both stages of the language model's; elsewhere they are cut in runs."""
    islands = islands_of(LAYOUTS, "llm", 3)
    assert islands["llm"].tolist() == islands["audio"].tolist() == np.repeat(range(3), 4).tolist()
    assert islands["vision"].tolist() == [*np.repeat(range(3), 4), *np.repeat(range(3), 4)]
    across = islands_of({"llm": layout(4), "vision": layout(2, 0, tp=2)}, "llm", 2)
    assert across["vision"].tolist() == [0, 1]
    uneven = islands_of(
        {"llm": layout(2), "vision": ModuleLayout([0, 2], dp_replicate=2, dp_shard=1).resolved()}, "llm", 2
    )
    assert uneven["vision"].tolist() == [0, 1]
    assert islands_of(LAYOUTS, "llm", 1) == {}


@pytest.mark.parametrize("count", [0, 5, 24])
def test_islands_divide_all_instances(count: int) -> None:
    message = rf"islands={count} does not divide .*llm has 12.*; use 1 or another divisor of 12"
    with pytest.raises(ConfigError, match=message):
        islands_of(LAYOUTS, "llm", count)
