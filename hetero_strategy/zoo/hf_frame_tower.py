"""A backbone around a transformers tower whose sounds lie end to end, such as Qwen2.5-Omni's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.model.inputs import EncoderInputs, Packing
from hetero_strategy.zoo.hf import RowsOfColumn
from hetero_strategy.zoo.hf_grid_tower import GridTower
from hetero_strategy.zoo.hf_packed import END_TO_END, use_packed_attention
from hetero_strategy.zoo.hf_prepare import Prepare, TowerInputs
from hetero_strategy.zoo.hf_stand_ins import first_argument
from hetero_strategy.zoo.hf_tower import TILES, some

LEAST = 8
"""Frames of the sound that stands in where there is none."""
FRAMES, FAR = 64, 1024
"""Frames of a sound in a trace, and how many more a sound has from which its stride is measured."""


class PrepareFrames(Prepare):
    """A function that adds the tensors that follow from the numbers of frames; functions that move frames move their
    numbers: 0 is a frame of padding, 1 the first one of the values.

    Args:
        bands: numbers in a frame.
        column: column of an item's frames in its sizes.
    """

    argument = "feature_lens"

    def __init__(self, bands: int, column: int) -> None:
        super().__init__((1, 1, LEAST))
        self.bands, self.column = bands, column

    @override
    def grids(self, sizes: np.ndarray) -> Tensor:
        """Return the frames of each item, int64 ``[n]`` on the host, or of one stand-in."""
        if not len(sizes):
            return torch.tensor([LEAST], device="cpu")
        return torch.from_numpy(np.ascontiguousarray(sizes[:, self.column]))

    @override
    def numbers(self, inputs: EncoderInputs) -> Tensor:
        lengths = self.grids(inputs.sizes).numpy()
        if not len(inputs.sizes):
            return torch.zeros(1, int(lengths.sum()), device="cpu")
        starts = np.arange(len(lengths)) * (inputs.values.shape[1] // self.bands)
        return torch.from_numpy(1 + ragged.expand(starts, lengths))[None].double()


class FrameTower(GridTower):
    """A tower that takes ``feature_lens``: all sounds of a microbatch run end to end, in one call.

    Values are padded spectrograms ``[n, bands * frames]``. How many of an item's frames are sound is the last number of
    its sizes, or that in the column ``grid``.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        inside: list[int] = []
        block = self.get_submodule(f"{self.block_list}.0")
        handle = block.register_forward_pre_hook(
            lambda _, args, kwargs: inside.append(first_argument(args, kwargs).shape[-2] // TILES), with_kwargs=True
        )

        def rows(frames: int, *, inner: bool) -> int:
            with torch.no_grad(), torch.device("meta"):
                rows = self._example(model, frames, PrepareFrames(self.bands, -1)).shape[0] // TILES
            return inside[-1] if inner else rows

        outer, inner = (
            self.rule_of(partial(rows, inner=of_blocks), FRAMES, self.column, FAR) for of_blocks in (False, True)
        )
        self.rules = outer, inner
        handle.remove()

    @override
    def read_sizes(self, tower: Any) -> None:
        self.bands, self.column = int(tower.config.num_mel_bins), -1 if self.grid is None else self.grid.stop - 1
        self.prepare = PrepareFrames(self.bands, self.column)
        use_packed_attention(tower, END_TO_END)

    @override
    def rows_of(self, inputs: EncoderInputs, hidden: Tensor | None) -> Tensor:
        if not isinstance(inputs, TowerInputs):
            inputs = self.prepare(inputs).to(inputs.values.device)
        columns, items = dict(inputs.columns), np.arange(len(inputs.sizes))
        if hidden is None:
            shape = self.bands, inputs.values.shape[1] // self.bands
            frames = inputs.values.unflatten(1, shape).transpose(1, 2).flatten(0, 1)
            frames, dtype = torch.cat([frames.new_zeros(1, self.bands), frames]), next(self.model.parameters()).dtype
            columns |= {name: frames[numbers[:, 0]].to(dtype).transpose(1, 2) for name, numbers in inputs.moved.items()}
        else:
            inner = self.rules[1]
            hidden = some(hidden, inputs.packing.lengths, items, (LEAST + inner.shift) // inner.divisor)
            zero = hidden.new_zeros(1)
            columns |= {
                name: zero.expand(len(numbers), self.bands, numbers.shape[-1]) for name, numbers in inputs.moved.items()
            }
        rows = self.run(lambda: self._output(self.model, inputs.values, columns), hidden, *self.lead)
        return rows.reshape(-1, rows.shape[-1])[: None if len(items) else 0]

    @override
    def run_example(self, model: Any) -> Tensor:
        return self._example(model, FRAMES, self.prepare)

    def _example(self, model: Any, frames: int, prepare: Prepare) -> Tensor:
        values, lengths = torch.zeros(self.bands, TILES * frames), torch.tensor([frames] * TILES, device="cpu")
        with prepare.recording(model.get_submodule(self.path), lengths, values) as empty:
            return self._output(model, values, {prepare.argument: empty})

    @override
    def example(self, lengths: np.ndarray) -> EncoderInputs | None:
        """Make sounds of about so many rows, each padded to the longest."""
        sizes = np.zeros((len(lengths), 1 + max(self.column, 0)), np.int64)
        sizes[:, -1] = np.maximum(lengths * FRAMES // self.inner_rows, LEAST)
        values = torch.empty(len(sizes), self.bands * int(sizes.max(initial=LEAST)))
        return self.prepare(EncoderInputs(values, sizes, self.output_rows(sizes), Packing.of(self.packing_rows(sizes))))

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return self.rules[1](sizes)

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        return self.rules[0](sizes)

    @override
    def rows_of_folder(self) -> tuple[RowsOfColumn, RowsOfColumn]:
        return self.rules
