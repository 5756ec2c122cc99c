"""Ready modules: adapters for models of torchtitan and Hugging Face, and a flow-matching decoder."""

from hetero_strategy.zoo.flow import flow_decoder
from hetero_strategy.zoo.hf_causal_lm import HFCausalLM, hf_causal_lm, hf_llama, hf_qwen3
from hetero_strategy.zoo.hf_composite import hf_composite
from hetero_strategy.zoo.hf_encoder import hf_encoder
from hetero_strategy.zoo.siglip2 import siglip2_encoder
from hetero_strategy.zoo.titan import titan_llama
from hetero_strategy.zoo.whisper import whisper_encoder

__all__ = [
    "HFCausalLM",
    "flow_decoder",
    "hf_causal_lm",
    "hf_composite",
    "hf_encoder",
    "hf_llama",
    "hf_qwen3",
    "siglip2_encoder",
    "titan_llama",
    "whisper_encoder",
]
