"""One pipeline through all modules, whose ranks may host the end of one module and the beginning of the next. Pure.

It is how Megatron-LM lays out a multimodal model: an encoder on the first pipeline ranks of the language model, with
its degrees of tensor and data parallelism, and blocks dealt out so that all ranks have as much to do (Optimus,
arXiv:2408.03505, section 5.1, "Megatron-LM balanced").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees, ways


class Chain(NamedTuple):
    """Where the pipeline's ranks are cut."""

    degrees: Degrees
    """Of the whole: ``pp`` pipeline ranks, through which every microbatch goes once."""
    stages: Mapping[str, tuple[int, tuple[int, ...]]]
    """Module -> the pipeline rank of its first stage, and the blocks of its stages, of which each rank has one."""

    def layouts(self, ranks: Sequence[int]) -> dict[str, ModuleLayout]:
        """Of all modules."""
        tp, replicate, shard = self.degrees.tp, self.degrees.dp_replicate, self.degrees.dp_shard
        each = self.degrees.ranks // self.degrees.pp
        return {
            name: ModuleLayout(
                tuple(ranks[first * each : (first + len(blocks)) * each]),
                tp=tp, pp=len(blocks), dp_replicate=replicate, dp_shard=shard, cp=self.degrees.cp, split=blocks,
            )
            for name, (first, blocks) in self.stages.items()
        }  # fmt: skip


def chain_degrees(shape: ModelShape, ranks: int, ranks_per_node: int, most_instances: int) -> Iterator[Degrees]:
    """All ways to lay one pipeline over so many ranks, where every module can be cut anywhere."""
    if not all(module.cuttable for module in shape.modules.values()):
        return iter(())
    blocks = sum(module.blocks for module in shape.modules.values())
    tp = sorted(set.intersection(*(set(module.tp) for module in shape.modules.values())))
    return (way for way in ways(tp, blocks, ranks, ranks_per_node, most_instances) if way.pp > 1)


def propose_chain(
    estimates: Estimates, shape: ModelShape, degrees: Degrees, microbatches: int, below: float
) -> tuple[float, Chain] | None:
    """Cut the pipeline so that its slowest rank takes least, and estimate the step.

    All blocks are recomputed where they would not fit otherwise. None: they do not fit even then, or the step would
    take ``below`` seconds or more even if all ranks had as much to do.
    """
    later = (microbatches - 1) / microbatches
    for again in (False, True):
        given = degrees._replace(recomputed=again)
        if not all(estimates.given.allows(n, given.tp, again and m.has_blocks) for n, m in shape.modules.items()):
            continue
        works = {name: estimates.work(name, given.tp, again and m.has_blocks) for name, m in shape.modules.items()}
        uneven = {name: estimates.unevenness(name, given.dp, microbatches) / given.dp for name in works}
        blocks = np.concatenate([work.seconds * uneven[name] for name, work in works.items()])
        fixed = sum(work.fixed for work in works.values())
        through = blocks.sum() / microbatches + fixed
        if through + blocks.sum() / given.pp * later >= below:
            return None
        counts = np.array(estimates.cut(given.tp, given.pp, again))
        starts = np.cumsum(counts) - counts
        held, trained = (
            np.add.reduceat(np.concatenate([getattr(m, kind) for m in shape.modules.values()]), starts) / given.tp
            for kind in ("parameters", "trained")
        )
        per_block = [estimates.activations(n, given, microbatches) / m.blocks for n, m in shape.modules.items()]
        kept = np.repeat(per_block, [m.blocks for m in shape.modules.values()])
        in_flight = np.minimum(np.arange(given.pp, 0, -1), microbatches)
        memory = [estimates.holds(*numbers, given) for numbers in zip(held, trained, strict=True)]
        if (memory + np.add.reduceat(kept, starts) * in_flight).max() > estimates.memory:
            continue
        seconds = sum(work.total for work in works.values())
        share = sum(float(work.forward.sum()) for work in works.values()) / seconds if seconds else 0.0
        forwards = share * through / given.pp * np.arange(1, given.pp + 1)
        backwards = (1 - share) * through / given.pp * np.arange(given.pp)
        stages = zip(held, trained, counts, forwards, backwards, strict=True)
        waits = max(estimates.waits(own, trains, n, given, f, b) for own, trains, n, f, b in stages)
        slowest = np.add.reduceat(blocks, starts).max() + microbatches * fixed / given.pp
        return float(slowest * later + through + waits), Chain(given, _stages(shape, counts))
    return None


def moved(shape: ModelShape, layouts: Mapping[str, ModuleLayout]) -> Iterator[dict[str, ModuleLayout]]:
    """One pipeline through all modules with one block more on a rank and one less on a neighbour, also of another
    module; nothing where that is not what the layouts are.
    """
    first, *others = (layout for layout in layouts.values())
    of = Degrees.of(first)
    alike = all(Degrees.of(x)._replace(pp=of.pp) == of for x in others)
    ranks, each = sorted({rank for layout in layouts.values() for rank in layout.ranks}), of.ranks // of.pp
    if not alike or len(ranks) % each or any(layout.split is None for layout in layouts.values()):
        return
    counts = np.zeros(len(ranks) // each, np.int64)
    degrees = of._replace(pp=len(counts))
    for name, module in shape.modules.items():
        begin, split = ranks.index(layouts[name].ranks[0]) // each, layouts[name].split or ()
        if begin + len(split) > len(counts):
            return
        counts[begin : begin + len(split)] += split if module.has_blocks else 1
    if counts.all() and Chain(degrees, _stages(shape, counts)).layouts(ranks) == dict(layouts):
        for border, more in product(range(len(counts) - 1), (1, -1)):
            other = counts.copy()
            other[border] += more
            other[border + 1] -= more
            if other.all():
                yield Chain(degrees, _stages(shape, other)).layouts(ranks)


def _stages(shape: ModelShape, counts: np.ndarray) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Stages of every module, where the pipeline ranks have so many blocks of all modules together."""
    of = np.repeat(np.arange(len(counts)), counts)
    stages, begin = {}, 0
    for name, module in shape.modules.items():
        ranks = of[begin : begin + module.blocks]
        begin += module.blocks
        blocks = np.bincount(ranks - ranks[0]) if module.has_blocks else np.zeros(1, np.int64)
        stages[name] = int(ranks[0]), tuple(map(int, blocks))
    return stages
