"""A backbone around any transformers tower, alone or in a composite model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from hetero_strategy.errors import ModelError, check_sizes
from hetero_strategy.model.adapter import block_linear_flops, previous_rows
from hetero_strategy.model.attention import attention_pairs
from hetero_strategy.model.encoder import Backbone
from hetero_strategy.model.inputs import EncoderInputs, runs_of
from hetero_strategy.zoo.hf import HFAdapter, RowsOfColumn, matmul_weights
from hetero_strategy.zoo.hf_stand_ins import Absent, Hollow, Reached, stop
from hetero_strategy.zoo.hf_tp import divide_heads, faults_by_names, plan_by_names
from hetero_strategy.zoo.hf_trace import trace

RowsFunction = Callable[[np.ndarray], np.ndarray]
"""A function of sizes, int64 ``[n, k]``, to rows, int64 ``[n]``; it is pickled."""
TILES = 2
"""Number of items in a trace."""


class HFTower(HFAdapter, Backbone):
    """A base of backbones around a transformers tower alone, or in a composite model, under :attr:`model`.

    Parameters that no output reaches (a pooling head, blocks behind ``layer``) are frozen; they stay in the module and
    are exported. Positions are never changed at random, as DINOv3's are in training: stages would draw other ones.

    Args:
        model: transformers module on the meta device: the tower, or a composite without its language model.
        path: FQN of the tower in ``model``.
        layer: number of the wanted state as in transformers' ``hidden_states``; -1: the output behind the final norm.
        merge: side of the square (of sound: length of the run) of neighbouring rows that are joined into one row.
        checkpoint: local folder with the weights.

    Raises:
        ModelError: the tower cannot be run, or has no such layer.
    """

    class_rows = 0
    """Rows of an item that stand for no part of it; they are dropped at the end."""
    inner_rows: int
    """Rows in the blocks of an item of the tower's own size."""
    outer_rows: int
    """Rows in the tower's output of such an item."""

    def __init__(
        self,
        model: Any,
        *,
        path: str = "",
        layer: int = -1,
        merge: int = 1,
        checkpoint: str | Path | None = None,
    ) -> None:
        super().__init__()
        check_sizes("hf_encoder", merge=merge)
        self.model, self.path = model, path
        self.merge, self.checkpoint = merge, checkpoint
        self.config, self.architecture = model.config, type(model).__name__
        self._received: list[Tensor] = []
        self.read_sizes(model.get_submodule(path))
        traced = trace(model, path, self.run_example, None if layer == -1 else layer)
        self.block_list = f"model.{traced.block_list}"
        self.before_blocks = tuple(f"model.{fqn}" for fqn in traced.before)
        self.after_blocks = tuple(f"model.{fqn}" for fqn in traced.after)
        self.needed, self.results = traced.blocks, traced.results
        for fqn in traced.unreached:
            model.get_parameter(fqn).requires_grad_(False)
        blocks = model.get_submodule(traced.block_list)
        tables = (part for part in {*model.modules()} - {*blocks.modules()} if part._buffers)
        for part in tables:
            if not list(part.parameters()):
                part.register_forward_pre_hook(_not_in_training)
        if layer != -1:
            blocks[self.needed].register_forward_pre_hook(stop, with_kwargs=True)
        self.hidden_width, self.lead = traced.rows_in[-1], traced.rows_in[:-2]
        self.inner_rows, self.outer_rows = (prod(shape[:-1]) // TILES for shape in (traced.rows_in, traced.rows_out))
        self.width = traced.rows_out[-1] * self.joined_rows

    def read_sizes(self, tower: Any) -> None:
        """Set the sizes of the tower that :meth:`run_example` needs."""
        raise NotImplementedError

    def run_example(self, model: Any) -> Tensor:
        """Run a copy of the model on the meta device with :data:`TILES` items of the tower's own size."""
        raise NotImplementedError

    def rows_of(self, inputs: EncoderInputs, hidden: Tensor | None) -> Tensor:
        """Run this stage, see :meth:`forward`."""
        raise NotImplementedError

    def rows_of_folder(self) -> tuple[RowsFunction, RowsFunction]:
        """Return the functions of sizes of transformers' own processor to rows, at the edge and inside the tower."""
        raise NotImplementedError

    # ---- structure --------------------------------------------------------------------------------------------------

    @override
    def blocks(self) -> dict[str, nn.Module]:
        blocks = list(super().blocks().items())[: self.needed]
        return {fqn: block for fqn, block in blocks if not isinstance(block, Absent)}

    @override
    def prune(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        self._received = []
        container = self.get_submodule(self.block_list)
        names = [fqn.rpartition(".")[2] for fqn in self.blocks()]
        last = max(number for number, name in enumerate(names) if f"{self.block_list}.{name}" not in set(blocks))
        for number, name in enumerate(names):
            if f"{self.block_list}.{name}" in set(blocks):
                container._modules[name] = Absent(None if number else self._received, number > last, self.results)
        for fqn in (*self.before_blocks * before, *self.after_blocks * after):
            owner, _, key = fqn.rpartition(".")
            part = self.get_submodule(fqn) if before and fqn in self.before_blocks else None
            setattr(self.get_submodule(owner), key, None if part is None else Hollow(part, self._received))

    # ---- forward ----------------------------------------------------------------------------------------------------

    @override
    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        """Run this stage; see :class:`HFTower`.

        Returns:
            Rows ``[sum(rows), width]``, or ``[sum(packing), hidden_width]`` for the next stage.
        """
        if not self.first_stage:
            previous_rows(hidden)
        return self.rows_of(inputs, hidden)

    def run(self, call: Callable[[], Tensor], hidden: Tensor | None, *lead: int) -> Tensor:
        """Return what a call of the model reaches in this stage.

        Args:
            hidden: rows ``[R, hidden_width]`` of the previous stage.
            lead: dimensions before the rows in the tower.
        """
        if hidden is not None:
            self._received.append(hidden.reshape(*lead, -1, self.hidden_width))
        try:
            return call()
        except Reached as reached:
            return reached.rows
        finally:
            self._received.clear()

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def joined_rows(self) -> int:
        """Return the number of the output's rows that are joined into one."""
        return self.merge**2

    @override
    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        rows = int(np.sum(packing_lengths)) - self.class_rows * len(packing_lengths)
        outer, inner = self.outer_rows - self.class_rows, self.inner_rows - self.class_rows
        return rows * outer // inner // self.joined_rows

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows = int(np.sum(packing_lengths))
        original: Any = self.meta_copy()
        parts = dict(original.named_modules())  # without parameters that no part has
        before, after = (
            sum(matmul_weights(parts[fqn]) for fqn in fqns if fqn in parts) for fqns in original.around_blocks()
        )
        attention = 4 * self.hidden_width * attention_pairs(np.asarray(packing_lengths), causal=False)
        blocks = block_linear_flops(self) * rows + attention
        return float(2 * before * rows), blocks, float(2 * after * self.projected_rows(packing_lengths))

    def rule_of(self, rows: Callable[[int], int], length: int, column: int = 0, far: int = 2**20) -> RowsOfColumn:
        """Return the rule of a function of lengths to rows, ``(length + shift) // divisor``, as strides make it.

        Args:
            length: a length that the tower takes.
            column: column of the length in an item's sizes.
            far: distance to another length, from which the divisor is measured.

        Raises:
            ModelError: there is no such rule.
        """
        start = rows(length)
        divisor = round(far / (rows(length + far) - start))
        low, high = length - divisor, length  # the fewest samples with so many rows are above low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if rows(middle) == start else (middle, high)
        shift = divisor * start - high
        probes = [length + divisor // 2, length + 3 * divisor, 2 * length + 1, length + far]
        counted, expected = [rows(probe) for probe in probes], [(probe + shift) // divisor for probe in probes]
        if counted != expected:
            raise ModelError(
                f"{self.architecture}: clips of {probes} numbers have {counted} rows, and by strides they would have"
                f" {expected}; such towers are not built"
            )
        return RowsOfColumn(column, 1, shift, divisor)

    # ---- tensor parallelism -----------------------------------------------------------------------------------------

    @override
    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        return plan_by_names(self.blocks())

    @override
    def check_tp(self, tp: int) -> list[str]:
        return faults_by_names(self.architecture, next(iter(self.blocks().values())), tp)

    @override
    def after_tp(self, tp: int) -> None:
        for block in self.blocks().values():
            divide_heads(block, tp)


def _not_in_training(part: nn.Module, _: Any) -> None:
    part.__dict__["training"] = False


def some(rows: Tensor, lengths: np.ndarray, items: np.ndarray, least: int) -> Tensor:
    """Return the rows of some items, or ``least`` zero rows if there are none."""
    if not len(items):  # they depend on the rows, so that a gradient reaches what made them
        return torch.cat([rows, rows.new_zeros(least, rows.shape[1])])
    return rows if len(items) == len(lengths) else runs_of(rows, lengths, items)


def side(config: Any, *names: str, default: int | None = None) -> int:
    """Return a number of a config, or both numbers of a square."""
    size = next((value for name in names if (value := getattr(config, name, None)) is not None), default)
    numbers = {size} if isinstance(size, int) else set(size or ())
    if len(numbers) != 1:
        raise ModelError(f"{type(config).__name__}: {' or '.join(names)} is {size!r}; only squares are built")
    return int(numbers.pop())
