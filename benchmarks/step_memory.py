"""What a training step holds in bf16-mixed, by category: precision by storage beside an autocast region.

A language model of four blocks at pp 1, 2 and 4 and sharded over 2 ranks, 8 microbatches, on gloo processes. On the
rank that holds most, the most of each that is held after any action of the step:

  masters     fp32 parameters of this rank and Adam's two moments
  gathered    weights as FSDP2 gathers them, or one rank's copies of its masters
  gradients   of the parameters, and whole ones that wait for their reduction
  copies      tensors of a weight's shape that autograd keeps for the backward and that are no weights: casts
  activations everything else that autograd keeps for the backward
  allocated   all memory of tensors that the step made, at its most: the last three, rows on their way, what a block
              needs for a moment; counted as operators make tensors and as their memory is freed
  moved       bytes that the rank gives to all-gathers in a step, and that it sends to other stages

autocast is what Lightning's own bf16-mixed does and what this strategy did: fp32 weights, cast anew in every forward,
rows between stages in fp32. Every tensor is counted once, however often it is kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.common import arguments, report, write_json
from benchmarks.counting import counted
from benchmarks.pipelines import Setting, assembled
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.copies import copies_of
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.runtime import executor as running
from tests.distributed.harness import Pool

MIXED = Storage(torch.bfloat16, torch.float32)
LAYOUTS = {
    "pp 1": ModuleLayout(ranks=(0,)),
    "pp 2": ModuleLayout(ranks=(0, 1), pp=2),
    "pp 4": ModuleLayout(ranks=(0, 1, 2, 3), pp=4),
    "dp_shard 2": ModuleLayout(ranks=(0, 1), dp_shard=2),
}


@dataclass
class Held:
    """Bytes on one rank."""

    masters: int = 0
    gathered: int = 0
    gradients: int = 0
    copies: int = 0
    activations: int = 0
    allocated: int = 0
    gathers: int = 0
    """Given to all-gathers in the step."""
    sent: int = 0

    @property
    def total(self) -> int:
        return self.masters + self.gathered + self.gradients + self.copies + self.activations


@dataclass
class _Kept:
    """What autograd keeps, by storage."""

    stages: Sequence[torch.nn.Module]
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    holders: Counter[int] = field(default_factory=Counter)
    bytes_of: dict[int, tuple[str, int]] = field(default_factory=dict)
    now: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    def weights(self) -> set[int]:
        """Storages of all weights, as they are now."""
        return {local(p).untyped_storage().data_ptr() for stage in self.stages for p in stage.parameters()}

    def pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder(self, tensor)
        key = holder.key
        self.holders[key] += 1
        if self.holders[key] == 1 and key not in self.weights():
            is_weight = tuple(tensor.shape) in self.shapes or tuple(tensor.shape[::-1]) in self.shapes
            self.bytes_of[key] = ("copies" if is_weight else "activations", tensor.untyped_storage().nbytes())
            self._add(key, 1)
        return holder

    def free(self, key: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self._add(key, -1)
            self.bytes_of.pop(key, None)

    def _add(self, key: int, sign: int) -> None:
        kind, size = self.bytes_of.get(key, ("", 0))
        self.now[kind] += sign * size
        if self.now.total() > self.most.total():
            self.most = Counter(self.now)


class _Holder:
    """A kept tensor; it is given up with the graph."""

    def __init__(self, kept: _Kept, tensor: torch.Tensor) -> None:
        self.kept, self.tensor = kept, tensor
        self.key = tensor.untyped_storage().data_ptr()

    def __del__(self) -> None:
        self.kept.free(self.key)


ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@contextmanager
def _gathers() -> Iterator[Callable[[], int]]:
    """Counts bytes given to all-gathers."""
    total, original = 0, getattr(dist, ALL_GATHER)

    def gathering(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        total += given.nbytes
        return original(output, given, *args, **kwargs)

    setattr(dist, ALL_GATHER, gathering)
    try:
        yield lambda: total
    finally:
        setattr(dist, ALL_GATHER, original)


def _sizes(stages: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes of weights that FSDP2 has gathered or that are copies of masters, and of all gradients."""
    gathered: list[torch.Tensor | None] = []
    for copies in filter(None, map(copies_of, stages)):
        gathered += copies._masters
    gradients = [p.grad for p in parameters]
    for state in (s for stage in stages if isinstance(stage, FSDPModule) for s in _states(stage)):
        for parameter in (p for group in fsdp._groups(state) for p in group.fsdp_params):
            gathered += parameter.all_gather_outputs
            whole = getattr(parameter, "_unsharded_param", None)
            gradients += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
    kinds = [[local(t).untyped_storage() for t in tensors if t is not None] for tensors in (gathered, gradients)]
    weights, sums = (sum({one.data_ptr(): one.nbytes() for one in kind}.values()) for kind in kinds)
    return weights, sums


