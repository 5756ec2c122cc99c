"""Plans are the best that there are: against all candidates simulated, one layout for all, and what cannot fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, count
from types import SimpleNamespace

import numpy as np
import pytest

from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, UnitRuns
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.explain import explain
from hetero_strategy.planner.propose import Proposal
from hetero_strategy.planner.ranking import BEHIND, Answer, Ranked, hopeless, is_homogeneous, promising
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import Degrees, degrees, partitions
from hetero_strategy.planner.step_seconds import first_samples
from hetero_strategy.profiling.memory import MemoryModel
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.testing.plans import SIMULATIONS, batch, cluster, model, module
from tests.planner.helpers import run_options
from tests.profiling.test_memory import FP32, OF, TEXT

PLAIN = BalanceConfig(reorder="none")


def planner(shape: ModelSpec, ranks: int, samples: int = 16, simulations: int = 24, **options: float) -> Planner:
    return Planner(
        CostModel(shape, cluster(ranks, **options)), [batch(samples)], balance=PLAIN, simulations=simulations
    )


@pytest.mark.full
@pytest.mark.parametrize("frozen", [False, True])
def test_no_step_is_shorter_than_what_ranks_compute_at_least(frozen: bool) -> None:
    made = planner(model((4, 512), (6, 512), frozen=frozen), 4, 8, simulations=4)
    over = [r.seconds / made._least(r.candidate) for r in made.plan().ranked]
    assert 1 <= min(over) < 1.2


@pytest.mark.parametrize(
    ("encoder", "llm", "ranks", "options"),
    [
        ((4, 256), (4, 512), 2, {}),
        pytest.param((4, 768), (4, 512), 3, {}, marks=pytest.mark.full),
        pytest.param((4, 512), (6, 512), 3, {"memory": 3e8}, marks=pytest.mark.full),
    ],
)
def test_no_candidate_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    encoder: tuple[int, int],
    llm: tuple[int, int],
    ranks: int,
    options: dict[str, float],
) -> None:
    # A quarter of what is simulated of steps as short.
    monkeypatch.setattr("hetero_strategy.planner.step_seconds.LEAST_SHARE", 0.25)
    monkeypatch.setattr("hetero_strategy.planner.ranking.LONG", 2.0)
    made = planner(model(encoder, llm), ranks, 8, **options)
    answer = made.plan()
    everything: dict[Candidate, float] = {}
    every_layout(monkeypatch)
    proposals = made.proposer.proposals()
    for proposal in (p for p in proposals if usual(made, p) or p.seconds < 1.25 * proposals[0].seconds):
        ways = (proposal.candidate, *made.neighbours.schedules(proposal.candidate))
        for candidate in chain(ways, *map(made.neighbours.fills, ways)):
            ranked: list[Ranked] = []
            made._simulate(candidate, 0.0, ranked)
            everything |= {r.candidate: r.seconds for r in ranked}
    assert len(everything.keys() - {r.candidate for r in answer.ranked}) > len(everything) / 4
    assert answer.best.seconds <= 1.01 * min(everything.values())


def usual(made: Planner, proposal: Proposal) -> bool:
    """Whether it is on all ranks and has a number of microbatches as on many."""
    counts = made.proposer.counts(proposal.degrees["llm"].dp)
    return sum(map(len, proposal.ranks)) == made.evaluator.cluster.ranks and proposal.microbatches in counts


def every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be proposed, not only the most promising."""
    for name in ("OF_ALL", "LAYERS"):
        monkeypatch.setattr(f"hetero_strategy.planner.allocate.{name}", 2**30)


def test_proposals_are_ranked_much_as_simulation_ranks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    every_layout(monkeypatch)
    made = planner(model((4, 512), (8, 512)), 4)
    proposals = [p for p in made.proposer.proposals() if usual(made, p)][::12]  # all others are ranked less well
    both = np.array([(p.seconds, made.evaluator.seconds(p.candidate)) for p in proposals])
    ranks = both.argsort(axis=0).argsort(axis=0)
    assert np.corrcoef(ranks.T)[0, 1] > 0.9
    assert np.median(np.abs(both[:, 0] / both[:, 1] - 1)) < 0.1


def test_a_small_encoder_stays_with_the_language_model() -> None:
    answer = planner(model((2, 64), (8, 512)), 4, 32, SIMULATIONS).plan()
    assert is_homogeneous(answer.best.candidate)
    alike = answer.homogeneous()
    assert alike is not None
    assert answer.best.seconds <= 1.01 * min(r.seconds for r in answer.ranked)


