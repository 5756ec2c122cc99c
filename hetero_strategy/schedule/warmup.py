"""How far ahead a module must, should and may run its forwards before each of its backwards. Pure.

A backward waits for the backwards of what its rows went into, which wait for forwards, which wait for rows: so the
number of forwards before each backward is passed from a module to those that feed it, from sinks up. On a chain it
gives 1F1B's warm-ups (``stages - s - 1``), on several encoders of different depth Cornstarch's (encoder stages after
``s`` + LLM stages). Bounds on microbatches in flight are passed the other way, from sources down. StepWork in the words
of the target and of the source is related by ``StepWork.feeds`` and the spans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action import Span, StageGraph, StepWork


@dataclass(frozen=True)
class Link:
    """One module edge, in places (of microbatches among those with work) instead of numbers.

    Args:
        source, target: modules.
        first_target, last_target: per source place, the first and the last target place that it feeds, -1 for none.
        forwards: per number ``n`` of target places from the first on, how many source places they need; ``[n + 1]``.
    """

    source: str
    target: str
    first_target: tuple[int, ...]
    last_target: tuple[int, ...]
    forwards: tuple[int, ...]


def links(graph: StageGraph, work: StepWork) -> list[Link]:
    """Of all module edges between modules with work."""
    found = []
    places = {m: {s.number: i for i, s in enumerate(spans)} for m, spans in work.microbatches.items()}
    pairs = dict.fromkeys((s.module, t.module) for s, t in graph.edges if s.module != t.module)
    for source, target in pairs:
        if not work.microbatches.get(source) or not work.microbatches.get(target):
            continue
        first = [-1] * len(places[source])
        last = first.copy()
        needed = [0] * len(places[target])
        for p, q in work.feeds.get((source, target), ()):
            i, k = places[source][p], places[target][q]
            first[i] = k if first[i] < 0 else min(first[i], k)
            last[i] = max(last[i], k)
            needed[k] = max(needed[k], i + 1)
        found.append(Link(source, target, tuple(first), tuple(last), tuple(accumulate([0, *needed], max))))
    return found


def needs(
    link: Link, source: Sequence[Span], target: Sequence[Span], leads: Sequence[int], slack: int
) -> tuple[list[int], list[int]]:
    """Source forwards that must and that should come before each source backward.

    Args:
        source, target: spans of its two modules.
        leads: per target place, forwards of the target's first stage before its backward of that place.
        slack: step microbatches that the source should be ahead of what it must, so that the target need not wait.
    """
    must, should = [], []
    firsts = [s.first for s in source]
    for k in link.last_target:
        ahead = 0 if k < 0 else leads[k]
        must.append(link.forwards[ahead])
        reach = target[ahead - 1].last + slack if ahead else -1
        should.append(bisect_right(firsts, reach) if slack else 0)
    return must, should


def caps(
    work: StepWork, edges: Sequence[Link], bounds: Mapping[str, int], bounded: Sequence[str]
) -> dict[str, list[int]]:
    """Most forwards of every module that may come before each of its backwards.

    Args:
        bounds: most microbatches in flight of a module's stages.
        bounded: modules with backwards, in topological order.

    Raises:
        ScheduleError: a bound of a module leaves one that it feeds without the rows of one microbatch.
    """
    found: dict[str, list[int]] = {}
    for module in bounded:
        spans = work.microbatches[module]
        cap = [min(len(spans), j + bounds.get(module, len(spans))) for j in range(len(spans))]
        for link in edges:
            if link.target != module or link.source not in found:
                continue
            for i, k in enumerate(link.last_target):
                if k >= 0:
                    reach = bisect_right(link.forwards, found[link.source][i]) - 1
                    if reach <= k:
                        raise ScheduleError(
                            f"{module} microbatch {spans[k].number} needs {link.forwards[k + 1] - i} microbatches of "
                            f"{link.source} at once, but max_in_flight allows {found[link.source][i] - i}: raise it, "
                            f"or put more items in one microbatch of {link.source}"
                        )
                    cap[k] = min(cap[k], reach)
        found[module] = list(accumulate(reversed(cap), min))[::-1]
    return found


def tight(graph: StageGraph, edges: Sequence[Link]) -> frozenset[tuple[str, str]]:
    """Module edges on which running ahead gains nothing: all that follows runs on the same ranks, so nothing waits."""
    ranks = {m: [graph.stages[n].ranks for chain in graph.chains[m] for n in chain] for m in graph.pipelines}
    alone: dict[str, bool] = {}
    for module in reversed(dict.fromkeys(n.module for n in graph.stages)):
        alone[module] = len(ranks[module]) == 1 and all(
            alone[e.target] and ranks[e.target] == ranks[module] for e in edges if e.source == module
        )
    return frozenset((e.source, e.target) for e in edges if alone[e.source] and alone[e.target])
