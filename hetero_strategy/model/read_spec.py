"""Read a :class:`ModelSpec` from a model: count the sizes of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float64, Int64
from torch import nn

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.mask import Causal, MaskRule, by_window
from hetero_strategy.model.adapter import Adapter, linear_flops, linear_share
from hetero_strategy.model.attention import attention_pairs
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.spec import LARGEST_TP, Experts, ModelSpec, ModuleSpec
from hetero_strategy.model.tensor_parallel import Plan, divided_along, style_of

Share = Callable[[nn.Module, str], float]
RESIDUAL_MOVES = 4
"""Times that a block's two residual sums read or write a row of its width."""
LOSS_MOVES = 7
"""Numbers of 2 bytes that the loss moves per logit: it reads 2 bytes, writes 4 (fp32) and reads these twice."""
LENGTHS = (64, 128)
"""Lengths of the sequences from whose FLOPs the linear and the quadratic part follow."""


def spec_of(model: MultimodalModel) -> ModelSpec:
    """Count the sizes of a model's blocks.

    Args:
        model: model as built, before anything is parallelised; on the meta device it costs no memory.
    """
    modules = {name: spec_of_module(model.modules_by_name[name]) for name in model.topological()}
    return ModelSpec(modules, tuple((edge.source, edge.target) for edge in model.edges), model.language_models())


def spec_of_module(module: Adapter) -> ModuleSpec:
    """Count the sizes of one module's blocks; see :func:`spec_of`."""
    blocks = list(module.blocks())
    cut = blocks if module.can_be_cut else []
    per_row, per_pair = flops_by_length(module, [1] * len(cut) or [len(blocks)])
    stages = [module.stage([f], first=i == 0, last=i == len(cut) - 1) for i, f in enumerate(cut)] or [module]
    plan = module.tp_plan()
    stored, whole = np.stack([_stored(s, plan) for s in stages]), _stored(module, plan)
    tied = module.tied_weight() is not None
    largest = LARGEST_TP if plan is not None else 1
    degrees = [1, *(n for n in range(2, largest + 1) if not module.tp_faults(n))]
    return ModuleSpec(
        per_row=per_row,
        per_pair=per_pair,
        parameters=np.array([sum(p.numel() for p in s.parameters()) for s in stages], np.int64),
        trained=np.array([sum(p.numel() for p in s.parameters() if p.requires_grad) for s in stages], np.int64),
        trained_share=np.array([trained_share(s, module.used_share) for s in stages]),
        has_blocks=bool(blocks),
        width=int(module.hidden_width if blocks else module.width),
        edge_width=int(module.width),
        tp=tuple(degrees),
        row_shardings={n: module.row_sharding(ModuleLayout(tuple(range(n)), tp=n).resolved()) for n in degrees},
        samplewise=module.kind.samplewise,
        moved=_moved(module, stages, [*module.blocks().values()]),
        stored=stored,
        kept=_kept(module, [*module.blocks().values()][-1:], int(module.hidden_width if blocks else module.width)),
        largest=np.array([_largest(_besides_experts(s)) for s in stages], np.int64),
        buffers=max(sum(b.nbytes for b in s.buffers()) for s in stages),
        cuttable=module.can_be_cut and not in_no_stage(module),
        tied=tied,
        twice=(stored.sum(axis=0) - whole) * tied,
        tp_compiles=module.tp_compiles,
        first_blocks=module.first_blocks,
        runs_vary=module.runs_vary,
        keys=module.context_width * (module.context_parallel and getattr(module, "before", None) is None),
        queries=module.query_width,
        rules=_rules(module, len(stages)),
        own_units=module.kind.has_own_units,
        experts=_experts(stages, module, plan) if module.experts() else None,
        balanced=0 if module.routing is None else module.routing.experts * bool(module.routing.balance),
    )


def active_parameters(module: Adapter) -> int:
    """Return :attr:`ModuleSpec.active` without cutting the module into stages."""
    parts = [module.get_submodule(fqn) for fqn in module.experts()]
    visited = sum(linear_flops(part, module.used_share) for part in parts) / 2
    unvisited = sum(p.numel() for part in parts for p in part.parameters()) - visited
    return int(sum(p.numel() for p in module.parameters()) - unvisited)


