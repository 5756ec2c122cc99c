"""A small image decoder trained by flow matching, conditioned on the rows of a language model.

Rectified flow (Liu et al. 2022, section 2.1; Lipman et al. 2022): ``x_t = (1 - t) noise + t data``, and the network
predicts the velocity ``data - noise``; an image is drawn by integrating it from noise. The network is a diffusion
transformer (Peebles and Xie 2022, section 3.2): blocks modulated by the time and the condition (adaLN), here over one
sequence per item that holds its condition rows and its patches. The condition that modulates is the item's first row as
it enters the block, so that a pipeline stage needs nothing but rows and times.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError, check_sizes
from hetero_strategy.model.adapter import block_linear_flops, linear_flops
from hetero_strategy.model.attention import attention_pairs, packed_attention
from hetero_strategy.model.generator import Generator, GeneratorInputs
from hetero_strategy.model.inputs import Packing, TargetPatches, host_index, without_waiting
from hetero_strategy.model.tensor_parallel import divisible

TIME_FEATURES = 64


class Modulation(nn.Module):
    """A map from the items' times and conditions to tensors that scale, shift and gate rows. Stages share none."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.of_time = nn.Linear(TIME_FEATURES, dim)
        self.of_condition = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, count * dim)

    def forward(self, rows: Tensor, times: Tensor, first: Tensor, packing: Packing) -> tuple[Tensor, ...]:
        """Return ``count`` tensors ``[T, dim]``.

        Args:
            rows: ``[T, dim]``.
            times: time features ``[n, TIME_FEATURES]``.
            first: int64 ``[n]``, the first row of each item, which holds its condition.
            packing: the T rows of the n items.
        """
        conditions = _normed(rows.index_select(0, first))
        factors: Tensor = self.down(F.silu(self.of_time(times) + self.of_condition(conditions)))
        return factors.index_select(0, packing.sequence).chunk(self.count, dim=-1)


class Attention(nn.Module):
    """A bidirectional attention inside every item."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, rows: Tensor, packing: Packing) -> Tensor:
        """Attend among rows ``[T, dim]``; the shape stays."""
        # -1 heads: tensor parallelism leaves only this rank's.
        split = (linear(rows).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        query, key, value = (part.transpose(0, 1)[None] for part in split)
        out = packed_attention(query, key, value, packing, causal=False)
        return self.wo(out[0].transpose(0, 1).flatten(1))


class Block(nn.Module):
    """An attention and a feed-forward network, each modulated by the item's time and condition."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.modulation = Modulation(dim, 6)
        self.attention = Attention(dim, heads)
        self.up = nn.Linear(dim, ffn)
        self.down = nn.Linear(ffn, dim)

    def forward(self, rows: Tensor, times: Tensor, first: Tensor, packing: Packing) -> Tensor:
        """Transform rows ``[T, dim]``; arguments as in :class:`Modulation`."""
        scale, shift, gate, scale2, shift2, gate2 = self.modulation(rows, times, first, packing)
        # Gates are around 1, where DiT starts at 0: a new block is an ordinary transformer block.
        rows = rows + (1 + gate) * self.attention(_normed(rows) * (1 + scale) + shift, packing)
        inner = F.gelu(self.up(_normed(rows) * (1 + scale2) + shift2))
        return rows + (1 + gate2) * self.down(inner)


