"""LLaVA-1.5's instruction mix of 665k samples (arXiv:2310.03744, table 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads.workload import Workload, WorkloadItems, choose, generator, tokens

COCO = ((640, 480), (640, 427), (500, 375), (640, 640))
"""Assumption: most pictures of COCO, and so of what was made from them, have one of these sizes."""
COCO_SHARES = (0.55, 0.30, 0.12, 0.03)


@dataclass(frozen=True)
class Source:
    """One data set of the mix."""

    samples: int
    """Thousands, table 7."""
    text: float
    """Assumption: median tokens of prompt, questions and answers of one sample."""
    spread: float
    """Assumption: of the logarithm of these tokens."""
    picture: str | None
    """Assumption: what its pictures are like: "coco", "cover" (of a book), "photo" (1024 pixels); None: no picture."""


SOURCES: Mapping[str, Source] = {
    "LLaVA": Source(158, 280.0, 0.45, "coco"),
    "ShareGPT": Source(40, 1100.0, 0.75, None),
    "VQAv2": Source(83, 150.0, 0.35, "coco"),
    "GQA": Source(72, 230.0, 0.45, "coco"),
    "OKVQA": Source(9, 60.0, 0.30, "coco"),
    "OCRVQA": Source(80, 120.0, 0.25, "cover"),
    "A-OKVQA": Source(66, 90.0, 0.25, "coco"),
    "TextCaps": Source(22, 60.0, 0.25, "photo"),
    "RefCOCO": Source(48, 260.0, 0.55, "coco"),
    "VG": Source(86, 320.0, 0.50, "coco"),
}
LONGEST_TEXT = 2048
"""Tokens: LLaVA-1.5's model_max_length."""
PATCHES = 576
"""Of CLIP-L/14 at its fixed 336 x 336 pixels."""

ASSUMPTIONS = (
    "LLaVA-1.5 samples are drawn in proportion to the samples of their sources.",
    "Text tokens of a LLaVA-1.5 sample are lognormal with a median and spread of its source"
    " (multi-turn questions on one picture are one sample), at most 2048.",
)
PICTURES = (
    "Pictures made from COCO are 640 x 480 (55 %), 640 x 427 (30 %), 500 x 375 (12 %) or 640 x 640 (3 %),"
    " half of them upright.",
    "Book covers are 500 pixels high and 280 to 420 wide; TextCaps' pictures are 1024 on their longer side and"
    " 576 to 1024 on the other.",
)


def sources(rng: np.random.Generator, n: int) -> np.ndarray:
    """Source of each sample as a number in :data:`SOURCES`, int64 ``[n]``."""
    return choose(rng, [s.samples for s in SOURCES.values()], n)


def text_tokens(rng: np.random.Generator, source: np.ndarray) -> np.ndarray:
    """Text tokens of samples of these sources, int64 ``[n]``."""
    median, spread = (np.array([getattr(s, name) for s in SOURCES.values()])[source] for name in ("text", "spread"))
    return tokens(rng, median, spread, 8, LONGEST_TEXT, len(source))


def sides(rng: np.random.Generator, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(width, height) in pixels of pictures of these sources, float64 ``[n]`` each; nan where there is none."""
    kinds = np.array([s.picture or "none" for s in SOURCES.values()])[source]
    coco = np.array(COCO, dtype=np.float64)[choose(rng, COCO_SHARES, len(source))]
    upright, free = rng.random(len(source)) < 0.5, rng.random(len(source))
    is_photo, is_cover = kinds == "photo", kinds == "cover"
    long = np.select([is_photo, is_cover, kinds == "coco"], [1024.0, 500.0, coco[:, 0]], np.nan)
    short = np.select([is_photo, is_cover, kinds == "coco"], [576 + 448 * free, 280 + 140 * free, coco[:, 1]], np.nan)
    upright |= is_cover
    return np.where(upright, short, long), np.where(upright, long, short)


def sample(samples: int, seed: int) -> Workload:
    """LLaVA-1.5 as published: one picture of 576 rows or none; nothing is padded."""
    rng = generator(seed)
    source = sources(rng, samples)
    text = text_tokens(rng, source)
    pictured = np.array([s.picture is not None for s in SOURCES.values()])[source]
    sample = np.flatnonzero(pictured)
    rows = np.full(len(sample), PATCHES, np.int64)
    return Workload(
        text,
        {"vision": WorkloadItems(sample, rows, rows)},
        (*ASSUMPTIONS, "The class row of CLIP is not counted."),
    )
