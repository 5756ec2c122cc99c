"""Measured figures of optimizers and links on the devices at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hetero_strategy.simulator.cluster import NO_SHARDING, Cluster, CollectiveKind, Device, Links, OwnWork, Sharding
from hetero_strategy.simulator.cost_model import ADAM_BYTES
from hetero_strategy.simulator.fit_lines import relative_fit
from hetero_strategy.simulator.hardware import DEVICES

T = TypeVar("T")
PARAMETERS, TENSORS = 2**20, 16
"""Parameters of the measured optimizer step, and the number of tensors that hold them."""
COLLECTIVES: tuple[CollectiveKind, ...] = ("all-gather", "reduce-scatter", "all-reduce")
MESSAGE = "message"
SIZES = (2**12, 2**16, 2**20, 2**22)
"""Bytes of messages, counting the whole over all ranks."""
ROUNDS = 9
BLOCKS, SHARDED = 4, (2**16, 2**23)
"""Number of sharded blocks, and the bytes of each."""


class LinkTime(NamedTuple):
    """A measured time of one kind of collective at one size, on the slowest rank."""

    kind: str
    size: int
    seconds: float
    hops: float
    """Number of latencies in it, by the formula of ``Cluster.collective``."""
    received: float
    """Bytes that a rank receives."""
    processor: float = 0.0
    """Seconds that a rank's process works for it, including the threads of its backend, on average."""


