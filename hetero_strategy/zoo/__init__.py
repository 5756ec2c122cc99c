"""Ready modules: adapters for models of torchtitan and Hugging Face, and a flow-matching decoder."""

from hetero_strategy.zoo.flow import flow_decoder
from hetero_strategy.zoo.hf import hush
from hetero_strategy.zoo.hf_lm import hf_llama, hf_qwen3
from hetero_strategy.zoo.siglip2 import siglip2_encoder
from hetero_strategy.zoo.titan import titan_llama
from hetero_strategy.zoo.whisper import whisper_encoder

hush()

__all__ = ["flow_decoder", "hf_llama", "hf_qwen3", "siglip2_encoder", "titan_llama", "whisper_encoder"]
