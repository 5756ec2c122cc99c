"""Plans keep to bounds: of memory, of balance's budgets, and of the seconds that they may take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.ranking import Ranked
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.step_seconds import first_samples
from hetero_strategy.profiling.memory import KINDS, Memory, MemoryModel
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.testing.plans import batch, cluster, model
from tests.profiling.test_memory import FP32, OF, SHAPE

PLAIN = BalanceConfig(reorder="none")


def test_a_batch_without_images_does_not_bound_instances_of_their_encoder() -> None:
    """Those layouts run in it, with idle instances."""
    some, none = batch(16), batch(16, 1)
    items = none.items["vision"]
    columns = {name: getattr(items, name)[:0] for name in ("sample", "edge_rows", "start", "inner_rows")}
    none = replace(none, items={"vision": replace(items, **columns)})
    made = Planner(CostModel(model(), cluster(4)), [some, none], balance=PLAIN)
    most = max(made.proposer.proposals(), key=lambda p: p.degrees["vision"].dp)
    assert most.degrees["vision"].dp == 4 and made.evaluator.seconds(most.candidate) > 0


@pytest.mark.parametrize("ranks", [8, 32])
def test_a_rare_modality_does_not_bound_the_ranks_of_the_others(ranks: int) -> None:
    """Its encoder has idle instances in one layout for all modules. Apart from the language model, which then has fewer
    instances, it takes ranks where every layout is looked at.
    """
    data = batch(64)
    items = data.items["vision"]
    columns = {name: getattr(items, name)[:2] for name in ("sample", "edge_rows", "start", "inner_rows")}
    data = replace(data, items={"vision": replace(items, **columns)})
    shape = model(tp=(1,))
    made = Planner(CostModel(shape, cluster(ranks, 8)), [data], balance=PLAIN)
    every = made.proposer.proposals()
    used = {(len(p.partition), p.homogeneous): sum(map(len, p.ranks)) for p in reversed(every)}
    assert used[1, True] == ranks and (ranks > 16 or used[2, False] == ranks)
    alike = next(p for p in every if p.homogeneous)
    assert alike.degrees["vision"].dp == ranks and made.evaluator.seconds(alike.candidate) > 0


@pytest.mark.parametrize("fill", ["fine", "decoupled", "none"])
def test_what_is_held_for_all_microbatches_of_a_long_step_is_counted(
    monkeypatch: pytest.MonkeyPatch, fill: str
) -> None:
    monkeypatch.setattr("hetero_strategy.planner.step_seconds.MOST_FORWARDS", 16)
    data = batch(32)
    made = Planner(CostModel(SHAPE, cluster(2, memory=1e12), precision=FP32), [data], balance=PLAIN)
    layouts = {"vision": ModuleLayout((0, 1), dp_shard=2), "llm": ModuleLayout((0, 1), pp=2)}
    placed, predicted = made.evaluator.place(Candidate(layouts, 32, fill=fill)), MemoryModel(SHAPE, OF, FP32)
    shown, whole = (step.memory(predicted).peak for step in (made.evaluator.shown(placed), made.evaluator.step(placed)))
    assert np.array_equal(made._needs(placed.candidate, predicted).peak, shown if fill == "none" else whole)
    if fill != "none":
        assert whole.max() > 1.2 * shown.max()
        made.estimates.memory = 0.99 * shown.max()
        assert np.array_equal(made._needs(placed.candidate, predicted).peak, shown)


def test_what_cannot_keep_the_budget_is_not_proposed() -> None:
    """The fewest microbatches that keep it are."""
    data = batch(64)
    tight = BalanceConfig(reorder="none", budget={"llm": int(1.1 * data.tokens.max())})
    for ranks in (8, 32):  # all layouts are estimated, those of the best allocations
        made = Planner(CostModel(model(), cluster(ranks, 8)), [data], balance=tight)
        proposals = made.proposer.proposals()
        for one in proposals[:20]:
            assert made.evaluator.seconds(one.candidate) > 0
        tried = {(p.degrees["llm"].dp, p.microbatches) for p in proposals}
        assert {(dp, made.proposer.fewest(dp)) for dp, _ in tried} & tried
        assert all(count >= made.proposer.fewest(dp) > 1 for dp, count in tried)


def test_long_steps_whose_first_samples_are_the_longest_keep_the_budget_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first eight, which stand for all, two would have to share a microbatch."""
    monkeypatch.setattr("hetero_strategy.planner.step_seconds.MOST_FORWARDS", 16)
    tokens, none = np.repeat([400, 100], [8, 24]), np.zeros(0, np.int64)
    data = StepMetadata(0, 0, np.arange(32), tokens, tokens - 1, {"vision": StepItems(none, none, none, none)})
    tight = BalanceConfig(reorder="none", budget={"llm": 420})
    made = Planner(CostModel(SHAPE, cluster(2), precision=FP32), [data], balance=tight)
    candidate = Candidate({"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((0, 1), pp=2)}, 16)
    placed = made.evaluator.place(candidate)
    assert made.evaluator.shown(placed).plan.microbatches < 16
    assert made.evaluator.seconds(candidate) == pytest.approx(made.evaluator.step(placed).seconds, rel=0.5)


@pytest.mark.parametrize("ranks", [2, 32])
def test_too_few_microbatches_for_the_budget_are_refused(ranks: int) -> None:
    data = batch(16)
    most = int(data.tokens.max())
    tight = BalanceConfig(reorder="none", budget={"llm": most})
    made = Planner(CostModel(model(), cluster(ranks)), [data], balance=tight, microbatches=1)
    if ranks > 16:  # there is an instance for each sample
        assert {p.degrees["llm"].dp for p in made.proposer.proposals()} == {16}
        return
    with pytest.raises(LayoutError, match=rf"1 microbatches are asked for, .*'llm' {most} tokens in each; give \d+"):
        made.plan()


class Growing(MemoryModel):
    """Says that the first steps need twice the room, and others half of it."""

    def __init__(self, room: float, ranks: int, many: int) -> None:
        super().__init__(SHAPE, OF)
        self.__dict__ |= {"needs": iter([2.0 * room] * many), "else_": 0.5 * room, "ranks": ranks}

    def of(self, *_: Any) -> Memory:
        needed = np.zeros((len(KINDS), self.ranks))  # type: ignore[attr-defined]
        needed[KINDS.index("activations")] = next(self.needs, self.else_)  # type: ignore[attr-defined]
        return Memory(needed)


def test_a_way_that_does_not_run_ends_no_plan() -> None:
    """One proposal of the best has fewer microbatches than its budget takes."""
    data = batch(16)
    tight = BalanceConfig(reorder="none", budget={"llm": int(data.tokens.max())})
    made = Planner(CostModel(model(tp=(1,)), cluster(4)), [data], balance=tight)
    first = next(p for p in made.proposer.proposals() if made.neighbours.leaner(p.candidate))
    runs_not = first._replace(microbatches=1)
    assert made.neighbours.leaner(runs_not.candidate)
    found, lean = made._that_fit([first, runs_not], Growing(made.estimates.memory, 4, 1))
    assert found and lean and all(proposal is first for proposal, _ in lean)
    assert made._why_none is None  # what is found at last does not fail for its reason


def test_what_needs_less_memory_is_tried_while_there_is_time() -> None:
    """Afterwards one, where nothing else is left."""
    made = Planner(CostModel(model(tp=(1,)), cluster(4)), [batch(16)], balance=PLAIN, simulations=2)
    proposals = [p for p in made.proposer.proposals() if made.neighbours.leaner(p.candidate)][:2]
    made.proposer.proposals = lambda: proposals  # type: ignore[method-assign]
    room = made.estimates.memory
    answer = made.plan(memory=lambda: Growing(room, 4, 1), seconds=0.0)
    assert len(answer.ranked) == 1 and not answer.too_large
    step = Ranked(proposals[0].candidate, 1.0, 1.0)
    answer = made._fitting([step], 1, Growing(room, 4, 1), 0.0)
    assert len(answer.ranked) == len(answer.too_large) == 1


def test_a_batch_without_samples_is_named() -> None:
    with pytest.raises(ConfigError, match="1 of the 2 global batches drawn have no samples"):
        Planner(CostModel(model(), cluster(2)), [batch(4), first_samples(batch(4), 0)], balance=PLAIN)


def test_memory_is_that_of_the_batch_that_needs_most() -> None:
    """Whichever of them comes first."""
    small, large = batch(8, text=64, rows=32), batch(8, 1, text=2000, rows=800)
    layouts = {name: ModuleLayout((0, 1), dp_shard=2) for name in ("vision", "llm")}
    found = []
    for data in ([small], [large], [small, large], [large, small]):
        made = Planner(CostModel(SHAPE, cluster(2), precision=FP32), data, balance=PLAIN)
        found.append(made._needs(Candidate(layouts, 2), MemoryModel(SHAPE, OF, FP32)).peak)
    assert found[0].max() < found[1].max()
    assert all(np.array_equal(found[1], peak) for peak in found[2:])
