"""SigLIP 2 (NaFlex): images at native resolution and aspect ratio, end to end in one row dimension."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.adapter import block_linear_flops, divisible, drop_blocks, held_blocks, linear_flops
from hetero_strategy.model.attention import attention_pairs
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.hf import export_hf_config, hf_config, initialize_hf, parsed_config
from hetero_strategy.model.hf_folder import read_config
from hetero_strategy.model.inputs import EncoderInputs, Packing, host_index

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Siglip2Backbone(Backbone):
    """transformers' ``Siglip2VisionModel`` without its pooling head, under :attr:`model`.

    Takes patches ``[R, patch * patch * channels]`` in raster order and grids ``(height, width)`` in patches; gives
    ``[sum(height * width) / merge**2, width]``.

    Args:
        config: ``Siglip2VisionConfig``.
        merge: side of the square of neighbouring patches that become one row; cells are in raster order, and so are
            the patches inside a cell.
        checkpoint: local folder of the weights.
    """

    def __init__(self, config: Any, *, merge: int = 1, checkpoint: str | None = None) -> None:
        from transformers import Siglip2VisionModel

        from hetero_strategy.model.siglip2_attention import PackedSiglip2Attention

        super().__init__()
        if merge < 1:
            raise ModelError(f"siglip2: merge must be at least 1, got {merge}")
        config.vision_use_head = False  # it sees pooled rows that nobody reads, so its parameters would get no gradient
        with torch.device("meta"):
            self.model = Siglip2VisionModel(config)
            for layer in self.model.encoder.layers:
                layer.self_attn = PackedSiglip2Attention(config)
        self.config = self.model.config
        self.merge = merge
        self.hidden_width = config.hidden_size
        self.width = config.hidden_size * merge**2
        self.checkpoint = checkpoint

    def embed(self, inputs: EncoderInputs) -> Tensor:
        """A row per patch, with its position."""
        self._check(inputs)
        embeddings = self.model.embeddings
        rows: Tensor = embeddings.patch_embedding(inputs.values.to(embeddings.patch_embedding.weight.dtype))
        return rows + self._positions(inputs)

    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """The layers that are here, in order."""
        rows = rows[None]
        for layer in self.blocks().values():
            rows = layer(rows, None, packing=inputs.packing)
        return rows[0]

    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Final norm; cells of patches side by side."""
        rows = self.model.post_layernorm(rows)
        if self.merge == 1:
            return rows
        return rows[host_index(merge_order(inputs.sizes, self.merge), rows)].reshape(-1, self.width)

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """``(height / merge) * (width / merge)``."""
        grids = sizes.reshape(-1, 2)
        if (grids % self.merge).any():
            raise DataError(
                f"siglip2: grid {grids[(grids % self.merge).any(1)][0]} is not divisible by merge={self.merge}"
            )
        return grids.prod(axis=1) // self.merge**2

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """``height * width``."""
        return sizes.reshape(-1, 2).prod(axis=1)

    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        """A row per cell."""
        return int(np.sum(packing_lengths)) // self.merge**2

    def blocks(self) -> dict[str, nn.Module]:
        """``model.encoder.layers.N``."""
        return held_blocks(self.model.encoder.layers, "model.encoder.layers")

    def drop(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """Remove parts; the numbers of the other layers stay."""
        model: Any = self.model
        drop_blocks(model.encoder.layers, blocks)
        if before:
            model.embeddings = None
        if after:
            model.post_layernorm = None

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """Columns of q, k, v and fc1, rows of out and fc2."""
        return vit_tp_plan("model.encoder.layers.*", up="mlp.fc1", down="mlp.fc2")

    def check_tp(self, tp: int) -> list[str]:
        """Heads and the feed-forward width must divide."""
        return divisible(tp, heads=self.config.num_attention_heads, feed_forward_width=self.config.intermediate_size)

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """transformers' rules."""
        initialize_hf(self.model, unit if prefix else unit.model)  # type: ignore[arg-type]

    def export_names(self) -> dict[str, str]:
        """Names without our leading ``model.``."""
        return {fqn: fqn.removeprefix("model.") for fqn, _ in self.twin().named_parameters()}

    def export_config(self) -> dict[str, Any] | None:
        """The vision config."""
        return export_hf_config(self.config, "Siglip2VisionModel")

    def export_prefixes(self) -> tuple[str, ...]:
        """Alone, or inside a whole SigLIP 2."""
        return ("", "vision_model.")

    def unused_export(self, name: str) -> bool:
        """The pooling head, and the text side of a whole SigLIP 2."""
        return name.removeprefix("vision_model.").startswith("head.") or name.startswith(("text_model.", "logit_"))

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """Patch embedding, matmuls and bidirectional attention."""
        packing = Packing.of(packing_lengths)
        attention = 4 * self.config.hidden_size * attention_pairs(packing, causal=False)
        twin: Any = self.twin()
        embed = float(linear_flops(twin.model.embeddings) * packing.rows)
        return embed, block_linear_flops(self) * packing.rows + attention, 0.0

    def _positions(self, inputs: EncoderInputs) -> Tensor:
        """Position rows ``[R, hidden]``: the square table resized once per distinct grid."""
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
        index = host_index(np.repeat(first, inputs.packing.lengths), rows) + inputs.packing.positions
        return F.embedding(index, rows)

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


def merge_order(grids: np.ndarray, merge: int) -> np.ndarray:
    """Row numbers of raster patches of several grids, reordered so that each ``merge x merge`` cell is contiguous."""
    grids = grids.reshape(-1, 2)
    lengths = grids.prod(axis=1)
    step = np.arange(int(lengths.sum())) - np.repeat(ragged.starts(lengths), lengths)
    width = np.repeat(grids[:, 1], lengths)
    # Place `step` of an image, counted cell by cell, is patch (row, column).
    cell, inside = step // merge**2, step % merge**2
    row = cell // (width // merge) * merge + inside // merge
    column = cell % (width // merge) * merge + inside % merge
    return np.repeat(ragged.starts(lengths), lengths) + row * width + column


def vit_tp_plan(layers: str, *, up: str, down: str) -> dict[str, ParallelStyle]:
    """Plan of an encoder with ``self_attn.{q,k,v,out}_proj`` and a two-layer feed-forward."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, ParallelStyle] = {f"{layers}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"{layers}.{up}": ColwiseParallel(), f"{layers}.{down}": RowwiseParallel()}
    plan[f"{layers}.self_attn.out_proj"] = RowwiseParallel()
    return plan


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
    """SigLIP 2 and a projector.

    Args:
        out_width: width of the rows of the language model.
        merge: see :class:`Siglip2Backbone`.
        projector_hidden: inner width of the projector, ``out_width`` by default.
        checkpoint: local folder of a ``Siglip2VisionModel`` or a whole ``Siglip2Model``.
        before: see :class:`Encoder`.
        after: see :class:`Encoder`.
        **fields: of ``Siglip2VisionConfig``, not together with ``checkpoint``.

    Raises:
        ModelError: an unknown field, or a folder of another model.
    """
    from transformers import Siglip2VisionConfig

    who = "siglip2_encoder"
    if checkpoint is None:
        config = hf_config(Siglip2VisionConfig, fields, who)
    elif fields:
        raise ModelError(f"{who}: checkpoint= fixes the sizes, so remove {sorted(fields)}")
    else:
        content = read_config(checkpoint)
        if content.get("model_type") not in ("siglip2", "siglip2_vision_model"):
            raise ModelError(f"{who}: {checkpoint}/config.json is of a {content.get('model_type')!r} model")
        config = parsed_config(Siglip2VisionConfig, content.get("vision_config", content), who)
    backbone = Siglip2Backbone(config, merge=merge, checkpoint=None if checkpoint is None else str(checkpoint))
    projector = Projector(backbone.width, out_width, projector_hidden)
    return Encoder(backbone, projector, before=before, after=after)