@pytest.mark.full
def test_the_best_is_never_slower_than_one_layout_for_all() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        encoder, llm = ((int(rng.integers(2, 6)), int(rng.choice([128, 256, 512]))) for _ in range(2))
        answer = planner(model(encoder, llm, frozen=bool(seed % 2)), 4, 12, SIMULATIONS).plan()
        alike = answer.homogeneous()
        assert alike is not None
        assert answer.best.seconds <= alike.seconds


@pytest.mark.full
def test_many_ranks_are_allocated_and_none_is_left() -> None:
    made = Planner(CostModel(model((4, 512), (16, 1024)), cluster(96, 8)), [batch(96)], balance=PLAIN, simulations=4)
    answer = made.plan()
    assert all(set(r.candidate.layouts) == {"vision", "llm"} for r in answer.ranked)
    used = {rank for layout in answer.best.candidate.layouts.values() for rank in layout.ranks}
    assert len(used) >= 90
    assert answer.homogeneous() is not None


def test_what_is_beside_a_language_model_is_proposed_on_whole_nodes_too() -> None:
    """80 of 120 ranks leave five nodes, of which fewer and half of one are proposed, too."""
    made = Planner(CostModel(model((6, 768), (24, 1024)), cluster(120, 8)), [batch(96)], balance=PLAIN, simulations=1)
    apart = [p.candidate.layouts for p in made.proposer.proposals() if len(p.partition) == 2]
    assert {(40, 80), (36, 80), (32, 80)} <= {(len(one["vision"].ranks), len(one["llm"].ranks)) for one in apart}


def test_on_many_ranks_instances_need_not_share_out_the_samples_evenly() -> None:
    """62 samples on 32 ranks in tensor-parallel pairs of pairs: 8 instances of 7 or 8, and not 2 of 31."""
    vision, llm = module(8, 512, tp=(1,), edge_width=1024), module(24, 1024, samplewise=True, tp=(4,))
    shape = ModelSpec({"vision": vision, "llm": llm}, (("vision", "llm"),))
    made = Planner(CostModel(shape, cluster(32, 8)), [batch(62)], simulations=1)
    best = made.proposer.proposals()[0]
    assert best.degrees["llm"].dp == 8
    few = [Candidate({"vision": ModuleLayout(tuple(range(32))), "llm": ModuleLayout(tuple(range(32)), tp=4, pp=4)}, n)
           for n in (4, 8, 16, 31)]  # fmt: skip
    assert made.evaluator.seconds(best.candidate) < 0.85 * min(made.evaluator.seconds(one) for one in few)


def test_a_step_of_many_microbatches_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1, 2), dp_shard=1, pp=2)}
    evaluator = Evaluator(CostModel(model(), cluster(3)), [batch(256, rows=64)], balance=PLAIN)
    candidate = Candidate(layouts, 64)
    whole = evaluator.seconds(candidate)
    monkeypatch.setattr("hetero_strategy.planner.step_seconds.MOST_FORWARDS", 48)
    assert evaluator.seconds(candidate) == pytest.approx(whole, rel=0.05)


