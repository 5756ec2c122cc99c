"""The step plan: for one global batch, who computes what in which microbatch, hence every shape and every route.

Pure and deterministic: a function of the batch's metadata and the layouts, the same on every rank. Nothing here looks
at a payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetero_strategy import ragged


@dataclass(frozen=True)
class StepItems:
    """Items of one encoder or generator in a global batch, by sample, then order within it; all int64 ``[n]``."""

    sample: np.ndarray
    """Number of the item's sample in the step, ``0 .. S - 1``."""
    edge_rows: np.ndarray
    """Rows that cross the module's edges: what an encoder makes of the item, what a generator is given for it."""
    start: np.ndarray
    """First of these rows inside its sample's token sequence."""
    inner_rows: np.ndarray
    """Rows of the item inside the module: what its transformer sees."""
    targets: np.ndarray | None = None
    """Elements of the item that its loss counts (a generator's pixels); None: the module has no loss."""


@dataclass(frozen=True)
class StepMetadata:
    """What is known of a global batch before any payload is read."""

    epoch: int
    step: int
    """Step within the epoch."""
    samples: np.ndarray
    """Data set indices, int64 ``[S]``."""
    tokens: np.ndarray
    """Length of each sample's token sequence, encoder rows included, int64 ``[S]``."""
    labels: np.ndarray
    """Loss tokens of each sample, int64 ``[S]``."""
    items: Mapping[str, StepItems]
    """By encoder or generator name."""


@dataclass(frozen=True)
class Assignment:
    """What every instance of one module computes in one of the module's microbatches."""

    units: np.ndarray
    """int64 ``[n]``: item numbers in :attr:`StepMetadata.items`, or sample numbers for a language model."""
    edge_rows: np.ndarray
    """int64 ``[n]``: rows of each unit that cross edges; for a language model its tokens."""
    inner_rows: np.ndarray
    """int64 ``[n]``: rows of each unit inside the module; for a language model its tokens."""
    offsets: np.ndarray
    """int64 ``[instances + 1]``: instance ``i`` computes ``units[offsets[i]:offsets[i + 1]]``, in that order."""
    padding: np.ndarray
    """int64 ``[instances]``: alignment rows appended where the module shards its rows over tensor-parallel ranks."""
    first: int
    last: int
    """First and last microbatch of the step (of samples) that the units belong to."""

    @property
    def idle(self) -> bool:
        """No instance has a unit: the whole module skips the microbatch."""
        return len(self.units) == 0

    def of(self, instance: int) -> np.ndarray:
        """Units of one instance."""
        return self.units[self.offsets[instance] : self.offsets[instance + 1]]

    def edge_rows_of(self, instance: int) -> np.ndarray:
        """Rows of each unit of one instance."""
        return self.edge_rows[self.offsets[instance] : self.offsets[instance + 1]]

    def inner_rows_of(self, instance: int) -> np.ndarray:
        """Rows inside the module of each unit of one instance, alignment rows as a unit of their own."""
        inner_rows = self.inner_rows[self.offsets[instance] : self.offsets[instance + 1]]
        padding = self.padding[instance]
        return np.append(inner_rows, padding) if padding else inner_rows

    def instance(self) -> np.ndarray:
        """Instance of each unit, int64 ``[n]``."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def starts(self, *, inner: bool = False) -> np.ndarray:
        """First row of each unit among its instance's rows, int64 ``[n]``."""
        ahead = ragged.offsets(self.inner_rows if inner else self.edge_rows)
        return ahead[:-1] - np.repeat(ahead[self.offsets[:-1]], np.diff(self.offsets))

    def totals(self, *, inner: bool = False) -> np.ndarray:
        """Rows of each instance, alignment included, int64 ``[instances]``."""
        return np.diff(ragged.offsets(self.inner_rows if inner else self.edge_rows)[self.offsets]) + self.padding


@dataclass(frozen=True)
class ModuleLoad:
    """What a step costs each instance of one module, in units of the module's cost; float64 ``[microbatches,
    instances]``.
    """

    before: np.ndarray
    """As sampled: samples dealt in order to microbatches and instances, items with their samples."""
    after: np.ndarray
    """As planned."""

    @staticmethod
    def imbalance(loads: np.ndarray) -> float:
        """Time of the slowest instance of every microbatch over the mean of all instances; 1 where nobody waits."""
        mean = float(loads.mean(axis=1).sum())
        return float(loads.max(axis=1).sum()) / mean if mean else 1.0


