"""Memory of one pipeline stage on each of its ranks: parameters as FSDP2 keeps them, activations of blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModuleSpec, kept_shares
from hetero_strategy.parallelize.gradients import BUCKET_BYTES
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.parallelize.transforms import label, way
from hetero_strategy.schedule.action import StageId
from hetero_strategy.simulator.cluster import Numbers
from hetero_strategy.simulator.cost_model import Precision

ADAM_STATES = 2
"""Numbers that the optimizer keeps per parameter that trains."""

Units = Float64[np.ndarray, "units"]
"""Bytes of a stage's FSDP units: its blocks in order, then its layers around them."""


class ParameterBytes(NamedTuple):
    """The bytes of parameters on each rank, an entry for each FSDP unit or for each layout."""

    masters: Numbers
    optimizer: Numbers
    gathered: Numbers
    """Whole weights in the dtype of compute; 0 if the masters compute."""
    gradients: Numbers
    """Gradients held between backwards."""


def parameter_bytes(
    frozen: Numbers, trained: Numbers, shards: Numbers, once: Numbers, precision: Precision
) -> ParameterBytes:
    """Count the bytes of parameters.

    Args:
        frozen, trained: numbers of parameters that the ranks of one group of shards have together.
        once: whether parameters are gathered once per step.
    """
    whole = precision.master * trained
    # Over a group of one rank, only trained parameters are cast.
    gathered = np.where(np.greater(shards, 1), frozen + trained, trained * (precision.compute != precision.master))
    return ParameterBytes(
        whole / shards + precision.compute * frozen / shards,
        ADAM_STATES * whole / shards,
        precision.compute * gathered,
        np.where(once, whole, whole / shards),
    )


@dataclass(frozen=True, eq=False)
class StageBytes:
    """The bytes of parameters, gradients and FSDP2's copies of them on each rank of a stage."""

    masters: float
    optimizer: float
    gathered: Units
    """Whole weights, see :class:`ParameterBytes`."""
    once: bool
    """Whether all are gathered once per step; otherwise blocks are gathered with every microbatch, while they compute.
    """
    copied: bool
    """Whether weights are copied without a buffer, because the stage has one rank alone."""
    made: Units
    """Gradients as a backward makes them, all of a unit's before they are added up; zeros if they are added up one by
    one."""
    summed: Units
    """Gradients held between backwards."""
    sharded: float
    """Gradients held after the step."""
    single: float
    """Gradient of the largest parameter."""
    reduced: Units
    """Inputs of a unit's reduction, in the masters' dtype; zeros if FSDP does not reduce it."""
    widest: float
    """Largest of these inputs: experts that ``ep`` divides are a unit of their own."""
    bucket: float
    """Flat bucket in which gradients are summed over replicas outside of FSDP."""

    @property
    def unshard(self) -> float:
        """Return the peak of gathering besides the gathered weights: its flat buffers, all in use at once."""
        return float(self.gathered.sum()) if self.once and not self.copied else 0.0

    @property
    def reduce(self) -> float:
        """Return the peak of a reduction at the end of a step besides whole gradients: two units' flat buffers, of
        which the second waits for the first, and the shards.
        """
        return self.widest + self.sharded if self.widest else self.bucket

    def beside_forward(self) -> Units:
        """Return the weights of each block while it computes, and the buffer they came in."""
        return np.zeros_like(self.gathered[:-1]) if self.once else 2 * self.gathered[:-1]

    def beside_backward(self, first: bool) -> Units:
        """Return the gradients of each block's backward and, if blocks are gathered for it, its weights, besides
        earlier gradients.

        Args:
            first: whether no backward of the step came before.
        """
        gradients, summed, reduced = self.made[:-1], self.summed[:-1], self.reduced[:-1]
        later = np.append(np.cumsum(summed[::-1])[::-1], 0.0)
        if self.once or not self.gathered.any():
            new = gradients + later[1:] if gradients.any() else later[:-1]
            if self.copied:  # made one by one while the block's activations go: half at most, as measured
                new = summed / 2 + later[1:]
            around = self.made[-1] if self.made.any() else self.summed[-1]
            return new + around if first else np.where(gradients > 0, gradients + self.made[-1], self.single)
        following, before = np.append(reduced[1:], 0.0), np.insert(self.gathered[:-2], 0, 0.0)
        waiting = self.gathered[:-1] + before + gradients + self.made[-1] + following
        return waiting + (later[1:] if first else 0.0)

    def end_of_backward(self, first: bool) -> float:
        """Return the peak when the unit around the blocks is reduced with every microbatch; arguments as above."""
        if self.once:
            return 0.0
        new = float(self.summed.sum()) if first else 0.0
        return float(self.made[-1] + self.reduced[-1] + self.reduced[0]) + new


