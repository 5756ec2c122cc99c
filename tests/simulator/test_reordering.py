"""Orders found for whole steps: never worse than planned on the schedules that would run, the same everywhere."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.orchestrator import Size, plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.schedule.action import Action, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import PlannedCosts, StageCost
from hetero_strategy.simulator.reordering import Reorderer
from tests.schedule.cases import Module, cases, graph, makespan

Sizes = dict[str, Size]
EDGES = (("vision", "llm"), ("llm", "draw"))
APART = graph({"vision": Module([[0], [1]]), "llm": Module([[r] for r in range(2, 7)]), "draw": Module([[7]])}, EDGES)
TOGETHER = graph({"vision": Module([[0, 1, 2, 3]]), "llm": Module([[0], [1], [2], [3]]), "draw": Module([[3]])}, EDGES)


def drawn(stages: StageGraph, count: int, seed: int, skipped: float = 0.0) -> Sizes:
    """Rows and squares of every instance; outer modules skip some microbatches."""
    random = np.random.default_rng(seed)
    found: Sizes = {}
    for module in stages.pipelines:
        instances = sum(len(stages.stages[chain[0]].grid) for chain in stages.chains[module])
        rows = random.lognormal(3, 0.8, (count, 1)) * random.uniform(0.7, 1.0, (count, instances))
        if module != "llm":
            rows *= random.random((count, 1)) >= skipped
        found[module] = Size(rows, rows * rows)
    return found


def costs_of(stages: StageGraph, seed: int = 0) -> dict[StageId, StageCost]:
    random = np.random.default_rng(seed)
    return {
        n: StageCost(random.uniform(1, 3), random.uniform(0, 0.01), bool(random.random() < 0.3))
        for n in dict.fromkeys(node.all_instances for node in stages.stages)
    }


def taken(
    name: str,
    stages: StageGraph,
    costs: Mapping[StageId, StageCost],
    sizes: Sizes,
    order: np.ndarray,
    bounds: Mapping[str, int] | None = None,
    fill: str = "fine",
) -> float:
    """Seconds of the step on the schedule made for this order, written without what is tested."""
    there = {m: [k for k, o in enumerate(order) if sizes[m][0][o].any()] for m in stages.pipelines}
    edges = {(s.module, t.module) for s, t in stages.edges if s.module != t.module}
    work = StepWork(
        {m: tuple(Span(k, k, k) for k in ks) for m, ks in there.items()},
        {(a, b): tuple((k, k) for k in there[a] if k in there[b]) for a, b in edges},
    )

    def cost(action: Action) -> float:
        if action.microbatch < 0:
            return 0.0
        node, law = action.node, costs[action.node.all_instances]
        rows, squares = (stages.stages[node].own(x[order[action.microbatch]]) for x in sizes[node.module][:2])
        once = max(law.per_row * r + law.per_pair * s for r, s in zip(rows, squares, strict=True))
        parts = {"F": 1, "I": 1, "W": 1, "B": 2 if stages.stages[node].trains else 1}[action.kind]
        return float(once * (parts + (law.recomputed and action.kind != "F")))

    return makespan(make_schedule(name, stages, work, cost, max_in_flight=bounds, fill=fill), cost)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_never_worse_than_planned(name: str, data: st.DataObject) -> None:
    """On any graph, shared ranks and instances included, with microbatches that modules skip."""
    stages, _ = data.draw(cases(name))
    count, seed = data.draw(st.integers(1, 10)), data.draw(st.integers(0, 2**32 - 1))
    sizes = drawn(stages, count, seed, data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    costs = costs_of(stages, seed)
    search, fill = data.draw(st.sampled_from(["search", "interval"])), data.draw(st.sampled_from(["fine", "search"]))
    order = Reorderer(stages, name, costs, search=search, fill=fill)(sizes)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(count))
    planned = taken(name, stages, costs, sizes, np.arange(count))
    assert taken(name, stages, costs, sizes, order, fill=fill) <= planned * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "stages", "least"), [("1f1b", APART, 0.1), ("zb_h1", APART, 0.1), ("1f1b", TOGETHER, 0.02)]
)
@pytest.mark.parametrize("skipped", [0.0, 0.3])
def test_it_gains(name: str, stages: StageGraph, least: float, skipped: float) -> None:
    """More than DistTrain's order; the average of some steps."""
    ratios: dict[str, list[float]] = {"search": [], "interval": [], "none": []}
    costs = dict.fromkeys(stages.stages, StageCost(1.0, 0.0))
    for seed in range(4):
        sizes = drawn(stages, 16, seed, skipped)
        planned = taken(name, stages, costs, sizes, np.arange(16))
        for search, found in ratios.items():
            order = Reorderer(stages, name, costs, search=search)(sizes)
            found.append(taken(name, stages, costs, sizes, order) / planned)
    assert np.mean(ratios["search"]) < 1 - least
    assert np.mean(ratios["search"]) < np.mean(ratios["interval"]) <= 1
    assert ratios["none"] == [1.0] * 4


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_order_and_schedule_searched_together_gain_more(name: str) -> None:
    """Never longer than the order found and run as ``fine``, and in the mean of some steps shorter than the order found
    for ``fine`` whose schedule is then searched.
    """
    costs = dict.fromkeys(TOGETHER.stages, StageCost(1.0, 0.0))
    gained = []
    for seed in range(2):
        sizes = drawn(TOGETHER, 12, seed)
        fine, searched = (Reorderer(TOGETHER, name, costs, fill=fill)(sizes) for fill in ("fine", "search"))
        plain, alone = (taken(name, TOGETHER, costs, sizes, fine, fill=fill) for fill in ("fine", "search"))
        together = taken(name, TOGETHER, costs, sizes, searched, fill="search")
        assert together <= alone * (1 + 1e-9) and alone <= plain * (1 + 1e-9)
        gained.append(together / alone)
    assert np.mean(gained) < 0.999


