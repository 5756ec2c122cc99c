"""OrchMLLM's training data (section 8): LLaVA-1.5, LibriSpeech and AIR-Bench in one mix, for three models.

Its incoherence (section 3.1): a sample has a picture or a sound, never both; transcribed speech has text in proportion
to its duration, questions about a sound have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from recipes.workloads import llava
from recipes.workloads.draw import choose, generator, patches, tokens
from recipes.workloads.speech import ASSUMPTIONS, LONGEST, frames, utterances
from recipes.workloads.workload import Workload, WorkloadItems


class Preprocessing(NamedTuple):
    """What section 8 prints for one model."""

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
        model,
        text,
        {
            "vision": WorkloadItems(seen, pixels, -(-pixels // made.vision)),
            "audio": WorkloadItems(heard, sound, -(-sound // made.audio)),
        },
        {"vision": "none", "audio": "full", "llm": "none"},
        (
            "The three data sets are drawn in proportion to their examples: 665k, 281k and 21k.",
            *llava.ASSUMPTIONS,
            *llava.PICTURES,
            "The upper bound of an image's resolution is that of its longer side; the aspect is kept.",
            *ASSUMPTIONS,
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
