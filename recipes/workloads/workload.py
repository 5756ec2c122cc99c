"""A workload: what a step plan needs to know of many samples, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.plan.step_plan import StepItems, StepMetadata


@dataclass(frozen=True)
class WorkloadItems:
    """Items of one modality; all int64 ``[n]``."""

    sample: np.ndarray
    """Number of the item's sample, ascending."""
    inner_rows: np.ndarray
    """Rows inside the encoder or generator, without padding."""
    rows: np.ndarray
    """Rows of the LLM's sequence: those that reach it, after the downsampling before the connector, or those that a
    generator is given."""
    targets: np.ndarray | None = None
    """Numbers that a generator's loss counts; None: an encoder's items."""


@dataclass(frozen=True)
class Workload:
    """Samples drawn from published statistics."""

    name: str
    text: np.ndarray
    """Text tokens of each sample, int64 ``[samples]``."""
    items: Mapping[str, WorkloadItems]
    """By encoder ("vision", "audio") or generator ("draw"), as the models of conf/model name them."""
    padding: Mapping[str, str]
    """By module, "llm" included: how the paper batches its items ("none" or "full", as in a balancing cost)."""
    assumptions: tuple[str, ...]
    """What no source prints, one sentence each."""

    def tokens(self) -> np.ndarray:
        """The whole interleaved LLM sequence of each sample, text and the rows of its items; int64 ``[samples]``."""
        return np.sum([self.text, *map(self._rows, self.items.values())], axis=0)

    def metadata(self) -> StepMetadata:
        """One global batch of all samples.

        A sample's items, modality by modality, lie between equal pieces of its text; every text token but a leading
        one has a loss. Where items lie does not change who computes what.
        """
        count = len(self.text)
        per_sample = {m: np.bincount(items.sample, minlength=count) for m, items in self.items.items()}
        gaps = np.sum([*per_sample.values()], axis=0) + 1
        before, items_before = np.zeros(count, np.int64), np.zeros(count, np.int64)
        placed = {}
        for modality, items in self.items.items():
            s = items.sample
            total = ragged.starts(items.rows)
            within = total - total[np.searchsorted(s, s)]
            text = self.text[s] * (items_before[s] + ragged.within(per_sample[modality]) + 1) // gaps[s]
            start = text + before[s] + within
            placed[modality] = StepItems(s, items.rows, start, items.inner_rows, items.targets)
            before = before + self._rows(items)
            items_before = items_before + per_sample[modality]
        labels = np.maximum(self.text - 1, 0)
        return StepMetadata(0, 0, np.arange(count), self.tokens(), labels, placed)

    def _rows(self, items: WorkloadItems) -> np.ndarray:
        return np.bincount(items.sample, weights=items.rows, minlength=len(self.text)).astype(np.int64)
