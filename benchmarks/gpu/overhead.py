"""What HeteroStrategy adds where it has nothing to do: ``benchmarks.step_overhead``, as a process of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.table import Line, script

SIZES = {"full": ["--rounds", "12"], "tiny": ["--size", "tiny", "--rounds", "2", "--warmup", "1"]}


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Compare with hand-written loops and with Lightning's own strategy for one device."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "overhead.json"
        options = ["--device", device.type, "--precision", "bf16-mixed", "--json", str(file)]
        script("benchmarks.step_overhead", [*options, *SIZES[size]], timeout=300)
        results = json.loads(file.read_text())["results"]
    for name, found in results.items():
        times = {loop: one["step_ms"] for loop, one in found["contenders"].items()}
        note = f"{name}, {found['parameters'] / 1e6:.0f}M parameters; median ratio {found['hetero_over_fair']:.3f}"
        fair = "by hand, fused AdamW, a backward per microbatch"
        yield Line("step", times["hetero"], "ms", fair, times["fair"], "<= 1.02", note)
        yield Line("step", times["hetero"], "ms", "by hand, default AdamW, one backward", times["plain"])
        yield Line("step", times["hetero"], "ms", "Lightning, fused AdamW", times["lightning"])
