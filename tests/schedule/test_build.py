"""Orders as tables, on chains and on graphs of modules, and their bounds."""

from __future__ import annotations

import ast
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch.distributed.pipelining.schedules as tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.spec import ModuleLayout, Pipeline
from hetero_strategy.plan.step_plan import Assignment, StepItems, StepMetadata, StepPlan
from hetero_strategy.schedule.action import Action, Kind, Schedule, Span, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.fill import fills
from hetero_strategy.schedule.graph import PlannedCosts, StageCost, stage_graph
from hetero_strategy.schedule.policies import SCHEDULES, ModuleSteps, schedule_policy, schedules
from hetero_strategy.schedule.programs import duration
from tests.schedule.cases import Module, cases, chain, clock, graph, listed, makespan, uniform, work

LLM0 = StageId("llm", 0)
TO_LLM = [("vision", "llm"), ("audio", "llm")]


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def test_1f1b_table() -> None:
    """PipeDream-Flush, p = 4, m = 8."""
    assert listed(make_schedule("1f1b", chain(4), work(8))) == lines("""
        F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
        F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
        F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
    """)


def test_gpipe_and_sequential_tables() -> None:
    assert listed(make_schedule("gpipe", chain(2), work(3))) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert listed(make_schedule("sequential", chain(2), work(3))) == ["F0 B0 F1 B1 F2 B2"] * 2
    assert listed(make_schedule("1f1b", chain(2), work(3), train=False)) == ["F0 F1 F2"] * 2


def test_interleaved_table() -> None:
    """Megatron-LM's order, p = 2, v = 2, m = 4: stage.kind microbatch."""
    schedule = make_schedule("interleaved_1f1b", chain(2, 2), work(4))
    assert [" ".join(f"{a.node.stage}{a.kind}{a.microbatch}" for a in ours(schedule, rank)) for rank in (0, 1)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_h1_table() -> None:
    """Qi et al. 2024, figure 2 (p = 4, m = 8): all stages hold 4; stage 0 has no input gradient to send."""
    schedule = make_schedule("zb_h1", chain(4), work(8))
    assert listed(schedule) == lines("""
        F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
        F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
    """)
    assert set(schedule.in_flight.values()) == {4}
    assert schedule.split == {StageId("llm", s) for s in (1, 2, 3)}


def torch_s(name: str, pp: int, vpp: int, count: int) -> list[list[Action]]:
    """The grid that one of torch's schedules computes; stage 0 of a split one as ours, whose I and W are one B.

    Torch 2.13's own grid of ``1F1B`` counts the last rank's forwards from 1 instead of 0, so it is no peer here.
    """
    stages = [
        SimpleNamespace(stage_index=i, num_stages=pp * vpp, group_size=pp, group_rank=0, submod=None)
        for i in range(vpp)
    ]
    single = issubclass(tables.get_schedule_class(name), tables.PipelineScheduleSingle)
    grid = tables.get_schedule_class(name)(stages[0] if single else stages, count).pipeline_order  # type: ignore[call-arg, arg-type]
    rows = [[part for a in grid[r] if a is not None for part in a.sub_actions or (a,)] for r in range(pp)]
    halves = any(a.computation_type.value in "IW" for row in rows for a in row)
    found: list[list[Action]] = []
    for row in rows:
        kinds = [(a, a.computation_type.value) for a in row if a.microbatch_index is not None]
        halved = [(a, k) for a, kind in kinds for k in ("IW" if halves and kind == "B" else kind)]
        mended = [(a, "B" if halves and k == "I" and not a.stage_index else k) for a, k in halved]
        found.append([
            Action(cast(Kind, k), StageId("llm", a.stage_index), a.microbatch_index)
            for a, k in mended if a.stage_index or k != "W"
        ])  # fmt: skip
    return found


def ours(schedule: Schedule, rank: int) -> list[Action]:
    return [a for a in schedule.of(rank) if a.microbatch >= 0]


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (3, 12)])
@pytest.mark.parametrize(
    ("name", "vpp", "peer"),
    [
        ("gpipe", 1, "GPipe"),
        ("zbv", 2, "ZBVZeroBubble"),
        ("interleaved_1f1b", 2, "Interleaved1F1B"),
        ("interleaved_1f1b", 3, "Interleaved1F1B"),
        *((name, 2, name) for name in SCHEDULES),
    ],
)
def test_orders_are_those_of_torch(name: str, vpp: int, peer: str, pp: int, count: int) -> None:
    """But for stage 0 where backwards are split: it has nobody to send an input gradient to, so I and W are one B."""
    style = "v" if schedule_policy(name).virtual == "v" else "loop"
    schedule = make_schedule(name, chain(pp, vpp, style), work(count))
    check(schedule)
    assert [ours(schedule, rank) for rank in range(pp)] == torch_s(peer, pp, vpp, count)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_take_any_number_of_microbatches(name: str) -> None:
    """Torch refuses some numbers: then it is asked for more, and those that do not exist are left out."""
    style = "v" if schedule_policy(name).virtual == "v" else "loop"
    for count in range(1, 12):
        made = make_schedule(name, chain(4, 2, style), work(count))
        check(made)
        assert {a.microbatch for a in ours(made, 0)} == {*range(count)}
    with pytest.raises(
        ScheduleError, match=f"{name} holds .* microbatches of llm, max_in_flight allows 1: raise it to"
    ):
        make_schedule(name, chain(4, 2, style), work(8), max_in_flight={"llm": 1})


