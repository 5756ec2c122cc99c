"""The step plan: for one global batch, who computes what in which microbatch, hence every shape and every route.

Pure and deterministic: a function of the batch's metadata and the layouts, the same on every rank. Nothing here looks
at a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

Assigner = Callable[[str, np.ndarray, int], np.ndarray]
"""(module, rows of each unit int64 [n], instances) -> instance of each unit, int64 [n]: where balancing plugs in."""


@dataclass(frozen=True)
class StepItems:
    """Items of one encoder or generator in a global batch, by sample, then order within it; all int64 ``[n]``."""

    sample: np.ndarray
    """Number of the item's sample in the step, ``0 .. S - 1``."""
    rows: np.ndarray
    """Rows that cross the module's edges: what an encoder makes of the item, what a generator is given for it."""
    start: np.ndarray
    """First of these rows inside its sample's token sequence."""
    hidden: np.ndarray
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
    """int64 ``[n]``: item numbers in :attr:`StepMetadata.items`, or sample numbers for a consumer."""
    rows: np.ndarray
    """int64 ``[n]``: rows of each unit that cross edges; for a consumer its tokens."""
    hidden: np.ndarray
    """int64 ``[n]``: rows of each unit inside the module; for a consumer its tokens."""
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

    def rows_of(self, instance: int) -> np.ndarray:
        """Rows of each unit of one instance."""
        return self.rows[self.offsets[instance] : self.offsets[instance + 1]]

    def hidden_of(self, instance: int) -> np.ndarray:
        """Rows inside the module of each unit of one instance, alignment rows as a unit of their own."""
        hidden = self.hidden[self.offsets[instance] : self.offsets[instance + 1]]
        padding = self.padding[instance]
        return np.append(hidden, padding) if padding else hidden

    def instance(self) -> np.ndarray:
        """Instance of each unit, int64 ``[n]``."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def starts(self, *, hidden: bool = False) -> np.ndarray:
        """First row of each unit among its instance's rows, int64 ``[n]``."""
        before = _before(self.hidden if hidden else self.rows)
        return before[:-1] - np.repeat(before[self.offsets[:-1]], np.diff(self.offsets))

    def totals(self, *, hidden: bool = False) -> np.ndarray:
        """Rows of each instance, alignment included, int64 ``[instances]``."""
        return np.diff(_before(self.hidden if hidden else self.rows)[self.offsets]) + self.padding


@dataclass(frozen=True)
class ModuleLoad:
    """What a step costs each instance of one module, in units of the module's cost; float64 ``[microbatches,
    instances]``.
    """

    before: np.ndarray
    """As sampled: units dealt in order to microbatches and instances."""
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
    """Of the step: groups of samples, and what consumers compute at a time."""
    assignments: Mapping[str, tuple[Assignment, ...]]
    """By module: its microbatches. An item's module may have fewer or more of them than the step."""
    loads: Mapping[str, ModuleLoad] = field(default_factory=dict)
    """By module, where its cost is known."""

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

    def active(self, module: str) -> list[int]:
        """The module's microbatches in which any instance has a unit."""
        return [i for i, assignment in enumerate(self.assignments[module]) if not assignment.idle]

    def feeds(self, source: str, target: str) -> list[tuple[int, int]]:
        """(source microbatch, target microbatch) pairs between which rows flow, ascending."""
        of_items, of_samples = self._sides(source, target)
        items = self.metadata.items[of_items]
        item_microbatch = self._microbatch_of(of_items, len(items.sample))
        sample_microbatch = self._microbatch_of(of_samples, len(self.samples))[items.sample]
        pairs = [item_microbatch, sample_microbatch] if source == of_items else [sample_microbatch, item_microbatch]
        return [(int(p), int(t)) for p, t in np.unique(np.stack(pairs, axis=1), axis=0)]

    def _sides(self, source: str, target: str) -> tuple[str, str]:
        """(module whose units are items, consumer) of an edge."""
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
    microbatch_tokens: Mapping[str, int] | None = None,
    assign: Assigner = round_robin,
) -> StepPlan:
    """Assign samples to microbatches, then the units of each microbatch to the instances of every module.

    Args:
        metadata: of the global batch.
        instances: data-parallel instances of every module.
        consumers: modules whose units are whole samples (the LLM); all others have items.
        microbatches: number of microbatches; sample ``s`` goes to microbatch ``s mod microbatches``.
        row_multiple: modules whose rows per instance must be a positive multiple of this (tensor-parallel degree where
            rows are sharded over it); missing rows are added as :attr:`Assignment.padding`.
        microbatch_tokens: encoders and generators with microbatches of their own: about this many rows inside the
            module per instance and microbatch. Step microbatches are joined or split; others keep the step's.
        assign: chooses the instance of every unit.
    """
    multiple, tokens = row_multiple or {}, microbatch_tokens or {}
    consumers = tuple(consumers)
    sample_microbatch = np.arange(len(metadata.samples)) % microbatches
    made: dict[str, tuple[Assignment, ...]] = {}
    for module, count in instances.items():
        if module in consumers:
            rows = hidden = metadata.tokens
            of_step = group = sample_microbatch
            groups = microbatches
        else:
            items = metadata.items[module]
            rows, hidden = items.rows, items.hidden
            of_step = group = sample_microbatch[items.sample]
            groups = microbatches
            if module in tokens:
                group, groups = regroup(of_step, hidden, microbatches, tokens[module] * count)
        made[module] = tuple(
            _assignment(
                module, np.flatnonzero(group == number), of_step, rows, hidden, count, multiple.get(module, 1), assign
            )
            for number in range(groups)
        )
    return StepPlan(metadata, microbatches, made)


