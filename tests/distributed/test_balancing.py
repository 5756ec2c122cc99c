"""However work is spread, losses and gradients are those of one process and of the samples as drawn, fp64."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.boundary.transport import Transport
from hetero_strategy.errors import DataError
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime.step import StepRunner
from hetero_strategy.testing import Pool
from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.stepping import (
    Reference,
    Setting,
    Stepped,
    assembled,
    placed,
    share_of,
    steps_of,
    steps_on_rank,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "unequal dp, mixed": {"vision": on(0, 1, 2), "audio": on(2, 3), "llm": on(0, 1, 2, 3, tp=2)},
    "disjoint": {"vision": on(0), "audio": on(1), "llm": on(2, 3)},
    "pipelined": {"vision": on(0, 1), "audio": on(2), "llm": on(2, 3, pp=2)},
    "unequal dp": {"vision": on(0, 1, 2), "audio": on(0, 1), "llm": on(0, 1, 2)},
    "generator": {"vision": on(0, 1), "llm": on(0, 1, 2), "draw": on(1, 2)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "lpt": {"policy": "lpt"},
    "squares": {"costs": {"vision": {"quadratic": 0.1}, "llm": {"quadratic": 0.01}}},
    "anywhere": {"rearrange": "none"},
    "measured": {"costs": {"vision": {"fixed": 0.5}, "llm": {"linear": 0.0, "quadratic": 2e-3}}},
}
CHOSEN: dict[str, tuple[str, ...]] = {
    "unequal dp, mixed": ("auto", "squares", "anywhere"),
    "disjoint": ("auto", "lpt", "squares"),
    "pipelined": ("auto", "lpt", "squares", "measured"),
    "unequal dp": ("auto", "squares", "anywhere"),
    "generator": ("auto", "squares", "measured"),
}


def balanced(folders: dict[bool, str], layout: str, **options: Any) -> Setting:
    return setting_of(folders, LAYOUTS[layout], options.pop("schedule", "1f1b"), **options)


@pytest.mark.full_cases("disjoint", "pipelined", "unequal dp, mixed", "unequal dp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_samples_as_drawn(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    """`python -m tests.fuzz` draws the other pairs of layout and option."""
    setting = balanced(folders, layout)
    wanted, ways = expected(setting), [OPTIONS[name] for name in CHOSEN[layout]]
    compare(wanted, pool.run(setting.world, steps_on_rank, setting, wanted, (2,), 0, ways, timeout=240))


def test_every_option_is_in_two_layouts_or_more() -> None:
    counts = Counter(name for chosen in CHOSEN.values() for name in chosen)
    assert counts.keys() == OPTIONS.keys() and min(counts.values()) > 1


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule",
    ["zb_h1", "gpipe", "interleaved_1f1b"],
)
def test_other_orders(pool: Pool, folders: dict[bool, str], schedule: str) -> None:
    setting = balanced(folders, "pipelined", schedule=schedule, balance={"policy": "auto", "reorder": "search"})
    wanted = expected(setting)
    compare(wanted, pool.run(setting.world, steps_on_rank, setting, wanted, (4, 9), 4, timeout=240))


@pytest.mark.full_cases("generator")
@pytest.mark.parametrize(
    "layout", ["pipelined", "generator", pytest.param("unequal dp, mixed", marks=pytest.mark.full)]
)
def test_microbatches_by_budget_and_of_equal_cost(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    """As many microbatches as budgets ask for, encoders with more or equal ones of their own, nodes of two ranks."""
    free = balanced(folders, layout, balance={"policy": "auto"})
    plan = plan_of(free, None, budget={"llm": 10**6})
    longest, items = int(plan.metadata.tokens.max()), plan.metadata.items["vision"].inner_rows
    setting = balanced(
        folders,
        layout,
        balance={"budget": {"llm": longest + 8, "vision": int(items.max())}},
        tokens={name: "equal" for name in ("audio", "draw") if name in LAYOUTS[layout]},
        ranks_per_node=2,
    )
    wanted = expected(balanced(folders, layout))
    runs = pool.run(setting.world, steps_on_rank, setting, wanted, (None,), 0, timeout=240)
    compare(wanted, runs)
    chosen = runs[0].steps[0].plan
    assert chosen.microbatches > 1
    assert max(a.totals().max() - a.padding.max() for a in chosen.assignments["llm"]) <= longest + 8
    assert max(a.totals(inner=True).max() for a in chosen.assignments["vision"]) <= items.max()
    assert len(chosen.assignments["vision"]) >= chosen.microbatches


def plan_of(setting: Setting, microbatches: int | None, **balance: Any) -> StepPlan:
    """Without processes: rank 0's."""
    changed = replace(setting, balance={**(setting.balance or {}), **balance})
    share = share_of(placed(changed, changed.world), changed, 0)
    return steps_of(changed, microbatches, share).plan(0, 0)


