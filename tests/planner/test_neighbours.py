"""Other ways to run the best: encoders that keep nothing; never what a run refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize import transforms as table
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.neighbours import Neighbours
from hetero_strategy.planner.search import Planner
from hetero_strategy.profiling.memory import MemoryModel
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.strategy.blueprint import Options, checked_blueprint
from hetero_strategy.testing import Setting
from hetero_strategy.testing.plans import batch, cluster, model, module
from tests.planner.helpers import Squeeze, run_options
from tests.profiling.test_memory import FP32, activations

PLAIN = BalanceConfig(reorder="none")
PIPED = {"vision": ModuleLayout(range(4), dp_shard=4), "llm": ModuleLayout(range(4), pp=4)}
DEEP = {"vision": ModuleLayout((0, 1), dp_shard=2), "llm": ModuleLayout((2, 3), pp=2, split=(3, 5))}
APART = {"vision": ModuleLayout((0, 1), dp_shard=2), "llm": ModuleLayout((2, 3), pp=2)}


def evaluator(shape: ModelSpec) -> Evaluator:
    return Evaluator(CostModel(shape, cluster(4)), [batch(16)], balance=PLAIN)


def test_neighbours_of_a_candidate_are_one_change_away() -> None:
    neighbours = Neighbours(evaluator(model((4, 512), (8, 512))), RunOptions())

    def layouts(
        way: Callable[[Candidate], list[Candidate]], given: dict[str, ModuleLayout]
    ) -> list[list[ModuleLayout]]:
        return [[*other.layouts.values()] for other in way(Candidate(given, 4))]

    def sizes(**given: ModuleLayout) -> list[list[int]]:
        return [[len(x.ranks) for x in both] for both in layouts(neighbours.borders, given)]

    vision, llm = PIPED.values()
    mixed = [[replace(vision, dp_replicate=4 // n, dp_shard=n), llm] for n in (1, 2, 4)]
    assert layouts(neighbours.mixtures, PIPED) == [*mixed, [vision, replace(llm, dp_replicate=1, dp_shard=1)]]
    vision_, llm_ = APART.values()
    assert {(x.tp, x.pp) for x, other in layouts(neighbours.laid_out, APART) if other == llm_} == {(1, 2), (2, 1)}
    assert {(x.tp, x.pp) for other, x in layouts(neighbours.laid_out, APART) if other == vision_} == {(1, 1), (2, 1)}
    assert sizes(**APART) == [[1, 2]]  # two of the encoder's would leave it none
    assert sizes(vision=ModuleLayout((0,)), llm=ModuleLayout((1, 2))) == [[2, 2], [2, 1], [1, 3], [1, 1]]
    assert sizes(vision=ModuleLayout((2,)), llm=ModuleLayout((0, 1))) == [[1, 3], [1, 1], [2, 1], [2, 2]]
    assert [other.microbatches for other in neighbours.counts(Candidate(PIPED, 4))] == [3, 5, 2, 8]
    assert Neighbours(neighbours._evaluator, RunOptions(), microbatches=4).counts(Candidate(PIPED, 4)) == []
    assert [pair[1].split for pair in layouts(neighbours.cuts, DEEP)] == [(4, 4), (2, 6)]
    of = model((4, 512), (8, 512))
    deep = replace(of, modules={**of.modules, "llm": replace(of.modules["llm"], first_blocks=3)})
    assert [p[1].split for p in layouts(Neighbours(evaluator(deep), RunOptions()).cuts, DEEP)] == [(4, 4)]


@pytest.mark.full
def test_encoders_that_keep_nothing_make_a_placement_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one placement, with memory for what came in but not for what blocks read, of all microbatches."""
    vision = module(24, 16, tp=(1,), edge_width=16)
    shape = ModelSpec({"vision": vision, "llm": module(8, 48, samplewise=True, tp=(1,))}, (("vision", "llm"),))
    memory = MemoryModel(shape, {"vision": activations(24), "llm": activations(8)}, FP32)

    def planner(decoupled: bool) -> Planner:
        made = Planner(
            CostModel(shape, cluster(4), precision=FP32),
            [batch(8, images=40, text=16)],
            microbatches=8,
            balance=PLAIN,
            simulations=1,
            options=RunOptions(schedule=ScheduleConfig(max_in_flight={} if decoupled else {"llm": 8})),
        )
        # By the formula, which does not know the variant, none of them would fit.
        one = [p for p in made.proposer.proposals() if p.degrees["llm"].pp == p.degrees["vision"].dp == 4]
        monkeypatch.setattr(made.proposer, "proposals", lambda: one)
        for way in ("cuts", "laid_out"):  # others would fit, too
            monkeypatch.setattr(made.neighbours, way, lambda candidate: [])
        made.estimates.memory = 8.55e6
        return made

    best = planner(True).plan(memory=lambda: memory).best
    assert best.candidate.fill == "decoupled" and "vision" not in best.candidate.transforms
    assert best.memory is not None and best.memory.peak.max() <= 8.55e6
    with pytest.raises(LayoutError, match="needs"):
        planner(False).plan(memory=lambda: memory)


