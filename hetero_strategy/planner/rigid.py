"""Megatron-LM's usual layout of a model with encoders, as a peer of plans. Pure.

One layout for all modules: every encoder lies in the language model's tensor parallelism, with one instance for each
of the language model's, on the first pipeline stage, whose blocks are fewer by the encoder's work. Context-parallel
ranks all encode the same pictures, which takes as long as if one of them did (NVIDIA-NeMo/Megatron-Bridge, pull request
5645: "Every context-parallel rank currently encodes the full image set").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.partition import split
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees, degrees

MOST = 12
"""Usual layouts that are simulated."""


class Rigid(NamedTuple):
    """One such layout, and the seconds that it is estimated to take."""

    seconds: float
    candidate: Candidate


def rigid_layouts(
    shape: ModelShape, estimates: Estimates, llm: ModuleLayout, lighter: float = 1.0
) -> dict[str, ModuleLayout]:
    """Lay out encoders as usual around a language model.

    Args:
        llm: resolved, without ``split``.
        lighter: times the work of all encoders by which the first stage has less of the language model.
    """
    name = shape.samplewise[0]
    first, around, works = llm.stage_grid(0), dict[str, ModuleLayout](), 0.0
    for other, module in shape.modules.items():
        if other != name:
            tp = max(n for n in module.tp if n <= llm.tp and llm.tp % n == 0)
            ranks = tuple(map(int, first[:, :tp].flat))
            around[other] = ModuleLayout(ranks, tp=tp, dp_replicate=llm.dp_replicate, dp_shard=llm.dp_shard)
            works += estimates.work(other, tp).total
    cut = None
    if llm.pp > 1:
        seconds = estimates.work(name, llm.tp, 0, llm.cp).seconds.copy()
        seconds[0] += lighter * works
        cut = split(seconds, llm.pipeline.stages)
    layouts = {**around, name: ModuleLayout(llm.ranks, tp=llm.tp, cp=llm.cp, pp=llm.pp, vpp=llm.vpp, split=cut,
                                            pp_style=llm.pp_style, dp_replicate=1, dp_shard=llm.dp)}  # fmt: skip
    return {module: layouts[module] for module in shape.modules}


def rigid_candidates(
    estimates: Estimates, counts: Callable[[int], Iterable[int]], room: Float64[np.ndarray, "ranks"]
) -> list[Rigid]:
    """Return the most promising usual layouts of all ranks that fit, each with what runs again that costs least.

    Args:
        counts: numbers of microbatches to try with so many instances.
        room: bytes that every rank may use.
    """
    shape, samples = estimates.shape, min(len(batch.samples) for batch in estimates.batches)
    name, cluster = shape.samplewise[0], estimates.cluster
    if len(cluster.pools) > 1 or any(target != name for _, target in shape.edges):
        return []  # generators have no usual place
    found, ranks = [], tuple(range(cluster.ranks))
    for way in degrees(shape.modules[name], cluster.ranks, cluster.ranks_per_node, samples):
        if way.dp_replicate == 1:
            layouts = rigid_layouts(shape, estimates, way.layout(ranks).resolved())
            for count in counts(way.dp):
                every = _recomputed(shape, layouts, count)
                fitting = (one for one in every if (estimates.needed(one, in_step=True) <= room).all())
                each = (Rigid(_seconds(shape, estimates, one, way), one) for one in fitting)
                if best := min(each, key=lambda one: one.seconds, default=None):
                    found.append(best)
    return sorted(found, key=lambda one: one.seconds)[:MOST]


def _recomputed(shape: ModelShape, layouts: Mapping[str, ModuleLayout], count: int) -> Iterator[Candidate]:
    """With all that may run again, and parameters gathered as by default or once per step."""
    name = shape.samplewise[0]
    others = {n: Recompute() for n, module in shape.modules.items() if n != name and module.has_blocks}
    reshards = ("auto", "never") if layouts[name].pp == 1 else ("never",)
    for again, every, reshard in product(({}, others), (None, 4, 2, 1), reshards):
        recompute = {**again, **({} if every is None else {name: Recompute(every)})}
        yield Candidate(layouts, count, recompute=recompute, reshard_after_forward=reshard, fill="none")


def _seconds(shape: ModelShape, estimates: Estimates, candidate: Candidate, way: Degrees) -> float:
    name, count = shape.samplewise[0], candidate.microbatches
    every = {n: how.every for n, how in candidate.recompute.items()}
    encoders = sum(
        estimates.work(n, layout.tp, every.get(n, 0)).total for n, layout in candidate.layouts.items() if n != name
    )
    way = way._replace(recomputed=every.get(name, 0), whole=candidate.reshard_after_forward == "never")
    llm = estimates.work(name, way.tp, way.recomputed, way.cp)
    slowest = max(encoders, (encoders + llm.total) / way.pp) / way.dp
    fixed = count * llm.fixed + estimates.synchronized(name, way, count)
    return float(np.interp(1 / count, (0, 1), (slowest, (encoders + llm.total) / way.dp)) + fixed)
