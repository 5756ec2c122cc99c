"""Check that two packed units of a module give the same rows as each unit alone.

The layout decides which units are packed in a microbatch. A convolution, a normalisation or an attention over all
packed rows would train without an error, with a loss that depends on the layout. So before a module's first step two of
its units run together and then each alone: three small forwards without gradients, which change nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_strategy import ragged
from hetero_strategy.errors import HeteroError, ModelError
from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding, two_chunks
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.context import in_context
from hetero_strategy.model.head_exchange import HeadExchange
from hetero_strategy.model.inputs import IGNORE, ModuleInputs, Packing, SequenceInputs
from hetero_strategy.model.kind import LossOutput
from hetero_strategy.model.random_numbers import generators

STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Layers that stay in their training mode, whose behaviour is checked."""
TF32 = 2.0**-10
"""Relative rounding of fp32 matmuls and convolutions on CUDA."""
LOSS = 8
"""Factor by which a loss, a sum over many rows, may differ less than rows."""
LEAVE_OUT = "MultimodalModel(check_packing=False) leaves this check out"


def due(module: Adapter, plan: Any) -> int | None:
    """Return the first microbatch in which an instance of a module has two units; None if there is none, or the module
    has been checked. It is the same on every rank.
    """
    if module.packed_equals_alone:
        return None
    numbered = enumerate(plan.assignments[module.name])
    return next((number for number, assignment in numbered if (np.diff(assignment.offsets) > 1).any()), None)


class Pair(NamedTuple):
    """The two units of an instance with the fewest rows in a microbatch; empty if it has fewer than two."""

    module: Adapter
    places: np.ndarray
    """Indices among the instance's units, int64 ``[2]`` or ``[0]``, like the next fields."""
    units: np.ndarray
    inner_rows: np.ndarray
    edge_rows: np.ndarray
    runs: Mapping[str, Any]
    """Source -> its rows for the module's units, as :class:`~hetero_strategy.plan.step_plan.UnitRuns`."""

    @classmethod
    def of(cls, module: Adapter, plan: Any, number: int, sources: Sequence[str], instance: int = 0) -> Pair:
        """Choose the two units.

        Args:
            module: module of the units.
            plan: plan of the step.
            number: number of the microbatch, from :func:`due`.
            sources: modules from which edges lead to the module.
            instance: instance of the module.
        """
        assignment = plan.assignments[module.name][number]
        units, inner, edge = (of(instance) for of in (assignment.of, assignment.inner_rows_of, assignment.edge_rows_of))
        smallest = np.sort(np.argsort(inner[: len(units)], kind="stable")[:2])
        places = smallest if len(units) > 1 else smallest[:0]
        # Samples of text alone receive no rows, so none are made up for samples.
        runs = {} if module.kind.samplewise else {source: plan.metadata.runs(source, module.name) for source in sources}
        return cls(module, places, units[places], inner[places], edge[places], runs)

    def slots(self, members: np.ndarray) -> dict[Hashable, Tensor]:
        """Return, for each source, which rows of some of the two units, end to end, it fills."""
        filled_rows: dict[Hashable, Tensor] = {}
        for source, runs in self.runs.items():
            first = np.full(max(runs.target.max(initial=-1), self.units.max(initial=-1)) + 1, -1)
            first[self.units[members]] = ragged.starts(self.inner_rows[members])
            at = first[runs.target]
            filled = ragged.expand((at + runs.target_start)[at >= 0], runs.rows[at >= 0])
            filled_rows[source, 0] = torch.from_numpy(np.sort(filled))
        return filled_rows

    def random_rows(self, members: np.ndarray, width: int) -> Tensor:
        """Return random rows inside the module for some of the two units, the same wherever the units are packed."""
        counts = self.inner_rows.tolist()
        seeds = ((i, torch.Generator().manual_seed(i)) for i in members.tolist())
        return torch.cat([torch.zeros(0, width), *(torch.randn(counts[i], width, generator=seed) for i, seed in seeds)])