def test_an_extrapolated_step_takes_no_less_than_its_busiest_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer of two short steps is made to seem as short as the shorter one, as where its bubbles happen to be
    smaller.
    """
    layouts = {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1, 2), dp_shard=1, pp=2)}
    evaluator = Evaluator(CostModel(model(), cluster(3)), [batch(256, rows=64)], balance=PLAIN)
    candidate = Candidate(layouts, 64)
    busy = float(evaluator.step(evaluator.place(candidate)).simulation.busy.max())
    monkeypatch.setattr("hetero_strategy.planner.step_seconds.MOST_FORWARDS", 48)
    took = evaluator._took
    monkeypatch.setattr(evaluator, "_took", lambda *args: took(*args)._replace(seconds=0.0))
    assert evaluator.seconds(candidate) == pytest.approx(busy * 48 / 64, rel=0.05)  # of the 48 that follow


def test_batches_are_left_out_after_those_that_take_too_long() -> None:
    evaluator = Evaluator(CostModel(model(), cluster(1)), [batch(16, seed) for seed in range(3)], balance=PLAIN)
    candidate = Candidate({name: ModuleLayout((0,)) for name in ("vision", "llm")})
    every = evaluator.of_batches(candidate)
    assert len(every) == 3 and evaluator.seconds(candidate) == pytest.approx(sum(every) / 3)
    assert evaluator.of_batches(candidate, every) == every
    assert evaluator.of_batches(candidate, [every[0], 0.9 * every[1], every[2]]) == every[:2]


def test_what_fell_behind_on_the_first_batch_is_as_far_behind_on_all() -> None:
    made = Planner(CostModel(model(), cluster(2)), [batch(16, 0), batch(24, 1)], balance=PLAIN)
    fast, slow = (Candidate({n: ModuleLayout(r, dp_shard=len(r)) for n in ("vision", "llm")}) for r in ((0, 1), (0,)))
    ranked: list[Ranked] = []
    for candidate in (fast, slow):
        made._simulate(candidate, 1.0, ranked)
    first, second = ranked
    assert first.batches == tuple(made.evaluator.of_batches(fast))
    assert second.batches[0] == made.evaluator.of_batches(slow)[0] > BEHIND * first.batches[0]
    assert second.seconds / first.seconds == pytest.approx(second.batches[0] / first.batches[0])


@pytest.mark.parametrize(
    ("microbatches", "estimate", "left_out"), [(800, 2.3, True), (800, 2.1, False), (4, 2.3, False)]
)
def test_long_steps_are_left_out_where_their_estimates_would_have_to_be_worse_than_all_before(
    microbatches: int, estimate: float, left_out: bool
) -> None:
    """Estimates of the kind were twice as high as what was simulated; the best took 1 s."""
    partition = (("vision",), ("llm",))
    way = {"vision": Degrees(1, 1, 1, 1), "llm": Degrees(1, 4, 1, 1)}
    proposal = Proposal(estimate, partition, (range(1), range(1, 5)), way, microbatches, "llm")
    ranked = [Ranked(proposal.candidate, 1.0, 2.0)]
    assert hopeless(proposal, {partition: 0.5}, ranked) is left_out
    assert not hopeless(proposal, {}, ranked)


def test_the_first_samples_are_a_batch() -> None:
    whole = batch(20)
    part = first_samples(whole, 7)
    items = part.items["vision"]
    assert len(part.samples) == 7
    assert items.sample.max() == 6
    assert len(items.sample) == (whole.items["vision"].sample < 7).sum() == len(items.start)


def test_of_the_first_samples_are_the_rows_that_a_source_gives() -> None:
    """Of items of another module, and of samples."""
    whole, n = batch(8), np.arange(8)
    ones, images = np.ones(8, np.int64), np.flatnonzero(np.diff(whole.items["vision"].sample, prepend=-1))
    runs = {name: UnitRuns(source, 0 * n, n, 0 * n, ones) for name, source in (("vision", images), ("llm", n))}
    own = StepItems(n, ones, 0 * n, ones, given=runs)
    part = first_samples(replace(whole, items={**whole.items, "reader": own}), 3)
    assert part.items["reader"].given is not None
    for name, run in part.items["reader"].given.items():
        assert run.target.tolist() == [0, 1, 2] and run.source.tolist() == runs[name].source[:3].tolist()
        assert len(run.rows) == len(run.source_start) == len(run.target_start) == 3


def test_busy_and_idle_are_explained() -> None:
    evaluator = Evaluator(CostModel(model(), cluster(4, 2)), [batch(16)], balance=PLAIN)
    layouts = {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1, 2, 3))}
    step = evaluator.step(evaluator.place(Candidate(layouts, 4)))
    found = explain(evaluator, step)
    after = step.after.total / step.seconds
    assert sum(found.shares.values()) + sum(found.bubbles.values()) + after == pytest.approx(1.0)
    rows = sum(int(r) for r in step.plan.metadata.items["vision"].edge_rows)
    assert found.within + found.across == pytest.approx(2 * 2 * 512 * rows)  # there and back, 2 bytes a number
    assert 0 < found.across < found.within + found.across


def test_partitions_and_degrees() -> None:
    assert [len(list(partitions("abcd"[:n]))) for n in range(1, 5)] == [1, 2, 5, 15]
    ways = degrees(module(4, 64), 8, 4, 100)
    assert {w.ranks for w in ways} == {8}
    assert max(w.tp for w in ways) == 4
    assert max(w.pp for w in ways) == 4


def test_what_cannot_fit_says_what_would() -> None:
    with pytest.raises(LayoutError, match=r"no layout of vision, llm fits on 4 x test with 0 GiB.*need .*; give more"):
        planner(model(), 4, memory=1e6).plan()


def test_data_of_another_model_are_refused() -> None:
    shape = model()
    renamed = ModelSpec({"audio": shape.modules["vision"], "llm": shape.modules["llm"]}, (("audio", "llm"),))
    with pytest.raises(ConfigError, match="no items of audio"):
        planner(renamed, 4)


def test_a_model_without_language_model_is_refused() -> None:
    shape = model()
    only = ModelSpec({"vision": shape.modules["vision"]}, ())
    with pytest.raises(ConfigError, match="no language model"):
        planner(only, 4)


def test_modules_are_named_in_the_order_of_the_model_however_they_share_ranks() -> None:
    pair, ears = model(), module(4, 64, edge_width=512)
    shape = ModelSpec(
        {"vision": pair.modules["vision"], "audio": ears, "llm": pair.modules["llm"]},
        (("vision", "llm"), ("audio", "llm")),
    )
    sound = replace(batch(8), items=dict.fromkeys(("vision", "audio"), batch(8).items["vision"]))
    made = Planner(CostModel(shape, cluster(2)), [sound], balance=PLAIN)
    proposals = made.proposer.proposals()
    assert (("vision", "llm"), ("audio",)) in {p.partition for p in proposals}
    assert {tuple(p.candidate.layouts) for p in proposals} == {("vision", "audio", "llm")}


def test_some_of_every_kind_are_simulated_however_they_are_estimated() -> None:
    made = planner(model((4, 512), (8, 512)), 4)
    last = sorted(made.proposer.proposals(), key=lambda p: (p.homogeneous, p.seconds))  # one layout for all: the worst
    chosen = promising(last, 1)
    assert sum(p.homogeneous for p in chosen) == 2
    assert {p.partition for p in chosen} == {p.partition for p in last}


@pytest.mark.parametrize("ranks", [8, 32])
def test_few_long_samples_are_shared_by_context_parallel_ranks_of_a_node(ranks: int) -> None:
    """Which exchange less than as many tensor-parallel ones; with more samples there are more instances instead."""
    llm = replace(module(4, 512, samplewise=True, tp=(1, 2, 4, 8)), keys=256)
    shape, given = ModelSpec({"llm": llm}, ()), cluster(ranks, 8)
    found = {}
    for samples in (ranks // 8, ranks):
        tokens = np.full(samples, 8192)
        data = StepMetadata(0, 0, np.arange(samples), tokens, tokens // 2, {})
        made = Planner(CostModel(shape, given), [data], balance=PLAIN, simulations=2)
        layouts = [p.candidate.layouts["llm"] for p in made.proposer.proposals()]
        assert all(8 % (x.tp * x.cp) == 0 and x.ranks[0] % (x.tp * x.cp) == 0 for x in layouts)
        assert any(x.cp > 1 for x in layouts)
        found[samples] = made.plan().best.candidate.layouts["llm"]
    assert (found[ranks // 8].cp, found[ranks // 8].tp) == (8, 1) and found[ranks].dp == ranks


@pytest.mark.full
@pytest.mark.parametrize("few", [16, 0], ids=["tried", "allocated"])
def test_tensor_parallelism_crosses_no_node(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr("hetero_strategy.planner.propose.FEW", few)
    monkeypatch.setattr("hetero_strategy.planner.neighbours.FEW", few)
    given = cluster(12, 4)
    made = Planner(
        CostModel(model((4, 256), (4, 512)), given), [batch(16)], microbatches=4, balance=PLAIN, simulations=4
    )
    candidates = [*(p.candidate for p in made.proposer.proposals()), *(r.candidate for r in made.plan().ranked)]
    layouts = [x for candidate in candidates for x in candidate.layouts.values()]
    assert all(x.ranks[0] % 4 % x.tp == 0 for x in layouts)
    assert few == 0 or {x.ranks[0] for x in layouts if x.tp == 4} >= {0, 4, 8}
    odd = [c for c in candidates if len(c.layouts["vision"].ranks) % 2 == 1 and c.layouts["llm"].tp > 1]
    assert (odd or few == 0) and all(c.layouts["llm"].ranks[0] == 0 for c in odd)  # the encoder follows


@pytest.mark.full_cases("varies")
@pytest.mark.parametrize("few", [16, 0], ids=["climbs", "varies"])
def test_progress_is_told_to_the_end(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr("hetero_strategy.planner.propose.FEW", few)
    monkeypatch.setattr("hetero_strategy.planner.neighbours.FEW", few)
    told: list[tuple[int, int, float]] = []
    answer = planner(model((2, 512), (4, 512)), 2, simulations=2).plan(lambda *now: told.append(now))
    done = [n for n, _, _ in told]
    assert done == sorted(done) and all(total >= n for n, total, _ in told)
    assert done[-1] >= len(answer.ranked) and len({total for _, total, _ in told}) > 1
    assert [best for _, _, best in told] == sorted((best for _, _, best in told), reverse=True)
    assert told[-1][2] == answer.ranked[0].seconds


@pytest.mark.full
def test_a_climb_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second with each look at it: one before each candidate that is simulated."""
    made = planner(model((2, 512), (4, 512)), 2, simulations=2)
    proposed = len(promising(made.proposer.proposals(), 2))
    monkeypatch.setattr("hetero_strategy.planner.search.time", SimpleNamespace(monotonic=partial(next, count())))
    assert proposed < len(made.plan(seconds=proposed + 3).ranked) <= proposed + 4 < len(made.plan().ranked)


