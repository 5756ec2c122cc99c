"""One pipeline through all modules: where it is cut, and when it is what the planner chooses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.chain import Chain, propose_chain
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees
from tests.planner.models import batch, cluster, model


def planner(shape: ModelShape, ranks: int, bandwidth: float = 1e10, memory: float = 4e9) -> Planner:
    return Planner(
        shape,
        cluster(ranks, bandwidth=bandwidth, memory=memory),
        [batch(16)],
        balance=BalanceConfig(reorder="none"),
    )


def proposed(made: Planner, shape: ModelShape, degrees: Degrees, microbatches: int) -> tuple[float, Chain]:
    found = propose_chain(made.estimates, shape, degrees, microbatches, math.inf)
    assert found is not None
    return found


def test_a_rank_has_the_end_of_one_module_and_the_beginning_of_the_next() -> None:
    shape = model((1, 256), (5, 512))
    _, pipeline = proposed(planner(shape, 3), shape, Degrees(1, 3, 1, 1), 4)
    assert pipeline.stages == {"vision": (0, (1,)), "llm": (0, (1, 2, 2))}
    layouts = pipeline.layouts(range(3))
    assert (layouts["vision"].ranks, layouts["llm"].ranks) == ((0,), (0, 1, 2))
    assert layouts["llm"].split == (1, 2, 2)


def test_ranks_of_instances_and_of_tensor_parallelism_stay_together() -> None:
    shape = model((3, 512), (5, 512))
    _, pipeline = proposed(planner(shape, 16), shape, Degrees(2, 4, 2, 1), 4)
    layouts = pipeline.layouts(range(16))
    for name, (first, blocks) in pipeline.stages.items():
        assert layouts[name].ranks == tuple(range(4 * first, 4 * (first + len(blocks))))
        assert (layouts[name].tp, layouts[name].dp_replicate, layouts[name].pp) == (2, 2, len(blocks))
    assert sum(sum(blocks) for _, blocks in pipeline.stages.values()) == 8


@pytest.mark.full
@pytest.mark.parametrize(("encoder", "llm", "ranks"), [((1, 256), (5, 512), 3), ((1, 384), (3, 512), 2)])
def test_it_is_chosen_where_links_are_slow(encoder: tuple[int, int], llm: tuple[int, int], ranks: int) -> None:
    made = planner(model(encoder, llm), ranks, bandwidth=4e7)
    best = made.plan().best
    vision, language = (best.candidate.layouts[name] for name in ("vision", "llm"))
    assert set(vision.ranks) < set(language.ranks), "the encoder shares the first rank of the pipeline"
    others = [p.candidate for p in made.proposer.proposals() if p.chain is None]
    assert best.seconds < min(map(made.evaluator.seconds, others))


def test_estimates_are_near_what_simulation_says() -> None:
    made = planner(model((3, 512), (9, 512)), 4, bandwidth=1e8)
    pairs = [(p.seconds, made.evaluator.seconds(p.candidate)) for p in made.proposer.proposals() if p.chain]
    ratio = np.divide(*np.transpose(pairs))
    assert len(ratio) > 3
    assert np.abs(ratio - 1).max() < 0.25


def test_what_does_not_fit_is_recomputed_or_left_out() -> None:
    shape = model((1, 256), (5, 512))
    plain = proposed(planner(shape, 3), shape, Degrees(1, 3, 1, 1), 2)
    again = proposed(planner(shape, 3, memory=1.7e8), shape, Degrees(1, 3, 1, 1), 2)
    assert not plain[1].degrees.recomputed
    assert again[1].degrees.recomputed
    assert again[0] > plain[0]
    tiny = planner(shape, 3, memory=1e7)
    assert propose_chain(tiny.estimates, shape, Degrees(1, 3, 1, 1), 2, math.inf) is None
