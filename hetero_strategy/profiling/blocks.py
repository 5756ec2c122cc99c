"""Seconds of a model's blocks, measured on the device at hand and fitted to lines.

A stage of one block runs forward and backward, whole and in two halves as the runtime splits it, on packings of the
units of real global batches. A shard of tensor parallelism is measured alone, in a world in which nobody else is: its
collectives cost nothing, and ``planner.times`` adds them. Of a module's blocks that are alike one is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.fake import fake_world
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.generator import GeneratorInputs
from hetero_strategy.model.inputs import SequenceInputs, tensors_of
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.layers import fed_by_trainable
from hetero_strategy.planner.times import NOTHING, BlockSeconds, Line, ModuleSeconds
from hetero_strategy.profiling.activations import inputs_of, trainable, unit_of
from hetero_strategy.profiling.device import T, clocked, relative_fit
from hetero_strategy.runtime import backward

MOST_ROWS = 16384
"""Of a packing."""
PARTS = (1 / 3, 1)
"""Rows of packings, of the most."""
ROUNDS = (2, 5)
"""Times that every packing is run, in turns, after one to warm up, at least and at most; the median counts, as a step
has usual ones. Where seconds are few, packings as large as microbatches tell more than more rounds of small ones.
"""
CACHES = 2**26
"""Bytes that are written before every measurement, more than most caches hold."""
SECONDS = 2.0
"""Of measuring a kind of block, about: it limits the rows of packings."""
Progress = Callable[[int, int, str], None]
"""(kinds of blocks measured, kinds to measure, what is next)."""


class Fit(NamedTuple):
    """How far a module's lines are from what was measured, as shares of it."""

    median: float
    worst: float


@dataclass(frozen=True)
class Profiled:
    """What was measured of a model on a device."""

    modules: Mapping[str, ModuleSeconds]
    fits: Mapping[str, Fit]


class _Task(NamedTuple):
    """A block that is measured for all that are like it."""

    module: str
    tp: int
    number: int
    flows: bool
    """Whether a gradient has to reach its rows."""


