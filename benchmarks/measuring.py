"""Time and memory of functions that take turns on one device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    self._known[storage] = None
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._free, storage.nbytes())
        return made

    def _free(self, size: int) -> None:
        self.now -= size


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that ``run()`` has allocated at once, besides what was there: by torch's allocator on CUDA."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with Allocated() as allocated:
        run()
    return allocated.most


def seconds_in_turns(
    ways: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, *, warm_up: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of every call of each way, until the device has finished; the order is random in every round.

    Args:
        warm_up: seconds of turns before, and at least one of them: clocks settle after some seconds of work.
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
            seconds[names[i]].append(_timed(ways[names[i]], device))
    return seconds


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