def test_names_of_torch_stand_for_ours_where_orders_are_the_same() -> None:
    assert {name: schedule_policy(name).name for name in ("1F1B", "GPipe", "LoopedBFS")} == {
        "1F1B": "1f1b", "GPipe": "gpipe", "LoopedBFS": "gpipe"
    }  # fmt: skip


def test_warm_ups_of_encoders_of_different_depth() -> None:
    """Cornstarch: stage ``s`` of an encoder with E stages before an LLM with L has E + L - s - 1 warm-ups."""
    depths = {"vision": 3, "audio": 1, "llm": 4}
    rank = iter(range(8))
    stages = graph({m: Module([[next(rank)] for _ in range(d)]) for m, d in depths.items()}, TO_LLM)
    schedule = make_schedule("1f1b", stages, work(12, *depths, edges=TO_LLM))
    check(schedule)
    for module, depth in depths.items():
        behind = 0 if module == "llm" else depths["llm"]
        for node in stages.nodes_of(module):
            (own,) = stages.stages[node].ranks
            kinds = [a.kind for a in schedule.of(own)]
            assert kinds.index("B") - 1 == depth + behind - node.stage - 1
            assert schedule.in_flight[node] == depth + behind - node.stage
    cost = uniform()
    assert makespan(schedule, cost) == (12 + 3 + 4 - 1) * 3  # the longest chain's


def test_generator_adds_a_stage_to_the_chain() -> None:
    stages = graph({"llm": Module([[0], [1]]), "draw": Module([[2]])}, [("llm", "draw")])
    schedule = make_schedule("1f1b", stages, work(6, "llm", "draw", edges=[("llm", "draw")]))
    assert listed(schedule) == listed(make_schedule("1f1b", chain(3), work(6)))


def test_an_encoder_on_the_same_rank_as_all_that_follows_does_not_run_ahead() -> None:
    edges = [("vision", "llm")]
    stages = graph({"vision": Module([[0, 1]]), "llm": Module([[0, 1]])}, edges)
    schedule = make_schedule("1f1b", stages, work(3, "vision", "llm", edges=edges))
    assert listed(schedule) == ["F0 F0 B0 B0 F1 F1 B1 B1 F2 F2 B2 B2"]


