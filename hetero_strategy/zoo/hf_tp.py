"""Tensor parallelism of transformers' models, by the plans that their classes have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard
from typing_extensions import override

from hetero_strategy.model.tensor_parallel import (
    LocalWeights,
    SharedColumns,
    begins_columns,
    divisible,
    ends_columns,
    matches,
    style_of,
)
from hetero_strategy.model.token_loss import VocabularyParallel

LAYERS: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(
        ("colwise_gather_output", "colwise_rep", "embedding_colwise"),
        lambda: ColwiseParallel(output_layouts=Replicate()),
    ),
    **dict.fromkeys(
        ("rowwise_split_input", "rowwise_rep", "embedding_rowwise"), lambda: RowwiseParallel(input_layouts=Replicate())
    ),
}
"""transformers' names of styles that torch has: linear maps and embeddings."""
WEIGHTS = {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2), "packed_rowwise": (-1, 2)}
"""Its names of styles of single parameters -> dimension that is divided, number of matrices joined along it."""
EXPERTS = "moe_tp_experts"
"""Its name of the style of experts."""
MODULES: Mapping[str, Mapping[str, bool]] = {
    "local_params": {},
    "replicated_with_grad_allreduce": {},
    "all_reduce": {"summands": True},
    EXPERTS: {"whole_rows": True, "summands": True},
}
"""Its names of styles of other modules -> arguments of :class:`LocalWeights`."""
SHARED, WHOLE = "mla_kv_a_proj", "replicate"
"""Its names of the styles of a layer whose last columns are a key of all heads, and of whole layers."""


class OwnOutput(ParallelStyle):
    """A style of a module whose output may be changed in place, as that of shared experts is: it is no view."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, __, rows: rows.clone())
        return module


def tensor_parallel_plan(model: Any, prefix: str) -> dict[str, ParallelStyle] | None:
    """Translate transformers' plan of a model, or of a stage of it, into styles of torch and of this library.

    Token ids and logits are divided by vocabulary. Every rank has all rows between layers.

    Args:
        model: a transformers model.
        prefix: its name in the module that has it, with a dot.

    Returns:
        Name -> style of parts that the model has, for ``parallelize_module``; None if transformers has no plan of its
        layers, or one with styles that are not built.
    """
    raw, parts = dict(model.tp_plan or {}), dict(model.named_modules())
    if _unknown(raw) or not any("*" in name for name in raw):
        return None
    plan: dict[str, ParallelStyle] = {}
    for name in dict.fromkeys([*raw, *(name.rpartition(".")[0] for name in raw)]):
        examples = [part for fqn, part in parts.items() if fqn and matches(name, fqn)]
        style = _style(model, raw, name, examples) if examples else None
        if style is not None:
            plan[f"{prefix}{name}"] = style
    plan |= _head_norms(plan, prefix, parts)
    embedding, head = None, model.get_output_embeddings()
    with suppress(NotImplementedError):  # a stage of a composite without the embedding
        embedding = model.get_input_embeddings()
    for fqn, part in parts.items():
        if part is embedding:
            plan[f"{prefix}{fqn}"] = VocabularyParallel(input_layouts=Replicate())
        elif part is head:
            plan[f"{prefix}{fqn}"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def _head_norms(plan: Mapping[str, ParallelStyle], prefix: str, parts: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """Return the styles of norms of heads that a plan forgets, as that of Qwen3-VL-MoE does: their gradients on the
    ranks are summands, because each rank has some of the heads.
    """
    weight_styles: dict[str, ParallelStyle] = {}
    for fqn, attention in parts.items():
        children = dict(attention.named_children())
        styles = {name: style_of(plan, f"{prefix}{fqn}.{name}") for name in children}
        linear = [styles[name] for name, child in children.items() if isinstance(child, nn.Linear)]
        if not hasattr(attention, "head_dim") or None in linear or not any(map(begins_columns, linear)):
            continue
        for name, child in children.items():
            weights = dict(child.named_parameters())
            if weights and styles[name] is None and {w.shape for w in weights.values()} == {(attention.head_dim,)}:
                weight_styles[f"{prefix}{fqn}.{name}"] = LocalWeights(dict.fromkeys(weights, Replicate()))
    return weight_styles


def _unknown(raw: Mapping[str, str]) -> list[str]:
    known = {*LAYERS, *WEIGHTS, *MODULES, SHARED, WHOLE}
    return [f"{style} ({name})" for name, style in raw.items() if style not in known]


def _shares_experts(raw: Mapping[str, str], name: str) -> bool:
    """Return whether a module lies beside experts, whose output is added to its own: it sums up over the ranks."""
    block = name.rpartition(".")[0]
    has_experts = any(style == EXPERTS and other.rpartition(".")[0] == block for other, style in raw.items())
    return has_experts and any(style == "rowwise" and other.rpartition(".")[0] == name for other, style in raw.items())


def _style(model: Any, raw: Mapping[str, str], name: str, examples: list[nn.Module]) -> ParallelStyle | None:
    """Return the style of the parts of a name, or None for parts that all ranks have whole."""
    own = raw.get(name, "")
    if own == SHARED:
        return SharedColumns(model.config.get_text_config().qk_rope_head_dim)
    if own in LAYERS:
        return LAYERS[own]()
    placements: dict[str, Placement] = {}
    for key, weight in {k: w for part in examples for k, w in part.named_parameters(recurse=False)}.items():
        if (style := raw.get(f"{name}.{key}")) in WEIGHTS:
            dim, joined = WEIGHTS[style]
            dim = max(0, weight.ndim + dim)
            placements[key] = Shard(dim) if joined == 1 else _StridedShard(dim, split_factor=joined)
        elif own == "replicated_with_grad_allreduce":
            placements[key] = Replicate()
    how = MODULES.get(own, {})
    if placements or how:
        return LocalWeights(placements, **how)
    return OwnOutput() if _shares_experts(raw, name) else None


def tensor_parallel_faults(model: Any, tp: int) -> list[str]:
    """Return why transformers' plan of a model cannot divide its attention heads by ``tp``; empty if it can."""
    kind = type(model).__name__
    if unknown := _unknown(model.tp_plan or {}):
        return [f"transformers' plan of {kind} has the style {unknown[0]}, which is not built: set tp=1"]
    if (attentions := _attentions(model)) is None:
        return [f"transformers has no plan for {kind}: set tp=1"]
    return list(dict.fromkeys(fault for sizes in attentions for fault in divisible(tp, **sizes)))


