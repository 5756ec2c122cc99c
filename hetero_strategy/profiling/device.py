"""What optimizers and links reach on the devices at hand, measured."""

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
from scipy.optimize import nnls
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hetero_strategy.planner.cluster import NO_SHARDING, Cluster, CollectiveKind, Device, NodePool, OwnWork, Sharding
from hetero_strategy.planner.hardware import DEVICES
from hetero_strategy.planner.times import ADAM_BYTES
from hetero_strategy.simulator.links import Links

T = TypeVar("T")
PARAMETERS, TENSORS = 2**20, 16
"""That an optimizer steps on, and in how many tensors they are."""
COLLECTIVES: tuple[CollectiveKind, ...] = ("all-gather", "reduce-scatter", "all-reduce")
MESSAGE = "message"
SIZES = (2**12, 2**16, 2**20, 2**22)
"""Bytes of messages, of the whole over all ranks."""
ROUNDS = 9
BLOCKS, SHARDED = 4, (2**16, 2**23)
"""Blocks that are sharded, and the bytes of each."""


class LinkTime(NamedTuple):
    """What one kind of collective took at one size, on the slowest rank."""

    kind: str
    size: int
    seconds: float
    hops: float
    """Latencies in it, by the formula of ``Cluster.collective``."""
    received: float
    """Bytes that a rank receives."""
    processor: float = 0.0
    """Seconds that a rank's process works for it, the threads of its backend included, on average."""


