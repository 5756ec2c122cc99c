"""Whisper's encoder over clips of any length, packed; nothing is padded to 30 seconds."""

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
from hetero_strategy.model.adapter import block_linear_flops, divisible, drop_blocks, held_blocks
from hetero_strategy.model.attention import HF_ATTENTION, attention_pairs, register_hf_attention
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.hf import at_least_one_row, export_hf_config, hf_config, initialize_hf, parsed_config
from hetero_strategy.model.hf_folder import read_config
from hetero_strategy.model.inputs import EncoderInputs, Packing, host_index
from hetero_strategy.model.siglip2 import vit_tp_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class WhisperBackbone(Backbone):
    """transformers' ``WhisperEncoder``, under :attr:`model`.

    Takes mel frames ``[R, mel bins]`` and sizes ``(frames,)``; gives ``[sum(ceil(ceil(frames / 2) / stack)), width]``.

    The two convolutions run once over all clips, which lie end to end with one or two silent frames between them.
    What the first one writes into those gaps is zeroed, so each clip comes out as if it were alone.

    Args:
        config: ``WhisperConfig``.
        stack: neighbouring rows that are concatenated into one; a clip's last row is filled with zeros.
        checkpoint: local folder of the weights.
    """

    def __init__(self, config: Any, *, stack: int = 1, checkpoint: str | None = None) -> None:
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        super().__init__()
        if stack < 1:
            raise ModelError(f"whisper: stack must be at least 1, got {stack}")
        if config.encoder_layerdrop:
            raise ModelError(
                f"whisper: encoder_layerdrop={config.encoder_layerdrop} skips layers at random, on which ranks cannot "
                "agree: set it to 0"
            )
        register_hf_attention()
        with torch.device("meta"):
            self.model = WhisperEncoder(config)
        self.model.config._attn_implementation = HF_ATTENTION
        self.config = self.model.config
        self.stack = stack
        self.hidden_width = config.d_model
        self.width = config.d_model * stack
        self.checkpoint = checkpoint

    def embed(self, inputs: EncoderInputs) -> Tensor:
        """A row per two frames, with its position."""
        self._check(inputs)
        rows = self._convolve(inputs)
        rows = rows + self.model.embed_positions(inputs.packing.positions)
        return F.dropout(rows, p=self.model.dropout, training=self.training)

    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """The layers that are here, in order."""
        rows, packing = at_least_one_row(rows, inputs.packing)
        for layer in self.blocks().values():
            rows = layer(rows[None], None, packing=packing)[0]
        return rows[: inputs.packing.rows]

    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Final norm; stacked rows."""
        rows = self.model.layer_norm(rows)
        return rows if self.stack == 1 else self._stacked(rows, inputs)

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """``ceil(ceil(frames / 2) / stack)``."""
        return -(-self.packing_rows(sizes) // self.stack)

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """``ceil(frames / 2)``."""
        return -(-sizes.reshape(-1) // 2)

    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        """A row per stack."""
        return int(np.sum(-(-np.asarray(packing_lengths) // self.stack)))

    def blocks(self) -> dict[str, nn.Module]:
        """``model.layers.N``."""
        return held_blocks(self.model.layers, "model.layers")

    def drop(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """Remove parts; the numbers of the other layers stay."""
        model: Any = self.model
        drop_blocks(model.layers, blocks)
        if before:
            model.conv1 = model.conv2 = model.embed_positions = None
        if after:
            model.layer_norm = None

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """Columns of q, k, v and fc1, rows of out and fc2."""
        return vit_tp_plan("model.layers.*", up="fc1", down="fc2")

    def check_tp(self, tp: int) -> list[str]:
        """Heads and the feed-forward width must divide."""
        config = self.config
        return divisible(tp, heads=config.encoder_attention_heads, feed_forward_width=config.encoder_ffn_dim)

    def after_tp(self, tp: int) -> None:
        """transformers reads the number of heads from an attribute, which must be this rank's."""
        for layer in self.blocks().values():
            layer.self_attn.num_heads //= tp  # type: ignore[union-attr, operator]

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """transformers' rules; they also fill the frozen sinusoidal positions."""
        initialize_hf(self.model, unit if prefix else unit.model)  # type: ignore[arg-type]

    def export_names(self) -> dict[str, str]:
        """Names without our leading ``model.``."""
        return {fqn: fqn.removeprefix("model.") for fqn, _ in self.twin().named_parameters()}

    def export_config(self) -> dict[str, Any] | None:
        """The Whisper config."""
        return export_hf_config(self.config, "WhisperEncoder")

    def export_prefixes(self) -> tuple[str, ...]:
        """Alone, or inside a whole Whisper."""
        return ("", "model.encoder.", "encoder.")

    def unused_export(self, name: str) -> bool:
        """The decoder of a whole Whisper."""
        return name.removeprefix("model.").startswith("decoder.") or name == "proj_out.weight"

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """Convolutions without gaps (two frames per row), matmuls and bidirectional attention."""
        packing, config = Packing.of(packing_lengths), self.config
        attention = 4 * config.d_model * attention_pairs(packing, causal=False)
        convolutions = 2 * 3 * config.d_model * (2 * config.num_mel_bins + config.d_model)
        return float(convolutions * packing.rows), block_linear_flops(self) * packing.rows + attention, 0.0

    def _convolve(self, inputs: EncoderInputs) -> Tensor:
        """Mel frames -> rows ``[sum(ceil(frames / 2)), d_model]``."""
        frames = inputs.sizes.reshape(-1)
        spans = clip_spans(frames)
        starts = ragged.starts(spans)
        total = max(int(spans.sum()), 2)  # without clips: one silent pair, so that the weights have a (zero) gradient
        before = ragged.starts(frames)
        frame_place = host_index(np.arange(int(frames.sum())) + np.repeat(starts - before, frames), inputs.values)
        rows = inputs.packing.lengths
        row_place = np.arange(int(rows.sum())) + np.repeat(starts // 2 - ragged.starts(rows), rows)
        mels = inputs.values.to(self.model.conv1.weight.dtype)
        line = mels.new_zeros(total, mels.shape[1]).index_copy(0, frame_place, mels)
        real = mels.new_zeros(total).index_fill(0, frame_place, 1)
        hidden = F.gelu(self.model.conv1(line.T[None]))
        hidden = F.gelu(self.model.conv2(hidden * real))
        return hidden[0].T.index_select(0, host_index(row_place, mels))

    def _stacked(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        lengths = inputs.packing.lengths
        spans = -(-lengths // self.stack) * self.stack
        shift = ragged.starts(spans) - ragged.starts(lengths)
        place = np.arange(int(lengths.sum())) + np.repeat(shift, lengths)
        filled = rows.new_zeros(int(spans.sum()), rows.shape[1]).index_copy(0, host_index(place, rows), rows)
        return filled.reshape(-1, self.width)

    def _check(self, inputs: EncoderInputs) -> None:
        frames = inputs.sizes.reshape(-1)
        if (frames < 1).any() or not np.array_equal(self.packing_rows(frames), inputs.packing.lengths):
            raise DataError("whisper: frames must be positive and the packing's lengths ceil(frames / 2)")
        limit = self.config.max_source_positions
        if inputs.packing.longest > limit:
            raise DataError(
                f"whisper: a clip of {int(frames.max())} frames exceeds {2 * limit}: split it or raise "
                "max_source_positions"
            )
        if inputs.values.shape != (int(frames.sum()), self.config.num_mel_bins):
            raise DataError(
                f"whisper: mel frames have shape {tuple(inputs.values.shape)}, expected "
                f"({int(frames.sum())}, {self.config.num_mel_bins})"
            )


def clip_spans(sizes: np.ndarray) -> np.ndarray:
    """Frames each clip takes in the convolutions: an even number with at least one silent frame at its end."""
    return 2 * (sizes.reshape(-1) // 2 + 1)


def padded_frames(sizes: np.ndarray) -> int:
    """Frames the convolutions compute for clips of these sizes, the silent ones between clips included."""
    return int(clip_spans(sizes).sum())


def whisper_encoder(
    *,
    out_width: int,
    stack: int = 1,
    projector_hidden: int | None = None,
    checkpoint: str | Path | None = None,
    before: Callable[[EncoderInputs], EncoderInputs] | None = None,
    after: Callable[[Tensor, EncoderInputs], Tensor] | None = None,
    **fields: Any,
) -> Encoder:
    """Whisper's encoder and a projector.

    Args:
        out_width: width of the rows of the language model.
        stack: see :class:`WhisperBackbone`.
        projector_hidden: inner width of the projector, ``out_width`` by default.
        checkpoint: local folder of a Whisper model.
        before: see :class:`Encoder`.
        after: see :class:`Encoder`.
        **fields: of ``WhisperConfig``, not together with ``checkpoint``.

    Raises:
        ModelError: an unknown field, or a folder of another model.
    """
    from transformers import WhisperConfig

    who = "whisper_encoder"
    if checkpoint is None:
        config = hf_config(WhisperConfig, fields, who)
    elif fields:
        raise ModelError(f"{who}: checkpoint= fixes the sizes, so remove {sorted(fields)}")
    else:
        content = read_config(checkpoint)
        if content.get("model_type") != "whisper":
            raise ModelError(f"{who}: {checkpoint}/config.json is of a {content.get('model_type')!r} model")
        config = parsed_config(WhisperConfig, content, who)
    backbone = WhisperBackbone(config, stack=stack, checkpoint=None if checkpoint is None else str(checkpoint))
    projector = Projector(backbone.width, out_width, projector_hidden)
    return Encoder(backbone, projector, before=before, after=after)
