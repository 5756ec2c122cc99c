"""Tiny composites of transformers: a tower, a projector and a language model in one class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as NAMES

from hetero_strategy.zoo.hf_shrink import tiny_fields

TOWER = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "intermediate_size": 48, "num_hidden_layers": 3, "depth": 3,
    "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 4, "image_size": 28, "patch_size": 7,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "mlp_ratio": 2, "window_size": 28,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16, "head_dim": 8,
    "initializer_range": 0.2, "attention_dropout": 0.0, "num_mel_bins": 16, "max_source_positions": 48,
    "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "n_window": 5, "output_dim": 64,
}  # fmt: skip
"""Fields of towers; a class takes those that it has."""
WHOLE = {
    "image_token_id": 150, "video_token_id": 151, "audio_token_id": 152, "image_token_index": 150,
    "vision_start_token_id": 153, "vision_end_token_id": 154, "boi_token_index": 153, "eoi_token_index": 154,
    "audio_start_token_id": 155, "audio_end_token_id": 156,
    "mm_tokens_per_image": 4, "projection_dim": 64, "tie_word_embeddings": False, "scale_factor": 2,
    "image_seq_length": 16, "downsample_factor": 2, "downsample_ratio": 0.5, "vocab_size": 160,
    "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]], "alignment_intermediate_size": 64,
}  # fmt: skip
"""Fields of composites."""
ATTEND = ["linear_attention", "full_attention", "full_attention", "full_attention"]
"""Kinds of layers with which positions matter: layers with a state have none."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "internvl_vision": {"image_size": [28, 28], "patch_size": [7, 7]},
    "vipllava": {"vision_feature_layer": [-2, -1]},
    "voxtral_encoder": {"intermediate_size": 128},
    "qwen2_vl_vision": {"hidden_size": 64},
    "qwen2_5_omni_thinker": {
        "image_token_id": 150,
        "video_token_id": 151,
        "audio_token_id": 152,
        "vision_start_token_id": 153,
        "vision_end_token_id": 154,
    },  # fields without a default, or under another name
    "qwen3_5_text": {"layer_types": [*ATTEND]},
    "qwen3_5_moe_text": {"layer_types": [*ATTEND]},
}
"""``model_type`` of a part's config -> its own fields."""
AXES = {
    "qwen2_vl_text": [4, 2, 2], "qwen2_5_vl_text": [4, 2, 2], "glm4v_text": [4, 2, 2], "glm4v_moe_text": [2, 1, 1],
    "glm_ocr_text": [4, 2, 2],
    "qwen2_5_omni_text": [4, 2, 2], "qwen3_5_text": [3, 3, 2], "qwen3_5_moe_text": [3, 3, 2],
}  # fmt: skip
"""Language models whose class leaves the sections of their axes open, as no folder does -> the sections."""


def tiny(model_type: str, **fields: Any) -> Any:
    """Make a tiny config of a composite."""
    config_class: Any = CONFIG_MAPPING[model_type]
    default = config_class()
    parts = {}
    for name in default.sub_configs:
        if (config := getattr(default, name)) is not None:
            parts[name] = (_text if "text" in name else _tower)(config)
    known = {n: value for n, value in WHOLE.items() if n in _fields(config_class)}
    return config_class(**{**known, **parts, **OWN.get(model_type, {}), **fields})


def model_class(model_type: str) -> Any:
    """Return transformers' class of a composite."""
    return getattr(transformers, NAMES[model_type])


def built(config: Any) -> Any:
    """Make transformers' model, with eager attention and all parameters away from 0 and 1."""
    torch.manual_seed(0)
    model = model_class(config.model_type)(config).eval()
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "_attn_implementation"):
            part.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def _text(config: Any) -> Any:
    fields = {**tiny_fields(config), "num_key_value_heads": 2, "initializer_range": 0.2}
    small = type(config)(**{**fields, **OWN.get(config.model_type, {})})
    if config.model_type in AXES:
        small.rope_parameters = {
            **small.rope_parameters, "rope_theta": 1e6, "mrope_section": AXES[config.model_type]
        }  # fmt: skip
    return small


def _tower(config: Any) -> Any:
    known = _fields(type(config))
    alias = getattr(type(config), "attribute_map", {})
    fields = {name: value for name, value in TOWER.items() if name in known and alias.get(name) not in TOWER}
    return type(config)(**{**fields, **OWN.get(config.model_type, {})})


def _fields(config_class: Any) -> set[str]:
    return {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
