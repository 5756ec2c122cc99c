"""Head and loss by the share of labelled rows, and AdamW over sharded and plain parameters (``benchmarks.parts``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import parts
from benchmarks.gpu.table import Line

HEADS = {"full": (16384, 128256, 2048, 5, 2.0), "tiny": (64, 256, 16, 1, 0.0)}
"""Rows, vocabulary, width, rounds, seconds to warm up."""
OPTIMIZERS = {"full": ((64, 1024), 300, 15, 2.0), "tiny": ((8,), 4, 1, 0.0)}
"""Sides of parameters, how many of each, rounds, seconds to warm up."""


def check_head(device: torch.device, size: str) -> Iterator[Line]:
    """In bf16 beside whole logits, with the loss in fp32."""
    *sizes, rounds, warm_up = HEADS[size]
    for share in parts.SHARES:
        found = parts.head(*sizes, share, rounds, device=device, dtype=torch.bfloat16, warm_up=warm_up)  # type: ignore[arg-type]
        ours, whole = found["ours"], found["whole"]
        what, note = f"{share:.0%} labelled", f"losses differ by {abs(ours['loss'] / whole['loss'] - 1):.0e}"
        yield Line(f"{what}, time", 1e3 * ours["seconds"], "ms", "whole logits", 1e3 * whole["seconds"], note=note)
        yield Line(f"{what}, peak memory", ours["peak"] / 1e6, "MB", "whole logits", whole["peak"] / 1e6, "< 1")


def check_optimizer(device: torch.device, size: str) -> Iterator[Line]:
    """Many small parameters, which show the host's part, and large ones, beside the fused kernel over plain ones."""
    sides, count, rounds, warm_up = OPTIMIZERS[size]
    for side in sides:
        found = parts.optimizer(side, count, rounds, device, warm_up)
        note = f"torch's loop over DTensors {found['loop']:.1f} ms"
        what = f"AdamW, {count} of {side} x {side}"
        yield Line(what, found["ours"], "ms", "fused over plain", found["fused"], note=note)
