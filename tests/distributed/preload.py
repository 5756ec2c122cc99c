"""Imported once by the process that all workers are forked from; what is missing or broken is left to the workers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

for name in (
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.testing",
    "lightning",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.siglip2.modeling_siglip2",
    "transformers.models.whisper.modeling_whisper",
    "torchtitan_parts",
    "hetero_strategy.strategy.strategy",
    "recipes.train",
    "tests.distributed.stepping",
    "hetero_strategy.testing",
):
    with contextlib.suppress(Exception):
        if name == "torchtitan_parts":  # imported lazily by its adapter, and slow
            importlib.import_module("hetero_strategy.zoo.titan")._titan()
        else:
            importlib.import_module(name)

with contextlib.suppress(Exception):
    from tests.distributed.stepping import SHARED, data_of

    for folder, draws in zip(os.environ[SHARED].split(os.pathsep), (False, True), strict=True):
        data_of(folder, draws)

# A child that collects garbage would write to, and so copy, every page that holds an object.
gc.collect()
gc.freeze()
