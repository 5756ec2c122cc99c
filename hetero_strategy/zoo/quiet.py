"""What torchao says of itself in every process that imports transformers' models, and no person can act on."""

from __future__ import annotations

import logging

SAID = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}
"""Logger -> part of its message: kernels that this Python or device cannot load, a deprecated call."""


def hush() -> None:
    """Leave these messages out; again it changes nothing."""
    for name in SAID:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return SAID[record.name] not in str(record.msg)
