"""Drawings of generators in validation or test: as pictures beside their targets, and judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from hetero_strategy.data.build_index import DatasetIndex
from hetero_strategy.data.media import ImageTarget
from hetero_strategy.errors import DataError
from hetero_strategy.loading.batch import Batch
from recipes.digits import split_digits


class Drawing(NamedTuple):
    """An item that a generator drew."""

    sample: int
    """Data set index of the sample."""
    target: Path
    """File with the target picture."""
    pixels: np.ndarray
    """uint8 ``[height, width, channels]``."""


class Judge(Protocol):
    """A function that says which drawings are right."""

    def __call__(self, drawings: Sequence[Drawing]) -> np.ndarray:
        """Return bool ``[drawings]``."""


class DigitJudge:
    """A judge that reads 8x8 drawings with a classifier, trained on scikit-learn's digits of the training split.

    The name of the target's file ends with the digit that was asked for; see `write_digits_draw`.

    Args:
        seed: seed of the data set, which decides the digits of the training split.
    """

    def __init__(self, seed: int = 0) -> None:
        from sklearn.svm import SVC

        splits = split_digits(seed)
        images, labels = splits["train"]
        self._classifier = SVC(gamma=0.001).fit(images.reshape(len(images), -1), labels)
        images, labels = splits["test"]
        self.accuracy = float(self._classifier.score(images.reshape(len(images), -1), labels))
        """Accuracy on handwritten test digits: the score that perfect drawings could reach."""

    def __call__(self, drawings: Sequence[Drawing]) -> np.ndarray:
        if not drawings:
            return np.zeros(0, bool)
        wrong = next((d for d in drawings if d.pixels.shape != (8, 8, 1) or not _asked(d.target)), None)
        if wrong is not None:
            raise DataError(
                f"DigitJudge: {wrong.target} is drawn with {wrong.pixels.shape} pixels; it reads 8x8 grey drawings of"
                " digits as write_digits_draw makes them; set report.judge=null for others"
            )
        pixels = np.stack([d.pixels.reshape(-1) for d in drawings]) / 15.0  # as scikit-learn's 0..16
        return self._classifier.predict(pixels) == np.array([int(_asked(d.target)) for d in drawings])


def _asked(target: Path) -> str:
    found = re.search(r"-(\d)$", target.stem)
    return found.group(1) if found else ""


def drawings_of(batch: Batch, drawn: dict[str, Any], index: DatasetIndex, processors: dict[str, Any]) -> list[Drawing]:
    """Return the drawings of one batch, without those of skipped samples.

    Args:
        batch: validated batch.
        drawn: generator -> ``[target rows of the batch, feature]``; see `ModelOutput`.
        index: index of the data set.
        processors: module -> its processor.
    """
    drawings = []
    for generator, values in drawn.items():
        processor = processors[generator]
        if not isinstance(processor, ImageTarget):
            continue
        items = batch.plan.metadata.items[generator]
        ends = np.cumsum(items.inner_rows - items.edge_rows)
        parts = np.split(values.float().cpu().numpy(), ends[:-1])
        numbers = index.item_numbers(generator, batch.plan.samples)
        sizes = index.items[generator].sizes
        for place, item in enumerate(numbers.tolist()):
            if not items.targets[place]:
                continue
            sample = int(batch.plan.samples[items.sample[place]])
            pixels = processor.pixels(parts[place], sizes[item])
            drawings.append(Drawing(sample, index.path(generator, item), pixels))
    return drawings


def draw_grid(drawings: Sequence[Drawing], right: np.ndarray | None, path: Path, *, columns: int = 16) -> None:
    """Write a PNG with every drawing below its target, and a red bar under each drawing that is wrong."""
    height = max(d.pixels.shape[0] for d in drawings)
    width = max(d.pixels.shape[1] for d in drawings)
    gap, bar = max(1, width // 8), 2
    rows = -(-len(drawings) // columns)
    canvas = np.full((rows * (2 * height + bar + 3 * gap) + gap, columns * (width + gap) + gap, 3), 255, np.uint8)
    for number, drawing in enumerate(drawings):
        y = (number // columns) * (2 * height + bar + 3 * gap) + gap
        x = (number % columns) * (width + gap) + gap
        with Image.open(drawing.target) as image:
            target = np.asarray(image.convert("RGB").resize(drawing.pixels.shape[1::-1]))
        h, w = target.shape[:2]
        canvas[y : y + h, x : x + w] = target
        canvas[y + height + 1 : y + height + 1 + h, x : x + w] = drawing.pixels
        if right is not None and not right[number]:
            canvas[y + 2 * height + 1 : y + 2 * height + 1 + bar, x : x + w] = (200, 30, 30)
    scale = max(1, 1000 // canvas.shape[1])
    Image.fromarray(canvas.repeat(scale, axis=0).repeat(scale, axis=1)).save(path)
