"""What is trained: named modules, the edges between them, and adapters for torchtitan and Hugging Face."""

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.causal_lm import CausalLM, LMOutput
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.flow import flow_decoder
from hetero_strategy.model.generator import Generator, GeneratorOutput
from hetero_strategy.model.hf_lm import hf_llama, hf_qwen3
from hetero_strategy.model.inputs import (
    IGNORE,
    EncoderInputs,
    GeneratorInputs,
    ModuleInputs,
    Packing,
    SequenceInputs,
)
from hetero_strategy.model.kind import LossOutput, ModuleKind
from hetero_strategy.model.multimodal import Edge, ModelOutput, MultimodalModel
from hetero_strategy.model.siglip2 import siglip2_encoder
from hetero_strategy.model.titan import titan_llama
from hetero_strategy.model.whisper import whisper_encoder

__all__ = [
    "IGNORE",
    "Adapter",
    "Backbone",
    "CausalLM",
    "Edge",
    "Encoder",
    "EncoderInputs",
    "Generator",
    "GeneratorInputs",
    "GeneratorOutput",
    "LMOutput",
    "LossOutput",
    "ModelOutput",
    "ModuleInputs",
    "ModuleKind",
    "MultimodalModel",
    "Packing",
    "Projector",
    "SequenceInputs",
    "flow_decoder",
    "hf_llama",
    "hf_qwen3",
    "packed_attention",
    "siglip2_encoder",
    "titan_llama",
    "whisper_encoder",
]
