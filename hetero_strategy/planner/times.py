"""Seconds of the actions of a module's stages in a layout, from FLOPs, bytes and what devices reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.cluster import Cluster, CollectiveKind
from hetero_strategy.planner.shape import ModuleShape
from hetero_strategy.planner.space import Degrees
from hetero_strategy.schedule.action import Kind

TP_COLLECTIVES = 4
"""All-gathers and reduce-scatters of all rows in a block's forward, and as many in its backward (Korthikanti et al.,
arXiv:2205.05198, figure 5); an all-reduce counts as two."""
ATTENTION_BACKWARD = 2.5
"""Attention's backward in forwards: five matmuls instead of two, as scores are made again (Dao, arXiv:2307.08691)."""
MOVED_BACKWARD = 1.5
"""Backward of what lies between matmuls in forwards: it reads what went in and a gradient, and writes a gradient."""
ADAM_BYTES = 28
"""Bytes that Adam moves per trained parameter: reads gradient, master and two moments, and writes the last three."""


class Line(NamedTuple):
    """Seconds of sequences inside a module: ``fixed + per_row * rows + per_pair * sum of squared lengths``."""

    fixed: float
    per_row: float
    per_pair: float

    def of(self, rows: Num[np.ndarray, "*n"], squares: Num[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
        """Seconds of each; nothing where there are no rows."""
        return np.where(rows > 0, self.fixed + self.per_row * rows + self.per_pair * squares, 0.0)

    def plus(self, other: Line, times: float = 1.0) -> Line:
        """Both one after the other, the second ``times`` over."""
        fixed, per_row, per_pair = other
        return Line(self.fixed + times * fixed, self.per_row + times * per_row, self.per_pair + times * per_pair)

    def shared(self, ranks: float) -> Line:
        """What grows with rows, divided among so many ranks."""
        return Line(self.fixed, self.per_row / ranks, self.per_pair / ranks)


NOTHING = Line(0.0, 0.0, 0.0)


class BlockSeconds(NamedTuple):
    """What was measured of one block on one rank, without the collectives of tensor parallelism."""

    forward: Line
    backward: Line
    """Whole; :data:`NOTHING` where no gradient has to reach its rows and nothing of it trains."""
    input: Line
    """The half for the rows; :data:`NOTHING` where no gradient has to reach them."""
    weight: Line
    """The other half; :data:`NOTHING` where nothing of it trains."""


ModuleSeconds = Mapping[int, Sequence[BlockSeconds]]
"""Ranks of tensor parallelism -> every block of a module."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage's actions on each rank of an instance."""

    forward: Line
    input: Line
    """Gradient of the rows; a recomputed forward is in here where there is one, otherwise in ``weight``."""
    weight: Line
    """Gradient of the weights."""
    gather: float
    """All-gather of its parameters."""
    reduce: float
    """Sum of its gradients over data-parallel ranks."""
    once: bool
    """Whether both are once per step; otherwise they are in every microbatch."""
    after: float
    """After the step's last backward: the optimizer, and the sum of replicated gradients."""
    overlapped: bool = False
    """Whether what is once per step runs beside compute: UNSHARD and REDUCE take no time, see ``planner.overlap``."""
    beside: bool = True
    """Whether what is in every microbatch runs beside its compute, or takes the cores from it."""
    whole: Line | None = None
    """A backward that is not in two halves, where that was measured."""

    @cached_property
    def backward(self) -> Line:
        """A backward that is not in two halves."""
        return self.input.plus(self.weight) if self.whole is None else self.whole

    def seconds(
        self, kind: Kind, rows: Num[np.ndarray, "*n"], squares: Num[np.ndarray, "*n"]
    ) -> Float64[np.ndarray, "*n"]:
        """Seconds of an action over so many rows, per instance."""
        if kind in ("UNSHARD", "REDUCE"):
            alone = self.gather if kind == "UNSHARD" else self.reduce
            return np.full(np.shape(rows), 0.0 if self.overlapped else alone)
        line = {"F": self.forward, "I": self.input, "W": self.weight, "B": self.backward}[kind]
        seconds = line.of(rows, squares)
        if self.once:
            return seconds
        collectives = self.gather if kind == "F" else self.gather + self.reduce
        return np.maximum(seconds, collectives) if self.beside else seconds + collectives


@dataclass(frozen=True)
class Precision:
    """Bytes of one number."""

    compute: int = 2
    """Of weights that compute, and of rows."""
    master: int = 4
    """Of parameters, gradients and each of the optimizer's states."""


MIXED = Precision()


@dataclass(frozen=True)
class Overlap:
    """Which collectives run beside compute.

    Args:
        tp: those of tensor parallelism, cut into as many pieces as there are ranks, of which one waits (Megatron-LM's
            ``--tp-comm-overlap``, PyTorch's async tensor parallelism).
        dp: those once per step, block by block: gathers beside forwards, sums of gradients beside the last backward
            and what follows (Megatron-LM's ``--overlap-param-gather --overlap-grad-reduce``). What is gathered for
            every microbatch (FSDP) always is beside its compute. On cores that ranks share nothing is.
    """

    tp: bool = False
    dp: bool = False


SEPARATE = Overlap()
OURS = Overlap(dp=True)
"""What the runtime does."""


def module_times(
    shape: ModuleShape,
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
) -> list[StageTimes]:
    """Seconds of every stage of a module.

    Args:
        layout: resolved, with ``split``.
        fed: whether gradients have to reach the module's input rows.
        recomputed: share of a forward that backward runs again.
        once: whether parameters are gathered once per step.
        measured: seconds of its blocks, with gradients that reach its rows if ``fed``; None: they follow from FLOPs.
        accumulated: global batches of an optimizer step, each of which has its share of it.
        members: see :func:`synchronization`.
    """
    assert layout.split is not None
    if measured is None:
        blocks = block_lines(shape, layout, cluster, fed, recomputed, precision, overlap)
    else:
        blocks = _measured_blocks(measured, shape, layout, cluster, recomputed, precision, overlap)
    ends = ragged.offsets(np.asarray(layout.split if shape.has_blocks else (1,))).tolist()
    stages = []
    for a, b in pairwise(ends):
        held, trains = (float(n) / layout.tp for n in shape.held(a, b))
        gather, scatter, replicas = synchronization(held, trains, b - a, layout, cluster, precision, members)
        after = 0.0
        if layout.shards == 1 and not once:  # such gradients are summed once, after the last backward
            after, replicas = replicas, 0.0
        adam = ADAM_BYTES / 4 * precision.master * trains / layout.shards / cluster.device.memory_bandwidth
        f, i, w, *whole_backward = (reduce(Line.plus, lines[a:b], NOTHING) for lines in blocks)
        collectives = gather, scatter + replicas, once, after + adam / accumulated
        beside = not cluster.shares_cores
        stages.append(StageTimes(f, i, w, *collectives, overlap.dp and once and beside, beside, *whole_backward))
    return stages


Members = tuple[int | None, int | None]
"""Fewest members of a group over shards, and of one over replicas, on a node."""


class Synchronization(NamedTuple):
    """Seconds of the collectives over data-parallel ranks."""

    gather: float
    """All-gather of parameters over shards."""
    scatter: float
    """Reduce-scatter of gradients over shards."""
    replicas: float
    """All-reduce of sharded gradients over replicas."""


def synchronization(
    parameters: float,
    trained: float,
    blocks: float,
    degrees: ModuleLayout | Degrees,
    cluster: Cluster,
    precision: Precision,
    members: Members = (None, None),
) -> Synchronization:
    """Seconds of all collectives of each kind once, and of the rank's own work for them.

    Args:
        parameters: of one tensor-parallel and pipeline rank, its shards together.
        trained: those of them that train.
        blocks: they are in; each has collectives of its own.
        members: see :meth:`Cluster.members`; None: groups begin with a node.
    """
    tp, shard, whole, size = degrees.tp, degrees.shards, precision.compute * parameters, precision.master * trained
    own, (near, apart) = cluster.device.sharding, members
    gather, scatter, replicas = blocks * cluster.collective(whole / blocks, shard, tp, on_node=near), 0.0, 0.0
    if trained:
        scatter = blocks * cluster.collective(size / blocks, shard, tp, "reduce-scatter", near)
        replicas = 2 * cluster.collective(size / shard, degrees.dp_replicate, tp * shard, "all-reduce", apart)
    if shard > 1:
        gather += own.gather.seconds(blocks, whole)
        scatter += own.scatter.seconds(blocks, size) if trained else 0.0
    return Synchronization(gather, scatter, replicas)


def block_lines(
    shape: ModuleShape,
    layout: ModuleLayout,
    cluster: Cluster,
    fed: bool,
    recomputed: float,
    precision: Precision,
    overlap: Overlap = SEPARATE,
) -> tuple[list[Line], ...]:
    """Forward, input gradient and weight gradient of every block.

    Attention and what lies between matmuls have no weights: their backward belongs to the gradient of the rows. That
    goes through all matmuls, too, to what trains in the first block with something that does, such as an embedding, if
    no matmul's weight trains there.
    """
    device, tp, ranks = cluster.device, layout.tp, layout.neighbours
    peak = device.peak(precision.compute) * ranks
    matmul, attention = peak * device.matmul_share(shape.width, tp), peak * device.attention
    moved = np.broadcast_to(shape.moved, shape.blocks) * precision.compute / device.memory_bandwidth / ranks
    collectives, keys = rank_collectives(shape, layout, cluster, precision)
    given = shape.per_row, shape.per_pair, moved, shape.trained_share, shape.trained > 0
    lines = list[tuple[Line, Line, Line]]()
    known = dict[tuple[float | bool, ...], tuple[Line, Line, Line]]()
    for block in zip(*(n.tolist() for n in given), strict=True):
        linear, quadratic, rest, share, trains = block
        if (*block, fed) not in known:  # most blocks are alike
            products = Line(device.launch, linear / matmul, 0.0)
            pairs, between = Line(0.0, 0.0, quadratic / attention), Line(0.0, rest, 0.0)
            waited = exposed(collectives.per_row, products.per_row, tp) if overlap.tp else collectives.per_row
            moving = products.plus(collectives._replace(per_row=waited))
            inside = pairs.plus(pairs, ATTENTION_BACKWARD - 1).plus(between, MOVED_BACKWARD).plus(keys)
            step = moving.plus(pairs).plus(between).plus(keys)
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
    shape: ModuleShape,
    layout: ModuleLayout,
    cluster: Cluster,
    recomputed: float,
    precision: Precision,
    overlap: Overlap,
) -> tuple[list[Line], ...]:
    """As :func:`block_lines`, and the whole backward of every block.

    A degree of tensor parallelism that was not measured follows from the next lower one, or else from the lowest,
    perfectly divided.
    """
    tp = layout.tp
    known = max((n for n in measured if n <= tp), default=min(measured))
    collectives, keys = rank_collectives(shape, layout, cluster, precision)
    found: list[tuple[Line, ...]] = []
    for block in measured[known]:
        forward, whole, into, own = (line.shared(layout.neighbours / known) for line in block)
        waited = exposed(collectives.per_row, forward.per_row, tp) if overlap.tp else collectives.per_row
        moving = collectives._replace(per_row=waited).plus(keys)
        step = forward.plus(moving)
        if into != NOTHING:
            into, whole = (line.plus(moving).plus(step, recomputed) for line in (into, whole))
        elif own != NOTHING:
            own, whole = (line.plus(keys).plus(step, recomputed) for line in (own, whole))
        found.append((step, into, own, whole))
    return tuple(map(list, zip(*found, strict=True)))


class RankCollectives(NamedTuple):
    """Seconds of a block's collectives over the ranks of an instance, in its forward or in its backward."""

    tp: Line
    """Those of tensor parallelism."""
    keys: Line
    """All-gather of keys and values over context-parallel ranks, or reduce-scatter of their gradients."""


def rank_collectives(
    shape: ModuleShape, layout: ModuleLayout, cluster: Cluster, precision: Precision
) -> RankCollectives:
    """See there; lines are of the rows of an instance."""
    tp, cp = layout.tp, layout.cp
    kinds: tuple[CollectiveKind, ...] = ("all-gather", "reduce-scatter") if shape.row_parts[tp] > 1 else ("all-reduce",)
    times = TP_COLLECTIVES / len(kinds)

    def took(rows: int) -> tuple[float, float]:
        size, keys = rows * precision.compute * shape.width / cp, rows * precision.compute * shape.keys / tp
        each = sum(cluster.collective(size, tp, kind=kind) for kind in kinds)
        return times * each, cluster.collective(keys, cp, tp)

    return RankCollectives(
        *(Line(waits, seconds - waits, 0.0) for waits, seconds in zip(took(0), took(1), strict=True))
    )


def exposed(collectives: float, products: float, ranks: int) -> float:
    """Seconds of collectives that compute waits for, where both run in as many pieces as there are ranks.

    The first piece has nothing to run beside; of the others what takes longer is what takes time.
    """
    return max(0.0, collectives - products) + min(collectives, products) / ranks
