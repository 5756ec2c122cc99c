"""SigLIP 2 (NaFlex): images at native resolution and aspect ratio, end to end in one row dimension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Resampling
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError, check_sizes, is_whole
from hetero_strategy.model.adapter import block_linear_flops, linear_flops
from hetero_strategy.model.attention import attention_pairs
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.hf_folder import read_processor
from hetero_strategy.model.inputs import EncoderInputs, ImagePatches, host_index
from hetero_strategy.model.tensor_parallel import divisible
from hetero_strategy.zoo.hf import HFAdapter, make_config, make_model

FOLDER = {"mean": "image_mean", "std": "image_std", "resample": "resample"}
"""Field of a processor -> its name in Hugging Face's folders."""


class Siglip2Backbone(HFAdapter, Backbone):
    """A wrapper of transformers' ``Siglip2VisionModel`` without its pooling head, under :attr:`model`.

    It takes patches ``[R, patch * patch * channels]`` in raster order and grids ``(height, width)`` in patches, and
    returns ``[sum(height * width) / merge**2, width]``.

    Args:
        config: a ``Siglip2VisionConfig``.
        merge: side of the square of neighbouring patches that become one row; cells are in raster order, and so are the
            patches inside a cell.
        checkpoint: local folder with the weights.
    """

    block_list = "model.encoder.layers"
    before_blocks = ("model.embeddings",)
    after_blocks = ("model.post_layernorm",)
    tp_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1")
    tp_rows = ("self_attn.out_proj", "mlp.fc2")
    architecture = "Siglip2VisionModel"
    context_parallel = True

    def __init__(self, config: Any, *, merge: int = 1, checkpoint: str | Path | None = None) -> None:
        from transformers import Siglip2VisionModel

        from hetero_strategy.zoo.siglip2_attention import PackedSiglip2Attention

        super().__init__()
        check_sizes("siglip2", merge=merge)
        config.vision_use_head = False  # nobody reads its pooled rows, so its parameters would get no gradient
        self.model = make_model(Siglip2VisionModel, config)
        for layer in self.model.encoder.layers:
            layer.self_attn = PackedSiglip2Attention(config)
        self.config = self.model.config
        self.merge = merge
        self.hidden_width, self.attention_heads = config.hidden_size, config.num_attention_heads
        self.width = config.hidden_size * merge**2
        self.checkpoint = checkpoint
        seen = {} if checkpoint is None else _seen(checkpoint)
        self.folder_processor = {FOLDER[name]: value for name, value in seen.items()}
        self.processor = ImagePatches(config.patch_size, config.num_channels, merge, **seen)

    @override
    def embed(self, inputs: EncoderInputs) -> Tensor:
        self._check(inputs)
        embeddings = self.model.embeddings
        rows: Tensor = embeddings.patch_embedding(inputs.values.to(embeddings.patch_embedding.weight.dtype))
        return rows + self._positions(inputs)

    @override
    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        rows = rows[None]
        for layer in self.blocks().values():
            rows = layer(rows, None, packing=inputs.packing)
        return rows[0]

    @override
    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        rows = self.model.post_layernorm(rows)
        if self.merge == 1:
            return rows
        return rows[host_index(merge_order(inputs.sizes, self.merge), rows)].reshape(-1, self.width)

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        grids = sizes.reshape(-1, 2)
        if (grids % self.merge).any():
            raise DataError(
                f"siglip2: grid {grids[(grids % self.merge).any(1)][0]} is not divisible by merge={self.merge}"
            )
        return grids.prod(axis=1) // self.merge**2

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return sizes.reshape(-1, 2).prod(axis=1)

    @override
    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        return int(np.sum(packing_lengths)) // self.merge**2

    @override
    def check_tp(self, tp: int) -> list[str]:
        return divisible(tp, heads=self.config.num_attention_heads, feed_forward_width=self.config.intermediate_size)

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows = int(np.sum(packing_lengths))
        attention = 4 * self.config.hidden_size * attention_pairs(packing_lengths, causal=False)
        original: Any = self.meta_copy()
        embed = float(linear_flops(original.model.embeddings) * rows)
        return embed, block_linear_flops(self) * rows + attention, 0.0

    def _positions(self, inputs: EncoderInputs) -> Tensor:
        """Return position rows ``[R, hidden]``, resizing the square table once per distinct grid."""
        weight = self.model.embeddings.position_embedding.weight
        grids, which = np.unique(inputs.sizes.reshape(-1, 2), axis=0, return_inverse=True)
        if len(grids) == 0:
            return weight[:0]
        side = self.model.embeddings.position_embedding_size
        # Antialiasing has no half-precision kernel on the CPU.
        half = weight.dtype in (torch.float16, torch.bfloat16) and weight.device.type == "cpu"
        table = (weight.float() if half else weight).reshape(1, side, side, -1).permute(0, 3, 1, 2)
        resized = [
            F.interpolate(table, size=(int(h), int(w)), mode="bilinear", align_corners=False, antialias=True)
            .flatten(2)[0]
            .T
            for h, w in grids
        ]
        rows = torch.cat(resized).to(weight.dtype)
        sizes = grids.prod(axis=1)
        first = ragged.starts(sizes)[which.reshape(-1)]
        return F.embedding(host_index(ragged.expand(first, inputs.packing.lengths), rows), rows)

    def _check(self, inputs: EncoderInputs) -> None:
        grids = inputs.sizes.reshape(-1, 2)
        if (grids < 1).any() or not np.array_equal(grids.prod(axis=1), inputs.packing.lengths):
            raise DataError("siglip2: sizes must be positive and sizes.prod(1) equal the packing's lengths")
        self.output_rows(grids)
        features = self.model.embeddings.patch_embedding.in_features
        if inputs.values.shape != (inputs.packing.rows, features):
            raise DataError(
                f"siglip2: patches have shape {tuple(inputs.values.shape)}, expected "
                f"({inputs.packing.rows}, {features}) for patch_size {self.config.patch_size}"
            )


