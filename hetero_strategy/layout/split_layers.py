"""Split the layers of a module into contiguous stages, exactly. Pure.

Work is counted in whole parts of 2^-30 of the sum, so that ties are exact and every process finds the same split. The
result is exact to (layers + stages) x 2^-30 of the sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int64
from numpy.lib.stride_tricks import sliding_window_view

from hetero_strategy import ragged
from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import Pipeline

_PARTS = 2**30
_NEVER = 2**61
"""More than the square of all work; twice it still fits int64."""


def split(costs: Sequence[float] | Float[np.ndarray, "layers"], stages: int, first: int = 1) -> tuple[int, ...]:
    """Return the number of layers of each stage such that the largest stage costs least.

    Among such splits the one with the smallest sum of squared stage costs is taken, and among these one with short
    early stages, which hold the activations of more microbatches. Dynamic programming, O(layers^2 * stages).

    Args:
        costs: costs of the layers, such as ``Passes.total``. Parts that always go with the first or last layer
            (embedding, head, projector) belong to its cost.
        first: number of layers that the first stage has at least.
    """
    work = np.asarray(costs, np.float64)
    if stages < 1 or len(work) - first + 1 < stages:
        together = f", of which the first {first} are one stage's," * (first > 1)
        raise LayoutError(
            f"{len(work)} layers{together} cannot be split into {stages} stages: use {len(work) - first + 1} stages or"
            " fewer"
        )
    if not (np.isfinite(work) & (work >= 0)).all():
        raise ValueError("costs of layers must be finite and not negative")
    if not work.any():
        work = np.ones_like(work)
    work = np.concatenate([work[:first].sum(keepdims=True), work[first:]])
    ends = ragged.offsets(np.rint(work / work.sum() * _PARTS)).astype(np.int64)
    largest = _largest(ends.tolist(), stages) + len(work) + stages  # rounding must not separate equal stages
    counts = _least_sum(ends, stages, largest)
    return counts[0] + first - 1, *counts[1:]


def split_into(
    pipeline: Pipeline, costs: Sequence[float] | Float[np.ndarray, "layers"], first: int = 1
) -> tuple[int, ...]:
    """Return the number of layers of each stage of a pipeline, see :func:`split`.

    With consecutive stages, layers are split over ranks first, and then each rank's layers over its stages.
    """
    if pipeline.style != "consecutive":
        return split(costs, pipeline.stages, first)
    ends = ragged.offsets(np.asarray(split(costs, pipeline.pp, first)))
    return tuple(n for a, b in pairwise(ends) for n in split(costs[a:b], pipeline.vpp, first if a == 0 else 1))


def _largest(ends: list[int], stages: int) -> int:
    """Return the least cost of the largest stage, by bisection between possible costs of stages.

    Args:
        ends: cost of all layers before each layer, and of all layers.
    """
    total = ends[-1]
    most = low = max(-(-total // stages), max(b - a for a, b in pairwise(ends)))
    high = total
    while low < high:
        end, largest, least_more = 0, 0, total
        for _ in range(stages):
            begin, end = end, bisect_right(ends, ends[end] + most) - 1
            largest = max(largest, ends[end] - ends[begin])
            if end == len(ends) - 1:
                high = largest
                break
            least_more = min(least_more, ends[end + 1] - ends[begin])
        else:
            low = least_more
        most = (low + high) // 2
    return low


def _least_sum(ends: Int64[np.ndarray, "layers+1"], stages: int, largest: int) -> tuple[int, ...]:
    """Return the layers of each stage such that the sum of their squared costs is least.

    Args:
        ends: cost of all layers before each layer, and of all layers.
        largest: most cost of a stage.
    """
    layer = np.arange(len(ends))
    width = int((layer - np.searchsorted(ends, ends - largest)).max())
    # Arrays ``[layers + 1, width]``: a stage by the layer after its last, and by its first, up to ``width`` layers
    # earlier.
    first = layer[:, None] - width + np.arange(width)
    costs = ends[:, None] - ends[np.maximum(first, 0)]
    squares = np.where((first >= 0) & (costs <= largest), np.minimum(costs, 2 * _PARTS) ** 2, _NEVER)
    best, choices = np.full(width + len(ends), _NEVER), []
    best[width] = 0
    before = sliding_window_view(best, width)[:-1]
    for _ in range(stages):
        reached = before + squares
        choices.append(first[layer, chosen := reached.argmin(axis=1)])
        best[width:] = np.minimum(reached[layer, chosen], _NEVER)
    end, counts = len(ends) - 1, []
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(counts))
