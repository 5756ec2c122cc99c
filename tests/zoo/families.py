"""Tiny configs of transformers' causal language models."""

from __future__ import annotations

from typing import Any

from hetero_strategy.testing.families import tiny_family

PACKED = (
    *("llama", "qwen2", "qwen3", "mistral", "ministral", "ministral3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("phimoe", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmo", "olmo2", "olmo3"),
    *("olmoe", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "cohere", "cohere2", "smollm3", "seed_oss"),
    *("ernie4_5", "ernie4_5_moe", "starcoder2", "minimax_m2", "hunyuan_v1_dense", "arcee", "exaone4", "helium"),
    *("internlm3", "nemotron", "stablelm", "cwm", "bitnet", "dots1", "laguna", "diffllama", "jais2", "llama4_text"),
    "mimo_v2_flash",
)
"""Families whose layers are attention and feed-forward networks."""
STATEFUL = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba", "minimax", "lfm2", "mamba", "mamba2")
"""Families with layers that keep a state from row to row."""
TINY: dict[str, dict[str, Any]] = {name: tiny_family(name) for name in (*PACKED, *STATEFUL)}
"""``model_type`` -> fields of a model with four to eight layers of width 64."""
