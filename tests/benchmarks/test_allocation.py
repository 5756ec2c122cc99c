"""Stage counts against every possible allocation, and what a step of them takes."""

from __future__ import annotations

import itertools
from graphlib import CycleError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.allocation import (
    allocate,
    allocate_best,
    as_if_trained,
    estimate,
    one_stage_per_rank,
    simulated,
    staged,
    topological,
)
from hetero_strategy.errors import LayoutError
from hetero_strategy.planner.layers import LayerCost, Passes, costs
from hetero_strategy.planner.partition import split
from hetero_strategy.schedule.action import StageId

STAR = (("vision", "llm"), ("audio", "llm"))


def chain(forward: list[float], trains: bool = True, upstream: bool = True) -> Passes:
    return costs([LayerCost(f, trains) for f in forward], upstream)


def frozen_model() -> dict[str, Passes]:
    """A frozen encoder and LLM of equal forward, a projector's work on the encoder's last layer."""
    return {
        "vision": costs([LayerCost(1.0, False)] * 7 + [LayerCost(1.0, True, weight=0.1)], False),
        "llm": costs([LayerCost(1.0, False, True)] * 8, True),
    }


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 4), (4, 9), (6, 3)])
def test_equal_stages_take_the_closed_form(stages: int, microbatches: int) -> None:
    model = {"llm": chain([1.0] * stages)}
    took = simulated(model, (), microbatches)
    assert took == estimate(model, (), microbatches) == 3.0 * (stages - 1 + microbatches)


def test_encoders_run_beside_each_other() -> None:
    """Two encoders before one LLM take no longer than the deeper of them alone."""
    deep, shallow, llm = chain([1.0] * 3), chain([1.0]), chain([1.0] * 2)
    both = {"vision": deep, "audio": shallow, "llm": llm}
    for seconds in (estimate, simulated):
        alone = seconds({"vision": deep, "llm": llm}, STAR[:1], 6)
        assert seconds(both, STAR, 6) == alone
        in_a_row = seconds({"audio": shallow, "vision": deep, "llm": llm}, (("audio", "vision"), STAR[0]), 6)
        assert in_a_row > alone


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), st.integers(1, 8))
def test_a_step_is_never_faster_than_its_bounds(stages: list[tuple[int, int]], microbatches: int) -> None:
    forward, backward = np.array(stages, dtype=np.float64).T
    model = {"llm": Passes(forward, np.zeros_like(backward), backward)}
    took, whole = simulated(model, (), microbatches), float(model["llm"].total.sum())
    assert took >= max(model["llm"].total) * microbatches
    assert whole <= took <= whole + (microbatches - 1) * (forward.max() + backward.max())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 8))
def test_the_closed_form_is_a_bound_where_backwards_are_in_proportion(
    stages: list[int], ratio: int, microbatches: int
) -> None:
    forward = np.array(stages, dtype=np.float64)
    model = {"llm": Passes(forward, np.zeros_like(forward), ratio * forward)}
    assert simulated(model, (), microbatches) <= estimate(model, (), microbatches) * (1 + 1e-9)


def test_stage_graph_of_a_frozen_encoder() -> None:
    model = {"llm": staged(frozen_model()["llm"], (4, 4)), "vision": staged(frozen_model()["vision"], (4, 4))}
    graph = one_stage_per_rank(model, STAR[:1])
    assert {str(n): (s.trains, s.backward) for n, s in graph.stages.items()} == {
        "vision.0": (False, False),
        "vision.1": (True, True),
        "llm.0": (False, True),
        "llm.1": (False, True),
    }
    assert set(graph.edges) == {
        (StageId("vision", 0), StageId("vision", 1)),
        (StageId("llm", 0), StageId("llm", 1)),
        (StageId("vision", 1), StageId("llm", 0)),
    }
    ranks = [r for s in graph.stages.values() for r in s.ranks]
    assert sorted(ranks) == [0, 1, 2, 3]


def test_edges_that_cannot_be() -> None:
    model = {"a": chain([1.0]), "b": chain([1.0])}
    assert topological(model, (("b", "a"),)) == ["b", "a"]
    with pytest.raises(ValueError, match="edges name c; the modules are a, b"):
        topological(model, (("a", "c"),))
    with pytest.raises(CycleError):
        topological(model, (("a", "b"), ("b", "a")))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 9).map(float), min_size=2, max_size=5),
    st.lists(st.integers(1, 9).map(float), min_size=2, max_size=5),
    st.integers(1, 10),
    st.one_of(st.none(), st.integers(2, 4)),
)
def test_allocation_is_the_best_of_all(
    vision: list[float], llm: list[float], microbatches: int, total: int | None
) -> None:
    model = {"vision": chain(vision, trains=False, upstream=False), "llm": chain(llm)}
    made = allocate(model, STAR[:1], microbatches, total=total)
    assert total is None or sum(made.stages.values()) == total
    least = np.inf
    for first, second in itertools.product(every_split(len(vision)), every_split(len(llm))):
        size = len(first) + len(second)
        if total is None or size == total:
            stages = {"vision": staged(model["vision"], first), "llm": staged(model["llm"], second)}
            least = min(least, size * estimate(stages, STAR[:1], microbatches))
    assert made.seconds * sum(made.stages.values()) == pytest.approx(least, rel=1e-6)


