"""Utilisation from counted FLOPs, seconds and peaks. Plain arithmetic.

Model FLOPs are what the mathematics of a step needs; hardware FLOPs add the forwards that backward runs again (PaLM,
appendix B): those of recompute, and of a language model's head.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """A stretch of one module's forward that is trained or frozen as a whole."""

    forward: float
    """FLOPs of its forward."""
    trainable: bool
    recomputed: float = 0.0
    """Share of the forward that backward runs again because activations are not kept."""


@dataclass(frozen=True)
class ModuleFlops:
    """FLOPs of one module, forward and backward."""

    model: float
    hardware: float


def work(parts: Iterable[Part], upstream: bool) -> ModuleFlops:
    """Count the FLOPs of a module whose parts run one after the other.

    Backward costs a forward for the gradient of the weights and one for the gradient of the rows. A frozen part needs
    only the second, and that only if something before it is trained.

    Args:
        upstream: whether gradients have to reach the module's input rows (``planner.layers.fed_by_trainable``).
    """
    model = hardware = 0.0
    for part in parts:
        backward = 2 if part.trainable else int(upstream)
        model += part.forward * (1 + backward)
        hardware += part.forward * (1 + backward + part.recomputed * (backward > 0))
        upstream = upstream or part.trainable
    return ModuleFlops(model, hardware)


def utilization(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Share of what ``ranks`` devices of ``peak`` FLOP/s could have done: MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / (seconds * ranks * peak)


def device_peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of a CUDA device by torchtitan's table; None where it is not known, as on CPU."""
    if device.type != "cuda":
        return None
    try:
        from torchtitan.tools.utils import get_peak_flops
    except ModuleNotFoundError:
        warnings.warn(
            "no MFU: it needs torchtitan's table of peak FLOP/s (pip install 'hetero-strategy[titan]'), or"
            " ThroughputMonitor(peak_flops=...)",
            stacklevel=2,
        )
        return None
    name = torch.cuda.get_device_name(device)
    peak = float(get_peak_flops(name))
    if peak == 312e12 and "A100" not in name:  # the table answers with an A100 for what it does not know
        warnings.warn(
            f"peak FLOP/s of {name} is not known: no MFU; give ThroughputMonitor(peak_flops=...)", stacklevel=2
        )
        return None
    return peak
