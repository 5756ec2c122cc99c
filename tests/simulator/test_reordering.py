"""Orders found for whole steps: never worse than planned on the schedules that would run, the same everywhere."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ScheduleError
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.plan_step import Size, plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.schedule.action import Action, Schedule, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import PlannedCosts, StageCost
from hetero_strategy.simulator.reordering import Reorderer, Replay
from hetero_strategy.simulator.simulate import simulate
from tests.schedule.cases import Module, cases, graph, makespan, work
from tests.simulator.schedules import chain, random_schedule

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
        each = law.per_row * rows + law.per_pair * squares
        once = each.max() if node.cohort < 0 else each.mean()  # instances of a cohort do not wait for each other
        parts = {"F": 1, "I": 1, "W": 1, "B": 2 if stages.stages[node].trains else 1}[action.kind]
        return float(once * (parts + (law.recomputed and action.kind != "F")))

    return makespan(make_schedule(name, stages, work, cost, max_in_flight=bounds), cost)


def never_worse_than_planned(name: str, data: st.DataObject, **options: str) -> None:
    """On any graph, shared ranks and instances included, with microbatches that modules skip."""
    stages, _ = data.draw(cases(name))
    count, seed = data.draw(st.integers(1, 10)), data.draw(st.integers(0, 2**32 - 1))
    sizes = drawn(stages, count, seed, data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    costs = costs_of(stages, seed)
    order = Reorderer(stages, name, costs, **options)(sizes)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(count))
    planned = taken(name, stages, costs, sizes, np.arange(count))
    assert taken(name, stages, costs, sizes, order) <= planned * (1 + 1e-9)


@pytest.mark.full_cases("zb_h1")
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_never_worse_than_planned(name: str, data: st.DataObject) -> None:
    never_worse_than_planned(name, data)


@pytest.mark.full_cases("0.0-1f1b-stages0-0.1")
@pytest.mark.parametrize(
    ("name", "stages", "least"), [("1f1b", APART, 0.1), ("zb_h1", APART, 0.1), ("1f1b", TOGETHER, 0.02)]
)
@pytest.mark.parametrize("skipped", [0.0, 0.3])
def test_it_gains(name: str, stages: StageGraph, least: float, skipped: float) -> None:
    """On the average of some steps."""
    ratios: dict[str, list[float]] = {"search": [], "none": []}
    costs = dict.fromkeys(stages.stages, StageCost(1.0, 0.0))
    for seed in range(4):
        sizes = drawn(stages, 16, seed, skipped)
        planned = taken(name, stages, costs, sizes, np.arange(16))
        for search, found in ratios.items():
            order = Reorderer(stages, name, costs, search=search)(sizes)
            found.append(taken(name, stages, costs, sizes, order) / planned)
    assert np.mean(ratios["search"]) < 1 - least
    assert ratios["none"] == [1.0] * 4


@pytest.mark.full
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
    balance = BalanceConfig.of({"policy": "none", "costs": given})
    instances = {"vision": 1, "llm": 2}
    plan = plan_step(metadata, instances, ("llm",), microbatches=6, balancing=balance.resolve(instances, around))
    planned = PlannedCosts(plan if measured else replace(plan, loads={}), stages, costs)
    for (kind, node), found in tables[0].items():
        expected = [planned(Action(kind, node, k)) for k in range(6)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    # The stages of a module share its time, here that of the slowest instance, as they share its FLOPs.
    for number, a in enumerate(plan.assignments["llm"] if measured else ()):
        times = [9.0 * float((a.inner_rows_of(i) ** 2).sum()) for i in (0, 1)]
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


BOTH = (("vision", "llm"), ("audio", "llm"), ("llm", "draw"))


def modules(llm: Module, *, shared: bool = False, audio: bool = False) -> StageGraph:
    """Encoders -> LLM on ranks 2.. -> generator; one instance each. Shared: the outer ones on the LLM's first ranks."""
    first = min(r for ranks in llm.ranks for r in ranks)
    outer = [first, first + 1] if shared else [0, 1]
    made = {"vision": Module([[outer[0]], [outer[1]]])}
    if audio:
        made["audio"] = Module([[outer[1]]])
    made |= {"llm": llm, "draw": Module([[outer[0] if shared else 90]])}
    return graph(made, BOTH if audio else EDGES)


