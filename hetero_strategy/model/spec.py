"""``ModelSpec``: a model on paper, the sizes of its blocks by module, and the rules of what its layers cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.layout.row_sharding import RowSharding, sharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.mask import MaskRule

LARGEST_TP = 64
"""Largest degree of tensor parallelism that a spec lists."""
KEPT = (12.0, 3.0, 2.0, 0.0)
"""Numbers that a block of unknown layers keeps for its backward, over the width of each row that it takes, by how
tensor parallelism divides them: inside its columns, divided; rows between them; inputs of columns, which every rank has
whole; rows on their way to experts and back, which every rank has whole unless ``ep`` divides the experts. Their sum is
that of Korthikanti et al. (arXiv:2205.05198, section 4.1): 34 bytes for numbers of 2 bytes, with flash attention."""


def kept_shares(tp: int, parts: int, ep: int) -> Float64[np.ndarray, "kinds=4"]:
    """Return the share of each kind of :data:`KEPT` that one of ``tp`` ranks has.

    Args:
        parts: number of parts of the rows between columns, one for each rank; 1: every rank has all rows.
    """
    return np.array([1 / tp, 1 / parts, 1.0, 1 / tp if ep > 1 else 1.0])


@dataclass(frozen=True, eq=False)
class Experts:
    """The sizes of a module's routed experts, which its blocks' other sizes include."""

    stored: Int64[np.ndarray, "blocks trains=2 divided=2"]
    """Parameters by frozen or trained, and by whole or divided under tensor parallelism without ``ep``."""
    largest: Int64[np.ndarray, "blocks"]
    """Elements of the largest parameter that trains; :attr:`ModuleSpec.largest` leaves experts out."""
    per_row: Float64[np.ndarray, "blocks"]
    """Forward FLOPs per row: of the experts that a row visits."""
    sent: Float64[np.ndarray, "blocks"]
    """Numbers per row that go to experts: the row's width for each expert that it visits."""
    sizes: tuple[tuple[int, ...], ...]
    """Number of experts and second dimensions of their stacks, for every kind of layer."""
    divisible: bool = True
    """Whether a module with its transforms takes ``ep``."""

    def can_be_divided(self, ep: int, shards: int) -> bool:
        """Return whether the experts can be divided over ``ep`` ranks, and each part over so many shards."""
        return self.divisible and all(
            count % ep == 0 and (count // ep % shards == 0 or all(size % shards == 0 for size in sizes))
            for count, *sizes in self.sizes
        )

    def held(self, first: int, last: int) -> tuple[int, int]:
        """Return the experts' parameters in blocks ``first`` to ``last - 1``, and those that train."""
        frozen, trained = self.stored[first:last].sum(axis=(0, 2)).tolist()
        return frozen + trained, trained


@dataclass(frozen=True, eq=False)
class ModuleSpec:
    """The sizes of one module's blocks; layers before the blocks count in the first, layers after them in the last.

    A module without blocks counts as one.
    """

    per_row: Float64[np.ndarray, "blocks"]
    """Forward FLOPs per row inside the module."""
    per_pair: Float64[np.ndarray, "blocks"]
    """Forward FLOPs per square of a sequence's length. If rows see fewer or more than all earlier rows, twice the pairs
    of a row and a key that it sees, less the rows, count as the square: under a causal mask both are equal."""
    parameters: Int64[np.ndarray, "blocks"]
    trained: Int64[np.ndarray, "blocks"]
    """Parameters that train."""
    trained_share: Float64[np.ndarray, "blocks"]
    """Share of a block's matmuls whose weights train."""
    has_blocks: bool
    """Whether the module can be recomputed; most such modules can be cut into stages."""
    width: int
    """Size of the rows between its blocks."""
    edge_width: int
    """Size of the rows at its edges."""
    tp: tuple[int, ...]
    """Degrees of tensor parallelism that the module supports, ascending, up to 64."""
    row_shardings: Mapping[int, RowSharding]
    """Degree of tensor parallelism -> split of an instance's rows over its ranks, without context parallelism."""
    samplewise: bool
    """Whether its units are whole samples."""
    stored: Int64[np.ndarray, "blocks units=2 trains=2 divided=2"]
    """``parameters`` by FSDP unit (the block, or the rest of its stage), by frozen or trained, and by whole or divided
    under tensor parallelism."""
    largest: Int64[np.ndarray, "blocks"]
    """Elements of the largest parameter that trains, besides experts."""
    buffers: int
    """Bytes of the buffers of a stage, mostly tables of positions that every stage has."""
    moved: Float64[np.ndarray, "blocks"]
    """Numbers per row that a block's forward writes or reads between its matmuls."""
    cuttable: bool = True
    """Whether every parameter is in a block, or before or after all; otherwise there is one stage."""
    tied: bool = False
    """Whether its first and last stage share a parameter."""
    twice: Int64[np.ndarray, "units=2 trains=2 divided=2"] = field(
        default_factory=lambda: np.zeros((2, 2, 2), np.int64)
    )
    """Parameters that both stages share, as ``stored`` counts them in both."""
    tp_compiles: bool = True
    """Whether torch's compiler handles its tensor-parallel layers."""
    kept: Float64[np.ndarray, "kinds=4"] = field(default_factory=lambda: np.zeros(4))
    """Numbers per row that a block keeps for its backward, by the kinds of :data:`KEPT`; zeros: use :data:`KEPT`."""
    first_blocks: int = 1
    """Number of blocks that the first stage has at least."""
    runs_vary: bool = False
    """Whether its blocks run more than once in some microbatches, see :attr:`Adapter.runs_vary`."""
    keys: int = 0
    """Numbers per row that a block sends to context-parallel ranks, see :attr:`Adapter.context_width`."""
    queries: int = 0
    """Numbers per row of a block's queries, see :attr:`Adapter.query_width`; 0: ``width``."""
    rules: tuple[tuple[MaskRule, Int64[np.ndarray, "blocks"]], ...] = ()
    """Rules by which rows of samples see each other, and the number of attentions in each block that follow them. Empty
    for items, whose rows see all of it. :class:`hetero_strategy.plan.masks.AttentionRules` applies them to samples."""
    own_units: bool = False
    """Whether its units are neither samples nor files."""
    experts: Experts | None = None
    """Sizes of its routed experts."""
    balanced: int = 0
    """Number of experts in a layer if it has a loss on their balance; 0: it has none."""

    @property
    def blocks(self) -> int:
        return len(self.per_row)

    @property
    def active(self) -> int:
        """Return the parameters through which a row passes: of the experts, those that it visits."""
        apart = 0.0 if (e := self.experts) is None else float(e.per_row.sum()) / 2 - int(e.stored.sum())
        return int(self.held(0, self.blocks)[0] + apart)

    @property
    def most_stages(self) -> int:
        """Return the most stages into which the module can be cut."""
        return self.blocks - self.first_blocks + 1 if self.has_blocks and self.cuttable else 1

    def row_sharding(self, layout: ModuleLayout) -> RowSharding:
        """Return the split of an instance's rows over its ranks in a layout."""
        rows = self.row_shardings[layout.tp]
        return sharding(layout.cp, rows.parts) if layout.cp > 1 and self.samplewise else rows

    def held(self, first: int, last: int) -> tuple[int, int]:
        """Return the parameters of a stage of blocks ``first`` to ``last - 1``, and those that train."""
        twice = self.counted_twice(first, last).sum(axis=(0, 2))
        whole, trained = (int(n[first:last].sum()) for n in (self.parameters, self.trained))
        return whole - int(twice.sum()), trained - int(twice[1])

    def divided_experts(self, first: int, last: int, ep: int) -> tuple[int, int]:
        """Return the parts of :meth:`held` that experts have and that ``ep`` divides."""
        return (0, 0) if self.experts is None or ep == 1 else self.experts.held(first, last)

    def counted_twice(self, first: int, last: int) -> Int64[np.ndarray, "units=2 trains=2 divided=2"]:
        """Return the part of :attr:`stored` that is one parameter in a stage with both ends."""
        return self.twice * (first == 0 and last == self.blocks)

    @property
    def of_block(self) -> Float64[np.ndarray, "kinds=4"]:
        """Return the numbers per row that a block without recompute keeps, by the kinds of :data:`KEPT`."""
        return self.kept if self.kept.any() else np.array(KEPT) * self.width


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model on paper: the sizes of its modules, and the edges between them."""

    modules: Mapping[str, ModuleSpec]
    """Specs of the modules, in topological order."""
    edges: tuple[tuple[str, str], ...]
    language_models: tuple[str, ...] | None = None
    """Modules whose units are whole samples, in the model's order: the first one decides which samples share a
    microbatch. None: in the order of ``modules``."""

    def fed_by_trainable(self) -> dict[str, bool]:
        """Return whether gradients have to reach each module's input rows, because something upstream trains."""
        return fed_by_trainable({name: bool(m.trained.any()) for name, m in self.modules.items()}, self.edges)

    def width(self, source: str, target: str) -> int:
        """Return the numbers in a row between a stage of one module and a stage of the same or of another module."""
        module = self.modules[source]
        return module.width if source == target else module.edge_width

    @property
    def samplewise(self) -> tuple[str, ...]:
        """Return the names of the modules whose units are whole samples."""
        ordered = self.modules if self.language_models is None else self.language_models
        return tuple(name for name in ordered if self.modules[name].samplewise)

    def item_sources(self, module: str) -> tuple[str, ...]:
        """Return the modules with files and an edge to a module of samples: their items are in its sequences."""
        return tuple(s for s, target in self.edges if target == module and not self.modules[s].own_units)

    @property
    def others(self) -> frozenset[str]:
        """Return the names of the other modules: encoders and generators, whose units are items."""
        return frozenset(self.modules) - {*self.samplewise}


@dataclass(frozen=True)
class LayerCost:
    """The times of one layer for one microbatch, in seconds or any other unit.

    Args:
        trains: whether the layer has a trainable parameter.
        recomputed: share of the forward that its backward runs again because activations are not kept.
        weight: time of the gradient for its weights; None: the same as the forward.
    """

    forward: float
    trains: bool
    recomputed: float = 0.0
    weight: float | None = None


@dataclass(frozen=True, eq=False)
class Passes:
    """The times of several layers, or of several stages, in order."""

    forward: Float64[np.ndarray, "layers"]
    input: Float64[np.ndarray, "layers"]
    """Times of the input gradient, 0 if none is needed. They include a recomputed forward; without them ``weight``
    does."""
    weight: Float64[np.ndarray, "layers"]
    """Times of the weight gradient, 0 if the layer is frozen."""

    @property
    def backward(self) -> Float64[np.ndarray, "layers"]:
        """Return the times of both gradients."""
        return self.input + self.weight

    @property
    def total(self) -> Float64[np.ndarray, "layers"]:
        """Return the times of forward and backward, during which a microbatch occupies a stage."""
        return self.forward + self.backward


def costs(layers: Sequence[LayerCost], upstream_trains: bool) -> Passes:
    """Compute the times of a chain of layers, such as one module.

    A frozen layer with nothing trainable upstream has no backward; with something trainable upstream it has only the
    input gradient. A trainable layer has the weight gradient, and the input gradient only if something upstream trains.
    Recompute adds a forward where there is a backward.

    The cases, with 1 x forward for each gradient, are Cornstarch's (arXiv:2503.11367, section 4.2). The paper takes 2 x
    forward for every trainable layer, which is one too many if nothing upstream trains.

    Args:
        upstream_trains: whether something that feeds the first layer has a trainable parameter.
    """
    rows = []
    for layer in layers:
        again = layer.forward * layer.recomputed
        gradient = weight = 0.0
        if layer.trains:
            weight = layer.forward if layer.weight is None else layer.weight
        if upstream_trains:
            gradient = layer.forward + again
        elif layer.trains:
            weight += again
        rows.append((layer.forward, gradient, weight))
        upstream_trains = upstream_trains or layer.trains
    return Passes(*np.array(rows, dtype=np.float64).reshape(len(rows), 3).T)


def fed_by_trainable(trainable: Mapping[str, bool], edges: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """Return for each module whether any module before it, along edges (source, target), has a trainable parameter."""
    edges = list(edges)
    fed = dict.fromkeys(trainable, False)
    for _ in fed:  # a path has fewer edges than there are modules
        for source, target in edges:
            fed[target] = fed[target] or fed[source] or trainable[source]
    return fed
