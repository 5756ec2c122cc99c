"""Other ways to run the best: frozen encoders a step ahead, encoders that keep nothing; never what a run refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pipelines import Setting
from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.ahead import ahead
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.planner.explain import explain, unfilled
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.memory import KINDS, MemoryModel
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import ModelShape, shape_of
from hetero_strategy.planner.variants import Allowed, Variants
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy.blueprint import blueprint
from tests.planner.models import batch, cluster, model, module
from tests.planner.test_memory import FP32, OF, SHAPE, activations, over_time

PLAIN = BalanceConfig(reorder="none")
PIPED = {"vision": ModuleLayout(range(4), dp_shard=4), "llm": ModuleLayout(range(4), pp=4)}
APART = {"vision": ModuleLayout((0, 1), dp_shard=2), "llm": ModuleLayout((2, 3), pp=2)}
TOGETHER = dict.fromkeys(("vision", "llm"), ModuleLayout(range(4), dp_shard=4))


def evaluator(shape: ModelShape) -> Evaluator:
    return Evaluator(shape, cluster(4), [batch(16)], balance=PLAIN)


def with_trained_end() -> ModelShape:
    """Only the encoder's last block trains."""
    shape = model((4, 512), (8, 512), frozen=True)
    vision = shape.modules["vision"]
    last = np.arange(vision.blocks) == vision.blocks - 1
    trained = replace(vision, trained=vision.parameters * last, trained_share=last.astype(float), moved=np.zeros(4))
    return replace(shape, modules={**shape.modules, "vision": trained})


