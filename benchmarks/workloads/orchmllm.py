"""OrchMLLM's training data (section 8): LLaVA-1.5, LibriSpeech and AIR-Bench in one mix, for three models.

Its incoherence (section 3.1): a sample has a picture or a sound, never both; transcribed speech has text in proportion
to its duration, questions about a sound have none.

Durations of LibriSpeech are those that icefall prints (k2-fsa/icefall,
egs/librispeech/ASR/local/display_manifest_statistics.py). They are left-skewed (most utterances were cut near 15 s), so
no lognormal fits: the inverse of the printed distribution function is used, linear between printed quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.workloads import llava
from benchmarks.workloads.workload import Workload, WorkloadItems, choose, generator, patches, tokens

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

SPEECH_ASSUMPTIONS = (
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


class Preprocessing(NamedTuple):
    """Figures that section 8 prints for one model."""

    cap: int
    """Pixels: upper bound of an image's side."""
    vision: int
    """Downsampling of encoded images."""
    audio: int
    """Downsampling of encoded sounds."""


MODELS: Mapping[str, Preprocessing] = {
    "orchmllm_10b": Preprocessing(448, 1, 2),
    "orchmllm_18b": Preprocessing(672, 4, 2),
    "orchmllm_84b": Preprocessing(896, 4, 4),
}
PATCH = 14
SHARES: Mapping[str, float] = {"llava": 665.0, "librispeech": 281.0, "air-bench": 21.0}
"""Thousands of examples. Assumption: section 8 samples "from the whole dataset" without saying weights."""
TOKENS_PER_SECOND = 3.6
"""Assumption: 2.7 words a second at 1.33 tokens a word."""


def sample(model: str, samples: int, seed: int) -> Workload:
    """``samples`` draws of the mix, preprocessed for one model of :data:`MODELS`."""
    made = MODELS[model]
    rng = generator(seed)
    task = choose(rng, list(SHARES.values()), samples)
    source = llava.sources(rng, samples)
    text = llava.text_tokens(rng, source)
    width, height = llava.sides(rng, source)
    seen = np.flatnonzero((task == 0) & ~np.isnan(width))

    read, asked = np.flatnonzero(task == 1), np.flatnonzero(task == 2)
    seconds = np.full(samples, np.nan)
    seconds[read] = utterances(rng, len(read))
    seconds[asked] = questions(rng, len(asked))
    text[read] = transcript(rng, seconds[read])
    text[asked] = tokens(rng, 60.0, 0.6, 10, 512, len(asked))
    heard = np.flatnonzero(task > 0)

    pixels, sound = patches(width[seen], height[seen], made.cap, PATCH), frames(seconds[heard])
    return Workload(
        text,
        {
            "vision": WorkloadItems(seen, pixels, -(-pixels // made.vision)),
            "audio": WorkloadItems(heard, sound, -(-sound // made.audio)),
        },
        (
            "The three data sets are drawn in proportion to their examples: 665k, 281k and 21k.",
            *llava.ASSUMPTIONS,
            *llava.PICTURES,
            "The upper bound of an image's resolution is that of its longer side; the aspect is kept.",
            *SPEECH_ASSUMPTIONS,
            "Transcripts have 3.6 tokens a second (spread 15 %) and 16 tokens of instruction.",
            "AIR-Bench sounds have a median of 10 s (lognormal, spread 0.6, 1 to 30 s) and a median of 60 text tokens"
            " (spread 0.6), independent of each other.",
            "Downsampling rounds up.",
        ),
    )


def transcript(rng: np.random.Generator, seconds: np.ndarray) -> np.ndarray:
    """Text tokens of transcribed speech, int64 ``[n]``: proportional to its duration, plus the instruction."""
    rate = TOKENS_PER_SECOND * np.exp(0.15 * rng.standard_normal(len(seconds)))
    words: np.ndarray = np.maximum(np.rint(rate * seconds), 1).astype(np.int64)
    return 16 + words


def questions(rng: np.random.Generator, n: int) -> np.ndarray:
    """Seconds of the sounds that AIR-Bench asks about, float64 ``[n]``; an assumption throughout."""
    return np.clip(10.0 * np.exp(0.6 * rng.standard_normal(n)), 1.0, LONGEST)
