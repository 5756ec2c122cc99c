"""The attention masks of a module's samples, known from metadata before any payload is read. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.mask import Causal, MaskRule, Slices, Spans
from hetero_strategy.plan.step_plan import StepMetadata, UnitRuns

ALIGNMENT = -1
"""Number in place of a sample's for alignment rows, which are a sequence without items."""


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of a module's attentions over the same rows."""

    masks: tuple[Slices, ...]
    shares: tuple[float, ...] = (1.0,)
    """Share of each mask in the FLOPs of a pair; their sum is 1."""

    @property
    def total(self) -> int:
        return self.masks[0].total

    def pairs(self, edges: Int64[np.ndarray, "edges"]) -> Float64[np.ndarray, "blocks"]:
        """Count the pairs of the rows between each two of some ascending row numbers, in the mean of attentions."""
        return np.asarray(sum(share * mask.work(edges) for share, mask in zip(self.shares, self.masks, strict=True)))

    def keys(
        self, edges: Int64[np.ndarray, "edges"], owner: Int64[np.ndarray, "blocks"], owners: int
    ) -> Float64[np.ndarray, "owners"]:
        """Count the different keys that the rows of each owner see, in the mean of attentions.

        Args:
            edges: ascending row numbers between which blocks are.
            owner: owner of each block.
        """
        seen = np.zeros(owners)
        for share, mask in zip(self.shares, self.masks, strict=True):
            block, runs = mask.block_keys(edges)
            of, start, end = ragged.merged(owner[block], runs[:, 0], runs[:, 1])
            seen += share * np.bincount(of, end - start, minlength=owners)
        return seen

    def part(self, first: Int64[np.ndarray, "runs"], rows: Int64[np.ndarray, "runs"]) -> Masks:
        """Return the masks of some runs of whole sequences, which then lie end to end.

        Args:
            first, rows: first row and number of rows of each run, ascending.
        """
        parts, starts = [], ragged.starts(rows)
        for mask in self.masks:
            run = np.maximum(np.searchsorted(first, mask.row, "right") - 1, 0)
            kept = np.flatnonzero((mask.row >= first[run]) & (mask.row < (first + rows)[run]))
            columns = (column[kept] for column in (mask.row, mask.rows, mask.key, mask.keys, mask.low, mask.high))
            row, count, key, keys, low, high = columns
            ahead = (first - starts)[run[kept]]
            parts.append(Slices(row - ahead, count, key - ahead, keys, low, high, int(rows.sum())))
        return Masks(tuple(parts), self.shares)


def causal_masks(lengths: Int64[np.ndarray, "sequences"]) -> Masks:
    """Return the mask of sequences whose rows see all earlier ones."""
    return Masks((Causal().slices(lengths, Spans.none()),))


def item_runs(metadata: StepMetadata, module: str, samples: Int64[np.ndarray, "sequences"]) -> UnitRuns:
    """Return the runs of rows of a module's items in some samples, by sample, then position.

    Sources are the items, and targets the places of their samples in ``samples``.
    """
    place = np.full(len(metadata.samples) + 1, -1)  # the last one takes alignment rows
    place[samples] = np.arange(len(samples))
    runs = metadata.items[module].in_samples
    target = place[runs.target]
    these = np.lexsort((runs.target_start, target))[np.count_nonzero(target < 0) :]
    return UnitRuns(
        runs.source[these], runs.source_start[these], target[these], runs.target_start[these], runs.rows[these]
    )


def sample_spans(metadata: StepMetadata, sources: Collection[str], samples: Int64[np.ndarray, "sequences"]) -> Spans:
    """Return the items of some modules in some samples, which are sequences in this order.

    Args:
        sources: modules with files and an edge to the samples' module, see
            :meth:`~hetero_strategy.model.spec.ModelSpec.item_sources`.
        samples: numbers of different samples in the step, and :data:`ALIGNMENT` for alignment rows.
    """
    runs = {name: item_runs(metadata, name, samples) for name in sources if name in metadata.items}
    columns = [
        np.concatenate([np.zeros(0, np.int64), *(getattr(each, column) for each in runs.values())])
        for column in ("target", "target_start", "rows")
    ]
    source = np.repeat(np.array([*runs], np.str_), [len(each.rows) for each in runs.values()])
    prompts = None if metadata.prompts is None else np.append(metadata.prompts, 0)[samples]
    return Spans(columns[0], columns[1], columns[2], source, prompts, {n: metadata.items[n].field for n in runs})


def sample_masks(
    rules: Sequence[MaskRule],
    metadata: StepMetadata,
    sources: Collection[str],
    samples: Int64[np.ndarray, "sequences"],
    lengths: Int64[np.ndarray, "sequences"] | None = None,
) -> list[Slices]:
    """Return the mask of some samples end to end by each rule, equal to those that the loader makes of the samples.

    For example, the pairs of a row and a key in each sample of a step, summed over a language model's attentions::

        module, everything = spec.modules["llm"], np.arange(len(metadata.samples))
        rules, counts = zip(*module.rules)
        masks = sample_masks(rules, metadata, spec.item_sources("llm"), everything)
        pairs = sum(n.sum() * mask.work(ragged.offsets(metadata.tokens)) for mask, n in zip(masks, counts))

    No row sees another sample, so one call for all samples of a step costs less than a call for each microbatch.

    Args:
        rules: rules of a module, see :attr:`~hetero_strategy.model.spec.ModuleSpec.rules`.
        sources, samples: as in :func:`sample_spans`.
        lengths: rows of each sequence; default: those of its sample.

    Raises:
        DataError: items overlap or leave their sample, a row sees no key, or a rule needs unknown metadata.
    """
    lengths = metadata.tokens[samples] if lengths is None else lengths
    spans = sample_spans(metadata, sources, samples)
    return [rule.slices(lengths, spans) for rule in rules]


@dataclass(frozen=True)
class AttentionRules:
    """The rules by which rows of a module's samples see each other, and the work of each rule.

    Args:
        rules: rules of different attentions.
        shares: share of each rule in the FLOPs of a pair; their sum is 1.
        sources: modules with files and an edge to the module.
    """

    rules: tuple[MaskRule, ...]
    shares: tuple[float, ...]
    sources: tuple[str, ...]

    @property
    def causal(self) -> bool:
        """Return whether each row sees all rows before it."""
        return all(rule == Causal() for rule in self.rules)

    def masks(
        self,
        metadata: StepMetadata,
        samples: Int64[np.ndarray, "sequences"],
        lengths: Int64[np.ndarray, "sequences"] | None = None,
    ) -> Masks:
        """Return the masks of some samples end to end; arguments and errors as in :func:`sample_masks`."""
        return Masks(tuple(sample_masks(self.rules, metadata, self.sources, samples, lengths)), self.shares)

    def squares(self, metadata: StepMetadata) -> Float64[np.ndarray, "samples"]:
        """Return the pairs of each sample in squares: twice its pairs less its rows, in the mean of all attentions.

        Under a causal mask it is the squared length, so a cost per square holds for any mask. For example, a row that
        sees 3 rows of 5 under a window, as each row but the first two does::

            pairs 1 + 2 + 3 + 3 + 3 = 12    squares 2 * 12 - 5 = 19    causal: 2 * 15 - 5 = 25
        """
        masks = self.masks(metadata, np.arange(len(metadata.samples)))
        return 2.0 * masks.pairs(ragged.offsets(metadata.tokens)) - metadata.tokens


CAUSAL = AttentionRules((Causal(),), (1.0,), ())
"""Rules of a module whose rows see all earlier ones."""
