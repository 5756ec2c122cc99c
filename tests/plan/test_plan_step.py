"""Step plans with balancing: every unit once, budgets kept, whole samples, and never dearer than as sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.plan.balance import POLICIES, Cost, loads
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.near_home import place_batches
from hetero_strategy.plan.packing import levelled, pack, pieces
from hetero_strategy.plan.plan_step import Near, ResolvedBalance, UnitSizes, plan_step
from hetero_strategy.plan.step_plan import ModuleLoad, StepItems, StepMetadata, StepPlan
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import StageCost, stage_graph
from hetero_strategy.simulator.balance_context import model_context

MODULES = {"vision": 3, "audio": 2, "llm": 4, "draw": 2}
COSTS = {"llm": Cost(1.0, 0.01), "vision": Cost(2.0, 0.02), "audio": Cost(0.5, 0.1), "draw": Cost(fixed=3.0)}


def step(seed: int, samples: int = 40) -> StepMetadata:
    """Samples that are mostly of one modality, some of them only text."""
    rng = np.random.default_rng(seed)
    start = np.zeros(samples, dtype=np.int64)
    items = {}
    for name in ("vision", "audio", "draw"):
        counts = rng.integers(0, 3, samples) * (rng.random(samples) < 0.5)
        sample = np.repeat(np.arange(samples), counts)
        rows = rng.integers(1, 30, len(sample))
        before = np.cumsum(rows) - rows
        first = np.concatenate([[0], np.cumsum(counts)])[:-1]
        inside = start[sample] + before - (before[np.minimum(first, max(0, len(rows) - 1))][sample] if len(rows) else 0)
        items[name] = StepItems(sample, rows, inside, rows * 2)
        start = start + np.bincount(sample, weights=rows, minlength=samples).astype(np.int64)
    text = rng.integers(2, 60, samples)
    return StepMetadata(0, seed, np.arange(samples), start + text, text - 1, items)


def full(**changes: Any) -> ResolvedBalance:
    return replace(ResolvedBalance(policy=dict.fromkeys(MODULES, "auto"), costs=COSTS), **changes)


def backwards(sizes: UnitSizes) -> np.ndarray:
    return np.arange(len(sizes["llm"][0]))[::-1]


def check(plan: StepPlan) -> None:
    """Every unit exactly once, in a microbatch of its own module, items with a pair of microbatches that feed."""
    for name, made in plan.assignments.items():
        units = np.concatenate([a.units for a in made])
        total = len(plan.samples) if name == "llm" else len(plan.metadata.items[name].sample)
        assert np.array_equal(np.sort(units), np.arange(total)), name
        for a in made:
            assert a.offsets[0] == 0 and a.offsets[-1] == len(a.units) and (np.diff(a.offsets) >= 0).all()
    for name in plan.metadata.items:
        pairs = plan.feeds(*((name, "llm") if name != "draw" else ("llm", name)))
        assert pairs == sorted(pairs)
        ahead = [later for _, later in pairs]
        assert ahead == sorted(ahead), "rows of an edge must cross in one order"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 40),
    microbatches=st.integers(1, 5),
    own=st.dictionaries(st.sampled_from(["vision", "audio"]), st.one_of(st.integers(20, 200), st.just("equal"))),
    permuted=st.booleans(),
    reordered=st.booleans(),
    near=st.booleans(),
)
def test_every_unit_is_computed_once(
    seed: int, samples: int, microbatches: int, own: Any, permuted: bool, reordered: bool, near: bool
) -> None:
    places = {"vision": Near(np.array([0, 1, 1]), np.array([0, 0, 1, 1]), "llm")} if near else {}
    chosen = full(rearrange=place_batches if permuted else None, near=places, order=backwards if reordered else None)
    metadata = step(seed, samples)
    plan = plan_step(metadata, MODULES, ("llm",), microbatches=microbatches, microbatch_rows=own, balancing=chosen)
    check(plan)
    again = plan_step(metadata, MODULES, ("llm",), microbatches=microbatches, microbatch_rows=own, balancing=chosen)
    for name, made in plan.assignments.items():
        for a, b in zip(made, again.assignments[name], strict=True):
            assert np.array_equal(a.units, b.units) and np.array_equal(a.offsets, b.offsets)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("microbatches", [1, 3])
def test_balanced_is_cheaper_than_as_sampled(seed: int, microbatches: int) -> None:
    plan = plan_step(step(seed), MODULES, ("llm",), microbatches=microbatches, balancing=full())
    for name, load in plan.loads.items():
        assert load.after.sum() == pytest.approx(load.before.sum())
        assert load.after.max(axis=1).sum() <= load.before.max(axis=1).sum() * (1 + 1e-9), name
    assert ModuleLoad.imbalance(plan.loads["llm"].after) < 1.02 < ModuleLoad.imbalance(plan.loads["llm"].before)


def test_as_sampled_items_stay_with_their_samples() -> None:
    same = {"vision": 4, "audio": 2, "llm": 4, "draw": 4}
    plan = plan_step(
        step(1), same, ("llm",), microbatches=2, balancing=ResolvedBalance(policy=dict.fromkeys(same, "none"))
    )
    for number in range(2):
        at = dict(
            zip(plan.assignments["llm"][number].units.tolist(), plan.assignments["llm"][number].instance(), strict=True)
        )
        items = plan.assignments["vision"][number]
        samples = plan.metadata.items["vision"].sample[items.units]
        assert [at[s] for s in samples.tolist()] == items.instance().tolist()
    for load in plan.loads.values():
        assert np.allclose(load.before, load.after)


@pytest.mark.parametrize("seed", range(4))
def test_budgets_choose_microbatches_and_split_those_of_encoders(seed: int) -> None:
    metadata = step(seed)
    longest = int(metadata.tokens.max())
    images = int(metadata.items["vision"].inner_rows.max())
    chosen = full(budget={"llm": longest, "vision": images})
    plan = plan_step(metadata, MODULES, ("llm",), microbatches=None, balancing=chosen)
    check(plan)
    least = -(-int(metadata.tokens.sum()) // (longest * MODULES["llm"]))
    assert least <= plan.microbatches <= 2 * least + 1
    for name, most in (("llm", longest), ("vision", images)):
        assert (
            max(int(loads(a.inner_rows, a.instance(), MODULES[name], Cost()).max()) for a in plan.assignments[name])
            <= most
        )
    roomy = plan_step(metadata, MODULES, ("llm",), microbatches=None, balancing=full(budget={"llm": 10**6}))
    assert roomy.microbatches == 1


@pytest.mark.parametrize("policy", ["auto", "none"])
def test_a_number_of_microbatches_that_cannot_keep_a_budget_is_raised(policy: str) -> None:
    metadata = step(0)
    longest = int(metadata.tokens.max())
    tight = full(budget={"llm": longest}, policy=dict.fromkeys(MODULES, policy))
    fewest = plan_step(metadata, MODULES, ("llm",), microbatches=None, balancing=tight)
    assert fewest.microbatches > 1
    for asked in (1, fewest.microbatches):
        plan = plan_step(metadata, MODULES, ("llm",), microbatches=asked, balancing=tight)
        assert plan.digest == fewest.digest
    for asked in (fewest.microbatches + 3, len(metadata.samples) + 5):
        more = plan_step(metadata, MODULES, ("llm",), microbatches=asked, balancing=tight)
        check(more)
        rows = max(int(a.totals(inner=True).max()) for a in more.assignments["llm"])
        assert rows <= longest and more.microbatches >= asked
        assert policy == "none" or more.microbatches == asked


def test_a_policy_of_ones_own_that_fails_is_not_taken_for_a_budget_that_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "wrong", lambda lengths, bins, cost: lengths * 0.5)
    wrong = full(budget={"llm": 10**6}, policy={"llm": "wrong"})
    with pytest.raises(ConfigError, match=r"'llm', 1 microbatches x 4 instances: balance: policy 'wrong' gave float64"):
        plan_step(step(0), MODULES, ("llm",), microbatches=None, balancing=wrong)
    wrong = full(budget={"vision": 10**6}, policy={"vision": "wrong"})
    with pytest.raises(ConfigError, match=r"'vision', 3 instances: balance: policy 'wrong' gave float64"):
        plan_step(step(0), MODULES, ("llm",), microbatches=2, balancing=wrong)


def test_a_budget_that_cannot_be_kept_is_named() -> None:
    metadata = step(0)
    with pytest.raises(ConfigError, match=r"a sample has \d+ tokens, more than the budget of 5 of 'llm'"):
        plan_step(metadata, MODULES, ("llm",), microbatches=None, balancing=full(budget={"llm": 5}))
    with pytest.raises(ConfigError, match=r"an item has \d+ rows in 'vision', more than its budget of 3"):
        plan_step(metadata, MODULES, ("llm",), balancing=full(budget={"vision": 3}))
    longest = int(metadata.tokens.max())
    two = {"llm": 4, "caption": 2}
    with pytest.raises(ConfigError, match=r"'caption', 2 instances: balance: \d+ rows do not fit into 2 bins"):
        plan_step(
            metadata,
            two,
            tuple(two),
            balancing=ResolvedBalance(dict.fromkeys(two, "auto"), budget={"caption": longest}),
        )


def test_microbatches_run_in_the_order_that_is_chosen() -> None:
    plain = plan_step(step(2), MODULES, ("llm",), microbatches=4, balancing=full())
    turned = plan_step(step(2), MODULES, ("llm",), microbatches=4, balancing=full(order=backwards))
    for a, b in zip(plain.assignments["llm"], reversed(turned.assignments["llm"]), strict=True):
        assert np.array_equal(a.units, b.units) and np.array_equal(a.offsets, b.offsets)
    with pytest.raises(ValueError, match="no order of 4 microbatches"):
        plan_step(step(2), MODULES, ("llm",), microbatches=4, balancing=full(order=lambda sizes: np.zeros(4, int)))


def test_the_orderer_sees_every_module_whole() -> None:
    seen: list[UnitSizes] = []

    def order(sizes: UnitSizes) -> np.ndarray:
        seen.append(sizes)
        return np.arange(3)

    metadata = step(3)
    plan = plan_step(metadata, MODULES, ("llm",), microbatches=3, balancing=full(order=order))
    np.testing.assert_allclose(seen[0]["llm"].time, plan.loads["llm"].after)
    for name, count in MODULES.items():
        rows, squares, time = seen[0][name]
        hidden = metadata.tokens if name == "llm" else metadata.items[name].inner_rows
        assert rows.shape == squares.shape == (3, count)
        assert rows.sum() == pytest.approx(hidden.sum()) and squares.sum() == pytest.approx((hidden**2).sum())
        assert time is not None and time.shape == rows.shape
        if name != "llm":  # as if its items could be spread evenly: all instances are done at the same time
            assert time.sum() == pytest.approx(COSTS[name].alone(hidden).sum())
            assert (time == time[:, :1]).all()


def test_items_near_their_samples_cross_less_and_stay_balanced() -> None:
    everywhere = {"vision": 4, "audio": 4, "llm": 4, "draw": 4}
    nodes = np.array([0, 0, 1, 1])
    near = {name: Near(nodes, nodes, "llm") for name in ("vision", "draw")}
    metadata = step(5, samples=400)

    def crossing(chosen: ResolvedBalance) -> tuple[float, float]:
        plan = plan_step(metadata, everywhere, ("llm",), balancing=chosen)
        at = np.empty(400, dtype=np.int64)
        at[plan.assignments["llm"][0].units] = plan.assignments["llm"][0].instance()
        made = plan.assignments["vision"][0]
        away = nodes[made.instance()] != nodes[at[metadata.items["vision"].sample[made.units]]]
        return float(made.edge_rows[away].sum() / made.edge_rows.sum()), ModuleLoad.imbalance(
            plan.loads["vision"].after
        )

    anywhere, home, permuted = (
        crossing(full()),
        crossing(full(near=near)),
        crossing(full(near=near, rearrange=place_batches)),
    )
    assert home[0] < 0.3 * anywhere[0] and home[1] < 1.01
    assert permuted[0] <= anywhere[0] and permuted[1] == pytest.approx(anywhere[1])


def test_level_microbatches_cost_the_other_modules_the_same() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 60, 96)
    beside = rng.lognormal(0, 1.5, 96)
    packed = pack(tokens, 4, 6, Cost(), module="llm", other_costs=beside)
    totals = np.bincount(packed.microbatch, weights=beside)
    dealt = np.bincount(np.arange(96) % 6, weights=beside)
    assert totals.max() / totals.mean() < 1.1 < dealt.max() / dealt.mean()
    assert np.array_equal(np.bincount(packed.microbatch * 4 + packed.instance, minlength=24) > 0, np.ones(24, bool))


def test_nothing_beside_samples_costs_nothing() -> None:
    tokens = np.random.default_rng(0).integers(5, 600, 40)
    without, zeros = (pack(tokens, 2, 4, Cost(), module="llm", other_costs=beside) for beside in (None, np.zeros(40)))
    assert np.array_equal(without.microbatch, zeros.microbatch) and np.array_equal(without.instance, zeros.instance)


def test_levelled_and_pieces() -> None:
    assert np.bincount(levelled(np.array([9.0, 1, 1, 1, 1, 9]), 3, 2)).tolist() == [3, 3]
    weights = np.array([9.0, 1, 1, 1, 1, 9])
    assert np.bincount(levelled(weights, 3, 2), weights=weights).tolist() == [11, 11]
    group, count = pieces(np.array([1, 0, 1, 0]), np.array([1.0, 1, 1, 9]), 2)
    assert count == 2 and group.tolist() == [1, 0, 1, 0]
    group, count = pieces(np.array([0, 0, 0, 1]), np.ones(4), 2)
    assert group.tolist() == [0, 0, 1, 1], "the third item is computed with the next microbatch's"
    group, count = pieces(np.zeros(3, dtype=np.int64), np.array([2.0, 4, 2]), 2)
    assert group.tolist() == [0, 1, 1], "an item is where its middle lies"
    assert pieces(np.array([], dtype=np.int64), np.array([]), 3)[1] == 1


def test_what_a_person_can_get_wrong() -> None:
    for wrong, message in (
        ({"policy": "best"}, "policy is 'best'.*; names of papers need their import"),
        ({"policy": {"llm": "lpt", "vision": "x"}}, "policy is 'x'"),
        ({"rearrange": "near"}, "rearrange is 'near'.* imports=.hetero_strategy"),
        ({"reorder": "random"}, "reorder is 'random'"),
        ({"window": 0}, "window is 0"),
        ({"window": "2"}, "window is '2'"),
        ({"window": 1.5}, "window is 1.5"),
        ({"budget": {"llm": 0}}, "budget of 'llm' is 0"),
        ({"budget": {"llm": None}}, "budget of 'llm' is None; use a number of rows, at least 1"),
        ({"budget": {"llm": 100.5}}, "budget of 'llm' is 100.5"),
        ({"speeds": {"llm": [1, 2]}}, "has no field speeds"),
        (5, "balance=5; give a policy, or fields of BalanceConfig"),
        ({"budget": 4}, r"budget=4; give it by module, such as budget=\{'llm': ...\}"),
        ({"costs": {"llm": {"cubic": 1}}}, "costs of 'llm'"),
        ({"costs": {"llm": {"padding": "full"}}}, "costs have no padding; import .* use policy='padded'"),
        ({"polcy": "auto"}, "has no field polcy"),
    ):
        with pytest.raises(ConfigError, match=message):
            BalanceConfig.of(wrong)
    for name, wrong in (
        ("policy", {"lm": "lpt"}),
        ("budget", {"lm": 3}),
        ("costs", {"lm": {}}),
    ):
        with pytest.raises(ConfigError, match=f"{name} names 'lm'"):
            BalanceConfig.of({name: wrong}).check(("vision", "llm"))


def test_options_reach_the_plan() -> None:
    made = BalanceConfig.of(
        {"policy": {"vision": "lpt"}, "costs": {"vision": {"quadratic": 3}}, "rearrange": "home"}
    ).resolve(MODULES, ModelContext(costs=COSTS))
    assert made.policy == {"vision": "lpt", "audio": "auto", "llm": "auto", "draw": "auto"}
    assert made.cost("llm") == COSTS["llm"] and made.rearrange is None
    vision, typical = made.cost("vision"), np.array([128])  # in the unit of the others, which have none of their own
    assert vision.quadratic == pytest.approx(3 * vision.linear)
    assert vision.alone(typical) == pytest.approx(COSTS["vision"].alone(typical))
    every = {name: {"fixed": 2.0, "linear": 0.0} for name in MODULES}
    measured = BalanceConfig.of({"costs": every}).resolve(MODULES, ModelContext(costs=COSTS))
    assert set(measured.costs.values()) == {Cost(0.0, 0.0, 2.0)}, "costs of all modules are in one unit already"
    assert BalanceConfig.of("none").resolve(MODULES, ModelContext()).policy_of("llm") == "none"
    assert BalanceConfig.of(None) == BalanceConfig()
    of_earlier_run = {"llm": {"linear": 2.0, "padding": "none"}}
    assert BalanceConfig.of({"costs": of_earlier_run}).costs == {"llm": Cost(2.0)}


SAMPLES, MICROBATCHES, INSTANCES = 64, 16, 4
LINEAR = {"llm": Cost(1.0), "vision": Cost(0.5)}


def planned(
    beside: np.ndarray | None,
    seed: int = 0,
    budget: int | None = None,
    policy: str = "auto",
) -> StepPlan:
    """A sample has one image; four instances see four of these in a microbatch."""
    rows, numbers = np.random.default_rng(seed).integers(2, 40, SAMPLES), np.arange(SAMPLES)
    items = {"vision": StepItems(numbers, rows, np.zeros_like(rows), 4 * rows)}
    metadata = StepMetadata(0, seed, numbers, rows + 8, np.full(SAMPLES, 8), items)
    balancing = ResolvedBalance(
        policy={"llm": "auto", "vision": policy},
        costs=LINEAR,
        budget={} if budget is None else {"vision": budget},
        other_work={} if beside is None else {"vision": {"llm": beside}},
    )
    return plan_step(metadata, {"vision": INSTANCES, "llm": 1}, ["llm"], microbatches=MICROBATCHES, balancing=balancing)


def work(plan: StepPlan) -> np.ndarray:
    """Of each instance over the step."""
    total: np.ndarray = plan.loads["vision"].after.sum(axis=0)
    return total


def test_work_is_even_over_the_step_and_not_in_each_microbatch() -> None:
    apart = planned(np.zeros(INSTANCES))
    assert work(apart).max() < 1.03 * work(apart).mean()
    each = apart.loads["vision"].after
    assert (each.max(axis=1) > 1.5 * each.mean(axis=1)).any()
    units = np.concatenate([a.units for a in apart.assignments["vision"]])
    assert sorted(units.tolist()) == list(range(SAMPLES))


@pytest.mark.parametrize("shares", [(0.0, 0.1, 0.2, 0.3), (0.5, 0.5, 0.5, 0.6), (0.0, 0.0, 0.0, 9.0)])
def test_ranks_that_do_more_for_others_get_less(shares: tuple[float, ...]) -> None:
    plan = planned(np.array(shares))
    of_llm = float(plan.loads["llm"].after.sum())
    total = work(plan) + of_llm * np.array(shares)
    could = (work(plan).sum() + of_llm * np.array(shares)[:3].sum()) / 3
    if shares[3] == 9.0:
        assert work(plan)[3] == 0 and total[:3].max() < 1.03 * could
    else:
        assert np.ptp(total) < 0.05 * total.max()


@pytest.mark.parametrize("asked", [{"policy": "round_robin"}, {"policy": "none"}])
def test_what_was_asked_for_is_obeyed(asked: dict[str, Any]) -> None:
    shares = np.array([0.0, 0.0, 0.0, 9.0])
    for one, other in zip(*(planned(beside, **asked).assignments["vision"] for beside in (None, shares)), strict=True):
        assert np.array_equal(one.units, other.units) and np.array_equal(one.offsets, other.offsets)


def test_a_budget_is_kept() -> None:
    plan = planned(np.array([0.0, 9.0, 9.0, 9.0]), budget=256)
    assert max(a.totals(inner=True).max() for a in plan.assignments["vision"]) <= 256
    assert work(planned(np.array([0.0, 9.0, 9.0, 9.0])))[0] > work(plan)[0]


def test_what_else_a_rank_does_is_of_its_stages() -> None:
    """An LLM whose last stage has half of its work, below an encoder with an instance on each rank and one beside."""
    layouts = {
        "vision": ModuleLayout(range(4), dp_shard=4).resolved("vision"),
        "llm": ModuleLayout(range(3), pp=3).resolved("llm"),
    }
    stages = [StageId("vision", 0), *(StageId("llm", s) for s in range(3))]
    graph = stage_graph(list(layouts), [("vision", "llm")], layouts, dict.fromkeys(stages, True), apart=["vision"])
    costs = dict(zip(stages, (StageCost(1, 0), StageCost(1, 0), StageCost(1, 0), StageCost(2, 0)), strict=True))
    given = graph, costs, ["llm"], ScheduleConfig("1f1b", fill="fine"), place(layouts, 4), 8
    np.testing.assert_allclose(model_context(*given).other_work["vision"]["llm"], [0.25, 0.25, 0.5, 0.0])
    frozen = {**dict.fromkeys(stages, True), stages[0]: False}
    silent = stage_graph(list(layouts), [("vision", "llm")], layouts, frozen, apart=["vision"])
    beside = model_context(silent, *given[1:]).other_work["vision"]["llm"]
    np.testing.assert_allclose(beside, [0.75, 0.75, 1.5, 0.0])  # three times a forward, of which the encoder has one
