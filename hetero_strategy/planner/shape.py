"""What a plan has to know of a model: sizes of its blocks, counted on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from jaxtyping import Float64, Int64
from torch import nn

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.stages import in_no_stage
from hetero_strategy.planner.layers import fed_by_trainable
from hetero_strategy.schedule.action import StageId

LENGTHS = (64, 128)
"""Lengths of the sequences from whose FLOPs the linear and the quadratic part follow."""
LARGEST_TP = 64
KEPT = (12.0, 3.0, 2.0)
"""Numbers that a block of unknown layers keeps for its backward, over the width of each row that it takes, by what
tensor parallelism makes of them: inside its columns, which it divides; rows between them; inputs of columns, which
every rank has whole. Their sum is that of Korthikanti et al. (arXiv:2205.05198, section 4.1): 34 bytes where numbers
have 2, with flash attention."""
RESIDUAL_MOVES = 4
"""Times that a block's two residual sums read or write a row of its width."""
LOSS_MOVES = 7
"""Numbers of 2 bytes that the loss moves per logit: it reads 2 bytes, writes 4 (fp32) and reads these twice."""


@dataclass(frozen=True, eq=False)
class ModuleShape:
    """Sizes of one module's blocks; what lies before the blocks is in the first of them, what lies after in the last.

    A module without blocks counts as one.
    """

    per_row: Float64[np.ndarray, "blocks"]
    """Forward FLOPs per row inside the module."""
    per_pair: Float64[np.ndarray, "blocks"]
    """Forward FLOPs per square of a sequence's length."""
    parameters: Int64[np.ndarray, "blocks"]
    trained: Int64[np.ndarray, "blocks"]
    """Parameters that train."""
    trained_share: Float64[np.ndarray, "blocks"]
    """Share of a block's matmuls whose weights train."""
    has_blocks: bool
    """Whether it can be recomputed, and most can be cut into stages."""
    width: int
    """Size of the rows between its blocks."""
    edge_width: int
    """Size of the rows at its edges."""
    tp: tuple[int, ...]
    """Degrees of tensor parallelism that it takes, ascending, up to 64."""
    row_parts: Mapping[int, int]
    """For each of these, into how many parts an instance's rows are cut."""
    samplewise: bool
    """Whether its units are whole samples."""
    stored: Int64[np.ndarray, "blocks units=2 trains=2 divided=2"]
    """``parameters`` by FSDP unit (the block, or the rest of its stage), by whether they are frozen or train, and by
    whether tensor parallelism leaves them whole or divides them."""
    largest: Int64[np.ndarray, "blocks"]
    """Elements of the largest parameter that trains."""
    buffers: int
    """Bytes of the buffers of a stage, most of which are tables of positions that every stage has."""
    moved: Float64[np.ndarray, "blocks"] = field(default_factory=lambda: np.zeros(1))
    """Numbers per row that a block's forward writes or reads between its matmuls."""
    cuttable: bool = True
    """Whether every parameter is in a block, or before or after all: else there is one stage."""
    tied: bool = False
    """Whether its first and last stage share a parameter."""
    twice: Int64[np.ndarray, "units=2 trains=2 divided=2"] = field(
        default_factory=lambda: np.zeros((2, 2, 2), np.int64)
    )
    """What they share, as ``stored`` counts it in both."""
    tp_compiles: bool = True
    """Whether torch's compiler takes its tensor-parallel layers."""
    kept: Float64[np.ndarray, "kinds=3"] = field(default_factory=lambda: np.zeros(3))
    """Numbers per row that a block keeps for its backward, by the kinds of :data:`KEPT`; nothing: as that says."""
    keys: int = 0
    """Numbers per row that a block gathers over context-parallel ranks, see :attr:`Adapter.context_width`."""

    @property
    def blocks(self) -> int:
        return len(self.per_row)

    @property
    def most_stages(self) -> int:
        """Into how many stages it can be cut."""
        return self.blocks if self.has_blocks and self.cuttable else 1

    def held(self, first: int, last: int) -> tuple[int, int]:
        """Parameters of a stage of blocks ``first`` to ``last - 1``, and those of them that train."""
        twice = self.counted_twice(first, last).sum(axis=(0, 2))
        whole, trained = (int(n[first:last].sum()) for n in (self.parameters, self.trained))
        return whole - int(twice.sum()), trained - int(twice[1])

    def counted_twice(self, first: int, last: int) -> Int64[np.ndarray, "units=2 trains=2 divided=2"]:
        """What of :attr:`stored` is one parameter in a stage with both ends."""
        return self.twice * (first == 0 and last == self.blocks)

    @property
    def of_block(self) -> Float64[np.ndarray, "kinds=3"]:
        """Numbers per row that a block keeps which does not run again, by the kinds of :data:`KEPT`."""
        return self.kept if self.kept.any() else np.array(KEPT) * self.width

    def saved(
        self, recompute: Recompute | None = None, offload: Offload | None = None
    ) -> Float64[np.ndarray, "kinds=3"]:
        """Numbers per row that autograd keeps on the device for the backward of all blocks, by the kinds of
        :data:`KEPT`.

        The block's input alone where it is recomputed, with what matmuls and attention make of it (3 + 1 + 1 + 4 + 1 of
        17) where that is kept. Of blocks in host memory one is on its way.
        """
        kept, number = np.tile(self.of_block, (self.blocks, 1)), np.arange(self.blocks)
        if recompute is not None and not recompute.whole:
            again = number % recompute.every == 0
            kept[again] = self.of_block * 11 / 17 if recompute.keeps_matmuls else np.array([0.0, self.width, 0.0])
        away = number % offload.every == 0 if offload is not None else np.zeros(self.blocks, bool)
        return np.asarray(kept[~away].sum(axis=0) + kept[away].max(axis=0, initial=0.0))


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A model as a plan sees it."""

    modules: Mapping[str, ModuleShape]
    """In topological order."""
    edges: tuple[tuple[str, str], ...]

    def fed_by_trainable(self) -> dict[str, bool]:
        """Whether gradients have to reach a module's input rows, because something upstream trains."""
        return fed_by_trainable({name: bool(m.trained.any()) for name, m in self.modules.items()}, self.edges)

    def width(self, source: StageId, target: StageId) -> int:
        """Numbers in a row between two stages."""
        module = self.modules[source.module]
        return module.width if source.module == target.module else module.edge_width

    @property
    def samplewise(self) -> tuple[str, ...]:
        """Names of the modules whose units are whole samples."""
        return tuple(name for name, module in self.modules.items() if module.samplewise)

    @property
    def others(self) -> frozenset[str]:
        """Names of the other modules: encoders and generators, whose units are items."""
        return frozenset(self.modules) - {*self.samplewise}


