"""A workload is the metadata from which a step plan is made, for many samples; and the draws that workloads share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.plan.step_plan import StepItems, StepMetadata


@dataclass(frozen=True)
class WorkloadItems:
    """The items of one modality; all arrays int64 ``[n]``."""

    sample: np.ndarray
    """Sample that the item belongs to, ascending."""
    inner_rows: np.ndarray
    """Rows inside the encoder or generator, without padding."""
    rows: np.ndarray
    """Rows in the LLM's sequence: rows that reach the LLM, after the downsampling before the connector, or rows that a
    generator receives."""
    targets: np.ndarray | None = None
    """Elements that a generator's loss counts; None: the items belong to an encoder."""


@dataclass(frozen=True)
class Workload:
    """Samples drawn from published statistics."""

    text: np.ndarray
    """Text tokens of each sample, int64 ``[samples]``."""
    items: Mapping[str, WorkloadItems]
    """Name of the encoder ("vision", "audio") or generator ("draw"), as in conf/model -> its items."""
    assumptions: tuple[str, ...]
    """What no source states, one sentence each."""

    def tokens(self) -> np.ndarray:
        """Return the length of each sample's LLM sequence, text and the rows of its items; int64 ``[samples]``."""
        return np.sum([self.text, *map(self._rows, self.items.values())], axis=0)

    def metadata(self) -> StepMetadata:
        """Return one global batch of all samples.

        The items of a sample, modality by modality, stand between equal pieces of its text; every text token but the
        first one has a loss. The place of an item in its sample does not change which rank computes it.
        """
        count = len(self.text)
        per_sample = {m: np.bincount(items.sample, minlength=count) for m, items in self.items.items()}
        gaps = np.sum([*per_sample.values()], axis=0, dtype=np.int64) + 1
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
        prompts = self.tokens() - (self.text - self.text * (gaps - 1) // gaps)  # all but the last piece of text
        return StepMetadata(0, 0, np.arange(count), self.tokens(), labels, placed, prompts)

    def _rows(self, items: WorkloadItems) -> np.ndarray:
        return np.bincount(items.sample, weights=items.rows, minlength=len(self.text)).astype(np.int64)


def generator(seed: int) -> np.random.Generator:
    """Return random numbers that depend on the seed alone, whatever numpy's default generator becomes."""
    return np.random.Generator(np.random.PCG64(seed))


def tokens(
    rng: np.random.Generator, median: float | np.ndarray, sigma: float | np.ndarray, low: int, high: int, n: int
) -> np.ndarray:
    """Draw lognormal token counts between ``low`` and ``high``, int64 ``[n]``."""
    drawn = np.asarray(median) * np.exp(np.asarray(sigma) * rng.standard_normal(n))
    return np.clip(np.rint(drawn), low, high).astype(np.int64)


def choose(rng: np.random.Generator, weights: Sequence[float], n: int) -> np.ndarray:
    """Draw numbers ``0 .. len(weights) - 1`` in proportion to the weights, int64 ``[n]``."""
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    return np.searchsorted(edges, rng.random(n) * edges[-1], side="right").astype(np.int64)


def patches(width: np.ndarray, height: np.ndarray, cap: int, patch: int) -> np.ndarray:
    """Count the patches of images whose longer side is at most ``cap`` pixels, int64 ``[n]``.

    Larger images are scaled down with their aspect ratio, none is scaled up; a partial patch counts as one.
    """
    scale = np.minimum(1.0, cap / np.maximum(width, height))
    # Rounded, so that a scaled side of exactly a whole number of patches does not start another one.
    across, down = (np.maximum(np.ceil(np.round(side * scale) / patch), 1) for side in (width, height))
    return (across * down).astype(np.int64)
