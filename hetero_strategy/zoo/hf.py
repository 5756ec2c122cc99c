"""Shared parts of all Hugging Face adapters: configs, initial values, names of weights, norms."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
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


class HFAdapter(Adapter):
    """A base of adapters around one transformers model, which subclasses keep under :attr:`model`."""

    model: Any
    config: Any
    architecture: str
    """Name of the transformers class that loads the exported folder."""
    folder_processor: Mapping[str, Any] | None = None
    """Default of :attr:`HFWeights.processor`."""

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        original: Any = self.meta_copy()
        owner, rule = original.model, original.model._init_weights
        for name in prefix.split(".")[1:]:
            owner = getattr(owner, name)
            rule = getattr(owner, "_init_weights", rule)
        initialize_by_rule(unit if prefix else unit.get_submodule("model"), rule)

    @override
    def used_share(self, layer: nn.Module, name: str) -> float:
        weight, config = layer.get_parameter(name), self.config.get_text_config()
        experts = getattr(layer, "visits", None) or getattr(config, "num_experts_per_tok", None)
        if isinstance(layer, (nn.Linear, nn.Embedding, _ConvNd)) or experts is None:
            return super().used_share(layer, name)
        if weight.dim() == 3:
            return min(1.0, experts / len(weight))
        return float(weight.dim() == 2 and name == "weight")  # of a router

    @override
    @contextmanager
    def measured(self) -> Iterator[None]:
        """Let experts run by transformers' operator for all dtypes; torch's takes no fp32 without values."""
        from transformers.integrations import moe

        usual = moe._can_use_grouped_mm
        moe._can_use_grouped_mm = lambda *_, **__: False
        try:
            yield
        finally:
            moe._can_use_grouped_mm = usual

    @override
    def hf_weights(self) -> HFWeights:
        original = self.meta_copy()
        kept, tensors = original.state_dict(), [*original.named_parameters(), *original.named_buffers()]
        names = {fqn: fqn.removeprefix("model.") for fqn, _ in tensors if fqn in kept and fqn.startswith("model.")}
        config = {**self.config.to_dict(), "architectures": [self.architecture]}
        return HFWeights(names, config, model_class=type(self.model), processor=self.folder_processor)


@dataclass(frozen=True)
class RowsOf:
    """A function of sizes, int64 ``[n, k]``, to rows, int64 ``[n]``; it is pickled."""

    sides: int
    """Last numbers of the sizes whose product it takes."""
    more: int = 0
    """Rows added to an item."""
    divisor: int = 1
    patch: int = 1
    """Length of a patch along a side; what is left of a side is no patch."""

    def __call__(self, sizes: np.ndarray) -> np.ndarray:
        sides = np.asarray(sizes, np.int64)[:, -self.sides :] // self.patch
        return sides.prod(axis=1) // self.divisor + self.more


@dataclass(frozen=True)
class RowsOfColumn:
    """A function of sizes, int64 ``[n, k]``, to rows, int64 ``[n]``: ``(sizes[:, column] * times + shift) // divisor``.

    It is pickled.
    """

    column: int
    times: int = 1
    shift: int = 0
    divisor: int = 1

    def __call__(self, sizes: np.ndarray) -> np.ndarray:
        return (np.asarray(sizes, np.int64)[:, self.column] * self.times + self.shift) // self.divisor


def matmul_weights(part: nn.Module) -> int:
    """Count the weights of linear maps and of convolutions."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return sum(layer.weight.numel() for layer in part.modules() if isinstance(layer, kinds))


def initialize_by_rule(part: nn.Module, rule: Callable[[nn.Module], None]) -> None:
    """Initialise a part, children first, each module by the rule of the transformers model that is nearest above it.

    Flags that say "already initialised" are reset: they were set when the model was made on the meta device.
    """
    rule = getattr(part, "_init_weights", rule)
    for child in part.children():
        initialize_by_rule(child, rule)
    holders: list[Any] = [part, *part._parameters.values(), *part._buffers.values()]
    for holder in holders:
        if getattr(holder, "_is_hf_initialized", False):
            holder._is_hf_initialized = False
    rule(part)


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
            other = f"; use {TAKE.get(str(kind), 'hf_causal_lm or hf_encoder')}"
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
        known |= {"head_dim"} if "head_dim" in fields and _reads_head_dim(config_class) else set()
        if unknown := set(fields) - known:
            raise ModelError(f"{who}: unknown field {sorted(unknown)}: {config_class.__name__} has {sorted(known)}")
    check_config(who, fields)
    try:
        return config_class(**{name: value for name, value in fields.items() if name not in OTHERS})
    except Exception as fault:  # transformers raises several kinds
        raise ModelError(f"{who}: {' '.join(str(fault).split())}") from None