def stage_bytes(
    shape: ModuleSpec, layout: ModuleLayout, first: int, last: int, once: bool, precision: Precision
) -> StageBytes:
    """Count the bytes of the stage of blocks ``first`` to ``last - 1``.

    Args:
        layout: resolved layout.
        once: whether parameters are gathered once per step.
    """
    left = np.array([1.0, 1 / layout.tp])
    stored = (shape.stored[first:last] * left).sum(axis=3)  # [blocks, units, trains]
    stored[-1] -= (shape.counted_twice(first, last) * left).sum(axis=2)
    experts, single = np.zeros((last - first, 2)), float(shape.largest[first:last].max()) / layout.tp
    if (of := shape.experts) is not None:
        single = max(single, float(of.largest[first:last].max()) / (layout.tp if layout.ep == 1 else layout.ep))
        if layout.ep > 1:
            stored[:, 0] -= (of.stored[first:last] * left).sum(axis=2)
            experts = of.stored[first:last].sum(axis=2) / layout.ep
    frozen, trained = (np.append(stored[:, 0, t], stored[:, 1, t].sum()) for t in (0, 1))
    casts = precision.compute != precision.master and bool(trained.any() or experts[:, 1].any())
    copied = casts and once and len(layout.ranks) == layout.pp
    fsdp, shard = (layout.shards > 1 or casts) and not copied, layout.shards
    routed = np.append(experts, [[0.0, 0.0]], axis=0).T
    units = parameter_bytes(frozen, trained, shard, once, precision)
    apart = parameter_bytes(routed[0], routed[1], layout.expert_shards, once, precision)
    whole, theirs = precision.master * trained, precision.master * routed[1]
    owned = float(whole.sum()) / shard + float(theirs.sum()) / layout.expert_shards
    together = casts or not once
    return StageBytes(
        masters=float(np.sum(units.masters) + np.sum(apart.masters)) + shape.buffers,
        optimizer=float(np.sum(units.optimizer) + np.sum(apart.optimizer)),
        gathered=np.asarray(units.gathered + apart.gathered),
        once=once or not fsdp,
        copied=copied,
        made=precision.compute * together * (trained * fsdp + routed[1]),
        summed=np.asarray(units.gradients + apart.gradients),
        sharded=owned,
        single=precision.compute * single,
        reduced=whole * fsdp + theirs,
        widest=float(max(whole.max() * fsdp, theirs.max())),
        bucket=min(float(BUCKET_BYTES), owned) if layout.dp_replicate > 1 and not fsdp else 0.0,
    )


def blocks_of(layout: ModuleLayout, stage: StageId) -> tuple[int, int]:
    """Return the stage's first block and the one after its last; a module without blocks counts as one."""
    assert layout.split is not None
    counts = np.maximum(layout.split, 1)
    end = int(counts[: stage.stage + 1].sum())
    return end - int(counts[stage.stage]), end


@dataclass(frozen=True, eq=False)
class StageNeeds:
    """The activations of a stage, ``[microbatches, instances]``, in bytes on each rank."""

    kept: Float64[np.ndarray, "microbatches instances"]
    """Bytes held from forward until backward."""
    halves: Float64[np.ndarray, "microbatches instances"]
    """Bytes held between the halves of a backward."""
    forward: Float64[np.ndarray, "microbatches instances"]
    """Peak of its forward, including weights gathered for it."""
    first: Float64[np.ndarray, "microbatches instances"]
    """Peak of the first backward of a step, with its activations and new gradients."""
    again: Float64[np.ndarray, "microbatches instances"]
    """Peak of a later backward."""
    host: Float64[np.ndarray, "microbatches instances"]
    """Bytes in host memory from forward until backward, for each rank."""