def _rules(module: Adapter, stages: int) -> tuple[tuple[MaskRule, Int64[np.ndarray, "stages"]], ...]:
    """Count the attentions of each stage by the rule that they follow."""
    if not module.kind.samplewise:
        return ()
    windows = module.block_windows() if isinstance(module, CausalLM) else [[None]] * stages
    if len(windows) != stages:
        windows = [[window for of_block in windows for window in of_block]]
    seen = list(dict.fromkeys(window for of_stage in windows for window in of_stage)) or [None]
    rules = {**by_window(Causal(), seen), **module.kind.rules}
    counts = {window: np.array([list(of_stage).count(window) for of_stage in windows], np.int64) for window in seen}
    return tuple((rules[window], count) for window, count in counts.items())


def expert_sizes(module: Adapter) -> dict[tuple[int, ...], str]:
    """Return the number of experts and the second dimensions of their stacks -> FQN of the first such layer."""
    first: dict[tuple[int, ...], str] = {}
    for fqn, count in module.experts().items():
        matrices = module.get_submodule(fqn).parameters()
        first.setdefault((count, *sorted({p.shape[1] if p.ndim > 1 else 1 for p in matrices})), fqn)
    return first


def flops_by_length(
    module: Adapter, split: Sequence[int]
) -> tuple[Float64[np.ndarray, "stages"], Float64[np.ndarray, "stages"]]:
    """Return the forward FLOPs of every stage per row, and per square of a sequence's length or mask."""
    short, long = (module.stage_flops(np.array([n]), split) for n in LENGTHS)
    squares, of_long = (causal_squares(module, split, np.array([n])) for n in LENGTHS)
    a, b = LENGTHS
    more, apart = long - b / a * short, of_long - b / a * squares
    per_pair = np.maximum(np.divide(more, apart, out=np.zeros_like(more), where=apart > 0), 0.0)
    return (short - per_pair * squares) / a, per_pair


def causal_squares(
    module: Adapter, split: Sequence[int], lengths: Int64[np.ndarray, "sequences"]
) -> Float64[np.ndarray, "stages"]:
    """Return the squares of sequences in the mean of each stage's attentions, as :meth:`Adapter.stage_flops` counts
    their pairs: causal in the windows of a language model's layers. They are twice the pairs less the rows.
    """
    if not isinstance(module, CausalLM):
        return np.full(len(split), float((lengths * lengths).sum()))
    windows, ends = list(module.block_windows()), ragged.offsets(np.asarray(split)).tolist()
    of_stages = [[w for block in windows[a:b] for w in block] or [None] for a, b in pairwise(ends)]
    pairs = [np.mean([attention_pairs(lengths, causal=True, window=w) for w in of]) for of in of_stages]
    return 2.0 * np.array(pairs) - float(lengths.sum())


def trained_share(stage: nn.Module, share: Share = linear_share) -> float:
    """Return the share of a stage's matmuls whose weights train: a frozen block may share a stage with a trained
    projector.

    Matmul weights are all matrices except those of embeddings, also of convolutions; ``share``:
    :meth:`Adapter.used_share`.
    """
    layers = (layer for layer in stage.modules() if not isinstance(layer, nn.Embedding))
    named = ((layer, *pair) for layer in layers for pair in layer.named_parameters(recurse=False))
    used = [(w.numel() * (share(layer, n) or 1.0), w.requires_grad) for layer, n, w in named if w.dim() > 1]
    return sum(n for n, trains in used if trains) / max(1, sum(n for n, _ in used))


def in_no_stage(module: Adapter) -> list[str]:
    """List parameters that are in no stage."""
    parts = (*module.blocks(), *(fqn for around in module.around_blocks() for fqn in around))
    known = tuple(f"{fqn}." for fqn in parts)
    return [fqn for fqn, _ in module.named_parameters(remove_duplicate=False) if not f"{fqn}.".startswith(known)]