def shape_of(model: MultimodalModel) -> ModelShape:
    """Count the blocks of a model's modules.

    Args:
        model: as built, before anything is parallelised; on the meta device it costs no memory.
    """
    modules = {name: _module(model.modules_by_name[name]) for name in model.topological()}
    return ModelShape(modules, tuple((edge.source, edge.target) for edge in model.edges))


def flops_by_length(
    module: Adapter, split: Sequence[int]
) -> tuple[Float64[np.ndarray, "stages"], Float64[np.ndarray, "stages"]]:
    """Forward FLOPs of every stage per row, and per square of a sequence's length: from sequences of two lengths."""
    short, long = (module.stage_flops(np.array([n]), split) for n in LENGTHS)
    a, b = LENGTHS
    per_pair = np.maximum((long - b / a * short) / (b * b - a * b), 0.0)
    return (short - per_pair * a * a) / a, per_pair


def _module(module: Adapter) -> ModuleShape:
    blocks = list(module.blocks())
    per_row, per_pair = flops_by_length(module, [1] * len(blocks) or [0])
    stages = [module.stage([f], first=i == 0, last=i == len(blocks) - 1) for i, f in enumerate(blocks)] or [module]
    stored, whole = np.stack([_stored(s, module) for s in stages]), _stored(module, module)
    tied = module.tied_weight() is not None
    degrees = [1, *(n for n in range(2, LARGEST_TP + 1) if module.tp_plan() is not None and not module.tp_faults(n))]
    return ModuleShape(
        per_row=per_row,
        per_pair=per_pair,
        parameters=np.array([sum(p.numel() for p in s.parameters()) for s in stages], np.int64),
        trained=np.array([sum(p.numel() for p in s.parameters() if p.requires_grad) for s in stages], np.int64),
        trained_share=np.array([trained_share(s) for s in stages]),
        has_blocks=bool(blocks),
        width=int(module.hidden_width if blocks else module.width),
        edge_width=int(module.width),
        tp=tuple(degrees),
        row_parts={n: module.row_sharding(ModuleLayout(tuple(range(n)), tp=n).resolved()).parts for n in degrees},
        samplewise=module.kind.samplewise,
        moved=_moved(module, stages, [*module.blocks().values()]),
        stored=stored,
        kept=_kept([*module.blocks().values()][-1:], int(module.hidden_width if blocks else module.width)),
        largest=np.array([max((p.numel() for p in s.parameters() if p.requires_grad), default=0) for s in stages]),
        buffers=max(sum(b.nbytes for b in s.buffers()) for s in stages),
        cuttable=not in_no_stage(module),
        tied=tied,
        twice=(stored.sum(axis=0) - whole) * tied,
        tp_compiles=module.tp_compiles,
        keys=module.context_width * (module.context_parallel and getattr(module, "before", None) is None),
    )