@torch.no_grad()
def check_packed_alone(
    stage: Adapter,
    inputs: ModuleInputs,
    pair: Pair,
    where: str,
    device: torch.device,
    sharding: RowSharding = REPLICATED,
    part: int = 0,
) -> None:
    """Compare a stage's rows of two packed units with its rows of each unit alone; all state is restored.

    A collective over the stage's ranks: a rank without units runs as often, on no rows. Rows of other modules and
    earlier stages are random.

    Args:
        stage: a module, or a pipeline stage of it.
        inputs: inputs of this rank in the microbatch.
        pair: two units of this rank's instance.
        where: name of the stage in messages.
        device: device of the stage.
        sharding: sharding of rows inside the module over the instance's ranks.
        part: number of this rank's part.
    """
    if "only" not in vars(type(inputs)) or (sharding.parts > 1 and not isinstance(stage, CausalLM)):
        return  # selecting units, or joining rows of ranks, is undefined
    both, count, outputs = _both(inputs, pair), len(pair.places), []
    by_heads = isinstance(inputs, SequenceInputs) and isinstance(inputs.packing.context, HeadExchange)
    assert pair.module.random_numbers is not None
    pair.module.random_numbers.stop()
    with _undisturbed(pair.module, stage):
        states = [generator.get_state() for generator in generators(device)]
        for members in (np.arange(count), np.arange(count)[:1], np.arange(count)[1:]):
            try:
                outputs.append(_run(stage, both.only(members), pair, members, device, sharding, part, by_heads))
            except Exception as error:
                if not isinstance(error, HeteroError):  # it needs no explanation
                    error.add_note(f"{where} was run on two units, to compare packed with alone; {LEAVE_OUT}")
                raise
        drew = not all(map(torch.equal, states, (generator.get_state() for generator in generators(device))))
    if drew or not count:  # random numbers other than dropout would differ anyway
        return
    rounding, dtype = _rounding(stage, device)
    bound = rounding**0.5
    differences = (
        ("a row differs", _of_rows(stage, pair, [rows for rows, _ in outputs]), bound),
        ("the loss differs from the sum of both", _of_losses([loss for _, loss in outputs]), bound / LOSS),
    )
    for what, differs, most in differences:
        if differs > most:
            raise ModelError(_message(pair, where, f"{what} by {differs:.2g} of its size, above {most:.2g} ({dtype})"))


def _message(pair: Pair, where: str, found: str) -> str:
    kind = pair.module.kind
    units = "samples" if kind.samplewise else "units" if kind.has_own_units else "items"
    return (
        f"{where}: two {units}, of {pair.inner_rows[0]} and {pair.inner_rows[1]} rows, give something else in one"
        f" microbatch than each alone: {found}. Results would depend on the layout. Likely causes: a convolution,"
        " normalisation or pooling over all packed rows; attention without packing; positions in the microbatch instead"
        f" of packing.positions. docs/your_module.md#packed-equals-alone shows how to write them; {LEAVE_OUT}"
    )


def _both(inputs: ModuleInputs, pair: Pair) -> ModuleInputs:
    """Return inputs of the two units; with context parallelism made-up ones, because no rank has all tokens."""
    if not isinstance(inputs, SequenceInputs) or inputs.packing.context is None:
        return inputs.only(pair.places)
    ids = torch.from_numpy(np.repeat(np.arange(len(pair.places)), pair.inner_rows))
    columns = {name: column.new_zeros(*column.shape[:-1], len(ids)) for name, column in inputs.columns.items()}
    return SequenceInputs(ids, torch.full_like(ids, IGNORE), Packing.of(pair.inner_rows), columns=columns)


