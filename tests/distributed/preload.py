"""Imported once by the process that all workers are forked from; what is missing or broken is left to the workers."""

from __future__ import annotations

import contextlib
import importlib

for name in (
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.testing",
    "lightning",
    "hetero_strategy.model.titan",
    "hetero_strategy.strategy",
    "tests.distributed.harness",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
