"""What a model costs on a cluster of devices like the one at hand: blocks, the optimizer, cores that ranks share."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from hetero_strategy.errors import ConfigError
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.profiling.blocks import SECONDS, Profiled, Progress, profile
from hetero_strategy.profiling.cache import cached
from hetero_strategy.profiling.device import with_optimizer


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

    That is the memory bandwidth of the optimizer and, of processors, how many cores the ranks of a node share. On
    processors blocks run on one thread, whose time alone is counted.

    Args:
        tp: of which those count that a node has ranks for; the rest as for :func:`profile`.

    Raises:
        ConfigError: the cluster's device is not here; or see :func:`profile`.
    """
    name = cluster.device.name
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "none but processor cores"
    if name != "cpu" and name not in here.lower().replace(" ", ""):
        raise ConfigError(
            f"profile: blocks are measured on the cluster's own device, {name}, and this machine has {here}; run this"
            " there, or leave profile out"
        )
    device = torch.device("cpu" if name == "cpu" else "cuda")
    degrees = [n for n in tp if n <= cluster.ranks_per_node]
    with _one_thread() if name == "cpu" else nullcontext():
        found = cached(
            lambda: profile(model, batches, device, dtype, tp=degrees, seconds=seconds, progress=progress),
            model, device, dtype, degrees,
        )  # fmt: skip
        cluster = cluster.changed(device=with_optimizer(cluster.device, device))
    return found, cluster.changed(cores_per_node=os.cpu_count()) if name == "cpu" else cluster


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
