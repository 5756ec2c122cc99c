"""Seconds of the actions of a module's stages in a layout, from FLOPs, bytes and device figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModelSpec, ModuleSpec
from hetero_strategy.plan.deal_instances import GROUPS
from hetero_strategy.simulator.cluster import Cluster, CollectiveKind, Numbers
from hetero_strategy.simulator.stage_times import NOTHING, KeyTravel, Line, ModuleSeconds, StageTimes

TP_COLLECTIVES = 4
"""All-gathers and reduce-scatters of all rows in a block's forward, and as many in its backward (Korthikanti et al.,
arXiv:2205.05198, figure 5); an all-reduce counts as two."""
ATTENTION_BACKWARD = 2.5
"""Attention's backward in forwards: five matmuls instead of two, as scores are recomputed (Dao, arXiv:2307.08691)."""
MOVED_BACKWARD = 1.5
"""Backward of the work between matmuls in forwards: it reads the input and a gradient, and writes a gradient."""
EXCHANGES = 2
"""Times that a layer's rows travel between ranks in a forward, to experts or heads and back; their gradients as often.
"""
KEYS_BACKWARD = 2
"""Exchanges of keys in a block's backward: they come again, and their gradients return."""
ADAM_BYTES = 28
"""Bytes that Adam moves per trained parameter: reads gradient, master and two moments, and writes the last three."""


@dataclass(frozen=True)
class Precision:
    """The bytes of numbers."""

    compute: int = 2
    """Bytes per number of the weights that compute, and of rows."""
    master: int = 4
    """Bytes per number of parameters, gradients and each of the optimizer's states."""


MIXED = Precision()


@dataclass(frozen=True)
class Overlap:
    """A choice of the collectives that overlap compute.

    Args:
        tp: collectives of tensor parallelism, cut into as many pieces as ranks, of which one waits (Megatron-LM's
            ``--tp-comm-overlap``, PyTorch's async tensor parallelism).
        dp: collectives once per step, block by block: gathers during forwards, sums of gradients during the last
            backward and later (Megatron-LM's ``--overlap-param-gather --overlap-grad-reduce``). Gathers for every
            microbatch (FSDP) always overlap its compute. On shared cores nothing overlaps.
    """

    tp: bool = False
    dp: bool = False


SEPARATE = Overlap()
OURS = Overlap(dp=True)
"""Overlap of the runtime."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """The seconds of the stages of a model's modules on a cluster, from FLOPs, a profile or a run.

    Args:
        measured: measured seconds of modules' blocks, from a profile or a run; the rest follows from FLOPs.
        overlap: collectives that overlap compute.
        accumulated: global batches per optimizer step, which share its time.
        expert_load: rows of the rank whose experts are chosen most, over the mean, where experts are divided.
    """

    spec: ModelSpec
    cluster: Cluster
    precision: Precision = MIXED
    measured: Mapping[str, ModuleSeconds] = field(default_factory=dict)
    overlap: Overlap = OURS
    accumulated: int = 1
    expert_load: float = 1.0

    @cached_property
    def fed(self) -> dict[str, bool]:
        """Return whether gradients have to reach each module's input rows."""
        return self.spec.fed_by_trainable()

    def stages(self, module: str, layout: ModuleLayout, recomputed: float = 0.0, once: bool = True) -> list[StageTimes]:
        """Predict the seconds of every stage of a module, see :func:`module_times`."""
        return module_times(
            self.spec.modules[module], layout, self.cluster, fed=self.fed[module], recomputed=recomputed, once=once,
            precision=self.precision, overlap=self.overlap, measured=self.measured.get(module),
            accumulated=self.accumulated, members=self.cluster.members(layout), expert_load=self.expert_load,
        )  # fmt: skip