def cores_of_node() -> int:
    """Count the cores of this machine that a run may use: its job's, if SLURM gives each task some of them."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))


def with_optimizer(device: Device, on: torch.device) -> Device:
    """Return the device with the memory bandwidth that AdamW's fused step on fp32 parameters reaches."""
    tensors = [torch.zeros(PARAMETERS // TENSORS, device=on, requires_grad=True) for _ in range(TENSORS)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer = torch.optim.AdamW(tensors, fused=True)
    seconds = min(clocked(on, optimizer.step)[0] for _ in range(ROUNDS))
    return replace(device, memory_bandwidth=ADAM_BYTES * PARAMETERS / seconds)


class Communication(NamedTuple):
    """The figures that all ranks of a node measure together."""

    links: Links
    """Links of messages."""
    collectives: Mapping[CollectiveKind, Links]
    processor: Mapping[CollectiveKind, Links]
    """Processor time of collectives, see :class:`Cluster`."""
    sharding: Sharding = NO_SHARDING
    """Time of sharded parameters besides collectives."""
    working: Sharding | None = None
    """Processor time of sharded parameters, see :class:`Cluster`."""

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with these figures."""
        device = replace(cluster.device, sharding=self.sharding)
        return replace(
            cluster.linked(self.links),
            device=device,
            collectives=self.collectives,
            processor=self.processor,
            working=self.working,
        )


def communication(device: torch.device) -> Communication:
    """Measure links and, on CPUs, the time that sharding takes. A collective of all ranks."""
    reached, ranks = fit_communication(link_times(device)), dist.get_world_size()
    if device.type == "cuda":
        return reached
    ring = reached.on(Cluster(DEVICES["cpu"], 1, ranks, reached.links, reached.links))
    collectives = [[ring.collective(size, ranks, kind=kind) for kind in COLLECTIVES[:2]] for size in SHARDED]
    taken, worked = shards_take(init_device_mesh("cpu", (ranks,)))
    return reached._replace(sharding=_sharding(taken - collectives), working=_sharding(worked))


def fit_communication(times: Sequence[LinkTime]) -> Communication:
    """Fit the links of every kind of collective, and of messages."""
    own = {kind: [time for time in times if time.kind == kind] for kind in (*COLLECTIVES, MESSAGE)}
    worked = {kind: [time._replace(seconds=time.processor) for time in own[kind]] for kind in COLLECTIVES}
    collectives, processor = ({kind: fit_links(of[kind])[0] for kind in COLLECTIVES} for of in (own, worked))
    return Communication(fit_links(own[MESSAGE])[0], collectives, processor)


class _Block(nn.Module):
    """A block that takes little time except for what sharding adds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size // 4 // TENSORS) for _ in range(TENSORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([weight.sum() for weight in self.weights]).sum()


def sharding(mesh: DeviceMesh) -> Sharding:
    """Measure a processor core's work to gather and to sum sharded parameters. All ranks must call this.

    Only the time of this thread counts: neither the collectives nor other ranks.

    Args:
        mesh: one-dimensional mesh over which parameters are sharded.
    """
    return _sharding(shards_take(mesh)[1])


def _sharding(seconds: Float64[np.ndarray, "sizes 2"]) -> Sharding:
    """Fit the work from the seconds of a block of each of :data:`SHARDED`, gathered and summed."""
    lines = []
    for small, large in seconds.T.tolist():
        slope = max(0.0, (large - small) / (SHARDED[1] - SHARDED[0]))
        lines.append(OwnWork(max(0.0, small - slope * SHARDED[0]), slope))
    return Sharding(*lines)


def shards_take(mesh: DeviceMesh) -> Float64[np.ndarray, "2 sizes 2"]:
    """Measure the seconds that sharding a block adds to its forward, and how much more to its backward.

    A collective of the mesh; all its ranks return the same. A forward's extra time is a gather; a backward gathers too.

    Returns:
        For each of :data:`SHARDED`: wall seconds of the slowest rank, and seconds of its thread alone.
    """
    added = torch.from_numpy(np.stack([_added(mesh, size) for size in SHARDED], axis=1) / BLOCKS)
    dist.all_reduce(added, dist.ReduceOp.MAX, group=mesh.get_group())
    return added.numpy()


def _added(mesh: DeviceMesh, size: int) -> Float64[np.ndarray, "2 2"]:
    """Measure all blocks of so many bytes on both clocks: seconds that sharding adds in a forward, and further in a
    backward.
    """
    took = []
    for sharded in (False, True):
        blocks = nn.Sequential(*(_Block(size) for _ in range(BLOCKS)))
        for part in (*blocks, blocks) if sharded else ():
            fully_shard(part, mesh=mesh)
        took.append(np.median([_passes(blocks, mesh) for _ in range(ROUNDS + 1)][1:], axis=0))
    forward, backward = (took[1] - took[0]).T
    return np.stack([forward, backward - forward], axis=1).clip(0.0)


def _passes(blocks: nn.Module, mesh: DeviceMesh) -> Float64[np.ndarray, "2 2"]:
    """Time a forward and a backward by the wall clock and by this thread's clock."""
    x = torch.zeros(1, requires_grad=True)
    dist.barrier(mesh.get_group())
    times = [(time.perf_counter(), time.thread_time())]
    out = blocks(x)
    times.append((time.perf_counter(), time.thread_time()))
    out.sum().backward()
    times.append((time.perf_counter(), time.thread_time()))
    blocks.zero_grad()
    return np.diff(np.array(times), axis=0).T


def clocked(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of some work and its result: device seconds, on the CPU those of this thread alone."""
    begin = _now(device)
    result = work()
    return _now(device) - begin, result


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


def link_times(device: torch.device) -> list[LinkTime]:
    """Measure collectives and messages among all ranks, which are of one node. A collective."""
    return [time for size in SIZES for time in _times(size, device)]


def _times(size: int, device: torch.device) -> Iterator[LinkTime]:
    ranks = dist.get_world_size()
    part = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(len(part) * ranks, device=device)
    hops, received = ceil(log2(ranks)), (ranks - 1) / ranks * whole.nbytes
    works: dict[str, tuple[Callable[[], object], float, float]] = {  # new memory, as in a step
        "all-gather": (lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part), hops, received),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole), hops, received),
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * hops, 2 * received),
        MESSAGE: (lambda: _pass_on(whole), 1.0, whole.nbytes),
    }
    for kind, (work, latencies, own) in works.items():
        seconds, processor = _usual(device, work)
        yield LinkTime(kind, whole.nbytes, seconds, latencies, own, processor)


def _pass_on(rows: torch.Tensor) -> None:
    """Send to the next rank and receive from the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, rows, (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, torch.empty_like(rows), (rank - 1) % ranks)
    for request in dist.batch_isend_irecv([sends, receives]):
        request.wait()


def _usual(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Return the medians over rounds of the slowest rank's seconds and of a process's mean seconds of work."""
    rounds, worked = torch.zeros(2, ROUNDS, device=device)
    for number in range(-1, ROUNDS):
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 0:
            rounds[number], worked[number] = time.perf_counter() - begin, time.process_time() - busy
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    dist.all_reduce(worked)
    return float(rounds.median()), float(worked.median()) / dist.get_world_size()


def fit_links(times: Sequence[LinkTime]) -> tuple[Links, Float64[np.ndarray, "times"]]:
    """Fit latency and bandwidth by least squared relative errors; return also each time's relative error."""
    seconds = np.array([t.seconds for t in times])
    terms = np.array([[t.hops, t.received] for t in times], np.float64)
    (latency, slope), errors = relative_fit(terms, seconds)
    return Links(latency, 1 / slope if slope else np.inf), errors