CHAIN = [[r] for r in range(2, 5)]
SETTINGS: list[tuple[str, StageGraph]] = [
    ("1f1b", graph({"llm": Module([[0], [1], [2], [3]])})),
    ("1f1b", modules(Module(CHAIN))),
    ("1f1b", modules(Module(CHAIN), shared=True)),
    ("1f1b", modules(Module(CHAIN), audio=True)),
    ("interleaved_1f1b", graph({"llm": Module([[0], [1], [2], [3]], vpp=2)})),
    ("interleaved_1f1b", modules(Module(CHAIN, vpp=2), audio=True)),
    ("gpipe", modules(Module(CHAIN), shared=True)),
    ("zb_h1", modules(Module(CHAIN))),
    ("zb_h1", modules(Module(CHAIN), shared=True, audio=True)),
    ("zbv", graph({"llm": Module([[0], [1], [2]], vpp=2, style="v")})),
    ("sequential", modules(Module(CHAIN))),
]


def same(graph: StageGraph, count: int) -> StepWork:
    """Every module computes the microbatches of the step."""
    edges = [(s.module, t.module) for s, t in graph.edges if s.module != t.module]
    return work(count, *graph.pipelines, edges=edges)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s[0]}-{len(s[1].stages)}")
@pytest.mark.parametrize("count", [1, 3, 8])
def test_times_are_those_of_the_simulator(setting: tuple[str, StageGraph], count: int) -> None:
    schedule = make_schedule(setting[0], setting[1], same(setting[1], count))
    random = np.random.default_rng(count)
    for _ in range(5):
        costs = {a: float(random.lognormal()) for a in schedule.starts}
        assert step_time(schedule, costs) == pytest.approx(simulate(schedule, costs.__getitem__).time, rel=1e-12)


def step_time(schedule: Schedule, costs: Mapping[Action, float]) -> float:
    """Seconds of the step with its microbatches in their own places."""
    replay, count = Replay(schedule), 1 + max(a.microbatch for a in schedule.starts)
    table = {name: np.zeros(count) for name in replay.lines}
    for action, seconds in costs.items():
        table[action.kind, action.node][max(0, action.microbatch)] = seconds
    return float(replay.of_orders(replay.table(table, count), np.arange(count)[None])[0])


def shared(graph: StageGraph) -> bool:
    """Whether ranks have stages of several modules."""
    return any(len({n.module for n in nodes}) > 1 for nodes in graph.hosts)


def permuted(replay: Replay, table: np.ndarray, order: np.ndarray) -> Callable[[Action], float]:
    line = {name: i for i, name in enumerate(replay.lines)}
    return lambda a: float(table[line[a.kind, a.node], order[a.microbatch] if a.microbatch >= 0 else 0])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s[0]}-{len(s[1].stages)}")
