"""Whisper's encoder over clips of any length, packed; nothing is padded to 30 seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError, check_sizes
from hetero_strategy.model.adapter import block_linear_flops
from hetero_strategy.model.attention import attention_pairs
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.hf_folder import read_config, read_processor
from hetero_strategy.model.inputs import EncoderInputs, MelFrames, host_index
from hetero_strategy.model.tensor_parallel import divisible
from hetero_strategy.zoo.hf import HFAdapter, at_least_one_row, make_config, make_model
from hetero_strategy.zoo.hf_packed import PackedMask, use_packed_attention


class WhisperBackbone(HFAdapter, Backbone):
    """A wrapper of transformers' ``WhisperEncoder``, under :attr:`model`.

    It takes mel frames ``[R, mel bins]`` and sizes ``(frames,)``, and returns ``[sum(ceil(ceil(frames / 2) / stack)),
    width]``. The two convolutions run once over all clips, with one or two silent frames between clips. The output of
    the first convolution in these gaps is zeroed, so the result for each clip is as if it were alone.

    Args:
        config: a ``WhisperConfig``.
        stack: neighbouring rows that are concatenated into one; a clip's last row is filled with zeros.
        checkpoint: local folder with the weights.
    """

    block_list = "model.layers"
    before_blocks = ("model.conv1", "model.conv2", "model.embed_positions")
    after_blocks = ("model.layer_norm",)
    tp_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1")
    tp_rows = ("self_attn.out_proj", "fc2")
    architecture = "WhisperEncoder"
    context_parallel = True

    def __init__(self, config: Any, *, stack: int = 1, checkpoint: str | Path | None = None) -> None:
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        super().__init__()
        check_sizes("whisper", stack=stack)
        if config.encoder_layerdrop:
            raise ModelError(
                f"whisper: encoder_layerdrop={config.encoder_layerdrop} skips layers at random, on which ranks cannot "
                "agree: set it to 0"
            )
        if config.apply_spec_augment:
            raise ModelError(
                "whisper: apply_spec_augment=true masks frames at random in training, which is not built: set it to "
                "false, or mask them in before="
            )
        self.model = make_model(WhisperEncoder, config)
        use_packed_attention(self.model)
        self.config = self.model.config
        self.stack = stack
        self.hidden_width, self.attention_heads = config.d_model, config.encoder_attention_heads
        self.width = config.d_model * stack
        self.checkpoint = checkpoint
        self.max_item_rows = config.max_source_positions
        heard = {} if checkpoint is None else _heard(checkpoint)
        self.folder_processor = heard and {"feature_size": config.num_mel_bins, **heard}
        self.processor = MelFrames(config.num_mel_bins, stack, **heard)

    @override
    def embed(self, inputs: EncoderInputs) -> Tensor:
        self._check(inputs)
        rows = self._convolve(inputs)
        rows = rows + self.model.embed_positions(inputs.packing.positions)
        return F.dropout(rows, p=self.model.dropout, training=self.training)

    @override
    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        rows, packing = at_least_one_row(rows, inputs.packing)
        mask = PackedMask(packing, causal=False)
        for layer in self.blocks().values():
            rows = layer(rows[None], mask)[0]
        return rows[: inputs.packing.rows]

    @override
    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        rows = self.model.layer_norm(rows)
        return rows if self.stack == 1 else self._stacked(rows, inputs)

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        return -(-self.packing_rows(sizes) // self.stack)

    @override
    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        return -(-sizes.reshape(-1) // 2)

    @override
    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        return int(np.sum(-(-np.asarray(packing_lengths) // self.stack)))

    @override
    def check_tp(self, tp: int) -> list[str]:
        config = self.config
        return divisible(tp, heads=config.encoder_attention_heads, feed_forward_width=config.encoder_ffn_dim)

    @override
    def after_tp(self, tp: int) -> None:
        """Divide the number of heads, an attribute of transformers' layers, by ``tp``."""
        for layer in self.blocks().values():
            layer.self_attn.num_heads //= tp  # type: ignore[union-attr, operator]

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows, config = int(np.sum(packing_lengths)), self.config
        attention = 4 * config.d_model * attention_pairs(packing_lengths, causal=False)
        convolutions = 2 * 3 * config.d_model * (2 * config.num_mel_bins + config.d_model)
        return float(convolutions * rows), block_linear_flops(self) * rows + attention, 0.0

    def _convolve(self, inputs: EncoderInputs) -> Tensor:
        """Turn mel frames into rows ``[sum(ceil(frames / 2)), d_model]``."""
        frames = inputs.sizes.reshape(-1)
        spans = clip_spans(frames)
        starts = ragged.starts(spans)
        total = max(int(spans.sum()), 2)  # without clips one silent pair, so that the weights get a (zero) gradient
        frame_index = host_index(ragged.expand(starts, frames), inputs.values)
        row_index = host_index(ragged.expand(starts // 2, inputs.packing.lengths), inputs.values)
        mels = inputs.values.to(self.model.conv1.weight.dtype)
        line = mels.new_zeros(total, mels.shape[1]).index_copy(0, frame_index, mels)
        real = mels.new_zeros(total).index_fill(0, frame_index, 1)
        hidden = F.gelu(self.model.conv1(line.T[None]))
        hidden = F.gelu(self.model.conv2(hidden * real))
        return hidden[0].T.index_select(0, row_index)

    def _stacked(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        lengths = inputs.packing.lengths
        spans = -(-lengths // self.stack) * self.stack
        index = host_index(ragged.expand(ragged.starts(spans), lengths), rows)
        filled = rows.new_zeros(int(spans.sum()), rows.shape[1]).index_copy(0, index, rows)
        return filled.reshape(-1, self.width)

    def _check(self, inputs: EncoderInputs) -> None:
        frames = inputs.sizes.reshape(-1)
        if (frames < 1).any() or not np.array_equal(self.packing_rows(frames), inputs.packing.lengths):
            raise DataError("whisper: frames must be positive and the packing's lengths ceil(frames / 2)")
        limit = self.config.max_source_positions
        if inputs.packing.longest > limit:
            raised = "" if self.checkpoint else " or raise max_source_positions"
            raise DataError(f"whisper: a clip of {int(frames.max())} frames exceeds {2 * limit}: split it{raised}")
        if inputs.values.shape != (int(frames.sum()), self.config.num_mel_bins):
            raise DataError(
                f"whisper: mel frames have shape {tuple(inputs.values.shape)}, expected "
                f"({int(frames.sum())}, {self.config.num_mel_bins})"
            )


def _heard(checkpoint: str | Path) -> dict[str, int]:
    """Return how a folder reads recordings; fields without a value have Whisper's.

    An exported encoder may lack this information.
    """
    config = read_processor(checkpoint, "feature_extractor")
    if not config and read_config(checkpoint).get("architectures") == [WhisperBackbone.architecture]:
        return {}
    return {name: config.get(name, usual) for name, usual in USUAL.items()}


USUAL = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400}


def clip_spans(sizes: np.ndarray) -> np.ndarray:
    """Return the number of frames of each clip in the convolutions: an even number, the last frame silent."""
    return 2 * (sizes.reshape(-1) // 2 + 1)


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
    """Build Whisper's encoder and a projector.

    Args:
        out_width: width of the rows of the language model.
        stack: neighbouring rows concatenated into one, as in :class:`WhisperBackbone`.
        projector_hidden: inner width of the projector, ``out_width`` by default.
        checkpoint: local folder of a Whisper model.
        before, after: functions around the encoder, as in :class:`Encoder`.
        **fields: fields of ``WhisperConfig``; they exclude ``checkpoint``.

    Raises:
        ModelError: a field is unknown, or the folder belongs to another model.
    """
    from transformers import WhisperConfig

    config = make_config("whisper_encoder", WhisperConfig, checkpoint, fields)
    check_sizes("whisper_encoder", out_width=out_width)
    backbone = WhisperBackbone(config, stack=stack, checkpoint=checkpoint)
    return Encoder(backbone, Projector(backbone.width, out_width, projector_hidden), before=before, after=after)
