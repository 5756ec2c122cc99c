"""Programs in processes of their own: the default job of ``recipes.train``, and ``benchmarks.step_overhead``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.table import Line, Skipped, script
from hetero_strategy.checkpoint import Checkpointer, describe, load
from hetero_strategy.errors import ConfigError, require

ON_CPU = 0.98
"""Share of samples that are read exactly right after the same steps on CPUs, as the README says."""
SIZES = {
    "full": [],
    "tiny": [
        "trainer.max_steps=4", "trainer.val_check_interval=2", "data.write.train=40", "data.write.val=10",
        "data.write.test=10",
    ],
}  # fmt: skip


OVERHEAD = {"full": ["--rounds", "12"], "tiny": ["--size", "tiny", "--rounds", "2", "--warmup", "1"]}


def check_overhead(device: torch.device, size: str) -> Iterator[Line]:
    """Compare with hand-written loops and with Lightning's own strategy for one device."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "overhead.json"
        options = ["--device", device.type, "--precision", "bf16-mixed", "--json", str(file)]
        script("benchmarks.step_overhead", [*options, *OVERHEAD[size]], timeout=300)
        results = json.loads(file.read_text())["results"]
    for name, found in results.items():
        times = {loop: one["step_ms"] for loop, one in found["contenders"].items()}
        note = f"{name}, {found['parameters'] / 1e6:.0f}M parameters; median ratio {found['hetero_over_fair']:.3f}"
        fair = "by hand, fused AdamW, a backward per microbatch"
        yield Line("step", times["hetero"], "ms", fair, times["fair"], "<= 1.02", note)
        yield Line("step", times["hetero"], "ms", "by hand, default AdamW, one backward", times["plain"])
        yield Line("step", times["hetero"], "ms", "Lightning, fused AdamW", times["lightning"])


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Run the job, then load its checkpoint on the CPU and back."""
    for package in ("hydra", "omegaconf", "sklearn"):
        try:
            require(package, "recipes", "recipes.train")
        except ConfigError as missing:
            raise Skipped(str(missing)) from missing
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = [
            "layout=single", f"trainer.accelerator={device.type}", "logger=none", "monitor.progress_bar=false",
            f"hydra.run.dir={run}", f"data.write.folder={folder}/data", *SIZES[size],
        ]  # fmt: skip
        script("recipes.train", options, timeout=420)
        report = json.loads((run / "report.json").read_text())
        goal = "0.03 apart" if size == "full" else ""
        note = f"{report['steps']} steps, {report['samples']} samples"
        yield Line("exact match", report["exact_match"], "", "on CPU", ON_CPU, goal, note)
        tensors, differing = round_trip(run / "checkpoints" / "last.ckpt", Path(folder) / "back", device)
        note = f"of {tensors} tensors, from {device.type} to the CPU and back"
        yield Line("tensors of its checkpoint that changed", float(differing), "", goal="0", note=note)


def round_trip(checkpoint: Path, back: Path, device: torch.device) -> tuple[int, int]:
    """Load a checkpoint on the CPU, save what was loaded, load that on the device: tensors, and those that changed."""
    stored = describe(checkpoint).tensors

    def read(path: Path, where: str | torch.device) -> dict[str, torch.Tensor]:
        made = {name: torch.empty(one.shape, dtype=one.dtype, device=where) for name, one in stored.items()}
        load(made, path)
        return made

    on_cpu = read(checkpoint, "cpu")
    Checkpointer().save(on_cpu, {}, back)
    again = read(back, device)
    changed = [name for name, one in on_cpu.items() if not torch.equal(one, again[name].cpu())]
    return len(stored), len(changed)