def test_what_fills_and_trains_may_keep_less() -> None:
    neighbours = Neighbours(evaluator(model()), RunOptions())
    candidate = Candidate(PIPED, 4, fill="fine", transforms={"vision": [Recompute()], "llm": [Recompute()]})
    found = neighbours.leaner(candidate)
    assert [c.fill for c in found] == ["decoupled", "none"]
    assert [set(c.transforms) for c in found] == [{"llm"}, {"vision", "llm"}]
    assert not neighbours.leaner(replace(candidate, fill="none"))
    assert not neighbours.leaner(replace(candidate, layouts=APART))
    assert not Neighbours(evaluator(model(frozen=True)), RunOptions()).leaner(candidate)  # it keeps nothing anyway


def test_what_a_person_gave_is_not_contradicted() -> None:
    assert RunOptions().decoupled
    bound = ScheduleConfig(max_in_flight={"vision": 1})
    every = run_options({"vision": Recompute(2)}), run_options({"llm": Offload()}), RunOptions(schedule=bound)
    for given in every:
        assert not given.decoupled and given.fixed_schedule == given.schedule
    none = ScheduleConfig()
    planned = Candidate(PIPED, fill="fine", pieces={"vision": 2}).scheduling
    assert none.instead_of_auto(planned) == planned
    for asked in (ScheduleConfig(fill="none"), ScheduleConfig(reshard_after_forward="always")):
        assert not asked.instead_of_auto(planned).pieces


@pytest.mark.full
@pytest.mark.parametrize(
    "freeze",
    [(), ("vision",), ("vision.backbone",)],
    ids=str,
)
def test_nothing_that_is_planned_is_refused(freeze: tuple[str, ...]) -> None:
    """Every candidate that was simulated is one of which a run's stages and schedule can be made."""
    layouts = dict.fromkeys(("vision", "llm"), ModuleLayout(range(4)))
    setting = Setting("", layouts, vision=(96, 3), llm=(96, 4), samples=8, freeze=freeze)
    made = setting.model()
    planner = Planner(
        CostModel(spec_of(made), cluster(4, bandwidth=1e8)),
        [setting.metadata(0)],
        microbatches=4,
        balance=PLAIN,
        simulations=4,
    )
    candidates = [r.candidate for r in planner.plan().ranked]
    ways = planner.neighbours
    candidates += [x for c in candidates for way in (ways.leaner, ways.gathered_once, ways.transformed) for x in way(c)]
    assert any(c.fill == "decoupled" for c in candidates) == (freeze != ("vision",))
    for candidate in candidates:
        placed = planner.evaluator.place(candidate)
        real = checked_blueprint(made, place(candidate.layouts, 4), Options(candidate.scheduling, candidate.transforms))
        assert set(real.graph.stages) == set(placed.graph.stages)