def _seen(checkpoint: str | Path) -> dict[str, Any]:
    """Return how a folder resizes and normalises pixels, as far as that differs from the default."""
    read = read_processor(checkpoint, "image_processor")
    kept = {name: read[name] for name in ("rescale_factor", "image_mean", "image_std") if read.get(name) is not None}
    if read.get("do_normalize") is False:  # mean and deviation are not used
        kept |= {"image_mean": 0.0, "image_std": 1.0}
    try:
        numbers = {name: np.array(value, np.float64) for name, value in kept.items()}
    except (TypeError, ValueError):
        raise ModelError(f"siglip2: {checkpoint} says of its pixels {kept}; correct what is no number there") from None
    resample = read.get("resample")
    if resample is not None and not (is_whole(resample) and int(resample) in [*Resampling]):
        raise ModelError(
            f"siglip2: {checkpoint} says of its pixels resample={resample!r}; correct it to the number of a filter of"
            " Pillow, such as 2 (bilinear)"
        )
    scale = 1.0 if read.get("do_rescale") is not False else 255.0
    if scale == 1.0 and "rescale_factor" in numbers:
        scale = round(float(numbers["rescale_factor"]) * 255, 9)
    # transformers' (scale * x - mean) / deviation, for pixels x from 0 to 1, written as (x - mean) / deviation
    statistics = {name: numbers.get(f"image_{name}", np.array(0.5)) / scale for name in ("mean", "std")}
    normalise = {
        name: tuple(value.tolist()) if value.ndim else float(value)
        for name, value in statistics.items()
        if set(value.ravel().tolist()) != {0.5}
    }
    return normalise if resample in (None, Resampling.BILINEAR) else {**normalise, "resample": int(resample)}


def merge_order(grids: np.ndarray, merge: int) -> np.ndarray:
    """Return row numbers of several grids' raster patches, each ``merge x merge`` cell contiguous, int64 ``[R]``."""
    grids = grids.reshape(-1, 2)
    lengths = grids.prod(axis=1)
    step = ragged.expand(np.zeros_like(lengths), lengths)
    width = np.repeat(grids[:, 1], lengths)
    # Patch number ``step`` of an image, counted cell by cell, is at (row, column).
    cell, inside = step // merge**2, step % merge**2
    row = cell // (width // merge) * merge + inside // merge
    column = cell % (width // merge) * merge + inside % merge
    return np.repeat(ragged.starts(lengths), lengths) + row * width + column


def siglip2_encoder(
    *,
    out_width: int,
    merge: int = 1,
    projector_hidden: int | None = None,
    checkpoint: str | Path | None = None,
    before: Callable[[EncoderInputs], EncoderInputs] | None = None,
    after: Callable[[Tensor, EncoderInputs], Tensor] | None = None,
    **fields: Any,
) -> Encoder:
    """Build SigLIP 2 and a projector.

    Args:
        out_width: width of the rows of the language model.
        merge: side of the square of patches that become one row, as in :class:`Siglip2Backbone`.
        projector_hidden: inner width of the projector, ``out_width`` by default.
        checkpoint: local folder of a ``Siglip2VisionModel`` or a whole ``Siglip2Model``.
        before, after: functions around the encoder, as in :class:`Encoder`.
        **fields: fields of ``Siglip2VisionConfig``; they exclude ``checkpoint``.

    Raises:
        ModelError: a field is unknown, or the folder belongs to another model.
    """
    from transformers import Siglip2VisionConfig

    config = make_config(
        "siglip2_encoder",
        Siglip2VisionConfig,
        checkpoint,
        fields,
        model_types=("siglip2", "siglip2_vision_model"),
        section="vision_config",
        instead="; take a SigLIP 2 of any resolution (NaFlex), such as google/siglip2-so400m-patch16-naflex",
    )
    check_sizes("siglip2_encoder", out_width=out_width)
    backbone = Siglip2Backbone(config, merge=merge, checkpoint=checkpoint)
    return Encoder(backbone, Projector(backbone.width, out_width, projector_hidden), before=before, after=after)
