"""What the devices and links of a cluster can do. Plain data; the known ones are in ``planner.hardware``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, gcd, log2
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.simulator.links import Links, Network

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce"]


class OwnWork(NamedTuple):
    """What a collective over shards takes besides the collective: hooks of FSDP, and copies into and out of buffers."""

    per_block: float = 0.0
    """Seconds."""
    per_byte: float = 0.0
    """Seconds per byte of the whole, of which every rank has a part."""

    def seconds(self, blocks: float, size: float) -> float:
        """For parameters or gradients of so many blocks, of ``size`` bytes together."""
        return self.per_block * blocks + self.per_byte * size


NO_WORK = OwnWork()


class Sharding(NamedTuple):
    """Of parameters over data-parallel ranks, besides the collectives."""

    gather: OwnWork = NO_WORK
    scatter: OwnWork = NO_WORK


NO_SHARDING = Sharding()
NARROW, DIVIDED = 558.0, 203.0
"""Widths at which matmuls take twice as long per FLOP: of a block's rows, and of the columns that each tensor-parallel
rank has of them. Fitted to two published rows for H100 whose widths are not those of the calibrated one: Megatron-LM's
1.7B (2048, undivided) and torchtitan's 8B with tensor parallelism of 8 (4096 / 8). All other rows of
``benchmarks.published`` are predictions, those for A100 among them."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one processor core.

    Args:
        flops: most dense FLOP/s in numbers of 2 bytes.
        memory: bytes.
        memory_bandwidth: bytes per second.
        matmul: share of ``flops`` that matrix products reach, of a model of the sizes ``calibrated``.
        attention: share of ``flops`` that attention reaches.
        launch: seconds of a block's forward that do not shrink with its rows: kernels begin and end.
        source: where the figures are from.
        sharding: what sharded parameters take besides collectives; measured on processors only.
        flops_fp32: most FLOP/s in wider numbers, without TF32; 0: the same.
        calibrated: width of a model's rows, and degree of tensor parallelism; None: ``matmul`` holds for all sizes.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    matmul: float
    attention: float
    launch: float = 0.0
    source: str = ""
    sharding: Sharding = NO_SHARDING
    flops_fp32: float = 0.0
    calibrated: tuple[int, int] | None = None

    def matmul_share(self, width: int, tp: int) -> float:
        """Share of the peak that matrix products of rows of some width reach on a tensor-parallel rank.

        Per FLOP they take ``(1 + NARROW / width) * (1 + DIVIDED * tp / width)`` times as long as the widest.
        """
        if self.calibrated is None:
            return self.matmul
        here, there = ((1 + NARROW / k) * (1 + DIVIDED * n / k) for k, n in ((width, tp), self.calibrated))
        return min(1.0, self.matmul * there / here)

    def peak(self, width: int) -> float:
        """Most FLOP/s in numbers of so many bytes."""
        return self.flops_fp32 or self.flops if width > 2 else self.flops