def cores_of_node() -> int:
    """Cores of this machine that a run may use: those of its job, where SLURM gives each task some of them."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))


def with_optimizer(device: Device, on: torch.device) -> Device:
    """The same with the memory bandwidth that AdamW's fused step on fp32 parameters reaches."""
    tensors = [torch.zeros(PARAMETERS // TENSORS, device=on, requires_grad=True) for _ in range(TENSORS)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer = torch.optim.AdamW(tensors, fused=True)
    seconds = min(clocked(on, optimizer.step)[0] for _ in range(ROUNDS))
    return replace(device, memory_bandwidth=ADAM_BYTES * PARAMETERS / seconds)


class Communication(NamedTuple):
    """What all ranks of a node measure together."""

    links: Links
    """Of messages."""
    collectives: Mapping[CollectiveKind, Links]
    processor: Mapping[CollectiveKind, Links]
    """See :class:`NodePool`."""
    sharding: Sharding = NO_SHARDING
    """What sharded parameters take beside collectives."""
    working: Sharding | None = None
    """See :class:`NodePool`."""

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with these figures."""
        device = replace(cluster.device, sharding=self.sharding)
        own = {"collectives": self.collectives, "processor": self.processor, "working": self.working}
        return cluster.linked(self.links).changed(device=device, **own)


def communication(device: torch.device, *, shards: bool = True) -> Communication:
    """Measure links and, on processors, where ``shards``, what sharding takes. A collective of all ranks."""
    reached, ranks = fit_communication(link_times(device)), dist.get_world_size()
    if device.type == "cuda" or not shards:
        return reached
    ring = reached.on(Cluster((NodePool(DEVICES["cpu"], 1, ranks, reached.links),), reached.links))
    collectives = [[ring.collective(size, ranks, kind=kind) for kind in COLLECTIVES[:2]] for size in SHARDED]
    taken, worked = shards_take(init_device_mesh("cpu", (ranks,)))
    return reached._replace(sharding=_sharding(taken - collectives), working=_sharding(worked))


def fit_communication(times: Sequence[LinkTime]) -> Communication:
    """Links of every kind of collective, and of messages."""
    own = {kind: [time for time in times if time.kind == kind] for kind in (*COLLECTIVES, MESSAGE)}
    worked = {kind: [time._replace(seconds=time.processor) for time in own[kind]] for kind in COLLECTIVES}
    collectives, processor = ({kind: fit_links(of[kind])[0] for kind in COLLECTIVES} for of in (own, worked))
    return Communication(fit_links(own[MESSAGE])[0], collectives, processor)


class _Block(nn.Module):
    """Takes little time but for what sharding adds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size // 4 // TENSORS) for _ in range(TENSORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([weight.sum() for weight in self.weights]).sum()


def sharding(mesh: DeviceMesh) -> Sharding:
    """What a processor core works to gather and to sum sharded parameters, whose ranks all call this.

    Only the time of this thread counts: neither the collectives nor other ranks.

    Args:
        mesh: of one dimension, over which parameters are sharded.
    """
    return _sharding(shards_take(mesh)[1])


def _sharding(seconds: Float64[np.ndarray, "sizes 2"]) -> Sharding:
    """Of a block of each of the sizes that are measured, gathered and summed."""
    lines = []
    for small, large in seconds.T.tolist():
        slope = max(0.0, (large - small) / (SHARDED[1] - SHARDED[0]))
        lines.append(OwnWork(max(0.0, small - slope * SHARDED[0]), slope))
    return Sharding(*lines)


def shards_take(mesh: DeviceMesh) -> Float64[np.ndarray, "2 sizes 2"]:
    """Measure the seconds that sharding a block adds to its forward, and how much more to its backward.

    A collective of the mesh, whose ranks all get the same. That of a forward is a gather; a backward gathers too.

    Returns:
        Of each of the sizes that are measured: seconds that pass, of the slowest rank; those of its thread alone.
    """
    added = torch.from_numpy(np.stack([_added(mesh, size) for size in SHARDED], axis=1) / BLOCKS)
    dist.all_reduce(added, dist.ReduceOp.MAX, group=mesh.get_group())
    return added.numpy()


def _added(mesh: DeviceMesh, size: int) -> Float64[np.ndarray, "2 2"]:
    """Seconds of all blocks of so many bytes, of both clocks: in a forward, and how much more in a backward."""
    took = []
    for sharded in (False, True):
        blocks = nn.Sequential(*(_Block(size) for _ in range(BLOCKS)))
        for part in (*blocks, blocks) if sharded else ():
            fully_shard(part, mesh=mesh)
        took.append(np.median([_passes(blocks, mesh) for _ in range(ROUNDS + 1)][1:], axis=0))
    forward, backward = (took[1] - took[0]).T
    return np.stack([forward, backward - forward], axis=1).clip(0.0)


def _passes(blocks: nn.Module, mesh: DeviceMesh) -> Float64[np.ndarray, "2 2"]:
    """Seconds of a forward and of a backward that pass, and those of this thread."""
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
    """Seconds of the device, on the CPU of this thread alone, as others do not count; and what it makes."""
    begin = _now(device)
    made = work()
    return _now(device) - begin, made


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
    works: dict[str, tuple[Callable[[], object], float, float]] = {  # into memory that is new, as in a step
        "all-gather": (lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part), hops, received),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole), hops, received),
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * hops, 2 * received),
        MESSAGE: (lambda: _pass_on(whole), 1.0, whole.nbytes),
    }
    for kind, (work, latencies, own) in works.items():
        seconds, processor = _usual(device, work)
        yield LinkTime(kind, whole.nbytes, seconds, latencies, own, processor)


def _pass_on(rows: torch.Tensor) -> None:
    """Every rank sends to the next one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, rows, (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, torch.empty_like(rows), (rank - 1) % ranks)
    for request in dist.batch_isend_irecv([sends, receives]):
        request.wait()


def _usual(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a round, on the slowest rank of each, and those that a process works, on average: both the median."""
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
    """Latency and bandwidth with the least squared relative errors, and how far each time is from them."""
    seconds = np.array([t.seconds for t in times])
    given = np.array([[t.hops, t.received] for t in times], np.float64)
    (latency, slope), errors = relative_fit(given, seconds)
    return Links(latency, 1 / slope if slope else np.inf), errors


def relative_fit(
    given: Float64[np.ndarray, "points figures"], seconds: Float64[np.ndarray, "points"]
) -> tuple[list[float], Float64[np.ndarray, "points"]]:
    """Seconds of each given figure, not negative, with the least squared relative errors, and these errors."""
    scale = given.max(axis=0)
    found = nnls(given / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return found.tolist(), np.abs(given @ found / seconds - 1)
