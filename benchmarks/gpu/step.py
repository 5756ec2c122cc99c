"""A training step in bf16-mixed on one device, beside loops without this package.

Models with their optimizers fill the device, so contenders do not live side by side: they come one after the other,
twice, in random order, and each is given some seconds before it is measured.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.loops import by_hand, of_titan
from benchmarks.gpu.table import Line
from benchmarks.training import MERGE, PATCH, batch_of, with_trainer
from benchmarks.turns import Contender
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import EncoderInputs, MultimodalModel, SequenceInputs, materialize
from hetero_strategy.monitor.throughput import device_peak_flops, utilization
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.testing import ragged_step
from hetero_strategy.zoo import siglip2_encoder, titan_llama

Train = Callable[[Any], None]


@dataclass(frozen=True)
class Size:
    """Models and batches; every sequence of the LLM alone is ``length`` tokens long."""

    llm: Mapping[str, int]
    vision: Mapping[str, int]
    samples: int
    cells: tuple[int, int]
    """Fewest and most output rows on a side of a picture."""
    text: tuple[int, int]
    length: int
    microbatches: int
    warm_up: int
    """Steps."""
    steps: int
    """That are measured in a visit."""
    visits: int


SIZES = {
    # About 16 thousand rows in a microbatch, some 60 GB in all. The LLM has 1.1B parameters, the encoder 0.4B.
    "full": Size(
        {"vocab_size": 32000, "dim": 2048, "n_layers": 18, "n_heads": 16, "n_kv_heads": 16, "max_seq_len": 8192},
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
         "num_patches": 256},
        samples=24, cells=(8, 12), text=(200, 2200), length=4096, microbatches=2, warm_up=5, steps=8, visits=2,
    ),
    "tiny": Size(
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "max_seq_len": 64},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_patches": 16},
        samples=4, cells=(1, 2), text=(4, 16), length=16, microbatches=2, warm_up=1, steps=1, visits=1,
    ),
}  # fmt: skip
SIZES["quick"] = replace(SIZES["full"], warm_up=4, steps=6, visits=1)


@dataclass
class Visit:
    """Figures of one contender while it had the device."""

    seconds: float
    """Of a step."""
    peak: int | None
    """Bytes allocated at most in a step; None on CPU."""
    compiled: int
    """Graphs that were compiled while it was measured."""
    launches: int | None
    """Kernels launched in a step; None on CPU."""
    offender: str
    """What waits for the device in a step, the first of it; empty: nothing does, or nobody can know (CPU)."""


def model_of(size: Size, *, alone: bool) -> MultimodalModel:
    """The LLM, with its encoder or alone."""
    modules: dict[str, Any] = {"llm": titan_llama(**size.llm)}
    if not alone:
        encoder = siglip2_encoder(
            out_width=size.llm["dim"], merge=MERGE, patch_size=PATCH, num_channels=3, **size.vision
        )  # fmt: skip
        modules = {"vision": encoder, **modules}
    return MultimodalModel(modules, seed=7)


def batches_of(size: Size, *, alone: bool, count: int = 2) -> list[Batch]:
    """Ragged batches of pictures and text; alone: as many tokens in sequences of one length."""
    made = []
    for seed in range(count):
        draws = {"vision": lambda rng, n: rng.integers(size.cells[0], size.cells[1] + 1, n) ** 2}
        metadata = ragged_step(seed, size.samples, draws, items=(1, 2), text=size.text)
        if alone:
            samples = max(1, int(metadata.tokens.sum()) // size.length // size.microbatches) * size.microbatches
            tokens = np.full(samples, size.length)
            metadata = StepMetadata(0, 0, np.arange(samples), tokens, tokens - 1, {})
        modules = ("llm",) if alone else ("vision", "llm")
        plan = plan_step(metadata, dict.fromkeys(modules, 1), ("llm",), microbatches=size.microbatches)
        made.append(batch_of(plan, size.llm["vocab_size"], torch.Generator().manual_seed(seed)))
    return made


def hetero(
    make_model: Callable[[], MultimodalModel], device: torch.device, losses: list[Any], backend: str | None
) -> Train:
    """The Trainer with HeteroStrategy, every module on this device; with a ``backend`` blocks are compiled by it."""
    with torch.device("meta"):
        names = list(make_model().modules_by_name)
    layouts = {name: ModuleLayout(ranks=(0,)) for name in names}
    transforms = {name: {"compile": backend} for name in names}
    return with_trainer(
        lambda: HeteroStrategy(layouts, transforms=transforms), make_model, device.type, "bf16-mixed", losses
    )


def visit(name: str, train: Train, batches: Sequence[Batch], size: Size, device: torch.device) -> Visit:
    """Let a contender take its steps, then look into two more."""
    cuda = device.type == "cuda"
    torch._dynamo.reset()
    contender = Contender(name, train, batches, size.warm_up + size.steps + 3)
    contender.advance(0)
    contender.advance(size.warm_up)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = counters["stats"]["unique_graphs"]
    block = contender.advance(size.steps)
    assert block is not None
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    compiled = counters["stats"]["unique_graphs"] - before
    calls: Counter[str] = Counter()
    contender.around = partial(_counting, calls, cuda)
    contender.advance(1)
    launches = sum(n for call, n in calls.items() if "LaunchKernel" in call) if cuda else None
    offender = ""
    contender.around = partial(_no_waiting, cuda)
    try:
        contender.advance(1)
        contender.around = nullcontext
        contender.finish()
    except RuntimeError as error:
        if "synchroniz" not in str(error.__cause__):
            raise
        offender = _place(error.__cause__)
    finally:
        _let_wait(cuda, True)
    del contender
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return Visit(block.wall, peak, compiled, launches, offender)


def _profiler(cuda: bool) -> profile:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])


@contextmanager
def _counting(calls: Counter[str], cuda: bool) -> Iterator[None]:
    with _profiler(cuda) as profiler:
        yield
        if cuda:
            torch.cuda.synchronize()
    calls.update(event.name for event in profiler.events() or ())


@contextmanager
def _no_waiting(cuda: bool) -> Iterator[None]:
    _let_wait(cuda, False)
    yield
    _let_wait(cuda, True)


def _let_wait(cuda: bool, allowed: bool) -> None:
    if cuda:
        torch.cuda.set_sync_debug_mode("default" if allowed else "error")


def _place(error: BaseException | None) -> str:
    """The innermost frame outside of torch."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    outside = [frame for frame in frames if "torch" not in Path(frame.filename).parts] or list(frames)
    return f"{outside[-1].filename}:{outside[-1].lineno} {outside[-1].line}"


