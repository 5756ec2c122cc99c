"""LAION-400M as DistTrain uses it (section 2.3): pictures and captions packed into sequences of 8192 tokens.

Sides of pictures: laion.ai/blog/laion-400-open-dataset counts, of 413M, those with either side and with both sides of
at least 256, 512 and 1024 pixels. Both are lognormal to within a percent or two of the counts.
"""

from __future__ import annotations

import numpy as np

from benchmarks.workloads.workload import Workload, WorkloadItems, generator, patches, tokens
from hetero_strategy import ragged

SHORT = (5.563, 0.687)
"""(mu, sigma) of the logarithm of the shorter side in pixels: median 261."""
LONG = (5.814, 0.724)
"""Of the longer side: median 335."""
CORRELATION = 0.97
"""Assumption: of the two logarithms."""
PATCH = 16
PIXEL = 3
"""Numbers of one: RGB."""
SEQUENCE = 8192


def sample(cap: int, samples: int, seed: int, drawn_from: int = 0) -> Workload:
    """``samples`` packed sequences, pictures at most ``cap`` pixels on the longer side (DistTrain: 512 or 1024).

    Pairs of a picture and its caption are taken in order; one that no longer fits begins the next sequence.

    Args:
        drawn_from: rows of the LLM that a generator is given for each picture, of which it draws one of ``cap`` x
            ``cap`` pixels; 0: there is no generator.
    """
    rng = generator(seed)
    start = np.zeros(1, np.int64)
    width, height, caption = (np.zeros(0, dtype) for dtype in (np.float64, np.float64, np.int64))
    pairs = 64 + samples * 24 * 512 // (cap + 64)  # usually enough at once
    while len(start) <= samples:
        more = (*sides(rng, pairs), tokens(rng, 18.0, 0.6, 2, 256, pairs))
        width, height, caption = (np.concatenate(x) for x in zip((width, height, caption), more, strict=True))
        rows = patches(width, height, cap, PATCH)
        start = packed(rows + caption + drawn_from, SEQUENCE, samples)
    sample = np.repeat(np.arange(samples), np.diff(start))
    used = slice(0, int(start[-1]))
    text = np.bincount(sample, weights=caption[used], minlength=samples).astype(np.int64)
    items = {"vision": WorkloadItems(sample, rows[used], rows[used])}
    if drawn_from:
        given, drawn = (np.full(len(sample), n, np.int64) for n in (drawn_from, (cap // PATCH) ** 2))
        items["draw"] = WorkloadItems(sample, given + drawn, given, drawn * PATCH**2 * PIXEL)
    return Workload(
        text,
        items,
        (
            "Sides of pictures are lognormal, fitted to the counts that LAION prints, with correlation 0.97.",
            f"Pictures of more than {cap} pixels on the longer side are scaled down in their aspect.",
            "Captions have a median of 18 tokens (lognormal, spread 0.6, 2 to 256).",
            "Pairs are packed in the order drawn; what is left of 8192 tokens stays empty.",
            *[f"Each picture is drawn again, {cap} x {cap} pixels, from {drawn_from} rows of the LLM."]
            * bool(drawn_from),
        ),
    )


def sides(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(shorter, longer) side of pictures in pixels, float64 ``[n]`` each, at least 1."""
    first, second = rng.standard_normal((2, n))
    short = np.exp(SHORT[0] + SHORT[1] * first)
    long = np.exp(LONG[0] + LONG[1] * (CORRELATION * first + np.sqrt(1 - CORRELATION**2) * second))
    return np.maximum(np.rint(np.minimum(short, long)), 1), np.maximum(np.rint(np.maximum(short, long)), 1)


def packed(lengths: np.ndarray, limit: int, samples: int) -> np.ndarray:
    """First piece of each of ``samples`` sequences of at most ``limit``, and of the next one: int64 ``[samples + 1]``.

    Shorter where the pieces end before ``samples`` sequences are full.
    """
    total = ragged.offsets(lengths)
    after = np.searchsorted(total, total[:-1] + limit, side="right") - 1
    follow, start = after.tolist(), [0]
    while len(start) <= samples and start[-1] < len(follow) and follow[start[-1]] < len(follow):
        start.append(follow[start[-1]])
    return np.array(start, dtype=np.int64)
