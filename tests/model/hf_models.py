"""Tiny models of transformers, their folders, and a module that takes any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hetero_strategy.zoo.hf import HFAdapter

TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16, "patch_size": 2,
    "fullatt_block_indexes": [1], "window_size": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", TEXT | EXPERTS | {"num_experts": 4, "head_dim": 4}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", TEXT | {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config", TEXT | EXPERTS | LATENT | GROUPS | {"num_key_value_heads": 4}
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
        {"text_config": TEXT | {"rope_parameters": ROPE}, "vision_config": VISION, "tie_word_embeddings": True},
    ),
    "tied": ("Qwen3ForCausalLM", "Qwen3Config", TEXT | {"head_dim": 4, "tie_word_embeddings": True}),
}  # fmt: skip


def made(family: str) -> Any:
    """A model of transformers with random values, of which no two tensors are alike."""
    model_class, config_class, fields = MODELS[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    return model


class Anything(HFAdapter):
    """A transformers model without some of its parts, which no test computes."""

    def __init__(self, theirs: Any, checkpoint: Path | None, without: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model = type(theirs)(theirs.config)
        for part in without:
            owner, _, key = part.rpartition(".")
            self.model.get_submodule(owner)._modules[key] = None
        self.config, self.architecture, self.checkpoint = theirs.config, type(theirs).__name__, checkpoint

    def tied_weight(self) -> tuple[str, str] | None:
        ties = [(f"model.{one}", f"model.{other}") for other, one in self.model.all_tied_weights_keys.items()]
        return next((tie for tie in ties if set(tie) <= self.state_dict().keys()), None)


def clip() -> Any:
    """CLIP with both towers."""
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    text = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = transformers.CLIPConfig(text_config=text | {"num_attention_heads": 2}, vision_config=vision)
    torch.manual_seed(0)
    return transformers.CLIPModel(config)
