"""What kinds make the inputs of a step of, wherever it was read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from torch import Tensor

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


@dataclass(frozen=True)
class InstanceUnits:
    """What one instance of a module computes in one of its microbatches, and where a kind finds the payload."""

    module: str
    numbers: np.ndarray
    """The units, int64 ``[n]``: numbers of samples, or of items in :attr:`StepMetadata.items`."""
    edge_rows: np.ndarray
    """Rows of each unit that cross edges, int64 ``[n]``."""
    inner_rows: np.ndarray
    """Rows of each unit inside the module, int64 ``[n]``; alignment rows come after them as one unit more."""
    slots: dict[Hashable, Tensor]
    """For the ``slots`` of the module's inputs."""
    first: bool
    """Whether this rank holds the module's first stage."""
    last: bool
    """Whether this rank holds the module's last stage."""
    seed: tuple[int, int]
    """Of random inputs: the data's seed and the epoch."""
    processor: Any
    """Of the module's media; None where it has none."""
    content: Content


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
