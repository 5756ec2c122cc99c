"""The step plan of one global batch: units of every instance and microbatch, hence every shape and every route.

A plan follows from the batch's metadata and the layouts alone, so it is equal on every rank. No payload is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.layout.row_sharding import RowOrder


@dataclass(frozen=True)
class UnitRuns:
    """The runs of rows that cross one edge in a global batch."""

    source: Int64[np.ndarray, "runs"]
    """Unit of the source module: a sample, or an item in :attr:`StepMetadata.items`."""
    source_start: Int64[np.ndarray, "runs"]
    """First row of the run among the unit's rows that cross edges."""
    target: Int64[np.ndarray, "runs"]
    """Unit of the target module."""
    target_start: Int64[np.ndarray, "runs"]
    """First row of the run among the unit's rows inside the module."""
    rows: Int64[np.ndarray, "runs"]


@dataclass(frozen=True)
class StepItems:
    """The items of one module that is not samplewise, by sample, then by position in it."""

    sample: Int64[np.ndarray, "items"]
    """The item's sample, counted in the step from 0."""
    edge_rows: Int64[np.ndarray, "items"]
    """Rows that cross the module's edges: rows that an encoder makes of the item or a generator receives for it. A kind
    with its own units defines them."""
    start: Int64[np.ndarray, "items"]
    """Position of the first of these rows in its sample's token sequence."""
    inner_rows: Int64[np.ndarray, "items"]
    """Rows of the item that the module's transformer sees."""
    targets: Int64[np.ndarray, "items"] | None = None
    """Elements of the item that the module's loss counts (a generator's pixels); None: it has no loss."""
    given: Mapping[str, UnitRuns] | None = None
    """Source module -> its rows for the items. None: between this and a samplewise module, an item's edge rows are its
    sample's rows from ``start`` on."""
    placed: UnitRuns | None = None
    """Runs of the items' edge rows in their samples, if tokens stand between some of them; sources are the items."""
    field: str = ""
    """Manifest field of the items' files, such as "image"; empty: unknown."""

    @property
    def in_samples(self) -> UnitRuns:
        """Return the runs of the items' edge rows in their samples; sources are the items."""
        if self.placed is not None:
            return self.placed
        numbers = np.arange(len(self.sample))
        return UnitRuns(numbers, np.zeros_like(numbers), self.sample, self.start, self.edge_rows)


@dataclass(frozen=True)
class StepMetadata:
    """The facts of a global batch that are known before any payload is read."""

    epoch: int
    step: int
    """Number of the step in the epoch."""
    samples: Int64[np.ndarray, "samples"]
    """Data set index of each sample."""
    tokens: Int64[np.ndarray, "samples"]
    """Length of each sample's token sequence, encoder rows included."""
    labels: Int64[np.ndarray, "samples"]
    """Loss tokens of each sample."""
    items: Mapping[str, StepItems]
    """Module that is not samplewise -> its items."""
    prompts: Int64[np.ndarray, "samples"] | None = None
    """Rows before the first predicted token of each sample, all rows if there is none; None: unknown."""
    skipped: Bool[np.ndarray, "samples"] | None = None
    """Samples that are computed and count for nothing, because their files could not be read; None: there are none."""

    def sample_of(self, module: str) -> Int64[np.ndarray, "units"]:
        """Return the sample of each of the module's units."""
        return self.items[module].sample if module in self.items else np.arange(len(self.samples))

    def runs(self, source: str, target: str) -> UnitRuns:
        """Return the rows of each unit of ``source`` that cross the edge to ``target``."""
        into = self.items.get(target)
        if into is not None and into.given is not None:
            return into.given[source]
        if source in self.items:
            return self.items[source].in_samples
        items = self.items[target]
        numbers = np.arange(len(items.sample))
        return UnitRuns(items.sample, items.start, numbers, np.zeros_like(numbers), items.edge_rows)