def test_of_what_lies_alike_less_is_simulated() -> None:
    proposals = planner(model((2, 512), (4, 512)), 12, bandwidth=1e8).proposer.proposals()
    chosen = promising(proposals, 2)
    assert len({p.layout_key for p in chosen}) > 1.2 * len({p.layout_key for p in proposals[: len(chosen)]})


def test_one_layout_for_all_is_preferred_where_it_is_as_good() -> None:
    alike = Candidate(dict.fromkeys(("vision", "llm"), ModuleLayout((0, 1))))
    other = replace(alike, layouts={"vision": ModuleLayout((0,)), "llm": ModuleLayout((1,))})
    assert Answer((Ranked(other, 1.0, 1.0), Ranked(alike, 1.005, 1.0)), 2).best.candidate is alike
    assert Answer((Ranked(other, 1.0, 1.0), Ranked(alike, 1.02, 1.0)), 2).best.candidate is other


def test_what_needs_too_much_memory_gives_way() -> None:
    """A language model whose activations are known, on devices of less and less memory."""
    made = Planner(CostModel(TEXT, cluster(2), precision=FP32), [batch(16)], microbatches=2, simulations=30)
    made.estimates.kept = 0.4  # its blocks keep less than usual ones
    predicted = MemoryModel(TEXT, OF, FP32)
    roomy = made.plan(memory=lambda: predicted)
    assert not roomy.too_large
    assert roomy.best.memory is not None
    most = float(roomy.best.memory.peak.max())
    made.estimates.memory = 0.95 * most
    tight = made.plan(memory=lambda: predicted)
    assert tight.best.memory is not None
    assert tight.best.memory.peak.max() <= made.estimates.memory < most
    assert tight.best.seconds >= roomy.best.seconds
    assert all(r.memory is not None and r.memory.peak.max() > made.estimates.memory for r in tight.too_large)
    made.estimates.memory = 0.02 * most
    with pytest.raises(LayoutError, match=r"no layout of llm fits|GiB or more on some rank"):
        made.plan(memory=lambda: predicted)


