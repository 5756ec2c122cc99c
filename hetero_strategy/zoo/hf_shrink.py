"""Small copies of transformers' configs: every kind of layer stays, every size becomes tiny."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

VOCABULARY = 160
SPECIAL = 150
"""First of the token ids that replace special ids above the tiny vocabulary."""
LAYERS = 4
"""Fewest layers, where the config has as many."""
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth")
"""Fields that hold the number of layers."""
INDICES = re.compile(r"(_layers|_layer_ids|_idxs|_indexes)$")
"""Lists with numbers of layers."""
Rule = Callable[[Any, Mapping[str, Any]], Any]


def _to(size: int) -> Rule:
    return lambda value, _: size


def _most(size: int) -> Rule:
    return lambda value, _: min(value, size)


def _key_heads(value: int, config: Mapping[str, Any]) -> int:
    heads = config.get("num_attention_heads", config.get("n_head", 0))
    return 1 if value == 1 else 4 if value == heads else 2


def _head(value: int, config: Mapping[str, Any]) -> int:
    if "expand" in config:
        return 64 * config["expand"] // 4
    return 8 if value == config.get("qk_rope_head_dim") else 16  # of MLA the rotary part


def _inner(value: int, config: Mapping[str, Any]) -> int:
    return 64 * config["expand"] if "expand" in config else 96  # of a Mamba mixer


def _value_heads(value: int, config: Mapping[str, Any]) -> int:
    return 2 if value == config.get("linear_num_key_heads") else 4


RULES: tuple[tuple[str, Rule], ...] = (
    (r".*vocab_size(_per_layer_input)?", _most(VOCABULARY)),
    (r"(moe|expert|shared|mlp)\w*_(intermediate|hidden|ffn)\w*size", _most(32)),
    (r"((out_)?hidden_size|d_model|n_embd|embedding_size|word_embed_proj_dim|(in|out)put_embedding_size)", _to(64)),
    (r"(lru_width|embed_dim|projection_dim)", _to(64)),
    (r"intermediate_size", _inner),
    (r"(dense_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|n_inner|(decoder_|encoder_)?ffn_dim|dff", _to(96)),
    (r"(swa_)?num_attention_heads|n_heads?|num_heads|(decoder|encoder)_attention_heads|linear_num_heads", _to(4)),
    (r"(swa_)?num_key_value_heads|num_global_key_value_heads|num_kv_heads|n_kv_heads", _key_heads),
    (r"(swa_|global_|attention_)?head_dim|linear_head_dim|d_head|kv_channels", _head),
    (r"q_lora_rank|qk_head_dim", _to(24)),
    (r"kv_lora_rank|o_lora_rank|qk_nope_head_dim|v_head_dim|query_pre_attn_scalar", _to(16)),
    (r"qk_rope_head_dim|index_head_dim|hidden_size_per_layer_input|laurel_rank|rotary_dim", _to(8)),
    (r"linear_num_key_heads|index_n_heads", _to(2)),
    (r"linear_num_value_heads", _value_heads),
    (r"linear_(key|value)_head_dim|mamba_d_state|ssm_state_size|state_size", _to(8)),
    (r"mamba_(n_heads|num_heads)", _to(4)),
    (r"mamba_(d_head|head_dim)", _to(32)),
    (r"mamba_d_ssm", _to(128)),
    (r"mamba_(n_groups|ngroups)|n_groups", _most(1)),
    (r"(time_step_rank|mamba_dt_rank)", _most(4)),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", _most(4)),
    (r"(num_experts_per_tok(en)?|top_k_experts|moe_k|moe_topk)", _most(2)),
    (r"(n|num)_(expert_)?group", _most(2)),
    (r"topk_group|(moe_)?(n|num)_shared_experts|num_kv_shared_layers", _most(1)),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", _most(1)),
    (r"\w*sliding_window(_size)?|(attention_|keep_)?window_size|local_attention|attention_chunk_size", _most(4)),
    (r"index_topk|mamba_chunk_size|chunk_size", _most(4)),
    (r"attn_layer_period", _most(2)),
    (r"attn_layer_offset", _most(1)),
    (r"n_positions|max_seq_len|n_ctx|max_target_positions", _most(128)),
)
"""Pattern of a field's whole name -> its new value, from the old one and the config. The first match counts."""
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)
_DROPOUT = re.compile(r"dropout|_pdrop$|drop_path|jitter|layerdrop")


def shrink(config: Any) -> Any:
    """Return a tiny copy of a transformers config: of its layers one of every kind, at least four where it has them.

    Names of fields decide what is a size; a field that no rule knows keeps its value. Dropout becomes 0. Configs inside
    a config become tiny, too.

    Args:
        config: a ``PreTrainedConfig``; it stays as it is.
    """
    return type(config).from_dict({**config.to_dict(), **_changes(config)})


def tiny_fields(config: Any) -> dict[str, Any]:
    """Return the arguments of a config's class that make it as small as :func:`shrink` does."""
    known = set(type(config).__dataclass_fields__)
    alias = {real: name for name, real in getattr(config, "attribute_map", {}).items() if name in known}
    named = {name if name in known else alias.get(name): value for name, value in _changes(config).items()}
    return {name: value for name, value in named.items() if name is not None}  # the rest follows from other fields


