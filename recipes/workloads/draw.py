"""Draws that the workloads share: random numbers in, lengths out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def generator(seed: int) -> np.random.Generator:
    """Random numbers that depend on the seed alone, whatever numpy's default becomes."""
    return np.random.Generator(np.random.PCG64(seed))


def tokens(
    rng: np.random.Generator, median: float | np.ndarray, sigma: float | np.ndarray, low: int, high: int, n: int
) -> np.ndarray:
    """Lognormal token counts between ``low`` and ``high``, int64 ``[n]``."""
    drawn = np.asarray(median) * np.exp(np.asarray(sigma) * rng.standard_normal(n))
    return np.clip(np.rint(drawn), low, high).astype(np.int64)


def choose(rng: np.random.Generator, weights: Sequence[float], n: int) -> np.ndarray:
    """Numbers ``0 .. len(weights) - 1`` in proportion to the weights, int64 ``[n]``."""
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    return np.searchsorted(edges, rng.random(n) * edges[-1], side="right").astype(np.int64)


def patches(width: np.ndarray, height: np.ndarray, cap: int, patch: int) -> np.ndarray:
    """Patches of images whose longer side is at most ``cap`` pixels, int64 ``[n]``.

    Larger ones are scaled down in their aspect, none is scaled up; a started patch counts.
    """
    scale = np.minimum(1.0, cap / np.maximum(width, height))
    # Rounded, so that a scaled side of exactly a whole number of patches does not start another one.
    across, down = (np.maximum(np.ceil(np.round(side * scale) / patch), 1) for side in (width, height))
    return (across * down).astype(np.int64)
