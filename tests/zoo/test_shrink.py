"""Tiny copies of transformers' configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3Config, Gemma3TextConfig, Qwen2Config, Qwen3VLConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hetero_strategy.zoo.hf_shrink import shrink
from tests.zoo.families import TINY


def test_a_copy_keeps_one_layer_of_every_kind() -> None:
    config = Gemma3TextConfig()
    small = shrink(config)
    assert config.num_hidden_layers == 26 and config.hidden_size == 2304
    assert small.layer_types == [*["sliding_attention"] * 3, "full_attention"]
    assert (small.num_attention_heads, small.num_key_value_heads, small.sliding_window) == (4, 2, 4)


def test_numbers_of_layers_follow_the_kept_layers() -> None:
    config = Qwen2Config(num_hidden_layers=12, layer_types=["full_attention"] * 11 + ["sliding_attention"])
    assert shrink(config).layer_types[-1] == "sliding_attention"
    small = shrink(DeepseekV3Config())
    assert small.first_k_dense_replace == 1 and small.head_dim == small.qk_rope_head_dim == 8


def test_at_least_48_families_are_tiny_and_run() -> None:
    assert len(TINY) >= 48
    for model_type, fields in TINY.items():
        config = CONFIG_MAPPING[model_type](**fields)
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        assert sum(p.numel() for p in model.parameters()) < 5e5, model_type


@pytest.mark.parametrize("sections", [[16, 24, 24], [11, 11, 10]])
def test_sections_of_rotary_axes_fill_the_tiny_head(sections: list[int]) -> None:
    half = sum(sections)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = Qwen2Config(hidden_size=2 * half, num_attention_heads=1, num_key_value_heads=1, rope_parameters=rope)
    small = shrink(config)
    assert sum(small.rope_parameters["mrope_section"]) == 8


@pytest.mark.parametrize("config_class", [Gemma3Config, Qwen3VLConfig])
def test_configs_inside_a_config_are_tiny_too(config_class: Any) -> None:
    small = shrink(config_class())
    with torch.device("meta"):
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class](small)
    assert sum(p.numel() for p in model.parameters()) < 1e6
    taps = getattr(small.vision_config, "deepstack_visual_indexes", [0])
    assert taps and max(taps) < getattr(small.vision_config, "depth", 4)