def _changes(config: Any) -> dict[str, Any]:
    """Return the fields of :func:`shrink` that differ from those of a transformers config."""
    values = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    layers = _layers(values)
    new: dict[str, Any] = {}
    special = SPECIAL
    for name, value in values.items():
        if isinstance(value, dict) and hasattr(part := getattr(config, name, None), "to_dict"):
            new[name] = {**value, **_changes(part)}
        elif name in COUNTS and layers is not None:
            new[name] = len(layers)
        elif name == "dtype":
            new[name] = None
        elif name.endswith(("_token_id", "_token_index")):
            ids = value if isinstance(value, list) else [value]
            small = [i if i is None or i < SPECIAL else (special := special + 1) for i in ids]
            new[name] = small if isinstance(value, list) else small[0]
        elif isinstance(value, float) and _DROPOUT.search(name):
            new[name] = 0.0
        elif isinstance(value, (list, dict)) and layers is not None and _by_layer(name, value, values):
            new[name] = _of_layers(name, value, layers, values)
        else:
            new[name] = _sized(name, value, values)
    if isinstance(rope := values.get("rope_parameters"), dict):
        new["rope_parameters"] = _rope(rope, values, new)
    elif isinstance(values.get("max_position_embeddings"), int):
        new["max_position_embeddings"] = min(values["max_position_embeddings"], 128)  # rows of a table
    return {name: value for name, value in new.items() if value != values[name]}


def _sized(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Return the tiny value of a field that is a size; other fields keep theirs."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return value
    rule = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(name)), None)
    return value if rule is None else rule(value, values)


def _layers(values: Mapping[str, Any]) -> list[int] | None:
    """Return the layers to keep: the first of every kind, and the first ones up to :data:`LAYERS`; None: no count."""
    count = next((values[name] for name in COUNTS if isinstance(values.get(name), int)), None)
    if count is None:
        return None
    about = [(n, v) for n, v in values.items() if isinstance(v, (list, dict)) and _by_layer(n, v, values)]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([_at(name, value, layer, count) for name, value in about]), layer)
    kept = sorted(kinds.values())[: 2 * LAYERS]
    return sorted({*kept, *[i for i in range(count) if i not in kept][: max(0, LAYERS - len(kept))]})


def _by_layer(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Return whether a field says something about single layers: a value each, or the numbers of some layers."""
    count = next((values[key] for key in COUNTS if isinstance(values.get(key), int)), 0)
    if name == "per_layer_config":
        return isinstance(value, dict)
    return isinstance(value, list) and (len(value) == count or _numbers_layers(name, value, count))


def _numbers_layers(name: str, value: Sequence[Any], count: int) -> bool:
    """Return whether a list holds numbers of layers in ascending order, not a flag of each layer."""
    whole = all(isinstance(i, int) and 0 <= i < count for i in value)
    return bool(INDICES.search(name)) and whole and all(a < b for a, b in pairwise(value))


def _at(name: str, value: Any, layer: int, count: int) -> Any:
    """Return what a field says about a layer."""
    if isinstance(value, dict):
        return {int(key): of for key, of in value.items()}.get(layer)
    return layer in value if _numbers_layers(name, value, count) else value[layer]


def _of_layers(name: str, value: Any, layers: Sequence[int], values: Mapping[str, Any]) -> Any:
    """Return a field for the kept layers alone."""
    count = next(values[key] for key in COUNTS if isinstance(values.get(key), int))
    if isinstance(value, dict):
        known = {int(key): of for key, of in value.items()}
        return {
            str(new): {key: _sized(key, one, {**values, **known[old]}) for key, one in known[old].items()}
            for new, old in enumerate(layers)
            if old in known
        }
    if _numbers_layers(name, value, count):
        return [new for new, old in enumerate(layers) if old in value]
    kept = [value[layer] for layer in layers]
    base = name.removesuffix("_per_layer")
    if base != name and base in values:  # sizes by layer: larger ones stay larger
        return [_sized(base, one, values) * (2 if one > min(kept) else 1) for one in kept]
    return [_sized(name, one, values) for one in kept]


def _rope(rope: Mapping[str, Any], values: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters, perhaps by kind of layer, with lists as long as the tiny head needs."""
    if any(isinstance(of, dict) for of in rope.values()):
        return {kind: _rope(of, values, new) if isinstance(of, dict) else of for kind, of in rope.items()}
    heads = new.get("num_attention_heads") or 4
    dim = new.get("qk_rope_head_dim") or new.get("head_dim") or new.get("hidden_size", 64) // heads
    half = int(dim * (rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)) // 2
    halved = copy.deepcopy(dict(rope))
    for name in ("short_factor", "long_factor"):
        if isinstance(halved.get(name), list):
            halved[name] = halved[name][:half]
    if isinstance(sections := halved.get("mrope_section"), list):
        ends = np.rint(np.cumsum([0, *sections]) / sum(sections) * half).astype(int)
        halved["mrope_section"] = np.diff(ends).tolist()
    return halved
