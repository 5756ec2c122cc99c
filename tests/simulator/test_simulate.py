"""Times and causes of idleness, against hand-made figures and an independent, slow simulator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.schedule.action import Action, Kind, Schedule, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.simulator.cluster import Links, Network
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.simulator.result import CAUSES, Host, Simulation
from hetero_strategy.simulator.simulate import Sent, pairs, rows_between, simulate
from hetero_strategy.testing.plans import batch, cluster, model
from tests.schedule.cases import damaged
from tests.simulator.schedules import chain, graph_of, in_order, random_schedule, schedule_of, work_of

UNIFORM = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "UNSHARD": 0.0, "REDUCE": 0.0}
ZERO = np.array([[0]])
V, A, L, L1 = StageId("vision", 0), StageId("audio", 0), StageId("llm", 0), StageId("llm", 1)


def uniform(action: Action) -> float:
    return UNIFORM[action.kind]


def assert_adds_up(simulation: Simulation) -> None:
    idle = sum(simulation.idle[cause] for cause in CAUSES)
    np.testing.assert_allclose(idle + simulation.busy, simulation.time, rtol=1e-12)
    assert all((simulation.idle[cause] >= 0).all() for cause in CAUSES)
    for place, rank in enumerate(simulation.ranks.tolist()):
        waits = simulation.waits(rank)
        times = sorted((*((w.start, w.end) for w in waits), *((start, end) for _, start, end in simulation.of(rank))))
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(times))
        for cause in CAUSES:
            total = sum(wait.end - wait.start for wait in waits if wait.cause == cause)
            assert total == pytest.approx(simulation.idle[cause][place], abs=1e-9)
    assert sum(simulation.bubble_by_cause.values()) == pytest.approx(simulation.bubble, abs=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_1f1b_has_the_closed_form(stages: int, microbatches: int) -> None:
    found = simulate(chain(stages, microbatches), uniform)
    assert found.time == 3.0 * (microbatches + stages - 1)
    assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-15)
    assert_adds_up(found)


def test_causes_of_a_chain() -> None:
    """Four stages, eight microbatches: the triangle before, the triangle after, the rest waits for later stages."""
    found = simulate(chain(4, 8), uniform)
    assert found.idle["warm-up"].tolist() == [0, 1, 2, 3]
    assert found.idle["cool-down"].tolist() == [0, 2, 4, 6]
    assert found.idle["dependency"].tolist() == [9, 6, 3, 0]
    assert not found.idle["boundary"].any() and not found.idle["straggler"].any()


def sent(table: npt.ArrayLike) -> Sent:
    """Bytes from every instance (row) to every other one, those that are more than 0."""
    each = np.asarray(table)
    return Sent(*np.nonzero(each), each[each > 0])


def forwards(microbatches: int, grids: dict[StageId, np.ndarray]) -> Schedule:
    graph = graph_of(grids, (("vision", "llm"),) if V in grids else ())
    order = [Action("F", node, i) for i in range(microbatches) for node in grids]
    return schedule_of(graph, work_of(graph, microbatches), order)


def test_transfers_take_time_but_not_the_sender() -> None:
    """F 1 s each; 3 s on the wire per transfer (30 bytes at 10 per second), 0.5 s latency, one after the other."""
    schedule = forwards(2, {L: np.array([[0]]), L1: np.array([[1]])})
    found = simulate(schedule, uniform, Links(0.5, 10.0), rows=lambda source, target: np.array([30.0]))
    assert [found.end[Action("F", L, i)].item() for i in range(2)] == [1, 2]
    assert [found.start[Action("F", L1, i)].item() for i in range(2)] == [4.5, 7.5]  # the second left at 4, not 2
    assert found.time == 8.5
    assert found.idle["warm-up"].tolist() == [0, 4.5]
    assert found.idle["boundary"].tolist() == [0, 2]
    assert found.idle["cool-down"].tolist() == [6.5, 0]
    assert_adds_up(found)


def test_main_threads_take_time_before_between_and_after_actions() -> None:
    """Two stages, two microbatches: rank 0 begins at 0.5, rank 1 could at 1; 0.25 s after actions, 2 s at the end."""
    found = simulate(chain(2, 2), uniform, host=Host({0: 0.5, 1: 1.0}, lambda action: 0.25, 2.0))
    assert [start for _, start, _ in found.of(0)] == [0.5, 1.75, 4.75, 8.25]
    assert [start for _, start, _ in found.of(1)] == [1.5, 2.75, 5.0, 6.25]
    assert found.time == 10.25 + 2.0
    assert found.idle["warm-up"].tolist() == [0.5, 1.5]
    assert found.idle["host"].tolist() == [0.75, 0.75]
    assert found.idle["cool-down"].tolist() == [2.0, 4.0]
    assert found.busy.tolist() == [6.0, 6.0]
    assert_adds_up(found)


def test_bytes_of_several_senders_share_the_receivers_wire() -> None:
    """Two instances send 20 and 40 bytes at 10 per second; the first is done at 1 s, the second at 1 s too."""
    schedule = forwards(1, {V: np.array([[0], [1]]), L: np.array([[2]])})
    found = simulate(schedule, uniform, Links(0.5, 10.0), rows=lambda source, target: sent([[20.0], [40.0]]))
    assert found.start[Action("F", L, 0)].tolist() == [1 + 0.5 + 6]


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 8.0), (2, 4.0), (8, 2.0)])
def test_bytes_to_several_receivers_share_the_senders_wire(ranks: int, seconds: float) -> None:
    """An instance sends 20 bytes to each of four at 10 per second, from each of its ranks a share."""
    schedule = forwards(1, {V: np.arange(ranks)[None], L: 8 + np.arange(4)[:, None]})
    found = simulate(schedule, uniform, Links(0.5, 10.0), rows=lambda source, target: sent([[20.0] * 4]))
    assert found.start[Action("F", L, 0)].tolist() == [1 + 0.5 + seconds] * 4


def test_parts_of_rows_leave_for_every_rank_and_equal_ones_once() -> None:
    """An instance of one rank sends 20 bytes to each of two ranks, which have the same rows or each a part of them."""
    for parts, seconds in ((1, 2.0), (2, 4.0)):
        schedule = forwards(1, {V: np.array([[0]]), L: np.array([[1, 2]])})
        stages = schedule.graph.stages
        graph = replace(schedule.graph, stages={**stages, L: replace(stages[L], row_sharding=RowSharding(parts))})
        found = simulate(replace(schedule, graph=graph), uniform, Links(0.5, 10.0), lambda a, b: sent([[20.0]]))
        assert found.start[Action("F", L, 0)].tolist() == [1 + 0.5 + seconds]


def test_an_instance_that_receives_nothing_does_not_wait_for_what_others_bring() -> None:
    """The second microbatch of the encoder runs first, and the first one gives nothing to the language model."""
    schedule = forwards(2, {V: np.array([[0]]), L: np.array([[1]])})
    order = [Action("F", V, 1), Action("F", V, 0), Action("F", L, 0), Action("F", L, 1)]
    schedule = schedule_of(schedule.graph, schedule.work, order)
    found = simulate(schedule, uniform, Links(0.5, 10.0), lambda a, b: sent([[20.0 * a.microbatch]]))
    assert [found.start[Action("F", L, i)].item() for i in range(2)] == [0, 1 + 0.5 + 2]


def test_rows_of_two_modules_on_the_same_ranks_come_one_after_the_other() -> None:
    other = StageId("audio", 0)
    graph = graph_of({V: ZERO, other: ZERO, L: ZERO + 1}, (("vision", "llm"), ("audio", "llm")))
    reads = Action("F", L, 0)
    schedule = schedule_of(graph, work_of(graph, 1), [Action("F", V, 0), Action("F", other, 0), reads])
    found = simulate(schedule, uniform, Links(0.5, 10.0), lambda a, b: sent([[30.0]]))
    assert found.start[reads].tolist() == [1 + 0.5 + 3 + 3]


def test_a_network_is_faster_within_its_nodes() -> None:
    """Ranks 0 and 1 are on one node, 2 and 3 on another one."""
    network = Network(Links(0.1, 10.0), Links(0.5, 1.0), 2)
    of = network.between(np.array([[0], [1], [2]]), np.array([[1], [3]]))
    latency, per_byte = of(np.array([0, 1, 1, 2, 2]), np.array([0, 0, 1, 0, 1]))
    assert latency.tolist() == [0.1, 0.0, 0.5, 0.5, 0.1] and per_byte.tolist() == [0.1, 0.0, 1.0, 1.0, 0.1]


def test_rows_between_the_same_ranks_take_no_time() -> None:
    for second, start in (([[1]], 5.0), ([[0]], 1.0)):
        schedule = forwards(1, {L: np.array([[0]]), L1: np.array(second)})
        found = simulate(schedule, uniform, Links(1.0, 10.0), rows=lambda source, target: np.array([30.0]))
        assert found.start[Action("F", L1, 0)].item() == start


def test_between_modules_all_instances_are_awaited_unless_rows_say_who_sends() -> None:
    schedule = forwards(1, {V: np.array([[0], [1]]), L: np.array([[2], [3]])})

    def costs(action: Action) -> np.ndarray:
        return np.array([1.0, 5.0]) if action.node == V else np.array([1.0, 1.0])

    reads = Action("F", L, 0)
    assert simulate(schedule, costs).start[reads].tolist() == [5, 5]
    pairs = simulate(schedule, costs, Links(0.5, 10.0), rows=lambda source, target: sent([[20.0, 0], [0, 40.0]]))
    assert pairs.start[reads].tolist() == [3.5, 9.5]
    none = simulate(schedule, costs, Links(0.5), rows=lambda source, target: sent(np.zeros((2, 2))))
    assert none.start[reads].tolist() == [0, 0]


def test_ranks_of_an_instance_wait_for_one_another_and_instances_do_not() -> None:
    """The LLM's instance (0, 1) waits for rank 0, which has an encoder; instance (2, 3) does not."""
    graph = graph_of({V: np.array([[0]]), L: np.array([[0, 1], [2, 3]])})
    order = [Action("F", L, 0), Action("F", V, 0), Action("F", L, 1), Action("REDUCE", L)]
    schedule = schedule_of(graph, work_of(graph, 2), order)
    found = simulate(schedule, lambda action: 0.25 if action.kind == "REDUCE" else 1.0)
    assert found.start[Action("F", L, 1)].tolist() == [2, 1]
    assert found.start[Action("REDUCE", L)].tolist() == [3, 3]
    assert found.idle["straggler"].tolist() == [0, 1, 1, 1]
    assert found.time == 3.25
    together = simulate(schedule, lambda action: 0.25 if action.kind == "REDUCE" else 1.0, synchronous=(L,))
    assert together.start[Action("F", L, 1)].tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["UNSHARD", "REDUCE"])
