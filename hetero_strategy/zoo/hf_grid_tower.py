"""A backbone around a transformers tower whose items lie end to end, such as Qwen-VL's."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.inputs import EncoderInputs, ImagePatches, host_index
from hetero_strategy.zoo.hf import RowsOf
from hetero_strategy.zoo.hf_packed import END_TO_END, use_packed_attention
from hetero_strategy.zoo.hf_prepare import Prepare, TowerInputs
from hetero_strategy.zoo.hf_tower import TILES, HFTower, RowsFunction, side, some
from hetero_strategy.zoo.siglip2 import merge_order


class GridTower(HFTower):
    """A tower that takes ``grid_thw``: all items of a microbatch run end to end, in one call.

    Values are patches as :class:`~hetero_strategy.data.media.ImageProcessor` makes them, or as the tower itself takes
    them. The last numbers of an item's sizes are its grid.

    Args:
        deepstack: whether features of inner blocks that the tower returns stand beside its rows.
        grid: columns of the grid (t, h, w) in items' sizes; default: the last ones.
        **options: as in :class:`HFTower`.
    """

    deepstack: bool
    grid: slice | None

    def __init__(self, model: Any, *, deepstack: bool = False, grid: slice | None = None, **options: Any) -> None:
        self.__dict__.update(deepstack=deepstack, grid=grid)  # before nn.Module's constructor, because the base traces
        super().__init__(model, **options)
        if self.merge > 1:
            raise ModelError(f"{self.architecture}: it merges its own patches; take projector='mlp' or 'linear'")

    @override
    def read_sizes(self, tower: Any) -> None:
        config = tower.config
        self.patch = side(config, "patch_size")
        self.channels = side(config, "num_channels", "in_channels", "in_chans")
        cell = side(config, "spatial_merge_size", default=1)
        self.attention_heads = side(config, "num_heads", "num_attention_heads", default=0)
        # Features of inner blocks would have a part of the rows.
        self.context_parallel = self.attention_heads > 0 and not getattr(config, "deepstack_visual_indexes", None)
        self.frames = side(config, "temporal_patch_size", default=1)
        self.prepare: Prepare = Prepare((1, cell, cell), self.grid)
        self.processor = ImagePatches(self.patch, self.channels, cell)
        self.tile = (2 * cell, 2 * cell)
        use_packed_attention(tower, END_TO_END)  # given to a constructor, transformers would look for such a kernel

    @override
    def rows_of(self, inputs: EncoderInputs, hidden: Tensor | None) -> Tensor:
        """Run all items end to end, or one of the least size if there are none."""
        if not isinstance(inputs, TowerInputs):
            inputs = self.prepare(inputs).to(inputs.values.device)
        total, items = int(self.prepare.grids(inputs.sizes).prod(1).sum()), np.arange(len(inputs.sizes))
        shape = (total, self.channels * self.frames * self.patch**2)
        if hidden is None:
            values = self._as_taken(inputs, shape[1])
            values = some(values, inputs.packing.lengths, items, total).to(next(self.model.parameters()).dtype)
        else:
            hidden = some(hidden, inputs.packing.lengths, items, total)
            values = hidden.new_zeros(1).expand(shape)
        rows = self.run(lambda: self._output(self.model, values, inputs.columns), hidden, *self.lead)
        return rows.reshape(-1, rows.shape[-1])[: None if len(items) else 0]

    def _as_taken(self, inputs: EncoderInputs, feature: int) -> Tensor:
        """Return patches ``[R, feature]``, those of a picture cell by cell, with channels first and every frame."""
        values = inputs.values
        if values.shape[1] == feature:
            return values
        if values.shape[1] != self.channels * self.patch**2:
            raise DataError(
                f"{self.architecture}: patches have {values.shape[1]} numbers, expected {self.channels * self.patch**2}"
                f" ({self.patch} x {self.patch} pixels, {self.channels} channels), or {feature} as its processor makes"
            )
        order = merge_order(self.prepare.grids(inputs.sizes)[: len(inputs.sizes), 1:].numpy(), self.prepare.least[1])
        patches = values[host_index(order, values)].unflatten(1, (self.patch, self.patch, self.channels))
        return patches.permute(0, 3, 1, 2)[:, :, None].expand(-1, -1, self.frames, -1, -1).flatten(1)

    def _output(self, model: Any, values: Tensor, columns: Mapping[str, Any]) -> Tensor:
        """Return the rows of the tower's output: its merged ones, or else the last state's."""
        output = model.get_submodule(self.path)(values, **columns)
        if output.get("pooler_output") is None:
            return output.last_hidden_state
        return torch.cat([output.pooler_output, *(output.deepstack_features if self.deepstack else ())], dim=1)

    @override
    def run_example(self, model: Any) -> Tensor:
        grids = torch.tensor([[1, *self.tile]] * TILES, device="cpu")
        values = torch.zeros(TILES * prod(self.tile), self.channels * self.frames * self.patch**2)
        with self.prepare.recording(model.get_submodule(self.path), grids) as empty:
            return self._output(model, values, {"grid_thw": empty})

    @override
    def example(self, lengths: np.ndarray) -> EncoderInputs | None:
        values = super().example(lengths)
        return None if values is None else self.prepare(values)

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        return self.rows_of_folder()[0](sizes)

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return RowsOf(3)(sizes)

    @override
    def rows_of_folder(self) -> tuple[RowsFunction, RowsFunction]:
        return RowsOf(3, 0, self.inner_rows // self.outer_rows), RowsOf(3)
