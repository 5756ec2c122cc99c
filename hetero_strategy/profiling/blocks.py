"""Seconds of a model's blocks, measured on the device at hand and fitted to lines.

A stage of one block runs forward and backward, whole and in two halves as the runtime splits it, on packings of the
units of real global batches. A tensor-parallel shard is measured in a world without other processes: its collectives
cost nothing, and ``simulator.cost_model`` adds them. Of a module's equal blocks only one is measured.
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
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.inputs import SequenceInputs, tensors_of
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.model.read_spec import causal_squares, spec_of
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.profiling.device import T, clocked
from hetero_strategy.runtime import backward
from hetero_strategy.simulator.fit_lines import fit
from hetero_strategy.simulator.stage_times import NOTHING, BlockSeconds, ModuleSeconds

MOST_ROWS = 16384
"""Most rows of a packing."""
PARTS = (1 / 3, 1)
"""Rows of packings, as shares of the most."""
ROUNDS = (2, 5)
"""Fewest and most timed runs of every packing, in turns, after one to warm up. The median counts, since a step is made
of usual runs. If time is short, packings as large as microbatches tell more than further rounds of small ones.
"""
CACHES = 2**26
"""Bytes written before every measurement, more than most caches hold."""
SECONDS = 2.0
"""Seconds to spend on measuring a kind of block, about; limits the rows of packings."""
Progress = Callable[[int, int, str], None]
"""(kinds of blocks measured, kinds to measure, name of the next)."""


class Fit(NamedTuple):
    """The relative errors of a module's lines against its measurements."""

    median: float
    worst: float


@dataclass(frozen=True)
class Profiled:
    """The measured seconds of a model's blocks on a device, and the errors of the fits."""

    modules: Mapping[str, ModuleSeconds]
    fits: Mapping[str, Fit]


class _Task(NamedTuple):
    """A block that is measured for all equal blocks."""

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
    """Measure all blocks of a model, except of modules without units in the batches, and of modules with unknown
    inputs, such as a user's own backbone.

    Args:
        model: model as built, before anything is parallelised, in training mode; it is not changed.
        batches: global batches, whose units are packed.
        device: device on which blocks run; one block at a time has values there.
        dtype: data type of rows and of weights that compute.
        tp: degrees of tensor parallelism; each module uses those that divide it. Measuring more than 1 needs a process
            without a process group.
        seconds: time to spend on measuring a kind of block, about.

    Raises:
        ConfigError: ``tp`` is above 1 and a process group exists.
    """
    if max(tp) > 1 and dist.is_initialized():
        raise ConfigError("profile: this process has a process group; measure tp > 1 in a process of its own")
    firsts: dict[Any, _Task] = {}
    tasks: dict[_Task, Any] = {}
    for task in _tasks(model, batches, sorted({1, *tp})):
        tasks[task] = key = _sizes(model.modules_by_name[task.module], task)
        firsts.setdefault(key, task)
    measurements: dict[Any, tuple[BlockSeconds, np.ndarray]] = {}
    for i, (key, task) in enumerate(firsts.items()):
        if progress is not None:
            progress(i, len(firsts), f"{task.module}, block {task.number}, tp {task.tp}")
        with fake_world(0, task.tp) if task.tp > 1 else nullcontext(), random_state_kept(device):
            measured = _Block(model.modules_by_name[task.module], task, batches, device, dtype).measured(seconds)
        measurements[key] = measured
    modules: dict[str, dict[int, list[BlockSeconds]]] = {task.module: {} for task in tasks}
    errors: dict[str, list[np.ndarray]] = {name: [] for name in modules}
    for task, key in tasks.items():
        modules[task.module].setdefault(task.tp, []).append(measurements[key][0])
        errors[task.module].append(measurements[key][1])
    fits = {name: Fit(*(float(f(np.concatenate(e))) for f in (np.median, np.max))) for name, e in errors.items()}
    return Profiled(modules, fits)


def _tasks(model: MultimodalModel, batches: Sequence[StepMetadata], degrees: Sequence[int]) -> Iterator[_Task]:
    fed = spec_of(model).fed_by_trainable()
    for name in fed:
        module = model.modules_by_name[name]
        if module.example(np.array([module.example_unit])) is None or not len(lengths_of(name, module, batches)):
            continue
        for tp in degrees:
            if tp > 1 and (module.tp_plan() is None or module.tp_faults(tp)):
                continue
            below = fed[name]
            for number in range(max(1, len(module.blocks()))):
                yield _Task(name, tp, number, below)
                below = below or any(p.requires_grad for p in _stage(module, number).parameters())


def _stage(module: Adapter, number: int) -> Adapter:
    """Return one block with the layers around it at the ends, or the whole module if it has no blocks."""
    fqns = list(module.blocks())
    if not fqns:
        return module
    return module.stage([fqns[number]], first=number == 0, last=number == len(fqns) - 1)