@pytest.mark.parametrize(("seconds", "starts"), [(0.0, [1, 3]), (0.25, [3, 3])])
def test_collectives_that_take_time_are_begun_together(kind: Kind, seconds: float, starts: list[float]) -> None:
    """Those beside compute take none, and hold no instance up."""
    graph = graph_of({V: np.array([[0], [1]]), L: np.array([[0], [1]])})
    last = Action(kind, L)
    schedule = schedule_of(graph, work_of(graph, 1), [Action("F", V, 0), last])

    def costs(action: Action) -> np.ndarray:
        return np.full(2, seconds) if action == last else np.array([1.0, 3.0])

    assert simulate(schedule, costs).start[last].tolist() == starts


def test_a_rank_without_work_is_idle_all_the_time() -> None:
    graph = graph_of({V: np.array([[7]]), L: np.array([[0]])})
    schedule = schedule_of(graph, work_of(graph, 1), [Action("F", L, 0)])
    for lanes in (schedule.lanes, tuple(lane for lane in schedule.lanes if lane.actions)):
        found = simulate(replace(schedule, lanes=lanes), uniform)
        assert found.ranks.tolist() == [0, 7] and found.idle["warm-up"].tolist() == [0, 1]
        assert_adds_up(found)
        assert found.of(7) == []


