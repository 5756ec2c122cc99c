"""Devices and links of a cluster, and how long rows take between the ranks of two stages. Pure.

The known devices and links are in ``simulator.hardware``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hetero_strategy.layout.spec import ModuleLayout

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Numbers = Any
"""A number, or an array with one for each of many layouts that are estimated at once."""

Grid = Int64[np.ndarray, "_instances _ranks"]
"""Global ranks of every instance of a stage."""
Instances = Int64[np.ndarray, "*pairs"]
Between = Callable[[Instances, Instances], tuple[Float64[np.ndarray, "*pairs"], Float64[np.ndarray, "*pairs"]]]
"""Instances of a source and of a target, pair by pair -> seconds until the first byte arrives, and seconds per byte;
both 0 between the same ranks."""


@dataclass(frozen=True)
class Links:
    """The speed of the links between ranks (the alpha-beta model: latency + bytes / bandwidth).

    Args:
        latency: seconds until the first byte arrives.
        bandwidth: bytes per second into one rank, and out of one rank.
    """

    latency: float = 0.0
    bandwidth: float = np.inf

    def between(self, source: Grid, target: Grid) -> Between:
        """Return the links between the instances of two stages."""
        same = same_ranks(source, target)

        def of(first: Instances, second: Instances) -> tuple[np.ndarray, np.ndarray]:
            away = ~same(first, second)
            return self.latency * away, away / self.bandwidth

        return of


@dataclass(frozen=True, eq=False)
class Network:
    """A network whose links are faster within a node than between nodes.

    Args:
        within: links between the ranks of a node.
        across: links between ranks of different nodes.
        ranks_per_node: number of ranks on each node.
    """

    within: Links
    across: Links
    ranks_per_node: int

    def nodes_of(self, ranks: Int64[np.ndarray, "*n"]) -> Int64[np.ndarray, "*n"]:
        """Return the number of the node that each rank is on."""
        return ranks // self.ranks_per_node

    def between(self, source: Grid, target: Grid) -> Between:
        """Return links as :meth:`Links.between` does; instances are on the nodes of their first ranks."""
        here, there = (self.nodes_of(grid[:, 0]) for grid in (source, target))
        within, across = (links.between(source, target) for links in (self.within, self.across))

        def of(first: Instances, second: Instances) -> tuple[np.ndarray, np.ndarray]:
            near, pairs = here[first] == there[second], zip(within(first, second), across(first, second), strict=True)
            latency, per_byte = (np.where(near, inside, between) for inside, between in pairs)
            return latency, per_byte

        return of


def same_ranks(source: Grid, target: Grid) -> Callable[[Instances, Instances], Bool[np.ndarray, "*pairs"]]:
    """Return a function that tells, for pairs of instances, whether both have the same ranks, so that rows take no
    time.
    """
    first, second = np.sort(source, axis=1), np.sort(target, axis=1)
    if first.shape[1] != second.shape[1]:
        return lambda some, others: np.zeros(len(some), bool)
    return lambda some, others: (first[some] == second[others]).all(axis=1)


class OwnWork(NamedTuple):
    """The time of a collective over shards besides the collective: FSDP's hooks, and copies into and out of buffers."""

    per_block: float = 0.0
    """Seconds per block."""
    per_byte: float = 0.0
    """Seconds per byte of the whole tensor, of which every rank has a part."""

    def seconds(self, blocks: Numbers, size: Numbers) -> Numbers:
        """Return the seconds for parameters or gradients of so many blocks, of ``size`` bytes together."""
        return self.per_block * blocks + self.per_byte * size


NO_WORK = OwnWork()


class Sharding(NamedTuple):
    """The work for parameters sharded over data-parallel ranks, besides the collectives."""

    gather: OwnWork = NO_WORK
    scatter: OwnWork = NO_WORK


NO_SHARDING = Sharding()
NARROW, DIVIDED = 558.0, 203.0
"""Widths at which matmuls take twice as long per FLOP: of a block's rows, and of the columns of each tensor-parallel
rank. Fitted to two published rows for H100 whose widths differ from the calibrated one: Megatron-LM's 1.7B (2048,
undivided) and torchtitan's 8B with tensor parallelism of 8 (4096 / 8). All other rows of ``benchmarks.published``,
including those for A100, are predictions."""


