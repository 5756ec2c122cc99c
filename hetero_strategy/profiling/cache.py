"""Cache of measurements on disk, keyed by all that they depend on, so that none is repeated."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hetero_strategy.disk_cache import cached, contents, package
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize.transforms import Transforms
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.profiling.activations import DTYPES, activations_of, ways_of
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
from hetero_strategy.profiling.memory import CPU, CUDA, MemoryModel
from hetero_strategy.profiling.stage_memory import Activations, BlockBytes, Head, HeadBytes
from hetero_strategy.simulator.cluster import Cluster
from hetero_strategy.simulator.cost_model import Precision
from hetero_strategy.simulator.hardware import known_device
from hetero_strategy.simulator.stage_times import BlockSeconds, Line


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
    """Measure all blocks on this machine's device, or load them, and add measured figures to the cluster.

    The figures are the optimizer's memory bandwidth and, for processors, how many cores the ranks of a node share and
    the cost of sharding, unless a process group exists, whose ranks measure those together. Blocks run on one thread,
    whose time alone counts.

    Args:
        tp: degrees of tensor parallelism; those above the ranks of a node are skipped. Remaining arguments as for
            :func:`profile`.

    Raises:
        ConfigError: this machine lacks the cluster's device; or see :func:`profile`.
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
        profiled = cached(measure, seconds_of(model, device, dtype, degrees, batches, seconds), _profiled)
        reached = with_optimizer(cluster.device, device)
        if name == "cpu" and not dist.is_initialized():
            with fake_world(0, 2):
                reached = replace(reached, sharding=sharding(init_device_mesh("cpu", (2,))))
        cluster = replace(cluster, device=reached)
    finally:
        torch.set_num_threads(threads)
    has_cores = name != "cpu" or cluster.shares_cores
    return profiled, cluster if has_cores else replace(cluster, cores_per_node=cores_of_node())


def memory_model(
    model: MultimodalModel,
    shape: ModelSpec,
    device: str,
    precision: Precision,
    transforms: Transforms = MappingProxyType({}),
    *,
    accumulates: bool = False,
) -> MemoryModel:
    """Build the predictor of the memory of steps on a kind of device, which is not needed here.

    Args:
        model: model for :func:`activations_of`, which measures it unless a measurement is cached.
        device: name of the device; all but ``cpu`` are alike.
        transforms: transforms that the user gave.
        accumulates: whether an optimizer step has several batches.
    """
    on_cpu = device == "cpu"
    dtype = DTYPES[precision.compute]
    ways = {name: ways_of(len(m.blocks()), transforms.get(name, {})) for name, m in model.modules_by_name.items()}
    changes = (each for by_label in ways.values() for way in by_label.values() for each in way)
    known = {"activations": {name: [*of] for name, of in ways.items()}, "changes": _code(map(type, changes))}
    of = {**structure(model), **known, "dtype": str(dtype)}
    activations = cached(lambda: activations_of(model, dtype, ways=ways), of, _activations)
    return MemoryModel(shape, activations, precision, CPU if on_cpu else CUDA, accumulates)


def seconds_of(
    model: MultimodalModel,
    device: torch.device,
    dtype: torch.dtype,
    tp: Collection[int],
    batches: Sequence[StepMetadata],
    seconds: float,
) -> dict[str, Any]:
    """Return the key of a profile: the model, the dtype and degrees, the device with its threads, coarse sizes of the
    packed data, and the measuring time. The load of the machine is not part of it.
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
    """Return coarse sizes of a module's units, which mostly agree for batches of the same data: steps of a doubling of
    all rows, up to the packed rows, and of half a doubling of mean lengths.
    """
    lengths = lengths_of(name, model.modules_by_name[name], batches)
    if not len(lengths):
        return []
    rows = min(MOST_ROWS, int(lengths.sum()))
    return [round(np.log2(rows)), *(round(2 * np.log2(part.mean())) for part in thirds(lengths))]


def structure(model: MultimodalModel) -> dict[str, Any]:
    """Describe the modules with their sizes, and the code that runs them: of their classes and all of this package."""
    modules = {
        name: {
            "parts": [[fqn, *_part(part)] for fqn, part in module.named_modules()],
            "parameters": [[n, [*p.shape], str(p.dtype), p.requires_grad] for n, p in module.named_parameters()],
        }
        for name, module in model.modules_by_name.items()
    }
    return {
        "modules": modules,
        "edges": [[edge.source, edge.target] for edge in model.edges],
        "code": [package(), *_code(map(type, model.modules()))],
        "versions": [torch.__version__],
    }


def _code(classes: Iterable[type]) -> list[str]:
    """Hash the files of some classes."""
    homes = (sys.modules.get(each.__module__) for each in classes)
    files = {file for home in homes if (file := getattr(home, "__file__", None)) and Path(file).exists()}
    return contents(files)


def _part(part: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return the class of a layer, and its plain values, such as its number of heads."""
    values = {key: value for key, value in vars(part).items() if isinstance(value, (bool, int, float, str))}
    return f"{type(part).__module__}.{type(part).__qualname__}", values | {"training": True}


def _processor() -> str:
    """Return the name of this machine's processor, as reported by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


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
        of["blocks"] = {name: BlockBytes(**_each(np.array, one)) for name, one in of["blocks"].items()}
        of["head"] = of["head"] and Head(**_each(lambda line: HeadBytes(*line), of["head"]))
    return {name: Activations(**of) for name, of in data.items()}


def _each(make: Callable[[list[Any]], Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields that are lists."""
    return {key: make(value) if isinstance(value, list) else value for key, value in fields.items()}
