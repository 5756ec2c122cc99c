"""Links and optimizers, measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hetero_strategy.layout.registry import fake_world
from hetero_strategy.profiling.device import (
    SIZES,
    Communication,
    LinkTime,
    communication,
    fit_communication,
    fit_links,
    link_times,
    sharding,
    with_optimizer,
)
from hetero_strategy.simulator.cluster import NO_SHARDING, Cluster, Links
from hetero_strategy.testing import Pool
from hetero_strategy.testing.plans import DEVICE


def measured(rank: int, world: int) -> list[list[LinkTime]]:
    return [link_times(torch.device("cpu")) for _ in range(3)]


@pytest.mark.full
def test_ranks_measure_all_collectives_and_agree(pool: Pool) -> None:
    ours, theirs = pool.run(2, measured)
    assert ours == theirs
    first = ours[0]
    assert len(first) == 4 * len(SIZES)
    assert all(time.seconds > 0 for time in first)
    assert all(0 < time.processor < 10 * time.seconds for time in first)
    found = fit_communication(first)
    for links in (found.links, *found.collectives.values(), *found.processor.values()):
        assert 0 <= links.latency < 10 and links.bandwidth > 1e5
    for kind in found.collectives:
        fits = (fit_links([time for time in times if time.kind == kind]) for times in ours)
        assert min(np.median(errors) for _, errors in fits) < 1  # links that take no time are wrong by 1


def test_links_are_found_again_from_what_collectives_take() -> None:
    links, ranks = Links(2e-4, 3e8), 4
    gather = Cluster(DEVICE, 1, ranks, links, links).collective
    times = [
        LinkTime("all-gather", size, gather(size, ranks), 2, 0.75 * size) for size in SIZES
    ] + [LinkTime("all-reduce", size, 2 * gather(size, ranks), 4, 1.5 * size) for size in SIZES]  # fmt: skip
    found, errors = fit_links(times)
    assert found.latency == pytest.approx(links.latency)
    assert found.bandwidth == pytest.approx(links.bandwidth)
    assert errors.max() < 1e-9


def test_every_kind_of_collective_has_links_of_its_own() -> None:
    """And processors work for it as long as they were measured to, beside which messages count for nothing."""
    ranks, of = 4, {"all-gather": Links(2e-4, 3e8), "reduce-scatter": Links(4e-4, 1e8), "all-reduce": Links(1e-4, 2e8)}
    times = [LinkTime("message", size, 1e-3 + size / 1e9, 1, size) for size in SIZES]
    for kind, links in of.items():
        both = 2 if kind == "all-reduce" else 1
        for size in SIZES:
            seconds = both * (2 * links.latency + 0.75 * size / links.bandwidth)
            times.append(LinkTime(kind, size, seconds, 2 * both, 0.75 * size * both, seconds / 4))
    found = fit_communication(times)
    cluster = found.on(Cluster(DEVICE, 1, ranks, Links(1.0, 1.0), Links(1.0, 1.0)))
    assert (cluster.within.latency, cluster.within.bandwidth) == pytest.approx((1e-3, 1e9))
    for kind, links in of.items():
        expected = 2 * links.latency + 0.75e6 / links.bandwidth
        assert cluster.collective(1e6, ranks, kind=kind) == pytest.approx(expected)
        assert cluster.worked_for().collective(1e6, ranks, kind=kind) == pytest.approx(expected / 4)
        assert cluster.linked(Links()).collective(1e6, ranks, kind=kind) == 0.0


def test_processors_work_for_shards() -> None:
    with fake_world(0, 2):
        found = sharding(init_device_mesh("cpu", (2,)))
    assert 0 < found.gather.per_block < 1
    assert 0 < found.gather.per_byte < 1e-6
    assert found.gather.seconds(2, 100.0) == 2 * found.gather.per_block + 100.0 * found.gather.per_byte
    assert 0 <= found.scatter.per_byte < 1e-6


def together(rank: int, world: int) -> Communication:
    return communication(torch.device("cpu"))


@pytest.mark.full
def test_what_ranks_measure_together_is_the_cluster_that_is_planned_for(pool: Pool) -> None:
    """Their links, what shards take, and what each works for them."""
    unknown = Cluster(DEVICE, 1, 2, Links(1.0, 1.0), Links(1.0, 1.0))
    assert unknown.device.sharding == NO_SHARDING
    for found in pool.run(2, together):
        cluster = found.on(unknown)
        passes, works = cluster.device.sharding.gather, found.working.gather
        assert 0 <= passes.per_block < 1 and 0 <= passes.per_byte < 1e-6  # less the collectives, which others slow down
        assert 0 < works.per_block < 1 and 0 < works.per_byte < 1e-6
        assert cluster.device == replace(DEVICE, sharding=found.sharding)
        assert cluster.worked_for().device == replace(DEVICE, sharding=found.working) != cluster.device
        links = found.collectives["all-gather"]
        assert cluster.collective(2**20, 2) == pytest.approx(links.latency + 2**19 / links.bandwidth)


def test_an_optimizer_reaches_some_bandwidth() -> None:
    assert 1e8 < with_optimizer(DEVICE, torch.device("cpu")).memory_bandwidth < 1e13
