"""What the items of published training sets are like, from printed statistics: no data set is read.

A workload is metadata only (text tokens of samples, rows of items), drawn from a seed. Sources of its numbers stand
beside them; whatever no source prints is in :attr:`Workload.assumptions`. `conf/data` names workloads too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from recipes.workloads import cornstarch, laion, llava, orchmllm
from recipes.workloads.workload import Workload, WorkloadItems

WORKLOADS: Mapping[str, Callable[[int, int], Workload]] = {
    **{name: partial(orchmllm.sample, name) for name in orchmllm.MODELS},
    "laion": partial(laion.sample, 512),
    "laion_1024": partial(laion.sample, 1024),
    "llava": llava.sample,
    "cornstarch": cornstarch.sample,
}
"""Name -> (samples, seed) -> workload."""

__all__ = ["WORKLOADS", "Workload", "WorkloadItems"]
