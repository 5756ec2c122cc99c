"""Videos of seconds to minutes, pictures and text in one mix: the longest samples have 30 times the median's tokens.

Rows of LLaVA-Video-178K by duration: huggingface.co/datasets/lmms-lab/LLaVA-Video-178K, whose viewer counts the subsets
(`0_30_s_youtube_v0_1`, 539k rows, ...). Subsets without a count (ActivityNet) or a duration (LLaVA-Hound) are left out.
FineVideo, 43k videos of 3.4k hours: huggingface.co/blog/fine-video. Pictures and text: LLaVA-1.5's mix.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.workloads import llava
from benchmarks.workloads.workload import Workload, WorkloadItems, choose, generator, tokens

SECONDS = (0, 30, 60, 120, 180)
"""Bounds of LLaVA-Video-178K's durations."""
COUNTS: Mapping[str, tuple[float, ...]] = {
    "academic": (66.2, 88.8, 35.2, 28.2),
    "youtube": (539.0, 171.0, 202.0, 206.0),
    "nextqa": (11.0, 13.7, 9.33, 0.113),
    "perceptiontest": (1.79, 0.618, 0.0, 0.0),
}
"""Thousands of rows of each source, by duration."""
PICTURES = 665.0
"""Thousands of samples of LLaVA-1.5's mix."""
FINE = 43.0
"""Thousands of videos of FineVideo."""
FINE_SECONDS = 3.4e3 * 3600 / (1000 * FINE)
"""Mean duration of FineVideo: 4.7 minutes."""
SPREAD, LONGEST = 0.7, 600.0
"""Assumption: of the logarithm of FineVideo's durations, and the longest."""
PATCHES, ROWS = 729, 196
"""Of a frame or picture in the encoder, and of a frame in the LLM: LLaVA-OneVision (arXiv:2408.03326), section 3.2."""


def durations(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return seconds of LLaVA-Video-178K's videos, float64 ``[n]``."""
    of = choose(rng, np.sum([*COUNTS.values()], axis=0), n)
    bounds = np.array(SECONDS, np.float64)
    return bounds[of] + rng.random(n) * np.diff(bounds)[of]


def sample(samples: int, seed: int) -> Workload:
    """Draw a mix of LLaVA-1.5, LLaVA-Video-178K and FineVideo, with a frame of each second."""
    rng = generator(seed)
    part = choose(rng, [PICTURES, float(np.sum([*COUNTS.values()])), FINE], samples)
    source = llava.sources(rng, samples)
    video = part > 0
    fine = np.exp(np.log(FINE_SECONDS) - SPREAD**2 / 2 + SPREAD * rng.standard_normal(samples))
    seconds = np.where(part == 1, durations(rng, samples), np.minimum(fine, LONGEST))
    frames = np.maximum(np.rint(seconds), 1).astype(np.int64)
    pictured = np.array([s.picture is not None for s in llava.SOURCES.values()])[source]
    count = np.where(video, frames, pictured)
    text = np.where(video, tokens(rng, 150.0, 0.8, 8, llava.LONGEST_TEXT, samples), llava.text_tokens(rng, source))
    rows = np.repeat(np.where(video, ROWS, PATCHES), count)
    item = WorkloadItems(np.repeat(np.arange(samples), count), np.full(len(rows), PATCHES, np.int64), rows)
    return Workload(
        text,
        {"vision": item},
        (
            "665k samples of LLaVA-1.5, 1373k of LLaVA-Video-178K and 43k of FineVideo are drawn in proportion.",
            "Durations are spread evenly between the bounds of LLaVA-Video-178K's subsets.",
            "FineVideo's durations are lognormal with spread 0.7 and its mean of 4.7 minutes; they end at 10 minutes.",
            "A frame of each second is read, 729 patches and 196 rows in the LLM; a picture has 729 in both.",
            "Text about a video has a median of 150 tokens (lognormal, spread 0.8, 8 to 2048).",
            *llava.ASSUMPTIONS,
        ),
    )
