"""Known devices and links: plain data with sources, and the clusters built of them.

Peaks are dense bf16 FLOP/s (in fp32 :data:`FP32`) and links are bytes per second into one rank and out of it, as in
datasheets. The share that is reached is one number per device for matmuls of the calibrated width, from which shares of
other widths follow (:meth:`Device.matmul_share`), one for attention, and one for all links. Shares of attention and
links are published measurements of kernels and collectives. A device's best matmul is published too (MAMF,
github.com/stas00/ml-engineering: 0.803 of an H100's peak, 0.869 of an A100's), but the matmuls of a model in a long run
are slower. Their share is therefore calibrated on one published training run per architecture; all other rows (``python
-m benchmarks.published``) are predictions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from hetero_strategy.errors import ConfigError, hint, is_whole
from hetero_strategy.simulator.cluster import Cluster, Device, Links

HOPPER: Mapping[str, Any] = {"matmul": 0.504, "attention": 0.35, "calibrated": (4096, 2)}
"""Shares of matmuls and attention: calibrated on the 7.1B row of Megatron-LM's table for H100 (465.9
TFLOP/s); FlashAttention-2 on an H100 (arXiv:2407.08608, abstract)."""
AMPERE: Mapping[str, Any] = {"matmul": 0.612, "attention": 0.6, "calibrated": (12288, 8)}
"""Shares of matmuls and attention: calibrated on the 175B row of Megatron-LM's table for A100
(arXiv:2205.05198, table 5: 13.75 s); FlashAttention-2 on an A100 reaches 0.5 to 0.73 (arXiv:2307.08691)."""
LINK_SHARE = 0.82
"""Share of a datasheet's bandwidth that is reached: ring all-reduce over 8 H200 without SHARP, 367.6 of 450 GB/s; 8
A100: 235 of 300 (github.com/stas00/ml-engineering, network)."""
LATENCY = 9e-6
"""Seconds per hop of a collective: 8 H200 take 68 us for an all-reduce of 4 MiB, which is two collectives of three
hops; 15 us are for its bytes."""
BLOCK_LAUNCH = 12 * 3.8e-6
"""Seconds to launch a block's forward: about 12 kernels (6 matmuls, attention, 5 fused elementwise ones), each of which
takes at least 3.8 us in a stream (NVIDIA's "Getting Started with CUDA Graphs")."""
GIGABIT = 1e9 / 8

FP32 = {
    "a40": 37.4e12, "a100": 19.5e12, "a800": 19.5e12, "h100": 67e12, "h800": 67e12, "h200": 67e12, "b200": 75e12,
    "gb200": 80e12,
}  # fmt: skip
"""FLOP/s in fp32 without TF32, torch's default, from the same datasheets."""

DEVICES: Mapping[str, Device] = {
    device.name: replace(device, flops_fp32=FP32.get(device.name, 0.0))
    for device in (
        Device(
            "a40", 149.7e12, 48e9, 696e9, launch=BLOCK_LAUNCH, **AMPERE,
            source="NVIDIA A40 datasheet; shares of an a100",
        ),
        Device("a100", 312e12, 80e9, 2.039e12, launch=BLOCK_LAUNCH, source="NVIDIA A100 80GB SXM datasheet", **AMPERE),
        Device("a800", 312e12, 80e9, 2.039e12, launch=BLOCK_LAUNCH, source="an a100 with fewer NVLinks", **AMPERE),
        Device("h100", 989e12, 80e9, 3.35e12, launch=BLOCK_LAUNCH, source="NVIDIA H100 SXM datasheet", **HOPPER),
        Device("h800", 989e12, 80e9, 3.35e12, launch=BLOCK_LAUNCH, source="an h100 with fewer NVLinks", **HOPPER),
        Device(
            "h200", 989e12, 141e9, 4.8e12, launch=BLOCK_LAUNCH, **HOPPER,
            source="NVIDIA H200 SXM datasheet; shares of an h100",
        ),
        Device(
            "b200", 2250e12, 180e9, 8e12, launch=BLOCK_LAUNCH, **HOPPER,
            source="NVIDIA DGX B200 datasheet (1,440 GB and 64 TB/s of 8); shares of an h100, not checked",
        ),
        Device(
            "gb200", 2500e12, 186e9, 8e12, launch=BLOCK_LAUNCH, **HOPPER,
            source="NVIDIA GB200 NVL72 datasheet (13.4 TB and 576 TB/s of 72); shares of an h100, not checked",
        ),
        Device(
            "cpu", 80e9, 4e9, 10e9, 0.7, 0.2, 2e-4,
            "one core: 32 fp32 FLOP a cycle (two 256-bit FMAs) at 2.5 GHz; the rest are round figures",
        ),
    )
}  # fmt: skip

LINKS: Mapping[str, Links] = {
    "nvlink3": Links(LATENCY, 300e9),  # A100: 12 links of 25 GB/s (NVIDIA A100 datasheet: 600 GB/s both ways)
    "nvlink3_a800": Links(LATENCY, 200e9),  # A800: 400 GB/s both ways (NVIDIA A800 datasheet)
    "nvlink4": Links(LATENCY, 450e9),  # H100, H200: 18 links of 25 GB/s (NVIDIA H100 datasheet: 900 GB/s both ways)
    "nvlink4_h800": Links(LATENCY, 200e9),  # H800: 400 GB/s both ways (arXiv:2412.19437: 160 reached)
    "nvlink5": Links(LATENCY, 900e9),  # B200, GB200 (NVIDIA GB200 NVL72 datasheet: 1.8 TB/s both ways)
    "pcie4": Links(LATENCY, 31e9),  # 16 lanes of 2 GB/s
    "pcie5": Links(LATENCY, 63e9),  # 16 lanes of 4 GB/s
    "100g": Links(LATENCY, 100 * GIGABIT),  # InfiniBand or RoCE, one adapter per rank
    "200g": Links(LATENCY, 200 * GIGABIT),  # ConnectX-6
    "400g": Links(LATENCY, 400 * GIGABIT),  # ConnectX-7
    "800g": Links(LATENCY, 800 * GIGABIT),  # ConnectX-8
    "loopback": Links(1e-4, 1e9),  # gloo between processes of one machine: round figures
}


NODES: Mapping[str, tuple[int, str, str]] = {
    "a40": (4, "pcie4", "200g"),
    "a100": (8, "nvlink3", "200g"),  # DGX A100: 8 x 200 Gb/s
    "a800": (8, "nvlink3_a800", "200g"),
    "h100": (8, "nvlink4", "400g"),  # DGX H100: 8 x 400 Gb/s
    "h800": (8, "nvlink4_h800", "400g"),
    "h200": (8, "nvlink4", "400g"),
    "b200": (8, "nvlink5", "400g"),
    "gb200": (72, "nvlink5", "400g"),
    "cpu": (1, "loopback", "loopback"),
}
"""Usual node of each device: ranks, links inside it, and links to other nodes."""

_DEVICE_FIELDS = tuple(f.name for f in fields(Device) if f.name not in ("name", "source", "sharding", "calibrated"))
_FIGURES = (*_DEVICE_FIELDS, *(f"{where}_{f.name}" for where in ("within", "across") for f in fields(Links)))
_FIELDS = ("device", "nodes", "ranks_per_node", "network", "within", "cores_per_node", *_FIGURES)


def cluster(
    device: str,
    nodes: int,
    ranks_per_node: int | None = None,
    network: str | None = None,
    within: str | None = None,
    cores_per_node: int | None = None,
    **overrides: float,
) -> Cluster:
    """Build a cluster from nodes of a known device.

    Args:
        device: name in :data:`DEVICES`.
        nodes: number of machines.
        ranks_per_node: devices per node; default: the usual number (:data:`NODES`).
        network: name in :data:`LINKS` of the links between nodes; default: the usual ones.
        within: name in :data:`LINKS` of the links inside a node; default: the usual ones.
        cores_per_node: cores that the ranks of a node share, see :class:`Cluster`.
        **overrides: other figures of the device (``flops, flops_fp32, memory, memory_bandwidth, matmul, attention,
            launch``; ``flops`` alone counts for all dtypes) or the links (``within_bandwidth, across_bandwidth``: of
            the datasheet, bytes per second into a rank and out of it; ``within_latency, across_latency``: seconds).

    Raises:
        ConfigError: a name is unknown, or a number is not positive.
    """
    known = _known("device", device, DEVICES)
    usual, inside_node, between_nodes = NODES[device]
    inside = _known("within", within or inside_node, LINKS)
    between = _known("network", network or between_nodes, LINKS)
    for name in overrides:
        if name not in _FIGURES:
            raise ConfigError(f"cluster: no field {name!r}; {hint(name, _FIELDS)}")
    ranks = usual if ranks_per_node is None else ranks_per_node
    cores = 1 if cores_per_node is None else cores_per_node
    numbers: dict[str, Any] = {"nodes": nodes, "ranks_per_node": ranks, "cores_per_node": cores, **overrides}
    for name, value in numbers.items():  # values read from a file may have any type
        zero = name == "launch" or name.endswith("latency")
        counted = name in ("nodes", "ranks_per_node", "cores_per_node")
        number = is_whole(value) if counted else isinstance(value, int | float)
        if not number or not (value > 0 or (zero and value == 0)):
            raise ConfigError(f"cluster: {name}={value} must be positive{' and whole' * counted}")
    for name in ("matmul", "attention"):
        if overrides.get(name, 0.5) > 1:
            raise ConfigError(f"cluster: {name}={overrides[name]} is a share of flops; give at most 1")
    figures: dict[str, Any] = {name: value for name, value in overrides.items() if name in _DEVICE_FIELDS}
    if "flops" in figures:  # a person who knows one figure means all dtypes
        figures.setdefault("flops_fp32", 0.0)
    near, far = _links(inside, "within", overrides), _links(between, "across", overrides)
    return Cluster(replace(known, **figures), nodes, ranks, near, far, cores_per_node)


Known = TypeVar("Known")


def _known(field: str, name: str, known: Mapping[str, Known]) -> Known:
    if name not in known:
        raise ConfigError(f"cluster: {field}={name!r} is not known; known: {', '.join(known)}")
    return known[name]


def _links(links: Links, where: str, overrides: Mapping[str, float]) -> Links:
    """Return the links with the share of a datasheet's bandwidth that is reached."""
    latency = overrides.get(f"{where}_latency", links.latency)
    return Links(latency, LINK_SHARE * overrides.get(f"{where}_bandwidth", links.bandwidth))


def known_device(name: str) -> str | None:
    """Return the name in :data:`DEVICES` of a device that CUDA names; None: there is none.

    >>> known_device("NVIDIA A100-SXM4-40GB"), known_device("NVIDIA RTX A4000"), known_device("NVIDIA GH200 480GB")
    ('a100', None, None)
    """
    return next((known for known in DEVICES if re.search(rf"(?<![A-Z0-9]){known}(?![0-9])", name, re.IGNORECASE)), None)


def this_cluster(device: torch.device, nodes: int, ranks_per_node: int) -> Cluster:
    """Build a cluster of nodes like this machine, for plans made where they run."""
    if device.type != "cuda":
        return cluster("cpu", nodes, ranks_per_node)
    cuda_name = torch.cuda.get_device_name(device)
    if name := known_device(cuda_name):
        there = float(torch.cuda.get_device_properties(device).total_memory)
        return cluster(name, nodes, ranks_per_node, memory=min(DEVICES[name].memory, there))
    raise ConfigError(
        f"layouts='auto': nothing is known of {cuda_name}; known: {', '.join(DEVICES)}; give layouts, such as those of"
        " python -m recipes.plan with the figures of your device (+cluster.flops=...)"
    )
