"""Sizes of the samples of published training sets, drawn from printed statistics: no data set is read.

A workload is metadata only (text tokens of samples, rows of items), drawn from a seed. The source of each number stands
beside it; :attr:`Workload.assumptions` lists what no source states. `conf/data` names the same workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.workloads import laion, llava, orchmllm, video
from benchmarks.workloads.workload import Workload, WorkloadItems

WORKLOADS: Mapping[str, Callable[[int, int], Workload]] = {
    **{name: partial(orchmllm.sample, name) for name in orchmllm.MODELS},
    "laion": partial(laion.sample, 512),
    "laion_1024": partial(laion.sample, 1024),
    "llava": llava.sample,
    "video_long_tail": video.sample,
}
"""Name -> function of (samples, seed)."""

__all__ = ["WORKLOADS", "Workload", "WorkloadItems"]
