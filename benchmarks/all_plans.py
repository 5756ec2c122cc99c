"""All ways to train a small model of one encoder and one language model on few ranks, for comparison with a plan.

They are written out here, by loops of their own: nothing that the planner leaves out, orders or estimates is used. One
thing is: what fits into memory, by its formula, which says which problem is solved. They are

* both modules on the same ranks, on ranks of their own, or in one pipeline whose ranks may have the end of the encoder
  and the beginning of the language model, wherever it is cut; any ranks at the end may stay idle; the encoder's ranks
  come first, or last where the language model's tensor parallelism would cross a node otherwise,
* all degrees of tensor parallelism within nodes, pipelines of any length, instances that replicate and shard in any
  mixture, and any number of microbatches where the problem leaves it open,
* all schedules with all numbers of virtual stages, encoders that fill bubbles coarsely, finely or not at all, and
  frozen ones a step ahead or not; ``gpipe`` only where it holds no more microbatches than the formula of memory counts,
  and ahead only what has bubbles, or ranks of its own, to run in,
* parameters gathered as is the default and, where there is memory, once per step,
* recomputed only what has to be: of the modules that may be, no fewer would fit; all of their blocks, or one of every
  2, 3 or 4 where that fits.

Not varied: where modules without virtual stages are cut, and ``pieces``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations, product
from typing import NamedTuple

import numpy as np

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import Degrees

ENCODER, LANGUAGE_MODEL = MODULES = ("vision", "llm")
KINDS = ("one layout", "shared", "filled", "apart", "chain")
"""Whose ways they are: those filled are Optimus', those apart DistTrain's and Cornstarch's, chains Megatron-LM's."""


class Way(NamedTuple):
    """A candidate and what is known of it before it is simulated."""

    kind: str
    """One of ``KINDS``."""
    candidate: Candidate
    least: float
    """Seconds that a rank computes on average, of the ranks that have most: no step is shorter."""


def all_ways(planner: Planner, microbatches: int | None) -> Iterator[Way]:
    """All candidates.

    Args:
        microbatches: given; None: any.
    """
    cluster, samples = planner.evaluator.cluster, len(planner.evaluator.batches[0].samples)
    counts = [microbatches] if microbatches else range(1, samples + 1)
    for used in range(1, cluster.ranks + 1):
        for count in counts:
            shared = tuple(range(used))
            for ways in product(*(_degrees(planner, name, used) for name in MODULES)):
                yield from _settled(planner, (shared, shared), ways, count)
            for first in range(1, used):
                own = (tuple(range(first)), tuple(range(first, used)))
                other = (tuple(range(used - first, used)), tuple(range(used - first)))
                for ways in product(*(_degrees(planner, n, len(r)) for n, r in zip(MODULES, own, strict=True))):
                    inside = first % cluster.ranks_per_node % ways[1].tp == 0  # tensor parallelism crosses no node
                    yield from _settled(planner, own if inside else other, ways, count)
            yield from _chains(planner, used, count)


def _degrees(planner: Planner, name: str, ranks: int) -> Iterator[Degrees]:
    module = planner.evaluator.shape.modules[name]
    for tp in module.tp:
        for pp in range(1, module.blocks + 1):
            if ranks % (tp * pp) == 0 and planner.evaluator.cluster.ranks_per_node % tp == 0:
                dp = ranks // tp // pp
                yield from (Degrees(tp, pp, dp // n, n) for n in range(1, dp + 1) if dp % n == 0)


def _recomputed() -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(MODULES, n) for n in range(len(MODULES) + 1)))


def _settled(
    planner: Planner, ranks: tuple[tuple[int, ...], ...], ways: tuple[Degrees, ...], count: int
) -> Iterator[Way]:
    """What is recomputed, and all that follows, for modules on these ranks."""
    estimates, together = planner.estimates, ranks[0] == ranks[1]
    tried: dict[bool, list[frozenset[str]]] = {False: []}
    if not all(way.once for way in ways):
        tried[True] = []
    for again, whole in product(_recomputed(), tried):
        if any(smaller <= again for smaller in tried[whole]):
            continue
        blocks = {m: planner.evaluator.shape.modules[m].blocks for m in MODULES}
        for every in product(*(range(1, 1 + min(4, blocks[m])) if m in again else [0] for m in MODULES)):
            recompute = {m: Recompute(n) for m, n in zip(MODULES, every, strict=True) if n}
            given = {m: way._replace(recomputed=n, whole=whole) for m, way, n in zip(MODULES, ways, every, strict=True)}
            held = []
            for m, way in given.items():
                beside = given if together else {m: way}
                ahead = estimates.ahead_of(m, beside, count, not estimates.feeds(m) <= beside.keys())
                held.append(estimates.bytes(m, way, count, ahead))
            if (sum(held) if together else max(held)) > estimates.memory:
                continue
            tried[whole].append(again)
            layouts = {m: way.layout(own) for (m, way), own in zip(given.items(), ranks, strict=True)}
            alike, reshard = together and ways[0] == ways[1], "never" if whole else "auto"
            base = Candidate(layouts, count, recompute=recompute, reshard_after_forward=reshard)
            works = (estimates.work(m, w.tp, n) for (m, w), n in zip(given.items(), every, strict=True))
            busy = [work.total * way.tp / way.ranks for work, way in zip(works, ways, strict=True)]
            least = sum(busy) if together else max(busy)
            for candidate in _scheduled(planner, base):
                filled = candidate.fill != "none" or (together and candidate.prefetch)
                kind = "one layout" if alike else "apart" if not together else "filled" if filled else "shared"
                yield Way(kind, candidate, least)


def _scheduled(planner: Planner, base: Candidate) -> Iterator[Candidate]:
    """With all schedules, with and without filling and prefetch."""
    layouts, blocks = base.layouts, {n: m.blocks for n, m in planner.evaluator.shape.modules.items()}
    piped = [name for name in MODULES if layouts[name].pp > 1]
    schedules = ["1f1b", *["zb_h1"] * bool(piped)]
    if piped and base.microbatches <= max(layouts[name].pp for name in piped):
        schedules.append("gpipe")
    ways = [replace(base, schedule=schedule) for schedule in schedules]
    free = [name for name in piped if layouts[name].split is None]
    for style, schedule, most in (("loop", "interleaved_1f1b", max(blocks.values())), ("v", "zbv", 2)):
        for each in product(*(range(1, min(most, blocks[name] // layouts[name].pp) + 1) for name in free)):
            if any(n > 1 for n in each):
                cut = {n: replace(layouts[n], vpp=v, pp_style=style) for n, v in zip(free, each, strict=True) if v > 1}  # type: ignore[arg-type]
                ways.append(replace(base, layouts={**layouts, **cut}, schedule=schedule))
    shares, bubbles = {*layouts[ENCODER].ranks} & {*layouts[LANGUAGE_MODEL].ranks}, layouts[LANGUAGE_MODEL].pp > 1
    fills = ("none", "fine", "coarse") if shares and bubbles else ("none",)
    frozen = not planner.evaluator.shape.modules[ENCODER].trained.any()
    early = frozen and (bubbles or not shares)
    for way, fill in product(ways, fills):
        if fill == "none" or way.layouts[ENCODER].vpp == 1:
            filled = replace(way, fill=fill)
            yield filled
            if early and way.layouts[ENCODER].vpp == 1:
                yield replace(filled, prefetch={ENCODER: 1})


def _chains(planner: Planner, used: int, count: int) -> Iterator[Way]:
    """One pipeline through both modules: all lengths and all cuts."""
    modules, cluster = planner.evaluator.shape.modules, planner.evaluator.cluster
    blocks = sum(m.blocks for m in modules.values())
    for tp in sorted(set.intersection(*(set(m.tp) for m in modules.values()))):
        for pp in range(2, blocks + 1):
            if used % (tp * pp) or cluster.ranks_per_node % tp:
                continue
            dp = used // tp // pp
            for shard in (n for n in range(1, dp + 1) if dp % n == 0):
                for ends in combinations(range(1, blocks), pp - 1):
                    cut = np.diff([0, *ends, blocks])
                    yield from _chain(planner, Degrees(tp, pp, dp // shard, shard), cut, count)


def _chain(planner: Planner, degrees: Degrees, cut: np.ndarray, count: int) -> Iterator[Way]:
    modules, estimates, each = planner.evaluator.shape.modules, planner.estimates, degrees.tp * degrees.dp
    of = np.repeat(np.arange(len(cut)), cut)
    for again in (False, True):
        given = degrees._replace(recomputed=again)
        if _held(planner, given, of, count) > estimates.memory:
            continue
        layouts, begin = dict[str, ModuleLayout](), 0
        for name in MODULES:
            mine = of[begin : begin + modules[name].blocks]
            begin += modules[name].blocks
            ranks = tuple(range(int(mine[0]) * each, (int(mine[-1]) + 1) * each))
            split = tuple(map(int, np.bincount(mine - mine[0])))
            layouts[name] = ModuleLayout(ranks, tp=degrees.tp, pp=len(split), dp_replicate=degrees.dp_replicate,
                                         dp_shard=degrees.dp_shard, split=split)  # fmt: skip
        recompute: Mapping[str, Recompute] = {m: Recompute() for m in MODULES if again}
        base = Candidate(layouts, count, recompute=recompute, reshard_after_forward="never")
        least = sum(estimates.work(m, given.tp, again).total for m in MODULES) * degrees.tp / degrees.ranks
        for candidate in _scheduled(planner, base):
            yield Way("chain", candidate, least)
        return


def _held(planner: Planner, degrees: Degrees, of: np.ndarray, count: int) -> float:
    """Bytes of the pipeline rank that has most."""
    modules, estimates = planner.evaluator.shape.modules, planner.estimates
    sums = [np.bincount(of, np.concatenate([getattr(m, what) for m in modules.values()])) / degrees.tp
            for what in ("parameters", "trained")]  # fmt: skip
    held = [estimates.holds(*numbers, degrees) for numbers in zip(*sums, strict=True)]
    saved = [np.full(m.blocks, estimates.activations(n, degrees, count) / m.blocks) for n, m in modules.items()]
    in_flight = np.minimum(np.arange(degrees.pp, 0, -1), count)
    return float((held + np.bincount(of, np.concatenate(saved)) * in_flight).max())