def places(plan: StepPlan) -> dict[str, list[list[list[int]]]]:
    """Module -> microbatch -> instance -> units."""
    return {
        name: [[a.of(i).tolist() for i in range(len(a.offsets) - 1)] for a in made]
        for name, made in plan.assignments.items()
    }


def test_every_option_changes_the_batch(pool: Pool, folders: dict[bool, str]) -> None:
    """Each option but `lpt`, which tests/plan tells apart, differs from its default in plans as ranks make them."""
    costs = {"llm": {"linear": 1.0, "quadratic": 0.1}, "vision": {"quadratic": 0.1}, "audio": {"quadratic": 0.1}}
    names = ("none", "auto", "round_robin")
    ways = [
        *({"policy": name, "costs": costs, "rearrange": "none"} for name in names),
        {},
        {"costs": {"vision": {"linear": 0.0, "fixed": 1.0}}},
        {"rearrange": "none"},
    ]
    setting = balanced(folders, "unequal dp")
    found = plans(pool, setting, 1, ways)
    by_policy, (plain, *changed) = found[: len(names)], found[len(names) :]
    for name, made in zip(names, by_policy, strict=True):
        assert by_policy.count(made) == 1, f"{name} is like another"
    for way, made in zip(ways[len(names) + 1 :], changed, strict=True):
        assert made != plain, way
    dealt, equal = [{"policy": "none"}], replace(setting, tokens={"vision": "equal"})
    assert plans(pool, equal, 3, dealt) != plans(pool, setting, 3, dealt)
    pipelined = balanced(folders, "pipelined")
    none, search = plans(pool, pipelined, 5, [{"reorder": r} for r in ("none", "search")])
    assert none != search
    measured = {"costs": {"vision": {"linear": 1e-3}, "audio": {"linear": 1.0}, "llm": {"linear": 1e-6}}}
    sampled = [{"policy": "none", "reorder": "none"}, {"policy": "none"}]
    ways = [{**way, **more} for way in sampled for more in ({}, measured)]
    flops, seconds, *ordered = ran(pool, pipelined, 5, ways)
    assert places(flops.plan) == places(seconds.plan)
    assert flops.lanes != seconds.lanes, "costs decide who comes first on a shared rank"
    by_flops, by_time = (places(step.plan) for step in ordered)
    assert by_flops != by_time, "and in which schedule microbatches run"


def ran(pool: Pool, setting: Setting, count: int, ways: list[dict[str, Any]]) -> list[Stepped]:
    """Steps that really ran, as rank 0 saw them; all ranks had the same plans and schedules."""
    wanted = expected(setting)
    runs = pool.run(setting.world, steps_on_rank, setting, wanted, (count,), 0, ways, timeout=240)
    compare(wanted, runs)
    return runs[0].steps


def plans_on_rank(rank: int, world: int, setting: Setting, count: int, ways: list[dict[str, Any]]) -> list[Any]:
    around, share = (
        assembled(setting, rank, world).plan.context(setting.ranks_per_node),
        share_of(placed(setting, world), setting, rank),
    )
    made = [steps_of(replace(setting, balance=way), count, share, around).plan(0, 0) for way in ways]
    return [places(plan) for plan in made]


def plans(pool: Pool, setting: Setting, count: int, ways: list[dict[str, Any]]) -> list[Any]:
    """Who computes what; all ranks say the same."""
    first, *others = pool.run(setting.world, plans_on_rank, setting, count, ways)
    assert all(other == first for other in others)
    return first