SHARDS_ON_SLOW_LINKS = {name: ModuleLayout((0, 1), dp_shard=2) for name in ("vision", "llm")}


@pytest.mark.full
def test_parameters_are_gathered_once_where_links_are_slow_and_there_is_memory() -> None:
    """Four microbatches are given, each of which gathers by default. Where memory is short, blocks run again for it."""
    shape, slow = model(), cluster(2, bandwidth=1e8)
    made = Planner(CostModel(shape, slow), [batch(8)], balance=PLAIN, microbatches=4)
    each = Candidate(SHARDS_ON_SLOW_LINKS, 4)
    (once,) = made.neighbours.gathered_once(each)
    assert once == replace(each, reshard_after_forward="never") and made.neighbours.gathered_once(once) == []
    assert made.evaluator.seconds(once) < 0.8 * made.evaluator.seconds(each)
    assert made.plan().best.seconds <= made.evaluator.seconds(once)
    degrees = Degrees(1, 1, 1, 2, whole=True)
    needed = sum(made.estimates.bytes(name, degrees, 4) for name in shape.modules)
    made.estimates.memory = 0.99 * needed
    ways = made.neighbours.gathered_once(each)
    assert ways and all(way.transforms and way.reshard_after_forward == "never" for way in ways)
    made.estimates.memory = sum(made.estimates.held(name, degrees) for name in shape.modules)
    assert made.neighbours.gathered_once(each) == []


