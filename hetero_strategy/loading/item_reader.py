"""Reading media items, and what becomes of those that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import Media, zero_rows
from hetero_strategy.errors import DataError

OnError = Literal["stop", "skip"]
"""``stop``: the run ends with an error that names file and sample. ``skip``: the sample counts for nothing."""


def complaint(index: DatasetIndex, module: str, sample: int, error: Exception) -> str:
    """What is wrong with an item of a sample; the error names the file."""
    return f"{error} (sample '{index.names[sample]}', module '{module}')"


class Reader:
    """Reads the items of one batch."""

    def __init__(self, index: DatasetIndex, processors: Mapping[str, Media], on_error: OnError) -> None:
        self._index, self._processors, self._on_error = index, processors, on_error
        self.failed: dict[int, str] = {}
        """Data set index of every sample with an item that could not be read -> why not, with the file's name."""

    def __call__(self, module: str, item: int, sizes: np.ndarray) -> np.ndarray:
        """Rows ``[R, feature]`` of one item of the data set; zeros in its place where it is skipped.

        Args:
            item: number in the module's item table.
            sizes: int64 ``[k]``, as indexed; their product is R.

        Raises:
            DataError: the file is missing, damaged or changed, and ``on_error`` is ``stop``.
        """
        processor = self._processors[module]
        try:
            return processor.load(self._index.path(module, item), tuple(sizes.tolist()))
        except (DataError, OSError) as error:
            sample = int(self._index.items[module].sample[item])
            message = complaint(self._index, module, sample, error)
            if self._on_error == "stop":
                raise DataError(f"{message}; mend the file, or train without such samples: on_error='skip'") from None
            self.failed.setdefault(sample, message)
            return zero_rows(processor, int(sizes.prod()))
