"""Hugging Face Llama and Qwen3 as causal language models over packed rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import block_linear_flops, divisible, linear_flops
from hetero_strategy.model.attention import HF_ATTENTION, attention_pairs, register_hf_attention
from hetero_strategy.model.causal_lm import CausalLM, head_rows_of
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.model.token_loss import VocabularyParallel
from hetero_strategy.zoo.hf import (
    HFAdapter,
    at_least_one_row,
    check_causal,
    make_config,
    make_model,
    make_norms_precise,
)


class HFCausalLM(HFAdapter, CausalLM):
    """A transformers decoder-only model of Llama's shape, under :attr:`model`.

    transformers' own forward pads and builds masks; this class calls its embedding, layers, norm and head on packed
    rows ``[1, T, width]``, and the layers pass the packing to the attention function.
    """

    block_list = "model.model.layers"
    before_blocks = ("model.model.embed_tokens",)
    after_blocks = ("model.model.norm", "model.lm_head")
    tp_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    tp_rows = ("self_attn.o_proj", "mlp.down_proj")
    context_parallel = True

    def __init__(
        self,
        model_class: type,
        config: Any,
        *,
        checkpoint: str | Path | None = None,
        before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    ) -> None:
        super().__init__(before=before)
        _check_supported(model_class.__name__, config)
        register_hf_attention()
        self.model = make_model(model_class, config)
        _check_layer_types(model_class.__name__, config, self.model.model.layers)
        self.model.config._attn_implementation = HF_ATTENTION
        if config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        make_norms_precise(self.model)
        self.architecture = model_class.__name__
        self.config = self.model.config
        self.width = self.hidden_width = config.hidden_size
        self.context_width = 2 * config.num_key_value_heads * config.head_dim
        self.vocab_size, self.head_rows = config.vocab_size, head_rows_of(config.vocab_size)
        self.checkpoint = checkpoint
        self.folder_ignored = ("*rotary_emb.inv_freq",)  # in old folders
        if config.tie_word_embeddings:
            self.folder_tied = ("model.embed_tokens.weight", "lm_head.weight")

    @override
    def embed(self, ids: Tensor) -> Tensor:
        return self.model.model.embed_tokens(ids)

    @override
    def transform(self, hidden: Tensor, packing: Packing) -> Tensor:
        count = packing.rows
        hidden, packing = at_least_one_row(hidden, packing)
        rows = hidden[None]
        angles = self.model.model.rotary_emb(rows, position_ids=packing.positions[None])
        for layer in self.blocks().values():
            rows = layer(rows, attention_mask=None, position_embeddings=angles, packing=packing)
        return rows[0][:count]

    @override
    def head(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(hidden))

    @override
    def tied_weight(self) -> tuple[str, str] | None:
        return ("model.model.embed_tokens.weight", "model.lm_head.weight") if self.config.tie_word_embeddings else None

    @override
    def tp_plan(self) -> dict[str, ParallelStyle]:
        plan = super().tp_plan() or {}
        plan["model.lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        plan["model.model.embed_tokens"] = VocabularyParallel(input_layouts=Replicate())  # splits by token ids
        first: Any = next(iter(self.blocks().values()), None)
        if first is not None and hasattr(first.self_attn, "q_norm"):
            # One weight serves all heads, of which each rank sees some: the gradient is a sum over ranks. Heads are
            # dimension 2 of [1, T, heads, head_dim].
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                plan[f"{self.block_list}.*.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        return plan

    @override
    def check_tp(self, tp: int) -> list[str]:
        config = self.config
        return divisible(
            tp,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            feed_forward_width=config.intermediate_size,
        )

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows, config = int(np.sum(packing_lengths)), self.config
        windows = [getattr(block.self_attn, "sliding_window", None) for block in self.meta_copy().blocks().values()]
        pairs = [attention_pairs(packing_lengths, causal=True, window=window) for window in windows]
        attention = 4 * config.num_attention_heads * config.head_dim * np.array(pairs)
        original: Any = self.meta_copy()
        head = float(linear_flops(original.model.lm_head) * rows)
        return 0.0, block_linear_flops(self) * rows + attention, head


def hf_llama(
    *,
    checkpoint: str | Path | None = None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    **fields: Any,
) -> HFCausalLM:
    """Build transformers' Llama.

    Args:
        checkpoint: local folder with config.json and safetensors.
        before: change of the rows, as in :class:`CausalLM`.
        **fields: fields of ``LlamaConfig``; they exclude ``checkpoint``.

    Raises:
        ModelError: a field is unknown, this adapter cannot run the config, or the folder belongs to another model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = make_config("hf_llama", LlamaConfig, checkpoint, fields)
    return HFCausalLM(LlamaForCausalLM, config, checkpoint=checkpoint, before=before)


def hf_qwen3(
    *,
    checkpoint: str | Path | None = None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    **fields: Any,
) -> HFCausalLM:
    """Build transformers' dense Qwen3; arguments as in :func:`hf_llama`, with fields of ``Qwen3Config``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = make_config("hf_qwen3", Qwen3Config, checkpoint, fields)
    return HFCausalLM(Qwen3ForCausalLM, config, checkpoint=checkpoint, before=before)


def _check_supported(who: str, config: Any) -> None:
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ModelError(f"{who}: rope_type {rope!r} changes with the longest sequence and cannot be packed")
    check_causal(who, config)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"{who}: num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )


def _check_layer_types(who: str, config: Any, layers: Any) -> None:
    """Refuse layers whose attention differs from ``layer_types``; transformers fails only when a forward makes their
    mask.
    """
    for number, (kind, layer) in enumerate(zip(getattr(config, "layer_types", None) or (), layers, strict=False)):
        window = getattr(layer.self_attn, "sliding_window", None)
        if kind == "sliding_attention" and (window is None or window < 1):
            raise ModelError(
                f"{who}: layer_types[{number}] is 'sliding_attention', but the layer's window is {window}; set"
                " use_sliding_window=true and sliding_window to at least 1, or name the layer 'full_attention'"
            )
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelError(
                f"{who}: layer_types[{number}] is {kind!r}, which is not built; its layers can be 'full_attention' or"
                " 'sliding_attention'"
            )
