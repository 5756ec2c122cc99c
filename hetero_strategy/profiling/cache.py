"""What was measured of models, kept on disk by what it is of: what was measured before is not measured again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hetero_strategy
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.fake import fake_world
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.activations import Activations, BlockBytes, Head, HeadBytes
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.hardware import known_device
from hetero_strategy.planner.memory import CPU, CUDA, MemoryModel
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.times import BlockSeconds, Line, Precision
from hetero_strategy.profiling.activations import DTYPES, MATMULS, WAYS, activations_of
from hetero_strategy.profiling.blocks import (
    MOST_ROWS,
    SECONDS,
    Fit,
    Profiled,
    Progress,
    labelled_share,
    lengths_of,
    profile,
    thirds,
)
from hetero_strategy.profiling.device import cores_of_node, sharding, with_optimizer

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


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
    if name not in ("cpu", known_device(here)):
        raise ConfigError(
            f"profile: blocks are measured on the cluster's own device, {name}, and this machine has {here}; run this"
            " there, or leave profile out"
        )
    device = torch.device("cpu" if name == "cpu" else "cuda")
    degrees = [n for n in tp if n <= cluster.ranks_per_node]
    measure = partial(profile, model, batches, device, dtype, tp=degrees, seconds=seconds, progress=progress)
    torch.set_num_threads(1)
    try:
        found = cached(measure, seconds_of(model, device, dtype, degrees, batches, seconds), _profiled)
        reached = with_optimizer(cluster.device, device)
        if name == "cpu" and not dist.is_initialized():
            with fake_world(0, 2):
                reached = replace(reached, sharding=sharding(init_device_mesh("cpu", (2,))))
        cluster = cluster.changed(device=reached)
    finally:
        torch.set_num_threads(threads)
    given = name != "cpu" or cluster.shares_cores
    return found, cluster if given else cluster.changed(cores_per_node=cores_of_node())


def memory_model(
    model: MultimodalModel,
    shape: ModelShape,
    cluster: Cluster,
    precision: Precision,
    given: Given = Given(),  # noqa: B008
) -> MemoryModel:
    """What predicts the memory of steps on a cluster's devices, none of which is needed here.

    Args:
        model: as for :func:`activations_of`, which measures it now unless it did before.
        given: what a person says of the run.
    """
    on_cpu = cluster.device.name == "cpu"
    dtype, buckets = DTYPES[precision.compute], on_cpu or precision.compute > 2
    keeps = any(how.keeps_matmuls for how in given.recompute.values())
    ways = [way for way in WAYS if keeps or way != MATMULS]
    of = {**structure(model), "activations": ways, "dtype": str(dtype), "buckets": buckets}
    activations = cached(lambda: activations_of(model, dtype, buckets=buckets, ways=ways), of, _activations)
    allocator = replace(CPU if on_cpu else CUDA, buckets=buckets)
    return MemoryModel(shape, activations, precision, allocator, given.accumulated > 1)


def cached(make: Callable[[], Result], of: Mapping[str, Any], read: Callable[[Any], Result]) -> Result:
    """What was measured before of the same things; else what ``make`` measures now, which is kept.

    The file is in ``$XDG_CACHE_HOME/hetero_strategy/profiles`` (default ``~/.cache``). A damaged one is made again, and
    where none can be written a line in the log says so.

    Args:
        of: all that the measurement depends on, in values that JSON knows.
        read: makes of JSON's values again what ``make`` returns: dataclasses, whose fields are there by name, named
            tuples, as lists, and arrays, as lists of lists.
    """
    file = folder() / f"{digest(of)}.json"
    try:
        return read(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    measured = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(measured, part, default=_plain)
        os.replace(part.name, file)
    except OSError as error:
        _log.warning("what was measured is not kept: %s; set XDG_CACHE_HOME to a folder that can be written to", error)
    return measured


def folder() -> Path:
    """Where profiles are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero_strategy" / "profiles"


def digest(of: Mapping[str, Any]) -> str:
    """Name of what was measured of these things."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]


def seconds_of(
    model: MultimodalModel,
    device: torch.device,
    dtype: torch.dtype,
    tp: Collection[int],
    batches: Sequence[StepMetadata],
    seconds: float,
) -> dict[str, Any]:
    """What tells profiles apart: the model, the dtype and degrees, the device with its threads, about which data was
    packed, and for how long blocks were measured. How busy the machine was is not in it.
    """
    cuda, of = device.type == "cuda", structure(model)
    return {
        **of,
        "dtype": str(dtype),
        "tp": sorted({1, *tp}),
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} {_processor()}",
        "threads": None if cuda else torch.get_num_threads(),
        "data": [round(labelled_share(batches), 1), {name: _sizes(name, model, batches) for name in of["modules"]}],
        "seconds": seconds,
    }


def _sizes(name: str, model: MultimodalModel, batches: Sequence[StepMetadata]) -> list[int]:
    """Of a module's units, so coarse that other batches of the same data are mostly the same: steps of a doubling of
    all rows, up to what is packed, and of half a doubling of mean lengths.
    """
    lengths = lengths_of(name, model.modules_by_name[name], batches)
    if not len(lengths):
        return []
    rows = min(MOST_ROWS, int(lengths.sum()))
    return [round(np.log2(rows)), *(round(2 * np.log2(part.mean())) for part in thirds(lengths))]


def structure(model: MultimodalModel) -> dict[str, Any]:
    """Modules with their sizes, and the code that runs them: that of their classes and all of this package."""
    modules = {
        name: {
            "parts": [[fqn, *_part(part)] for fqn, part in module.named_modules()],
            "parameters": [[n, [*p.shape], str(p.dtype), p.requires_grad] for n, p in module.named_parameters()],
        }
        for name, module in model.modules_by_name.items()
    }
    homes = (sys.modules.get(type(part).__module__) for part in model.modules())
    files = {file for home in homes if (file := getattr(home, "__file__", None)) and Path(file).exists()}
    return {
        "modules": modules,
        "edges": [[edge.source, edge.target] for edge in model.edges],
        "code": [_package(), *(_content(file) for file in sorted(files))],
        "versions": [torch.__version__],
    }


@cache
def _package() -> str:
    """Of the files of this package."""
    files = sorted(map(str, Path(str(hetero_strategy.__file__)).parent.rglob("*.py")))
    return hashlib.sha256("".join(map(_content, files)).encode()).hexdigest()


@cache
def _content(file: str) -> str:
    """Of a file as it was when it was first asked for: so it was imported."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


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


def _plain(value: Any) -> Any:
    """Of an array or a dataclass what JSON knows."""
    return value.tolist() if isinstance(value, np.ndarray) else vars(value)


def _profiled(data: Any) -> Profiled:
    modules = {
        name: {
            int(tp): [BlockSeconds(*(Line(*line) for line in block)) for block in blocks] for tp, blocks in of.items()
        }
        for name, of in data["modules"].items()
    }
    return Profiled(modules, {name: Fit(*fit) for name, fit in data["fits"].items()})


def _activations(data: Any) -> dict[str, Activations]:
    for of in data.values():
        of["blocks"] = {way: BlockBytes(**_each(np.array, of)) for way, of in of["blocks"].items()}
        of["head"] = of["head"] and Head(**_each(lambda line: HeadBytes(*line), of["head"]))
    return {name: Activations(**of) for name, of in data.items()}


def _each(make: Callable[[list[Any]], Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of which lists are made something else."""
    return {key: make(value) if isinstance(value, list) else value for key, value in fields.items()}
