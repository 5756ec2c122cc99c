"""AdamW over sharded and plain parameters, beside the fused kernel over plain ones (``benchmarks.optimizer``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.table import Line
from benchmarks.optimizer import measure

SIZES = {"full": ((64, 1024), 300, 15, 2.0), "tiny": ((8,), 4, 1, 0.0)}
"""Sides of parameters, how many of each, rounds, seconds to warm up."""


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Many small parameters, which show the host's part, and large ones."""
    sides, count, rounds, warm_up = SIZES[size]
    for side in sides:
        found = measure(side, count, rounds, device, warm_up)
        note = f"torch's loop over DTensors {found['loop']:.1f} ms"
        what = f"AdamW, {count} of {side} x {side}"
        yield Line(what, found["ours"], "ms", "fused over plain", found["fused"], note=note)
