"""Head and loss by the share of labelled rows, beside whole logits (``benchmarks.head``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.table import Line
from benchmarks.head import SHARES, measure

SIZES = {"full": (16384, 128256, 2048, 5, 2.0), "tiny": (64, 256, 16, 1, 0.0)}
"""Rows, vocabulary, width, rounds, seconds to warm up."""


def check(device: torch.device, size: str) -> Iterator[Line]:
    """In bf16, with the loss in fp32."""
    rows, vocabulary, width, rounds, warm_up = SIZES[size]
    for share in SHARES:
        found = measure(
            rows, vocabulary, width, share, rounds, device=device, dtype=torch.bfloat16, warm_up=warm_up
        )  # fmt: skip
        ours, whole = found["ours"], found["whole"]
        what, note = f"{share:.0%} labelled", f"losses differ by {abs(ours['loss'] / whole['loss'] - 1):.0e}"
        yield Line(f"{what}, time", 1e3 * ours["seconds"], "ms", "whole logits", 1e3 * whole["seconds"], note=note)
        yield Line(f"{what}, peak memory", ours["peak"] / 1e6, "MB", "whole logits", whole["peak"] / 1e6, "< 1")