def slow(
    schedule: Schedule, costs: Callable[[Action], np.ndarray], latency: float, pairs: np.ndarray
) -> dict[tuple[Action, int], float]:
    """(action, instance) -> end, by looking back from each action; written apart from the simulator."""
    stages = schedule.graph.stages

    @cache
    def end(action: Action, instance: int) -> float:
        begin = 0.0
        together = range(len(stages[action.node].grid)) if action.microbatch < 0 else [instance]
        for each in together:
            for rank in stages[action.node].grid[each].tolist():
                own = schedule.of(rank)
                at = own.index(action)
                if at > 0:
                    before = own[at - 1]
                    place = [i for i, row in enumerate(stages[before.node].grid.tolist()) if rank in row]
                    begin = max(begin, end(before, place[0]))
        for source in schedule.dependencies.crossing(action):
            for other, row in enumerate(stages[source.node].grid.tolist()):
                inner = source.node.module == action.node.module
                meets = other == instance if inner else pairs[other, instance]
                if meets:
                    away = sorted(row) != sorted(stages[action.node].grid[instance].tolist())
                    begin = max(begin, end(source, other) + latency * away)
        return begin + float(costs(action)[instance])

    return {(a, i): end(a, i) for lane in schedule.lanes for a in lane.actions for i in range(len(stages[a.node].grid))}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), latency=st.sampled_from([0.0, 0.3]))
