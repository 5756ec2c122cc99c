"""What the inputs of a step are assembled from, wherever it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import Media
from hetero_strategy.loading.item_reader import Reader


@dataclass(frozen=True)
class Items:
    """Some items of one module."""

    numbers: np.ndarray
    """In the module's item table, int64 ``[n]``."""
    sizes: np.ndarray
    """int64 ``[n, k]``."""
    rows: np.ndarray
    """Rows that cross the module's edges, int64 ``[n]``."""


class Content(Protocol):
    """The units of one step plan that a rank computes."""

    def items(self, module: str, units: np.ndarray) -> Items:
        """What is known of some items of the step."""

    def values(self, module: str, units: np.ndarray) -> list[np.ndarray]:
        """float32 ``[R, feature]`` of each of some items of the step. Raises DataError where one cannot be read."""

    def text(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int32 ``[T]``, whether each is to be predicted bool ``[T]``) of some samples of the step."""


class Fetched:
    """Items are read where they are computed, by a step's reader: the index knows all sizes."""

    def __init__(
        self, index: DatasetIndex, processors: Mapping[str, Media], samples: np.ndarray, reader: Reader
    ) -> None:
        self._index, self._processors, self._samples, self._reader = index, processors, samples, reader
        self._numbers = cache(lambda module: index.item_numbers(module, samples))

    def items(self, module: str, units: np.ndarray) -> Items:
        table, numbers = self._index.items[module], self._numbers(module)[units]
        return Items(numbers, np.asarray(table.sizes[numbers]), np.asarray(table.rows[numbers]))

    def values(self, module: str, units: np.ndarray) -> list[np.ndarray]:
        found, processor = self.items(module, units), self._processors[module]
        items = zip(found.numbers.tolist(), found.sizes, strict=True)
        return [self._reader(module, processor, item, sizes) for item, sizes in items]

    def text(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._index.text(self._samples[units])