def test_what_is_decoupled_does_not_run_again_twice() -> None:
    """An encoder that fills and one that gathers with every microbatch, where memory is short."""
    shape = ModelSpec(
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
    made = Neighbours(Evaluator(CostModel(shape, cluster(4)), [data], balance=PLAIN), RunOptions(), fits)
    assert made.gathered_once(Candidate(layouts, 4, fill="decoupled")) == []
    assert {frozenset(c.transforms) for c in asked} == {*map(frozenset, ((), ("audio",), ("llm",), ("audio", "llm")))}


def test_each_least_choice_of_recomputed_blocks_is_a_neighbour() -> None:
    """The encoder alone or the language model alone, and not both."""
    made = Neighbours(
        evaluator(model()), RunOptions(), lambda c: any(of["recompute"] == Recompute() for of in c.transforms.values())
    )
    both = Candidate(PIPED, 4, transforms={"vision": [Recompute()], "llm": [Recompute()]})
    assert [c.transforms for c in made.transformed(both)] == [
        {n: {"recompute": Recompute()}} for n in ("llm", "vision")
    ]


def test_least_choices_of_two_kinds_do_not_hide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One squeezed block, or all blocks that run again, is enough: neither is less than the other."""
    monkeypatch.setattr(table, "ORDER", [*table.ORDER, Squeeze])
    enough: list[list[Transform]] = [[Squeeze([2])], [Recompute()]]

    def fits(candidate: Candidate) -> bool:
        of = candidate.transforms.get("llm", {})
        return "squeeze" in of or of.get("recompute") == Recompute()

    found = Neighbours(evaluator(model()), RunOptions(), fits).transformed(Candidate(PIPED, 4))
    assert [[*c.transforms["llm"].values()] for c in found] == enough


@pytest.mark.parametrize(("fill", "tried"), [("decoupled", {1, 2, 3, 4}), ("none", {1})])
def test_some_blocks_run_again_where_few_modules_can_besides_decoupled_ones(fill: str, tried: set[int]) -> None:
    encoders, llm = ("vision", "audio", "video"), module(8, 512, samplewise=True)
    shape = ModelSpec(
        {**{name: module(4, 256, edge_width=512) for name in encoders}, "llm": llm},
        tuple((name, "llm") for name in encoders),
    )
    layouts = {"vision": ModuleLayout((0, 1)), **dict.fromkeys(("audio", "video"), ModuleLayout((2, 3)))}
    layouts["llm"] = ModuleLayout((0, 1), pp=2)
    asked: list[Candidate] = []
    data = batch(16)
    data = replace(data, items=dict.fromkeys(encoders, data.items["vision"]))
    costs = CostModel(shape, cluster(4))
    made = Neighbours(Evaluator(costs, [data], balance=PLAIN), RunOptions(), lambda c: bool(asked.append(c)))
    assert not made.transformed(Candidate(layouts, 4, fill=fill))
    assert {of["recompute"].every for c in asked for of in c.transforms.values() if of} == tried


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_model_in_v_style_gets_no_second_instance(tied: bool) -> None:
    """A run refuses it: the gradient that both ends share would be reduced twice."""
    whole = model()
    shape = replace(whole, modules={**whole.modules, "llm": replace(whole.modules["llm"], tied=tied)})
    neighbours = Neighbours(Evaluator(CostModel(shape, cluster(8)), [batch(32)], balance=PLAIN), RunOptions())
    folded = ModuleLayout([4, 5], pp=2, vpp=2, pp_style="v")
    given = Candidate({"vision": ModuleLayout(range(4), dp_shard=4), "llm": folded}, 8, "zbv")
    assert any(one.layouts["llm"].dp > 1 for one in neighbours.borders(given)) is not tied
