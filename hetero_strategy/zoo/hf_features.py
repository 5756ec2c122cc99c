"""A composite's encoder whose media are tiles: transformers' own ``get_image_features`` or ``get_audio_features``."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import replace
from itertools import product
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.adapter import NO_ROWS, linear_flops
from hetero_strategy.model.attention import attention_pairs
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.hf_folder import HFWeights
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.zoo.hf import HFAdapter, RowsOfColumn, initialize_by_rule, matmul_weights
from hetero_strategy.zoo.hf_trace import Trace, longest_list, trace

NUMBERS = {"image": ("image_sizes", "original_image_sizes"), "audio": ()}
"""Numbers of items that a features method may take; an item that stands in has the size of its picture there."""


class HFFeatures(HFAdapter, Encoder):
    """A tower with its projector, as a composite runs them: all tiles of a microbatch in one call.

    The tower is :attr:`backbone`; whatever else of the composite makes rows is in :attr:`projector`. Values are rows of
    whole tiles, ``[tiles, channels * height * width]`` or ``[clips, bands * frames]``. If tiles differ in size, they
    are pixels ``[R, channels]``, and ``columns`` has the ``tile``'s height and width in the sizes. Items then run
    one by one, so weights are gathered once per step.

    Parameters that no output reaches, such as those of CLIP's last block, are frozen, kept and exported. A method that
    selects tiles by their values, such as Idefics3's, cannot be traced: all its parameters train, and it waits for the
    device in each microbatch.

    Args:
        whole: transformers' model on the meta device, without its language model and other towers.
        kind: kind of the media, "image" or "audio".
        columns: transformers' name -> numbers with this name in the sizes of items, such as ``image_sizes``.
        checkpoint: local folder with the weights.
        processor: processor of files.

    Raises:
        ModelError: the tower has no list of blocks, or takes arguments that are unknown here.
    """

    media: str
    """Kind of the media."""
    method: str
    """Name of the method that turns tiles into rows, and below of its first argument."""
    values_name: str
    numbers: list[str]
    """Names of numbers of each item that it takes, too."""
    side: int
    """Side of a tile in pixels."""
    leading: int
    """Channels of a picture, or bands of a spectrogram."""
    frames: int
    """Frames of a spectrogram."""
    tiles: int
    """Fewest tiles of an item."""
    in_batch: bool
    """Whether tiles are given as those of one sample, in a dimension more."""
    tile_rows: int
    """Rows of a tile in the blocks."""
    edge_share: float
    """Rows at the edge for each row in the blocks."""

    def __init__(
        self,
        whole: Any,
        kind: str,
        *,
        columns: Mapping[str, slice],
        checkpoint: str | Path | None = None,
        processor: Any = None,
    ) -> None:
        tower, base = whole.get_encoder(modality=kind), whole.base_model
        origin = {id(tensor): fqn for fqn, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
        tower_path = next(fqn for fqn, part in whole.named_modules() if part is tower)
        config, method = tower.config, f"get_{kind}_features"
        takes = list(inspect.signature(getattr(base, method)).parameters)
        size = getattr(config, "image_size", None)
        self.__dict__.update(  # before nn.Module's constructor, which needs the traced model
            media=kind,
            method=method,
            values_name=takes[0],
            numbers=[name for name in NUMBERS[kind] if name in takes],
            side=size[0] if isinstance(size, (list, tuple)) else size,
            leading=_channels(config, kind),
            frames=2 * getattr(config, "max_source_positions", 0),
        )
        traced = self._traced(whole, tower_path)
        for fqn in traced.unreached:
            whole.get_parameter(fqn).requires_grad_(False)
        self.before_weights = sum(matmul_weights(whole.get_submodule(fqn)) for fqn in traced.before)
        owner, _, name = tower_path.rpartition(".")
        whole.get_submodule(owner)._modules[name] = Borrowed(tower)
        Encoder.__init__(self, tower, base, width=whole.config.get_text_config().hidden_size)
        self.columns, self.checkpoint = dict(columns), checkpoint
        self.runs_vary = "tile" in self.columns
        self.hidden_width, self.tile_rows = traced.rows_in[-1], prod(traced.rows_in[:-1]) // self.tiles
        self.edge_share = prod(traced.rows_out[:-1]) / prod(traced.rows_in[:-1])
        if processor is not None and processor.packing_rows is None:
            processor = replace(processor, packing_rows=self.rows_inside())
        self.processor = processor
        self.config, self.architecture, self.whole_class = whole.config, type(whole).__name__, type(whole)
        self.list_of_blocks = "backbone" + traced.block_list.removeprefix(tower_path)
        tensors = [*self.named_parameters(), *self.named_buffers()]
        self.origin = {fqn: origin[id(tensor)] for fqn, tensor in tensors}

    def _traced(self, whole: Any, tower_path: str) -> Trace:
        """Trace a call of the features' method, in the first way in which it runs: with tiles alone or with numbers of
        items, of one tile or of two (a picture as it is and a tile of it), with tiles in a batch of samples or not.
        """
        numbers: list[str] = self.numbers
        faults: list[Exception] = []
        reads_values: dict[str, Any] = {}
        for passed, tiles, in_batch in product(([], numbers) if numbers else ([],), (1, 2), (False, True)):
            self.__dict__.update(way := {"numbers": passed, "tiles": tiles, "in_batch": in_batch})
            try:
                return trace(whole, tower_path, self._example, None)
            except NotImplementedError:  # it selects tiles by their values, which the meta device lacks
                reads_values = way
                if in_batch:
                    break
            except Exception as fault:  # several kinds
                faults.append(fault)
        if reads_values:
            self.__dict__.update(reads_values)
            tower = whole.get_submodule(tower_path)
            rows = (self.tiles, (self.side // tower.config.patch_size) ** 2, tower.config.hidden_size)
            return Trace(longest_list(tower, tower_path)[0], 0, (), (), (), rows, rows)
        reasons = dict.fromkeys(f"{type(fault).__name__} {' '.join(str(fault).split())}" for fault in faults)
        raise ModelError(f"{type(whole).__name__}.{self.method} does not run on tiles: {'; '.join(reasons)}")

    # ---- forward ----------------------------------------------------------------------------------------------------

    @override
    def forward(
        self, inputs: EncoderInputs, rows: Mapping[Hashable, Tensor] = NO_ROWS, hidden: Tensor | None = None
    ) -> Tensor:
        if rows:
            raise DataError(f"an encoder takes no rows of other modules, got those of {sorted(map(str, rows))}")
        values = inputs.values.to(next(self.parameters()).dtype)
        if not len(inputs.sizes):  # one blank tile takes part in collectives
            return self._features(self.projector, *self._blank(values))[:0]
        numbers = {
            name: torch.from_numpy(inputs.sizes[:, self.columns[name]]) for name in self.numbers if name in self.columns
        }
        if self.runs_vary:
            features = self._one_by_one(values, inputs, numbers)
        else:
            features = self._features(self.projector, values.unflatten(1, self._tile(values.shape[1])), numbers)
        if len(features) != int(inputs.rows.sum()):
            raise DataError(self._miscounted(features, inputs))
        return features

    def _one_by_one(self, values: Tensor, inputs: EncoderInputs, numbers: Mapping[str, Tensor]) -> Tensor:
        """Run each item alone: towers for tiles of many sizes, such as Pixtral, compute attention between all rows of a
        call and mask it.
        """
        tiles = inputs.sizes[:, self.columns["tile"]]
        lengths = tiles.prod(axis=1) if inputs.raw_rows is None else inputs.raw_rows
        parts = []
        for item, (own, tile) in enumerate(zip(values.split(lengths.tolist()), tiles.tolist(), strict=True)):
            batch = own.unflatten(0, (-1, *tile)).movedim(-1, 1)
            parts.append(self._features(self.projector, batch, {n: each[[item]] for n, each in numbers.items()}))
        return torch.cat(parts)

    def _features(self, base: Any, tiles: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        arguments = {self.values_name: tiles[None] if self.in_batch else tiles, **numbers}
        return torch.cat(_flat(getattr(base, self.method)(**arguments, return_dict=True).pooler_output))

    def _tile(self, feature: int) -> tuple[int, ...]:
        """Return the shape of a tile with so many numbers."""
        rest = feature // self.leading
        return (self.leading, isqrt(rest), isqrt(rest)) if self.media == "image" else (self.leading, rest)

    def _blank(self, like: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a tile of ones and its numbers; Idefics3 drops tiles of zeros."""
        shape = (self.leading, self.side, self.side) if self.media == "image" else (self.leading, self.frames)
        tiles = torch.ones(1, *shape) if like is None else like.new_ones(1, *shape)
        size = torch.tensor([[self.side or 0, self.side or 0]], device="cpu")
        return tiles.expand(self.tiles, *shape), dict.fromkeys(self.numbers, size)

    def _example(self, whole: Any) -> Tensor:
        return self._features(whole.base_model, *self._blank(None))

    # ---- structure --------------------------------------------------------------------------------------------------

    @override
    def blocks(self) -> dict[str, nn.Module]:
        children = self.get_submodule(self.list_of_blocks).named_children()
        return {f"{self.list_of_blocks}.{name}": block for name, block in children}

    @property
    @override
    def can_be_cut(self) -> bool:
        return False

    @override
    def tp_plan(self) -> None:
        return None

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        original: Any = self.meta_copy()
        initialize_by_rule(unit, getattr(original.backbone, "_init_weights", original.projector._init_weights))

    @override
    def hf_weights(self) -> HFWeights:
        kept = self.meta_copy().state_dict()
        names = {fqn: name for fqn, name in self.origin.items() if fqn in kept}
        config = {**self.config.to_dict(), "architectures": [self.architecture]}
        return HFWeights(names, config, model_class=self.whole_class)

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        original: Any = self.meta_copy()
        rows = float(np.sum(packing_lengths))
        pairs = attention_pairs(packing_lengths, causal=False) if self.runs_vary else rows * self.tile_rows
        attention = 4 * self.hidden_width * pairs
        blocks = np.array([linear_flops(block) * rows + attention for block in original.blocks().values()])
        return 2 * self.before_weights * rows, blocks, linear_flops(original.projector) * rows * self.edge_share

    def rows_inside(self) -> RowsOfColumn:
        """Return the function of a processor's sizes to rows in the blocks."""
        if not self.runs_vary:
            return RowsOfColumn(0, self.tile_rows)
        numbers = self.side**2 if self.media == "image" else self.frames
        return RowsOfColumn(0, divisor=numbers // self.tile_rows)


class Borrowed(nn.Module):
    """A module in the place of another one, which belongs to another parent and is run."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.__dict__["part"] = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["part"], name)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["part"](*args, **kwargs)


def _channels(config: Any, kind: str) -> int:
    names = ("num_channels", "in_channels") if kind == "image" else ("num_mel_bins",)
    size = next((value for name in names if (value := getattr(config, name, None))), None)
    if size is None:
        raise ModelError(
            f"hf_composite: {type(config).__name__} has no {' or '.join(names)}; take the language model by"
            " hf_causal_lm(part='llm')"
        )
    return int(size)


def _flat(rows: Any) -> list[Tensor]:
    """Return rows ``[n, width]`` of nested results."""
    if isinstance(rows, Tensor):
        return [rows.reshape(-1, rows.shape[-1])]
    return [part for each in rows for part in _flat(each)]
