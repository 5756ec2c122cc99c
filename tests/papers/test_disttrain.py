"""DistTrain's order of microbatches and its allocation of GPUs; Cornstarch's numbers of stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.papers.cornstarch import loosely_coupled
from hetero_strategy.papers.disttrain import Intervals, Unit, allocate_resources, interval_order
from hetero_strategy.plan.reorder import best_order
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.graph import StageCost
from hetero_strategy.simulator.reordering import Reorderer
from hetero_strategy.simulator.result import Simulation
from tests.plan.test_reorder import drawn, replayed, simulated
from tests.simulator.test_reordering import APART, TOGETHER, never_worse_than_planned, taken
from tests.simulator.test_reordering import drawn as drawn_sizes


def interval(found: Simulation, number: int) -> float:
    """Between two backwards of the first rank (or its first forward and backward), until the next may start."""
    first, second = StageId("llm", 0), StageId("llm", 1)
    since = Action("B", first, number - 1) if number else Action("F", first, 0)
    return max(0.0, (found.end[Action("B", second, number)] - found.end[since]).item())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_intervals_are_those_of_the_simulator(ranks: int, count: int, seed: int) -> None:
    """Whatever follows what is placed: the recurrence says what the first ranks wait for."""
    forward, backward = drawn(seed, ranks, count)
    order = np.random.default_rng(seed).permutation(count).tolist()
    full = simulated(forward, backward, order)
    placed = Intervals(forward, backward)
    for size in range(1, count + 1):
        placed.append(order[size - 1])
        if size == 1:
            alone = simulated(forward, backward, order[:1])
            assert placed.interval() == pytest.approx(interval(alone, 0), rel=1e-12)
        elif size >= ranks:
            assert placed.interval() == pytest.approx(interval(full, size - ranks + 1), rel=1e-12, abs=1e-12)


def plainly(forward: np.ndarray, backward: np.ndarray) -> list[int]:
    """Algorithm 3 line by line; GETINTERVAL asks the simulator, everything else searches lists."""
    p, count = forward.shape
    size = {m: float((forward[:, m] + backward[:, m]).sum()) for m in range(count)}
    mb = list(range(count))
    ret_mb = [min(mb, key=size.__getitem__)]
    mb.remove(ret_mb[0])
    rear_mb = sorted(mb, key=size.__getitem__)[: p - 1]
    for m in rear_mb:
        mb.remove(m)
    for i in range(1, count - p + 1):
        if not mb:
            break
        if i == 1:
            cur_mb: list[int] = []
            left = interval(simulated(forward, backward, ret_mb), 0)
            wanted = min(p - 1, len(mb))
            while len(cur_mb) < wanted:
                share = left / (wanted - len(cur_mb))
                near = min((m for m in mb if m not in cur_mb), key=lambda m: abs(forward[0, m] - share))
                cur_mb.append(near)
                left -= forward[0, near]
        else:
            known = simulated(forward, backward, [*ret_mb, *mb, *rear_mb])  # any rest of the order
            volume = interval(known, len(ret_mb) - p + 1)
            cur_mb = [min(mb, key=lambda m: abs(forward[0, m] - volume))]
        ret_mb += cur_mb
        for m in cur_mb:
            mb.remove(m)
    return ret_mb + rear_mb


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 14), st.integers(0, 2**32 - 1))
def test_interval_order_is_algorithm_3(ranks: int, count: int, seed: int) -> None:
    forward, backward = drawn(seed, ranks, count)
    assert interval_order(forward, backward).tolist() == plainly(forward, backward)


def test_small_microbatches_are_first_and_last() -> None:
    forward = np.tile([5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 5.4, 6.0], (3, 1))
    order = interval_order(forward, 2 * forward)
    assert order[0] == 1 and order[-2:].tolist() == [3, 5]
    # The first interval is 2 x (1 + 2) = 6: two forwards, the one nearest to 3, then that to the 1 left.
    assert order[1:3].tolist() == [0, 6]


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_interval_order_is_a_permutation(ranks: int, count: int, seed: int) -> None:
    forward, backward = drawn(seed, ranks, count)
    forward[:, : count // 2] = 0.0  # skipped, and equal
    order = interval_order(forward, backward)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(count))


def test_the_search_is_no_worse() -> None:
    forward, backward = drawn(3, 4, 16, spread=1.0)
    times = replayed(forward, backward)
    searched = best_order(times, forward, backward)
    assert times(searched[None])[0] <= times(interval_order(forward, backward)[None])[0]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_never_worse_than_planned(name: str, data: st.DataObject) -> None:
    never_worse_than_planned(name, data, search="interval")


@pytest.mark.parametrize(("name", "stages"), [("1f1b", APART), ("zb_h1", APART), ("1f1b", TOGETHER)])
@pytest.mark.parametrize("skipped", [0.0, 0.3])
def test_the_search_gains_more(name: str, stages: Any, skipped: float) -> None:
    """On the average of some steps."""
    ratios: dict[str, list[float]] = {"search": [], "interval": []}
    costs = dict.fromkeys(stages.stages, StageCost(1.0, 0.0))
    for seed in range(4):
        sizes = drawn_sizes(stages, 16, seed, skipped)
        planned = taken(name, stages, costs, sizes, np.arange(16))
        for search, of_search in ratios.items():
            order = Reorderer(stages, name, costs, search=search)(sizes)
            of_search.append(taken(name, stages, costs, sizes, order) / planned)
    assert np.mean(ratios["search"]) < np.mean(ratios["interval"]) <= 1


GPUS, SAMPLES = 64, 96
UNITS = {
    "vision": [Unit(1, 0.9, 2e9, 4e9, 1e9), Unit(2, 0.5, 2e9, 4e9, 1e9)],
    "llm": [Unit(1, 4.0, 3e10, 6e10, 8e9), Unit(4, 1.2, 3e10, 6e10, 8e9)],
}


def seconds(units: dict[str, Unit], dp: int, x: float, y: float, memory: float) -> float:
    """Equations 1 and 2, infinite where memory is short."""
    vision, llm = units["vision"], units["llm"]
    holds = vision.weights / vision.tp + (vision.states + dp * vision.activations) / x
    if max(holds, (dp * llm.weights + llm.states) / y + llm.activations / llm.tp) > memory:
        return np.inf
    own, other = dp * llm.tp / y * llm.seconds, dp * vision.tp / x * vision.seconds
    return llm.seconds + other + max(own, other) * (SAMPLES / dp - 1)


@pytest.mark.parametrize("memory", [8e10, 1.2e10])
def test_a_grid_finds_no_shorter_step(memory: float) -> None:
    found = allocate_resources(UNITS, "llm", (2, 4, 8), SAMPLES, GPUS, memory)
    assert found is not None and sum(found.gpus.values()) <= GPUS * (1 + 1e-6)
    best = np.inf
    for vision in UNITS["vision"]:
        for llm in UNITS["llm"]:
            for dp in (2, 4, 8):
                grid = (x for x in np.linspace(vision.tp, GPUS - dp * llm.tp, 4000))
                best = min(best, *(seconds({"vision": vision, "llm": llm}, dp, x, GPUS - x, memory) for x in grid))
    assert found.seconds == pytest.approx(best, rel=2e-3)
    chosen = {name: next(unit for unit in units if unit.tp == found.tp[name]) for name, units in UNITS.items()}
    gpus = found.gpus["vision"] * (1 + 1e-9), found.gpus["llm"] * (1 + 1e-9)
    assert seconds(chosen, found.dp, *gpus, memory) == pytest.approx(found.seconds, rel=1e-4)


def test_what_does_not_fit_is_not_allocated() -> None:
    assert allocate_resources(UNITS, "llm", (2, 4), SAMPLES, GPUS, 1e9) is None
    assert allocate_resources(UNITS, "llm", (8,), SAMPLES, 8, 8e10) is None


def test_encoders_have_the_fewest_stages_that_keep_up() -> None:
    encoders = {"vision": {1: 6.0, 2: 3.0, 3: 2.0}, "audio": {1: 1.0}}
    assert list(loosely_coupled({1: 8.0, 2: 4.0, 4: 1.5}, encoders)) == [
        (1, {"vision": 1, "audio": 1}),
        (2, {"vision": 2, "audio": 1}),
        (4, {"vision": 3, "audio": 1}),
    ]