@dataclass(frozen=True)
class Assignment:
    """The units that every instance of one module computes in one of the module's microbatches."""

    units: Int64[np.ndarray, "units"]
    """Item numbers in :attr:`StepMetadata.items`, or sample numbers for a language model."""
    edge_rows: Int64[np.ndarray, "units"]
    """Rows of each unit that cross edges, for a language model its tokens."""
    inner_rows: Int64[np.ndarray, "units"]
    """Rows of each unit inside the module, for a language model its tokens."""
    offsets: Int64[np.ndarray, "bounds"]
    """Instance ``i`` computes ``units[offsets[i]:offsets[i + 1]]``, in that order."""
    padding: Int64[np.ndarray, "instances=bounds-1"]
    """Alignment rows appended if tensor- or context-parallel ranks share an instance's rows."""
    first: int
    last: int
    """First and last of the step's microbatches that the units' samples are in."""
    order: RowOrder | None = None
    """Order of each instance's rows on its context-parallel ranks; None: as they are."""
    squares: Float64[np.ndarray, "units"] | None = None
    """Squares of each unit's mask, see :class:`~hetero_strategy.plan.masks.AttentionRules`; None: of its inner rows."""

    @property
    def idle(self) -> bool:
        """Tell whether no instance has a unit, so that the whole module skips the microbatch."""
        return len(self.units) == 0

    def of(self, instance: int) -> Int64[np.ndarray, "units"]:
        """Return the units of one instance, in the order in which it computes them."""
        return self.units[self.offsets[instance] : self.offsets[instance + 1]]

    def edge_rows_of(self, instance: int) -> Int64[np.ndarray, "units"]:
        """Return the rows of each unit of one instance that cross edges."""
        return self.edge_rows[self.offsets[instance] : self.offsets[instance + 1]]

    def inner_rows_of(self, instance: int) -> Int64[np.ndarray, "units"]:
        """Return the rows inside the module of each unit of one instance; alignment rows count as a last unit."""
        inner_rows = self.inner_rows[self.offsets[instance] : self.offsets[instance + 1]]
        padding = self.padding[instance]
        return np.append(inner_rows, padding) if padding else inner_rows

    def squares_of(self, instance: int) -> Float64[np.ndarray, "units"]:
        """Return the squares of each unit's mask of one instance; alignment rows count as a last unit, causal."""
        squares = self.inner_rows_of(instance).astype(np.float64) ** 2
        if self.squares is not None:
            of_masks = self.squares[self.offsets[instance] : self.offsets[instance + 1]]
            squares[: len(of_masks)] = of_masks
        return squares

    def dealt(self, instance: int, ranks: int) -> Int64[np.ndarray, "ranks rows"]:
        """Return the rows of one instance that each of its context-parallel ranks has."""
        total = int(self.totals(inner=True)[instance])
        rows = np.arange(total) if self.order is None else self.order.rows(instance, total)
        return rows.reshape(ranks, -1)

    def instance(self) -> Int64[np.ndarray, "units"]:
        """Return the instance of each unit."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def totals(self, *, inner: bool = False) -> Int64[np.ndarray, "instances"]:
        """Sum the rows of each instance, alignment included."""
        return np.diff(ragged.offsets(self.inner_rows if inner else self.edge_rows)[self.offsets]) + self.padding


@dataclass(frozen=True)
class ModuleLoad:
    """The costs of a step for the instances of one module, in the unit of the module's cost."""

    before: Float64[np.ndarray, "step_microbatches instances"]
    """Costs as sampled: samples dealt in turn to microbatches and instances, items with their samples."""
    after: Float64[np.ndarray, "microbatches instances"]
    """Costs as planned, in the module's microbatches."""

    @staticmethod
    def imbalance(loads: Float64[np.ndarray, "microbatches instances"]) -> float:
        """Divide the time of every microbatch's slowest instance by the mean of all instances; 1: no instance waits."""
        mean = float(loads.mean(axis=1).sum())
        return float(loads.max(axis=1).sum()) / mean if mean else 1.0


@dataclass(frozen=True)
class UnitPlaces:
    """The place where each unit of one module is computed."""

    microbatch: Int64[np.ndarray, "units"]
    """Microbatch of the module in which the unit is computed."""
    instance: Int64[np.ndarray, "units"]
    edge_start: Int64[np.ndarray, "units"]
    """First row of the unit among its instance's rows that cross edges."""
    inner_start: Int64[np.ndarray, "units"]
    """First row of the unit among its instance's rows inside the module."""