def stage_needs(
    activations: Activations,
    layout: ModuleLayout,
    parts: int,
    transforms: Mapping[str, Transform],
    sizes: StageBytes,
    blocks: tuple[int, int],
    given: Float64[np.ndarray, "microbatches instances features"],
    labelled: Num[np.ndarray, "microbatches instances"] | None,
) -> StageNeeds:
    """Predict the activations of the stage of some blocks.

    For example, each of two blocks keeps 10 bytes of one row, and peaks at 15 in its forward and at 25 in its backward.
    Rows between blocks have 4 bytes; parameters and the head count as nothing. The peaks of block 0 and block 1 are::

        kept      10 + 10 = 20    forward   max(15, 10 + 15) = 25    backward  max(25 + 4, 10 + 25) = 35

    Args:
        parts: number of parts into which the given rows are cut.
        blocks: first block of the stage, and the one after its last.
        given: features of each instance's rows in each microbatch.
        transforms: all transforms of the module. Of the blocks that one moves off the device, one is on its way in a
            forward, and one on its way back, besides the block that computes.
        labelled: number of rows with a label, if the stage has a head.
    """
    first, last = blocks
    on_rank = cache(lambda of: activations.blocks[of].on(layout.tp, parts, layout.ep))
    chosen = [on_rank(label(way(transforms, i))) for i in range(first, last)]
    while_moved = [on_rank(label(way(transforms, i, moved=True))) for i in range(first, last)]
    at_once = any(each.keeps_input_alone for each in transforms.values())
    kept, halves, forward, backward = (
        np.stack([given @ _row(one, name, i) for one, i in zip(chosen, range(first, last), strict=True)])
        for name in ("kept", "halves", "forward", "backward")
    )
    rows = given[:, :, 0]
    more = np.stack([one.later * rows for one in chosen]) * (backward > 0)
    more[0] = 0.0
    kept, halves = kept + more, halves + more
    moved, near = _moved(chosen, while_moved, first, given, kept * (backward > 0))
    kept = kept - moved
    gradient = activations.row / parts * rows
    forward[1:] += gradient * (backward[1:] == 0)  # a block's input, unless the block before keeps it for backward
    backward = backward + gradient * np.append(np.ones(last - first - 1), float(labelled is not None))[:, None, None]
    before = np.cumsum(kept, axis=0) - kept + near[:-1]
    additions = [x[:, None, None] for x in (sizes.beside_forward(), *map(sizes.beside_backward, (True, False)))]
    most = [
        (before + own + extra).max(axis=0) for own, extra in zip((forward, backward, backward), additions, strict=True)
    ]
    most[1:] = [np.maximum(m, sizes.end_of_backward(first)) for m, first in zip(most[1:], (True, False), strict=True)]
    stays = kept.sum(axis=0)
    under = stays + near[-1]
    if at_once:  # forward keeps nothing, and backward begins with a forward that keeps all
        most[0] = (forward + additions[0]).max(axis=0)
    total = [np.zeros_like(stays) if at_once else stays, halves.sum(axis=0), *most]
    if labelled is not None and activations.head is not None:
        head, below = activations.head, total[0] + near[-1]
        of = [line.of(labelled, head.chunk) for line in (head.kept, head.forward, head.backward)]
        whole = activations.row * rows * (parts > 1)
        total[0] = total[0] + of[0] * (not at_once)
        total[1] = total[1] + of[0]
        total[2] = np.maximum(most[0], below + of[1] / layout.tp + whole + gradient)
        total[3:] = [np.maximum(m, under + of[2] / layout.tp + whole) for m in most[1:]]
    total.append(moved.sum(axis=0))
    return StageNeeds(*total)


