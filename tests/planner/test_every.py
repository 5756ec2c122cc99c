"""Every layout on few ranks, against loops that estimate one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest

from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.every import Layouts
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees, idle_places, on_nodes, places
from hetero_strategy.planner.variants import Allowed
from tests.planner.models import batch, cluster, model, module

PLAIN = BalanceConfig(reorder="none")


def three() -> ModelShape:
    """Two encoders, one of them frozen."""
    pair, ears = model((3, 256), (4, 512), tp=(1, 2)), module(2, 64, edge_width=512, tp=(1, 2), trains=False)
    modules = {"vision": pair.modules["vision"], "audio": ears, "llm": pair.modules["llm"]}
    return ModelShape(modules, (("vision", "llm"), ("audio", "llm")))


def two_pools() -> Cluster:
    slow, fast = cluster(2), cluster(3, memory=2e8)
    return Cluster((*slow.pools, *fast.pools), slow.across)


def idle(given: Cluster, groups: int) -> Iterator[tuple[Sequence[int], ...]]:
    """Places that leave ranks of one pool idle."""
    return idle_places(given, groups) if len(given.pools) == 1 else iter(())


def key(partition: object, ranks: Any, degrees: Mapping[str, Degrees], microbatches: int) -> tuple[object, ...]:
    plain = {name: d._replace(recomputed=0) for name, d in degrees.items()}
    return partition, tuple(tuple(own) for own in ranks), tuple(sorted(plain.items())), microbatches


@pytest.mark.parametrize(
    ("shape", "given", "options"),
    [
        (model(tp=(1, 2, 4)), cluster(6, 2, memory=1.8e8), Given()),
        (model(frozen=True), cluster(8, 4, bandwidth=1e8), Given(reshard_after_forward="never")),
        pytest.param(model(), cluster(4, memory=1.6e8), Given(reshard_after_forward="always"), marks=pytest.mark.full),
        pytest.param(three(), cluster(5), Given(recompute={"llm": Recompute(2)}), marks=pytest.mark.full),
        pytest.param(
            three(), cluster(4, 2, memory=1.5e8), Given(offload={"vision": Offload()}), marks=pytest.mark.full
        ),
        (three(), two_pools(), Given()),
    ],
    ids=["little memory", "never", "always", "recompute", "offload", "two pools"],
)
def test_all_at_once_are_estimated_as_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, shape: ModelShape, given: Cluster, options: Given
) -> None:
    data = batch(8)
    data = replace(data, items=dict.fromkeys([name for name in shape.modules if name != "llm"], data.items["vision"]))
    proposer = Planner(shape, given, [data], balance=PLAIN, allowed=Allowed(given=options)).proposer
    monkeypatch.setattr("hetero_strategy.planner.every.ALIKE", 1.0)
    monkeypatch.setattr("hetero_strategy.planner.every.OF_ALL", 2**30)
    everywhere = [
        (p, ranks) for p in proposer._partitions for ranks in chain(places(given, len(p)), idle(given, len(p)))
    ]
    layouts = Layouts(shape, proposer._estimates, proposer._degrees, proposer._tried_counts, proposer._again)
    found = {key(e.partition, e.ranks, e.degrees, e.microbatches): e.turn for e in layouts.best(everywhere)}
    proposed = {key(p.partition, p.ranks, p.degrees, p.microbatches) for p in proposer._all()}
    placed: set[tuple[object, ...]] = set()
    expected: dict[tuple[object, ...], float] = {}
    refused = again = 0
    for partition, ranks in everywhere:
        sizes = {n: (len(own), given.on(own)) for group, own in zip(partition, ranks, strict=True) for n in group}
        ways = [proposer._degrees(name, n, on.ranks_per_node) for name, (n, on) in sizes.items()]
        for way in product(*ways):
            chosen = dict(zip(sizes, way, strict=True))
            for count in {*proposer.counts(chosen["llm"].dp), *proposer._few_counts()}:
                made = proposer.propose(partition, ranks, chosen, count)
                refused += not made
                again += any(d.recomputed for one in made for d in one.degrees.values())
                expected |= {key(partition, ranks, p.degrees, p.microbatches): p.seconds for p in made}
                placed |= {key(partition, p.ranks, p.degrees, p.microbatches) for p in made}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-12)
    assert proposed == placed
    for name in ("OF_ALL", "OF_PLACE", "OF_KIND"):
        monkeypatch.setattr(f"hetero_strategy.planner.every.{name}", 1)
    few = proposer.proposals()
    kept = [p for p in few if p.chain is None]
    assert {p.partition for p in kept} == {one[0] for one in expected} and len(kept) < len(expected) / 10
    assert kept[0].seconds == pytest.approx(min(expected.values()), rel=1e-12)
    assert proposer.considered == len(expected) + len(few) - len(kept)
    if given.device.memory < 1e9:
        assert refused and (again or options.offload)


def test_groups_of_most_tensor_parallelism_come_first_where_one_would_cross_a_node() -> None:
    nodes = cluster(8, 4)
    assert on_nodes(nodes, (range(4), range(4, 8)), (1, 4)) == (range(4), range(4, 8))
    assert on_nodes(nodes, (range(3), range(3, 7)), (1, 4)) == (range(4, 7), range(4))
    assert on_nodes(nodes, (range(2), range(2, 6), range(6, 8)), (4, 4, 1)) is None
    assert on_nodes(two_pools(), (range(3), range(3, 5)), (1, 2)) == (range(3), range(3, 5))
    assert on_nodes(two_pools(), (range(1), range(1, 5)), (1, 2)) is None  # of ranks 1 and 2 each is on another node