def profile(
    model: MultimodalModel,
    batches: Sequence[StepMetadata],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    tp: Collection[int] = (1,),
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Profiled:
    """Measure all blocks of a model, but of modules of which the batches have no unit, and of those whose inputs are
    not known, such as a backbone of your own.

    Args:
        model: as built, before anything is parallelised, in training mode; it stays as it is.
        batches: global batches, whose units are packed.
        device: where blocks run; one of them at a time has values there.
        dtype: of rows and of weights that compute.
        tp: ranks of tensor parallelism, of which each module takes those that divide it. More than 1 is measured in a
            process without a process group.
        seconds: of measuring a kind of block, about.

    Raises:
        ConfigError: ``tp`` above 1 where a process group exists.
    """
    if max(tp) > 1 and dist.is_initialized():
        raise ConfigError("profile: this process has a process group; measure tp > 1 in a process of its own")
    alike: dict[Any, _Task] = {}
    tasks: dict[_Task, Any] = {}
    for task in _tasks(model, batches, sorted({1, *tp})):
        tasks[task] = key = _sizes(model.modules_by_name[task.module], task)
        alike.setdefault(key, task)
    found: dict[Any, tuple[BlockSeconds, np.ndarray]] = {}
    for i, (key, task) in enumerate(alike.items()):
        if progress is not None:
            progress(i, len(alike), f"{task.module}, block {task.number}, tp {task.tp}")
        with fake_world(0, task.tp) if task.tp > 1 else nullcontext(), random_state_kept(device):
            measured = _Block(model.modules_by_name[task.module], task, batches, device, dtype).measured(seconds)
        found[key] = measured
    modules: dict[str, dict[int, list[BlockSeconds]]] = {task.module: {} for task in tasks}
    errors: dict[str, list[np.ndarray]] = {name: [] for name in modules}
    for task, key in tasks.items():
        modules[task.module].setdefault(task.tp, []).append(found[key][0])
        errors[task.module].append(found[key][1])
    fits = {name: Fit(*(float(f(np.concatenate(e))) for f in (np.median, np.max))) for name, e in errors.items()}
    return Profiled(modules, fits)


def _tasks(model: MultimodalModel, batches: Sequence[StepMetadata], degrees: Sequence[int]) -> Iterator[_Task]:
    fed = fed_by_trainable(*trainable(model))
    for name in fed:
        module = model.modules_by_name[name]
        if inputs_of(module, np.array([unit_of(module)])) is None or not len(lengths_of(name, module, batches)):
            continue
        for tp in degrees:
            if tp > 1 and (module.tp_plan() is None or module.tp_faults(tp)):
                continue
            below = fed[name]
            for number in range(max(1, len(module.blocks()))):
                yield _Task(name, tp, number, below)
                below = below or any(p.requires_grad for p in _stage(module, number).parameters())


def _stage(module: Adapter, number: int) -> Adapter:
    """One block, and what lies beside it at the ends; the whole module where it has no blocks."""
    fqns = list(module.blocks())
    if not fqns:
        return module
    return module.stage([fqns[number]], first=number == 0, last=number == len(fqns) - 1)


def _sizes(module: Adapter, task: _Task) -> Any:
    """What a block's seconds depend on."""
    stage = _stage(module, task.number)
    blocks = stage.blocks()
    names = {fqn: fqn.replace(f"{block}.", "block.") for block in blocks for fqn, _ in stage.named_parameters()}
    parameters = tuple(
        (names.get(fqn, fqn), tuple(p.shape), str(p.dtype), p.requires_grad) for fqn, p in stage.named_parameters()
    )
    kinds = tuple(type(block) for block in blocks.values())
    return task.module, task.tp, task.flows, stage.first_stage, stage.last_stage, kinds, parameters


class _Run(NamedTuple):
    """A packing, as a stage takes it."""

    inputs: Any
    rows: dict[Any, Tensor]
    hidden: Tensor | None


class _Block:
    """Measures one block."""

    def __init__(
        self, module: Adapter, task: _Task, batches: Sequence[StepMetadata], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.module, self.flows, self.device, self.dtype = module, task.flows, device, dtype
        self.cold = torch.empty(CACHES, dtype=torch.uint8, device=device)
        self.parts = module.row_sharding(ModuleLayout(tuple(range(task.tp)), tp=task.tp).resolved()).parts
        self.stage = self._made(task)
        self.share = labelled_share(batches)
        lengths, unit = lengths_of(task.module, module, batches), unit_of(module)
        self.lengths = -(-lengths // unit) * unit

    def _made(self, task: _Task) -> Adapter:
        """The stage alone, with values on the device."""
        original = self.module.meta_copy()
        stage: Adapter = copy.deepcopy(_stage(self.module, task.number), {id(original): original})
        stage.train()
        stage.compute_dtype = self.dtype
        if task.tp > 1:
            stage.apply_tp(init_device_mesh(self.device.type, (task.tp,), mesh_dim_names=("tp",))["tp"])
        stage.to(self.dtype).to_empty(device=self.device)
        with torch.no_grad():
            for tensor in (*stage.parameters(), *stage.buffers()):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if local.is_floating_point() or local.is_complex():
                    local.normal_(0.0, 0.02)
                else:
                    local.zero_()
        return stage

    def measured(self, budget: float) -> tuple[BlockSeconds, Float64[np.ndarray, "points"]]:
        """Lines, and how far each measured point is from them."""
        most, count = self._affordable(budget)
        packed = list(packings(self.lengths, most))
        runs = [self._run(lengths) for lengths in packed]
        rounds = [[self._seconds(run) for run in runs] for _ in range(1 + count)][1:]
        seconds = np.median(rounds, axis=0)
        given = np.array([[1.0, n.sum(), (n * n).sum()] for n in map(np.float64, packed)])
        lines, errors = zip(*(fit(given, own) for own in seconds.T), strict=True)
        return BlockSeconds(*lines), np.stack(errors)[[line != NOTHING for line in lines]].ravel()

    def _affordable(self, budget: float) -> tuple[float, int]:
        """Rows of the largest packing, and rounds."""
        rows = min(256.0, float(self.lengths.sum()))
        probe = self._run(np.resize(self.lengths, max(1, round(rows / self.lengths.mean()))))
        for _ in range(2):
            spent, _ = clocked(self.device, lambda: self._seconds(probe))
        affordable = budget / (3 * sum(PARTS)) * probe.inputs.packing.rows / spent  # in a single round
        most = min(float(MOST_ROWS), float(self.lengths.sum()), affordable / (1 + ROUNDS[0]))
        return most, max(ROUNDS[0], min(int(affordable / most) - 1, ROUNDS[1]))

    def _run(self, lengths: Int64[np.ndarray, "units"]) -> _Run:
        inputs = inputs_of(self.module, lengths)
        assert inputs is not None
        count, hidden, rows = inputs.packing.rows, None, {}
        if isinstance(inputs, SequenceInputs):
            labelled = torch.arange(count)[: max(1, round(self.share * count))]
            fed = torch.arange((count - len(labelled)) // self.parts if self.flows else 0)
            inputs = replace(inputs, labels=inputs.ids, labelled=labelled, slots={"": fed})
            rows = {"": torch.randn(len(fed), self.module.width, dtype=self.dtype)}
        elif isinstance(inputs, GeneratorInputs):
            rows = {"": torch.randn(int(inputs.rows.sum()), self.module.width, dtype=self.dtype)}
        for tensor in tensors_of(inputs):
            if tensor.is_floating_point() and tensor.numel():
                tensor.normal_()
        if not self.stage.first_stage:
            hidden, rows = torch.randn(count // self.parts, self.module.hidden_width, dtype=self.dtype), {}
        inputs = inputs.narrowed(self.dtype).to(self.device)
        return _Run(
            inputs,
            {key: value.to(self.device) for key, value in rows.items()},
            None if hidden is None else hidden.to(self.device),
        )

    def _seconds(self, run: _Run) -> tuple[float, float, float, float]:
        """Of a forward, of a whole backward, and of its halves for the rows and for the weights."""
        weights: list[Any] = [p for p in self.stage.parameters() if p.requires_grad]
        leaves = [leaf for leaf in (*run.rows.values(), run.hidden) if leaf is not None and self.flows]
        for leaf in leaves:
            leaf.requires_grad_()
            leaf.grad = None
        forward, roots = self._clocked(lambda: self._forward(run, bool(leaves or weights)))
        if not roots:
            return forward, 0.0, 0.0, 0.0
        whole, _ = self._clocked(lambda: backward.whole(roots))
        if not leaves or not weights:
            return forward, whole, *((whole, 0.0) if leaves else (0.0, whole))
        roots = self._forward(run, True)
        half, later = self._clocked(lambda: backward.inputs_first(roots, leaves, weights))
        return forward, whole, half, self._clocked(later)[0]

    def _clocked(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds of it, and what it returns; no cache holds its weights, as where other blocks ran before."""
        self.cold.zero_()
        return clocked(self.device, work)

    def _forward(self, run: _Run, differentiable: bool) -> backward.Roots:
        with torch.set_grad_enabled(differentiable):
            out: Any = self.stage(run.inputs, run.rows, run.hidden)
        out = out if isinstance(out, Tensor) else out.loss_sum
        return [(get_gradient_edge(out), torch.ones_like(out))] if out.requires_grad else []


def labelled_share(batches: Sequence[StepMetadata]) -> float:
    """Share of a language model's rows that have a label."""
    return sum(int(b.labels.sum()) for b in batches) / max(1, sum(int(b.tokens.sum()) for b in batches))


def lengths_of(name: str, module: Adapter, batches: Sequence[StepMetadata]) -> Int64[np.ndarray, "units"]:
    """Rows of each of a module's units that has any."""
    lengths = np.concatenate([b.tokens if module.kind.samplewise else b.items[name].inner_rows for b in batches])
    return lengths[lengths > 0]


def thirds(lengths: Int64[np.ndarray, "units"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The short ones, all as they come, and the long ones."""
    ascending, third = np.sort(lengths), max(1, len(lengths) // 3)
    return ascending[:third], lengths, ascending[-third:]


def packings(lengths: Int64[np.ndarray, "units"], most: float) -> Iterator[Int64[np.ndarray, "packed"]]:
    """Packings of up to ``most`` rows: of short units, of units as they come, and of long ones."""
    for given in thirds(lengths):
        for count in sorted({max(1, round(part * most / given.mean())) for part in PARTS} | {1}):
            yield np.resize(given, count)


def fit(
    given: Float64[np.ndarray, "points 3"], seconds: Float64[np.ndarray, "points"]
) -> tuple[Line, Float64[np.ndarray, "points"]]:
    """The line with the least squared relative errors, of figures that are not negative, and these errors."""
    if not seconds.any():
        return NOTHING, np.zeros(len(seconds))
    found, errors = relative_fit(given, np.maximum(seconds, 1e-9))
    return Line(*found), errors