def _run(
    stage: Adapter,
    inputs: ModuleInputs,
    pair: Pair,
    members: np.ndarray,
    device: torch.device,
    lie: RowSharding,
    part: int,
    by_heads: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Run some of the two units; return their rows, from all ranks, and their loss."""
    rows = int(pair.inner_rows[members].sum())
    total = rows - rows % -lie.parts
    order = np.arange(total) if by_heads else two_chunks(total, lie.context).reshape(-1)
    if isinstance(inputs, SequenceInputs) and total > rows:
        inputs = _filled_up(inputs, total - rows)
    if lie.context > 1:
        rank, dealt = part * lie.context // lie.parts, order.reshape(lie.context, -1)
        inputs = in_context(inputs, rank, dealt, pair.module.kind.rules, by_heads=by_heads)
    dtype = stage.compute_dtype or next((p.dtype for p in stage.parameters()), torch.float32)
    fed: dict[Hashable, Tensor] = {}
    hidden: Tensor | None = None
    if stage.first_stage:
        slots, random_rows = pair.slots(members), pair.random_rows(members, stage.width)
        inputs = replace(inputs, slots=slots)
        fed = {source: random_rows[filled].to(device, dtype) for source, filled in slots.items()}
    else:
        hidden = F.pad(pair.random_rows(members, stage.hidden_width), (0, 0, 0, total - rows))
        hidden = hidden[order.reshape(lie.parts, -1)[part]].to(device, dtype)
    inputs = inputs.to(device)
    out: Any = stage(inputs, fed, hidden)
    own, loss = (out.hidden, out.loss_sum) if isinstance(out, LossOutput) else (out, None)
    own = own if isinstance(own, Tensor) else None  # a step refuses what is neither
    if lie.parts > 1 and own is not None:
        assert isinstance(stage, CausalLM) and isinstance(inputs, SequenceInputs)
        parts = stage.whole_rows(own)
        parts = parts if inputs.packing.context is None else inputs.packing.context.gather(parts)
        own = torch.empty_like(parts).index_copy_(0, torch.from_numpy(order).to(device), parts)
    return own, loss


def _filled_up(inputs: SequenceInputs, more: int) -> SequenceInputs:
    """Append alignment rows, as a plan does."""
    ids, labels = F.pad(inputs.ids, (0, more)), F.pad(inputs.labels, (0, more), value=IGNORE)
    packing = inputs.packing.only(np.arange(len(inputs.packing.lengths)), more)
    columns = {name: F.pad(column, (0, more)) for name, column in inputs.columns.items()}
    return replace(inputs, ids=ids, labels=labels, labelled=None, packing=packing, columns=columns)


def _of_rows(stage: Adapter, pair: Pair, made: Sequence[Tensor | None]) -> float:
    """Return the largest difference of a row, packed to alone, relative to the root mean square of rows' norms."""
    lengths = (pair.edge_rows if stage.last_stage else pair.inner_rows).tolist()
    if not sum(lengths) or any(rows is None or rows.ndim != 2 for rows in made):
        return 0.0
    together, *others = (rows for rows in made if rows is not None)
    alone = torch.cat([rows[:length] for rows, length in zip(others, lengths, strict=True)])
    return row_difference(together[: len(alone)], alone)


def row_difference(rows: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a row, relative to the root mean square of the expected rows' norms.

    It is infinite if only ``rows`` is not finite, and 0 if neither is.
    """
    rows, expected = rows.double(), expected.double()
    size = expected.norm(dim=1).square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return _number((rows - expected).norm(dim=1).max() / size, size)


def _of_losses(made: Sequence[Tensor | None]) -> float:
    """Return the difference of the packed loss from the sum of both alone, relative to that sum."""
    if any(loss is None for loss in made):
        return 0.0
    together, one, other = (loss.double() for loss in made if loss is not None)
    size = (one.abs() + other.abs()).clamp(min=torch.finfo(torch.float32).tiny)
    return _number((together - one - other).abs() / size, size)


def _number(differs: Tensor, size: Tensor) -> float:
    """Return a relative difference: infinite if only the packed value is not finite, 0 if neither is."""
    difference, finite = torch.stack([differs, size]).tolist()
    return 0.0 if not isfinite(finite) else difference if isfinite(difference) else inf


def _rounding(stage: Adapter, device: torch.device) -> tuple[float, str]:
    """Return relative rounding and name of the coarsest dtype in which a stage computes."""
    dtypes = {p.dtype for p in stage.parameters() if p.is_floating_point()} | {stage.compute_dtype or torch.float64}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    roundings = [(torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")) for dtype in dtypes]
    roundings += [(TF32, "TF32")] * (device.type == "cuda" and torch.float32 in dtypes)
    return max([*roundings, *stage.roundings])


@contextmanager
def _undisturbed(module: Adapter, stage: Adapter) -> Iterator[None]:
    """Disable dropout and compilation, which takes long; restore buffers and training modes afterwards."""
    parts = {id(part): part for part in (*module.modules(), *stage.modules())}.values()
    modes = [(part, part.training) for part in parts]
    buffers = [
        (part, name, buffer, buffer._version, buffer.clone())
        for part in stage.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    eager: AbstractContextManager[Any] = nullcontext()
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        eager = torch.compiler.set_stance("force_eager")
    try:
        for part in parts:
            if not isinstance(part, STATISTICS):
                part.training = part is module or part is stage  # in evaluation a generator would draw
        with eager:
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, name, buffer, version, values in buffers:
            part._buffers[name] = buffer
            if buffer._version != version or (isinstance(part, STATISTICS) and part.training):  # undo it
                buffer.copy_(values)