def module_times(
    shape: ModuleSpec,
    layout: ModuleLayout,
    cluster: Cluster,
    *,
    fed: bool,
    recomputed: float = 0.0,
    once: bool = True,
    precision: Precision = MIXED,
    overlap: Overlap = SEPARATE,
    measured: ModuleSeconds | None = None,
    accumulated: int = 1,
    members: Members = (None, None),
    expert_load: float = 1.0,
) -> list[StageTimes]:
    """Predict the seconds of every stage of a module.

    Args:
        layout: resolved layout, with ``split``.
        fed: whether gradients have to reach the module's input rows.
        recomputed: share of a forward that backward runs again.
        once: whether parameters are gathered once per step.
        measured: measured seconds of its blocks, with gradients that reach its rows if ``fed``; None: use FLOPs.
        accumulated: global batches per optimizer step, which share its time.
        members: fewest members of groups on a node, see :func:`synchronization`.
        expert_load: see :class:`CostModel`.
    """
    assert layout.split is not None
    if measured is None:
        blocks = block_lines(shape, layout, cluster, fed, recomputed, precision, overlap, expert_load)
    else:
        blocks = _measured_blocks(measured, shape, layout, cluster, recomputed, precision, overlap, expert_load)
    ends = ragged.offsets(np.asarray(layout.split if shape.has_blocks else (1,))).tolist()
    exchanges, stages = key_exchanges(shape, fed, recomputed), []
    for a, b in pairwise(ends):
        held, experts = shape.held(a, b), shape.divided_experts(a, b, layout.ep)
        owned, trains = (float(n - own) / layout.tp for n, own in zip(held, experts, strict=True))
        gather, scatter, replicas = synchronization(
            owned, trains, b - a, cluster, precision, tp=layout.tp, shards=layout.shards, replicas=layout.dp_replicate,
            members=members,
        ).plus(expert_synchronization(experts, b - a, layout, cluster, precision))  # fmt: skip
        after = 0.0
        if layout.shards == 1 and not once:  # these gradients are summed once, after the last backward
            after, replicas = replicas, 0.0
        updated = trains / layout.shards + experts[1] / layout.ep / layout.expert_shards
        adam = ADAM_BYTES / 4 * precision.master * updated / cluster.device.memory_bandwidth
        f, i, w, *whole_backward = (reduce(Line.plus, lines[a:b], NOTHING) for lines in blocks)
        collectives = gather, scatter + replicas, once, after + adam / accumulated
        overlaps = not cluster.shares_cores
        whole = whole_backward[0] if whole_backward else None
        keys = key_travel(shape, layout, cluster, precision, exchanges[:, a:b].sum(axis=1).tolist())
        stages.append(StageTimes(f, i, w, *collectives, overlap.dp and once and overlaps, overlaps, whole, keys))
    return stages


Members = tuple[int | None, int | None]
"""Fewest members on a node of a group over shards, and of one over replicas."""


class Synchronization(NamedTuple):
    """The seconds of the collectives over data-parallel ranks."""

    gather: float
    """All-gather of parameters over shards."""
    scatter: float
    """Reduce-scatter of gradients over shards."""
    replicas: float
    """All-reduce of sharded gradients over replicas."""

    def plus(self, other: Synchronization) -> Synchronization:
        return Synchronization(*(a + b for a, b in zip(self, other, strict=True)))


def synchronization(
    parameters: Numbers,
    trained: Numbers,
    blocks: Numbers,
    cluster: Cluster,
    precision: Precision,
    *,
    tp: Numbers,
    shards: Numbers,
    replicas: Numbers,
    members: Members = (None, None),
) -> Synchronization:
    """Return the seconds of all collectives of each kind once, and of the rank's own work for them.

    Args:
        parameters: parameters of one tensor-parallel and pipeline rank, its shards together.
        trained: number of these parameters that train.
        blocks: number of blocks that hold the parameters; each block has its own collectives.
        tp, shards, replicas: tensor-parallel ranks, ranks that share parameters, and replicas of these.
        members: fewest members on a node, see :meth:`Cluster.members`; None: groups begin with a node.
    """
    whole, size = precision.compute * parameters, precision.master * trained
    own, (near, apart) = cluster.device.sharding, members
    sharded, trains = np.greater(shards, 1), np.greater(trained, 0)
    gather = blocks * cluster.collective(whole / blocks, shards, tp, on_node=near)
    scatter = blocks * cluster.collective(size / blocks, shards, tp, "reduce-scatter", near)
    copies = 2 * cluster.collective(size / shards, replicas, tp * shards, "all-reduce", apart)
    gather = gather + sharded * own.gather.seconds(blocks, whole)
    return Synchronization(gather, trains * (scatter + sharded * own.scatter.seconds(blocks, size)), trains * copies)


