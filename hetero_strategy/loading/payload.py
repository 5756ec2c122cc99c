"""What the inputs of a step are assembled from, wherever it was read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import Media
from hetero_strategy.loading.item_reader import Reader
from hetero_strategy.model.kind import Items


class Fetched:
    """Items are read where they are computed: the index knows all sizes.

    Args:
        index: of the data set.
        processors: by module.
        samples: of the step, data set indices, int64 ``[S]``.
        reader: of the step.
    """

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
