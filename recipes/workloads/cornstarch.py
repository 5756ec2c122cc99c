"""Cornstarch's synthetic samples (arXiv:2503.11367, section 6.1): all alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recipes.workloads.speech import FRAMES_PER_SECOND
from recipes.workloads.workload import Workload, WorkloadItems

TEXT = 1000
SECONDS = 30
PATCHES = 576
"""Assumption: the 1280 x 720 picture is scaled to EVA-CLIP's 336 x 336 pixels, patches of 14."""


def sample(samples: int, seed: int, encoders: Sequence[str] = ("vision", "audio")) -> Workload:
    """1k text tokens, one picture and 30 s of sound in every sample: 3076 tokens (the paper: 1.5k to 4k).

    The seed changes nothing; ``encoders`` are those of the model.
    """
    every = np.arange(samples)
    rows = {"vision": PATCHES, "audio": SECONDS * FRAMES_PER_SECOND}
    items = {name: np.full(samples, rows[name], np.int64) for name in encoders}
    return Workload(
        "cornstarch",
        np.full(samples, TEXT, np.int64),
        {name: WorkloadItems(every, of, of) for name, of in items.items()},
        {**dict.fromkeys(items, "none"), "llm": "none"},
        (
            "The 1280 x 720 picture gives 576 rows (336 x 336 pixels, patches of 14).",
            "30 s of sound give 1500 rows without further downsampling.",
        ),
    )