@dataclass(frozen=True)
class NodePool:
    """Equal nodes of a cluster.

    Args:
        within: links of one rank to others of its node.
        cores_per_node: processor cores that the ranks of a node share, where there may be fewer of them than ranks: a
            step then takes at least the work of all ranks of a node over its cores; None: each rank has its own device.
        collectives: links that rings of a node reach, by kind, where they were measured; others reach ``within``.
        processor: the same in seconds that a rank's processor works for them, whose links are no device of their own.
        working: what it works for sharded parameters besides; None: all that ``device.sharding`` says.
    """

    device: Device
    nodes: int
    ranks_per_node: int
    within: Links
    cores_per_node: int | None = None
    collectives: Mapping[CollectiveKind, Links] = field(default_factory=dict)
    processor: Mapping[CollectiveKind, Links] = field(default_factory=dict)
    working: Sharding | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Cluster:
    """Pools of nodes on one network; ranks are numbered pool after pool.

    Device, links and collectives of several pools are those of the slowest: what a layout counts on that spans them.

    Args:
        across: links of one rank to ranks of other nodes.
    """

    pools: tuple[NodePool, ...]
    across: Links

    def __str__(self) -> str:
        return " and ".join(f"{pool.ranks} x {pool.device.name}" for pool in self.pools)

    @cached_property
    def ranks(self) -> int:
        return sum(pool.ranks for pool in self.pools)

    @cached_property
    def device(self) -> Device:
        """The slowest, with the least memory of all."""
        devices = [pool.device for pool in self.pools]
        slowest = min(devices, key=lambda d: (d.flops * d.matmul, d.memory_bandwidth))
        return replace(slowest, memory=min(d.memory for d in devices))

    @cached_property
    def memory(self) -> Float64[np.ndarray, "ranks"]:
        """Bytes of every rank's device."""
        return np.repeat([pool.device.memory for pool in self.pools], [pool.ranks for pool in self.pools])

    @cached_property
    def ranks_per_node(self) -> int:
        """Of several pools: so many that every node has a multiple of them."""
        return gcd(*(pool.ranks_per_node for pool in self.pools))

    @cached_property
    def network(self) -> Network:
        """Its links as the simulator takes them."""
        nodes = [pool for pool in self.pools for _ in range(pool.nodes)]
        ends = np.cumsum([pool.ranks_per_node for pool in nodes])
        return Network(tuple(pool.within for pool in nodes), self.across, ends)

    @property
    def shares_cores(self) -> bool:
        """Whether ranks and their communication share processor cores."""
        return any(pool.cores_per_node for pool in self.pools)

    def worked_for(self) -> Cluster:
        """The same with collectives and shards that take what processors work for them, where that was measured."""
        pools = []
        for pool in self.pools:
            device = replace(pool.device, sharding=pool.working or pool.device.sharding)
            pools.append(replace(pool, device=device, collectives={**pool.collectives, **pool.processor}))
        return replace(self, pools=tuple(pools))

    def on_cores(self, work: Float64[np.ndarray, "ranks"]) -> float:
        """Seconds that the ranks of a node need at least for so many seconds of work each, where they share cores."""
        least, first = 0.0, 0
        for pool in self.pools:
            of_nodes = work[first : first + pool.ranks].reshape(pool.nodes, -1).sum(axis=1)
            least = max(least, float(of_nodes.max()) / pool.cores_per_node if pool.cores_per_node else 0.0)
            first += pool.ranks
        return least

    def ranks_of(self, pools: Sequence[int]) -> range:
        """Ranks from the first to the last of some neighbouring pools."""
        ends = [0, *accumulate(pool.ranks for pool in self.pools)]
        return range(ends[pools[0]], ends[pools[-1] + 1])

    def pools_of(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Numbers of the pools in which some ranks lie, ascending."""
        ends = list(accumulate(pool.ranks for pool in self.pools))
        return tuple(sorted({bisect_right(ends, rank) for rank in ranks}))

    def with_node(self, pool: int) -> Cluster:
        """With one more node in a pool."""
        pools = (replace(p, nodes=p.nodes + (i == pool)) for i, p in enumerate(self.pools))
        return replace(self, pools=tuple(pools))

    def changed(self, **fields: Any) -> Cluster:
        """With other fields of all pools."""
        return replace(self, pools=tuple(replace(pool, **fields) for pool in self.pools))

    def within_nodes(self, ranks: Sequence[int], tp: int) -> bool:
        """Whether no tensor parallelism of this degree crosses a node, on ranks in their order."""
        node = self.network.nodes_of(np.asarray(ranks))
        return bool((node == node[np.arange(len(node)) // tp * tp]).all())

    def linked(self, links: Links) -> Cluster:
        """With the same links between all ranks, for whatever travels."""
        return replace(self.changed(within=links, collectives={}, processor={}), across=links)

    def of(self, pools: Iterable[int]) -> Cluster:
        """Some of its pools."""
        return Cluster(tuple(self.pools[i] for i in pools), self.across)

    def on(self, ranks: Collection[int]) -> Cluster:
        """The pools in which some ranks lie."""
        return self if len(self.pools) == 1 else self.of(self.pools_of(ranks))

    def members(self, layout: ModuleLayout) -> tuple[int, int]:
        """Fewest members of a group on any node that it is on: of the groups over shards, and of those over replicas.

        Args:
            layout: resolved.
        """
        shards, replicas = layout.shards, layout.dp_replicate
        nodes = self.network.nodes_of(layout.grid()).reshape(layout.pp, replicas, shards, layout.tp)
        of = [np.moveaxis(nodes, axis, -1).reshape(-1, size) for axis, size in ((2, shards), (1, replicas))]
        pairs = (len(self.network.ends) * np.arange(len(groups))[:, None] + groups for groups in of)
        fewest, least = (int(np.unique(each, return_counts=True)[1].min()) for each in pairs)
        return fewest, least

    def collective(
        self,
        size: float,
        ranks: int,
        stride: int = 1,
        kind: CollectiveKind = "all-gather",
        on_node: int | None = None,
    ) -> float:
        """Seconds of an all-gather, a reduce-scatter or half of an all-reduce by rings, while neighbouring groups do
        the same.

        A ring that crosses nodes uses the links of all its members there, so each rank brings its own.

        Args:
            size: bytes of the whole, of which every rank has an equal part.
            ranks: of the group, which are ``stride`` apart.
            on_node: fewest of them on a node; None: as many as fit, as where groups begin with a node.
        """
        if ranks == 1:
            return 0.0
        on_node = min(ranks, max(1, self.ranks_per_node // stride)) if on_node is None else on_node
        links = [pool.collectives.get(kind, pool.within) for pool in self.pools]
        within = Links(max(one.latency for one in links), min(one.bandwidth for one in links))
        link, bandwidth = within, within.bandwidth
        if on_node < ranks:
            link, bandwidth = self.across, self.across.bandwidth * on_node
            if on_node > 1:
                bandwidth = min(bandwidth, within.bandwidth)
        return link.latency * ceil(log2(ranks)) + size * (ranks - 1) / ranks / bandwidth
