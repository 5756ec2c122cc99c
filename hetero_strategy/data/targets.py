"""Targets of generators: media files as rows that the loss compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from hetero_strategy.data.media import ImageProcessor, Sizes
from hetero_strategy.errors import ConfigError
from hetero_strategy.model.inputs import normalised


@dataclass(frozen=True, kw_only=True)
class ImageTarget(ImageProcessor):
    """Images to draw, as rows of patches that :class:`ImageProcessor` cuts.

    ``<draw>`` in an answer becomes ``rows`` placeholder tokens. The language model's rows at these tokens are what the
    generator is given; the tokens themselves are not predicted. Every patch is a target row of its own: there is no
    ``merge``.

    Args:
        rows: condition rows of each image.
        patch_size, channels, max_patches, mean, std, field, resample: as for :class:`ImageProcessor`.
    """

    merge: int = field(default=1, init=False)
    rows: int = 1
    max_patches: int = 1024
    field: str = "draw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1:
            raise ConfigError(f"ImageTarget: rows is {self.rows}; a drawing needs at least 1 row of the language model")

    @override
    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        """Grid of patches and number of condition rows."""
        return super().measure(path)[0], self.rows

    @override
    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """The condition rows and a row per patch."""
        return super().inner_rows(sizes) + self.rows

    @property
    @override
    def dtype(self) -> type[np.generic]:
        return np.float32

    @override
    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Patches of the resized image, normalised, float32."""
        return normalised(torch.from_numpy(super().load(path, sizes)), self.statistics).numpy()

    def target_elements(self, sizes: np.ndarray) -> np.ndarray:
        """All numbers of all patches."""
        return super().inner_rows(sizes) * self.feature

    def pixels(self, values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Undo ``load``: rows, float32 ``[R, feature]``, become an image, uint8 ``[height, width, channels]``."""
        (h, w), p = (int(size) for size in sizes), self.patch_size
        patches = values.reshape(h, w, p, p, self.channels).transpose(0, 2, 1, 3, 4)
        image = patches.reshape(h * p, w * p, self.channels) * np.asarray(self.std) + np.asarray(self.mean)
        return np.rint(np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)