def test_any_schedule_agrees_with_the_slow_simulator_and_adds_up(seed: int, latency: float) -> None:
    schedule = random_schedule(seed)
    rng = np.random.default_rng(seed)
    table: dict[Action, np.ndarray] = {}
    pairs = rng.random((2, 2)) < 0.6

    def costs(action: Action) -> np.ndarray:
        if action not in table:
            table[action] = rng.uniform(0.1, 2.0, len(schedule.graph.stages[action.node].grid))
        return table[action]

    def rows(source: Action, target: Action) -> np.ndarray:
        count = [len(schedule.graph.stages[a.node].grid) for a in (source, target)]
        return pairs[: count[0], : count[1]].astype(float)

    def inner_or_rows(source: Action, target: Action) -> np.ndarray | Sent:
        each = rows(source, target)
        return np.ones(len(each)) if source.node.module == target.node.module else sent(each)

    found = simulate(schedule, costs, Links(latency), inner_or_rows)
    for (action, instance), end in slow(schedule, costs, latency, pairs).items():
        assert found.end[action][instance] == pytest.approx(end, abs=1e-12)
    assert_adds_up(found)
    for rank in found.ranks.tolist():
        events = found.of(rank)
        assert [a for a, *_ in events] == list(schedule.of(rank))
        assert all(before[2] <= after[1] for before, after in pairwise(events))


def test_another_order_takes_another_time() -> None:
    """Negative control: the figures follow from the lists, not from the graph."""
    schedule = chain(4, 8)
    last = list(schedule.lanes[3].actions)
    last[1:3] = last[2:0:-1]  # F0 F1 B0 ... in place of F0 B0 F1 ...
    assert (
        simulate(in_order(damaged(schedule, 3, last)), uniform).time == 34.0 > simulate(schedule, uniform).time == 33.0
    )


def test_starts_before_what_they_need_are_refused() -> None:
    schedule = chain(2, 2)
    with pytest.raises(ScheduleError, match=r"llm\.0 B1 starts before llm\.1 B1, which it needs; see schedule\.check"):
        simulate(replace(schedule, starts=schedule.starts[::-1]), uniform)


@pytest.mark.parametrize("seed", range(20))
def test_any_action_before_one_that_it_needs_is_refused(seed: int) -> None:
    schedule = random_schedule(seed)
    for action in schedule.starts:
        for need in schedule.dependencies.before(action):
            others = [a for a in schedule.starts if a != action]
            others.insert(others.index(need), action)
            with pytest.raises(ScheduleError, match=f"{action} starts before "):
                simulate(replace(schedule, starts=tuple(others)), uniform)


def test_what_cannot_run_is_refused() -> None:
    whole = make_schedule("1f1b", chain(2, 2).graph, chain(2, 2).work)
    whole = replace(whole, in_flight=dict.fromkeys(whole.graph.stages, 2))
    simulate(whole, uniform)
    first, second = (list(lane.actions) for lane in whole.lanes)
    backward_first = [first[2], *first[:2], *first[3:]]
    broken = {
        "rank 0 runs llm.0 B0 before llm.0 F0": damaged(whole, 0, backward_first),
        "rank 0 never runs llm.0 F0": damaged(whole, 0, first[1:]),
        "rank 0 runs llm.0 F0 2 times": damaged(whole, 0, [first[0], *first]),
        "rank 0 has llm.1 F0 in its list but does not host llm.1": damaged(whole, 0, [*first, second[0]]),
        "rank 1 hosts llm.1 but is in no lane": replace(whole, lanes=whole.lanes[:1]),
        "deadlock: rank 0 waits in llm.0 B0 for .*llm.1 B0; rank 1 waits in llm.1 F1 for .*llm.0 F1": damaged(
            damaged(whole, 0, [first[0], first[2], first[1], *first[3:]]),
            1,
            [second[0], second[2], second[1], *second[3:]],
        ),
    }
    for reason, schedule in broken.items():
        with pytest.raises(ScheduleError, match=reason):
            check(schedule)


