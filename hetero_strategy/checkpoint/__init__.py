"""One checkpoint over all modules: owned tensors under global names, loadable into any other layout bit by bit.

A checkpoint is a folder of safetensors and JSON (``folder`` describes its files); nothing in it is ever unpickled.
``python -m hetero_strategy.checkpoint --help`` shows the commands that describe or export one without a model.
"""

from hetero_strategy.checkpoint.codec import decode, encode
from hetero_strategy.checkpoint.exporting import EXPORT_KEY, Exported, export
from hetero_strategy.checkpoint.folder import Description, Piece, StoredTensor, describe, remove
from hetero_strategy.checkpoint.loading import Loaded, load
from hetero_strategy.checkpoint.saving import Checkpointer

__all__ = [
    "EXPORT_KEY",
    "Checkpointer",
    "Description",
    "Exported",
    "Loaded",
    "Piece",
    "StoredTensor",
    "decode",
    "describe",
    "encode",
    "export",
    "load",
    "remove",
]
