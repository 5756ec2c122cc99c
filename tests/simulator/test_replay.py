"""A compiled schedule gives the times of `simulate`, for many durations and orders at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.simulator.replay import Replay
from hetero_strategy.simulator.simulate import simulate
from tests.schedule.cases import Module, graph, work
from tests.simulator.schedules import chain, random_schedule

ENDS = (("vision", "llm"), ("llm", "draw"))
BOTH = (("vision", "llm"), ("audio", "llm"), ("llm", "draw"))


def modules(llm: Module, *, shared: bool = False, audio: bool = False) -> StageGraph:
    """Encoders -> LLM on ranks 2.. -> generator; one instance each. Shared: the outer ones on the LLM's first ranks."""
    first = min(r for ranks in llm.ranks for r in ranks)
    outer = [first, first + 1] if shared else [0, 1]
    made = {"vision": Module([[outer[0]], [outer[1]]])}
    if audio:
        made["audio"] = Module([[outer[1]]])
    made |= {"llm": llm, "draw": Module([[outer[0] if shared else 90]])}
    return graph(made, BOTH if audio else ENDS)


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


def test_an_empty_schedule_takes_no_time() -> None:
    stages = graph({"llm": Module([[0]])})
    empty = Schedule("1f1b", stages, StepWork({"llm": ()}, {}), frozenset(), True, (), {})
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