def test_the_same_whatever_came_before_and_after_a_pickle() -> None:
    """Ranks and loader workers see different steps first."""
    for stages, name in ((APART, "1f1b"), (TOGETHER, "1f1b"), (APART, "zb_h1")):
        fresh = Reorderer(stages, name, costs_of(stages))
        used = pickle.loads(pickle.dumps(fresh))
        for seed, skipped in ((1, 0.5), (2, 0.0)):
            used(drawn(stages, 12, seed, skipped))
        used = pickle.loads(pickle.dumps(used))
        for skipped in (0.0, 0.4):
            sizes = drawn(stages, 12, 3, skipped)
            assert used(sizes).tolist() == fresh(sizes).tolist()


def test_where_all_ranks_do_the_same_it_is_not_needed() -> None:
    colocated = graph({"vision": Module([[0, 1]]), "llm": Module([[0, 1]])}, EDGES[:1])
    alone = Reorderer(colocated, "1f1b", costs_of(colocated))
    assert not alone.needed and alone(drawn(colocated, 5, 0)).tolist() == [0, 1, 2, 3, 4]
    assert Reorderer(APART, "1f1b", costs_of(APART)).needed
    assert not Reorderer(APART, "1f1b", costs_of(APART), search="none").needed
    for count in (0, 1):
        assert Reorderer(APART, "1f1b", costs_of(APART))(drawn(APART, count, 0)).tolist() == list(range(count))