@dataclass(frozen=True)
class StepPlan:
    """Who computes what for one global batch."""

    metadata: StepMetadata
    microbatches: int
    """Of the step: groups of samples, and what language models compute at a time."""
    assignments: Mapping[str, tuple[Assignment, ...]]
    """By module: its microbatches. An item's module may have fewer or more of them than the step."""
    loads: Mapping[str, ModuleLoad] = field(default_factory=dict)
    """By module, where its cost is known; schedules are made with them."""

    @property
    def loss_tokens(self) -> int:
        """N of law 1: loss tokens of the global batch over all microbatches and instances."""
        return int(self.metadata.labels.sum())

    def normalizer(self, module: str) -> int:
        """N of one module's loss, at least 1: loss tokens, or a generator's target elements."""
        items = self.metadata.items.get(module)
        if items is None:
            return max(1, self.loss_tokens)
        return max(1, 0 if items.targets is None else int(items.targets.sum()))

    @property
    def samples(self) -> np.ndarray:
        """Data set indices of the global batch, int64 ``[S]``."""
        return self.metadata.samples

    @cached_property
    def digest(self) -> int:
        """64 bits of who computes what, of every size and of what it costs: equal plans have equal ones."""
        found = hashlib.blake2b(self.samples.tobytes(), digest_size=8)
        for module in sorted(self.assignments):
            for one in self.assignments[module]:
                for part in (one.units, one.offsets, one.edge_rows, one.inner_rows, one.padding):
                    found.update(part.tobytes())
        for module in sorted(self.loads):
            found.update(self.loads[module].after.tobytes())
        found.update(self.metadata.labels.tobytes())
        return int.from_bytes(found.digest())

    def active(self, module: str) -> list[int]:
        """The module's microbatches in which any instance has a unit."""
        return [i for i, assignment in enumerate(self.assignments[module]) if not assignment.idle]

    def feeds(self, source: str, target: str) -> list[tuple[int, int]]:
        """(source microbatch, target microbatch) pairs between which rows flow, ascending."""
        of_items, of_samples = self._sides(source, target)
        items = self.metadata.items[of_items]
        item_microbatch = self._microbatch_of(of_items, len(items.sample))
        sample_microbatch = self._microbatch_of(of_samples, len(self.samples))[items.sample]
        pair = [item_microbatch, sample_microbatch] if source == of_items else [sample_microbatch, item_microbatch]
        targets = len(self.assignments[target])
        found = np.flatnonzero(np.bincount(pair[0] * targets + pair[1]))
        return [(int(p), int(t)) for p, t in zip(*np.divmod(found, targets), strict=True)]

    def _sides(self, source: str, target: str) -> tuple[str, str]:
        """(module whose units are items, language model) of an edge."""
        return (source, target) if source in self.metadata.items else (target, source)

    def _microbatch_of(self, module: str, units: int) -> np.ndarray:
        found = np.zeros(units, dtype=np.int64)
        for number, assignment in enumerate(self.assignments[module]):
            found[assignment.units] = number
        return found


@dataclass(frozen=True)
class EdgeBlocks:
    """Runs of rows that cross one edge between one microbatch of each side; int64 ``[n]``.

    Ordered by (target instance, target start).
    """

    source_instance: np.ndarray
    source_start: np.ndarray
    """First row of the run among the rows of its source instance."""
    target_instance: np.ndarray
    target_start: np.ndarray
    """First row of the run among the rows of its target instance."""
    rows: np.ndarray


def edge_blocks(plan: StepPlan, source: str, source_microbatch: int, target: str, target_microbatch: int) -> EdgeBlocks:
    """Which rows of a microbatch of ``source`` fill which rows of a microbatch of ``target``."""
    produced = plan.assignments[source][source_microbatch]
    consumed = plan.assignments[target][target_microbatch]
    if source in plan.metadata.items:
        items = plan.metadata.items[source]
        of_items, of_samples = produced, consumed
    else:
        items = plan.metadata.items[target]
        of_items, of_samples = consumed, produced
    # Items lie by sample, so those of the language model's samples, in its order, are runs of them: nothing is sorted.
    bounds = ragged.offsets(np.bincount(items.sample, minlength=len(plan.samples)))
    counts = np.diff(bounds)[of_samples.units]
    item = ragged.expand(bounds[of_samples.units], counts)
    place = np.full(len(items.sample), -1, dtype=np.int64)  # item -> its unit in the assignment of its module
    place[of_items.units] = np.arange(len(of_items.units))
    sample_unit, unit = np.repeat(np.arange(len(counts)), counts), place[item]
    if len(of_items.units) < len(items.sample):
        mine = np.flatnonzero(unit >= 0)
        sample_unit, unit, item = sample_unit[mine], unit[mine], item[mine]
    if source not in plan.metadata.items:  # by the item's module
        place[:] = -1
        place[unit] = np.arange(len(unit))
        order = place[place >= 0]
        sample_unit, unit, item = sample_unit[order], unit[order], item[order]
    in_sequence = (
        of_samples.instance()[sample_unit],
        of_samples.starts()[sample_unit] + items.start[item],
    )
    of_item = (of_items.instance()[unit], of_items.starts(inner=source not in plan.metadata.items)[unit])
    (source_instance, source_start), (target_instance, target_start) = (
        (of_item, in_sequence) if source in plan.metadata.items else (in_sequence, of_item)
    )
    return EdgeBlocks(source_instance, source_start, target_instance, target_start, rows=of_items.edge_rows[unit])


def slots(blocks: EdgeBlocks, instance: int) -> np.ndarray:
    """Rows of a target instance that the edge fills, ascending, int64 ``[k]``."""
    mine = blocks.target_instance == instance
    return ragged.expand(blocks.target_start[mine], blocks.rows[mine])
