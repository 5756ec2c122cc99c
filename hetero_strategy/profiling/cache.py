"""Profiles of this machine, kept on disk by what they are of: what was measured before is not measured again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.fake import fake_world
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.times import BlockSeconds, Line
from hetero_strategy.profiling.blocks import SECONDS, Fit, Profiled, Progress, profile
from hetero_strategy.profiling.device import sharding, with_optimizer


def profile_on(
    cluster: Cluster,
    model: MultimodalModel,
    batches: Sequence[StepMetadata],
    dtype: torch.dtype,
    *,
    tp: Collection[int] = (1,),
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> tuple[Profiled, Cluster]:
    """Seconds of all blocks on this machine's device, measured now or before, and the cluster with what it reaches.

    That is the memory bandwidth of the optimizer and, of processors, how many cores the ranks of a node share and what
    sharding costs them, unless a process group exists, whose ranks measure that together. Blocks run on one thread,
    whose time alone is counted there.

    Args:
        tp: of which those count that a node has ranks for; the rest as for :func:`profile`.

    Raises:
        ConfigError: the cluster's device is not here; or see :func:`profile`.
    """
    name, threads = cluster.device.name, torch.get_num_threads()
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "none but processor cores"
    if name != "cpu" and name not in here.lower().replace(" ", ""):
        raise ConfigError(
            f"profile: blocks are measured on the cluster's own device, {name}, and this machine has {here}; run this"
            " there, or leave profile out"
        )
    device = torch.device("cpu" if name == "cpu" else "cuda")
    degrees = [n for n in tp if n <= cluster.ranks_per_node]
    measure = partial(profile, model, batches, device, dtype, tp=degrees, seconds=seconds, progress=progress)
    torch.set_num_threads(1)
    try:
        found = cached(measure, model, device, dtype, degrees)
        reached = with_optimizer(cluster.device, device)
        if name == "cpu" and not dist.is_initialized():
            with fake_world(0, 2):
                reached = replace(reached, sharding=sharding(init_device_mesh("cpu", (2,))))
        cluster = cluster.changed(device=reached)
    finally:
        torch.set_num_threads(threads)
    return found, cluster.changed(cores_per_node=os.cpu_count()) if name == "cpu" else cluster


def cached(
    make: Callable[[], Profiled],
    model: MultimodalModel,
    device: torch.device,
    dtype: torch.dtype,
    tp: Collection[int],
) -> Profiled:
    """What was measured of this model on such a device before; else what ``make`` measures now, which is kept.

    The file is in ``$XDG_CACHE_HOME/hetero_strategy/profiles`` (default ``~/.cache``). A damaged one is made again.
    """
    file = folder() / f"{digest(model, device, dtype, tp)}.json"
    try:
        return _read(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        json.dump({"modules": found.modules, "fits": found.fits}, part)
    os.replace(part.name, file)
    return found


def folder() -> Path:
    """Where profiles are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero_strategy" / "profiles"


def digest(model: MultimodalModel, device: torch.device, dtype: torch.dtype, tp: Collection[int]) -> str:
    """Of all that seconds depend on: modules, the dtype and degrees, versions, and the device with its threads."""
    modules = {
        name: {
            "parts": [[fqn, *_part(part)] for fqn, part in module.named_modules()],
            "parameters": [[n, [*p.shape], str(p.dtype), p.requires_grad] for n, p in module.named_parameters()],
        }
        for name, module in model.modules_by_name.items()
    }
    cuda = device.type == "cuda"
    known: dict[str, Any] = {
        "modules": modules,
        "edges": [[edge.source, edge.target] for edge in model.edges],
        "dtype": str(dtype),
        "tp": sorted({1, *tp}),
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} {_processor()}",
        "threads": None if cuda else torch.get_num_threads(),
        "versions": [torch.__version__, importlib.metadata.version("hetero-strategy")],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _part(part: nn.Module) -> tuple[str, dict[str, Any]]:
    """Class of a layer, and the plain values that it holds, such as its number of heads."""
    values = {key: value for key, value in vars(part).items() if isinstance(value, (bool, int, float, str))}
    return f"{type(part).__module__}.{type(part).__qualname__}", values | {"training": True}


def _processor() -> str:
    """Name of this machine's processor, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _read(data: Any) -> Profiled:
    modules = {
        name: {
            int(tp): [BlockSeconds(*(Line(*line) for line in block)) for block in blocks] for tp, blocks in of.items()
        }
        for name, of in data["modules"].items()
    }
    return Profiled(modules, {name: Fit(*fit) for name, fit in data["fits"].items()})
