"""A backbone around a transformers tower for sound: windows of one length, or clips of any length."""

from __future__ import annotations

import copy
import inspect
from dataclasses import astuple
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.hf_folder import read_processor
from hetero_strategy.model.inputs import EncoderInputs, Packing, host_index
from hetero_strategy.zoo.hf import RowsOfColumn
from hetero_strategy.zoo.hf_stand_ins import stop
from hetero_strategy.zoo.hf_tile_tower import TileTower
from hetero_strategy.zoo.hf_tower import TILES, HFTower, RowsFunction, some

VALUES = ("input_features", "input_values")
"""transformers' names of the values of clips."""
LENGTH = 4096
"""Length of a clip in a trace of a tower for clips of any length."""


class ClipTower(TileTower):
    """A tower that takes ``input_features`` or ``input_values``.

    A tower for windows of one length, such as Whisper's, runs all windows of a microbatch as one batch, padding
    included, as transformers does. Raw rows are windows, and an item's sizes are their number and that of its samples.
    Its rows end with the sound: those of padding alone are left out, if :attr:`window` is known.

    Any other tower, such as wav2vec 2.0, runs clips of one length as a batch. Raw rows are frames or samples ``[R,
    numbers]``, and the first of an item's sizes is their number. How many rows a clip has is measured on the meta
    device.

    Layers are never skipped and frames never hidden at random: ranks could not agree on it.
    """

    window = 0
    """Samples of a window; 0: unknown, and all its rows are the item's."""

    def __init__(self, model: Any, **options: Any) -> None:
        HFTower.__init__(self, model, **options)
        if self.is_fixed and self.outer_rows % self.merge:
            raise ModelError(
                f"{self.architecture}: {self.outer_rows} rows of a window cannot be merged by {self.merge}"
            )
        if self.is_fixed and self.checkpoint:
            self.window = self.length * read_processor(self.checkpoint, "feature_extractor").get("hop_length", 0)
        self.inner_rule, self.outer_rule = (RowsOfColumn(0, rows) for rows in (self.inner_rows, self.outer_rows))
        handle = self.get_submodule(f"{self.block_list}.0").register_forward_pre_hook(stop, with_kwargs=True)
        with FlopCounterMode(display=False) as counter:
            self._measured_rows(self.length)
        self.before_flops = counter.get_total_flops() / self.inner_rows
        if not self.is_fixed:
            self.inner_rule = self.rule_of(self._measured_rows, self.length)
        handle.remove()
        if not self.is_fixed:
            same = self.inner_rows == self.outer_rows
            self.outer_rule = self.inner_rule if same else self.rule_of(self._measured_rows, self.length)

    @override
    def read_sizes(self, tower: Any) -> None:
        self.config = copy.deepcopy(self.config)  # an export has its values
        tower.config.apply_spec_augment = False
        for name in [name for name in tower.config.to_dict() if name.endswith("layerdrop")]:
            setattr(tower.config, name, 0.0)
        for part in tower.modules():
            if hasattr(part, "layerdrop"):
                part.layerdrop = 0.0
        config, parts = tower.config, list(tower.modules())
        self.values_name = next(iter(inspect.signature(tower.forward).parameters))
        first = next((part for part in parts if isinstance(part, nn.Conv1d | nn.Linear)), None)
        usual = 1 if first is None else first.in_channels if isinstance(first, nn.Conv1d) else first.in_features
        self.numbers = int(getattr(config, "num_mel_bins", None) or usual)
        strides = prod(part.stride[0] for part in parts if isinstance(part, nn.Conv1d))
        own = int(getattr(config, "max_source_positions", 0) or 0) * strides
        faults: list[str] = []
        layouts = ((self.numbers, -1), (-1, self.numbers), (-1,))
        for self.length, self.layout in product(filter(None, (own, LENGTH)), layouts):
            if fault := self._fault(self.length):
                faults.append(fault)
            else:
                break
        else:
            raise ModelError(
                f"{self.architecture} does not run on clips of sound: {'; '.join(dict.fromkeys(faults))}; such a tower"
                " may need lengths: take the whole folder by hf_composite, or another tower"
            )
        self.is_fixed = bool(self._fault(self.length // 2))
        self.runs_vary = not self.is_fixed

    def _fault(self, length: int) -> str:
        """Return why the tower does not run on a clip of this length; empty if it does."""
        try:
            self._measured_rows(length)
        except Exception as fault:  # several kinds
            return f"{type(fault).__name__} {' '.join(str(fault).split())}"
        return ""

    @torch.no_grad()
    def _measured_rows(self, length: int) -> int:
        """Return the rows of a clip of this length, where the model is on the meta device."""
        clips = torch.empty(1, *self.shape(length), device="meta")
        return int(self.run(lambda: self.features(self.model, clips), None).shape[-2])

    @override
    def run_example(self, model: Any) -> Tensor:
        return self.features(model, torch.zeros(TILES, *self.shape(self.length)))

    @property
    @override
    def joined_rows(self) -> int:
        return self.merge

    def shape(self, length: int) -> tuple[int, ...]:
        """Return the shape in which the tower takes a clip of this length."""
        return tuple(length if side < 0 else side for side in self.layout)

    # ---- forward ----------------------------------------------------------------------------------------------------

    @override
    def features(self, model: Any, values: Tensor) -> Tensor:
        return model.get_submodule(self.path)(**{self.values_name: values}).last_hidden_state

    @override
    def is_whole(self, feature: int) -> bool:
        return self.is_fixed and feature == self.numbers * self.length

    @override
    def sides(self, sizes: np.ndarray) -> np.ndarray:
        return sizes[:, :1]

    @override
    def batch(
        self, inputs: EncoderInputs, items: np.ndarray, own: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], int]:
        if own is not None and (self.is_fixed or inputs.values.shape[1] != self.numbers):
            whole = f"windows of {self.numbers} x {self.length} = {self.numbers * self.length}"
            raise DataError(
                f"{self.architecture}: raw rows have {inputs.values.shape[1]} numbers, expected"
                f" {whole if self.is_fixed else self.numbers}; take the processor of the tower's folder"
            )
        length = own[0] if own else self.length
        return self.shape(length), int(self.inner_rule(np.array([[length if own else 1]]))[0])

    @override
    def values(self, inputs: EncoderInputs, items: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        if self.is_fixed:
            return some(inputs.values, inputs.sizes[:, 0], items, 1).reshape(-1, *shape)
        length = shape[self.layout.index(-1)]
        clips = some(inputs.values, inputs.sizes[:, 0], items, length).reshape(-1, length, self.numbers)
        return clips.transpose(1, 2) if self.layout[-1] < 0 < len(self.layout) - 1 else clips.reshape(-1, *shape)

    @override
    def finished(self, rows: Tensor, inputs: EncoderInputs, items: np.ndarray, own: tuple[int, ...] | None) -> Tensor:
        rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % self.merge)).reshape(-1, self.width)
        if own is not None or not len(items):
            return rows
        windows = inputs.sizes[:, 0] * self.outer_rows // self.merge
        wanted = self.output_rows(inputs.sizes)
        if np.array_equal(windows, wanted):
            return rows
        return rows.index_select(0, host_index(ragged.expand(ragged.starts(windows), wanted), rows))

    # ---- counts -----------------------------------------------------------------------------------------------------

    @override
    def example(self, lengths: np.ndarray) -> EncoderInputs | None:
        """Make clips of about so many rows in sum, each of the tower's own length."""
        count = max(1, round(int(lengths.sum()) / self.example_unit))
        sizes = np.full((count, 1), 1 if self.is_fixed else self.length, np.int64)
        numbers = self.numbers * (self.length if self.is_fixed else 1)
        values = torch.empty(int(sizes.sum()), numbers)
        return EncoderInputs(values, sizes, self.output_rows(sizes), Packing.of(self.packing_rows(sizes)))

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        if self.window and sizes.shape[1] < 2:  # numbers of windows, without those of samples
            return self.outer_rule(sizes) // self.merge
        return self.rows_of_folder()[0](sizes)

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return self.inner_rule(sizes)

    @override
    def rows_of_folder(self) -> tuple[RowsFunction, RowsFunction]:
        if self.window:
            divisor = self.window * self.merge
            return RowsOfColumn(1, self.outer_rows, divisor - 1, divisor), self.inner_rule
        _, times, shift, divisor = astuple(self.outer_rule)
        return RowsOfColumn(0, times, shift + (self.merge - 1) * divisor, divisor * self.merge), self.inner_rule

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        _, blocks, after = super().part_flops(packing_lengths)
        return self.before_flops * float(np.sum(packing_lengths)), blocks, after