def test_an_encoder_over_all_stages_of_the_llm_does_not_starve() -> None:
    """Its actions need all lanes at once; the LLM's stages leave them room."""
    edges = [("vision", "llm")]
    stages = graph({"vision": Module([[0, 1, 2, 3]]), "llm": Module([[r] for r in range(4)])}, edges)
    made = {
        o: make_schedule(o, stages, work(16, "vision", "llm", edges=edges)) for o in ("1f1b", "zb_h1", "sequential")
    }
    spans = {o: makespan(s, uniform()) for o, s in made.items()}
    assert spans["sequential"] == 16 * 15
    assert spans["1f1b"] < spans["sequential"] / 2
    assert spans["zb_h1"] < 1.1 * 16 * 6  # what every lane works


def test_frozen_encoder_fills_the_llm_s_bubbles() -> None:
    """On the first LLM stage's rank: no backward, and its forwards cost less time than they take."""
    edges = [("vision", "llm")]
    ranks = [[0], [1], [2]]
    stages = graph({"vision": Module([[0]], trains=False), "llm": Module(ranks)}, edges)
    alone = make_schedule("1f1b", chain(3), work(4))
    both = make_schedule("1f1b", stages, work(4, "vision", "llm", edges=edges))
    assert not [a for a in both.of(0) if a.node.module == "vision" and a.kind != "F"]
    assert both.in_flight[StageId("vision", 0)] == 0
    assert makespan(both, uniform()) < makespan(alone, uniform()) + 4


