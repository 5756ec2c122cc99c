"""Clusters of several kinds of devices: where modules lie, against all placements simulated, and what ranks count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from hetero_strategy.errors import ConfigError, LayoutError, ScheduleError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.areas import all_wheres, limits, settle, together
from hetero_strategy.planner.cluster import Cluster, NodePool
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.planner.hardware import DEVICES, cluster, mixed_cluster
from hetero_strategy.planner.memory import MemoryModel
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import compositions, degrees, partitions
from hetero_strategy.simulator.links import Links
from tests.planner.models import DEVICE, SIMULATIONS, batch, model
from tests.planner.test_hardware import CONF
from tests.planner.test_memory import FP32, OF, TEXT

PLAIN = BalanceConfig(reorder="none")


def mixed(*nodes: tuple[int, int, float], memory: float = 4e9, bandwidth: float = 1e10) -> Cluster:
    """Pools of (nodes, ranks per node, speed), where the memory of a device is as its speed."""
    pools = tuple(
        NodePool(
            replace(DEVICE, name=f"x{speed:g}", flops=speed * DEVICE.flops, memory=speed * memory),
            count,
            ranks,
            Links(1e-5, bandwidth),
        )
        for count, ranks, speed in nodes
    )
    return Cluster(pools, Links(2e-5, bandwidth / 4))


def planner(
    encoder: tuple[int, int], llm: tuple[int, int], on: Cluster, samples: int = 8, simulations: int = 24
) -> Planner:
    return Planner(model(encoder, llm), on, [batch(samples)], balance=PLAIN, simulations=simulations)


def everything(made: Planner) -> list[tuple[float, Candidate]]:
    """Every placement of groups in every order on every set of pools, simulated."""
    on, found = made.evaluator.cluster, []
    pools = [tuple(on.ranks_of([i])) for i in range(len(on.pools))]
    for partition in partitions(list(made.evaluator.shape.modules)):
        for used in ((0, 1), (0,), (1,)):
            ranks = sum((pools[i] for i in used), ())
            for order in permutations(range(len(partition))):
                for sizes in compositions(len(ranks), len(partition)):
                    ends = np.cumsum([0, *sizes])
                    given = [ranks[ends[order.index(g)] : ends[order.index(g) + 1]] for g in range(len(partition))]
                    found += [(simulated(made, c), c) for c in ways(made, partition, given)]
    return [(seconds, c) for seconds, c in found if seconds < np.inf]


def ways(made: Planner, partition: tuple[tuple[str, ...], ...], given: list[tuple[int, ...]]) -> list[Candidate]:
    modules, made_of = made.evaluator.shape.modules, [{}]
    for group, ranks in zip(partition, given, strict=True):
        for name in group:
            all_degrees = degrees(modules[name], len(ranks), made.evaluator.cluster.on(ranks).ranks_per_node, 8)
            made_of = [{**chosen, name: d} for chosen in made_of for d in all_degrees]
    on = {name: ranks for group, ranks in zip(partition, given, strict=True) for name in group}
    placed = [{name: d.layout(on[name]) for name, d in chosen.items()} for chosen in made_of]
    return [Candidate(layouts, n) for layouts in placed for n in (1, 2, 4, 8)]


def simulated(made: Planner, candidate: Candidate) -> float:
    try:
        return made.evaluator.seconds(candidate)
    except (LayoutError, ScheduleError):
        return np.inf


@pytest.mark.parametrize(
    ("encoder", "llm", "on"),
    [
        ((4, 256), (4, 512), mixed((1, 1, 1.0), (1, 1, 0.25))),
        pytest.param((3, 512), (4, 512), mixed((1, 2, 1.0), (1, 1, 0.5)), marks=pytest.mark.full),
        pytest.param((3, 384), (4, 512), mixed((1, 1, 0.3), (1, 2, 1.0)), marks=pytest.mark.full),
        pytest.param((2, 128), (6, 512), mixed((1, 2, 1.0), (1, 2, 0.1)), marks=pytest.mark.full),
    ],
)
def test_no_placement_is_faster(encoder: tuple[int, int], llm: tuple[int, int], on: Cluster) -> None:
    made = planner(encoder, llm, on)
    best = min(seconds for seconds, _ in everything(made))
    assert made.plan().best.seconds <= 1.01 * best


@pytest.mark.parametrize("weak_first", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_encoder_takes_the_weak_pool_and_all_else_is_slower(weak_first: bool) -> None:
    """The language model would be as slow as the weak devices where it had one of them."""
    nodes = [(1, 2, 1.0), (1, 2, 0.5)]
    on = mixed(*(nodes[::-1] if weak_first else nodes))
    made = planner((4, 256), (8, 512), on, 16, SIMULATIONS)
    best = made.plan().best
    weak = 0 if weak_first else 1
    assert on.pools_of(best.candidate.layouts["vision"].ranks) == (weak,)
    assert on.pools_of(best.candidate.layouts["llm"].ranks) == (1 - weak,)
    strong = on.ranks_of([1 - weak])
    together = dict.fromkeys(("vision", "llm"), ModuleLayout(tuple(strong)))
    spread = dict.fromkeys(("vision", "llm"), ModuleLayout(tuple(range(4))))
    swapped = {"vision": ModuleLayout(tuple(strong)), "llm": ModuleLayout(tuple(on.ranks_of([weak])))}
    for layouts in (together, spread, swapped):
        assert min(simulated(made, Candidate(layouts, n)) for n in (1, 2, 4, 8)) > best.seconds


@pytest.mark.full
def test_a_pool_that_only_holds_others_up_is_left_idle() -> None:
    on = mixed((1, 2, 1.0), (1, 1, 0.01))
    best = planner((2, 256), (6, 512), on).plan().best
    assert {on.pools_of(layout.ranks) for layout in best.candidate.layouts.values()} == {(0,)}


@pytest.mark.full
def test_on_many_ranks_borders_are_those_of_pools_where_that_is_best() -> None:
    """Devices of half the speed would be left idle: one layout on the strong ones, gathered once, is faster then."""
    on = mixed((3, 8, 1.0), (2, 4, 0.7))
    made = planner((4, 256), (16, 512), on, 288, 4)
    answer = made.plan()
    assert on.pools_of(answer.best.candidate.layouts["vision"].ranks) == (1,)
    assert on.pools_of(answer.best.candidate.layouts["llm"].ranks) == (0,)
    strong = planner((4, 256), (16, 512), mixed((3, 8, 1.0)), 288, 4).plan()
    assert answer.best.seconds < strong.best.seconds
    where = {on.pools_of(r) for p in made.proposer.proposals() for r in p.ranks}
    assert where == {(0,), (1,), (0, 1)}


@pytest.mark.parametrize("few", [16, 0], ids=["tried", "allocated"])
def test_tensor_parallelism_crosses_no_node_of_any_pool(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr("hetero_strategy.planner.propose.FEW", few)
    monkeypatch.setattr("hetero_strategy.planner.search.FEW", few)
    made = planner((4, 256), (4, 512), mixed((1, 3, 0.5), (2, 4, 1.0)), simulations=4)
    node = np.repeat([0, 1, 2], [3, 4, 4])
    candidates = [*(p.candidate for p in made.proposer.proposals()), *(r.candidate for r in made.plan().ranked)]
    layouts = [layout for candidate in candidates for layout in candidate.layouts.values()]
    of = [node[[*layout.ranks]].reshape(-1, layout.tp) for layout in layouts]
    assert all((one == one[:, :1]).all() for one in of)
    assert {layout.tp for layout in layouts} >= {1, 2}
    assert any(layout.tp > 1 and layout.ranks[0] not in (0, 3) for layout in layouts)


@pytest.mark.full
def test_one_more_node_is_of_its_pool_and_never_buys_less_than_nothing() -> None:
    on = mixed((1, 2, 1.0), (1, 1, 0.5))
    made = planner((4, 384), (6, 512), on, simulations=SIMULATIONS)
    best, more = made.plan().best, dict[int, float]()
    for pool, ranks in ((0, 5), (1, 4)):
        bigger = made.with_node(pool, 4)
        assert [p.nodes for p in bigger.evaluator.cluster.pools] == [2 - pool, 1 + pool]
        assert bigger.evaluator.cluster.ranks == ranks
        more[pool] = bigger.plan().best.seconds
    assert more[1] <= 1.01 * best.seconds
    assert more[0] < 0.8 * best.seconds
    assert len(made.with_node(0, 24).plan(seconds=0.0).ranked) == 1


def test_layouts_that_span_pools_count_with_the_slowest() -> None:
    on, layouts = mixed((1, 2, 1.0), (1, 2, 0.5)), {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((1, 2))}
    weak = replace(on, pools=(on.pools[1],) * 2)
    evaluators = [Evaluator(model(), where, [batch(8)], balance=PLAIN) for where in (on, weak)]
    here, slow = (e.place(Candidate(layouts)).times for e in evaluators)
    for stage, times in here.items():
        assert (times == slow[stage]) == (stage.module == "llm")
        assert times.forward.per_row <= slow[stage].forward.per_row


def test_what_is_asked_of_several_pools_is_of_the_slowest() -> None:
    on = mixed_cluster({"h200": {"nodes": 1}, "a40": {"nodes": 2}, "h100": {"nodes": 1}}, "200g")
    assert str(on) == "8 x h200 and 8 x a40 and 8 x h100"
    assert (on.ranks, on.ranks_per_node, on.device.name, on.device.memory) == (24, 4, "a40", 48e9)
    assert on.collective(1e6, 4) == cluster("a40", 1).collective(1e6, 4)
    fast = on.on([0, 23])
    assert (fast.device.flops, fast.device.memory, fast.ranks_per_node) == (989e12, 80e9, 8)
    assert fast.device.memory_bandwidth == DEVICES["h100"].memory_bandwidth
    assert on.pools_of(range(7, 9)) == (0, 1) and on.ranks_of((1, 2)) == range(8, 24)
    assert list(on.network.nodes_of(np.arange(24))) == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 8
    links, both = (on.network.between(np.array([[0], [8]]), np.array([[1 + 7 * i], [9]])) for i in (0, 1)), np.arange(2)
    near, far = (of(both, both)[1] for of in links)
    assert near[0] == 1 / on.pools[0].within.bandwidth < near[1] == 1 / on.pools[1].within.bandwidth
    assert far[0] == 1 / on.across.bandwidth


def test_every_rank_has_the_memory_of_its_own_device() -> None:
    """A language model that fits on the roomy device alone."""
    predicted = MemoryModel(TEXT, OF, FP32)
    made = Planner(TEXT, mixed((1, 1, 1.0), (1, 1, 0.999)), [batch(16)], microbatches=4, precision=FP32)
    alone = Candidate({"llm": ModuleLayout((0,))}, 4)
    need = float(predicted.of(made.evaluator.shown(made.evaluator.place(alone))).peak[0])
    pools = made.evaluator.cluster.pools
    for roomy in (0, 1):
        memories = [1.1 * need if i == roomy else 0.01 * need for i in range(2)]
        sized = [replace(p, device=replace(p.device, memory=m / 0.92)) for p, m in zip(pools, memories, strict=True)]
        on = replace(made.evaluator.cluster, pools=tuple(sized))
        tight = Planner(TEXT, on, [batch(16)], microbatches=4, precision=FP32)
        tight.estimates.kept = 0.4  # its blocks keep less than usual ones
        best = tight.plan(memory=lambda: predicted).best
        assert best.candidate.layouts["llm"].ranks == (roomy,)
        assert best.memory is not None and (best.memory.peak <= tight.estimates.room).all()
        assert tight.estimates.room == pytest.approx(memories)


def test_groups_lie_in_pools_one_after_the_other() -> None:
    assert [len(list(all_wheres(groups, 1))) for groups in (1, 2, 3)] == [1, 1, 1]
    assert [len(list(all_wheres(groups, 2))) for groups in (1, 2, 3)] == [3, 8, 20]
    on = mixed((1, 8, 1.0), (1, 4, 1.0), (1, 4, 1.0))
    first, second, third = (range(i, i + 1) for i in range(3))
    apart, across = (second, first), (range(2), first)
    assert limits(apart, on) == (((1,), 8), ((0,), 4))
    assert limits(across, on) == (((1,), 8), ((0, 1), 12), ((0, 1), 16))
    assert together(apart) == [([1], first), ([0], second)] and together(across) == [([1, 0], range(2))]
    assert settle(apart, (3, 8), on, (1, 1)) == (range(8, 11), range(8))
    assert settle(across, (6, 5), on, (1, 1)) == (range(5, 11), range(5))
    assert settle((third, third), (4, 1), on, (1, 1)) is None
    assert settle((first, first), (3, 4), on, (1, 4)) == (range(4, 7), range(4))


def test_mixed_clusters_are_made_by_name() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        found = instantiate(compose("cluster/a800_a40", overrides=["cluster.pools.a40.nodes=1"]).cluster)
    assert str(found) == "80 x a800 and 4 x a40"
    assert found.across == cluster("a40", 1, network="200g").across
    small: Mapping[str, Any] = {"device": "a40", "nodes": 2, "memory": 24e9}
    named = mixed_cluster({"rtx": small, "a40": {"nodes": 1}}, "200g")
    assert [pool.device.memory for pool in named.pools] == [24e9, 48e9] and str(named) == "8 x a40 and 4 x a40"
    for pools, overrides, message in (
        ({}, {}, "pools={} has no nodes"),
        (
            {"a40": {"nodes": 1, "network": "100g"}},
            {},
            "pools.a40.network: pools have one network; give network",
        ),
        ({"a40": {"nodes": 1}}, {"flops": 1.0}, "flops is of one pool; give pools.<name>.flops"),
        ({"a41": {"nodes": 1}}, {}, "device='a41' is not known"),
    ):
        with pytest.raises(ConfigError) as raised:
            mixed_cluster(pools, "200g", **overrides)
        assert message in str(raised.value)