def _sizes(module: Adapter, task: _Task) -> Any:
    """Return a key of all that a block's seconds depend on."""
    stage = _stage(module, task.number)
    blocks = stage.blocks()
    names = {fqn: fqn.replace(f"{block}.", "block.") for block in blocks for fqn, _ in stage.named_parameters()}
    parameters = tuple(
        (names.get(fqn, fqn), tuple(p.shape), str(p.dtype), p.requires_grad) for fqn, p in stage.named_parameters()
    )
    kinds = tuple(type(block) for block in blocks.values())
    return task.module, task.tp, task.flows, stage.first_stage, stage.last_stage, kinds, parameters


class _Run(NamedTuple):
    """A packing as inputs of a stage."""

    inputs: Any
    rows: dict[Any, Tensor]
    hidden: Tensor | None


class _Block:
    """A measurement of one block."""

    def __init__(
        self, module: Adapter, task: _Task, batches: Sequence[StepMetadata], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.module, self.flows, self.device, self.dtype = module, task.flows, device, dtype
        self.cold = torch.empty(CACHES, dtype=torch.uint8, device=device)
        self.parts = module.row_sharding(ModuleLayout(tuple(range(task.tp)), tp=task.tp).resolved()).parts
        self.stage = self._made(task)
        self.share = labelled_share(batches)
        lengths, unit = lengths_of(task.module, module, batches), module.example_unit
        self.lengths = -(-lengths // unit) * unit

    def _made(self, task: _Task) -> Adapter:
        """Make the stage alone, with values on the device."""
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
        """Return the fitted lines, and the relative error of each measured point."""
        most, count = self._affordable(budget)
        packed = list(packings(self.lengths, most))
        runs = [self._run(lengths) for lengths in packed]
        rounds = [[self._seconds(run) for run in runs] for _ in range(1 + count)][1:]
        seconds = np.median(rounds, axis=0)
        terms = np.array([[1.0, n.sum(), causal_squares(self.stage, [len(self.stage.blocks())], n)[0]] for n in packed])
        lines, errors = zip(*(fit(terms, own) for own in seconds.T), strict=True)
        return BlockSeconds(*lines), np.stack(errors)[[line != NOTHING for line in lines]].ravel()

    def _affordable(self, budget: float) -> tuple[float, int]:
        """Return the rows of the largest packing, and the number of rounds."""
        rows = min(256.0, float(self.lengths.sum()))
        probe = self._run(np.resize(self.lengths, max(1, round(rows / self.lengths.mean()))))
        for _ in range(2):
            spent, _ = clocked(self.device, lambda: self._seconds(probe))
        affordable = budget / (3 * sum(PARTS)) * probe.inputs.packing.rows / spent  # in a single round
        most = min(float(MOST_ROWS), float(self.lengths.sum()), affordable / (1 + ROUNDS[0]))
        return most, max(ROUNDS[0], min(int(affordable / most) - 1, ROUNDS[1]))

    def _run(self, lengths: Int64[np.ndarray, "units"]) -> _Run:
        inputs = self.module.example(lengths)
        assert inputs is not None
        count, hidden, rows = inputs.packing.rows, None, {}
        if isinstance(inputs, SequenceInputs):
            labelled = torch.arange(count)[: max(1, round(self.share * count))]
            fed = torch.arange((count - len(labelled)) // self.parts if self.flows else 0)
            inputs = replace(inputs, labels=inputs.ids, labelled=labelled, slots={"": fed})
        slots = getattr(inputs, "slots", {})
        rows = {key: torch.randn(len(at), self.module.width, dtype=self.dtype) for key, at in slots.items()}
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
        """Time a forward, a whole backward, and its halves for the rows and for the weights."""
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
        """Time some work and return its result, with cold caches, as if other blocks had run before."""
        self.cold.zero_()
        return clocked(self.device, work)

    def _forward(self, run: _Run, differentiable: bool) -> backward.Roots:
        with torch.set_grad_enabled(differentiable):
            out: Any = self.stage(run.inputs, run.rows, run.hidden)
        out = out if isinstance(out, Tensor) else out.loss_sum
        return [(get_gradient_edge(out), torch.ones_like(out))] if out.requires_grad else []


def labelled_share(batches: Sequence[StepMetadata]) -> float:
    """Return the share of a language model's rows that have a label."""
    return sum(int(b.labels.sum()) for b in batches) / max(1, sum(int(b.tokens.sum()) for b in batches))


def lengths_of(name: str, module: Adapter, batches: Sequence[StepMetadata]) -> Int64[np.ndarray, "units"]:
    """Return the rows of each of a module's units that has any."""
    lengths = np.concatenate([b.tokens if module.kind.samplewise else b.items[name].inner_rows for b in batches])
    return lengths[lengths > 0]


def thirds(lengths: Int64[np.ndarray, "units"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the shortest third, all units in their order, and the longest third."""
    ascending, third = np.sort(lengths), max(1, len(lengths) // 3)
    return ascending[:third], lengths, ascending[-third:]


def packings(lengths: Int64[np.ndarray, "units"], most: float) -> Iterator[Int64[np.ndarray, "packed"]]:
    """Yield packings of up to ``most`` rows: of short units, of units in their order, and of long ones."""
    for units in thirds(lengths):
        for count in sorted({max(1, round(part * most / units.mean())) for part in PARTS} | {1}):
            yield np.resize(units, count)
