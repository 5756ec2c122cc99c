"""A backbone around any transformers vision tower, alone or in a composite model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError, check_sizes
from hetero_strategy.model.adapter import block_linear_flops, previous_rows
from hetero_strategy.model.attention import attention_pairs, packed_attention
from hetero_strategy.model.encoder import Backbone
from hetero_strategy.model.inputs import EncoderInputs, ImagePatches, Packing, host_index, runs_of
from hetero_strategy.zoo.hf import HFAdapter, RowsOf, matmul_weights
from hetero_strategy.zoo.hf_tp import divide_heads, faults_by_names, plan_by_names
from hetero_strategy.zoo.hf_trace import Absent, Hollow, Prepare, Reached, TowerInputs, stop, trace
from hetero_strategy.zoo.siglip2 import merge_order

ATTENTION = "hetero_flash_rows"
"""Name of packed attention for towers whose rows lie end to end; with "flash" in it they call it once per block."""
TILES = 2
"""Number of items in a trace."""


class HFTower(HFAdapter, Backbone):
    """A transformers vision tower alone, or in a composite model, under :attr:`model`.

    A tower that takes ``grid_thw`` runs all items end to end. Any other one runs tiles of one size as one batch, and so
    its blocks run once per microbatch if all items have one size, and else once per size. Its rows are those of the
    patches: rows that it puts before them (a class token, registers) are dropped, as LLaVA does.

    Values are patches as :class:`~hetero_strategy.data.media.ImageProcessor` makes them, pixels ``[R, channels]``, or
    patches or whole tiles as the tower itself takes them. The last numbers of an item's sizes are its grid; where raw
    rows are whole tiles, the first is their number. Parameters that no output reaches (a pooling head, blocks behind
    ``layer``) are frozen; they stay in the module and are exported. Positions are never changed at random, as DINOv3's
    are in training: stages would draw other ones.

    Args:
        model: transformers module on the meta device: the tower, or a composite without its language model.
        path: FQN of the tower in ``model``.
        layer: number of the wanted state as in transformers' ``hidden_states``; -1: the output behind the final norm.
        merge: side of the square of neighbouring rows that are joined into one row.
        deepstack: whether features of inner blocks that the tower returns stand beside its rows.
        grid: columns of the grid (t, h, w) in items' sizes; default: the last ones.
        checkpoint: local folder with the weights.

    Raises:
        ModelError: the tower cannot be run, or has no such layer.
    """

    prepare: Prepare | None = None

    def __init__(
        self,
        model: Any,
        *,
        path: str = "",
        layer: int = -1,
        merge: int = 1,
        deepstack: bool = False,
        grid: slice | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        super().__init__()
        check_sizes("hf_encoder", merge=merge)
        self.model, self.path = model, path
        self.merge, self.deepstack, self.checkpoint = merge, deepstack, checkpoint
        self.config, self.architecture = model.config, type(model).__name__
        config = (tower := model.get_submodule(path)).config
        self.patch, self.channels = (
            _side(config, "patch_size"),
            _side(config, "num_channels", "in_channels", "in_chans"),
        )
        self.ragged = "grid_thw" in inspect.signature(tower.forward).parameters
        self.runs_vary = not self.ragged
        self._received: list[Tensor] = []
        if self.ragged:
            cell = _side(config, "spatial_merge_size", default=1)
            self.frames = _side(config, "temporal_patch_size", default=1)
            self.prepare = Prepare((1, cell, cell), grid)
            self.processor = ImagePatches(self.patch, self.channels, cell)
            example = [2 * cell, 2 * cell]
        else:
            side = _side(config, "image_size") // self.patch
            self.processor = ImagePatches(self.patch, self.channels, merge)
            example = [side, side]
        self.attend_end_to_end(tower)
        self.tile = (example[0], example[1])
        found = trace(model, path, self._example, None if layer == -1 else layer)
        self.block_list = f"model.{found.block_list}"
        self.before_blocks = tuple(f"model.{fqn}" for fqn in found.before)
        self.after_blocks = tuple(f"model.{fqn}" for fqn in found.after)
        self.needed = found.blocks
        for fqn in found.unreached:
            model.get_parameter(fqn).requires_grad_(False)
        blocks = model.get_submodule(found.block_list)
        tables = (part for part in {*model.modules()} - {*blocks.modules()} if part._buffers)
        for part in tables:
            if not list(part.parameters()):
                part.register_forward_pre_hook(_not_in_training)
        if layer != -1:
            blocks[self.needed].register_forward_pre_hook(stop, with_kwargs=True)
        patches = TILES * prod(self.tile)
        self.hidden_width, self._lead = found.rows_in[-1], found.rows_in[:-2]
        self.class_rows = (prod(found.rows_in[:-1]) - patches) // TILES
        self.tile_rows = prod(found.rows_out[:-1]) // TILES - self.class_rows
        self.width = found.rows_out[-1] * merge**2
        if merge > 1 and (self.ragged or any(side % merge for side in self.tile)):
            raise ModelError(f"{self.architecture}: its grid of {self.tile} patches cannot be merged by {merge}")

    def attend_end_to_end(self, tower: Any) -> None:
        """Give a tower that runs all rows end to end the attention that reads where its items end."""
        if not self.ragged:
            return
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        # Given to a constructor, transformers would look for a kernel of that name.
        for part in tower.modules():
            if (config := getattr(part, "config", None)) is not None:
                config._attn_implementation = ATTENTION

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
                container._modules[name] = Absent(None if number else self._received, number > last)
        for fqn in (*self.before_blocks * before, *self.after_blocks * after):
            owner, _, key = fqn.rpartition(".")
            part = self.get_submodule(fqn) if before and fqn in self.before_blocks else None
            setattr(self.get_submodule(owner), key, None if part is None else Hollow(part))

    # ---- forward ----------------------------------------------------------------------------------------------------

    @override
    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        """Run this stage; see :class:`HFTower`.

        Returns:
            Rows ``[sum(rows), width]``, or ``[sum(packing), hidden_width]`` for the next stage.
        """
        if not self.first_stage:
            previous_rows(hidden)
        if self.ragged:
            return self._end_to_end(inputs, hidden)
        if self._whole_tiles(inputs):
            return self._tiles(inputs, hidden, None)
        sizes, of_item = np.unique(inputs.sizes[:, -2:], axis=0, return_inverse=True)
        members = [np.flatnonzero(of_item.reshape(-1) == size) for size in range(len(sizes))]
        if len(members) < 2:
            return self._tiles(inputs, hidden, np.arange(len(inputs.sizes)))
        rows = torch.cat([self._tiles(inputs, hidden, items) for items in members])
        order = np.concatenate(members)
        lengths = inputs.rows if self.last_stage else inputs.packing.lengths
        starts = np.empty(len(order), np.int64)
        starts[order] = ragged.starts(lengths[order])
        return rows.index_select(0, host_index(ragged.expand(starts, lengths), rows))

    def _whole_tiles(self, inputs: EncoderInputs) -> bool:
        """Return whether a raw row is a tile, channels first, as transformers' processors make it."""
        return inputs.values.shape[1] == self.channels * prod(self.tile) * self.patch**2

    def _tiles(self, inputs: EncoderInputs, hidden: Tensor | None, items: np.ndarray | None) -> Tensor:
        """Run items of one size as one batch (None: all, in whole tiles), or a black tile if there are none."""
        if items is None:
            grid, tiles = self.tile, int(inputs.sizes[:, 0].sum())
            items, unit, scale = np.arange(len(inputs.sizes)), self.patch, 1
        else:
            tiles, unit = len(items), isqrt(inputs.values.shape[1] // self.channels)
            scale = self.patch // max(unit, 1)
            size = inputs.sizes[items[0], -2:].tolist() if tiles else [side * scale for side in self.tile]
            grid = (size[0] // scale, size[1] // scale)
            self._check_tiles(inputs, items, unit, (size[0], size[1]))
        count = max(tiles, 1)
        shape = (count, self.channels, grid[0] * self.patch, grid[1] * self.patch)
        if self.first_stage:
            pixels = self._pixels(inputs, items, shape, unit).to(next(self.model.parameters()).dtype)
        else:
            assert hidden is not None
            received = _some(hidden, inputs.packing.lengths, items, prod(grid) + self.class_rows)
            lead = [count] if self._lead == (TILES,) else self._lead
            self._received.append(received.reshape(*lead, -1, self.hidden_width))
            pixels = hidden.new_zeros(1).expand(shape)
        rows = self._run(lambda: self._features(self.model, pixels))
        if self.last_stage:
            rows = rows.reshape(count, -1, rows.shape[-1])[:, self.class_rows :]
            if (k := self.merge) > 1:
                cells = rows.unflatten(1, (grid[0] // k, k, grid[1] // k, k)).transpose(2, 3)
                rows = cells.reshape(-1, self.width)
        return rows.reshape(-1, rows.shape[-1])[: None if tiles else 0]

    def _pixels(self, inputs: EncoderInputs, items: np.ndarray, shape: tuple[int, ...], unit: int) -> Tensor:
        """Return tiles ``[n, channels, height, width]`` of items, whose raw rows are tiles, patches or pixels."""
        if self._whole_tiles(inputs):
            return _some(inputs.values, inputs.sizes[:, 0], items, 1).reshape(shape)
        count, channels, height, width = shape
        sides = height // unit, width // unit
        values = _some(inputs.values, inputs.sizes[:, -2:].prod(axis=1), items, prod(sides))
        patches = values.reshape(count, *sides, unit, unit, channels)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(shape)

    def _end_to_end(self, inputs: EncoderInputs, hidden: Tensor | None) -> Tensor:
        """Run all items end to end, or one of the least size if there are none."""
        assert self.prepare is not None
        if not isinstance(inputs, TowerInputs):
            inputs = self.prepare(inputs).to(inputs.values.device)
        total, items = int(self.prepare.grids(inputs.sizes).prod(1).sum()), np.arange(len(inputs.sizes))
        shape = (total, self.channels * self.frames * self.patch**2)
        if self.first_stage:
            values = self._as_taken(inputs, shape[1])
            values = _some(values, inputs.packing.lengths, items, total).to(next(self.model.parameters()).dtype)
        else:
            assert hidden is not None
            received = _some(hidden, inputs.packing.lengths, items, total)
            self._received.append(received.reshape(*self._lead, -1, self.hidden_width))
            values = hidden.new_zeros(1).expand(shape)
        tower = self.model.get_submodule(self.path)
        columns = inputs.columns
        rows = self._run(lambda: self._output(tower(values, **columns)))
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
        assert self.prepare is not None
        order = merge_order(self.prepare.grids(inputs.sizes)[: len(inputs.sizes), 1:].numpy(), self.prepare.least[1])
        patches = values[host_index(order, values)].unflatten(1, (self.patch, self.patch, self.channels))
        return patches.permute(0, 3, 1, 2)[:, :, None].expand(-1, -1, self.frames, -1, -1).flatten(1)

    def _run(self, call: Callable[[], Tensor]) -> Tensor:
        try:
            return call()
        except Reached as reached:
            return reached.rows
        finally:
            self._received.clear()

    def _features(self, model: Any, pixels: Tensor) -> Tensor:
        tower = model.get_submodule(self.path)
        takes = inspect.signature(tower.forward).parameters
        usual = tuple(side * self.patch for side in self.tile) == tuple(pixels.shape[2:])
        other = {} if usual or "interpolate_pos_encoding" not in takes else {"interpolate_pos_encoding": True}
        return self._output(tower(pixel_values=pixels, **other))

    def _output(self, output: Any) -> Tensor:
        """Return the rows of a tower's output: its merged ones, or else the last state's."""
        if not self.ragged or output.get("pooler_output") is None:
            return output.last_hidden_state
        return torch.cat([output.pooler_output, *(output.deepstack_features if self.deepstack else ())], dim=1)

    def _example(self, model: Any) -> Tensor:
        """Run a copy of the model on the meta device."""
        if not self.ragged:
            return self._features(model, torch.zeros(TILES, self.channels, *(side * self.patch for side in self.tile)))
        assert self.prepare is not None
        grids = torch.tensor([[1, *self.tile]] * TILES, device="cpu")
        tower = model.get_submodule(self.path)
        values = torch.zeros(TILES * prod(self.tile), self.channels * self.frames * self.patch**2)
        with self.prepare.recording(tower, grids) as empty:
            return self._output(tower(values, grid_thw=empty))

    def _check_tiles(self, inputs: EncoderInputs, items: np.ndarray, unit: int, size: tuple[int, int]) -> None:
        pixels = [side * unit for side in size]
        if (
            unit**2 * self.channels != inputs.values.shape[1]
            or self.patch % unit
            or any(p % self.patch for p in pixels)
        ):
            raise DataError(
                f"{self.architecture}: items of {size} values of {inputs.values.shape[1]} numbers are no whole patches"
                f" of {self.patch} x {self.patch} pixels with {self.channels} channels"
            )
        rows = pixels[0] * pixels[1] // self.patch**2 + self.class_rows
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
        return super().example_unit if self.ragged else prod(self.tile) + self.class_rows

    @override
    def example(self, lengths: np.ndarray) -> EncoderInputs | None:
        """Make pictures of about so many rows in sum: if rows do not lie end to end, each of the tower's own size."""
        if self.prepare is not None:
            made = super().example(lengths)
            return None if made is None else self.prepare(made)
        sizes = np.array([self.tile] * max(1, round(int(lengths.sum()) / self.example_unit)), np.int64)
        values = torch.empty(int(sizes.prod(axis=1).sum()), self.channels * self.patch**2)
        return EncoderInputs(values, sizes, self.output_rows(sizes), Packing.of(self.packing_rows(sizes)))

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        rows = self.packing_rows(sizes) - self.class_rows
        return rows * self.tile_rows // prod(self.tile) // self.merge**2

    def rows_of_folder(self) -> tuple[RowsOf, RowsOf]:
        """Return the functions of sizes of transformers' own processor to rows, at the edge and inside the tower."""
        if self.ragged:
            return RowsOf(3, 0, prod(self.tile) // self.tile_rows), RowsOf(3)
        return RowsOf(0, self.tile_rows // self.merge**2), RowsOf(0, prod(self.tile) + self.class_rows)

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return RowsOf(3 if self.ragged else 2, self.class_rows)(sizes)

    @override
    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        rows = int(np.sum(packing_lengths)) - self.class_rows * len(packing_lengths)
        return rows * self.tile_rows // prod(self.tile) // self.merge**2

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows = int(np.sum(packing_lengths))
        original: Any = self.meta_copy()
        before, after = (
            sum(matmul_weights(original.get_submodule(fqn)) for fqn in fqns) for fqns in original.around_blocks()
        )
        attention = 4 * self.hidden_width * attention_pairs(np.asarray(packing_lengths), causal=False)
        blocks = block_linear_flops(self) * rows + attention
        return float(2 * before * rows), blocks, float(2 * after * self.projected_rows(packing_lengths))

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


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    cu_seq_lens_q: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    if query.is_meta and not isinstance(cu_seq_lens_q, Packing):  # a trace, which has no packing
        cu_seq_lens_q = Packing.of(np.array([query.shape[2]])).to(query.device)
    if not isinstance(cu_seq_lens_q, Packing):
        raise ModelError(
            f"{type(module).__name__} does not say where its items end, or makes it on the device: not run"
        )
    out = packed_attention(query, key, value, cu_seq_lens_q, causal=False, scale=scaling, dropout=dropout)
    return out.transpose(1, 2), None


def _some(rows: Tensor, lengths: np.ndarray, items: np.ndarray, least: int) -> Tensor:
    """Return the rows of some items, or ``least`` zero rows if there are none."""
    if not len(items):  # they depend on the rows, so that a gradient reaches what made them
        return torch.cat([rows, rows.new_zeros(least, rows.shape[1])])
    return rows if len(items) == len(lengths) else runs_of(rows, lengths, items)


def _side(config: Any, *names: str, default: int | None = None) -> int:
    """Return a number of a config, or both numbers of a square."""
    found = next((value for name in names if (value := getattr(config, name, None)) is not None), default)
    numbers = {found} if isinstance(found, int) else set(found or ())
    if len(numbers) != 1:
        raise ModelError(f"{type(config).__name__}: {' or '.join(names)} is {found!r}; only squares are built")
    return int(numbers.pop())
