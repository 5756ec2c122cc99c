"""How many stages each module has, and where they begin: exact enumeration. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hetero_strategy.errors import LayoutError
from hetero_strategy.planner.layers import Passes
from hetero_strategy.planner.partition import split
from hetero_strategy.planner.predict import Edges, estimate, simulated

Seconds = Callable[[Mapping[str, Passes], Edges, int], float]
"""(times of every module's stages, edges, microbatches) -> seconds of a step: `predict.estimate` or `.simulated`."""


@dataclass(frozen=True)
class Allocation:
    """Stages of every module."""

    splits: Mapping[str, tuple[int, ...]]
    """Layers of each stage."""
    seconds: float
    """Predicted for a step."""

    @property
    def stages(self) -> dict[str, int]:
        """How many each module has."""
        return {name: len(counts) for name, counts in self.splits.items()}


def allocate(
    modules: Mapping[str, Passes],
    edges: Edges,
    microbatches: int,
    *,
    total: int | None = None,
    ranges: Mapping[str, Sequence[int]] | None = None,
    seconds: Seconds = estimate,
) -> Allocation:
    """Stage counts with the fewest rank-seconds per step (step time x stages), every module split optimally.

    After Cornstarch's algorithm 1 (arXiv:2503.11367), which tries every stage count of the LLM, gives each encoder the
    count whose stages take as long, and keeps what has the least iteration time. Here every combination is tried, so
    nothing is lost to that rule. With ``total`` given, the fewest rank-seconds are the shortest step. Ties: fewer
    stages, then the first in the order of ``ranges``.

    Args:
        modules: name -> times of its layers.
        edges: between modules.
        microbatches: of the step.
        total: stages of all modules together; None: any.
        ranges: module -> stage counts to try; default: from 1 to the number of its layers.
        seconds: what a step takes.

    Raises:
        LayoutError: no combination has ``total`` stages with a layer in each.
    """
    tried = {name: range(1, len(p.forward) + 1) for name, p in modules.items()} | dict(ranges or {})
    counts = {name: [n for n in tried[name] if 1 <= n <= len(p.forward)] for name, p in modules.items()}

    @cache
    def staged(name: str, stages: int) -> tuple[tuple[int, ...], Passes]:
        made = split(modules[name].total, stages)
        return made, modules[name].staged(made)

    best: tuple[float, int, Allocation] | None = None
    for combination in itertools.product(*counts.values()):
        size = sum(combination)
        if total is not None and size != total:
            continue
        parts = {name: staged(name, n) for name, n in zip(counts, combination, strict=True)}
        took = seconds({name: times for name, (_, times) in parts.items()}, edges, microbatches)
        if best is None or (took * size, size) < best[:2]:
            best = took * size, size, Allocation({name: made for name, (made, _) in parts.items()}, took)
    if best is None:
        limits = ", ".join(f"{name} {min(n, default=0)} to {max(n, default=0)}" for name, n in counts.items())
        raise LayoutError(f"no allocation of {total} stages: modules can have {limits}; change total or the ranges")
    return best[2]


def allocate_best(
    modules: Mapping[str, Passes],
    edges: Edges,
    microbatches: int,
    *,
    total: int | None = None,
    ranges: Mapping[str, Sequence[int]] | None = None,
) -> Allocation:
    """The frozen-aware allocation or the unaware one, whichever has fewer rank-seconds per step when simulated.

    The aware one has the faster slowest stage, but not always the faster step: in Cornstarch's own table 11 it loses in
    two rows of six. Choosing by simulation cannot lose to either.

    Args and errors: as `allocate`.
    """
    found = []
    for believed in (modules, {name: p.as_if_trained() for name, p in modules.items()}):
        splits = allocate(believed, edges, microbatches, total=total, ranges=ranges).splits
        really = {name: modules[name].staged(counts) for name, counts in splits.items()}
        found.append(Allocation(splits, simulated(really, edges, microbatches)))
    return min(found, key=lambda a: a.seconds * sum(a.stages.values()))
