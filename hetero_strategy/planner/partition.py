"""Where a module's stages begin: exact contiguous splits of its layers. Pure.

Work is counted in whole parts of 2^-30 of the sum, so that ties are ties and every process finds the same split. The
result is exact to (layers + stages) x 2^-30 of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.errors import LayoutError

_PARTS = 2**30
_NEVER = 2**61
"""More than the square of all work; twice it still fits int64."""


def split(
    costs: Sequence[float] | np.ndarray, stages: int, *, minimum: int = 1, extra: Sequence[float] | np.ndarray = ()
) -> tuple[int, ...]:
    """Number of layers of each stage such that the largest stage costs least.

    Among such splits the one with the smallest sum of squared stage costs is taken, and among these one with short
    early stages, which hold the activations of more microbatches. Dynamic programming, O(layers^2 * stages).

    Args:
        costs: costs of the layers, ``[layers]``, such as ``Passes.total``. What always goes with the first or the last
            layer (embedding, head, projector) belongs to that layer's cost: see ``Passes.staged``.
        minimum: fewest layers of a stage.
        extra: cost of each stage besides its layers, ``[stages]``, such as another module's work on the same ranks.

    Raises:
        LayoutError: there are fewer layers than the stages need.
        ValueError: a cost is negative or not finite, or ``extra`` is not one per stage.
    """
    work = np.asarray(costs, np.float64)
    if stages < 1 or minimum < 1 or len(work) < stages * minimum:
        raise LayoutError(
            f"{len(work)} layers cannot be split into {stages} stages of at least {minimum} each: "
            f"use {max(1, len(work) // max(1, minimum))} stages or fewer"
        )
    more = np.asarray(extra, np.float64) if len(extra) else np.zeros(stages)
    if more.shape != (stages,):
        raise ValueError(f"extra has shape {more.shape}: one cost for each of {stages} stages is needed")
    if not all(np.isfinite(x).all() and (x >= 0).all() for x in (work, more)):
        raise ValueError("costs of layers and stages must be finite and not negative")
    whole = work.sum() + more.sum()
    if not whole:
        work, whole = np.ones_like(work), float(len(work))
    tables = _stage_tables(np.rint(work / whole * _PARTS), np.rint(more / whole * _PARTS), minimum)
    largest, _ = _shortest(tables, np.maximum)
    largest += len(work) + stages  # rounding must not tell equal stages apart
    _, counts = _shortest([np.where(t <= largest, np.minimum(t, 2 * _PARTS) ** 2, _NEVER) for t in tables], np.add)
    return counts


def _stage_tables(work: np.ndarray, more: np.ndarray, minimum: int) -> list[np.ndarray]:
    """Cost of each stage by its first layer and the layer after its last, int64 ``[layers + 1, layers + 1]``."""
    ends = ragged.offsets(work).astype(np.int64)
    layer = np.arange(len(ends))
    allowed = layer[None, :] - layer[:, None] >= minimum
    return [np.where(allowed, ends[None, :] - ends[:, None] + int(m), _NEVER) for m in more]


def _shortest(tables: Sequence[np.ndarray], join: np.ufunc) -> tuple[int, tuple[int, ...]]:
    """The least that the costs of all stages, joined by ``join``, can come to, and the layers of each stage then."""
    best, choices = np.full(len(tables[0]), _NEVER), []
    best[0] = 0
    for table in tables:
        reached = np.minimum(join(best[:, None], table), _NEVER)
        choices.append(np.argmin(reached, axis=0))
        best = reached.min(axis=0)
    end, counts = len(best) - 1, []
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end = int(choice[end])
    return int(best[-1]), tuple(reversed(counts))