def expert_synchronization(
    experts: tuple[Numbers, Numbers], blocks: Numbers, layout: Any, cluster: Cluster, precision: Precision
) -> Synchronization:
    """Return :func:`synchronization` of experts that ``ep`` divides, whose shards and replicas are ``ep`` apart.

    Args:
        experts: parameters of all experts on a stage, and those that train.
        layout: layout with numbers, or with arrays of them.
    """
    if not np.any(experts):
        return Synchronization(0.0, 0.0, 0.0)
    held, trained = (own / layout.ep for own in experts)
    shards, replicas = layout.expert_shards, layout.dp_replicate
    return synchronization(held, trained, blocks, cluster, precision, tp=layout.ep, shards=shards, replicas=replicas)


def block_lines(
    shape: ModuleSpec,
    layout: ModuleLayout,
    cluster: Cluster,
    fed: bool,
    recomputed: float,
    precision: Precision,
    overlap: Overlap = SEPARATE,
    expert_load: float = 1.0,
) -> tuple[list[Line], ...]:
    """Return forward, input gradient and weight gradient of every block.

    Attention and the work between matmuls have no weights: their backward belongs to the gradient of the rows. In the
    first block that trains anything, that gradient also passes all matmuls if none of their weights trains: it must
    reach the trained parameters, such as an embedding.
    """
    device, tp, ranks = cluster.device, layout.tp, layout.neighbours
    peak = device.peak(precision.compute) * ranks
    matmul, attention = peak * device.matmul_share(shape.width, tp), peak * device.attention
    moved = np.broadcast_to(shape.moved, shape.blocks) * precision.compute / device.memory_bandwidth / ranks
    collectives, heads = rank_collectives(shape, layout, cluster, precision)
    per_row = shape.per_row
    if shape.experts is not None and layout.ep > 1:
        per_row = per_row + (expert_load - 1) * shape.experts.per_row
    columns = per_row, shape.per_pair, moved, shape.trained_share, shape.trained > 0
    travels = expert_exchanges(shape, layout, cluster, precision, expert_load)
    lines = list[tuple[Line, Line, Line]]()
    known = dict[tuple[Any, ...], tuple[Line, Line, Line]]()
    for block in zip(*(n.tolist() for n in columns), travels, strict=True):
        linear, quadratic, rest, share, trains, travel = block
        if (*block, fed) not in known:  # most blocks are alike
            products = Line(device.launch, linear / matmul, 0.0)
            pairs, between = Line(0.0, 0.0, quadratic / attention), Line(0.0, rest, 0.0)
            waited = exposed(collectives.per_row, products.per_row, tp) if overlap.tp else collectives.per_row
            moving = products.plus(collectives._replace(per_row=waited))
            inside = pairs.plus(pairs, ATTENTION_BACKWARD - 1).plus(between, MOVED_BACKWARD).plus(heads).plus(travel)
            step = moving.plus(pairs).plus(between).plus(heads).plus(travel)
            repeated = recomputed if fed or trains else 0.0
            again = moving.plus(inside).plus(step, repeated) if fed else NOTHING
            own = Line(products.fixed, products.per_row * share, 0.0) if trains else NOTHING
            into = (own if share else moving).plus(inside).plus(step, repeated)
            known[*block, fed] = step, again, own if fed or not trains else into
        lines.append(known[*block, fed])
        fed = fed or trains
    return tuple(map(list, zip(*lines, strict=True)))


def _measured_blocks(
    measured: ModuleSeconds,
    shape: ModuleSpec,
    layout: ModuleLayout,
    cluster: Cluster,
    recomputed: float,
    precision: Precision,
    overlap: Overlap,
    expert_load: float,
) -> tuple[list[Line], ...]:
    """Return :func:`block_lines` from measurements, and the whole backward of every block.

    A degree of tensor parallelism that was not measured follows from the next lower one, or else from the lowest,
    perfectly divided.
    """
    tp = layout.tp
    known = max((n for n in measured if n <= tp), default=min(measured))
    collectives, heads = rank_collectives(shape, layout, cluster, precision)
    travels = expert_exchanges(shape, layout, cluster, precision, expert_load)
    lines: list[tuple[Line, ...]] = []
    for block, travel in zip(measured[known], travels, strict=True):
        forward, whole, into, own = (line.shared(layout.neighbours / known) for line in block)
        waited = exposed(collectives.per_row, forward.per_row, tp) if overlap.tp else collectives.per_row
        moving = collectives._replace(per_row=waited).plus(heads).plus(travel)
        step = forward.plus(moving)
        if into != NOTHING:
            into, whole = (line.plus(moving).plus(step, recomputed) for line in (into, whole))
        elif own != NOTHING:
            own, whole = (line.plus(heads).plus(travel).plus(step, recomputed) for line in (own, whole))
        lines.append((step, into, own, whole))
    return tuple(map(list, zip(*lines, strict=True)))