def test_neighbours_of_a_candidate_are_one_change_away() -> None:
    variants = Variants(evaluator(model((4, 512), (8, 512))), Allowed())

    def layouts(
        way: Callable[[Candidate], list[Candidate]], given: dict[str, ModuleLayout]
    ) -> list[list[ModuleLayout]]:
        return [[*other.layouts.values()] for other in way(Candidate(given, 4))]

    def sizes(**given: ModuleLayout) -> list[list[int]]:
        return [[len(x.ranks) for x in both] for both in layouts(variants.borders, given)]

    vision, llm = PIPED.values()
    mixed = [[replace(vision, dp_replicate=4 // n, dp_shard=n), llm] for n in (1, 2, 4)]
    assert layouts(variants.mixtures, PIPED) == [*mixed, [vision, replace(llm, dp_replicate=1, dp_shard=1)]]
    vision_, llm_ = APART.values()
    assert {(x.tp, x.pp) for x, other in layouts(variants.laid_out, APART) if other == llm_} == {(1, 2), (2, 1)}
    assert {(x.tp, x.pp) for other, x in layouts(variants.laid_out, APART) if other == vision_} == {(1, 1), (2, 1)}
    assert sizes(**APART) == [[1, 2]]  # two of the encoder's would leave it none
    assert sizes(vision=ModuleLayout((0,)), llm=ModuleLayout((1, 2))) == [[2, 2], [2, 1], [1, 3], [1, 1]]
    assert sizes(vision=ModuleLayout((2,)), llm=ModuleLayout((0, 1))) == [[1, 3], [1, 1], [2, 1], [2, 2]]
    assert [other.microbatches for other in variants.counts(Candidate(PIPED, 4))] == [3, 5, 2, 8]
    assert Variants(variants._evaluator, Allowed(), microbatches=4).counts(Candidate(PIPED, 4)) == []


@pytest.mark.parametrize("layouts", [PIPED, APART], ids=["in bubbles", "on its own ranks"])
def test_a_step_that_begins_with_all_rows_is_shorter_by_what_it_need_not_wait_for(
    layouts: dict[str, ModuleLayout],
) -> None:
    made = evaluator(model((4, 512), (8, 512), frozen=True))
    candidate = Candidate(layouts, 4, fill="fine")
    plain, early = (made.step(made.place(replace(candidate, prefetch=p))) for p in ({}, {"vision": 1}))
    found = explain(made, early)
    shares = [found.shares["vision"] * early.seconds, explain(made, plain).shares["vision"] * plain.seconds]
    assert shares[0] == pytest.approx(shares[1])  # as much work of the encoder, of the next step
    assert early.seconds < 0.95 * plain.seconds
    without = made.simulated(early.placed.without(early.placed.graph.filling), early.plan).seconds
    assert early.seconds >= without
    first = min(t.min() for a, t in early.simulation.start.items() if a.kind == "F" and a.node.module == "llm")
    assert first < 1e-3 * early.seconds  # rows have to cross, nothing has to be computed
    before = unfilled(made, early)
    assert before is not None and before.in_turns == pytest.approx(made.seconds(replace(candidate, fill="none")))


def test_what_is_held_costs_nothing_and_what_is_for_the_next_step_all_of_it() -> None:
    made = evaluator(with_trained_end())
    candidate = Candidate(PIPED, 4, fill="fine", prefetch={"vision": 1}, pieces={"vision": 2})
    placed = made.place(candidate)
    assert placed.placement.layouts["vision"].split == (3, 1)
    step = made.step(placed)
    took = {a: step.simulation.end[a] - begin for a, begin in step.simulation.start.items()}
    held, early = (StageId(name, 0, 0) for name in ("vision", ahead("vision")))
    assert not took[Action("F", held, 0)].any() and took[Action("F", early, 0)].all()
    assert took[Action("F", StageId("vision", 1, 0), 0)].all()
    assert not any(a.node in (held, early) for a in took if a.kind in "BIW")


def test_rows_of_two_steps_are_held_and_weights_are_there_once() -> None:
    vision = SHAPE.modules["vision"]
    stored, none = np.zeros_like(vision.stored), np.zeros(4)
    stored[:, :, 0] = vision.stored[:, :, 1]
    frozen = replace(vision, trained=none.astype(np.int64), trained_share=none, moved=none, stored=stored)
    shape = replace(SHAPE, modules={**SHAPE.modules, "vision": frozen})
    made = Evaluator(shape, cluster(2), [batch(8)], balance=PLAIN, precision=FP32)
    layouts = {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1,))}
    predicted = MemoryModel(shape, OF, FP32)
    (plain, before), (early, after) = (
        over_time(predicted, made.step(made.place(Candidate(layouts, 4, prefetch=p)))) for p in ({}, {"vision": 1})
    )
    rows = 2 * 4 * vision.edge_width * int(made.batches[0].items["vision"].edge_rows.sum())
    assert after[0][-1] - before[0][-1] == rows
    for kind in ("masters", "optimizer", "payload"):
        assert (early.bytes[KINDS.index(kind)] == plain.bytes[KINDS.index(kind)]).all()


def test_a_frozen_encoder_over_a_pipeline_is_planned_a_step_ahead() -> None:
    shape = model((4, 512), (8, 512), frozen=True, tp=(1,))
    made, without = (
        Planner(
            shape, cluster(4, bandwidth=1e8), [batch(16)], balance=PLAIN, microbatches=4, simulations=2,
            allowed=Allowed(prefetch=may),
        )
        for may in (True, False)
    )  # fmt: skip
    best = made.plan().best
    assert best.candidate.prefetch == {"vision": 1} and best.candidate.layouts["llm"].pp > 1
    assert best.seconds < made.evaluator.seconds(replace(best.candidate, prefetch={}))
    other = without.plan()
    assert best.seconds < 0.99 * other.best.seconds
    assert not any(r.candidate.prefetch for r in other.ranked)


def test_encoders_that_keep_nothing_make_a_placement_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one placement, with memory for what came in but not for what blocks read, of all microbatches."""
    vision = module(24, 16, tp=(1,), edge_width=16)
    shape = ModelShape({"vision": vision, "llm": module(8, 48, samplewise=True, tp=(1,))}, (("vision", "llm"),))
    memory = MemoryModel(shape, {"vision": activations(24), "llm": activations(8)}, FP32)

    def planner(decoupled: bool) -> Planner:
        made = Planner(
            shape, cluster(4), [batch(8, images=40, text=16)], microbatches=8, balance=PLAIN, precision=FP32,
            simulations=1, allowed=Allowed(decoupled=decoupled),
        )  # fmt: skip
        # By the formula, which does not know the variant, none of them would fit.
        one = [p for p in made.proposer.proposals() if p.degrees["llm"].pp == p.degrees["vision"].dp == 4]
        monkeypatch.setattr(made.proposer, "proposals", lambda: [p for p in one if p.chain is None])
        for way in ("cuts", "laid_out"):  # others would fit, too
            monkeypatch.setattr(made.variants, way, lambda candidate: [])
        made.estimates.memory = 8.55e6
        return made

    best = planner(True).plan(memory=lambda: memory).best
    assert best.candidate.fill == "decoupled" and "vision" not in best.candidate.recompute
    assert best.memory is not None and best.memory.peak.max() <= 8.55e6
    with pytest.raises(LayoutError, match="needs"):
        planner(False).plan(memory=lambda: memory)


def test_only_what_has_bubbles_and_does_not_train_runs_ahead() -> None:
    def prefetched(shape: ModelShape, layouts: dict[str, ModuleLayout], **options: bool) -> list[dict[str, int]]:
        variants = Variants(evaluator(shape), Allowed(**options))
        return [{**c.prefetch, **c.pieces} for c in variants.ahead(Candidate(layouts, 4, fill="fine"))]

    frozen, late = model((4, 512), (8, 512), frozen=True), with_trained_end()
    assert prefetched(frozen, PIPED) == prefetched(frozen, APART) == [{"vision": 1}]
    assert prefetched(frozen, TOGETHER) == prefetched(model(), PIPED) == []
    assert prefetched(late, PIPED) == [{"vision": 2}]  # a step ahead, in two pieces
    assert prefetched(late, APART) == []  # on its own ranks it fills nothing, and has no pieces
    in_two = {**APART, "vision": ModuleLayout((0, 1), pp=2)}
    assert prefetched(late, in_two) == [{"vision": 1}]
    assert prefetched(frozen, PIPED, prefetch=False) == []


def test_what_fills_and_trains_may_keep_less() -> None:
    variants = Variants(evaluator(model()), Allowed())
    candidate = Candidate(PIPED, 4, fill="fine", recompute={"vision": Recompute(), "llm": Recompute()})
    found = variants.leaner(candidate)
    assert [c.fill for c in found] == ["decoupled", "none"]
    assert [set(c.recompute) for c in found] == [{"llm"}, {"vision", "llm"}]
    assert not variants.leaner(replace(candidate, fill="none"))
    assert not variants.leaner(replace(candidate, layouts=APART))
    assert not Variants(evaluator(model(frozen=True)), Allowed()).leaner(candidate)  # it keeps nothing anyway


def test_what_a_person_gave_is_not_contradicted() -> None:
    none = ScheduleConfig()
    nothing = Given()
    assert Allowed.beside(none, nothing, "fetch") == Allowed(decoupled=True, prefetch=True)
    assert Allowed.beside(none, nothing, "all_to_all") == Allowed(decoupled=True, prefetch=False)
    for given in (Given(recompute={"vision": Recompute(2)}), Given(offload={"llm": Offload()})):
        assert Allowed.beside(none, given, "fetch") == Allowed(decoupled=False, prefetch=True, given=given)
    bound = ScheduleConfig(max_in_flight={"vision": 1})
    assert Allowed.beside(bound, nothing, "fetch") == Allowed(decoupled=False, prefetch=True, asked=bound)
    for asked in (ScheduleConfig(fill="fine"), ScheduleConfig(prefetch={"vision": 1})):
        assert not Allowed.beside(asked, nothing, "fetch").prefetch
    planned = Candidate(PIPED, fill="fine", prefetch={"vision": 1}, pieces={"vision": 2}).scheduling
    assert none.instead_of_auto(planned) == planned
    for asked in (ScheduleConfig(fill="none"), ScheduleConfig(reshard_after_forward="always")):
        assert not asked.instead_of_auto(planned).prefetch


@pytest.mark.parametrize(
    "freeze",
    [pytest.param((), marks=pytest.mark.full), ("vision",), pytest.param(("vision.backbone",), marks=pytest.mark.full)],
    ids=str,
)
def test_nothing_that_is_planned_is_refused(freeze: tuple[str, ...]) -> None:
    """Every candidate that was simulated is one of which a run's stages and schedule can be made."""
    layouts = dict.fromkeys(("vision", "llm"), ModuleLayout(range(4)))
    setting = Setting("", layouts, vision=(96, 3), llm=(96, 4), samples=8, freeze=freeze)
    made = setting.model()
    planner = Planner(
        shape_of(made), cluster(4, bandwidth=1e8), [setting.metadata(0)], microbatches=4, balance=PLAIN, simulations=4
    )
    candidates = [r.candidate for r in planner.plan().ranked]
    ways = planner.variants
    candidates += [x for c in candidates for way in (ways.leaner, ways.ahead, ways.whole, ways.partly) for x in way(c)]
    seen = {(c.fill, bool(c.prefetch), bool(c.pieces)) for c in candidates}
    assert any(ahead_ for _, ahead_, _ in seen) == bool(freeze)
    assert any(pieces for *_, pieces in seen) == (freeze == ("vision.backbone",))
    assert any(fill == "decoupled" for fill, *_ in seen) == (freeze != ("vision",))
    for candidate in candidates:
        placed = planner.evaluator.place(candidate)
        given = {n: x.resolved(n) for n, x in candidate.layouts.items()}
        real = blueprint(made, given, candidate.scheduling.resolved(given), dict(candidate.recompute))
        assert set(real.graph.stages) == set(placed.graph.stages)


def test_what_is_decoupled_does_not_run_again_twice() -> None:
    """An encoder that fills and one that gathers with every microbatch, where memory is short."""
    shape = ModelShape(
        {"vision": module(4, 256, edge_width=512), "audio": module(4, 256, edge_width=512),
         "llm": module(8, 512, samplewise=True)},
        (("vision", "llm"), ("audio", "llm")),
    )  # fmt: skip
    layouts = {
        "vision": ModuleLayout((0, 1)), "audio": ModuleLayout((2, 3), dp_shard=2), "llm": ModuleLayout((0, 1), pp=2)
    }  # fmt: skip
    asked: list[Candidate] = []

    def fits(candidate: Candidate) -> bool:
        asked.append(candidate)
        return False

    data = batch(16)
    data = replace(data, items={**data.items, "audio": data.items["vision"]})
    made = Variants(Evaluator(shape, cluster(4), [data], balance=PLAIN), Allowed(), fits)
    assert made.whole(Candidate(layouts, 4, fill="decoupled")) == []
    assert {frozenset(c.recompute) for c in asked} == {*map(frozenset, ((), ("audio",), ("llm",), ("audio", "llm")))}


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_model_in_v_style_gets_no_second_instance(tied: bool) -> None:
    """A run refuses it: the gradient that both ends share would be reduced twice."""
    whole = model()
    shape = replace(whole, modules={**whole.modules, "llm": replace(whole.modules["llm"], tied=tied)})
    variants = Variants(Evaluator(shape, cluster(8), [batch(32)], balance=PLAIN), Allowed())
    folded = ModuleLayout([4, 5], pp=2, vpp=2, pp_style="v")
    given = Candidate({"vision": ModuleLayout(range(4), dp_shard=4), "llm": folded}, 8, "zbv")
    assert any(one.layouts["llm"].dp > 1 for one in variants.borders(given)) is not tied
