"""The part of copies to the device that a step hides: the loader's Mover and its thread, against batches in place."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.common import ragged_step
from benchmarks.gpu.table import Line, Skipped
from benchmarks.measuring import seconds_in_turns
from benchmarks.training import batch_of
from hetero_strategy.loading.ahead import Ahead
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.device import Mover
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.plan.orchestrator import plan_step

SIZES = {"full": (24, 96, 4096, 8, 9), "tiny": (2, 2, 16, 2, 1)}
"""Pictures of a batch, output rows on a side of one, width of a product of matrices, steps of a turn, turns."""


class Moves(Protocol):
    """What the loader asks of a :class:`Mover`."""

    def start(self, batch: Batch) -> Any: ...

    def take(self, moving: Any) -> Batch: ...


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Of a step of about as long as its copies take."""
    if device.type != "cuda":
        raise Skipped("copies to the device need a CUDA device")
    yield from measure(device, size, Mover(device))


def measure(device: torch.device, size: str, mover: Moves) -> Iterator[Line]:
    """Steps over batches that arrive as the loader brings them, and over one that is there."""
    pictures, side, width, steps, rounds = SIZES[size]
    draws = {"vision": lambda rng, n: np.full(n, side**2)}
    metadata = ragged_step(0, pictures, draws, items=(1, 1), text=(2, 4))
    plan = plan_step(metadata, {"vision": 1, "llm": 1}, ("llm",), microbatches=1)
    batch = batch_of(plan, 64, torch.Generator().manual_seed(0))
    there = batch.to(device)
    batch = batch.pin_memory() if device.type == "cuda" else batch
    weight = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    background = Ahead("copies")

    def compute(given: Batch, repeats: int) -> None:
        inputs = given.inputs["vision"][0]
        assert isinstance(inputs, EncoderInputs)
        product = weight * inputs.values[0, 0]
        for _ in range(repeats):
            product = product @ weight

    def copies() -> None:
        for _ in range(steps):
            mover.take(mover.start(batch))

    (copying,) = seconds_in_turns({"": copies}, device, 3).values()
    seconds = statistics.median(copying) / steps
    repeats = _repeats(lambda n: compute(there, n), device, seconds)
    ways: dict[str, Callable[[], None]] = {
        "in place": lambda: _all(lambda given: compute(given, repeats), [there] * steps),
        "arriving": lambda: _all(lambda given: compute(given, repeats), _moved([batch] * steps, background, mover)),
    }
    taken = seconds_in_turns(ways, device, rounds, warm_up=3.0 if size == "full" else 0.0)
    background.close()
    delay = statistics.median(a - b for a, b in zip(taken["arriving"], taken["in place"], strict=True)) / steps
    megabytes = sum(tensor.nbytes for tensor in batch.tensors()) / 1e6
    times = [1e3 * statistics.median(taken[way]) / steps for way in ("arriving", "in place")]
    yield Line("step whose batch arrives", times[0], "ms", "batch in place", times[1], "<= 1.05")
    note = f"{megabytes:.0f} MB in {1e3 * seconds:.1f} ms; the first batch of {steps} has nothing to hide behind"
    yield Line("copies hidden", 100 * (1 - delay / seconds), "%", goal=f"{100 * (1 - 1 / steps):.0f} %", note=note)


def _repeats(compute: Callable[[int], None], device: torch.device, seconds: float) -> int:
    """How many products make a step that takes a quarter longer than its copies."""
    (taken,) = seconds_in_turns({"": lambda: compute(20)}, device, 3).values()
    return max(1, int(1.25 * seconds / (min(taken) / 20)))


def _all(compute: Callable[[Batch], None], batches: Any) -> None:
    for batch in batches:
        compute(batch)


def _moved(batches: Sequence[Batch], background: Ahead, mover: Moves) -> Iterator[Batch]:
    """As the loader does: one batch is on its way while the one before is computed."""
    moving: deque[Future[Any]] = deque()
    for batch in batches:
        moving.append(background.submit(lambda batch=batch: mover.start(batch)))  # type: ignore[misc]
        if len(moving) == 2:
            yield mover.take(moving.popleft().result())
    while moving:
        yield mover.take(moving.popleft().result())
