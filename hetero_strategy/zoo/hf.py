"""Shared parts of all Hugging Face adapters: configs, initial values, names of weights, norms, quiet imports."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ModelError, check_sizes
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.hf_folder import HFWeights, read_config
from hetero_strategy.model.inputs import Packing

TAKE = {"llama": "hf_llama", "qwen3": "hf_qwen3", "siglip2": "siglip2_encoder", "whisper": "whisper_encoder"}
"""``model_type`` of a config.json -> factory that takes its folder."""
SIZES = (
    *("hidden_size", "d_model", "dim", "intermediate_size", "encoder_ffn_dim", "multiple_of", "vocab_size"),
    *("num_attention_heads", "encoder_attention_heads", "n_heads", "num_key_value_heads", "n_kv_heads", "head_dim"),
    *("patch_size", "num_channels", "num_patches", "num_mel_bins"),
    *("max_position_embeddings", "max_source_positions", "max_seq_len"),
)
"""Fields of configs that are at least 1."""
LAYERS = ("num_hidden_layers", "encoder_layers", "n_layers")
"""Fields that may be 0."""
FOLLOW = ("num_key_value_heads", "n_kv_heads", "head_dim")
"""Fields that may be None: they then follow from other fields."""
OTHERS = ("model_type", "architectures", "quantization_config")
"""Fields of a config.json that do not belong to the model: weights load and are exported unquantized."""
SAID = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}
"""Logger -> part of a message that it logs when transformers' models are imported, and that users cannot act on:
missing kernels for this Python or device, a deprecated call."""


def hush() -> None:
    """Filter the messages of :data:`SAID` out; calling it again changes nothing."""
    for name in SAID:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return SAID[record.name] not in str(record.msg)


class HFAdapter(Adapter):
    """A base of adapters around one transformers model, which subclasses keep under :attr:`model`."""

    model: Any
    config: Any
    architecture: str
    """Name of the transformers class that loads the exported folder."""
    folder_prefixes: tuple[str, ...] = ("",)
    """Default of :attr:`HFWeights.prefixes`."""
    folder_ignored: tuple[str, ...] = ()
    """Default of :attr:`HFWeights.ignored`."""
    folder_tied: tuple[str, str] | None = None
    """Default of :attr:`HFWeights.tied`."""
    folder_processor: Mapping[str, Any] | None = None
    """Default of :attr:`HFWeights.processor`."""

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Apply transformers' own rule to every submodule, children first.

        Flags that say "already initialised" are reset: they were set when the model was made on the meta device.
        """
        part = unit if prefix else unit.get_submodule("model")
        for module in part.modules():
            holders: list[Any] = [module, *module._parameters.values(), *module._buffers.values()]
            for holder in holders:
                if getattr(holder, "_is_hf_initialized", False):
                    holder._is_hf_initialized = False
        for module in reversed(list(part.modules())):
            self.model._init_weights(module)

    @override
    def hf_weights(self) -> HFWeights:
        names = {fqn: fqn.removeprefix("model.") for fqn, _ in self.meta_copy().named_parameters()}
        config = {**self.config.to_dict(), "architectures": [self.architecture]}
        return HFWeights(
            names,
            config,
            prefixes=self.folder_prefixes,
            ignored=self.folder_ignored,
            tied=self.folder_tied,
            processor=self.folder_processor,
        )


def check_causal(who: str, config: Any) -> None:
    """Refuse a language model whose rows attend to later rows, which transformers 5 allows."""
    if not getattr(config, "is_causal", True):
        raise ModelError(f"{who}: config.json has is_causal=false, and a language model's attention here is causal")


def make_config(
    who: str,
    config_class: Any,
    checkpoint: str | Path | None,
    fields: Mapping[str, Any],
    *,
    model_types: tuple[str, ...] = (),
    section: str = "",
    instead: str = "",
) -> Any:
    """Build a transformers config from keyword arguments or from a folder's config.json.

    Args:
        who: name of the factory, for errors.
        config_class: the transformers class.
        checkpoint: local Hugging Face folder.
        fields: keyword arguments; they exclude ``checkpoint``.
        model_types: accepted values of ``model_type`` in config.json; default: the class's own.
        section: part of config.json to read, if it exists.
        instead: advice in the error about a folder of another model.
    """
    if checkpoint is not None:
        check_no_fields(who, fields)
        content = read_config(checkpoint)
        kind, takes = content.get("model_type"), model_types or (config_class.model_type,)
        if kind not in takes:
            other = f"; use {TAKE[kind]}" if kind in TAKE else "; docs/your_module.md says how to put in another model"
            raise ModelError(
                f"{who}: {checkpoint}/config.json is of a {kind!r} model, and it takes {' or '.join(map(repr, takes))}"
                f"{instead or other}"
            )
        fields = content.get(section, content) or {}  # null: all defaults of transformers
        if not isinstance(fields, dict):
            raise ModelError(f"{who}: {checkpoint}/config.json has {section}={fields!r}; give names and values there")
    else:
        # A transformers config accepts any keyword as an attribute; a misspelt one must raise an error.
        known = set(inspect.get_annotations(config_class)) | set(getattr(config_class, "attribute_map", {}))
        if unknown := set(fields) - known:
            raise ModelError(f"{who}: unknown field {sorted(unknown)}: {config_class.__name__} has {sorted(known)}")
    check_config(who, fields)
    try:
        return config_class(**{name: value for name, value in fields.items() if name not in OTHERS})
    except Exception as fault:  # transformers raises several kinds
        raise ModelError(f"{who}: {' '.join(str(fault).split())}") from None


def check_config(who: str, fields: Mapping[str, Any]) -> None:
    """Refuse impossible sizes of a config by name, before a library divides by them or makes a model without rows."""
    values = {name: value for name, value in fields.items() if value is not None or name not in FOLLOW}
    check_sizes(who, **{name: values[name] for name in SIZES if name in values})
    check_sizes(who, 0, **{name: values[name] for name in LAYERS if name in values})


def make_model(model_class: Any, config: Any) -> Any:
    """Make a transformers model; refuse a field's value that transformers does not know, which it checks only here."""
    try:
        return model_class(config)
    except Exception as fault:  # several kinds: for an unknown activation a KeyError
        reason = " ".join(str(fault).split())
        raise ModelError(
            f"{model_class.__name__}: transformers makes no model of this config: {type(fault).__name__} {reason};"
            " correct the field with that value"
        ) from fault


def check_no_fields(who: str, fields: Mapping[str, Any]) -> None:
    """Raise ModelError if a factory has both a checkpoint and sizes."""
    if fields:
        raise ModelError(f"{who}: checkpoint= fixes the sizes, so remove {sorted(fields)}")


def at_least_one_row(rows: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
    """Return rows ``[T, width]`` and their packing, or one zero row if there is none.

    transformers' layers cannot reshape zero rows. Cut the result back to ``packing.rows``: gradients are then zero, and
    an instance without samples still takes part in its module's collectives.
    """
    if packing.rows:
        return rows, packing
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), Packing.of(np.ones(1, np.int64)).to(rows.device)


class PreciseRMSNorm(nn.Module):
    """A replacement of transformers' RMSNorm by torch's operator: one kernel on CUDA, fp32 or, for fp64 rows, fp64."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.variance_epsilon

    @override
    def forward(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight, self.eps)


def make_norms_precise(model: nn.Module) -> None:
    """Replace every RMSNorm of a transformers model in place; names stay the same."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(owner, name, PreciseRMSNorm(child))
