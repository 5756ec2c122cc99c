"""What a batch of items costs a module, what an assignment costs its instances, and the least that any can cost.

The forms are OrchMLLM's (equations 1 and 2, appendix A) with a constant part per item added. Costs are in any unit of
time: seconds where they were fitted (:func:`fit_cost`), else whatever the coefficients are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.optimize import nnls

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance.bounds import additive_bound
from hetero_strategy.plan.balance.greedy import descending
from hetero_strategy.plan.balance.runs import padded_runs

Padding = Literal["none", "full", "attention"]


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

    def alone(self, lengths: np.ndarray) -> np.ndarray:
        """Cost of a batch of that item alone, float64 ``[n]``; never falls with the length."""
        rows = np.asarray(lengths, dtype=np.float64)
        if self.quadratic:
            each = rows * self.quadratic
            each += self.linear
            each *= rows
        else:
            each = rows * self.linear
        if self.fixed:
            each += self.fixed
        return each


def loads(lengths: np.ndarray, where: np.ndarray, bins: int, cost: Cost) -> np.ndarray:
    """Cost of every bin, float64 ``[bins]``; 0 where it has no item.

    Args:
        lengths: rows of each item, int64 ``[n]``.
        where: bin of each item, int64 ``[n]``.
    """
    if cost.padding == "none":
        return np.bincount(where, weights=cost.alone(lengths), minlength=bins)
    rising = descending(lengths)[::-1]
    longest = np.zeros(bins)
    longest[where[rising]] = lengths[rising]  # of the items of a bin the last one, the longest, stays
    items = np.bincount(where, minlength=bins)
    if cost.padding == "full":
        return items * cost.alone(longest)
    own = np.bincount(where, weights=lengths, minlength=bins) * cost.linear
    return own + items * (cost.fixed + cost.quadratic * longest**2)


def lower_bound(lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None = None) -> float:
    """No assignment has a smaller ``max(load / speed)``.

    The cost of all items alone, spread over all bins, and bounds from the largest items
    (:func:`~hetero_strategy.plan.balance.bounds.additive_bound`); with full padding and equal speeds the bound that
    the search for the shortest runs, which are optimal, cannot undercut.

    Args:
        lengths: rows of each item, int64 ``[n]``.
        speeds: of each bin, float64 ``[bins]``; None: 1.
    """
    alone = np.sort(cost.alone(lengths))[::-1]
    if speeds is not None and np.ptp(speeds):
        return additive_bound(alone, bins, np.asarray(speeds, dtype=np.float64))
    least = additive_bound(alone, bins)
    if cost.padding == "full":
        found = padded_runs(alone, bins)
        least = least if found is None else max(least, found[0])
    return least / (1.0 if speeds is None else float(speeds[0]))


def fit_cost(batches: Sequence[np.ndarray], seconds: Sequence[float] | np.ndarray, padding: Padding = "none") -> Cost:
    """The cost whose times are nearest to measured ones, by non-negative least squares of the relative errors.

    Args:
        batches: rows of each item, one array per measured batch.
        seconds: what each batch took.
        padding: form of the cost.

    Raises:
        ConfigError: not one time per batch, no batch with an item, or a time that is not above 0.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if len(times) != len(batches):
        raise ConfigError(f"fit_cost: {len(batches)} batches but {len(times)} times; give one time per batch.")
    kept = [i for i, batch in enumerate(batches) if len(batch)]
    times = times[kept]
    if not len(times) or not np.all(np.isfinite(times) & (times > 0)):
        raise ConfigError(
            f"fit_cost: {len(times)} batches with items, shortest time {times.min(initial=np.inf)} s; "
            "give at least one batch with an item, and times above 0."
        )
    terms = np.array([_terms(np.asarray(batches[i], dtype=np.float64), padding) for i in kept])
    scaled = terms / times[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0
    fixed, linear, quadratic = nnls(scaled / size, np.ones(len(times)))[0] / size
    return Cost(float(linear), float(quadratic), float(fixed), padding)


def _terms(rows: np.ndarray, padding: Padding) -> tuple[float, float, float]:
    """What fixed, linear and quadratic of a cost are multiplied with for one batch."""
    items, longest = len(rows), float(rows.max())
    own, squares = float(rows.sum()), float((rows * rows).sum())
    return items, items * longest if padding == "full" else own, squares if padding == "none" else items * longest**2
