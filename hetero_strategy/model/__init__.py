"""What is trained: named modules, the edges between them, and adapters for torchtitan and Hugging Face."""

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.causal_lm import CausalLM, LMOutput
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.flow import FlowDecoder, flow_decoder
from hetero_strategy.model.generator import Generator, GeneratorOutput
from hetero_strategy.model.hf_lm import HFCausalLM, hf_llama, hf_qwen3
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, GeneratorInputs, Packing, Ragged, SequenceInputs
from hetero_strategy.model.materialize import initial_units, initialize_units, materialize, pretrained_units
from hetero_strategy.model.multimodal import Edge, ModelOutput, MultimodalModel
from hetero_strategy.model.siglip2 import Siglip2Backbone, siglip2_encoder
from hetero_strategy.model.titan import TitanLlama, titan_llama
from hetero_strategy.model.whisper import WhisperBackbone, padded_frames, whisper_encoder

__all__ = [
    "IGNORE",
    "Adapter",
    "Backbone",
    "CausalLM",
    "Edge",
    "Encoder",
    "EncoderInputs",
    "FlowDecoder",
    "Generator",
    "GeneratorInputs",
    "GeneratorOutput",
    "HFCausalLM",
    "LMOutput",
    "ModelOutput",
    "MultimodalModel",
    "Packing",
    "Projector",
    "Ragged",
    "SequenceInputs",
    "Siglip2Backbone",
    "TitanLlama",
    "WhisperBackbone",
    "flow_decoder",
    "hf_llama",
    "hf_qwen3",
    "initial_units",
    "initialize_units",
    "materialize",
    "packed_attention",
    "padded_frames",
    "pretrained_units",
    "siglip2_encoder",
    "titan_llama",
    "whisper_encoder",
]