@dataclass(frozen=True)
class Device:
    """An accelerator, or one processor core.

    Args:
        flops: peak dense FLOP/s in numbers of 2 bytes.
        memory: bytes.
        memory_bandwidth: bytes per second.
        matmul: share of ``flops`` that matrix products reach in a model of the ``calibrated`` sizes.
        attention: share of ``flops`` that attention reaches.
        launch: seconds of a block's forward that do not shrink with its rows, because kernels begin and end.
        source: origin of the figures.
        sharding: time of sharded parameters besides collectives; measured on processors only.
        flops_fp32: peak FLOP/s in wider numbers, without TF32; 0: as ``flops``.
        calibrated: width of a model's rows and degree of tensor parallelism; None: ``matmul`` holds for all sizes.
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
        """Return the share of the peak that matrix products of rows of some width reach on a tensor-parallel rank.

        Per FLOP they take ``(1 + NARROW / width) * (1 + DIVIDED * tp / width)`` times as long as the widest.
        """
        if self.calibrated is None:
            return self.matmul
        here, there = ((1 + NARROW / k) * (1 + DIVIDED * n / k) for k, n in ((width, tp), self.calibrated))
        return min(1.0, self.matmul * there / here)

    def peak(self, width: int) -> float:
        """Return the peak FLOP/s in numbers of so many bytes."""
        return self.flops_fp32 or self.flops if width > 2 else self.flops


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes on one network.

    Args:
        device: kind of all devices.
        nodes: number of machines.
        ranks_per_node: devices of a machine.
        within: links of one rank to other ranks of its node.
        across: links of one rank to ranks of other nodes.
        cores_per_node: processor cores that the ranks of a node share, if there may be fewer cores than ranks: a step
            then takes at least the work of a node's ranks divided by its cores; None: each rank has its own device.
        collectives: measured links that rings of a node reach, by kind; other kinds reach ``within``. Exchanges of
            equal parts reach those of an all-gather.
        processor: measured processor time of the collectives, as links, for ranks whose links are no device of their
            own.
        working: processor time for sharded parameters besides collectives; None: all of ``device.sharding``.
    """

    device: Device
    nodes: int
    ranks_per_node: int
    within: Links
    across: Links
    cores_per_node: int | None = None
    collectives: Mapping[CollectiveKind, Links] = field(default_factory=dict)
    processor: Mapping[CollectiveKind, Links] = field(default_factory=dict)
    working: Sharding | None = None

    def __str__(self) -> str:
        return f"{self.ranks} x {self.device.name}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def network(self) -> Network:
        """Return the links as the simulator takes them."""
        return Network(self.within, self.across, self.ranks_per_node)

    @property
    def shares_cores(self) -> bool:
        """Return whether ranks and their communication share processor cores."""
        return self.cores_per_node is not None

    def worked_for(self) -> Cluster:
        """Return a cluster whose collectives and shards take the processor time measured for them, if any was."""
        device = replace(self.device, sharding=self.working or self.device.sharding)
        return replace(self, device=device, collectives={**self.collectives, **self.processor})

    def on_cores(self, work: Float64[np.ndarray, "ranks"]) -> float:
        """Return the least seconds that a node's ranks need for their work if they share cores; otherwise 0."""
        return (
            float(work.reshape(self.nodes, -1).sum(axis=1).max()) / self.cores_per_node if self.cores_per_node else 0.0
        )

    def linked(self, links: Links) -> Cluster:
        """Return a cluster with the given links between all ranks, for messages and collectives."""
        return replace(self, within=links, across=links, collectives={}, processor={})

    def members(self, layout: ModuleLayout) -> tuple[int, int]:
        """Return the fewest members of a group on any node that it is on: of groups over shards, and of groups over
        replicas.

        Args:
            layout: resolved layout.
        """
        shards, replicas = layout.shards, layout.dp_replicate
        nodes = self.network.nodes_of(layout.grid()).reshape(layout.pp, replicas, shards, layout.tp)
        of = [np.moveaxis(nodes, axis, -1).reshape(-1, size) for axis, size in ((2, shards), (1, replicas))]
        pairs = (self.nodes * np.arange(len(groups))[:, None] + groups for groups in of)
        fewest, least = (int(np.unique(each, return_counts=True)[1].min()) for each in pairs)
        return fewest, least

    def exchange(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which ranks that are ``stride`` apart send each other equal parts of their rows, all at
        once.

        Args:
            size: bytes of one rank's rows, also of those that stay.
        """
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.ranks_per_node // stride))
        within = self.collectives.get("all-gather", self.within)
        own, far = (near - 1) / within.bandwidth, (ranks - near) / self.across.bandwidth
        latency = within.latency if near == ranks else self.across.latency
        return latency + size / ranks * (own + far)

    def collective(
        self,
        size: Numbers,
        ranks: Numbers,
        stride: Numbers = 1,
        kind: CollectiveKind = "all-gather",
        on_node: int | None = None,
    ) -> Any:
        """Return the seconds of an all-gather, a reduce-scatter or half of an all-reduce by rings, while neighbouring
        groups do the same.

        A ring that crosses nodes uses the links of all its members there, so each rank brings its own.

        Args:
            size: bytes of the whole tensor, of which every rank has an equal part.
            ranks: number of ranks of the group, which are ``stride`` apart.
            on_node: fewest ranks of the group on a node; None: as many as fit, because groups begin with a node.
        """
        near = np.minimum(ranks, np.maximum(1, self.ranks_per_node // stride)) if on_node is None else on_node
        within, crosses = self.collectives.get(kind, self.within), np.less(near, ranks)
        several = np.where(np.greater(near, 1), within.bandwidth, np.inf)
        bandwidth = np.where(crosses, np.minimum(self.across.bandwidth * near, several), within.bandwidth)
        latency = np.where(crosses, self.across.latency, within.latency)
        seconds = latency * np.ceil(np.log2(ranks)) + size * (ranks - 1) / ranks / bandwidth
        return np.where(np.greater(ranks, 1), seconds, 0.0)[()]