def _kept(module: Adapter, blocks: Sequence[nn.Module], width: int) -> Float64[np.ndarray, "kinds=4"]:
    """Count the numbers that a block keeps, by the kinds of :data:`KEPT`. Inside columns: for every matmul the wider of
    its input and output, and the product of a gate. Between columns: the block's rows, which its norms make in fp32
    (``RMSNorm``) or not (``LayerNorm``). Whole: inputs of its two columns. Experts count as often as a row
    visits one; each of their matrices takes or returns rows. Within 2% of what ``profiling.activations`` measures of a
    SigLIP and a Llama; zeros if there are no blocks or other layers.
    """
    linears = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    if not linears:
        return np.zeros(4)
    widest = max(m.out_features for m in linears)
    gates = [m for m in linears if m.out_features == widest > m.in_features][1:]
    norms = [type(m).__name__ for block in blocks for m in block.modules() if type(m).__name__.endswith("Norm")]
    inside: float = sum(max(m.in_features, m.out_features) for m in linears) + sum(m.out_features for m in gates)
    stacks = [stack for block in blocks for stack in _stacks(module, block)]
    inside += sum((a + b - width) * visits for a, b, visits in stacks)
    between = sum(width * (4 if "RMS" in name else 1) for name in norms)
    return np.array([inside, between, 2 * width, sum(width * visits for *_, visits in stacks)], np.float64)


def _stacks(module: Adapter, part: nn.Module) -> Iterator[tuple[int, int, float]]:
    """Yield sizes of the matrices in a part's stacks of experts, and how many of a stack a row visits."""
    for layer in part.modules():
        for name, weight in layer.named_parameters(recurse=False):
            if weight.dim() == 3 and (share := module.used_share(layer, name)):
                yield weight.shape[1], weight.shape[2], share * len(weight)


def _moved(module: Adapter, stages: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> Float64[np.ndarray, "stages"]:
    """Count the numbers moved between matmuls: each reads the first one's rows and writes the second one's, once."""
    linears = [[m for m in stage.modules() if isinstance(m, nn.Linear)] for stage in stages]
    moved = np.array([sum(m.in_features + m.out_features for m in layers) for layers in linears], np.float64)
    moved += [sum((a + b) * visits for a, b, visits in _stacks(module, stage)) for stage in stages]
    if blocks:
        moved += RESIDUAL_MOVES * module.hidden_width
    if module.kind.samplewise and linears[-1]:
        moved[-1] += (LOSS_MOVES - 1) * linears[-1][-1].out_features
    return moved


def _experts(stages: Sequence[Adapter], module: Adapter, plan: Plan | None) -> Experts:
    """Count the sizes of a module's routed experts in stages of one block."""
    parts = [[stage.get_submodule(fqn) for fqn in stage.experts()] for stage in stages]
    visits = [[max((n for *_, n in _stacks(module, part)), default=0.0) for part in own] for own in parts]
    return Experts(
        stored=np.stack([_stored(stage, plan, stage.experts())[0] for stage in stages]),
        largest=np.array([_largest(p for part in own for p in part.parameters()) for own in parts], np.int64),
        per_row=np.array([sum(linear_flops(part, module.used_share) for part in own) for own in parts], np.float64),
        sent=np.array([module.hidden_width * sum(own) for own in visits], np.float64),
        sizes=tuple(expert_sizes(module)),
    )


def _largest(parameters: Iterable[nn.Parameter]) -> int:
    """Return the elements of the largest parameter that trains."""
    return max((p.numel() for p in parameters if p.requires_grad), default=0)


def _besides_experts(stage: Adapter) -> Iterator[nn.Parameter]:
    experts = stage.experts()
    return (p for fqn, p in stage.named_parameters() if fqn.rpartition(".")[0] not in experts)


def _stored(
    stage: Adapter, plan: Plan | None, layers: Collection[str] | None = None
) -> Int64[np.ndarray, "units=2 trains=2 divided=2"]:
    """Count the parameters of a stage of one block, or of some of its layers, as :attr:`ModuleSpec.stored` does; the
    plan of tensor parallelism is its module's.
    """
    counts = np.zeros((2, 2, 2), np.int64)
    blocks = tuple(f"{fqn}." for fqn in stage.blocks())
    for fqn, parameter in stage.named_parameters():
        layer, _, kind = fqn.rpartition(".")
        if layers is not None and layer not in layers:
            continue
        divided = divided_along(style_of(plan or {}, layer), stage.get_submodule(layer), kind) is not None
        if plan == {}:  # a plan of the module's own, which divides all matrices
            divided = parameter.dim() > 1
        counts[int(not fqn.startswith(blocks)), int(parameter.requires_grad), int(divided)] += parameter.numel()
    return counts