def test_an_order_is_the_schedule_with_other_microbatches_in_its_places(setting: tuple[str, StageGraph]) -> None:
    count, random = 6, np.random.default_rng(0)
    schedule = make_schedule(setting[0], setting[1], same(setting[1], count))
    replay = Replay(schedule)
    costs = {name: random.lognormal(size=count) for name in replay.lines if name[0] not in ("UNSHARD", "REDUCE")}
    table = replay.table(costs, count)
    orders = np.array([random.permutation(count) for _ in range(300)])  # more than one block
    found = replay.of_orders(table, orders)
    for k in (0, 1, 150, 299):
        expected = simulate(schedule, permuted(replay, table, orders[k])).time
        assert found[k] == pytest.approx(expected, rel=1e-12)
    if setting[0] != "sequential":  # there one microbatch runs after another
        assert found.max() > 1.1 * found.min()  # negative control: it does see the order


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s[0] != "zb_h1" and not shared(s[1])], ids=lambda s: s[0])
def test_on_disjoint_ranks_the_schedule_made_for_an_order_is_the_same(setting: tuple[str, StageGraph]) -> None:
    """So for 1F1B and GPipe no order needs a schedule of its own; where W fills waits, costs decide the lists."""
    name, stages = setting
    random = np.random.default_rng(1)
    uniform = make_schedule(name, stages, same(stages, 5))
    costs = {a: float(random.lognormal()) for lane in uniform.lanes for a in lane.actions}
    assert make_schedule(name, stages, same(stages, 5), costs.__getitem__).lanes == uniform.lanes


@pytest.mark.parametrize("seed", range(40))
def test_instances_that_start_together_are_one(seed: int) -> None:
    """Any ranks: the slowest instance decides where all instances start together, and is a bound where they do not."""
    schedule, random = random_schedule(seed), np.random.default_rng(seed)
    stages = schedule.graph.stages
    actions = list(dict.fromkeys(a for lane in schedule.lanes for a in lane.actions))
    costs = {a: random.lognormal(size=len(stages[a.node].grid)) for a in actions}
    slowest = {a: float(costs[a].max()) for a in actions}
    found = step_time(schedule, slowest)
    assert found == pytest.approx(simulate(schedule, slowest.__getitem__, synchronous=list(stages)).time, rel=1e-12)
    assert found >= simulate(schedule, costs.__getitem__).time * (1 - 1e-12)


def test_equal_instances_are_one() -> None:
    schedule = chain(3, 5, instances=4, tp=2)
    random = np.random.default_rng(0)
    costs = {a: float(random.lognormal()) for a in schedule.starts}
    assert step_time(schedule, costs) == pytest.approx(simulate(schedule, costs.__getitem__).time, rel=1e-12)


def test_a_schedule_that_lost_a_dependency_is_told_apart() -> None:
    """Negative control: the same lists without the rows of one microbatch."""
    stages = modules(Module(CHAIN))
    schedule = make_schedule("1f1b", stages, same(stages, 4))
    feeds = dict(schedule.work.feeds)
    feeds["vision", "llm"] = feeds["vision", "llm"][1:]
    damaged = replace(schedule, work=replace(schedule.work, feeds=feeds))
    costs = dict.fromkeys(schedule.starts, 1.0)
    assert step_time(damaged, costs) < step_time(schedule, costs)


def test_starts_that_do_not_agree_with_the_lists_are_refused() -> None:
    schedule = make_schedule("1f1b", modules(Module(CHAIN)), same(modules(Module(CHAIN)), 4))
    for starts in (schedule.starts[::-1], schedule.starts[1:], schedule.starts[:-1]):
        with pytest.raises(ScheduleError, match="starts "):
            Replay(replace(schedule, starts=starts))


def test_an_empty_schedule_takes_no_time() -> None:
    stages = graph({"llm": Module([[0]])})
    empty = Schedule("1f1b", stages, StepWork({"llm": ()}, {}), frozenset(), True, (), {}, ())
    assert Replay(empty).of_orders(np.zeros((0, 0)), np.zeros((3, 0), np.int64)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.perf
def test_many_orders_take_little_time() -> None:
    """4096 actions for 256 orders, in 5 ms on an idle machine."""
    schedule = make_schedule("1f1b", graph({"llm": Module([[r] for r in range(16)])}), work(128))
    replay, random = Replay(schedule), np.random.default_rng(0)
    table = random.lognormal(size=(len(replay.lines), 128))
    orders = np.array([random.permutation(128) for _ in range(256)])
    took = []
    for _ in range(5):
        begin = time.process_time()
        replay.of_orders(table, orders)
        took.append(time.process_time() - begin)
    assert min(took) < 0.1
