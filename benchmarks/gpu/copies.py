"""The part of copies to the device that a step hides: microbatches that arrive one ahead, against some in place."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.gpu.table import Line, Skipped
from benchmarks.measuring import seconds_in_turns
from benchmarks.training import batch_of
from hetero_strategy.model.inputs import EncoderInputs, ModuleInputs
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.runtime.payload import Payload, ToCuda
from hetero_strategy.testing import ragged_step

SIZES = {"full": (24, 96, 4096, 8, 9), "tiny": (2, 2, 16, 2, 1)}
"""Pictures of a microbatch, output rows on a side of one, width of a product of matrices, microbatches, turns."""


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Compare microbatches that compute for about as long as their copies take."""
    if device.type != "cuda":
        raise Skipped("copies to the device need a CUDA device")
    yield from measure(device, size, ToCuda(device))


def measure(device: torch.device, size: str, copies: ToCuda) -> Iterator[Line]:
    """A step whose inputs arrive as the executor brings them, and one whose inputs are there."""
    pictures, side, width, microbatches, rounds = SIZES[size]
    draws = {"vision": lambda rng, n: np.full(n, side**2)}
    metadata = ragged_step(0, pictures * microbatches, draws, items=(1, 1), text=(2, 4))
    plan = plan_step(metadata, {"vision": 1, "llm": 1}, ("llm",), microbatches=microbatches)
    batch = batch_of(plan, 64, torch.Generator().manual_seed(0))
    there = batch.to(device)
    batch = batch.pin_memory() if device.type == "cuda" else batch
    weight = torch.randn(width, width, device=device, dtype=torch.bfloat16)

    def compute(inputs: ModuleInputs | None, repeats: int) -> None:
        assert isinstance(inputs, EncoderInputs)
        product = weight * inputs.values[0, 0]
        for _ in range(repeats):
            product = product @ weight

    def copy() -> None:
        for inputs in batch.inputs["vision"]:
            assert inputs is not None
            copies.finish(copies.start(inputs))

    (copying,) = seconds_in_turns({"": copy}, device, 3).values()
    seconds = statistics.median(copying) / microbatches
    repeats = _repeats(lambda n: compute(there.inputs["vision"][0], n), device, seconds)
    uses = [("vision", number) for number in range(microbatches)]

    def step(given: Payload) -> None:
        for use in uses:
            compute(given.take(use), repeats)

    ways: dict[str, Callable[[], None]] = {
        "in place": lambda: step(Payload(there.inputs, uses, None)),
        "arriving": lambda: step(Payload(batch.inputs, uses, copies)),
    }
    taken = seconds_in_turns(ways, device, rounds, warm_up=3.0 if size == "full" else 0.0)
    delay = statistics.median(a - b for a, b in zip(taken["arriving"], taken["in place"], strict=True)) / microbatches
    megabytes = sum(tensor.nbytes for tensor in batch.tensors()) / 1e6
    times = [1e3 * statistics.median(taken[way]) for way in ("arriving", "in place")]
    yield Line(
        "step whose inputs arrive", times[0], "ms", "inputs in place", times[1], f"<= {1 + 1 / microbatches:.2f}"
    )
    note = (
        f"{megabytes:.0f} MB in {1e3 * seconds * microbatches:.1f} ms; the first of {microbatches} hides behind nothing"
    )
    yield Line(
        "copies hidden", 100 * (1 - delay / seconds), "%", goal=f"{100 * (1 - 1 / microbatches):.0f} %", note=note
    )


def _repeats(compute: Callable[[int], None], device: torch.device, seconds: float) -> int:
    """How many products take a quarter longer than a microbatch's copies."""
    (taken,) = seconds_in_turns({"": lambda: compute(20)}, device, 3).values()
    return max(1, int(1.25 * seconds / (min(taken) / 20)))