@dataclass(frozen=True)
class StepPlan:
    """A plan of the units that every instance computes for one global batch."""

    metadata: StepMetadata
    microbatches: int
    """Number of groups of samples, each of which a language model computes at a time."""
    assignments: Mapping[str, tuple[Assignment, ...]]
    """Module -> its microbatches. A module of items may have fewer or more microbatches than the step."""
    loads: Mapping[str, ModuleLoad] = field(default_factory=dict)
    """Module -> costs of the step, if known; schedules are made with them."""

    @property
    def loss_tokens(self) -> int:
        """Sum the loss tokens of the global batch, over all microbatches and instances."""
        return int(self.metadata.labels.sum())

    def normalizer(self, module: str) -> int:
        """Return the divisor of one module's loss: its loss tokens or a generator's target elements, at least 1."""
        return max(1, self.counted(module))

    def counted(self, module: str) -> int:
        """Count the elements that one module's loss sums over: loss tokens or a generator's target elements."""
        items = self.metadata.items.get(module)
        if items is None:
            return self.loss_tokens
        return 0 if items.targets is None else int(items.targets.sum())

    @property
    def samples(self) -> Int64[np.ndarray, "samples"]:
        """Return the data set index of each sample."""
        return self.metadata.samples

    @cached_property
    def digest(self) -> int:
        """Hash the units of every instance, every size, order, mask and cost, 64 bits; equal plans have equal digests.

        Masks follow from the places of items, and from prompts; their pairs tell rules apart.
        """
        metadata, digest = self.metadata, hashlib.blake2b(self.samples.tobytes(), digest_size=8)
        for module in sorted(self.assignments):
            for a in self.assignments[module]:
                dealt = () if a.order is None else (a.order.start, a.order.place)
                seen = () if a.squares is None else (a.squares,)
                for part in (a.units, a.offsets, a.edge_rows, a.inner_rows, a.padding, *dealt, *seen):
                    digest.update(part.tobytes())
        for module in sorted(self.loads):
            digest.update(self.loads[module].after.tobytes())
        starts = [metadata.items[module].start for module in sorted(metadata.items)]
        for part in (metadata.labels, *starts, *(() if metadata.prompts is None else (metadata.prompts,))):
            digest.update(part.tobytes())
        return int.from_bytes(digest.digest())

    def active(self, module: str) -> list[int]:
        """List the numbers of the module's microbatches in which any instance has a unit."""
        return [i for i, assignment in enumerate(self.assignments[module]) if not assignment.idle]

    def alike(self, module: str) -> bool:
        """Tell whether the module has several units in the step, all with the same number of rows inside it."""
        rows = np.concatenate([assignment.inner_rows for assignment in self.assignments[module]])
        return len(rows) > 1 and bool((rows == rows[0]).all())

    def feeds(self, source: str, target: str) -> list[tuple[int, int]]:
        """List the pairs of a source and a target microbatch between which rows flow, ascending."""
        runs, targets = self.metadata.runs(source, target), len(self.assignments[target])
        from_ = self.places(source).microbatch[runs.source]
        numbers = np.flatnonzero(np.bincount(from_ * targets + self.places(target).microbatch[runs.target]))
        return [(int(p), int(t)) for p, t in zip(*np.divmod(numbers, targets), strict=True)]

    def places(self, module: str) -> UnitPlaces:
        """Return the place of each unit of a module; computed once per plan."""
        if module not in self._places:
            self._places[module] = self._placed(module)
        return self._places[module]

    def _placed(self, module: str) -> UnitPlaces:
        parts = self.assignments[module]
        sizes = np.array([np.diff(a.offsets) for a in parts], dtype=np.int64)  # [microbatches, instances]
        units = np.concatenate([a.units for a in parts])
        number = np.repeat(np.arange(sizes.size), sizes.ravel())
        columns = UnitPlaces(*(np.zeros(len(self.metadata.sample_of(module)), dtype=np.int64) for _ in range(4)))
        columns.microbatch[units], columns.instance[units] = np.divmod(number, sizes.shape[1])
        first = ragged.starts(sizes.ravel())[number]
        for starts, rows in ((columns.edge_start, "edge_rows"), (columns.inner_start, "inner_rows")):
            ahead = ragged.starts(np.concatenate([getattr(a, rows) for a in parts]))
            starts[units] = ahead - ahead[first]
        return columns

    @cached_property
    def _places(self) -> dict[str, UnitPlaces]:
        return {}

    @cached_property
    def _runs(self) -> dict[tuple[str, str], EdgeRuns]:
        """Keep the runs of each edge for which :func:`edge_blocks` was called."""
        return {}

    def __getstate__(self) -> dict[str, object]:
        """Leave out fields that follow from the others."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_places", "_runs")}


@dataclass(frozen=True)
class EdgeBlocks:
    """The runs of rows that cross one edge; between two microbatches, sorted by (target instance, target start)."""

    source_instance: Int64[np.ndarray, "runs"]
    source_start: Int64[np.ndarray, "runs"]
    """First row of the run among the rows of its source instance."""
    target_instance: Int64[np.ndarray, "runs"]
    target_start: Int64[np.ndarray, "runs"]
    """First row of the run among the rows of its target instance."""
    rows: Int64[np.ndarray, "runs"]


@dataclass(frozen=True)
class EdgeRuns:
    """The runs of rows that cross one edge in a step, from and to some instances or all.

    Args:
        pairs: number of each (source microbatch, target microbatch) pair with runs, ascending by target, then source.
        bounds: the runs of pair ``k`` are ``blocks[bounds[k]:bounds[k + 1]]``.
        blocks: runs of all pairs.
    """

    pairs: dict[tuple[int, int], int]
    bounds: Int64[np.ndarray, "bounds"]
    blocks: EdgeBlocks

    def between(self, source_microbatch: int, target_microbatch: int) -> EdgeBlocks:
        """Return the runs between one microbatch of each side."""
        k = self.pairs.get((source_microbatch, target_microbatch))
        part = slice(0, 0) if k is None else slice(int(self.bounds[k]), int(self.bounds[k + 1]))
        return EdgeBlocks(*(getattr(self.blocks, column.name)[part] for column in fields(EdgeBlocks)))


Members = tuple[Int64[np.ndarray, "some"] | None, Int64[np.ndarray, "others"] | None]
"""Some instances of a source and of a target, ascending; None: all."""


def crossing(
    plan: StepPlan,
    source: str,
    target: str,
    near: tuple[int, int] | None = None,
    members: Members = (None, None),
) -> tuple[EdgeBlocks, Int64[np.ndarray, "runs"], Int64[np.ndarray, "runs"]]:
    """Find which rows of ``source`` fill which rows of ``target`` in a step.

    Args:
        near: only runs that leave this instance of the source or enter this instance of the target; -1 for none.
        members: only runs between these instances, which are numbered by their places here.

    Returns:
        Runs in the order of the metadata, and the microbatch of each run in the source and in the target.
    """
    runs, there, here = plan.metadata.runs(source, target), plan.places(source), plan.places(target)
    source_instance, from_some = places_among(there.instance[runs.source], members[0])
    target_instance, to_some = places_among(here.instance[runs.target], members[1])
    kept = from_some & to_some
    if near is not None:
        kept &= (source_instance == near[0]) | (target_instance == near[1])
    if not kept.all():
        runs = UnitRuns(*(getattr(runs, column.name)[kept] for column in fields(UnitRuns)))
        source_instance, target_instance = source_instance[kept], target_instance[kept]
    blocks = EdgeBlocks(
        source_instance,
        there.edge_start[runs.source] + runs.source_start,
        target_instance,
        here.inner_start[runs.target] + runs.target_start,
        runs.rows,
    )
    return blocks, there.microbatch[runs.source], here.microbatch[runs.target]


def places_among(instance: np.ndarray, some: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Find the place of each instance among some of them (None: all), and whether it is one of them."""
    if some is None:
        return instance, np.ones(len(instance), dtype=bool)
    place = np.minimum(np.searchsorted(some, instance), len(some) - 1)
    return place, some[place] == instance