def expert_exchanges(
    shape: ModuleSpec, layout: ModuleLayout, cluster: Cluster, precision: Precision, expert_load: float
) -> list[Line]:
    """Return the seconds of each block's exchange of rows with the ranks of their experts, in its forward or in its
    backward; lines count the rows of an instance, of which each of its ranks sends an equal part.
    """
    if shape.experts is None or layout.ep == 1:
        return [NOTHING] * shape.blocks

    def took(size: float) -> float:
        return EXCHANGES * cluster.exchange(expert_load * precision.compute * size / layout.neighbours, layout.ep)

    return [Line(took(0.0), took(size) - took(0.0), 0.0) if size else NOTHING for size in shape.experts.sent.tolist()]


class RankCollectives(NamedTuple):
    """The seconds of a block's collectives over the ranks of an instance, in its forward or in its backward."""

    tp: Line
    """Collectives of tensor parallelism."""
    heads: Line
    """Exchanges of rows for heads with context-parallel ranks; :data:`NOTHING` if keys travel instead."""


def rank_collectives(
    shape: ModuleSpec, layout: ModuleLayout, cluster: Cluster, precision: Precision
) -> RankCollectives:
    """Predict :class:`RankCollectives`; lines count the rows of an instance."""
    tp, cp = layout.tp, layout.cp
    kinds: tuple[CollectiveKind, ...] = (
        ("all-gather", "reduce-scatter") if shape.row_shardings[tp].parts > 1 else ("all-reduce",)
    )
    times = TP_COLLECTIVES / len(kinds)
    # Queries, keys and values go, and results come back. Each head has keys of its own if less is known.
    queries = shape.queries or shape.width
    numbers = 0.0 if sends_keys(shape, layout) else 2.0 * queries + (shape.keys or 2 * queries)

    def took(rows: int) -> tuple[float, float]:
        size = rows * precision.compute * shape.width / cp
        each = sum(cluster.collective(size, tp, kind=kind) for kind in kinds)
        own = rows * precision.compute * numbers / layout.neighbours
        waits = EXCHANGES * cluster.exchange(0.0, cp, tp) if numbers else 0.0
        return times * each, waits + cluster.exchange(own, cp, tp) - cluster.exchange(0.0, cp, tp)

    return RankCollectives(
        *(Line(waits, seconds - waits, 0.0) for waits, seconds in zip(took(0), took(1), strict=True))
    )


def sends_keys(shape: ModuleSpec, layout: ModuleLayout) -> bool:
    """Return whether context-parallel ranks send each other keys, and not rows for heads."""
    return layout.cp > 1 and layout.cp_form != "heads" and shape.samplewise


def key_exchanges(shape: ModuleSpec, fed: bool, recomputed: float) -> Float64[np.ndarray, "parts=3 blocks"]:
    """Count the exchanges of keys of each block in forward, and in both halves of backward: keys come again, and their
    gradients return.

    Args:
        fed, recomputed: see :func:`module_times`.
    """
    trains, ones = shape.trained > 0, np.ones(shape.blocks)
    reached = fed | (np.cumsum(trains) > trains)  # by gradients of its rows
    again = KEYS_BACKWARD + recomputed
    return np.stack([ones, again * reached, again * (trains & ~reached)])


def key_travel(
    shape: ModuleSpec, layout: ModuleLayout, cluster: Cluster, precision: Precision, exchanges: Sequence[float]
) -> KeyTravel | None:
    """Return the travel of keys of a stage with so many exchanges; None if none travel."""
    if not sends_keys(shape, layout) or not shape.keys:
        return None
    cp, tp, (forward, into, weight) = layout.cp, layout.tp, exchanges
    size, latency = precision.compute * shape.keys / tp * cp / (cp - 1), cluster.exchange(0.0, cp, tp)
    groups = 1 if cluster.shares_cores else GROUPS
    return KeyTravel(forward, into, weight, latency, cluster.exchange(size, cp, tp) - latency, groups)


def exposed(collectives: float, products: float, ranks: int) -> float:
    """Return the seconds of collectives that compute waits for if both run in as many pieces as there are ranks.

    The first piece overlaps nothing; of the remaining pieces the longer of both counts.
    """
    return max(0.0, collectives - products) + min(collectives, products) / ranks