def _reads_head_dim(config_class: Any) -> bool:
    """Return whether attention takes its width from a config that has no field for it, as in Qwen3-MoE."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    return 'self.head_dim = getattr(config, "head_dim"' in inspect.getsource(import_module(name))


def check_config(who: str, fields: Mapping[str, Any]) -> None:
    """Refuse impossible sizes of a config by name, before a library divides by them or makes a model without rows."""
    values = {name: value for name, value in fields.items() if value is not None or name not in FOLLOW}
    for least, names in ((1, SIZES), (0, LAYERS)):
        for name in values.keys() & {*names}:
            for size in value if isinstance(value := values[name], list) else [value]:  # a list has one for each layer
                check_sizes(who, least, **{name: size})


def make_model(model_class: Any, config: Any) -> Any:
    """Make a transformers model; refuse a field's value that transformers does not know, which it checks only here.

    On the meta device no parameter has a value, even if the class draws it in a way that ignores the device.
    """
    try:
        model = model_class(config)
    except Exception as fault:  # several kinds: for an unknown activation a KeyError
        reason = " ".join(str(fault).split())
        raise ModelError(
            f"{model_class.__name__}: transformers makes no model of this config: {type(fault).__name__} {reason};"
            " correct the field with that value"
        ) from fault
    if torch.get_default_device().type == "meta":
        for part in model.modules():
            for name, drawn in part._parameters.items():
                if drawn is not None and not drawn.is_meta:
                    part._parameters[name] = nn.Parameter(torch.empty_like(drawn, device="meta"), drawn.requires_grad)
    return model


def check_folder(who: str, checkpoint: str | Path, *, quantised: bool = False) -> dict[str, Any]:
    """Return a folder's config.json; refuse code of its own and, unless they may be, ``quantised`` weights."""
    content = read_config(checkpoint)
    for field, reason in (
        ("auto_map", "code from a folder is not run; take a folder of a class that transformers has"),
        ("quantization_config", "its weights are quantised; save them in bfloat16 with transformers first"),
    ):
        if content.get(field) and not (quantised and field == "quantization_config"):
            raise ModelError(f"{who}: {checkpoint}/config.json has {field}: {reason}")
    return content


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
        self.eps: float = _epsilon(norm)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight, self.eps)


def make_norms_precise(model: nn.Module) -> None:
    """Replace in place each norm of a transformers model that computes what torch's RMSNorm does; names stay."""
    known: dict[type, bool] = {}
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if [*dict(child.named_parameters())] == ["weight"] and _epsilon(child) and child.weight.ndim == 1:
                if len(inspect.signature(child.forward).parameters) > 1:  # its gate is no part of torch's norm
                    continue
                if type(child) not in known:
                    known[type(child)] = _is_rms_norm(child)
                if known[type(child)]:
                    setattr(owner, name, PreciseRMSNorm(child))


def _epsilon(norm: Any) -> float:
    """Return a norm's epsilon, or 0."""
    return getattr(norm, "variance_epsilon", 0.0) or getattr(norm, "eps", 0.0)


def _is_rms_norm(norm: Any) -> bool:
    """Return whether a norm on the meta device computes what torch's RMSNorm does, on some values."""
    real = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        real.weight.uniform_(0.5, 1.5, generator=generator)
        rows = torch.empty(2, *real.weight.shape).uniform_(-1e-2, 1e-2, generator=generator)
        try:
            output = real(rows)
        except Exception:  # it takes rows by head
            return False
        expected = F.rms_norm(rows, real.weight.shape, real.weight, _epsilon(norm))
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-6)
