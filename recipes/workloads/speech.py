"""Speech: durations of LibriSpeech, frames of Whisper.

Durations are those that icefall prints (k2-fsa/icefall, egs/librispeech/ASR/local/display_manifest_statistics.py).
They are left-skewed (most utterances were cut near 15 s), so that no lognormal fits: the inverse of the printed
distribution function is used, linear between printed quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recipes.workloads.draw import choose

QUANTILES = (0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1)
FRAMES_PER_SECOND = 50
"""Whisper's encoder sees 100 mel frames a second (hop 10 ms) and halves them in its second convolution."""
LONGEST = 30.0
"""Seconds that Whisper's encoder has positions for: 1500 rows."""


@dataclass(frozen=True)
class Durations:
    """One part of LibriSpeech; seconds."""

    hours: float
    """Of speech, LibriSpeech's own figure."""
    mean: float
    deviation: float
    quantiles: tuple[float, ...]
    """At :data:`QUANTILES`."""


PARTS: Mapping[str, Durations] = {
    "train-clean-100": Durations(
        100.6, 12.8, 3.8, (1.3, 1.9, 2.2, 2.5, 4.2, 6.4, 11.4, 13.8, 15.3, 16.7, 17.3, 18.1, 18.4, 18.8, 27.2)
    ),
    "train-clean-360": Durations(
        363.6, 12.7, 3.8, (1.0, 1.8, 2.2, 2.5, 4.2, 6.2, 11.2, 13.7, 15.3, 16.6, 17.3, 18.1, 18.4, 18.8, 33.0)
    ),
    "train-other-500": Durations(
        496.7, 12.1, 4.2, (0.8, 1.7, 2.1, 2.3, 3.5, 5.0, 9.8, 13.4, 15.1, 16.5, 17.2, 18.1, 18.4, 18.9, 31.0)
    ),
}

ASSUMPTIONS = (
    "LibriSpeech durations are icefall's, which include its speed perturbation of 0.9, 1.0 and 1.1.",
    "Between printed quantiles LibriSpeech durations are spread evenly.",
    f"Audio longer than {LONGEST:.0f} s is cut (Whisper's positions).",
)


def utterances(rng: np.random.Generator, n: int) -> np.ndarray:
    """Seconds of utterances of the 960 hours, float64 ``[n]``: a part has hours / mean of them."""
    part = choose(rng, [p.hours / p.mean for p in PARTS.values()], n)
    at = rng.random(n)
    every = [np.interp(at, QUANTILES, p.quantiles) for p in PARTS.values()]
    return np.choose(part, every)


def frames(seconds: np.ndarray) -> np.ndarray:
    """Rows inside Whisper's encoder, int64 ``[n]``: at most 1500, at least 1."""
    rows = np.ceil(np.minimum(seconds, LONGEST) * FRAMES_PER_SECOND - 1e-9)
    return np.maximum(rows, 1).astype(np.int64)
