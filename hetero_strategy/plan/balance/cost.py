"""What a batch of items costs a module, what an assignment costs its instances, and the least that any can cost.

The forms are OrchMLLM's (equations 1 and 2, appendix A) with a constant part per item added. Costs are in seconds where
they were fitted (:func:`fit_cost`), otherwise in the unit of the coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64, Num
from scipy.optimize import nnls

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance.greedy import descending

Padding = Literal["none", "full", "attention"]
Speeds = Float64[np.ndarray, "bins"] | None
"""Relative speeds of bins, above 0; None: all are equal."""
DEEP = 256
"""Items per bin up to which the largest items enter a bound; further down the mean is as good."""


@dataclass(frozen=True)
class Cost:
    """Time of one module over a batch of items with lengths l (rows inside the module), b items, m = max l:

    ============ ================================================================================================
    padding      time
    ============ ================================================================================================
    "none"       sum(fixed + linear * l + quadratic * l^2)
    "full"       b * (fixed + linear * m + quadratic * m^2), OrchMLLM equations 1 and 2 with padding
    "attention"  sum(fixed + linear * l) + b * quadratic * m^2, a ConvTransformer, OrchMLLM appendix A
    ============ ================================================================================================

    Raises:
        ConfigError: a negative or not finite coefficient, or an unknown padding.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    fixed: float = 0.0
    padding: Padding = "none"

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "fixed"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigError(f"Cost: {name}={value} is no time per row; give a finite number >= 0.")
        if self.padding not in get_args(Padding):
            raise ConfigError(f"Cost: padding={self.padding!r} is unknown; give one of {', '.join(get_args(Padding))}.")

    def alone(self, lengths: Num[np.ndarray, "items"]) -> Float64[np.ndarray, "items"]:
        """Cost of each item in a batch of its own; it never falls as the length grows."""
        rows = np.asarray(lengths, dtype=np.float64)
        if self.quadratic:
            costs = rows * self.quadratic
            costs += self.linear
            costs *= rows
        else:
            costs = rows * self.linear
        if self.fixed:
            costs += self.fixed
        return costs


def loads(
    lengths: Int64[np.ndarray, "items"], bin_of: Int64[np.ndarray, "items"], bins: int, cost: Cost
) -> Num[np.ndarray, "bins"]:
    """Cost of every bin, from the rows and the bin of each item; 0 where a bin has no item."""
    if cost.padding == "none":
        return np.bincount(bin_of, weights=cost.alone(lengths), minlength=bins)
    rising = descending(lengths)[::-1]
    longest = np.zeros(bins)
    longest[bin_of[rising]] = lengths[rising]  # of several items of a bin numpy keeps the last, which is the longest
    items = np.bincount(bin_of, minlength=bins)
    if cost.padding == "full":
        return items * cost.alone(longest)
    own = np.bincount(bin_of, weights=lengths, minlength=bins) * cost.linear
    return own + items * (cost.fixed + cost.quadratic * longest**2)


def additive_bound(falling: Num[np.ndarray, "items"], bins: int, speeds: Speeds = None) -> float:
    """A value that the largest ``sum of costs / speed`` of no assignment of items of falling cost is below.

    With equal speeds it is the largest of the mean and, for every k, the k + 1 least of the k * bins + 1 largest items,
    because some bin has k + 1 of these. With unequal speeds it is the largest of all items on all bins and, for every
    k, the k largest items on the k fastest bins.
    """
    n = len(falling)
    if not n:
        return 0.0
    if speeds is None:
        least = float(falling.sum()) / bins
        for more in range(min((n - 1) // bins, DEEP) + 1):
            last = more * bins + 1
            least = max(least, float(falling[last - more - 1 : last].sum()))
        return least
    fastest = np.sort(speeds)[::-1]
    first = min(n, bins)
    together = np.cumsum(falling[:first]) / np.cumsum(fastest[:first])
    return max(float(falling.sum() / speeds.sum()), float(together.max()))


def fit_cost(
    batches: Sequence[Num[np.ndarray, "_items"]], seconds: Sequence[float] | Float64[np.ndarray, "batches"]
) -> Cost:
    """Fit a cost without padding to measured times by non-negative least squares of the relative errors.

    Args:
        batches: rows of each item, one array per measured batch; empty batches are left out.
        seconds: time of each batch.

    Raises:
        ConfigError: there is not one time per batch, no batch has an item, or a time is not above 0.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if len(times) != len(batches):
        raise ConfigError(f"fit_cost: {len(batches)} batches but {len(times)} times; give one time per batch.")
    filled = [i for i, batch in enumerate(batches) if len(batch)]
    times = times[filled]
    if not len(times) or not np.all(np.isfinite(times) & (times > 0)):
        raise ConfigError(
            f"fit_cost: {len(times)} batches with items, shortest time {times.min(initial=np.inf)} s; "
            "give at least one batch with an item, and times above 0."
        )
    rows = [np.asarray(batches[i], dtype=np.float64) for i in filled]
    terms = np.array([(len(r), r.sum(), (r * r).sum()) for r in rows])
    scaled = terms / times[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0
    fixed, linear, quadratic = nnls(scaled / size, np.ones(len(times)))[0] / size
    return Cost(float(linear), float(quadratic), float(fixed))
