"""Fit lines of seconds to measurements. Pure."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy.optimize import nnls

from hetero_strategy.simulator.stage_times import NOTHING, Line


def relative_fit(
    given: Float64[np.ndarray, "points figures"], seconds: Float64[np.ndarray, "points"]
) -> tuple[list[float], Float64[np.ndarray, "points"]]:
    """Fit non-negative seconds of each given figure by least squared relative errors; return also these errors."""
    scale = np.where(given.any(axis=0), given.max(axis=0), 1.0)
    coefficients = nnls(given / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return coefficients.tolist(), np.abs(given @ coefficients / seconds - 1)


def fit(
    given: Float64[np.ndarray, "points 3"], seconds: Float64[np.ndarray, "points"]
) -> tuple[Line, Float64[np.ndarray, "points"]]:
    """Fit the line with the least squared relative errors and no negative coefficient; return it and its errors."""
    if not seconds.any():
        return NOTHING, np.zeros(len(seconds))
    coefficients, errors = relative_fit(given, np.maximum(seconds, 1e-9))
    return Line(*coefficients), errors
