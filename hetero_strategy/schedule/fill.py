"""Where programs of cohorts run among those of the pipeline on their ranks. Pure.

``coarse`` is Optimus' algorithm 2: forwards before the pipeline's first action on a rank and backwards after its last
one, where its bubbles of warm-up and cool-down are; ``decoupled`` is the same of encoders that keep no activations
meanwhile (``parallelize.recompute``). ``fine`` also uses those between its actions where that is shorter:
a rank that idles takes what it may run next, see ``schedule.merge``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action_index import ActionIndex

PATIENCE = (0.0, 0.5, 1.0)
"""Long actions that fill hold up a pipeline whose next one is about to be ready; short ones lose by waiting for it."""


class Attempt(NamedTuple):
    """One way to fill."""

    lead: int = 0
    """Forwards of each program before its ranks do anything else."""
    last: bool = False
    """Backwards come after all else that the ranks do."""
    patience: float = 0.0
    """See ``Merge``."""


def attempts(
    fill: str,
    numbers: ActionIndex,
    bounds: Mapping[str, int],
    modules: Collection[str],
    filling: Iterable[tuple[int, ...]],
    beside: bool,
) -> list[Attempt]:
    """What to try, of which the shortest is taken.

    Args:
        modules: that fill.
        filling: lanes of each program that fills. Where they need several, these hardly ever idle at once later.
        beside: they run beside others, and hold none up.

    Raises:
        ScheduleError: ``coarse`` holds more microbatches than the bounds allow.
    """
    lines = list(zip(numbers.nodes, numbers.counts, numbers.backward, strict=True))
    own = [(n.module, count, back) for n, count, back in lines if n.module in modules]
    if not own:
        return [Attempt()]
    too_many = [module for module, count, back in own if back and bounds.get(module, count) < count]
    around_only = fill in ("coarse", "decoupled")
    if around_only and too_many:
        raise ScheduleError(
            f"fill={fill!r} holds all microbatches of {too_many[0]}, max_in_flight allows {bounds[too_many[0]]}: raise"
            " it, or take fill='fine'"
        )
    around = [] if too_many else [Attempt(numbers.units, last=True)]
    if around_only:
        return around
    if beside:
        return [Attempt()]
    wide = any(len(on) > 1 for on in filling)
    ahead = [1 << k for k in range(max(numbers.counts).bit_length())] if wide else []
    return [*(Attempt(patience=share) for share in PATIENCE), *(Attempt(lead) for lead in ahead), *around]


def forwards_first(
    numbers: ActionIndex,
    lists: Sequence[Sequence[int]],
    lanes: Sequence[tuple[int, ...]],
    fills: Sequence[bool],
    lead: int,
) -> None:
    """Let so many forwards that fill come before all that others do on their lanes, but for those that no action waits
    for: they are of the next step.
    """
    for own, other in _pairs(lists, lanes, fills):
        if own[0] < numbers.units and any(numbers.after[a] for a in own):
            numbers.precede(own[min(lead, len(own)) - 1], other[0])


def backwards_last(
    numbers: ActionIndex, lists: Sequence[Sequence[int]], lanes: Sequence[tuple[int, ...]], fills: Sequence[bool]
) -> None:
    """Let backwards that fill come after all that others do on their lanes."""
    for own, other in _pairs(lists, lanes, fills):
        if own[0] >= numbers.units:
            numbers.precede(next(a for a in reversed(other) if a < 2 * numbers.units), own[0])


def _pairs(
    lists: Sequence[Sequence[int]], lanes: Sequence[tuple[int, ...]], fills: Sequence[bool]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """A program that fills and one that does not, for all that share lanes."""
    for own, on in zip(compress(lists, fills), compress(lanes, fills), strict=True):
        for other, there, filling in zip(lists, lanes, fills, strict=True):
            if not filling and not set(on).isdisjoint(there):
                yield own, other
