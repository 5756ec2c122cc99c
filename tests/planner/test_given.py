"""What a person says of blocks beside ``layouts="auto"`` is in every candidate: its memory, its time, its refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.pipelines import Setting
from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.offload import Offload, check_offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.estimate import MEMORY_SHARE
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.memory import MemoryModel
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import ModelShape, shape_of
from hetero_strategy.planner.times import Precision
from hetero_strategy.planner.variants import Allowed
from hetero_strategy.profiling.activations import activations_of
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.schedule.config import ScheduleConfig
from tests.planner.models import batch, cluster, model, module

PLAIN = BalanceConfig(reorder="none")
FP32 = Precision(4, 4)
TEXT = Setting("", {"llm": ModuleLayout((0,))}, llm=(64, 6), samples=8, text=(64, 128))
AWAY = {"llm": Offload()}
EVERY_OTHER = {"llm": Recompute(2)}


@cache
def memory() -> MemoryModel:
    """Of blocks that run here, on tensors without values."""
    made = TEXT.model()
    return MemoryModel(shape_of(made), activations_of(made, torch.float32, buckets=True, ways=("kept", "all")), FP32)


def planner(given: Given, room: float = 4e9) -> Planner:
    made = Planner(
        memory().shape, cluster(2), [TEXT.metadata(0)], microbatches=1, balance=PLAIN, precision=FP32, simulations=2,
        allowed=Allowed(given=given),
    )  # fmt: skip
    made.estimates.memory = room
    return made


def peak(made: Planner, candidate: Candidate) -> float:
    return float(memory().of(made.evaluator.shown(made.evaluator.place(candidate))).peak.max())


@pytest.mark.parametrize("recompute", [{}, EVERY_OTHER], ids=["recompute is the plan's", "recompute is given"])
def test_a_plan_that_fits_with_offload_alone_is_found_and_refused_without(recompute: dict[str, Recompute]) -> None:
    """Memory is what the least candidate needs, and a little more; without offload more would have to run again."""
    plain, away = Given(recompute), Given(recompute, AWAY)
    found = planner(away).proposer.proposals()
    room = 1.01 * min(peak(planner(away), p.candidate) for p in found)
    best = planner(away, room).plan(memory=memory).best
    by_hand = Candidate(best.candidate.layouts, 1, best.candidate.schedule, recompute, offload=AWAY)
    assert best.memory is not None and best.memory.peak.max() == peak(planner(plain), by_hand) <= room
    assert best.seconds == planner(plain).evaluator.seconds(by_hand)
    assert all(one.host > 0 and one.offload == "all" for one in best.memory.kept())
    if recompute:
        with pytest.raises(LayoutError, match=r", with recompute={'llm': 'every 2'}; give more ranks"):
            planner(plain, room).plan(memory=memory)
    else:  # recomputed instead
        assert planner(plain, room).plan(memory=memory).best.candidate.recompute == {"llm": Recompute()}


def test_one_layout_for_all_and_pipelines_through_all_have_what_is_given_too() -> None:
    given = Given({"vision": Recompute(2), "llm": Recompute(3)}, {"llm": Offload(2)})
    made = Planner(
        model(), cluster(4), [batch(8)], microbatches=4, balance=PLAIN, simulations=1, allowed=Allowed(given=given)
    )
    proposals = made.proposer.proposals()
    assert any(p.chain for p in proposals) and any(p.homogeneous for p in proposals)
    answer = made.plan()
    for candidate in [p.candidate for p in proposals] + [r.candidate for r in answer.ranked]:
        assert (candidate.recompute, candidate.offload) == (given.recompute, given.offload)
    alike = answer.homogeneous()
    assert alike is not None and alike.seconds == made.evaluator.seconds(alike.candidate)


def test_what_does_not_fit_says_with_what() -> None:
    with pytest.raises(LayoutError, match=r"come on top, with offload={'llm': 'all'}; give more ranks"):
        planner(Given(offload=AWAY), 1e5).plan()


@pytest.mark.parametrize(
    "recompute", [{}, {"vision": Recompute(), "llm": Recompute()}], ids=["recompute is the plan's", "given"]
)
@pytest.mark.parametrize("ranks", [4, 24, pytest.param(0, id="pools")])
def test_nothing_is_proposed_that_offload_does_not_go_with(ranks: int, recompute: dict[str, Recompute]) -> None:
    """Blocks that are compiled, recomputed and tensor parallel, and whole forwards that run again."""
    away = {"vision": Offload(), "llm": Offload()}
    shape = ModelShape(
        {"vision": module(4, 256, edge_width=512), "llm": module(8, 512, samplewise=True)}, (("vision", "llm"),)
    )

    def proposed(given: Given) -> list[Candidate]:
        memory = (8e7 if ranks == 24 else 1.8e8) / MEMORY_SHARE
        on = cluster(ranks or 4, 4, memory=memory)
        if not ranks:
            on = replace(on, pools=on.pools * 2)
        made = Planner(shape, on, [batch(48, images=8, text=512)], balance=PLAIN, allowed=Allowed(given=given))
        return [p.candidate for p in made.proposer.proposals()]

    def refused(candidate: Candidate) -> bool:
        return any(candidate.layouts[name].tp > 1 for name in candidate.recompute)

    backends = dict.fromkeys(("vision", "llm"), "inductor")
    plain, compiled = (proposed(Given(recompute, away, compile)) for compile in ({}, backends))
    assert any(map(refused, plain)) and compiled and not any(map(refused, compiled))
    for candidate in compiled:
        tp = {name: layout.tp for name, layout in candidate.layouts.items()}
        check_offload(candidate.offload, candidate.recompute, ("vision", "llm"), tp)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (Given({"llm": Recompute(whole=True)}, AWAY), "offload names 'llm', whose recompute is 'whole'"),
        (Given(offload={"lm": Offload()}), r"offload names \['lm'\]; the modules are vision, llm"),
        (Given({"lm": Recompute()}), r"recompute names \['lm'\]; the modules are vision, llm"),
    ],
)
def test_what_no_layout_can_run_is_refused_before_planning(given: Given, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Planner(model(), cluster(2), [batch(8)], allowed=Allowed(given=given))


@pytest.mark.full
def test_kept_matmuls_are_measured_where_they_are_asked_for() -> None:
    made = TEXT.model()
    around: Any = (made, shape_of(made), cluster(2), FP32)
    again = {"llm": Recompute(keeps_matmuls=True)}
    best = planner(Given(again)).plan(memory=lambda: memory_model(*around, Given(again))).best
    assert best.memory is not None and best.candidate.recompute == again


def asked(config: ScheduleConfig, given: Given = Given(), shape: ModelShape | None = None) -> Planner:  # noqa: B008
    return Planner(
        shape or model((2, 128), (4, 128)), cluster(4, bandwidth=1e8), [batch(8)], balance=PLAIN, simulations=4,
        allowed=Allowed.beside(config, given, "fetch"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        ScheduleConfig("gpipe"),
        ScheduleConfig("1f1b", max_in_flight={"llm": 2}, fill="coarse"),
        ScheduleConfig(pieces={"vision": 2}),
        ScheduleConfig(islands=2),
    ],
    ids=["schedule", "schedule, bound and fill", "pieces", "islands"],
)
def test_every_candidate_is_scheduled_as_a_person_says_it(config: ScheduleConfig) -> None:
    """What is simulated is what runs: the strategy joins both in the same way."""
    made = asked(config)
    assert all(made.evaluator.place(proposal.candidate) for proposal in made._proposed())
    ranked = made.plan().ranked
    assert len(ranked) > 3
    for one in ranked:
        placed = made.evaluator.place(one.candidate)
        assert placed.scheduling == config.instead_of_auto(placed.scheduling).resolved(placed.placement.layouts)
        for option in ("schedule", "max_in_flight", "fill", "pieces", "islands"):
            if (wanted := getattr(config, option)) != getattr(ScheduleConfig(), option):
                assert getattr(placed.scheduling, option) == wanted
        assert all(layout.dp % config.islands == 0 for layout in placed.placement.layouts.values())


def test_layouts_that_a_run_would_refuse_with_what_is_asked_are_not_planned() -> None:
    """Of instances that act together more in one island than in another; encoders ahead whose first stage trains."""
    config, shape = ScheduleConfig(islands=2), model((4, 512), (8, 512), tp=(1, 2))
    made = asked(config, shape=shape).evaluator.on(cluster=cluster(8), asked=config)
    layouts = {"vision": ModuleLayout(8, dp_shard=4, tp=2), "llm": ModuleLayout(8, pp=4, dp_shard=2)}
    with pytest.raises(ConfigError, match="islands=2, of which instances that act together have"):
        made.place(Candidate(layouts, 4, fill="fine"))
    assert made.place(Candidate(layouts, 4)).graph.stages
    late = asked(ScheduleConfig(prefetch={"vision": 1})).evaluator
    two = {name: ModuleLayout(4, dp_shard=4) for name in ("vision", "llm")}
    with pytest.raises(ConfigError, match="prefetch of 'vision', whose first stage has parameters that train"):
        late.place(Candidate(two, 4))
    cut = asked(ScheduleConfig(pieces={"vision": 2}, fill="fine"), shape=without_blocks(shape)).evaluator
    piped = {"vision": ModuleLayout(4, dp_shard=4), "llm": ModuleLayout(4, pp=4)}
    with pytest.raises(LayoutError, match="1 layers cannot be split into 2 stages"):
        cut.place(Candidate(piped, 4, fill="fine"))


def without_blocks(shape: ModelShape) -> ModelShape:
    """The same with an encoder that cannot be cut."""
    whole = replace(module(1, 512), has_blocks=False)
    return replace(shape, modules={**shape.modules, "vision": whole})


def test_what_a_run_would_refuse_is_not_proposed() -> None:
    """Tensor parallelism of compiled layers that torch's compiler fails on, or beside a cache; stages of a module with
    loose parameters; both ends of tied weights on one of several instances or of an instance's context-parallel ranks.
    """
    plain = model((2, 128), (4, 128))
    fast = replace(plain, modules={**plain.modules, "llm": replace(plain.modules["llm"], tp_compiles=False)})
    for given, shape, name in (
        (Given(compile={"llm": "inductor"}), fast, "llm"),
        (Given({"llm": Recompute(keeps_matmuls=True)}, compile={"llm": "inductor"}), plain, "llm"),
        (Given(cached=["vision"]), plain, "vision"),
    ):
        found, usual = (
            {one.candidate.layouts[name].tp for one in asked(ScheduleConfig(), *way).proposer.proposals()}
            for way in ((given, shape), ())
        )
        assert found == {1} < usual
    debugged = Given(compile={"llm": "eager"})
    allowed = [debugged.allows(name, tp, again) for name, tp, again in (("llm", 1, 2), ("llm", 1, 0), ("llm", 2, 2))]
    assert allowed == [False, True, True]
    loose = replace(plain, modules={**plain.modules, "llm": replace(plain.modules["llm"], cuttable=False)})
    assert {one.candidate.layouts["llm"].pp for one in asked(ScheduleConfig(), shape=loose).plan().ranked} == {1}
    tied = replace(plain, modules={**plain.modules, "llm": replace(plain.modules["llm"], tied=True)})
    for degrees in ({"dp_shard": 2}, {"dp_shard": 1, "cp": 2}):
        llm = ModuleLayout(range(4), pp=2, **degrees)
        piped = Candidate({"vision": ModuleLayout(range(4)), "llm": llm}, 4)
        schedules = [
            {c.schedule for c in asked(ScheduleConfig(), shape=s).variants.schedules(piped)} for s in (plain, tied)
        ]
        assert schedules[0] - schedules[1] == {"zbv"}


def test_no_schedule_divides_the_backward_of_compiled_blocks() -> None:
    layouts = {"vision": ModuleLayout(1), "llm": ModuleLayout(range(1, 4), pp=3)}
    for compiled in ((), ("llm",)):
        evaluator = asked(ScheduleConfig(), Given(compile=dict.fromkeys(compiled, "inductor"))).evaluator
        step = evaluator.step(evaluator.place(Candidate(layouts, 4, "zb_h1")))
        assert {node.module for node in step.schedule.split} == {"llm"} - {*compiled}


def test_microbatches_of_encoders_are_those_of_the_data_module() -> None:
    made = asked(ScheduleConfig(), Given(microbatch_rows={"vision": 1 << 20}))
    layouts = {"vision": ModuleLayout(range(2)), "llm": ModuleLayout(range(2, 4))}
    plan = made.evaluator.shown(made.evaluator.place(Candidate(layouts, 4))).plan
    assert (len(plan.assignments["vision"]), len(plan.assignments["llm"])) == (1, 4)


def test_why_no_candidate_runs_is_said() -> None:
    with pytest.raises(LayoutError, match=r"no candidate runs; the last one: .*islands"):
        asked(ScheduleConfig(islands=5)).plan()
    for option in ("pieces", "prefetch", "max_in_flight"):
        with pytest.raises(ConfigError, match=rf"planner: {option} names \['lm'\]; the modules are vision, llm"):
            asked(ScheduleConfig(**{option: {"lm": 1}}))  # type: ignore[arg-type]


def test_numbers_of_a_row_that_blocks_keep() -> None:
    blocks = module(8, 10)
    ways: list[tuple[Recompute | None, Offload | None]] = [
        (None, None), (Recompute(), None), (Recompute(3), None), (Recompute(keeps_matmuls=True), None),
        (Recompute(whole=True), None), (None, Offload()), (None, Offload(2)), (Recompute(2), Offload(3)),
    ]  # fmt: skip
    found = np.array([blocks.saved(*way).sum() for way in ways]) / 10
    expected = [8 * 17, 8, 3 + 5 * 17, 8 * 11, 8 * 17, 17, 4 * 17 + 17, 2 + 3 * 17 + 17]
    assert found.tolist() == pytest.approx(expected)
