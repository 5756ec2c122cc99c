"""Tiny models of transformers' families."""

from __future__ import annotations

from typing import Any

from hetero_strategy.zoo.hf_shrink import tiny_fields

OPEN: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6, "head_dim": 64},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
}
"""Fields that a config class leaves open and that every published folder has, at their published sizes."""


def tiny_family(model_type: str) -> dict[str, Any]:
    """Return fields of a tiny model of one of transformers' families, with every kind of its layers.

    Args:
        model_type: transformers' name of the family, such as "gemma3_text".
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = OPEN.get(model_type, {})
    return {**fields, **tiny_fields(CONFIG_MAPPING[model_type](**fields))}
