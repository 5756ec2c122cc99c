"""Models to train: named modules, the edges between them, and base classes for custom modules."""

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.causal_lm import CausalLM, LMOutput
from hetero_strategy.model.encoder import Backbone, Encoder, Projector
from hetero_strategy.model.generator import Generator, GeneratorInputs, GeneratorOutput
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, ModuleInputs, Packing, SequenceInputs
from hetero_strategy.model.kind import LossOutput, ModuleKind
from hetero_strategy.model.multimodal import Edge, ModelOutput, MultimodalModel

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
    "packed_attention",
]