def _moved(
    chosen: Sequence[BlockBytes], while_moved: Sequence[BlockBytes], first: int, given: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of each block in host memory, ``[blocks, microbatches, instances]``, and those of the nearest
    such block before each block and before the layers after the blocks.
    """
    moved, near = np.zeros_like(kept), np.zeros((len(kept) + 1, *kept.shape[1:]))
    for i, (here, away) in enumerate(zip(chosen, while_moved, strict=True)):
        near[i + 1] = near[i]
        if away is not here:
            stays = given @ _row(away, "kept", first + i) + (i > 0) * away.later * given[:, :, 0]
            near[i + 1] = moved[i] = np.maximum(kept[i] - stays, 0.0)
    return moved, near


def _row(measured: BlockBytes, name: str, block: int) -> Float64[np.ndarray, "features"]:
    values: np.ndarray = getattr(measured, name)
    return values[:, block].sum(axis=0) if name == "kept" else values[block]


FEATURES = ("row", "key that is seen")
"""Quantities that activations grow with; the last one belongs to context parallelism."""
KEYS = 1


def features(rows: Num[np.ndarray, "..."] | int) -> Float64[np.ndarray, "... features"]:
    """Count the :data:`FEATURES` of numbers of rows."""
    return np.multiply.outer(np.asarray(rows, np.float64), np.eye(len(FEATURES))[0])


def features_in_context(lengths: Num[np.ndarray, "sequences"], cp: int) -> Float64[np.ndarray, "features"]:
    """Count the :data:`FEATURES` of the context-parallel rank that sees most keys."""
    total, starts = int(np.sum(lengths)), ragged.starts(np.asarray(lengths))
    own, ends = total / cp, np.arange(2 * cp + 1) * total // (2 * cp)
    first = starts[np.searchsorted(starts, ends[:-1], side="right") - 1]  # of each chunk's first sequence
    near, far, keys = slice(cp), slice(-1, cp - 1, -1), ends[1:] - first
    # The last rank's chunks are neighbours: keys that both see count once.
    both = np.clip(ends[1:][near] - np.maximum(first[far], first[near]), 0, None)
    both[:-1] = 0
    return np.array([own, float((keys[near] + keys[far] - both).max())])


class HeadBytes(NamedTuple):
    """The bytes of a head: ``first`` per row up to the rows whose logits exist at once, ``more`` per row above."""

    first: float
    more: float

    def of(self, rows: np.ndarray, chunk: int) -> np.ndarray:
        """Return the bytes for each number of labelled rows."""
        return self.first * np.minimum(rows, chunk) + self.more * np.maximum(rows - chunk, 0)


@dataclass(frozen=True)
class Head:
    """The memory of a language model's head and loss per labelled row, besides its blocks."""

    chunk: int
    """Rows whose logits exist at once."""
    kept: HeadBytes
    forward: HeadBytes
    backward: HeadBytes


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """The activations of every block of a module on one rank, in bytes per feature.

    Layers before the blocks count in the first block, and layers after them in the last, except a language model's
    head.
    """

    kept: Float64[np.ndarray, "kinds blocks features"]
    """Bytes kept from forward until backward, without the block's input, by the kinds of
    :data:`hetero_strategy.model.spec.KEPT`."""
    later: float
    """Additional bytes per row for a block that is not the first of its stage: its input if it needs one, less what it
    shares with earlier blocks, such as tables of positions."""
    forward: Float64[np.ndarray, "blocks features"]
    """Peak of its forward, including what it keeps."""
    backward: Float64[np.ndarray, "blocks features"]
    """Peak of its backward, with the gradient of its input but not that of its output."""
    halves: Float64[np.ndarray, "blocks features"]
    """Bytes held between the two halves of its backward."""

    def on(self, tp: int, parts: int, ep: int = 1) -> BlockBytes:
        """Return the bytes on one rank, see :func:`hetero_strategy.model.spec.kept_shares`."""
        kept = self.kept * kept_shares(tp, parts, ep)[:, None, None]
        before, after = (x[..., :KEYS].sum(axis=(0, 2)) for x in (self.kept, kept))
        less = np.divide(after, before, out=np.full(len(before), 1 / parts), where=before > 0)[:, None]
        peaks = self.forward * less, self.backward * less, self.halves * less
        return BlockBytes(kept, self.later / parts, *peaks)


@dataclass(frozen=True, eq=False)
class Activations:
    """The activations of one module."""

    blocks: Mapping[str, BlockBytes]
    """Bytes by the label of a block's changes, see :func:`hetero_strategy.parallelize.transforms.way`; empty: none.
    Where a change moves activations off the device, only ``kept`` and ``later`` count, as they are in the meantime."""
    row: float
    """Bytes of a row between blocks."""
    head: Head | None
    payload: float
    """Bytes of the module's inputs other than rows, per row inside it."""