@pytest.mark.parametrize("measured", [False, True])
def test_costs_are_those_that_schedules_are_made_with(measured: bool) -> None:
    """The table of costs against `PlannedCosts` of a step plan whose microbatches lie in the order found."""
    random = np.random.default_rng(0)
    samples = 24
    rows = random.integers(1, 40, samples)
    items = StepItems(np.arange(samples), rows, np.zeros(samples, np.int64), 4 * rows)
    tokens = rows + random.integers(5, 60, samples)
    metadata = StepMetadata(0, 0, np.arange(samples), tokens, tokens - 1, {"vision": items})
    stages = graph({"vision": Module([[0], [1]]), "llm": Module([[2, 4], [3, 5]])}, EDGES[:1])
    costs = costs_of(stages)
    tables = []

    def order(sizes: Sizes) -> np.ndarray:
        made = Reorderer(stages, "1f1b", costs)
        tables.append(made._table(sizes if measured else {m: Size(s.rows, s.squares) for m, s in sizes.items()}))
        return np.arange(6)

    given = {"vision": {"linear": 3.0, "fixed": 70.0}, "llm": {"linear": 0.0, "quadratic": 9.0}}
    around = ModelContext(orderer=lambda search: order)
    balance = BalanceConfig.of({"policy": "none", "costs": given, "speeds": {"llm": [1, 4], "vision": [0.5]}})
    instances = {"vision": 1, "llm": 2}
    plan = plan_step(metadata, instances, ("llm",), microbatches=6, balancing=balance.resolve(instances, around))
    planned = PlannedCosts(plan if measured else replace(plan, loads={}), stages, costs)
    for (kind, node), found in tables[0].items():
        expected = [planned(Action(kind, node, k)) for k in range(6)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    # The stages of a module share its time, here that of the slowest instance, as they share its FLOPs.
    for number, a in enumerate(plan.assignments["llm"] if measured else ()):
        times = [9.0 * float((a.inner_rows_of(i) ** 2).sum()) / pace for i, pace in enumerate((1, 4))]
        parts = [planned.of_instances(Action("F", node, number)) for node in stages.nodes_of("llm")]
        np.testing.assert_allclose(sum(parts), times, rtol=1e-12)
        flops = [costs[n].of(*(np.array([(a.inner_rows_of(i) ** p).sum() for i in (0, 1)]) for p in (1, 2)))
                 for n in stages.nodes_of("llm")]  # fmt: skip
        np.testing.assert_allclose(parts[0] / parts[1], flops[0] / flops[1], rtol=1e-12)


def test_a_measured_cost_changes_the_order() -> None:
    """FLOPs say that all microbatches are alike; the run said that one module's take very different times."""
    rows, costs = np.full((8, 1), 100.0), dict.fromkeys(APART.stages, StageCost(1.0, 0.0))
    alike = {m: Size(rows.repeat(len(APART.stages[StageId(m, 0)].grid), 1), rows * rows) for m in APART.pipelines}
    reorderer = Reorderer(APART, "1f1b", costs)
    assert reorderer(alike).tolist() == list(range(8))
    time = np.random.default_rng(0).lognormal(3, 1, (8, 1))
    known = {**alike, "llm": alike["llm"]._replace(time=time)}
    order = reorderer(known)
    seen = {**alike, "llm": Size(time / 5, 0.0 * time)}  # the same told in rows: five stages share them
    assert order.tolist() != list(range(8)) and taken("1f1b", APART, costs, seen, order) < taken(
        "1f1b", APART, costs, seen, np.arange(8)
    )


def test_bounds_are_kept() -> None:
    costs, sizes = costs_of(APART), drawn(APART, 8, 0)
    bounds = {"vision": 9, "llm": 5}
    order = Reorderer(APART, "1f1b", costs, bounds)(sizes)
    planned = taken("1f1b", APART, costs, sizes, np.arange(8), bounds)
    assert taken("1f1b", APART, costs, sizes, order, bounds) < planned
    assert Reorderer(APART, "gpipe", costs, {"llm": 2})(sizes).tolist() == list(range(8)), "the step's may keep it"


@pytest.mark.perf
def test_it_is_cheap_enough_for_a_loader_worker() -> None:
    """Eight ranks, 32 microbatches: some 15 ms on an idle machine."""
    reorderer, took = Reorderer(APART, "1f1b", costs_of(APART)), []
    for seed in range(5):
        sizes = drawn(APART, 32, seed)
        begin = time.process_time()
        reorderer(sizes)
        took.append(time.process_time() - begin)
    assert min(took) < 0.1
