"""What the devices and links of a cluster can do. Plain data; the known ones are in ``planner.hardware``."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from hetero_strategy.simulator.links import Links, Network


@dataclass(frozen=True)
class Device:
    """One accelerator, or one processor core.

    Args:
        flops: most dense FLOP/s in the dtype that modules compute in.
        memory: bytes.
        memory_bandwidth: bytes per second.
        matmul: share of ``flops`` that matrix products of a model's sizes reach.
        attention: share of ``flops`` that attention reaches.
        launch: seconds of a block's forward that do not shrink with its rows: kernels begin and end.
        source: where the figures are from.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    matmul: float
    attention: float
    launch: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Args:
        within: links of one rank to others of its node.
        across: links of one rank to ranks of other nodes.
        cores_per_node: processor cores that the ranks of a node share, where there may be fewer of them than ranks: a
            step then takes at least the work of all ranks of a node over its cores; None: each rank has its own device.
    """

    device: Device
    nodes: int
    ranks_per_node: int
    within: Links
    across: Links
    cores_per_node: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def network(self) -> Network:
        """Its links as the simulator takes them."""
        return Network(self.within, self.across, self.ranks_per_node)

    def collective(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter by rings, while neighbouring groups do the same.

        A ring that crosses nodes uses the links of all its members there, so each rank brings its own.

        Args:
            size: bytes of the whole, of which every rank has an equal part.
            ranks: of the group, which are ``stride`` apart.
        """
        if ranks == 1:
            return 0.0
        on_node = min(ranks, max(1, self.ranks_per_node // stride))
        link = self.within if on_node == ranks else self.across
        bandwidth = self.within.bandwidth
        if on_node < ranks:
            bandwidth = self.across.bandwidth * on_node
            if on_node > 1:
                bandwidth = min(bandwidth, self.within.bandwidth)
        return link.latency * ceil(log2(ranks)) + size * (ranks - 1) / ranks / bandwidth