def _states(stage: torch.nn.Module) -> Sequence[Any]:
    return fsdp._root_state(stage)._state_ctx.all_states or ()


def setting_of(layout: str, dim: int, storage: Storage) -> Setting:
    """Text alone; no microbatch has as many rows as a weight."""
    return Setting(
        layout, {"llm": LAYOUTS[layout]}, llm=(dim, 4), samples=32, microbatches=8, text=(70, 85), storage=storage
    )


def step_on_rank(rank: int, world: int, setting: Setting, autocast: bool) -> Held:
    """A step after a first one, which shapes FSDP2's memory."""
    made = assembled(setting, rank)
    batch, stages = setting.batch(0, rank), list(made.executor.stages.values())
    parameters = [owned.parameter for owned in made.owned.values()]
    original = running.RunningStep.run
    most = [0, 0]

    def run(self: running.RunningStep, action: Any) -> None:
        original(self, action)
        most[:] = map(max, most, _sizes(stages, parameters))

    running.RunningStep.run = run  # type: ignore[method-assign]
    try:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            kept = _Kept(stages, {tuple(p.shape) for s in stages for p in s.parameters() if p.dim() > 1})
            most = [0, 0]
            region: Any = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext()
            hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda h: h.tensor)
            with hooks, region, _gathers() as gathers, counted() as sent, Allocations() as allocations:
                made.executor.run(batch, train=True)
    finally:
        running.RunningStep.run = original  # type: ignore[method-assign]
    masters = 3 * sum(local(p).nbytes for p in parameters)
    return Held(masters, *most, kept.most["copies"], kept.most["activations"], allocations.most, gathers(), sent())


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """Print the table; returns its figures by layout and way."""
    parser = arguments(__doc__)
    parser.add_argument("--dim", type=int, default=256, help="width of the model")
    chosen = parser.parse_args(argv)
    begin, pool = time.perf_counter(), pool or Pool()
    table, figures = [], {}
    for name in LAYOUTS:
        for way, storage in (("autocast", FP32), ("storage", MIXED)):
            setting = setting_of(name, chosen.dim, storage)
            ranks = pool.run(setting.world, step_on_rank, setting, way == "autocast", timeout=300)
            held = max(ranks, key=lambda one: one.total)
            figures[f"{name}, {way}"] = vars(held)
            kinds = (held.masters, held.gathered, held.gradients, held.copies, held.activations, held.total)
            table.append([name, way, *(f"{x / 1e6:.2f}" for x in (*kinds, held.allocated, held.gathers, held.sent))])
    columns = ("masters", "gathered", "gradients", "copies", "activations", "all", "allocated", "all-gathers", "sent")
    notes = [f"{time.perf_counter() - begin:.0f} s"]
    report("step_memory", "MB on the rank that holds most", ("layout", "precision by", *columns), table, notes)
    write_json(chosen.json, "step_memory", "cpu", {"dim": chosen.dim}, figures)
    return figures


if __name__ == "__main__":
    main()