def edge_runs(
    plan: StepPlan, source: str, target: str, near: tuple[int, int] | None = None, members: Members = (None, None)
) -> EdgeRuns:
    """Sort the runs of :func:`crossing` by microbatches."""
    blocks, p, t = crossing(plan, source, target, near, members)
    order = np.lexsort((blocks.target_start, blocks.target_instance, p, t))
    p, t = p[order], t[order]
    first = np.flatnonzero((np.diff(p, prepend=-1) != 0) | (np.diff(t, prepend=-1) != 0))
    pairs = {pair: k for k, pair in enumerate(zip(p[first].tolist(), t[first].tolist(), strict=True))}
    blocks = EdgeBlocks(*(getattr(blocks, column.name)[order] for column in fields(EdgeBlocks)))
    return EdgeRuns(pairs, np.append(first, len(order)), blocks)


def edge_blocks(plan: StepPlan, source: str, source_microbatch: int, target: str, target_microbatch: int) -> EdgeBlocks:
    """Find which rows of a microbatch of ``source`` fill which rows of a microbatch of ``target``.

    For example, sample 0 has the item 0 (2 rows from position 1 on) and sample 1 the item 1 (3 rows from position 0).
    An encoder computes item 1, then item 0, on its instance 0; a language model computes sample 0 on instance 0 and
    sample 1 on instance 1. The blocks then are, by target instance::

        source_instance 0 0    source_start 3 0    target_instance 0 1    target_start 1 0    rows 2 3
    """
    if (source, target) not in plan._runs:
        plan._runs[source, target] = edge_runs(plan, source, target)
    return plan._runs[source, target].between(source_microbatch, target_microbatch)


def slots(blocks: EdgeBlocks, instance: int) -> Int64[np.ndarray, "slots"]:
    """List the rows of a target instance that the edge fills, ascending."""
    local = blocks.target_instance == instance
    return ragged.expand(blocks.target_start[local], blocks.rows[local])
