"""What a person says of blocks beside ``layouts="auto"`` is in every candidate: its memory, its time, its refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize import transforms as table
from hetero_strategy.parallelize.compile import Compile
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.parallelize.transforms import check_transforms, label, merged, way
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.estimate import MEMORY_SHARE, saved
from hetero_strategy.planner.search import Planner
from hetero_strategy.profiling.activations import activations_of, ways_of
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.profiling.memory import MemoryModel
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.cost_model import CostModel, Precision
from hetero_strategy.testing import Setting
from hetero_strategy.testing.plans import batch, cluster, model, module
from tests.planner.helpers import Squeeze, run_options

PLAIN = BalanceConfig(reorder="none")
FP32 = Precision(4, 4)
TEXT = Setting("", {"llm": ModuleLayout((0,))}, llm=(64, 6), samples=8, text=(64, 128))
AWAY = {"llm": Offload()}
EVERY_OTHER = {"llm": Recompute(2)}


@cache
def memory() -> MemoryModel:
    """Of blocks that run here, on tensors without values."""
    return measured(run_options(AWAY))


def planner(given: RunOptions, room: float = 4e9) -> Planner:
    made = Planner(
        CostModel(memory().shape, cluster(2), precision=FP32),
        [TEXT.metadata(0)],
        microbatches=1,
        balance=PLAIN,
        simulations=2,
        options=given,
    )
    made.estimates.memory = room
    return made


def peak(made: Planner, candidate: Candidate) -> float:
    return float(made.evaluator.shown(made.evaluator.place(candidate)).memory(memory()).peak.max())


@pytest.mark.full_cases("recompute is the plan's")
@pytest.mark.parametrize("recompute", [{}, EVERY_OTHER], ids=["recompute is the plan's", "recompute is given"])
def test_a_plan_that_fits_with_offload_alone_is_found_and_refused_without(recompute: dict[str, Recompute]) -> None:
    """Memory is what the least candidate needs, and a little more; without offload more would have to run again."""
    plain, away = run_options(recompute), run_options(recompute, AWAY)
    found = planner(away).proposer.proposals()
    room = 1.01 * min(peak(planner(away), p.candidate) for p in found)
    best = planner(away, room).plan(memory=memory).best
    by_hand = Candidate(best.candidate.layouts, 1, best.candidate.schedule, away.transforms)
    assert best.memory is not None and best.memory.peak.max() == peak(planner(plain), by_hand) <= room
    assert best.seconds == planner(plain).evaluator.seconds(by_hand)
    assert all(one.host > 0 and one.transforms["offload"] == "all" for one in best.memory.kept)
    if recompute:
        with pytest.raises(LayoutError, match=r", with transforms={'llm': {'recompute': 'every 2'}}; give more ranks"):
            planner(plain, room).plan(memory=memory)
    else:  # recomputed instead
        assert planner(plain, room).plan(memory=memory).best.candidate.transforms == {"llm": {"recompute": Recompute()}}


def measured(given: RunOptions) -> MemoryModel:
    made = TEXT.model()
    ways = {"llm": ways_of(6, given.transforms.get("llm", {}))}
    return MemoryModel(spec_of(made), activations_of(made, torch.float32, ways=ways), FP32)


def test_every_choice_of_several_kinds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ORDER", [*table.ORDER, Squeeze])
    every = [*RunOptions().choices(module(6, 64)).values()]
    assert len(every) == 5 * 3 and every[0] == () and every[-1] == (Recompute(), Squeeze([2, 3]))
    measured_labels = ways_of(6, {})
    for chosen in every:
        of = {each.name: each for each in chosen}
        assert {label(way(of, i)) for i in range(6)} <= measured_labels.keys()


@pytest.mark.full
def test_values_without_a_hash_are_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ORDER", [*table.ORDER])
    given = run_options({"llm": Squeeze([2, 3])})
    best = planner(given).plan(memory=lambda: measured(given)).best
    assert best.candidate.transforms == given.transforms


def test_equal_candidates_have_one_hash_and_one_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ORDER", [*table.ORDER])
    both = [Recompute(2), Offload()]
    layouts = {"llm": ModuleLayout(2)}
    one, other = (Candidate(layouts, transforms={"llm": of}) for of in (both, both[::-1]))
    assert one == other and len({one, other}) == 1
    assert hash(replace(one, transforms={"llm": [Squeeze([2, 3])]})) != hash(one)
    assert len({one, replace(one, transforms={"llm": both[:1]})}) == 2
    estimates = planner(RunOptions()).estimates
    assert estimates.work("llm", 1, tuple(both)) is estimates.work("llm", 1, tuple(both[::-1]))


def test_one_layout_for_all_and_pipelines_through_all_have_what_is_given_too() -> None:
    given = run_options({"vision": Recompute(2), "llm": Recompute(3)}, {"llm": Offload(2)})
    made = Planner(
        CostModel(model(), cluster(4)), [batch(8)], microbatches=4, balance=PLAIN, simulations=1, options=given
    )
    proposals = made.proposer.proposals()
    assert any(p.homogeneous for p in proposals)
    answer = made.plan()
    for candidate in [p.candidate for p in proposals] + [r.candidate for r in answer.ranked]:
        assert candidate.transforms == given.transforms
    alike = answer.homogeneous()
    assert alike is not None and alike.seconds == made.evaluator.seconds(alike.candidate)


def test_what_does_not_fit_says_with_what() -> None:
    with pytest.raises(LayoutError, match=r"come on top, with transforms={'llm': {'offload': 'all'}}; give more ranks"):
        planner(run_options(AWAY), 1e5).plan()


@pytest.mark.parametrize(
    "recompute", [{}, {"vision": Recompute(), "llm": Recompute()}], ids=["recompute is the plan's", "given"]
)
@pytest.mark.parametrize("ranks", [4, 24])
def test_nothing_is_proposed_that_offload_does_not_go_with(ranks: int, recompute: dict[str, Recompute]) -> None:
    """Blocks that are compiled, recomputed and tensor parallel, and whole forwards that run again."""
    away = {"vision": Offload(), "llm": Offload()}
    shape = ModelSpec(
        {"vision": module(4, 256, edge_width=512), "llm": module(8, 512, samplewise=True)}, (("vision", "llm"),)
    )

    def proposed(given: RunOptions) -> list[Candidate]:
        memory = (8e7 if ranks == 24 else 1.8e8) / MEMORY_SHARE
        made = Planner(
            CostModel(shape, cluster(ranks, 4, memory=memory)),
            [batch(48, images=8, text=512)],
            balance=PLAIN,
            options=given,
        )
        return [p.candidate for p in made.proposer.proposals()]

    def refused(candidate: Candidate) -> bool:
        return any(candidate.layouts[name].tp > 1 for name, of in candidate.transforms.items() if "recompute" in of)

    backends = dict.fromkeys(("vision", "llm"), Compile())
    plain, compiled = (proposed(run_options(recompute, away, compile)) for compile in ({}, backends))
    assert any(map(refused, plain)) and compiled and not any(map(refused, compiled))
    for candidate in compiled:
        transforms = merged(candidate.transforms, {name: {"compile": Compile()} for name in backends})
        check_transforms(transforms, shape.modules, candidate.layouts)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (run_options({"llm": Recompute(whole=True)}, AWAY), "offload of 'llm' with recompute='whole'"),
        (run_options({"lm": Offload()}), "transforms name 'lm'; the modules are vision, llm"),
    ],
)
def test_what_no_layout_can_run_is_refused_before_planning(given: RunOptions, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Planner(CostModel(model(), cluster(2)), [batch(8)], options=given)


@pytest.mark.full
def test_kept_matmuls_are_measured_where_they_are_asked_for() -> None:
    made = TEXT.model()
    around: Any = (made, spec_of(made), "h100", FP32)
    again = {"llm": Recompute(keeps_matmuls=True)}
    best = planner(run_options(again)).plan(memory=lambda: memory_model(*around, run_options(again).transforms)).best
    assert best.memory is not None and best.candidate.transforms == run_options(again).transforms


def asked(config: ScheduleConfig, given: RunOptions = RunOptions(), shape: ModelSpec | None = None) -> Planner:  # noqa: B008
    return Planner(
        CostModel(shape or model((2, 128), (4, 128)), cluster(4, bandwidth=1e8)),
        [batch(8)],
        balance=PLAIN,
        simulations=4,
        options=replace(given, schedule=config),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        ScheduleConfig("gpipe"),
        ScheduleConfig("1f1b", max_in_flight={"llm": 2}, fill="fine"),
        ScheduleConfig(pieces={"vision": 2}),
    ],
    ids=["schedule", "schedule, bound and fill", "pieces"],
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
        for option in ("schedule", "max_in_flight", "fill", "pieces"):
            if (wanted := getattr(config, option)) != getattr(ScheduleConfig(), option):
                assert getattr(placed.scheduling, option) == wanted


def test_layouts_that_a_run_would_refuse_with_what_is_asked_are_not_planned() -> None:
    """Pieces of what cannot be cut."""
    shape = model((4, 512), (8, 512), tp=(1, 2))
    cut = asked(ScheduleConfig(pieces={"vision": 2}, fill="fine"), shape=without_blocks(shape)).evaluator
    piped = {"vision": ModuleLayout(4, dp_shard=4), "llm": ModuleLayout(4, pp=4)}
    with pytest.raises(LayoutError, match="it has no blocks to cut it by; leave pieces out"):
        cut.place(Candidate(piped, 4, fill="fine"))


def without_blocks(shape: ModelSpec) -> ModelSpec:
    """The same with an encoder that cannot be cut."""
    whole = replace(module(1, 512), has_blocks=False)
    return replace(shape, modules={**shape.modules, "vision": whole})


@pytest.mark.full
def test_what_a_run_would_refuse_is_not_proposed() -> None:
    """Tensor parallelism of compiled layers that torch's compiler fails on; stages of a module with
    loose parameters; both ends of tied weights on one of several instances or of an instance's context-parallel ranks.
    """
    plain = model((2, 128), (4, 128))
    fast = replace(plain, modules={**plain.modules, "llm": replace(plain.modules["llm"], tp_compiles=False)})
    for given, shape, name in (
        (run_options({"llm": Compile()}), fast, "llm"),
        (run_options({"llm": Recompute(keeps_matmuls=True)}, {"llm": Compile()}), plain, "llm"),
    ):
        found, usual = (
            {one.candidate.layouts[name].tp for one in asked(ScheduleConfig(), *way).proposer.proposals()}
            for way in ((given, shape), ())
        )
        assert found == {1} < usual
    debugged = run_options({"llm": Compile("eager")})
    every_other = (Recompute(2),)
    allowed = [debugged.allows("llm", tp, chosen) for tp, chosen in ((1, every_other), (1, ()), (2, every_other))]
    assert allowed == [False, True, True]
    loose = replace(plain, modules={**plain.modules, "llm": replace(plain.modules["llm"], cuttable=False)})
    assert {one.candidate.layouts["llm"].pp for one in asked(ScheduleConfig(), shape=loose).plan().ranked} == {1}
    tied = replace(plain, modules={**plain.modules, "llm": replace(plain.modules["llm"], tied=True)})
    for degrees in ({"dp_shard": 2}, {"dp_shard": 1, "cp": 2}):
        llm = ModuleLayout(range(4), pp=2, **degrees)
        piped = Candidate({"vision": ModuleLayout(range(4)), "llm": llm}, 4)
        schedules = [
            {c.schedule for c in asked(ScheduleConfig(), shape=s).neighbours.schedules(piped)} for s in (plain, tied)
        ]
        assert schedules[0] - schedules[1] == {"zbv"}


def test_no_schedule_divides_the_backward_of_compiled_blocks() -> None:
    layouts = {"vision": ModuleLayout(1), "llm": ModuleLayout(range(1, 4), pp=3)}
    for compiled in ((), ("llm",)):
        evaluator = asked(ScheduleConfig(), run_options(dict.fromkeys(compiled, Compile()))).evaluator
        step = evaluator.step(evaluator.place(Candidate(layouts, 4, "zb_h1")))
        assert {node.module for node in step.schedule.split} == {"llm"} - {*compiled}


def test_microbatches_of_encoders_are_those_of_the_data_module() -> None:
    made = asked(ScheduleConfig(), RunOptions(microbatch_rows={"vision": 1 << 20}))
    layouts = {"vision": ModuleLayout(range(2)), "llm": ModuleLayout(range(2, 4))}
    plan = made.evaluator.shown(made.evaluator.place(Candidate(layouts, 4))).plan
    assert (len(plan.assignments["vision"]), len(plan.assignments["llm"])) == (1, 4)


def test_why_no_candidate_runs_is_said() -> None:
    for option in ("pieces", "max_in_flight"):
        with pytest.raises(ConfigError, match=rf"planner: {option} names \['lm'\]; the modules are vision, llm"):
            asked(ScheduleConfig(**{option: {"lm": 1}}))  # type: ignore[arg-type]


def test_numbers_of_a_row_that_blocks_keep() -> None:
    blocks = module(8, 10)
    ways: list[list[Transform]] = [
        [], [Recompute()], [Recompute(3)], [Recompute(keeps_matmuls=True)], [Recompute(whole=True)], [Offload()],
        [Offload(2)], [Recompute(2), Offload(3)],
    ]  # fmt: skip
    found = np.array([saved(blocks, {each.name: each for each in way}).sum() for way in ways]) / 10
    expected = [8 * 17, 8, 3 + 5 * 17, 8 * 11, 8 * 17, 17, 4 * 17 + 17, 2 + 3 * 17 + 17]
    assert found.tolist() == pytest.approx(expected)