@pytest.mark.full
@pytest.mark.parametrize("reshard", ["never", "always"])
def test_when_parameters_are_freed_is_kept_as_a_person_says_it(reshard: str) -> None:
    """Over slow links, where the one is much slower than the other; nothing is tried that a run would refuse."""
    given = RunOptions(schedule=ScheduleConfig(reshard_after_forward=reshard))
    made = Planner(CostModel(model(), cluster(2, bandwidth=1e8)), [batch(8)], balance=PLAIN, options=given)
    answer = made.plan()
    assert {r.candidate.reshard_after_forward for r in answer.ranked} == {reshard}
    refused = [r for r in answer.ranked if r.candidate.fill == "fine" or r.candidate.schedule in ("zb_h1", "zbv")]
    assert bool(refused) == (reshard == "never")


def test_no_more_blocks_run_again_than_have_to() -> None:
    """Of the language model's eight; what a person gave stays as it is."""
    shape, again = model(), {"llm": Recompute()}
    made = Planner(CostModel(shape, cluster(2)), [batch(8)], balance=PLAIN, microbatches=1)
    alike = {name: ModuleLayout((0, 1), dp_replicate=2, dp_shard=1) for name in shape.modules}
    every = Candidate(alike, 1, transforms={"llm": {"recompute": "all"}})
    degrees = {name: Degrees(1, 1, 2, 1) for name in shape.modules}

    def needed(number: int) -> float:
        return sum(
            made.estimates.bytes(n, w._replace(transforms=(Recompute(number),) * (n == "llm")), 1)
            for n, w in degrees.items()
        )

    for number in (2, 3, 4):
        made.estimates.memory = needed(number)
        way = replace(every, transforms={"llm": [Recompute(number)]})
        assert way in made.neighbours.transformed(every) and way in made.neighbours.transformed(way)
        assert made.evaluator.seconds(way) < made.evaluator.seconds(every)
    made.estimates.memory = (needed(1) + needed(2)) / 2
    ways = made.neighbours.transformed(every)
    assert every in ways and all(len(way.transforms) == 2 or way == every for way in ways[1:])
    made = Planner(CostModel(shape, cluster(2)), [batch(8)], balance=PLAIN, microbatches=1, options=run_options(again))
    assert made.neighbours.transformed(every) == [every]


def test_an_optimizer_step_of_several_batches_is_shared_by_them() -> None:
    once, shared = (
        Planner(
            CostModel(model(), cluster(1)), [batch(4)], balance=PLAIN, microbatches=1, options=RunOptions(accumulated=n)
        )
        for n in (1, 4)
    )
    candidate = Candidate(dict.fromkeys(("vision", "llm"), ModuleLayout((0,))), 1)
    adam = once.evaluator.step(once.evaluator.place(candidate)).after.rest
    assert adam > 0
    saved = once.evaluator.seconds(candidate) - shared.evaluator.seconds(candidate)
    assert saved == pytest.approx(0.75 * adam)
    degrees = Degrees(1, 1, 1, 1)
    for name, module_ in once.evaluator.shape.modules.items():
        more = shared.estimates.held(name, degrees) - once.estimates.held(name, degrees)
        assert more == 4 * module_.trained.sum()


def test_a_number_of_microbatches_that_cannot_keep_a_budget_is_no_candidate() -> None:
    """A run takes more in such a step, which is another candidate."""
    layouts, metadata = {name: ModuleLayout((0,)) for name in ("vision", "llm")}, batch(8)
    tight = BalanceConfig(reorder="none", budget={"llm": int(metadata.tokens.max())})
    evaluator = Evaluator(CostModel(model(), cluster(1)), [metadata], balance=tight)
    with pytest.raises(ConfigError, match="with 1 microbatches a step does not keep the budget of every instance"):
        evaluator.seconds(Candidate(layouts, 1))
    assert evaluator.seconds(Candidate(layouts, 8)) > 0
