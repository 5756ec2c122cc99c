"""The steps of an epoch where a rank reads what it samples, not what it computes.

For data whose sizes are known only after decoding. `hetero_strategy.loading.dispatch` brings everything to where
it is computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import Media, of_items, too_long, zero_rows
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.loading.item_reader import complaint
from hetero_strategy.loading.steps import StepDataset
from hetero_strategy.loading.worker_pool import Place


@dataclass(frozen=True)
class DecodedItems:
    """Items of one module that a rank has read, by sample, then order within it."""

    values: np.ndarray
    """``[R, feature]``, raw rows end to end, without items that were not read."""
    numbers: np.ndarray
    """int64 ``[n, k + 2]`` for each item: its sizes as the processor measures them, its raw rows, and its rows that
    cross the module's edges. Raw rows are -1, all else 0, where its sample could not be read."""


@dataclass(frozen=True)
class Decoded:
    """What one rank has read of a global batch."""

    epoch: int
    step: int
    items: Mapping[str, DecodedItems]
    failed: Mapping[int, str]
    """Data set index of every sample that could not be read -> why not, with the file's name."""
    seconds: float
    """What reading took."""


class SampledDataset(StepDataset):
    """Map-style data set over the steps of an epoch; an item is the payload of the samples at home on this rank.

    Sample ``k`` of a step is at home on rank ``k mod world``. Global batches, order and length are those of
    :class:`StepDataset` with the same options. A sample with an item that cannot be read, or with more than the index's
    ``max_tokens``, gives up all its items; what becomes of it all ranks decide together when the step is dispatched.

    Raises:
        ConfigError: the index is measured.
    """

    def __init__(self, index: DatasetIndex, *args: Any, rank: int = 0, world: int = 1, **options: Any) -> None:
        super().__init__(index, *args, **options)
        if index.measured:
            raise ConfigError(
                f"{index.folder}: the index holds the sizes of all media; payload='all_to_all' needs one built with"
                " measure=False, or use payload='fetch'"
            )
        self.rank, self.world = rank, world

    def home(self, samples: int) -> np.ndarray:
        """Rank that reads each of a step's samples, int64 ``[S]``."""
        return np.arange(samples, dtype=np.int64) % self.world

    def __getitem__(self, place: int | Place) -> Decoded:  # type: ignore[override]  # a part of a batch
        """What is at home here of (epoch, step), or of a step of epoch 0."""
        epoch, step, _ = self.place(place)
        began = time.perf_counter()
        samples = self.samples(epoch, step)
        mine = samples[self.home(len(samples)) == self.rank]
        failed: dict[int, str] = {}
        raw = {name: _decoded(self.index, name, p, mine, failed) for name, p in self.processors.items()}
        self._refuse_long(mine, {name: items.numbers[:, -1] for name, items in raw.items()}, failed)
        bad = np.isin(mine, list(failed))
        items = {name: _without(one, np.repeat(bad, self.index.counts(name, mine))) for name, one in raw.items()}
        return Decoded(epoch, step, items, failed, time.perf_counter() - began)

    def _refuse_long(self, samples: np.ndarray, rows: Mapping[str, np.ndarray], failed: dict[int, str]) -> None:
        most = self.index.max_tokens
        if most is None:
            return
        tokens = np.asarray(self.index.offsets[samples + 1] - self.index.offsets[samples])
        per_item: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for module, mine in rows.items():
            counts = self.index.counts(module, samples)
            of_sample = np.repeat(np.arange(len(samples)), counts)
            per_item[self.processors[module].field] = of_sample, mine
            tokens = tokens + np.bincount(of_sample, mine - 1, len(samples)).astype(np.int64)
        for place in np.flatnonzero(tokens > most).tolist():
            sample = int(samples[place])
            items = of_items(
                self.processors,
                {field: mine[of_sample == place].tolist() for field, (of_sample, mine) in per_item.items()},
            )
            text = too_long(int(tokens[place]), items, most)
            failed.setdefault(sample, f"sample '{self.index.names[sample]}': {text}")


def _decoded(
    index: DatasetIndex, module: str, processor: Media, samples: np.ndarray, failed: dict[int, str]
) -> DecodedItems:
    """All items of some samples; those of samples that fail have no rows."""
    table, numbers = index.items[module], index.item_numbers(module, samples)
    found = np.zeros((len(numbers), len(processor.size_names) + 2), np.int64)
    values = [zero_rows(processor)]
    for place, item in enumerate(numbers.tolist()):
        sample = int(table.sample[item])
        if sample in failed:
            continue
        path = index.path(module, item)
        try:
            sizes, rows = processor.measure(path)
            values.append(processor.load(path, sizes))
            if values[-1].dtype != values[0].dtype:
                raise ConfigError(
                    f"the processor of '{module}' gives rows of {values[-1].dtype}, but its dtype says"
                    f" {values[0].dtype}; let {type(processor).__name__}.load give these, or set its dtype"
                )
            found[place] = (*sizes, len(values[-1]), rows)
        except (DataError, OSError) as error:
            failed[sample] = complaint(index, module, sample, error)
    return DecodedItems(np.concatenate(values), found)


def _without(items: DecodedItems, bad: np.ndarray) -> DecodedItems:
    """The same without what some items hold; bool ``[n]``."""
    if not bad.any():
        return items
    unread = np.zeros_like(items.numbers[0])
    unread[-2] = -1
    numbers = np.where(bad[:, None], unread, items.numbers)
    return DecodedItems(items.values[np.repeat(~bad, items.numbers[:, -2])], numbers)
