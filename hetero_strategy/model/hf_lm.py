"""Hugging Face Llama and Qwen3 as causal language models over packed rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import block_linear_flops, divisible, drop_blocks, held_blocks, linear_flops
from hetero_strategy.model.attention import HF_ATTENTION, attention_pairs, register_hf_attention
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.hf import (
    at_least_one_row,
    export_hf_config,
    hf_config,
    initialize_hf,
    make_norms_precise,
    parsed_config,
)
from hetero_strategy.model.hf_folder import read_config
from hetero_strategy.model.inputs import Packing, SequenceInputs

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class HFCausalLM(CausalLM):
    """A transformers decoder-only model of Llama's shape, under :attr:`model`.

    transformers' own forward pads and builds masks; here its embedding, layers, norm and head are called on packed
    rows ``[1, T, width]``, and the layers hand the packing on to the attention function.
    """

    def __init__(
        self,
        model_class: type,
        config: Any,
        *,
        checkpoint: str | None = None,
        before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    ) -> None:
        super().__init__(before=before)
        _check_supported(model_class.__name__, config)
        register_hf_attention()
        with torch.device("meta"):
            self.model = model_class(config)
        self.model.config._attn_implementation = HF_ATTENTION
        if config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        make_norms_precise(self.model)
        self.architecture = model_class.__name__
        self.config = self.model.config
        self.width = self.hidden_width = config.hidden_size
        self.checkpoint = checkpoint

    def embed(self, ids: Tensor) -> Tensor:
        """Token rows."""
        rows: Tensor = self.model.model.embed_tokens(ids)
        return rows

    def transform(self, hidden: Tensor, packing: Packing) -> Tensor:
        """The layers that are here, in order."""
        count = packing.rows
        hidden, packing = at_least_one_row(hidden, packing)
        rows = hidden[None]
        positions = packing.positions[None]
        angles = self.model.model.rotary_emb(rows, position_ids=positions)
        for layer in self.blocks().values():
            rows = layer(rows, attention_mask=None, position_embeddings=angles, packing=packing)
        return rows[0][:count]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return logits

    def drop(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """Remove parts; the numbers of the other layers stay."""
        drop_blocks(self.model.model.layers, blocks)
        if before:
            self.model.model.embed_tokens = None
        if after:
            self.model.model.norm = self.model.lm_head = None

    def tied_weight(self) -> tuple[str, str] | None:
        """Embedding and head, as the config says."""
        return ("model.model.embed_tokens.weight", "model.lm_head.weight") if self.config.tie_word_embeddings else None

    def blocks(self) -> dict[str, nn.Module]:
        """``model.model.layers.N``."""
        return held_blocks(self.model.model.layers, "model.model.layers")

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """Megatron's: columns of q, k, v, gate and up, rows of o and down; the rest replicated."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

        plan: dict[str, ParallelStyle] = {}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.model.layers.*.{name}"] = RowwiseParallel()
        first = next(iter(self.blocks().values()), None)
        if first is not None and hasattr(first.self_attn, "q_norm"):
            # One weight for all heads, of which each rank sees its own: the gradient is a sum over ranks. Heads are
            # dimension 2 of [1, T, heads, head_dim].
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                plan[f"model.model.layers.*.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        return plan

    def check_tp(self, tp: int) -> list[str]:
        """Heads, key heads and the feed-forward width must divide."""
        config = self.config
        return divisible(
            tp,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            feed_forward_width=config.intermediate_size,
        )

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """transformers' rules."""
        initialize_hf(self.model, unit if prefix else unit.model)  # type: ignore[arg-type]

    def export_names(self) -> dict[str, str]:
        """Names without our leading ``model.``."""
        return {fqn: fqn.removeprefix("model.") for fqn, _ in self.twin().named_parameters()}

    def export_config(self) -> dict[str, Any] | None:
        """The transformers config."""
        return export_hf_config(self.config, self.architecture)

    def unused_export(self, name: str) -> bool:
        """Old rotary frequencies, and the head where it is the embedding."""
        return name.endswith("rotary_emb.inv_freq") or (self.tied_weight() is not None and name == "lm_head.weight")

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """Matmuls of all rows, the head last, and the causal half of attention."""
        packing, config = Packing.of(packing_lengths), self.config
        attention = 4 * config.num_attention_heads * config.head_dim * attention_pairs(packing, causal=True)
        twin: Any = self.twin()
        head = float(linear_flops(twin.model.lm_head) * packing.rows)
        return 0.0, block_linear_flops(self) * packing.rows + attention, head


def hf_llama(
    *,
    checkpoint: str | Path | None = None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    **fields: Any,
) -> HFCausalLM:
    """transformers' Llama.

    Args:
        checkpoint: local folder with config.json and safetensors.
        before: see :class:`CausalLM`.
        **fields: of ``LlamaConfig``, not together with ``checkpoint``.

    Raises:
        ModelError: an unknown field, a config this adapter cannot run, or a folder of another model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal_lm("hf_llama", LlamaForCausalLM, LlamaConfig, checkpoint, before, fields)


def hf_qwen3(
    *,
    checkpoint: str | Path | None = None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    **fields: Any,
) -> HFCausalLM:
    """transformers' Qwen3 (dense); arguments as :func:`hf_llama` with fields of ``Qwen3Config``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _causal_lm("hf_qwen3", Qwen3ForCausalLM, Qwen3Config, checkpoint, before, fields)


def _causal_lm(
    who: str,
    model_class: type,
    config_class: Any,
    checkpoint: str | Path | None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None,
    fields: dict[str, Any],
) -> HFCausalLM:
    if checkpoint is None:
        return HFCausalLM(model_class, hf_config(config_class, fields, who), before=before)
    if fields:
        raise ModelError(f"{who}: checkpoint= fixes the sizes, so remove {sorted(fields)}")
    content = read_config(checkpoint)
    if content.get("model_type") != config_class.model_type:
        raise ModelError(f"{who}: {checkpoint}/config.json is of a {content.get('model_type')!r} model")
    return HFCausalLM(model_class, parsed_config(config_class, content, who), checkpoint=str(checkpoint), before=before)


def _check_supported(who: str, config: Any) -> None:
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ModelError(f"{who}: rope_type {rope!r} changes with the longest sequence and cannot be packed")
    if getattr(config, "sliding_window", None):
        raise ModelError(f"{who}: sliding_window={config.sliding_window} is not supported: packed attention has none")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"{who}: num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