_heads_of_models = WeakKeyDictionary[nn.Module, list[dict[str, int]] | None]()
"""Results of :func:`_attentions`; many degrees are tried in turn."""


def _attentions(model: Any) -> list[dict[str, int]] | None:
    """Return the numbers of heads of each attention that transformers' plan divides; None if it has no plan."""
    if model not in _heads_of_models:
        plan = tensor_parallel_plan(model, "")
        heads = None if plan is None else [_heads(plan, fqn, part) for fqn, part in model.named_modules()]
        _heads_of_models[model] = heads
    return _heads_of_models[model]


def _heads(plan: Mapping[str, ParallelStyle], fqn: str, attention: Any) -> dict[str, int]:
    """Return the numbers of heads of an attention that a plan divides by heads; empty for other modules."""
    width = getattr(attention, "v_head_dim", None) or getattr(attention, "head_dim", None)
    if not width or not hasattr(attention, "num_key_value_groups"):
        return {}
    for name, part in attention.named_modules():
        if isinstance(part, nn.Linear) and ends_columns(style_of(plan, f"{fqn}.{name}")):
            heads = part.in_features // width
            return {"heads": heads, "kv_heads": heads // attention.num_key_value_groups}
    return {}


# ---- by names: towers of transformers have no plan -------------------------------------------------------------------

COLUMNS = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value", "fc1", "up_proj", "gate_proj")
"""Names of linear maps of a block whose outputs tensor parallelism splits."""
ROWS = ("out_proj", "o_proj", "projection_layer", "fc2", "down_proj")
"""Names of linear maps of a block whose inputs it splits."""
HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""Attributes of an attention with numbers that it divides."""


def plan_by_names(blocks: Mapping[str, nn.Module]) -> dict[str, ParallelStyle] | None:
    """Return a plan for blocks, by FQN, from the names of their linear maps."""
    plan: dict[str, ParallelStyle] = {}
    for fqn, block in blocks.items():
        for name, part in block.named_modules():
            if isinstance(part, nn.Linear) and (split := _split(name)) is not None:
                plan[f"{fqn}.{name}"] = ColwiseParallel() if split == "columns" else RowwiseParallel()
    return plan or None


def faults_by_names(who: str, block: nn.Module, tp: int) -> list[str]:
    """Return why a block cannot be split ``tp`` ways: names that are not known, and numbers that do not divide."""
    linears = {name: part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
    if unknown := [name for name in linears if _split(name) is None]:
        return [
            f"tp={tp}, but {', '.join(unknown)} of {who} are not known as columns ({', '.join(COLUMNS)}) or rows"
            f" ({', '.join(ROWS)}), or are fused: set tp=1"
        ]
    heads = {name: number for part in block.modules() for name in HEADS if (number := getattr(part, name, None))}
    outputs = {f"outputs of {name}": linears[name].out_features for name in linears if _split(name) == "columns"}
    return divisible(tp, **heads, **outputs)


def divide_heads(block: nn.Module, tp: int) -> None:
    """Divide the numbers of heads, which are attributes of transformers' attention."""
    for part in block.modules():
        for name in HEADS:
            if isinstance(heads := getattr(part, name, None), int):
                setattr(part, name, heads // tp)


def _split(fqn: str) -> str | None:
    """Return how a linear map of this name is split: "columns", "rows" or not."""
    owner, _, name = fqn.rpartition(".")
    if name == "dense":
        return "rows" if owner.endswith("output") else "columns" if owner.endswith("intermediate") else None
    return "columns" if name in COLUMNS else "rows" if name in ROWS else None
