"""The step plan: for one global batch, who computes what in which microbatch, hence every shape and every route.

Pure and deterministic: a function of the batch's metadata and the layouts, the same on every rank. Nothing here looks
at a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

Assigner = Callable[[str, np.ndarray, int], np.ndarray]
"""(module, rows of each unit int64 [n], instances) -> instance of each unit, int64 [n]: where balancing plugs in."""


@dataclass(frozen=True)
class StepItems:
    """Items of one encoder in a global batch, in (sample, order within the sample) order; all int64 ``[n]``."""

    sample: np.ndarray
    """Number of the item's sample in the step, ``0 .. S - 1``."""
    rows: np.ndarray
    """Rows the encoder makes of the item."""
    start: np.ndarray
    """First row of the item inside its sample's token sequence."""


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
    """By encoder name."""


@dataclass(frozen=True)
class Assignment:
    """What every instance of one module computes in one microbatch."""

    units: np.ndarray
    """int64 ``[n]``: item numbers in :attr:`StepMetadata.items` for an encoder, sample numbers for a consumer."""
    rows: np.ndarray
    """int64 ``[n]``: rows of each unit in this module."""
    offsets: np.ndarray
    """int64 ``[instances + 1]``: instance ``i`` computes ``units[offsets[i]:offsets[i + 1]]``, in that order."""
    padding: np.ndarray
    """int64 ``[instances]``: alignment rows appended where the module shards its rows over tensor-parallel ranks."""

    @property
    def idle(self) -> bool:
        """No instance has a unit: the whole module skips the microbatch."""
        return len(self.units) == 0

    def of(self, instance: int) -> np.ndarray:
        """Units of one instance."""
        return self.units[self.offsets[instance] : self.offsets[instance + 1]]

    def rows_of(self, instance: int) -> np.ndarray:
        """Rows of each unit of one instance."""
        return self.rows[self.offsets[instance] : self.offsets[instance + 1]]

    def instance(self) -> np.ndarray:
        """Instance of each unit, int64 ``[n]``."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def starts(self) -> np.ndarray:
        """First row of each unit among its instance's rows, int64 ``[n]``."""
        before = np.concatenate([[0], np.cumsum(self.rows)])
        return before[:-1] - np.repeat(before[self.offsets[:-1]], np.diff(self.offsets))

    def totals(self) -> np.ndarray:
        """Rows of each instance, alignment included, int64 ``[instances]``."""
        before = np.concatenate([[0], np.cumsum(self.rows)])
        return np.diff(before[self.offsets]) + self.padding


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of all modules."""

    assignments: Mapping[str, Assignment]


@dataclass(frozen=True)
class StepPlan:
    """Who computes what for one global batch."""

    metadata: StepMetadata
    microbatches: tuple[Microbatch, ...]

    @property
    def loss_tokens(self) -> int:
        """N of law 1: loss tokens of the global batch over all microbatches and instances."""
        return int(self.metadata.labels.sum())

    @property
    def samples(self) -> np.ndarray:
        """Data set indices of the global batch, int64 ``[S]``."""
        return self.metadata.samples

    def active(self, module: str) -> list[int]:
        """Microbatches in which any instance of the module has a unit."""
        return [i for i, mb in enumerate(self.microbatches) if not mb.assignments[module].idle]


@dataclass(frozen=True)
class EdgeBlocks:
    """Runs of rows that cross one edge in one microbatch, ordered by (target instance, target start); int64 ``[n]``."""

    source_instance: np.ndarray
    source_start: np.ndarray
    """First row of the run among the rows of its source instance."""
    target_instance: np.ndarray
    target_start: np.ndarray
    """First row of the run among the rows of its target instance."""
    rows: np.ndarray


def round_robin(module: str, rows: np.ndarray, instances: int) -> np.ndarray:
    """Unit ``k`` to instance ``k mod instances``, whatever it costs."""
    return np.arange(len(rows)) % instances


def plan_step(
    metadata: StepMetadata,
    instances: Mapping[str, int],
    consumers: Iterable[str],
    *,
    microbatches: int = 1,
    row_multiple: Mapping[str, int] | None = None,
    assign: Assigner = round_robin,
) -> StepPlan:
    """Assign samples to microbatches, then the units of each microbatch to the instances of every module.

    Args:
        metadata: of the global batch.
        instances: data-parallel instances of every module.
        consumers: modules whose units are whole samples (the LLM); all others are encoders whose units are items.
        microbatches: number of microbatches; sample ``s`` goes to microbatch ``s mod microbatches``.
        row_multiple: modules whose rows per instance must be a positive multiple of this (tensor-parallel degree where
            rows are sharded over it); missing rows are added as :attr:`Assignment.padding`.
        assign: chooses the instance of every unit.
    """
    multiple = row_multiple or {}
    consumers = tuple(consumers)
    sample_microbatch = np.arange(len(metadata.samples)) % microbatches
    made = []
    for number in range(microbatches):
        assignments = {}
        for module, count in instances.items():
            if module in consumers:
                units = np.flatnonzero(sample_microbatch == number)
                rows = metadata.tokens[units]
            else:
                items = metadata.items[module]
                units = np.flatnonzero(sample_microbatch[items.sample] == number)
                rows = items.rows[units]
            assignments[module] = _assignment(module, units, rows, count, multiple.get(module, 1), assign)
        made.append(Microbatch(assignments))
    return StepPlan(metadata, tuple(made))


def edge_blocks(plan: StepPlan, microbatch: int, source: str, target: str) -> EdgeBlocks:
    """Which rows of ``source`` fill which rows of ``target`` in one microbatch."""
    assignments = plan.microbatches[microbatch].assignments
    produced, consumed = assignments[source], assignments[target]
    items = plan.metadata.items[source]
    place = np.zeros(len(plan.samples), dtype=np.int64)  # sample number -> its unit in the target's assignment
    place[consumed.units] = np.arange(len(consumed.units))
    unit = place[items.sample[produced.units]]
    target_instance = consumed.instance()[unit]
    target_start = consumed.starts()[unit] + items.start[produced.units]
    order = np.lexsort((target_start, target_instance))
    return EdgeBlocks(
        source_instance=produced.instance()[order],
        source_start=produced.starts()[order],
        target_instance=target_instance[order],
        target_start=target_start[order],
        rows=produced.rows[order],
    )


def expand(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Row numbers of runs: ``expand([5, 0], [2, 3]) == [5, 6, 0, 1, 2]``; int64 ``[sum(rows)]``."""
    total = int(rows.sum())
    before = np.cumsum(rows) - rows
    return np.arange(total, dtype=np.int64) + np.repeat(starts - before, rows)


def slots(blocks: EdgeBlocks, instance: int) -> np.ndarray:
    """Rows of a target instance that the edge fills, ascending, int64 ``[k]``."""
    mine = blocks.target_instance == instance
    return expand(blocks.target_start[mine], blocks.rows[mine])


def _assignment(
    module: str, units: np.ndarray, rows: np.ndarray, instances: int, multiple: int, assign: Assigner
) -> Assignment:
    where = np.asarray(assign(module, rows, instances), dtype=np.int64)
    order = np.argsort(where, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(where, minlength=instances))]).astype(np.int64)
    rows = rows[order].astype(np.int64)
    totals = np.diff(np.concatenate([[0], np.cumsum(rows)])[offsets])
    padding = np.zeros(instances, np.int64)
    if multiple > 1:  # at least one alignment row per rank, so that no rank works on nothing
        padding = np.maximum(-(-totals // multiple), 1) * multiple - totals
    return Assignment(units[order].astype(np.int64), rows, offsets, padding)