def test_units_that_group_and_split_microbatches() -> None:
    """Vision groups two microbatches in one pass, audio takes three passes for the first one."""
    spans = {
        "vision": (Span(0, 0, 1), Span(1, 2, 3)),
        "audio": (Span(0, 0, 0), Span(1, 0, 0), Span(2, 0, 0), Span(3, 3, 3)),
        "llm": tuple(Span(i, i, i) for i in range(4)),
    }
    feeds = {("vision", "llm"): ((0, 0), (0, 1), (1, 2), (1, 3)), ("audio", "llm"): ((0, 0), (1, 0), (2, 0), (3, 3))}
    stages = graph({m: Module([[r]]) for r, m in enumerate(spans)}, TO_LLM)
    schedule = make_schedule("1f1b", stages, StepWork(spans, feeds))
    check(schedule)
    assert listed(schedule) == ["F0 F1 B0 B1", "F0 F1 F2 B0 B1 B2 F3 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    with pytest.raises(ScheduleError, match=r"llm microbatch 0 needs 3 microbatches of audio at once.*allows 2"):
        make_schedule("1f1b", stages, StepWork(spans, feeds), max_in_flight={"audio": 2})
    crossed = StepWork(spans, {**feeds, ("vision", "llm"): ((1, 0), (0, 1), (0, 2), (0, 3))})
    with pytest.raises(ScheduleError, match=r"awaits rows of .* but they are sent after them"):
        check(make_schedule("1f1b", stages, crossed))


def test_unshard_and_reduce_once_per_step_around_the_work() -> None:
    stages = graph({"llm": Module([[0], [1]], sharded=True, trains=[False, True])})
    schedule = make_schedule("1f1b", stages, work(2))
    kinds = [[a.kind for a in lane.actions] for lane in schedule.lanes]
    assert kinds == [["UNSHARD", "F", "F"], ["UNSHARD", "F", "B", "F", "B", "REDUCE"]]
    evaluation = make_schedule("1f1b", stages, work(2), train=False)
    assert [[a.kind for a in lane.actions] for lane in evaluation.lanes] == [["UNSHARD", "F", "F"]] * 2


def test_frozen_stages_below_what_trains_have_no_backward() -> None:
    """And what trains above them holds no more for it."""
    frozen = graph({"llm": Module([[r] for r in range(4)], trains=[False, False, True, True])})
    schedule = make_schedule("zb_h1", frozen, work(8), lambda a: 5 if a.node.stage == 3 else 1)
    check(schedule)
    assert [{a.kind for a in schedule.of(r) if a.microbatch >= 0} for r in range(4)] == [
        {"F"},
        {"F"},
        {"F", "B"},
        {"F", "I", "W"},
    ]
    assert list(schedule.in_flight.values()) == [0, 0, 2, 2]


def test_weight_gradients_of_a_slow_stage_do_not_pile_up() -> None:
    """It never waits, so nothing but the bound makes it run W before the end."""
    schedule = make_schedule("zb_h1", chain(3), work(12), lambda a: 5 if a.node.stage == 2 else 1)
    check(schedule)
    assert list(schedule.in_flight.values()) == [3, 3, 3]


def test_a_frozen_encoder_over_all_stages_does_not_run_its_forwards_first() -> None:
    edges = [("vision", "llm")]
    stages = graph({"vision": Module([[0, 1]], trains=False), "llm": Module([[0], [1]])}, edges)
    schedule = make_schedule("1f1b", stages, work(12, "vision", "llm", edges=edges))
    kinds = [a.node.module for a in schedule.of(0) if a.kind == "F"]
    ahead = [kinds[:i].count("vision") - kinds[:i].count("llm") for i in range(len(kinds) + 1)]
    assert max(ahead) <= 3


@pytest.mark.parametrize(
    ("name", "vpp", "style"),
    [("1f1b", 1, "loop"), ("zb_h1", 1, "loop"), ("interleaved_1f1b", 2, "loop"), ("zbv", 2, "v")],
)
def test_a_generator_that_groups_microbatches(name: str, vpp: int, style: str) -> None:
    """The LLM's last stage must run forwards of a whole group before the first of its backwards."""
    spans = {"llm": tuple(Span(i, i, i) for i in range(8)), "draw": (Span(0, 0, 3), Span(1, 4, 7))}
    grouped = StepWork(spans, {("llm", "draw"): tuple((i, i // 4) for i in range(8))})
    stages = graph({"llm": Module([[0], [1]], vpp, style), "draw": Module([[2]])}, [("llm", "draw")])
    schedule = make_schedule(name, stages, grouped)
    check(schedule)
    assert schedule.in_flight[StageId("llm", 2 * vpp - 1)] >= 4
    with pytest.raises(ScheduleError, match="max_in_flight"):
        make_schedule(name, stages, grouped, max_in_flight={"llm": 3})


def test_an_encoder_s_bound_counts_its_own_microbatches() -> None:
    """One group of four in flight lets the LLM run four microbatches, not more."""
    spans = {"vision": (Span(0, 0, 3), Span(1, 4, 7)), "llm": tuple(Span(i, i, i) for i in range(8))}
    grouped = StepWork(spans, {("vision", "llm"): tuple((i // 4, i) for i in range(8))})
    stages = graph({"vision": Module([[6]]), "llm": Module([[r] for r in range(6)])}, [("vision", "llm")])
    schedule = make_schedule("1f1b", stages, grouped, max_in_flight={"vision": 1})
    check(schedule)
    assert schedule.in_flight[StageId("vision", 0)] == 1
    assert schedule.in_flight[LLM0] == 4


def test_sequential_keeps_the_order_of_backwards() -> None:
    """The generator's group holds back LLM microbatches 0 and 2; microbatch 1, not in it, does not overtake 0."""
    spans = {"llm": tuple(Span(i, i, i) for i in range(3)), "draw": (Span(0, 0, 2),)}
    stages = graph({"llm": Module([[0]]), "draw": Module([[1]])}, [("llm", "draw")])
    schedule = make_schedule("sequential", stages, StepWork(spans, {("llm", "draw"): ((0, 0), (2, 0))}))
    assert listed(schedule) == ["F0 F1 F2 B0 B1 B2", "F0 B0"]


@pytest.mark.perf
def test_a_step_of_a_thousand_units_takes_little_time() -> None:
    """It is made on every step: about 20 ms for 16 stages of 64 microbatches with F, I and W on a slow core."""
    stages, steps = chain(16), work(64)
    times = []
    for _ in range(3):
        start = time.process_time()
        schedule = make_schedule("zb_h1", stages, steps)
        times.append(time.process_time() - start)
    check(schedule)
    assert min(times) < 0.2


def test_ranks_and_modules_without_work_have_no_actions() -> None:
    stages = graph({"vision": Module([[2]]), "audio": Module([[0]]), "llm": Module([[0], [1]])}, TO_LLM)
    some = work(2, "llm")
    schedule = make_schedule("1f1b", stages, StepWork({**some.microbatches, "vision": (), "audio": ()}, {}))
    check(schedule)
    assert [lane.ranks for lane in schedule.lanes] == [(0,), (1,)]
    assert schedule.of(2) == ()


def test_bounds_are_kept_and_make_it_slower() -> None:
    free = make_schedule("1f1b", chain(4), work(8))
    bound = make_schedule("1f1b", chain(4), work(8), max_in_flight={"llm": 2})
    check(bound)
    assert list(bound.in_flight.values()) == [2, 2, 2, 1]
    assert makespan(bound, uniform()) > makespan(free, uniform())
    wide = make_schedule("interleaved_1f1b", chain(4, 2), work(8), max_in_flight={"llm": 3})
    check(wide)
    assert max(wide.in_flight.values()) == 3


def test_a_bound_of_an_encoder_holds_the_llm_back() -> None:
    edges = [("vision", "llm")]
    stages = graph({"vision": Module([[0]]), "llm": Module([[1], [2], [3]])}, edges)
    schedule = make_schedule("1f1b", stages, work(6, "vision", "llm", edges=edges), max_in_flight={"vision": 2})
    check(schedule)
    assert list(schedule.in_flight.values()) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "made", "bounds", "message"),
    [
        ("zigzag", chain(2), {}, "zigzag.*choose one of gpipe, 1f1b"),
        ("gpipe", chain(2), {"llm": 7}, "gpipe holds all 8.*allows 7: raise it to 8 or take 1f1b"),
        ("1f1b", chain(2), {"llm": 0}, "max_in_flight of llm is 0"),
        ("1f1b", chain(2), {"lm": 4}, "'lm'; the modules are llm"),
        ("1f1b", chain(2, 2), {}, "llm has vpp=2 in loop style, which 1f1b does not order: take interleaved_1f1b"),
        ("zb_h1", chain(2, 2, "v"), {}, "take zbv"),
        ("interleaved_1f1b", chain(2), {}, "needs a module with vpp > 1"),
        ("zbv", chain(2, 2), {}, "needs a module with vpp=2 in v style"),
        ("zbv", chain(2, 4, "v"), {}, "llm has vpp=4, but zbv has 2 stages per rank"),
    ],
)
def test_refusals(name: str, made: object, bounds: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule(name, made, work(8), max_in_flight=bounds)  # type: ignore[arg-type]


def test_a_grid_that_is_cut_and_moved_never_waits_in_a_circle() -> None:
    """Moving forwards by only as many as are missing would not be enough here."""
    policy, pipeline, must = schedule_policy("Interleaved1F1B"), Pipeline(5, 4), [1, *[7] * 5, *[11] * 5]
    assert policy.programs is not None
    assert duration(pipeline, policy.programs(ModuleSteps("llm", pipeline, must, must, [11] * 11, 0))) is not None


@pytest.mark.parametrize("name", [n for n in schedules() if schedule_policy(n).programs])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_modules_own_lists_never_wait_in_a_circle(name: str, data: st.DataObject) -> None:
    """Modules that it feeds need forwards early, and some numbers of microbatches have no grid of their own."""
    policy = schedule_policy(name)
    pp, count = data.draw(st.sampled_from([2, 3, 4, 5, 8])), data.draw(st.integers(1, 20))
    vpp = 1 if policy.virtual in ("any", "none") else policy.stages_per_rank or data.draw(st.integers(2, 4))
    pipeline = Pipeline(pp, vpp, "v" if policy.virtual == "v" else "loop")
    ahead = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 5, 9]), min_size=count, max_size=count))
    must = list(accumulate((min(count, j + 1 + more) for j, more in enumerate(ahead)), max))
    assert policy.programs is not None
    lists = policy.programs(ModuleSteps("llm", pipeline, must, must, [count] * count, data.draw(st.integers(0, 3))))
    assert duration(pipeline, lists) is not None


@pytest.mark.parametrize("name", schedules())
@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_graph_and_work_makes_a_schedule_that_runs(name: str, data: st.DataObject) -> None:
    stages, steps = data.draw(cases(name))
    length = data.draw(st.integers(1, 5))

    def cost(action: Action) -> float:
        return 1 + (3 * len(action.node.module) + action.node.stage + ord(action.kind[0])) % length

    fill = data.draw(st.sampled_from(fills()))
    schedule = make_schedule(name, stages, steps, cost, train=data.draw(st.booleans()), fill=fill)
    check(schedule)
    clock(schedule, uniform())
    assert make_schedule(name, stages, steps, cost, train=schedule.train, fill=fill).lanes == (schedule.lanes)


@pytest.mark.full_cases("interleaved_1f1b", "zbv")
@pytest.mark.parametrize("name", schedules())
@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_bounds_are_kept_or_refused(name: str, data: st.DataObject) -> None:
    stages, steps = data.draw(cases(name))
    bounds = {m: data.draw(st.integers(1, 4)) for m in stages.pipelines}
    fill = data.draw(st.sampled_from(fills()))
    try:
        schedule = make_schedule(name, stages, steps, max_in_flight=bounds, fill=fill)
    except ScheduleError as error:
        assert "max_in_flight" in str(error)
        return
    check(schedule)
    assert all(held <= bounds[node.module] for node, held in schedule.in_flight.items())


def test_no_torch() -> None:
    """Schedules of our own, made on every step, need no tensors; those of torch import it when they are made."""
    for path in sorted((Path(__file__).parents[2] / "hetero_strategy/schedule").glob("*.py")):
        tree = ast.parse(path.read_text())
        allowed = set[int]()
        for node in ast.walk(tree) if path.name == "policies.py" else ():
            if isinstance(node, ast.FunctionDef) and node.name == "torch_programs":
                allowed |= {id(child) for child in ast.walk(node)}
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                allowed |= {id(child) for child in ast.walk(node)}
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            wrong = [n for n in names if n.split(".")[0] in ("torch", "lightning")]
            assert not wrong or id(node) in allowed, f"{path.name} imports {wrong}"


def planned(lengths: list[list[int]], cost: StageCost) -> PlannedCosts:
    """One microbatch of an LLM whose instances have sequences of these lengths."""
    rows = np.array([n for one in lengths for n in one], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lengths])])
    count = len(rows)
    none: dict[str, StepItems] = {}
    metadata = StepMetadata(0, 0, np.arange(count), rows, np.ones(count, np.int64), none)
    assignment = Assignment(np.arange(count), rows, rows, offsets, np.zeros(len(lengths), np.int64), 0, 0)
    layout = ModuleLayout(ranks=len(lengths)).resolved()
    graph = stage_graph(["llm"], [], {"llm": layout}, {LLM0: True})
    return PlannedCosts(StepPlan(metadata, 1, {"llm": (assignment,)}), graph, {LLM0: cost})


def test_planned_costs_follow_what_runs() -> None:
    costs = planned([[10, 10], [20]], StageCost(1.0, 0.5))
    assert costs.of_instances(Action("F", LLM0, 0)) == pytest.approx([20 + 0.5 * 200, 20 + 0.5 * 400])
    assert costs(Action("B", LLM0, 0)) == pytest.approx(2 * (20 + 0.5 * 400)), "the slowest instance, two forwards"
    recomputed = planned([[10]], StageCost(1.0, 0.0, recomputed=True))
    assert recomputed(Action("B", LLM0, 0)) == pytest.approx(30.0)
    assert recomputed(Action("UNSHARD", LLM0)) == 0.0
