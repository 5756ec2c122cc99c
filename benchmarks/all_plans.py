"""All ways to train a small model of one encoder and one language model on few ranks, for comparison with a plan.

They are written out here, by loops of their own: nothing that the planner leaves out, orders or estimates is used. One
thing is: what fits into memory, by its formula, which says which problem is solved. They are

* both modules on the same ranks, or on ranks of their own; any ranks at the end may stay idle; the encoder's ranks come
  first, or last where the language model's tensor parallelism would cross a node otherwise,
* all degrees of tensor and context parallelism within nodes, all degrees of expert parallelism, pipelines of any
  length, instances that replicate and shard in any mixture, and any number of microbatches where the problem leaves it
  open,
* all schedules with all numbers of virtual stages, and encoders that fill bubbles or not;
  ``gpipe`` only where it holds no more microbatches than the formula of memory counts,
* parameters gathered as is the default and, where there is memory, once per step,
* recomputed only what has to be: of the modules that may be, no fewer would fit; all of their blocks, or one of every
  2, 3 or 4 where that fits.

Not varied: where modules without virtual stages are cut, and ``pieces``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from typing import NamedTuple

from hetero_strategy.model.spec import ModuleSpec
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import Degrees

ENCODER, LANGUAGE_MODEL = MODULES = ("vision", "llm")
KINDS = ("one layout", "shared", "filled", "apart")
"""Whose ways they are: those filled are Optimus', those apart DistTrain's and Cornstarch's."""


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
                    inside = first % cluster.ranks_per_node % ways[1].neighbours == 0  # instances cross no node
                    yield from _settled(planner, own if inside else other, ways, count)


def _degrees(planner: Planner, name: str, ranks: int) -> Iterator[Degrees]:
    module, on_node = planner.evaluator.shape.modules[name], planner.evaluator.cluster.ranks_per_node
    for tp, cp in product(module.tp, range(1, on_node + 1) if module.keys else [1]):
        for pp in range(1, module.blocks + 1):
            if ranks % (tp * cp * pp) == 0 and on_node % (tp * cp) == 0:
                dp = ranks // tp // cp // pp
                shards = (n for n in range(1, dp + 1) if dp % n == 0)
                every = ((n, ep) for n in shards for ep in _experts(module, n * cp, tp))
                yield from (Degrees(tp, pp, dp // n, n, cp=cp, ep=ep) for n, ep in every)


def _experts(module: ModuleSpec, shards: int, tp: int) -> Iterator[int]:
    yield 1
    for ep in range(2, shards * tp + 1):
        left = shards * tp // ep
        if module.experts is not None and left * ep == shards * tp:
            layers = module.experts.sizes
            if all(n % ep == 0 and (n // ep % left == 0 or not any(k % left for k in sizes)) for n, *sizes in layers):
                yield ep


def _recomputed() -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(MODULES, n) for n in range(len(MODULES) + 1)))


def _settled(
    planner: Planner, ranks: tuple[tuple[int, ...], ...], ways: tuple[Degrees, ...], count: int
) -> Iterator[Way]:
    """Yield the ways to recompute, gather, cut and schedule modules on these ranks."""
    estimates, together = planner.estimates, ranks[0] == ranks[1]
    tried: dict[bool, list[frozenset[str]]] = {False: []}
    if not all(way.once for way in ways):
        tried[True] = []
    for again, whole in product(_recomputed(), tried):
        if any(smaller <= again for smaller in tried[whole]):
            continue
        blocks = {m: planner.evaluator.shape.modules[m].blocks for m in MODULES}
        for every in product(*(range(1, 1 + min(4, blocks[m])) if m in again else [0] for m in MODULES)):
            chosen = {m: (Recompute(n),) if n else () for m, n in zip(MODULES, every, strict=True)}
            given = {m: w._replace(transforms=chosen[m], whole=whole) for m, w in zip(MODULES, ways, strict=True)}
            held = []
            for m, way in given.items():
                beside = given if together else {m: way}
                pp = {n: x.pp for n, x in beside.items()}
                ahead = estimates.ahead_of(m, pp, count, not estimates.feeds(m) <= beside.keys())
                held.append(estimates.bytes(m, way, count, ahead))
            if (sum(held) if together else max(held)) > estimates.memory:
                continue
            tried[whole].append(again)
            layouts = {m: way.layout(own) for (m, way), own in zip(given.items(), ranks, strict=True)}
            alike, reshard = together and ways[0] == ways[1], "never" if whole else "auto"
            base = Candidate(layouts, count, transforms=chosen, reshard_after_forward=reshard)
            works = (estimates.work(m, w.tp, w.transforms, w.cp, w.ep) for m, w in given.items())
            busy = [work.total * way.neighbours / way.ranks for work, way in zip(works, ways, strict=True)]
            least = sum(busy) if together else max(busy)
            for candidate in _scheduled(planner, base):
                shared = "shared" if candidate.fill == "none" else "filled"
                kind = "one layout" if alike else "apart" if not together else shared
                yield Way(kind, candidate, least)


def _scheduled(planner: Planner, base: Candidate) -> Iterator[Candidate]:
    """Yield it with all schedules, with and without filling."""
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
    fills = ("none", "fine") if shares and bubbles else ("none",)
    for way, fill in product(ways, fills):
        if fill == "none" or way.layouts[ENCODER].vpp == 1:
            yield replace(way, fill=fill)
