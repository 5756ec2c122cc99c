"""A backbone around a transformers tower that takes pictures, or tiles of them, as a batch."""

from __future__ import annotations

import inspect
from math import isqrt, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.inputs import EncoderInputs, ImagePatches, Packing, host_index
from hetero_strategy.zoo.hf import RowsOf, RowsOfColumn
from hetero_strategy.zoo.hf_tower import TILES, HFTower, RowsFunction, side, some


class TileTower(HFTower):
    """A tower that takes ``pixel_values``.

    Its blocks run once per microbatch if all items have one size, and else once per size. Its rows are those of the
    patches: rows that it puts before them (a class token, registers) are dropped, as LLaVA does. Values are patches as
    :class:`~hetero_strategy.data.media.ImageProcessor` makes them, pixels ``[R, channels]``, or whole tiles, channels
    first, as transformers' processors make them. The last numbers of an item's sizes are its grid; where raw rows are
    whole tiles, the first is their number.

    Args:
        pixels: height and width of a whole tile; default: the ``image_size`` of the tower's config.
        **options: as in :class:`HFTower`.
    """

    runs_vary = True
    pixels: tuple[int, ...]

    def __init__(self, model: Any, *, pixels: tuple[int, ...] = (), **options: Any) -> None:
        self.__dict__["pixels"] = pixels  # before nn.Module's constructor, because the base traces
        super().__init__(model, **options)
        self.class_rows = self.inner_rows - prod(self.tile)
        if any(length % self.merge for length in self.tile):
            raise ModelError(f"{self.architecture}: its grid of {self.tile} patches cannot be merged by {self.merge}")

    @override
    def read_sizes(self, tower: Any) -> None:
        config = tower.config
        self.patch = side(config, "patch_size")
        self.channels = side(config, "num_channels", "in_channels", "in_chans")
        self.usual = (side(config, "image_size"),) * 2
        self.pixels = self.pixels or self.usual
        self.processor = ImagePatches(self.patch, self.channels, self.merge)
        self.tile = self.pixels[0] // self.patch, self.pixels[1] // self.patch

    @override
    def run_example(self, model: Any) -> Tensor:
        return self.features(model, torch.zeros(TILES, self.channels, *self.pixels))

    @override
    def rows_of(self, inputs: EncoderInputs, hidden: Tensor | None) -> Tensor:
        everything = np.arange(len(inputs.sizes))
        if self.is_whole(inputs.values.shape[1]):
            return self._of_one_size(inputs, hidden, everything, None)
        sides, of_item = np.unique(self.sides(inputs.sizes), axis=0, return_inverse=True)
        members = [np.flatnonzero(of_item.reshape(-1) == number) for number in range(len(sides))]
        if len(members) < 2:
            return self._of_one_size(inputs, hidden, everything, tuple(sides.reshape(-1).tolist()))
        rows = torch.cat(
            [
                self._of_one_size(inputs, hidden, items, tuple(own))
                for items, own in zip(members, sides.tolist(), strict=True)
            ]
        )
        order = np.concatenate(members)
        lengths = inputs.rows if self.last_stage else inputs.packing.lengths
        starts = np.empty(len(order), np.int64)
        starts[order] = ragged.starts(lengths[order])
        return rows.index_select(0, host_index(ragged.expand(starts, lengths), rows))

    def _of_one_size(
        self, inputs: EncoderInputs, hidden: Tensor | None, items: np.ndarray, own: tuple[int, ...] | None
    ) -> Tensor:
        """Run items of one size as one batch, or an empty item if there are none."""
        tiles = len(items) if own is not None else int(inputs.sizes[:, 0].sum())
        shape, inner = self.batch(inputs, items, own)
        count = max(tiles, 1)
        if hidden is None:
            values = self.values(inputs, items, shape).to(next(self.model.parameters()).dtype)
        else:
            hidden = some(hidden, inputs.packing.lengths, items, inner)
            values = hidden.new_zeros(1).expand(count, *shape)
        lead = [count] if self.lead == (TILES,) else self.lead
        rows = self.run(lambda: self.features(self.model, values), hidden, *lead)
        if self.last_stage:
            rows = self.finished(rows.reshape(count, -1, rows.shape[-1]), inputs, items, own)
        return rows.reshape(-1, rows.shape[-1])[: None if tiles else 0]

    def is_whole(self, feature: int) -> bool:
        """Return whether a raw row with so many numbers is an item, or a tile of one, of the tower's own size."""
        return feature == self.channels * prod(self.pixels)

    def sides(self, sizes: np.ndarray) -> np.ndarray:
        """Return what decides the shape of an item, int64 ``[n, sides]``, from items' sizes."""
        return sizes[:, -2:]

    def batch(
        self, inputs: EncoderInputs, items: np.ndarray, own: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], int]:
        """Return the shape in which the tower takes such an item, and its rows in the blocks.

        Args:
            items: numbers of items that have the sides ``own``; None: tiles of the tower's own size.
        """
        inner = prod(self._grid(inputs, own)) + self.class_rows
        if own is None:
            return (self.channels, *self.pixels), inner
        unit = max(isqrt(inputs.values.shape[1] // self.channels), 1)
        if own:
            self._check(inputs, items, unit, own, inner)
        return (self.channels, *(length * unit for length in own or (side // unit for side in self.pixels))), inner

    def _grid(self, inputs: EncoderInputs, own: tuple[int, ...] | None) -> tuple[int, int]:
        """Return the patches of an item along its sides."""
        unit = isqrt(inputs.values.shape[1] // self.channels)
        return (own[0] * unit // self.patch, own[1] * unit // self.patch) if own else self.tile

    def values(self, inputs: EncoderInputs, items: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        """Return the values of some items, ``[n, *shape]``, or zeros of one item."""
        values = inputs.values
        if self.is_whole(values.shape[1]):
            return some(values, inputs.sizes[:, 0], items, 1).reshape(-1, *shape)
        channels, height, width = shape
        unit = isqrt(values.shape[1] // channels)
        grid = height // unit, width // unit
        values = some(values, inputs.sizes[:, -2:].prod(axis=1), items, prod(grid))
        patches = values.reshape(-1, *grid, unit, unit, channels)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, *shape)

    def features(self, model: Any, values: Tensor) -> Tensor:
        """Run the tower in a model on values of items ``[n, ...]``."""
        tower = model.get_submodule(self.path)
        takes = inspect.signature(tower.forward).parameters
        is_usual = tuple(values.shape[2:]) == self.usual or "interpolate_pos_encoding" not in takes
        other = {} if is_usual else {"interpolate_pos_encoding": True}
        return tower(pixel_values=values, **other).last_hidden_state

    def finished(self, rows: Tensor, inputs: EncoderInputs, items: np.ndarray, own: tuple[int, ...] | None) -> Tensor:
        """Return the output's rows of items, from those of tiles ``[n, rows, width]``."""
        rows, k = rows[:, self.class_rows :], self.merge
        if k == 1:
            return rows
        grid = self._grid(inputs, own)
        cells = rows.unflatten(1, (grid[0] // k, k, grid[1] // k, k)).transpose(2, 3)
        return cells.reshape(-1, self.width)

    def _check(self, inputs: EncoderInputs, items: np.ndarray, unit: int, size: tuple[int, ...], rows: int) -> None:
        if unit**2 * self.channels != inputs.values.shape[1] or self.patch % unit:
            raise DataError(
                f"{self.architecture}: items of {size} values of {inputs.values.shape[1]} numbers are no whole patches"
                f" of {self.patch} x {self.patch} pixels with {self.channels} channels"
            )
        if not (self.first_stage and self.last_stage) and (inputs.packing.lengths[items] != rows).any():
            raise DataError(
                f"{self.architecture}: an item of {size} has {rows} rows between stages, the data plans"
                f" {int(inputs.packing.lengths[items[0]])}; let the processor's inner_rows count {self.class_rows} more"
                " than patches"
            )

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    @override
    def example_unit(self) -> int:  # type: ignore[override]
        return self.inner_rows

    @override
    def example(self, lengths: np.ndarray) -> EncoderInputs | None:
        """Make pictures of about so many rows in sum, each of the tower's own size."""
        sizes = np.array([self.tile] * max(1, round(int(lengths.sum()) / self.example_unit)), np.int64)
        values = torch.empty(int(sizes.prod(axis=1).sum()), self.channels * self.patch**2)
        return EncoderInputs(values, sizes, self.output_rows(sizes), Packing.of(self.packing_rows(sizes)))

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        return RowsOf(2, 0, self._joined_patches)(sizes)

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return RowsOf(2, self.class_rows)(sizes)

    @override
    def rows_of_folder(self) -> tuple[RowsFunction, RowsFunction]:
        if self.runs_vary:  # raw rows are pixels
            return RowsOf(2, 0, self._joined_patches, self.patch), RowsOf(2, self.class_rows, 1, self.patch)
        edge = (self.outer_rows - self.class_rows) // self.joined_rows
        return RowsOfColumn(0, edge), RowsOfColumn(0, self.inner_rows)

    @property
    def _joined_patches(self) -> int:
        """Return the patches of a row at the edge."""
        return prod(self.tile) * self.joined_rows // (self.outer_rows - self.class_rows)
