"""Where a module's stages begin: exact contiguous splits of its layers. Pure.

Work is counted in whole parts of 2^-30 of the sum, so that ties are ties and every process finds the same split. The
result is exact to (layers + stages) x 2^-30 of the sum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from hetero_strategy import ragged
from hetero_strategy.errors import LayoutError

_PARTS = 2**30
_NEVER = 2**61
"""More than the square of all work; twice it still fits int64."""


def split(costs: Sequence[float] | Float[np.ndarray, "layers"], stages: int) -> tuple[int, ...]:
    """Number of layers of each stage such that the largest stage costs least.

    Among such splits the one with the smallest sum of squared stage costs is taken, and among these one with short
    early stages, which hold the activations of more microbatches. Dynamic programming, O(layers^2 * stages).

    Args:
        costs: costs of the layers, such as ``Passes.total``. What always goes with the first or the last
            layer (embedding, head, projector) belongs to that layer's cost.

    Raises:
        LayoutError: there are fewer layers than stages.
        ValueError: a cost is negative or not finite.
    """
    work = np.asarray(costs, np.float64)
    if stages < 1 or len(work) < stages:
        raise LayoutError(f"{len(work)} layers cannot be split into {stages} stages: use {len(work)} stages or fewer")
    if not (np.isfinite(work) & (work >= 0)).all():
        raise ValueError("costs of layers must be finite and not negative")
    if not work.any():
        work = np.ones_like(work)
    ends = ragged.offsets(np.rint(work / work.sum() * _PARTS)).astype(np.int64)
    layer = np.arange(len(ends))
    # Cost of a stage by its first layer and the layer after its last, int64 [layers + 1, layers + 1].
    table = np.where(layer[None, :] > layer[:, None], ends[None, :] - ends[:, None], _NEVER)
    largest = _largest(ends.tolist(), stages) + len(work) + stages  # rounding must not tell equal stages apart
    squares = np.where(table <= largest, np.minimum(table, 2 * _PARTS) ** 2, _NEVER)
    return _least_sum(squares, stages)


def _largest(ends: list[int], stages: int) -> int:
    """The least that the largest stage can cost, by bisection.

    Args:
        ends: cost of all layers before each, and of all.
    """

    def enough(most: int) -> bool:
        end = 0
        for _ in range(stages):
            end = bisect_right(ends, ends[end] + most) - 1
        return end == len(ends) - 1

    return bisect_left(range(ends[-1]), True, key=enough)


def _least_sum(table: np.ndarray, stages: int) -> tuple[int, ...]:
    """Layers of each stage such that their costs sum to least."""
    best, choices = np.full(len(table), _NEVER), []
    best[0] = 0
    for _ in range(stages):
        reached = np.minimum(best[:, None] + table, _NEVER)
        choices.append(np.argmin(reached, axis=0))
        best = reached.min(axis=0)
    end, counts = len(best) - 1, []
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(counts))
