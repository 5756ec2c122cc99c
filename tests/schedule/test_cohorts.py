"""Instances that act on their own, and where they run: in the bubbles of the pipeline on their ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hetero_strategy.errors import ConfigError, ScheduleError
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.schedule.action import Action, Schedule, Span, StageGraph, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import stage_graph
from tests.schedule.cases import damaged, makespan, work

EDGES = [("vision", "llm")]


def stages(vision: ModuleLayout, llm: ModuleLayout, apart: Sequence[str] = ("vision",), pieces: int = 1) -> StageGraph:
    placed = {
        "vision": replace(vision.resolved("vision"), vpp=pieces, pp_style="consecutive"),
        "llm": llm.resolved("llm"),
    }
    trains = {StageId(name, s): True for name, layout in placed.items() for s in range(layout.pipeline.stages)}
    return stage_graph(list(placed), EDGES, placed, trains, gathered=trains, apart=apart)


def costs(ratio: float) -> Callable[[Action], float]:
    """Forward 1 and backward 2 of an LLM's stage; all of a rank's encoder work is ``ratio`` of its LLM work."""

    def cost(action: Action) -> float:
        kinds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        return kinds.get(action.kind, 0.0) * (1.0 if action.node.module == "llm" else ratio)

    return cost


def in_turn(graph: StageGraph, steps: StepWork) -> StepWork:
    """Each microbatch of the encoder is that of one cohort."""
    nodes, numbers = [n for n in graph.stages if n.cohort >= 0], [s.number for s in steps.microbatches["vision"]]
    count = len(graph.chains["vision"])
    return replace(steps, idle={n: frozenset(k for k in numbers if k % count != n.cohort) for n in nodes})


def members(graph: StageGraph) -> list[list[int]]:
    return [graph.stages[chain[0]].members.tolist() for chain in graph.chains["vision"]]  # type: ignore[union-attr]


def test_cohorts_are_instances_on_the_same_stages() -> None:
    four = range(4)
    piped = ModuleLayout(four, pp=2, dp_shard=2)  # stages on ranks 0, 1 and 2, 3
    assert members(stages(ModuleLayout(four, dp_shard=4), piped)) == [[0, 1], [2, 3]]
    assert members(stages(ModuleLayout(four, dp_shard=2, tp=2), ModuleLayout(four, pp=4))) == [[0], [1]]
    assert members(stages(ModuleLayout(four, pp=2, dp_shard=2), ModuleLayout(four, pp=4))) == [[0], [1]]
    six = ModuleLayout(range(6), pp=2, dp_shard=3)  # instances of two ranks, the middle one on both stages
    assert members(stages(ModuleLayout(range(6), dp_shard=3, tp=2), six)) == [[0], [1], [2]]
    wider = ModuleLayout(range(5), dp_shard=5)  # one instance beside the pipeline
    assert members(stages(wider, ModuleLayout(four, pp=2, dp_shard=2))) == [[0, 1], [2, 3], [4]]


def test_edges_join_cohorts_with_the_same_one_and_all_with_other_modules() -> None:
    graph = stages(ModuleLayout(range(4), pp=2, dp_shard=2), ModuleLayout(range(4), pp=4))
    names = {f"{source} {target}" for source, target in graph.edges if source.module == "vision"}
    assert names == {"vision.0@0 vision.1@0", "vision.0@1 vision.1@1", "vision.1@0 llm.0", "vision.1@1 llm.0"}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
@pytest.mark.parametrize(("pp", "count", "ratio"), [(4, 16, 0.15), (8, 16, 0.15), (8, 32, 0.6), (4, 8, 0.05)])
def test_an_encoder_fits_into_bubbles(name: str, pp: int, count: int, ratio: float) -> None:
    """The step takes little more than its work, or than the pipeline alone where that is longer; before, 10% to 35%."""
    layouts = ModuleLayout(range(pp), dp_shard=pp), ModuleLayout(range(pp), pp=pp)
    steps, cost = work(count, "vision", "llm", edges=EDGES), costs(ratio)
    least = 3 * max(count + pp - 1, count * (1 + ratio))
    filled = make_schedule(name, stages(*layouts), steps, cost)
    check(filled)
    taken = makespan(filled, cost)
    turns = makespan(make_schedule(name, stages(*layouts, apart=()), steps, cost), cost)
    assert taken < turns
    if name == "1f1b":  # of zero bubble less is known
        assert least * (1 - 1e-9) <= taken <= 1.045 * least


def test_instances_of_several_ranks_run_ahead_while_their_ranks_idle() -> None:
    """Ranks of an instance hardly ever idle at once later."""
    layouts = ModuleLayout(range(8), dp_shard=2, tp=4), ModuleLayout(range(8), pp=8)
    steps, cost = work(16, "vision", "llm", edges=EDGES), costs(0.2)
    assert makespan(make_schedule("1f1b", stages(*layouts), steps, cost), cost) < 1.15 * 69


def test_decoupled_is_around_the_pipeline() -> None:
    graph = stages(ModuleLayout(range(4), dp_shard=4), ModuleLayout(range(4), pp=4))
    schedule = make_schedule("1f1b", graph, work(8, "vision", "llm", edges=EDGES), costs(0.2), fill="decoupled")
    check(schedule)
    for rank in range(4):
        text = "".join(
            a.kind.lower() if a.node.module == "vision" else a.kind for a in schedule.of(rank) if a.microbatch >= 0
        )
        assert re.fullmatch("f{8}[FB]{16}b{8}", text)
    with pytest.raises(ScheduleError, match="holds all microbatches of vision, max_in_flight allows 3: raise"):
        make_schedule("1f1b", graph, schedule.work, max_in_flight={"vision": 3}, fill="decoupled")
    bounded = make_schedule("1f1b", graph, schedule.work, costs(0.2), max_in_flight={"vision": 5})
    assert max(held for node, held in bounded.in_flight.items() if node.module == "vision") == 5


def moved(schedule: Schedule, action: Action, to: int) -> Schedule:
    actions = [a for a in schedule.of(0) if a != action]
    actions.insert(to, action)
    return damaged(schedule, schedule.lane_of[0], actions)


def test_cohorts_gather_first_and_reduce_in_one_order() -> None:
    """Whoever comes to it waits for all ranks of the module."""
    graph = stages(ModuleLayout(range(2), dp_shard=2), ModuleLayout(range(2), pp=2), pieces=2)
    schedule = make_schedule("1f1b", graph, work(4, "vision", "llm", edges=EDGES))
    check(schedule)
    with pytest.raises(ScheduleError, match="cohorts gather before all else"):
        check(moved(schedule, Action("UNSHARD", StageId("llm", 0)), 0))
    with pytest.raises(ScheduleError, match=r"waits in vision\.0@0 REDUCE for rank 1, which waits in vision\.1@0"):
        check(moved(schedule, Action("REDUCE", StageId("vision", 1, 0)), len(schedule.of(0)) - 1))


def test_sums_of_pieces_travel_beside_the_last_backwards() -> None:
    """The REDUCE of a piece comes as soon as all cohorts have its gradients, not when the last piece is done."""
    graph = stages(ModuleLayout(range(4), dp_shard=4), ModuleLayout(range(4), pp=4), pieces=3)
    steps = in_turn(graph, work(8, "vision", "llm", edges=EDGES))
    for fill in ("fine", "decoupled"):
        schedule = make_schedule("1f1b", graph, steps, costs(0.8), fill=fill)
        check(schedule)
        place = {action: k for k, action in enumerate(schedule.starts)}
        last = max(k for a, k in place.items() if a.kind == "B" and a.node.module == "vision")
        for cohort in range(4):
            of_last, of_middle, of_first = (place[Action("REDUCE", StageId("vision", s, cohort))] for s in (2, 1, 0))
            assert of_last < of_middle < last < of_first


def test_pieces_of_an_encoder_that_is_a_pipeline_lie_on_its_ranks() -> None:
    """Rows of a microbatch change ranks once, not between pieces, and a step may get shorter."""
    layouts = ModuleLayout(range(8), pp=2, dp_shard=4), ModuleLayout(range(8), pp=8)
    taken = {}
    for pieces in (1, 4):
        graph = stages(*layouts, pieces=pieces)

        def cost(action: Action, each: float = 2.4 / pieces) -> float:
            return costs(each)(action)

        schedule = make_schedule("1f1b", graph, in_turn(graph, work(16, "vision", "llm", edges=EDGES)), cost)
        check(schedule)
        taken[pieces] = makespan(schedule, cost)
    one = graph.chains["vision"][0]
    ranks = [sorted(graph.stages[node].ranks) for node in one]
    assert ranks == [ranks[0]] * 4 + [ranks[4]] * 4 and set(ranks[0]).isdisjoint(ranks[4])
    assert taken[4] < 0.97 * taken[1]


def test_pieces_of_what_cannot_be_cut_are_refused() -> None:
    config, piped = ScheduleConfig(fill="fine", pieces={"vision": 2}), ModuleLayout(range(4), pp=2).resolved()
    cut = config.in_pieces({"vision"}, {"vision": piped})
    assert cut["vision"].pipeline.stages == 4 and config.uncut(cut) == {"vision": piped}
    with pytest.raises(ConfigError, match=r"pieces of 'vision' is 2; give them to modules that fill.*none"):
        config.in_pieces((), {"vision": piped})
    with pytest.raises(ConfigError, match=r"pieces of 'vision' is 2; .* with fill='auto' none"):
        ScheduleConfig(pieces={"vision": 2}).check({"vision": piped})  # before processes start
    with pytest.raises(ConfigError, match=r"pieces of 'vision' is 2, but split=\[2, 4\] of its layout says already"):
        config.in_pieces({"vision"}, {"vision": replace(piped, split=(2, 4))})
    one = replace(piped, pp=1, split=(6,))  # it says nothing
    assert config.in_pieces({"vision"}, {"vision": one})["vision"].split is None


def test_cohorts_work_at_their_own_microbatches_alone() -> None:
    graph = stages(ModuleLayout(range(4), dp_shard=4), ModuleLayout(range(4), pp=4))
    schedule = make_schedule("1f1b", graph, in_turn(graph, work(8, "vision", "llm", edges=EDGES)))
    check(schedule)
    for rank in range(4):
        own = {a.microbatch for a in schedule.of(rank) if a.node.module == "vision" and a.microbatch >= 0}
        assert own == {rank, rank + 4}
    foreign = Action("F", StageId("vision", 0, 0), 1)
    with pytest.raises(ScheduleError, match=r"rank 0: vision\.0@0 F1 is not part of this step"):
        check(moved(schedule, foreign, 1))


@pytest.mark.parametrize(("name", "most"), [("1f1b", 0.83), ("zb_h1", 1.02), ("gpipe", 1.0)])
def test_the_pipeline_does_not_wait_until_all_ranks_draw(name: str, most: float) -> None:
    """A generator on the ranks of the pipeline that feeds it: each of its instances draws its share of a microbatch
    when its rank comes to it, right before its backward, and the pipeline holds no more microbatches for it.
    """
    ranks, edges = range(4), [("llm", "draw")]
    placed = {
        "llm": ModuleLayout(ranks, pp=4).resolved("llm"),
        "draw": ModuleLayout(ranks, dp_shard=4).resolved("draw"),
    }
    nodes = {StageId(module, s): True for module, layout in placed.items() for s in range(layout.pipeline.stages)}
    steps, taken, held = work(16, "llm", "draw", edges=edges), [], []
    for apart in ((), ("draw",)):
        graph = stage_graph(list(placed), edges, placed, nodes, gathered=nodes, apart=apart)
        schedule = make_schedule(name, graph, steps, costs(0.3))
        check(schedule)
        taken.append(makespan(schedule, costs(0.3)))
        held.append(max(count for node, count in schedule.in_flight.items() if node.module == "llm"))
        assert graph.apart == apart and not graph.filling
    assert taken[1] <= most * taken[0]
    assert held[1] <= held[0]


def test_a_plan_brings_no_filling_that_other_options_refuse() -> None:
    planned = ScheduleConfig("1f1b", fill="fine", pieces={"vision": 2})
    assert ScheduleConfig().instead_of_auto(planned) == planned
    for asked in ({"reshard_after_forward": "always"}, {"schedule": "sequential"}, {"fill": "none"}):
        merged = ScheduleConfig(**asked).instead_of_auto(planned)
        assert not merged.fills and not merged.pieces
        assert all(getattr(merged, name) == value for name, value in asked.items())


def test_experts_on_several_ranks_fill_no_bubbles() -> None:
    """All instances meet in every layer, so none acts on its own."""
    for ep, filling in ((1, {"vision"}), (2, set())):
        layouts = {"vision": ModuleLayout(4, ep=ep).resolved(), "llm": ModuleLayout(4, pp=2).resolved()}
        for find in (ScheduleConfig(fill="fine").filling, ScheduleConfig(fill="fine").apart):
            assert find(["vision"], layouts, EDGES) == filling


def test_decoupled_where_what_fills_waits_for_what_does_not_is_refused_with_a_way_out() -> None:
    """An encoder with virtual stages feeds one that fills, on the ranks of both."""
    names, edges = ("vision", "reader", "llm"), [("vision", "reader"), ("reader", "llm")]
    piped = ModuleLayout((0, 1), pp=2, vpp=2)
    given = place({"vision": piped, "reader": ModuleLayout((0, 1), dp_shard=2), "llm": piped}, 2).layouts
    stages = {StageId(n, i): True for n, layout in given.items() for i in range(layout.pipeline.stages)}
    made = stage_graph(names, edges, given, stages, stages, apart={"reader"})
    step = StepWork({n: tuple(Span(i, i, i) for i in range(4)) for n in names},
                    {edge: tuple((i, i) for i in range(4)) for edge in edges})  # fmt: skip
    assert make_schedule("interleaved_1f1b", made, step, fill="fine").starts
    with pytest.raises(ScheduleError, match=r"fill='decoupled' runs reader around the pipeline.*use fill='fine'"):
        make_schedule("interleaved_1f1b", made, step, fill="decoupled")
