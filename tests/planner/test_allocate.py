"""The allocator's layouts against loops that estimate and compare every one, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.allocate import LAYERS, SLACK, RankAllocator
from hetero_strategy.planner.candidate import RunOptions
from hetero_strategy.planner.propose import Proposer
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import Degrees, Partition, on_nodes
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.cluster import Cluster
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.testing.plans import batch, cluster, model, module
from tests.planner.helpers import run_options

PLAIN = BalanceConfig(reorder="none")


def three() -> ModelSpec:
    """Two encoders, one of them frozen."""
    pair, ears = model((3, 256), (4, 512), tp=(1, 2)), module(2, 64, edge_width=512, tp=(1, 2), trains=False)
    modules = {"vision": pair.modules["vision"], "audio": ears, "llm": pair.modules["llm"]}
    return ModelSpec(modules, (("vision", "llm"), ("audio", "llm")))


def proposer(shape: ModelSpec, on: Cluster, options: RunOptions = RunOptions(), samples: int = 8) -> Proposer:  # noqa: B008
    data = batch(samples)
    data = replace(data, items=dict.fromkeys([name for name in shape.modules if name != "llm"], data.items["vision"]))
    return Planner(CostModel(shape, on), [data], balance=PLAIN, options=options).proposer


def allocator(made: Proposer) -> RankAllocator:
    return RankAllocator(made._shape, made._estimates, made._ways, made._tried_counts, made._thorough, made._every)


def fit(made: Proposer, group: Mapping[str, Degrees], count: int, alone: bool) -> tuple[float, float] | None:
    """Seconds of a group after its first microbatch and through it, with what runs again for which the latter takes
    least; None: it does not fit into memory.
    """
    e, modules, best = made._estimates, made._shape.modules, None
    pp = {name: way.pp for name, way in group.items()}
    held = {name: e.ahead_of(name, pp, count, not e.feeds(name) <= group.keys()) for name in group}
    choices = [[*e.options.choices(modules[name]).values()] for name in group]
    for chosen in product(*(of if made._thorough or len(of) == 1 else [of[0], of[-1]] for of in choices)):
        ways = {name: way._replace(transforms=of) for (name, way), of in zip(group.items(), chosen, strict=True)}
        allowed = all(e.options.allows(name, way.tp, way.transforms) for name, way in ways.items())
        if not allowed or sum(e.bytes(name, way, count, held[name]) for name, way in ways.items()) > e.memory:
            continue
        later = {name: float(e.later(name, way, count)) for name, way in ways.items()}
        through = sum(float(e.through(name, way, count)) for name, way in ways.items())
        filled, llm = 0.0, ways.get("llm")
        if llm is not None and llm.pp > 1 and not (alone and len({*group.values()}) == 1):
            room = llm.tp * llm.cp * llm.dp
            bubbles = float(e.through("llm", llm, count)) * (1 - 1 / llm.pp)
            filled = min(bubbles, sum(later[name] for name, way in ways.items() if name != "llm" and way.tp <= room))
        if best is None or through < best[1]:
            best = sum(later.values()) - filled, through
    return best


def every_layout(made: Proposer) -> Iterator[tuple[Partition, tuple[int, ...], dict[str, Degrees], int, float]]:
    """All layouts that fit, with their seconds."""
    ranks, asked = made._ranks, made._estimates.options.reshard_after_forward
    of = {name: made._ways(name, None) for name in made._shape.modules}
    for partition in made._partitions:
        names = [name for group in partition for name in group]
        for ways in product(*(of[name] for name in names)):
            chosen = dict(zip(names, ways, strict=True))
            sizes = [{chosen[name].ranks for name in group} for group in partition]
            if any(len(size) > 1 for size in sizes) or sum(min(size) for size in sizes) > ranks:
                continue
            widths = tuple(min(size) for size in sizes)
            tp = [int(np.lcm.reduce([chosen[name].neighbours for name in group])) for group in partition]
            if on_nodes(made._cluster.ranks_per_node, widths, tp) is None:
                continue
            once = all(way.once for way in ways)
            passes = {"never": [True], "always": [False]}.get(asked, [False] if once else [False, True])
            for count, whole in product(sorted(made._tried_counts(chosen["llm"].dp)), passes):
                own = {name: way._replace(whole=whole) for name, way in chosen.items()}
                alone = len(partition) == 1
                found = [fit(made, {n: own[n] for n in group}, count, alone) for group in partition]
                if all(one is not None for one in found):
                    times: Any = found
                    pace = sum(later**SLACK for later, _ in times) ** (1 / SLACK)
                    seconds = pace + sum(through for _, through in times)
                    yield partition, widths, own, count, seconds


def key(partition: object, sizes: Any, degrees: Mapping[str, Degrees], count: int) -> tuple[object, ...]:
    return partition, tuple(sizes), tuple(sorted((n, d._replace(transforms=())) for n, d in degrees.items())), count


def compare(made: Proposer) -> int:
    """Compare the fastest layouts of every partition, and that all that are found take what loops say."""
    expected = {key(*one[:4]): one for one in every_layout(made)}
    found = allocator(made).best(made._partitions)
    for one in found:
        seconds = expected[key(one.partition, one.sizes, one.degrees, one.microbatches)][4]
        assert one.seconds == pytest.approx(seconds, rel=1e-12)
    for partition in made._partitions:
        least = sorted(one[4] for one in expected.values() if one[0] == partition)[:LAYERS]
        mine = sorted(one.seconds for one in found if one.partition == partition)[:LAYERS]
        assert mine == pytest.approx(least, rel=1e-12)
    return len(expected)


@pytest.mark.parametrize(
    ("shape", "on", "options"),
    [
        (model((2, 256), (3, 512), tp=(1, 2)), cluster(4, 2, memory=1.0e8), RunOptions()),
        (
            model((2, 256), (3, 512), frozen=True, tp=(1, 2)),
            cluster(4, 4, bandwidth=1e8),
            RunOptions(schedule=ScheduleConfig(reshard_after_forward="never")),
        ),
        (
            model((2, 256), (3, 512), tp=(1,)),
            cluster(4, memory=1.6e8),
            RunOptions(schedule=ScheduleConfig(reshard_after_forward="always")),
        ),
        pytest.param(three(), cluster(3), run_options({"llm": Recompute(2)}), marks=pytest.mark.full),
        pytest.param(three(), cluster(3, memory=1.5e8), run_options({"vision": Offload()}), marks=pytest.mark.full),
    ],
    ids=["little memory", "never", "always", "recompute", "offload"],
)
def test_the_fastest_layouts_are_those_of_loops_over_all(shape: ModelSpec, on: Cluster, options: RunOptions) -> None:
    assert compare(proposer(shape, on, options, 4)) > 20


@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(64, 512), st.integers(64, 512),
    st.sampled_from([5e7, 1e8, 4e9]), st.floats(7.5, 11.0), st.sampled_from([2, 3, 5]),
)  # fmt: skip
def test_the_fastest_layouts_of_drawn_problems_are_those_of_loops_over_all(
    ranks: int, encoder: int, llm: int, wide: int, wider: int, memory: float, bandwidth: float, samples: int
) -> None:
    per_node = 2 if ranks % 2 == 0 else ranks
    on = cluster(ranks, per_node, memory=memory, bandwidth=10**bandwidth)
    compare(proposer(model((encoder, wide), (llm, wider), tp=(1, 2)), on, samples=samples))


@pytest.mark.parametrize("seed", range(3))
def test_on_many_ranks_nothing_is_slower_than_layouts_drawn_at_random(seed: int) -> None:
    """Which have any numbers of ranks, also those that the allocator does not look at."""
    made, rng = proposer(model((4, 512), (16, 1024)), cluster(96, 8), samples=96), np.random.default_rng(seed)
    found = allocator(made).best(made._partitions)
    best, fits = min(one.seconds for one in found), 0
    assert min(one.seconds for one in found if len(one.partition) == 1) >= best
    for _ in range(300):
        count = int(rng.choice([4, 8, 12, 24, 48]))
        tp, pp, dp = (int(rng.choice(n)) for n in ([1, 2, 4], [1, 2, 4, 8, 16], [2, 3, 4, 6, 8, 12, 16, 24]))
        llm, other = Degrees(tp, pp, 1, dp), int(rng.choice([1, 2, 4]))
        if count not in made._tried_counts(dp) or (left := 96 - llm.ranks) < other:
            continue
        vision = Degrees(other, 1, 1, int(rng.integers(1, left // other + 1)))
        groups = [fit(made, {"vision": vision}, count, False), fit(made, {"llm": llm}, count, False)]
        if all(one is not None for one in groups):
            times: Any = groups
            fits += 1
            assert best <= 1.02 * (max(later for later, _ in times) + sum(through for _, through in times))
    assert fits > 20


def test_groups_of_most_tensor_parallelism_come_first_where_one_would_cross_a_node() -> None:
    assert on_nodes(4, (4, 4), (1, 4)) == (range(4), range(4, 8))
    assert on_nodes(4, (3, 4), (1, 4)) == (range(4, 7), range(4))
    assert on_nodes(4, (2, 4, 2), (4, 4, 1)) is None
