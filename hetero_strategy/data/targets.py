"""Targets of generators: media files as rows that the loss compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetero_strategy.data.media import ImageProcessor, Sizes
from hetero_strategy.errors import ConfigError


@dataclass(frozen=True)
class ImageTarget:
    """Images to draw, as rows of patches that :class:`ImageProcessor` cuts.

    ``<draw>`` in an answer becomes ``rows`` placeholder tokens. The language model's rows at these tokens are what the
    generator is given; the tokens themselves are not predicted.

    Args:
        rows: condition rows of each image.
        patch_size, channels, max_patches, mean, std, field: as for :class:`ImageProcessor`.
    """

    rows: int = 1
    patch_size: int = 16
    channels: Literal[1, 3] = 3
    max_patches: int = 1024
    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5
    field: str = "draw"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"ImageTarget: rows is {self.rows}; a drawing needs at least 1 row of the language model")
        for name in ("mean", "std"):  # as the processor holds them, so that settings are JSON
            object.__setattr__(self, name, getattr(self._images, name))

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor(
            patch_size=self.patch_size,
            channels=self.channels,
            max_patches=self.max_patches,
            mean=self.mean,
            std=self.std,
            field=self.field,
        )

    @property
    def feature(self) -> int:
        return self._images.feature

    @property
    def size_names(self) -> tuple[str, ...]:
        return self._images.size_names

    def settings(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **asdict(self)}

    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        """Grid of patches and number of condition rows."""
        return self._images.measure(path)[0], self.rows

    def check(self, path: str | Path) -> None:
        self._images.check(path)

    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        return self._images.load(path, sizes)

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """The condition rows and a row per patch."""
        return self._images.inner_rows(sizes) + self.rows

    def target_elements(self, sizes: np.ndarray) -> np.ndarray:
        """All numbers of all patches."""
        return self._images.inner_rows(sizes) * self.feature

    def pixels(self, values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Undo ``load``: rows, float32 ``[R, feature]``, become an image, uint8 ``[height, width, channels]``."""
        (h, w), p = (int(size) for size in sizes), self.patch_size
        patches = values.reshape(h, w, p, p, self.channels).transpose(0, 2, 1, 3, 4)
        image = patches.reshape(h * p, w * p, self.channels) * np.asarray(self.std) + np.asarray(self.mean)
        return np.rint(np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)