def test_independent_encoders_run_beside_each_other() -> None:
    """On ranks of their own they take the time of one; on one rank the time of both."""

    def of(audio: int) -> float:
        grids = {V: np.array([[0]]), A: np.array([[audio]]), L: np.array([[2]])}
        graph = graph_of(grids, (("vision", "llm"), ("audio", "llm")))
        schedule = make_schedule("1f1b", graph, work_of(graph, 16))
        return simulate(schedule, lambda a: uniform(a) * (0.1 if a.node == L else 1)).time

    assert of(audio=1) / of(audio=0) < 0.55


def test_what_has_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cost of llm.0 F0 .*\[1\]"):
        simulate(chain(2, 2), lambda action: np.ones(3))
    with pytest.raises(ValueError, match=r"bytes from llm.0 F0 to llm.1 F0 .*, got \(1, 1\)"):
        simulate(chain(2, 2), uniform, rows=lambda source, target: np.ones((1, 1)))


@pytest.mark.full
def test_ten_thousand_ranks_with_encoders_on_all_of_them() -> None:
    """LLM pp16 dp78 tp8; one encoder replica on each of its 9984 ranks, another on half; 64 microbatches."""
    world = 9984
    grids = {V: np.arange(world)[:, None], A: np.arange(world // 2)[:, None]}
    grids |= {StageId("llm", s): np.arange(624).reshape(78, 8) + 624 * s for s in range(16)}
    graph = graph_of(grids, (("vision", "llm"), ("audio", "llm")))
    schedule = make_schedule("1f1b", graph, work_of(graph, 64))
    begin = time.process_time()
    found = simulate(schedule, lambda a: 1e-3 * uniform(a), Links(2e-5))
    assert time.process_time() - begin < 30
    assert len(found.ranks) == world
    np.testing.assert_allclose(sum(found.idle[c] for c in CAUSES) + found.busy, found.time, rtol=1e-9)


@pytest.mark.full
def test_ten_thousand_ranks() -> None:
    schedule = chain(16, 64, instances=78, tp=8)
    rng = np.random.default_rng(0)
    begin = time.process_time()
    found = simulate(
        schedule,
        lambda action: UNIFORM[action.kind] * rng.uniform(0.9, 1.1, 78),
        Links(1e-2, 1e8),
        rows=lambda source, target: np.full(78, 1e6),
    )
    assert time.process_time() - begin < 30
    assert len(found.ranks) == 9984 and 3 * 79 < found.time < 3.3 * 79
    assert_adds_up(found)


RANKS = 8


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_receives_its_part_of_the_rows(tp: int, backward: bool) -> None:
    """Of the rows of a language model a tensor-parallel rank has a part; of those of the encoder every rank has all."""
    evaluator = Evaluator(CostModel(model(), cluster(RANKS)), [batch(16)], balance=BalanceConfig(reorder="none"))
    layouts = {"vision": ModuleLayout(range(4)), "llm": ModuleLayout(range(4, RANKS), tp=tp)}
    step = evaluator.step(evaluator.place(Candidate(layouts, microbatches=2)))
    width = evaluator.row_bytes(V, L)
    received = np.zeros(RANKS)
    for rank in range(RANKS):
        for transfer in compile_step(step.plan, step.schedule, rank).transfers:
            if transfer.microbatches == (0, 0) and transfer.backward == backward:
                both = (transfer.transfer.first, transfer.transfer.second)
                received[rank] += sum(rows.size for hop in both for _, rows in hop.receives) * width
    ends = [Action("F", V, 0), Action("F", L, 0)]
    if backward:
        ends = [Action("B", ends[1].node, 0), Action("B", ends[0].node, 0)]
    flow = pairs(rows_between(step.plan, step.placed.graph, evaluator.row_bytes)(*ends))
    grid = step.placed.graph.stages[ends[1].node].grid
    simulated = np.bincount(flow.target, flow.bytes, len(grid))
    assert simulated == pytest.approx(received[grid].mean(axis=1))
    assert simulated.all()
