"""What kinds make the inputs of a step of, wherever it was read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.loading.item_reader import Reader

if TYPE_CHECKING:
    from hetero_strategy.loading.row_cache import RowCache


@dataclass(frozen=True)
class Items:
    """Some items of one module."""

    numbers: np.ndarray
    """In the module's item table, int64 ``[n]``."""
    sizes: np.ndarray
    """int64 ``[n, k]``."""
    rows: np.ndarray
    """Rows that cross the module's edges, int64 ``[n]``."""


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
    alike: bool = False
    """Whether all units that the module has in the step have the same rows inside it."""
    cache: RowCache | None = None
    """Of the rows of its frozen backbone; None: they are computed."""


@dataclass(frozen=True)
class Content:
    """The units of one step plan that a rank computes."""

    index: DatasetIndex
    samples: np.ndarray
    """Of the step, data set indices, int64 ``[S]``."""
    items: Callable[[str, np.ndarray], Items]
    """Module and numbers of some of its items in the step -> what is known of these."""
    values: Callable[[str, np.ndarray], list[np.ndarray]]
    """The same -> raw rows of each, ``[R, feature]``; raises DataError where one cannot be read."""
    rows: Mapping[str, np.ndarray] | None = None
    """If the index is not measured, by module: rows of each item of the samples, also of those that were not read."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Data set index of every sample with an item that could not be read until now -> why not."""

    def text(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int32 ``[T]``, whether each is to be predicted bool ``[T]``) of some samples of the step."""
        if self.rows is None:
            return self.index.text(self.samples[units])
        rows = {}
        for module, of_item in self.rows.items():
            counts = self.index.counts(module, self.samples)
            rows[module] = of_item[ragged.expand(ragged.starts(counts)[units], counts[units])]
        return self.index.text(self.samples[units], rows)


def fetched(index: DatasetIndex, samples: np.ndarray, reader: Reader) -> Content:
    """Items are read where they are computed, by the step's reader: the index knows all sizes."""
    numbers = cache(lambda module: index.item_numbers(module, samples))

    def items(module: str, units: np.ndarray) -> Items:
        table, these = index.items[module], numbers(module)[units]
        return Items(these, np.asarray(table.sizes[these]), np.asarray(table.rows[these]))

    def values(module: str, units: np.ndarray) -> list[np.ndarray]:
        found = items(module, units)
        return [reader(module, item, sizes) for item, sizes in zip(found.numbers.tolist(), found.sizes, strict=True)]

    return Content(index, samples, items, values, failed=reader.failed)