@contextmanager
def values_made_once() -> Iterator[None]:
    """First values of a block are copies of those of the first one like it: on the CPU all take longer than steps."""
    make, made = materialize._initialized, dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]]()

    def copied(
        name: str, adapter: Any, seed: int, prefix: str, fqns: list[str], elsewhere: Collection[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        key = (name, type(adapter), seed, *(fqn.removeprefix(prefix) for fqn in fqns))
        if key not in made:
            values = make(name, adapter, seed, prefix, fqns, elsewhere)
            made[key] = [(fqn.removeprefix(prefix), value) for fqn, value in values]
        return ((prefix + rest, value.clone()) for rest, value in made[key])

    materialize._initialized = copied
    try:
        yield
    finally:
        materialize._initialized = make


def visits(
    trains: Mapping[str, Train], batches: Sequence[Batch], size: Size, device: torch.device
) -> dict[str, list[Visit]]:
    """Visit all contenders, in a new random order each time."""
    with _profiler(device.type == "cuda"):
        pass  # the first one has to be in the main thread
    order, names = np.random.default_rng(0), list(trains)
    made: dict[str, list[Visit]] = {name: [] for name in names}
    for _ in range(size.visits):
        for i in order.permutation(len(names)):
            began = time.perf_counter()
            made[names[i]].append(visit(names[i], trains[names[i]], batches, size, device))
            taken, step = time.perf_counter() - began, made[names[i]][-1].seconds
            print(f"{names[i]}: {1e3 * step:.0f} ms a step, {taken:.0f} s in all", file=sys.stderr, flush=True)
    return made


@dataclass(frozen=True)
class Work:
    """A step's work, in the mean over the batches."""

    parameters: int
    tokens: float
    flops: float
    """Model FLOPs, forward and backward."""

    @staticmethod
    def of(size: Size, batches: Sequence[Batch], *, alone: bool) -> Work:
        """Counted by the package, as its ThroughputMonitor does."""
        with torch.device("meta"):
            model = model_of(size, alone=alone)
        forward = [
            float(model.modules_by_name[name].flops(inputs.packing.lengths))
            for batch in batches
            for name, made in batch.inputs.items()
            for inputs in made
            if isinstance(inputs, (EncoderInputs, SequenceInputs))
        ]
        tokens = float(np.mean([b.plan.metadata.tokens.sum() for b in batches]))
        return Work(sum(p.numel() for p in model.parameters()), tokens, 3 * sum(forward) / len(batches))


def lines_of(
    how: str, ours: Sequence[Visit], theirs: Sequence[Visit], peer: str, goal: str, work: Work, device: torch.device
) -> Iterator[Line]:
    """The figures of one way to run, beside its peer's."""
    seconds = [statistics.median(v.seconds for v in each) for each in (ours, theirs)]
    speeds = [work.tokens / s for s in seconds]
    note = f"{work.parameters / 1e6:.0f}M parameters, {work.tokens:.0f} tokens, step {1e3 * seconds[0]:.0f} ms"
    yield Line(f"{how}: tokens per second", speeds[0], "1/s", peer, speeds[1], goal, note)
    peak = device_peak_flops(device)
    mfu = [None if peak is None else 100 * utilization(work.flops, s, 1, peak) for s in seconds]
    no_cuda = "" if device.type == "cuda" else "it needs a CUDA device"
    yield Line(f"{how}: MFU", mfu[0], "%", peer, mfu[1], "at least 45 %", no_cuda)
    peaks = [None if each[0].peak is None else max(v.peak or 0 for v in each) / 2**30 for each in (ours, theirs)]
    yield Line(f"{how}: peak memory", peaks[0], "GiB", peer, peaks[1], "<= 1.05", no_cuda)
    yield Line(f"{how}: launches", ours[-1].launches, "a step", peer, theirs[-1].launches, note=no_cuda)
    syncs = None if no_cuda else float(bool(ours[-1].offender))
    yield Line(f"{how}: waits for the device", syncs, "a step", goal="0", note=no_cuda or ours[-1].offender)
    yield Line(f"{how}: recompilations", float(max(v.compiled for v in ours)), "", goal="0")


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Compare encoder and LLM with loops by hand over the same modules, eager and compiled.

    The peer keeps bf16 weights beside fp32 masters, as one device needs no more. FSDP2 over a group of one, which few
    would use there, is a second peer of the compiled step.

    Raises:
        RuntimeError: their losses differ: then the times compare different work.
    """
    yield from _compared(SIZES[size], device, alone=False)


def check_llm(device: torch.device, size: str) -> Iterator[Line]:
    """Compare the LLM alone with torchtitan's own Transformer over as many tokens, held as in :func:`check`."""
    yield from _compared(SIZES[size], device, alone=True)


def _compared(size: Size, device: torch.device, *, alone: bool) -> Iterator[Line]:
    batches = batches_of(size, alone=alone)
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    work, make_model = Work.of(size, batches, alone=alone), partial(model_of, size, alone=alone)
    peer, goal = ("torchtitan", ">= 0.95") if alone else ("by hand", ">= 0.98")
    losses: dict[str, list[Any]] = {}
    trains: dict[str, Train] = {}
    ways = {"eager": None, "compiled": "inductor" if device.type == "cuda" else "eager"}  # which only traces
    for how, by in ways.items():
        trains[how] = hetero(make_model, device, losses.setdefault(how, []), by)
        for whose in _peers(peer, how):
            name, fsdp = f"{whose}, {how}", whose != peer
            trains[name] = (
                of_titan(make_model, device, size.length, backend=by, fsdp=fsdp)
                if alone
                else by_hand(make_model, device, losses.setdefault(name, []), backend=by, fsdp=fsdp)
            )
    with values_made_once():
        made = visits(trains, batches, size, device)
    for how in ways:
        for whose in _peers(peer, how):
            if not alone:
                _same_work(losses[how], losses[f"{whose}, {how}"])
            label = how if whose == peer else f"{how}, beside FSDP2"
            yield from lines_of(label, made[how], made[f"{whose}, {how}"], whose, goal, work, device)
    for whose, names in (("ours", ways), (peer, [f"{peer}, {how}" for how in ways])):
        eager, compiled = (work.tokens / statistics.median(v.seconds for v in made[name]) for name in names)
        yield Line(f"compiled blocks of {whose}: tokens per second", compiled, "1/s", "eager ones", eager)


def _peers(peer: str, how: str) -> tuple[str, ...]:
    """Return the peer, and for compiled steps its form in FSDP2."""
    return (peer, f"{peer} in FSDP2 over a group of one") if how == "compiled" else (peer,)


def _same_work(ours: Sequence[Any], theirs: Sequence[Any], count: int = 3) -> None:
    """Compare the losses of the first steps."""
    for one, other in zip(ours[:count], theirs[:count], strict=True):
        if not abs(float(one) / float(other) - 1) < 0.01:
            raise RuntimeError(f"losses {float(one):.4f} and {float(other):.4f}: the loops did not do the same work")
