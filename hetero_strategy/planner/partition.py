"""Where a module's stages begin: exact contiguous splits of its layers. Pure.

Work is counted in whole parts of 2^-30 of the sum, so that ties are ties and every machine finds the same split; it is
exact to (layers + stages) x 2^-30 of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.errors import LayoutError

_PARTS = 2**30
_NEVER = 2**61
"""More than the square of all work; twice it still fits int64."""


def split(
    costs: Sequence[float] | np.ndarray, stages: int, *, minimum: int = 1, extra: Sequence[float] | np.ndarray = ()
) -> tuple[int, ...]:
    """Layers of each stage such that the largest stage costs least, and among such splits the most even one.

    Most even: the smallest sum of squared stage costs. What is then still equal leaves the earlier stages shorter,
    because they hold more microbatches' activations. Dynamic programming, O(layers^2 * stages).

    Args:
        costs: of the layers, ``[layers]``, such as ``Passes.total``. What always goes with the first or the last layer
            (embedding, head, projector) belongs to that layer's cost: see ``Passes.staged``.
        stages: how many.
        minimum: fewest layers of a stage.
        extra: cost of each stage besides its layers, ``[stages]``, such as another module's work on the same ranks.

    Raises:
        LayoutError: fewer layers than the stages need.
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


def megatron_balanced(times: Mapping[str, Sequence[float]], pp: int, vpp: int = 1) -> tuple[dict[str, int], ...]:
    """The "Megatron-LM balanced" baseline of Optimus (arXiv:2408.03505, appendix B).

    All layers of encoder and LLM are one chain, cut into ``pp * vpp`` virtual stages of an interleaved 1F1B pipeline by
    ``F(l, m) = min over j < l of max(F(j, m - 1), t[j+1] + ... + t[l])``, ``F(l, 1) = t[1] + ... + t[l]``; a stage has
    at least one layer. Made for one encoder, as the paper says: several would have to be laid one after another, and
    would wait for each other for nothing.

    Args:
        times: by module in the order of the chain, of its layers (the paper estimates them from FLOPs).
        pp: pipeline ranks.
        vpp: virtual stages of each.

    Returns:
        For each virtual stage, how many layers it has of each module (modules without any are left out).

    Raises:
        LayoutError: fewer layers than virtual stages.
    """
    chain = np.concatenate([np.asarray(t, np.float64) for t in times.values()])
    if pp < 1 or vpp < 1 or len(chain) < pp * vpp:
        raise LayoutError(f"{len(chain)} layers cannot be split into {pp} x {vpp} virtual stages: use fewer")
    parts = np.rint(chain / (chain.sum() or 1.0) * _PARTS)
    _, counts = _shortest(_stage_tables(parts, np.zeros(pp * vpp), 1), np.maximum)
    owner = np.repeat(np.arange(len(times)), [len(t) for t in times.values()])
    names = list(times)
    return tuple(
        {names[m]: int(n) for m, n in zip(*np.unique(part, return_counts=True), strict=True)}
        for part in np.split(owner, np.cumsum(counts)[:-1])
    )


def _stage_tables(work: np.ndarray, more: np.ndarray, minimum: int) -> list[np.ndarray]:
    """For each stage: its cost by first layer and layer after the last, int64 ``[layers + 1, layers + 1]``."""
    ends = ragged.offsets(work).astype(np.int64)
    places = np.arange(len(ends))
    allowed = places[None, :] - places[:, None] >= minimum
    return [np.where(allowed, ends[None, :] - ends[:, None] + int(m), _NEVER) for m in more]


def _shortest(tables: Sequence[np.ndarray], join: np.ufunc) -> tuple[int, tuple[int, ...]]:
    """Cut points that make the costs of all stages, joined by ``join``, least: (that, layers of each stage)."""
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
