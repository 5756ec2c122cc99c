"""Time and memory of functions that take turns on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hetero_strategy.profiling.allocations import Allocations

CPU = torch.device("cpu")


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that ``run()`` has allocated at once, besides what was there: by torch's allocator on CUDA."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with Allocations() as allocated:
        run()
    return allocated.most


def seconds_in_turns(
    ways: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    *,
    warm_up: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call of each way, until the device has finished; the order is random in every round.

    Args:
        warm_up: seconds of turns before, and at least one of them: clocks settle after some seconds of work.
        clock: ``time.process_time`` is steadier where other programs run.
    """
    order, end = np.random.default_rng(0), time.perf_counter() + warm_up
    for run in ways.values():
        _timed(run, device)
    while time.perf_counter() < end:
        for run in ways.values():
            _timed(run, device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(rounds):
        for i in order.permutation(len(names)):
            seconds[names[i]].append(_timed(ways[names[i]], device, clock))
    return seconds


def _timed(run: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    run()
    synchronize(device)
    return clock() - begin


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
