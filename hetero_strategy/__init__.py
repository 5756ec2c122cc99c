"""A Lightning strategy in which every module of a multimodal model has its own parallel layout and its own ranks.

Names are imported when they are first used, so that ``import hetero_strategy`` itself costs nothing. The first one that
brings Lightning in also registers ``Trainer(strategy="hetero")``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_strategy.boundary.transport import exchange
    from hetero_strategy.data.media import AudioProcessor, ImageProcessor, ImageTarget
    from hetero_strategy.errors import HeteroError
    from hetero_strategy.layout.spec import ModuleLayout
    from hetero_strategy.loading.datamodule import MultimodalDataModule
    from hetero_strategy.model.causal_lm import CausalLM
    from hetero_strategy.model.encoder import Backbone, Encoder, Projector
    from hetero_strategy.model.generator import Generator
    from hetero_strategy.model.inputs import EncoderInputs
    from hetero_strategy.model.multimodal import Edge, ModelOutput, MultimodalModel
    from hetero_strategy.monitor.balance_monitor import BalanceMonitor
    from hetero_strategy.monitor.memory_monitor import MemoryMonitor
    from hetero_strategy.monitor.profile_monitor import ProfileMonitor
    from hetero_strategy.monitor.throughput import ThroughputMonitor
    from hetero_strategy.monitor.timeline_monitor import TimelineMonitor
    from hetero_strategy.plan.config import BalanceConfig
    from hetero_strategy.strategy.strategy import HeteroStrategy
    from hetero_strategy.zoo.flow import flow_decoder
    from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm, hf_llama, hf_qwen3
    from hetero_strategy.zoo.siglip2 import siglip2_encoder
    from hetero_strategy.zoo.titan import titan_llama
    from hetero_strategy.zoo.whisper import whisper_encoder

_FILES = {
    "AudioProcessor": "data.media",
    "Backbone": "model.encoder",
    "BalanceConfig": "plan.config",
    "BalanceMonitor": "monitor.balance_monitor",
    "CausalLM": "model.causal_lm",
    "Edge": "model.multimodal",
    "Encoder": "model.encoder",
    "EncoderInputs": "model.inputs",
    "Generator": "model.generator",
    "HeteroError": "errors",
    "HeteroStrategy": "strategy.strategy",
    "ImageProcessor": "data.media",
    "ImageTarget": "data.media",
    "MemoryMonitor": "monitor.memory_monitor",
    "ModelOutput": "model.multimodal",
    "ModuleLayout": "layout.spec",
    "MultimodalDataModule": "loading.datamodule",
    "MultimodalModel": "model.multimodal",
    "ProfileMonitor": "monitor.profile_monitor",
    "Projector": "model.encoder",
    "ThroughputMonitor": "monitor.throughput",
    "TimelineMonitor": "monitor.timeline_monitor",
    "exchange": "boundary.transport",
    "flow_decoder": "zoo.flow",
    "hf_causal_lm": "zoo.hf_causal_lm",
    "hf_llama": "zoo.hf_causal_lm",
    "hf_qwen3": "zoo.hf_causal_lm",
    "siglip2_encoder": "zoo.siglip2",
    "titan_llama": "zoo.titan",
    "whisper_encoder": "zoo.whisper",
}

__all__ = [
    "AudioProcessor",
    "Backbone",
    "BalanceConfig",
    "BalanceMonitor",
    "CausalLM",
    "Edge",
    "Encoder",
    "EncoderInputs",
    "Generator",
    "HeteroError",
    "HeteroStrategy",
    "ImageProcessor",
    "ImageTarget",
    "MemoryMonitor",
    "ModelOutput",
    "ModuleLayout",
    "MultimodalDataModule",
    "MultimodalModel",
    "ProfileMonitor",
    "Projector",
    "ThroughputMonitor",
    "TimelineMonitor",
    "exchange",
    "flow_decoder",
    "hf_causal_lm",
    "hf_llama",
    "hf_qwen3",
    "siglip2_encoder",
    "titan_llama",
    "whisper_encoder",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    if "lightning.pytorch" in sys.modules:
        import_module(f"{__name__}.strategy")
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
