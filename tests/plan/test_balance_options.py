"""Every option of `BalanceConfig`, from what a person writes to the step plan: it changes it and does what it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.plan.balance import NEAR, Cost, loads
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.near_home import REARRANGEMENTS
from hetero_strategy.plan.plan_step import Near, Orderer, UnitSizes, plan_step
from hetero_strategy.plan.step_plan import ModuleLoad, StepItems, StepMetadata, StepPlan
from tests.plan.plain import (
    batches,
    falling,
    heap_greedy,
    time_of,
)
from tests.small_models import READING, reader

COSTS = {"llm": Cost(1.0, 0.002), "vision": Cost(2.0, 0.01)}
Batches = Counter[frozenset[int]]
"""What the instances of a module compute, whichever of them it is."""


def drawn(seed: int, samples: int) -> StepMetadata:
    """Zero to three images a sample."""
    rng = np.random.default_rng(seed)
    sample = np.repeat(np.arange(samples), rng.integers(0, 4, samples))
    rows = rng.permutation(np.arange(5, 5 + 3 * samples))[: len(sample)]  # all different, so that no tie is free
    inside = np.bincount(sample, weights=rows, minlength=samples).astype(np.int64)
    tokens = inside + rng.permutation(np.arange(9, 9 + samples))
    items = StepItems(sample, rows, np.zeros(len(sample), np.int64), 4 * rows)
    return StepMetadata(0, seed, np.arange(samples), tokens, tokens - inside, {"vision": items})


def plan_of(
    metadata: StepMetadata,
    instances: int | dict[str, int] = 4,
    microbatches: int | None = 1,
    near: Near | None = None,
    orderer: Any = None,
    **options: Any,
) -> StepPlan:
    """As the data module makes it of ``balance={...}``."""
    count = {"vision": instances, "llm": instances} if isinstance(instances, int) else instances
    around = ModelContext(COSTS, {} if near is None else {"vision": near}, orderer)
    balance = BalanceConfig.of(options)
    balance.check(tuple(count))
    return plan_step(metadata, count, ("llm",), microbatches=microbatches, balancing=balance.resolve(count, around))


def test_without_balance_nothing_is_moved() -> None:
    assert BalanceConfig.of("none") == BalanceConfig(policy="none", rearrange="none", reorder="none")
    assert BalanceConfig.of("lpt") == BalanceConfig(policy="lpt") and BalanceConfig.of(None) == BalanceConfig()


def places(plan: StepPlan, module: str, microbatch: int = 0) -> list[list[int]]:
    """Units of every instance."""
    made = plan.assignments[module][microbatch]
    return [made.of(i).tolist() for i in range(len(made.offsets) - 1)]


def sets(plan: StepPlan, module: str) -> Batches:
    """Over all microbatches."""
    every = [units for n in range(len(plan.assignments[module])) for units in places(plan, module, n)]
    return Counter(frozenset(units) for units in every)


def where_of(plan: StepPlan, module: str) -> np.ndarray:
    """Instance of each unit of the only microbatch."""
    made = plan.assignments[module][0]
    found = np.empty(len(made.units), dtype=np.int64)
    found[made.units] = made.instance()
    return found


# ---- rearrange -----------------------------------------------------------------------------------------------------


def sent(plan: StepPlan, nodes: np.ndarray, slots: tuple[int, ...] | None = None) -> list[int]:
    """Rows that every instance of the LLM gets from other nodes, by a plain loop; batch ``b`` of images at ``slots[b]``
    where that is given.
    """
    out = [0] * len(nodes)
    items = plan.metadata.items["vision"]
    for n, made in enumerate(plan.assignments["llm"]):
        at = dict(zip(made.units.tolist(), made.instance().tolist(), strict=True))
        for batch, units in enumerate(places(plan, "vision", n)):
            for item in units:
                reader = at[int(items.sample[item])]
                if nodes[batch if slots is None else slots[batch]] != nodes[reader]:
                    out[reader] += int(items.edge_rows[item])
    return out


def test_home_moves_items_and_permutes_what_does_not_add_up() -> None:
    nodes = np.array([0, 0, 1, 1, 2, 2])
    near = Near(nodes, nodes, "llm")
    for seed in range(4):
        metadata = drawn(seed, 40)
        plain, home = (plan_of(metadata, 6, 1, near, rearrange=way) for way in ("none", "home"))
        assert sets(home, "vision") != sets(plain, "vision"), "items move one by one"
        assert sum(sent(home, nodes)) < sum(sent(plain, nodes))
        plain, home = (plan_of(metadata, 6, 1, near, rearrange=way, policy="lpt") for way in ("none", "home"))
        assert sets(home, "vision") == sets(plain, "vision"), "whole batches move"
        assert sum(sent(home, nodes)) < sum(sent(plain, nodes))
        assert places(home, "llm") == places(plain, "llm")
        np.testing.assert_allclose(
            np.sort(home.loads["vision"].after), np.sort(plain.loads["vision"].after), rtol=1e-12
        )


def test_a_registered_rearrangement_permutes_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = np.array([0, 0, 1, 1])
    monkeypatch.setitem(REARRANGEMENTS, "turned", lambda size, source, batch, *rest: np.arange(4)[::-1])
    plain, turned = (plan_of(drawn(2, 40), 4, 1, Near(nodes, nodes, "llm"), rearrange=w) for w in ("none", "turned"))
    assert places(turned, "vision") == places(plain, "vision")[::-1]


# ---- policy --------------------------------------------------------------------------------------------------------


def plain(policy: str, lengths: list[int], bins: int, cost: Cost) -> Counter[tuple[int, ...]]:
    """Lengths in every bin as the policy, written item by item, puts them."""
    where = {
        "lpt": lambda: heap_greedy(cost.alone(np.array(lengths)).tolist(), falling(lengths), bins),
        "round_robin": lambda: [k % bins for k in range(len(lengths))],
    }[policy]()
    return Counter(tuple(sorted(batch)) for batch in batches(lengths, where, bins))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("policy", ["lpt", "round_robin"])
def test_a_policy_is_its_papers_algorithm(policy: str, microbatches: int) -> None:
    """The language model's instances and microbatches are balanced at once, an encoder's instances in each."""
    metadata = drawn(2, 50)
    plan = plan_of(metadata, {"vision": 3, "llm": 4}, microbatches, policy=policy)
    tokens = metadata.tokens
    found = Counter(tuple(sorted(tokens[list(units)].tolist())) for units in sets(plan, "llm").elements())
    assert found == plain(policy, tokens.tolist(), 4 * microbatches, COSTS["llm"])
    hidden = metadata.items["vision"].inner_rows
    for number, made in enumerate(plan.assignments["vision"]):
        mine = np.sort(made.units)
        instances = [tuple(sorted(hidden[units].tolist())) for units in places(plan, "vision", number)]
        assert Counter(instances) == plain(policy, hidden[mine].tolist(), 3, COSTS["vision"])


def test_none_leaves_everything_as_sampled() -> None:
    metadata = drawn(3, 50)
    plan = plan_of(metadata, 4, 3, policy="none")
    for number in range(3):
        dealt = [[s for s in range(50) if s % 3 == number and s // 3 % 4 == i] for i in range(4)]
        assert places(plan, "llm", number) == dealt
        of = metadata.items["vision"].sample
        assert places(plan, "vision", number) == [[k for k in range(len(of)) if of[k] in mine] for mine in dealt]


def test_auto_is_the_best_of_all_and_every_policy_another_plan() -> None:
    metadata = drawn(4, 40)
    costs = {"llm": {"quadratic": 0.002}, "vision": {"quadratic": 0.01}}
    names = ("auto", "lpt", "round_robin", "none")
    made = {name: plan_of(metadata, 7, costs=costs, policy=name) for name in names}
    for module, lengths in (("vision", metadata.items["vision"].inner_rows), ("llm", metadata.tokens)):
        cost = Cost(**costs[module])
        times = {n: time_of(lengths.tolist(), where_of(p, module).tolist(), 7, cost) for n, p in made.items()}
        assert times["auto"] <= min(times.values()) * (1 + NEAR) and times["auto"] < times["none"] / 1.1
    assert len({str([places(plan, m) for m in plan.assignments]) for plan in made.values()}) == len(made)


def test_every_module_has_its_own_policy() -> None:
    """And what is not named is balanced."""
    metadata = drawn(5, 50)
    chosen = plan_of(metadata, policy={"vision": "lpt"})
    assert np.array_equal(where_of(chosen, "vision"), where_of(plan_of(metadata, policy="lpt"), "vision"))
    assert np.array_equal(where_of(chosen, "llm"), where_of(plan_of(metadata), "llm"))


# ---- costs, budget, reorder ------------------------------------------------------------------------------------------


def test_costs_decide_what_is_level() -> None:
    metadata = drawn(6, 90)
    hidden = metadata.items["vision"].inner_rows
    counted = plan_of(metadata, costs={"vision": {"linear": 0.0, "fixed": 1.0}})
    sizes = [len(units) for units in places(counted, "vision")]
    assert max(sizes) - min(sizes) <= 1, "items count, not rows"
    by_rows = [ModuleLoad.imbalance(loads(hidden, where_of(plan, "vision"), 4, COSTS["vision"])[None])
               for plan in (counted, plan_of(metadata))]  # fmt: skip
    assert by_rows[0] > 1.01 > 1.001 > by_rows[1]


def test_a_budget_bounds_every_instance() -> None:
    metadata = drawn(7, 90)
    most = {"llm": 2 * int(metadata.tokens.max()), "vision": int(metadata.items["vision"].inner_rows.max()) + 50}
    plan = plan_of(metadata, 4, None, budget=most)
    free = plan_of(metadata, 4, None, budget={"llm": 10**6})
    assert free.microbatches == len(free.assignments["vision"]) == 1 < plan.microbatches
    for module, rows in most.items():
        assert max(a.totals(inner=True).max() for a in plan.assignments[module]) <= rows
        assert max(a.totals(inner=True).max() for a in free.assignments[module]) > rows


def test_reorder_names_the_search_whose_order_is_run() -> None:
    asked = []

    def orderer(search: str) -> Orderer | None:
        asked.append(search)

        def turned(sizes: UnitSizes) -> np.ndarray:
            return np.arange(len(sizes["llm"].rows))[::-1]

        return None if search == "none" else turned

    metadata = drawn(8, 40)
    made = [plan_of(metadata, 4, 3, orderer=orderer, reorder=name) for name in ("none", "search")]
    assert asked == ["none", "search"]
    none, search = ([places(plan, "llm", n) for n in range(3)] for plan in made)
    assert search == none[::-1]


# ---- window ----------------------------------------------------------------------------------------------------------


def test_a_window_levels_the_tokens_of_its_steps_whatever_they_cost(digits: Path) -> None:
    """Through the data module; only training samples move."""

    def loaded(**balance: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        made = MultimodalDataModule(
            digits / "train.json", digits / "val.json", tokenizer=digits, model=reader, processors=READING,
            global_batch_size=5, seed=1, balance=balance,
        )  # fmt: skip
        train, val = made.train_dataloader(), made.val_dataloader()
        index.append(made.indices["train"])
        return [train.steps.samples(0, s) for s in range(12)], [val.steps.samples(0, s) for s in range(4)]

    index: list[Any] = []
    (plain, still), (same, _), (moved, valued) = loaded(), loaded(window=1), loaded(window=4)
    dear, _ = loaded(window=4, costs={"llm": {"linear": 0.0, "quadratic": 1.0}, "vision": {}, "audio": {}})
    assert all(np.array_equal(a, b) for a, b in zip(dear, moved, strict=True))
    offsets = index[0].offsets

    def uneven(steps: list[np.ndarray]) -> float:
        """Most over least tokens of the steps of a window, on average."""
        tokens = np.array([(offsets[s + 1] - offsets[s]).sum() for s in steps]).reshape(-1, 4)
        return float((tokens.max(axis=1) / tokens.min(axis=1)).mean())

    assert all(np.array_equal(a, b) for a, b in zip(plain, same, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(still, valued, strict=True))
    for first in range(0, 12, 4):
        window = slice(first, first + 4)
        assert sorted(np.concatenate(plain[window])) == sorted(np.concatenate(moved[window]))
        assert any(set(a) != set(b) for a, b in zip(plain[window], moved[window], strict=True))
    assert all(len(samples) == 5 for samples in moved)
    assert uneven(moved) - 1 < 0.3 * (uneven(plain) - 1)