def every_split(layers: int) -> list[list[int]]:
    """Any number of stages; small on purpose."""
    cuts = itertools.product((False, True), repeat=layers - 1)
    return [np.diff([0, *np.flatnonzero(c) + 1, layers]).tolist() for c in cuts]


def test_a_frozen_encoder_gets_fewer_stages() -> None:
    """The encoder has forwards alone, the LLM three times as much work: 8 against 24."""
    model = frozen_model()
    assert allocate(model, STAR[:1], 24, total=4).stages == {"vision": 1, "llm": 3}
    believed = {name: as_if_trained(p) for name, p in model.items()}
    unaware = allocate(believed, STAR[:1], 24, total=4)
    assert unaware.stages == {"vision": 2, "llm": 2}  # negative control: the gain below is not by chance
    really = {name: staged(model[name], counts) for name, counts in unaware.splits.items()}
    best = allocate_best(model, STAR[:1], 24, total=4)
    assert best.stages == {"vision": 1, "llm": 3}
    assert simulated(really, STAR[:1], 24) / best.seconds > 1.2


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 8))
def test_best_is_never_worse_than_either(seed: int, total: int, microbatches: int) -> None:
    rng = np.random.default_rng(seed)
    model = {
        "vision": costs([LayerCost(float(f), False) for f in rng.uniform(0.5, 3, 6)], False),
        "audio": costs([LayerCost(float(f), bool(rng.integers(2))) for f in rng.uniform(0.5, 3, 4)], False),
        "llm": costs([LayerCost(float(f), False) for f in rng.uniform(0.5, 3, 8)], True),
    }
    total = max(3, total)
    best = allocate_best(model, STAR, microbatches, total=total)
    for believed in (model, {name: as_if_trained(p) for name, p in model.items()}):
        splits = allocate(believed, STAR, microbatches, total=total).splits
        took = simulated({n: staged(model[n], c) for n, c in splits.items()}, STAR, microbatches)
        assert best.seconds <= took * (1 + 1e-12)  # the same step may be added up in another order


def test_simulated_allocation() -> None:
    """The same enumeration can be judged by the schedule itself."""
    model = frozen_model()
    ranges = {"vision": (1, 2), "llm": (1, 2, 3)}
    made = allocate(model, STAR[:1], 8, ranges=ranges, total=4, seconds=simulated)
    stages = {name: staged(model[name], counts) for name, counts in made.splits.items()}
    assert made.seconds == simulated(stages, STAR[:1], 8)


def test_ranges_and_totals_that_do_not_fit() -> None:
    model = {"vision": chain([1.0] * 2), "llm": chain([1.0] * 3)}
    assert allocate(model, STAR[:1], 8, ranges={"vision": [2], "llm": [3, 9]}).stages == {"vision": 2, "llm": 3}
    with pytest.raises(LayoutError, match="no allocation of 6 stages: modules can have vision 1 to 2, llm 1 to 3"):
        allocate(model, STAR[:1], 8, total=6)


def test_stages_are_sums_of_their_layers() -> None:
    passes = costs([LayerCost(2.0, False), LayerCost(2.0, True), LayerCost(1.0, True), LayerCost(5.0, False)], False)
    stages = staged(passes, (2, 1, 1))
    assert (stages.forward.tolist(), stages.input.tolist(), stages.weight.tolist()) == ([4, 1, 5], [0, 1, 5], [2, 1, 0])
    assert stages.total.tolist() == [6, 3, 10]
    for wrong in ((2, 1), (2, 0, 2), ()):
        with pytest.raises(ValueError, match="no split of 4 layers"):
            staged(passes, wrong)


def test_unaware_planner_believes_in_twice_the_forward() -> None:
    believed = as_if_trained(costs([LayerCost(2.0, False), LayerCost(2.0, True)], False))
    assert believed.backward.tolist() == [4, 4]
    assert believed.total.tolist() == [6, 6]


def test_unaware_split_of_a_frozen_part_is_worse() -> None:
    """Negative control: half of a chain is frozen with nothing trainable before it."""
    passes = costs([LayerCost(1.0, False)] * 12 + [LayerCost(1.0, True)] * 12, False)
    aware, unaware = split(passes.total, 4), split(as_if_trained(passes).total, 4)
    assert unaware == split(passes.forward, 4) == (6, 6, 6, 6)
    slowest = [staged(passes, s).total.max() for s in (aware, unaware)]
    assert slowest == [12.0, 18.0]  # 47 units of work: 12 is the least possible