class FlowDecoder(Generator):
    """A flow-matching generator, built by :func:`flow_decoder`; this file's docstring describes it."""

    block_list = "layers"
    before_blocks = ("condition_norm", "condition_in", "patch_in")
    after_blocks = ("modulation_out", "patch_out")
    tp_columns = ("attention.wq", "attention.wk", "attention.wv", "up")
    tp_rows = ("attention.wo", "down")

    def __init__(self, width: int, feature: int, dim: int, n_layers: int, n_heads: int, ffn: int, steps: int) -> None:
        super().__init__()
        self.width, self.feature, self.dim = width, feature, dim
        self.hidden_width = dim
        self.n_heads, self.ffn, self.sample_steps = n_heads, ffn, steps
        # A language model's rows are not normalised between its blocks and its head.
        self.condition_norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.condition_in: nn.Linear | None = nn.Linear(width, dim)
        self.patch_in: nn.Linear | None = nn.Linear(feature, dim)
        self.layers = nn.ModuleDict({str(number): Block(dim, n_heads, ffn) for number in range(n_layers)})
        self.modulation_out: Modulation | None = Modulation(dim, 2)
        self.patch_out: nn.Linear | None = nn.Linear(dim, feature)

    @override
    def embed(self, inputs: GeneratorInputs, conditions: Tensor, index: Tensor) -> Tensor:
        values, noise, time = self._targets(inputs)
        return self._rows(time * values + (1 - time) * noise, inputs, self._condition(conditions), index)

    @override
    def transform(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        times, first = time_features(inputs.time, hidden.dtype), _first_rows(inputs)
        for block in self.blocks().values():
            hidden = block(hidden, times, first, inputs.packing)
        return hidden

    @override
    def loss(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        values, noise, _ = self._targets(inputs)
        velocity = self._velocity(hidden, inputs)
        with torch.autocast(hidden.device.type, enabled=False):
            error = (velocity.to(values.dtype) - (values - noise)).square()
            if inputs.counted is not None:
                error = error * inputs.counted[self._item_of_rows(inputs)][:, None]
            return error.sum()

    @override
    def draw(self, inputs: GeneratorInputs, conditions: Tensor, index: Tensor) -> Tensor:
        """Integrate by Euler's method in ``sample_steps`` equal steps."""
        _, drawn, _ = self._targets(inputs)
        conditions = self._condition(conditions)
        for step in range(self.sample_steps):
            now = replace(inputs, time=torch.full_like(inputs.time, step / self.sample_steps))
            hidden = self.transform(self._rows(drawn, inputs, conditions, index), now)
            drawn = drawn + self._velocity(hidden, now).to(drawn.dtype) / self.sample_steps
        return drawn

    @override
    def check_tp(self, tp: int) -> list[str]:
        return divisible(tp, heads=self.n_heads, feed_forward_width=self.ffn)

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Draw matrices by the number of their inputs and set biases to 0.

        Modulating and predicting layers start small but not at 0, so gradients reach every parameter from the first
        step.
        """
        for name, module in unit.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                small = name.endswith(("modulation.down", "modulation_out.down", "patch_out"))
                nn.init.normal_(module.weight, std=(0.1 if small else 0.7) * module.in_features**-0.5)
                nn.init.zeros_(module.bias)

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        # Around the blocks all rows count as patches: lengths do not say which rows are conditions.
        original: Any = self.meta_copy()
        rows = int(np.sum(packing_lengths))
        items = len(packing_lengths)
        attention = 4 * self.dim * attention_pairs(packing_lengths, causal=False)
        modulation = linear_flops(next(iter(original.blocks().values())).modulation)
        blocks = rows * (block_linear_flops(self) - modulation) + items * modulation + attention
        after = rows * 2.0 * self.dim * self.feature + items * linear_flops(original.modulation_out)
        return rows * 2.0 * self.dim * self.feature, blocks, after

    def _condition(self, conditions: Tensor) -> Tensor:
        assert self.condition_norm is not None and self.condition_in is not None
        return self.condition_in(self.condition_norm(conditions.to(self.condition_norm.weight.dtype)))

    def _rows(self, noised: Tensor, inputs: GeneratorInputs, conditions: Tensor, index: Tensor) -> Tensor:
        """Lay noised patches ``[R, feature]`` and projected conditions ``[C, dim]`` out as rows ``[T, dim]`` with
        positions.
        """
        assert self.patch_in is not None
        grids = inputs.sizes.reshape(-1, 2)
        if not np.array_equal(grids.prod(axis=1), inputs.target_rows):
            raise DataError("flow_decoder: grids.prod(1) must equal the target rows of every item")
        if noised.shape != (int(inputs.target_rows.sum()), self.feature):
            raise DataError(
                f"flow_decoder: patches have shape {tuple(noised.shape)}, expected "
                f"({int(inputs.target_rows.sum())}, {self.feature}): patch_size and channels must match the data's"
            )
        patches = self.patch_in(noised.to(self.patch_in.weight.dtype))
        rows = patches.new_zeros(inputs.packing.rows, self.dim)
        rows = rows.index_copy(0, self._patch_index(inputs), patches)
        rows = rows.index_copy(0, index, conditions.to(rows.dtype))
        return rows + positions(inputs, self.dim, rows)

    def _velocity(self, hidden: Tensor, inputs: GeneratorInputs) -> Tensor:
        """Predict ``[R, feature]`` from the last block's rows."""
        assert self.modulation_out is not None and self.patch_out is not None
        times, first = time_features(inputs.time, hidden.dtype), _first_rows(inputs)
        scale, shift = self.modulation_out(hidden, times, first, inputs.packing)
        return self.patch_out((_normed(hidden) * (1 + scale) + shift)[self._patch_index(inputs)])

    def _targets(self, inputs: GeneratorInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, noise and the time of every target row ``[R, 1]``, fp64 in an fp64 model, else fp32."""
        # Do not read the dtype from a parameter: masters, gathered weights and recomputation may use other dtypes.
        dtype = self.compute_dtype or next(self.parameters()).dtype
        dtype = dtype if dtype == torch.float64 else torch.float32
        time = inputs.time.to(dtype)[self._item_of_rows(inputs)]
        return inputs.values.to(dtype), inputs.noise.to(dtype), time[:, None]

    def _item_of_rows(self, inputs: GeneratorInputs) -> Tensor:
        """Return the item number of every target row, int64 ``[R]``."""
        return host_index(np.repeat(np.arange(len(inputs.rows)), inputs.target_rows), inputs.time)

    def _patch_index(self, inputs: GeneratorInputs) -> Tensor:
        """Return the packed rows that are patches, int64 ``[R]``."""
        starts = ragged.starts(inputs.packing.lengths)
        return host_index(ragged.expand(starts + inputs.rows, inputs.target_rows), inputs.time)


def flow_decoder(
    *,
    width: int,
    patch_size: int,
    channels: int = 3,
    dim: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    ffn: int | None = None,
    sample_steps: int = 16,
) -> FlowDecoder:
    """Build a :class:`FlowDecoder` that draws images.

    Args:
        width: width of the language model's rows.
        patch_size: pixels on a side of a patch.
        channels: 3 (RGB) or 1 (grey).
        dim: width of the rows inside the decoder.
        ffn: inner width of the feed-forward network, ``4 * dim`` by default.
        sample_steps: Euler steps that draw an image.

    Raises:
        ModelError: the sizes do not fit together.
    """
    sizes = {"width": width, "patch_size": patch_size, "channels": channels, "dim": dim, "n_heads": n_heads}
    sizes |= {"n_layers": n_layers, "ffn": 1 if ffn is None else ffn, "sample_steps": sample_steps}
    check_sizes("flow_decoder", **sizes)
    if dim % n_heads or dim % 4:
        raise ModelError(f"flow_decoder: dim {dim} must be a multiple of n_heads {n_heads} and of 4 (positions)")
    decoder = FlowDecoder(width, patch_size**2 * channels, dim, n_layers, n_heads, ffn or 4 * dim, sample_steps)
    decoder.processor = TargetPatches(patch_size, channels)
    return decoder


def time_features(time: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines of times in 0..1, ``[n, TIME_FEATURES]``."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    half = TIME_FEATURES // 2
    rates = torch.exp(torch.arange(half, dtype=precise, device=time.device) * (-math.log(1000.0) / (half - 1)))
    angles = 1000.0 * time.to(precise)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def positions(inputs: GeneratorInputs, dim: int, like: Tensor) -> Tensor:
    """Return sine tables ``[T, dim]`` of a patch's row and column; condition ``i`` counts as column ``i`` of row -1."""
    sizes, conditions = inputs.sizes.reshape(-1, 2), inputs.rows
    lengths = conditions + sizes.prod(axis=1)
    place = ragged.within(lengths)
    first, width = np.repeat(conditions, lengths), np.repeat(sizes[:, 1], lengths)
    row, column = np.divmod(place - first, np.maximum(width, 1))
    drawn = place >= first
    cells = np.stack([np.where(drawn, row, -1), np.where(drawn, column, place)], axis=1)
    angles = np.arange(-1.0, cells.max(initial=0) + 1)[:, None] * (100.0 ** -np.linspace(0.0, 1.0, dim // 4))
    table = torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1)).to(like.dtype)
    return without_waiting(table, like.device)[host_index(cells + 1, like)].reshape(-1, dim)


def _first_rows(inputs: GeneratorInputs) -> Tensor:
    """Return the first packed row of every item, int64 ``[n]``."""
    lengths = inputs.packing.lengths
    return host_index(ragged.starts(lengths), inputs.time)


def _normed(rows: Tensor) -> Tensor:
    return F.layer_norm(rows, rows.shape[-1:])
