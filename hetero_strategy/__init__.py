"""A Lightning strategy in which every module of a multimodal model has its own parallel layout and its own ranks.

Importing the package registers ``Trainer(strategy="hetero")``.
"""

from hetero_strategy.errors import HeteroError
from hetero_strategy.layout import ModuleLayout, Placement
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model import CausalLM, Edge, Encoder, Generator, ModelOutput, MultimodalModel
from hetero_strategy.monitor import BalanceMonitor, ThroughputMonitor, TimelineMonitor
from hetero_strategy.strategy import HeteroStrategy

__all__ = [
    "BalanceMonitor",
    "CausalLM",
    "Edge",
    "Encoder",
    "Generator",
    "HeteroError",
    "HeteroStrategy",
    "ModelOutput",
    "ModuleLayout",
    "MultimodalDataModule",
    "MultimodalModel",
    "Placement",
    "ThroughputMonitor",
    "TimelineMonitor",
]