def exchanges_on_rank(rank: int, world: int, setting: Setting, wanted: Reference) -> dict[str, int]:
    """Exchanges that a rank starts in one step, by edge and direction."""
    made = assembled(setting, rank, world)
    share = share_of(placed(setting, world), setting, rank)
    started: Counter[str] = Counter()
    edges, original = made.executor.compiler.graph.edges, Transport.give

    def give(self: Transport, number: int, rows: torch.Tensor) -> None:
        edge, backward = divmod(self._transfers[number][0].tag, 2)
        source, target = edges[edge][::-1] if backward else edges[edge]
        started[f"{'FB'[backward]} {source.module} to {target.module}"] += 1
        original(self, number, rows)

    Transport.give = give  # type: ignore[method-assign]
    try:
        made.executor.run(steps_of(setting, 1, share, made.plan.context(setting.ranks_per_node))[0], train=True)
    finally:
        Transport.give = original  # type: ignore[method-assign]
    return dict(started)


@pytest.mark.parametrize("policy", ["auto", pytest.param("none", marks=pytest.mark.full)])
def test_one_exchange_per_edge_and_direction(pool: Pool, folders: dict[bool, str], policy: str) -> None:
    setting = balanced(folders, "unequal dp", balance={"policy": policy})
    ranks = pool.run(setting.world, exchanges_on_rank, setting, expected(setting))
    assert all(count == 1 for counts in ranks for count in counts.values())
    assert set().union(*ranks) == {"F vision to llm", "F audio to llm", "B llm to vision", "B llm to audio"}


def disagreeing_on_rank(rank: int, world: int, setting: Setting) -> str:
    made = assembled(setting, rank, world)
    share = share_of(placed(setting, world), setting, rank)
    runner = StepRunner(made.executor, [], lambda: None, lambda: True, lambda: False)
    mine = replace(setting, balance={"policy": "none" if rank else "auto"})
    with pytest.raises(DataError) as error:
        runner(steps_of(mine, 2, share, made.plan.context(setting.ranks_per_node))[0])
    return str(error.value)


def test_ranks_with_different_plans_say_so(pool: Pool, folders: dict[bool, str]) -> None:
    setting = balanced(folders, "disjoint")
    for message in pool.run(setting.world, disagreeing_on_rank, setting):
        assert message.startswith("ranks made different plans for step 0 of epoch 0")


def disagreeing_later_on_rank(rank: int, world: int, setting: Setting) -> str:
    """From the third step on rank 1 has a plan of the same sizes."""
    made = assembled(setting, rank, world)
    share = share_of(placed(setting, world), setting, rank)
    for step in range(3):
        batch = steps_of(setting, 2, share, made.plan.context(setting.ranks_per_node))[0]
        if step == 2 and rank == 1:
            batch.plan.__dict__["digest"] = batch.plan.digest ^ 1 << 20
        with pytest.raises(DataError) if step == 2 else nullcontext() as error:
            made.executor.run(batch, train=True)
    return str(error.value)  # type: ignore[union-attr]


@pytest.mark.full
def test_ranks_with_different_plans_of_the_same_sizes_say_so_in_that_step(pool: Pool, folders: dict[bool, str]) -> None:
    for message in pool.run(4, disagreeing_later_on_rank, balanced(folders, "disjoint")):
        assert message.startswith("ranks made different plans for step 0 of epoch 0")


def test_loads_are_reported_and_better(folders: dict[bool, str]) -> None:
    plan = plan_of(balanced(folders, "unequal dp", balance={"policy": "auto", "rearrange": "none"}), 1)
    for name, load in plan.loads.items():
        hidden = plan.metadata.tokens if name == "llm" else plan.metadata.items[name].inner_rows
        assert load.before.sum() == load.after.sum() == hidden.sum()
        assert load.imbalance(load.after) <= load.imbalance(load.before)
    assert any(load.imbalance(load.after) < load.imbalance(load.before) for load in plan.loads.values())
    assert np.isfinite([load.imbalance(load.after) for load in plan.loads.values()]).all()