def regroup(of_step: np.ndarray, rows: np.ndarray, microbatches: int, budget: int) -> tuple[np.ndarray, int]:
    """Microbatches of about ``budget`` rows: joins neighbouring step microbatches, splits large ones.

    Args:
        of_step: step microbatch of each unit, int64 ``[n]``.
        rows: of each unit, int64 ``[n]``.
        microbatches: of the step.
        budget: rows of one microbatch over all instances.

    Returns:
        The new microbatch of each unit, int64 ``[n]``, and how many there are (at least 1).
    """
    group = np.zeros(len(of_step), dtype=np.int64)
    totals = np.bincount(of_step, weights=rows, minlength=microbatches)
    number, filled = 0, 0.0
    for microbatch in range(microbatches):
        units = np.flatnonzero(of_step == microbatch)
        if not len(units):
            continue
        if filled and filled + totals[microbatch] > budget:
            number, filled = number + 1, 0.0
        pieces = max(1, -(-int(totals[microbatch]) // budget))
        # A unit goes to the piece in which its middle row lies, so that pieces are about equal.
        middle = np.cumsum(rows[units]) - rows[units] / 2
        piece = np.minimum((middle * pieces / max(1, totals[microbatch])).astype(np.int64), pieces - 1)
        used, dense = np.unique(piece, return_inverse=True)
        group[units] = number + dense
        number, filled = number + len(used) - 1, (filled + totals[microbatch] if len(used) == 1 else float(budget))
    return group, number + 1


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
    unit = np.full(len(plan.samples), -1, dtype=np.int64)  # sample number -> its unit in the consumer's assignment
    unit[of_samples.units] = np.arange(len(of_samples.units))
    sample_unit = unit[items.sample[of_items.units]]
    mine = np.flatnonzero(sample_unit >= 0)
    sample_unit = sample_unit[mine]
    in_sequence = (
        of_samples.instance()[sample_unit],
        of_samples.starts()[sample_unit] + items.start[of_items.units[mine]],
    )
    if source in plan.metadata.items:
        sides = (produced.instance()[mine], produced.starts()[mine]), in_sequence
    else:
        sides = in_sequence, (consumed.instance()[mine], consumed.starts(hidden=True)[mine])
    (source_instance, source_start), (target_instance, target_start) = sides
    order = np.lexsort((target_start, target_instance))
    return EdgeBlocks(
        source_instance=source_instance[order],
        source_start=source_start[order],
        target_instance=target_instance[order],
        target_start=target_start[order],
        rows=of_items.rows[mine][order],
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


def _before(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(rows)])


def _assignment(
    module: str,
    units: np.ndarray,
    of_step: np.ndarray,
    rows: np.ndarray,
    hidden: np.ndarray,
    instances: int,
    multiple: int,
    assign: Assigner,
) -> Assignment:
    where = np.asarray(assign(module, hidden[units], instances), dtype=np.int64)
    units = units[np.argsort(where, kind="stable")].astype(np.int64)
    offsets = _before(np.bincount(where, minlength=instances)).astype(np.int64)
    rows, hidden = rows[units].astype(np.int64), hidden[units].astype(np.int64)
    padding = np.zeros(instances, np.int64)
    if multiple > 1:  # at least one alignment row per rank, so that no rank works on nothing
        totals = np.diff(_before(hidden)[offsets])
        padding = np.maximum(-(-totals // multiple), 1) * multiple - totals
    first, last = (int(of_step[units].min()), int(of_step[units].max())) if len(units) else (0, 0)
    return Assignment(units, rows, hidden, offsets, padding, first, last)