def _kept(blocks: Sequence[nn.Module], width: int) -> Float64[np.ndarray, "kinds=3"]:
    """What a block keeps, by the kinds of :data:`KEPT`: of every matmul the wider of what comes in and goes out, and
    what a gate makes of two of them; its own rows, and those that its norms make in fp32 (``RMSNorm``), or not
    (``LayerNorm``); what its two columns take. Within 2% of what ``profiling.activations`` measures of a SigLIP and a
    Llama; nothing where there are no blocks or other layers.
    """
    linears = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    if not linears:
        return np.zeros(3)
    widest = max(m.out_features for m in linears)
    gates = [m for m in linears if m.out_features == widest > m.in_features][1:]
    norms = [type(m).__name__ for block in blocks for m in block.modules() if type(m).__name__.endswith("Norm")]
    inside = sum(max(m.in_features, m.out_features) for m in linears) + sum(m.out_features for m in gates)
    between = sum(width * (4 if "RMS" in name else 1) for name in norms)
    return np.array([inside, between, 2 * width], np.float64)


def _moved(module: Adapter, stages: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> Float64[np.ndarray, "stages"]:
    """What lies between two matmuls reads the first one's rows and writes those of the second, each once."""
    linears = [[m for m in stage.modules() if isinstance(m, nn.Linear)] for stage in stages]
    moved = np.array([sum(m.in_features + m.out_features for m in held) for held in linears], np.float64)
    if blocks:
        moved += RESIDUAL_MOVES * module.hidden_width
    if module.kind.samplewise and linears[-1]:
        moved[-1] += (LOSS_MOVES - 1) * linears[-1][-1].out_features
    return moved


def _stored(stage: Adapter, module: Adapter) -> Int64[np.ndarray, "units=2 trains=2 divided=2"]:
    """Parameters of a stage of one block as :attr:`ModuleShape.stored` counts them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = module.tp_plan()
    found = np.zeros((2, 2, 2), np.int64)
    blocks = tuple(f"{fqn}." for fqn in stage.blocks())
    for fqn, parameter in stage.named_parameters():
        layer, _, kind = fqn.rpartition(".")
        style = next((style for pattern, style in (plan or {}).items() if fnmatchcase(layer, pattern)), None)
        divided = isinstance(style, ColwiseParallel) or (isinstance(style, RowwiseParallel) and kind == "weight")
        if plan == {}:  # a plan of its own, which divides all matrices
            divided = parameter.dim() > 1
        found[int(not fqn.startswith(blocks)), int(parameter.requires_grad), int(divided)] += parameter.numel()
    return found


def trained_share(stage: nn.Module) -> float:
    """Share of a stage's weights in matmuls that train: a frozen block may share its stage with a trained projector.

    They are all matrices, also of convolutions and experts, but those of embeddings.
    """
    layers = (layer for layer in stage.modules() if not isinstance(layer, nn.Embedding))
    weights = [w for layer in layers for w in layer.parameters(recurse=False) if w.dim() > 1]
    trained = sum(w.numel() for w in weights if w.requires_grad)
    return trained / max(1, sum(w.numel() for w in weights))
