"""An encoder on the stream of lower priority, beside a language model that waits after every block as for a collective.

A wait is a kernel that turns on one multiprocessor, as a collective's does while its peers are late: one GPU has no
peer. Kernels are placed by torch's profiler.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.chunks import block
from benchmarks.gpu.step import SIZES, batches_of
from benchmarks.gpu.table import Line, Skipped
from benchmarks.measuring import seconds_in_turns
from benchmarks.tp_overlap import backward
from benchmarks.training import MERGE, PATCH
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import Packing
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.runtime.side_stream import SideStream, prefer_others
from hetero_strategy.zoo import siglip2_encoder

WIDTH, HEADS, ROWS, BLOCKS = 2048, 16, 8192, 6
WAIT = 2.0
"""Milliseconds after each block."""
AHEAD = 200.0
"""Milliseconds that the host is given to launch what is measured."""


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Both on one stream, and each on its own; how long the encoder computes while the language model waits."""
    if device.type != "cuda":
        raise Skipped("streams need a CUDA device")
    before = torch.cuda.current_stream(device)
    prefer_others(device)
    try:
        yield from _compared(device, size)
    finally:
        torch.cuda.set_stream(before)


def _compared(device: torch.device, size: str) -> Iterator[Line]:
    llm, encoder = block(WIDTH, HEADS, 0, None, device), _encoder(device, size)
    packing = Packing.of(np.array([ROWS // 2, ROWS // 2])).to(device)
    rows = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    cycles, side = _cycles(device), SideStream(device, {"vision"})

    def step(around: Callable[[], AbstractContextManager[Any]]) -> None:
        side.fork()
        for _ in range(BLOCKS):
            backward(llm, rows, packing)
            torch.cuda._sleep(cycles)
            with around():
                encoder()
        side.join()

    beside = partial(step, partial(side.using, "vision"))
    taken = _in_turns({"after": partial(step, nullcontext), "beside": beside}, cycles)
    times = {name: statistics.median(each) for name, each in taken.items()}
    waits, covered = _covered(beside, cycles)
    note = f"{BLOCKS} waits of {WAIT} ms"
    yield Line("step", times["beside"], "ms", "one stream", times["after"], "< 1", note)
    hidden = 100 * (times["after"] - times["beside"]) / (BLOCKS * WAIT)
    yield Line("waits hidden", hidden, "%", goal="100 %")
    yield Line("waits with encoder kernels", 100 * covered / waits, "%", goal="100 %", note="by the profiler's trace")


def _encoder(device: torch.device, size: str) -> Callable[[], None]:
    """Forward and backward of one block over a microbatch's pictures."""
    given = SIZES[size]
    fields = {**given.vision, "num_hidden_layers": 1}
    whole = siglip2_encoder(out_width=WIDTH, merge=MERGE, patch_size=PATCH, num_channels=3, **fields)
    module = parallelize("vision", whole, ModuleLayout(1).resolved(), None, device, seed=0)[0]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    module.compute_dtype = torch.bfloat16
    pictures = batches_of(given, alone=False, count=1)[0].inputs["vision"][0].to(device)

    def run() -> None:
        out = module(pictures)
        out.backward(torch.ones_like(out))
        module.zero_grad(set_to_none=True)

    return run


def _cycles(device: torch.device) -> int:
    """Of the clock, for :data:`WAIT`."""
    many = 20_000_000
    (taken,) = seconds_in_turns({"": lambda: torch.cuda._sleep(many)}, device, 5).values()
    return int(many * WAIT / (1e3 * statistics.median(taken)))


def _in_turns(ways: Mapping[str, Callable[[], None]], cycles: int, rounds: int = 9) -> dict[str, list[float]]:
    """Milliseconds of each turn by the device's clock, which begins when the host is ahead of it."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, run in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(cycles / WAIT * AHEAD))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                taken[name].append(begin.elapsed_time(end))
    return taken


def _covered(run: Callable[[], None], cycles: int) -> tuple[float, float]:
    """Time of all waits, and the part of it during which kernels of another stream run."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(int(cycles / WAIT * AHEAD))
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    waits = sorted((event for event in events if "spin" in event["name"]), key=lambda event: event["ts"])[1:]
    streams = {event["args"]["stream"] for event in waits}
    others = [event for event in events if event["args"]["stream"] not in streams]
    total = sum(event["dur"] for event in waits)
    beside = sum(
        max(0.0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"])) for a in waits for b in others
    )
    return total, beside
