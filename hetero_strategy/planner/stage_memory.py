"""What one pipeline stage needs on each of its ranks: parameters by how FSDP2 keeps them, and activations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.gradients import BUCKET_BYTES
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.activations import Activations, BlockBytes
from hetero_strategy.planner.shape import ModuleShape
from hetero_strategy.planner.times import Precision

ADAM_STATES = 2
"""Numbers that the optimizer keeps per parameter that trains."""

Units = Float64[np.ndarray, "units"]
"""Bytes of a stage's FSDP units: its blocks in order, then what lies around them."""


@dataclass(frozen=True, eq=False)
class StageBytes:
    """Parameters, gradients and what FSDP2 makes of them on each rank of a stage, in bytes."""

    masters: float
    optimizer: float
    gathered: Units
    """Whole weights in the dtype that computes; nothing where the masters compute."""
    once: bool
    """Gathered once per step; otherwise the blocks with every microbatch, while they compute."""
    copied: bool
    """Gathered without a buffer: on one rank alone."""
    made: Units
    """Gradients as a backward makes them, all of a unit's before they are added up; nothing where they are added up one
    by one."""
    summed: Units
    """Gradients between backwards."""
    sharded: float
    """Gradients after the step."""
    single: float
    """Gradient of the largest parameter."""
    reduced: Units
    """What a unit's reduction is made from, in the masters' dtype; nothing where it is none of FSDP's."""
    bucket: float
    """The flat piece in which gradients are summed over replicas outside of FSDP."""

    @property
    def unshard(self) -> float:
        """Most that gathering needs besides what it gathers: its flat buffers, of which all are under way at once."""
        return float(self.gathered.sum()) if self.once and not self.copied else 0.0

    @property
    def reduce(self) -> float:
        """Most that a reduction at the end of a step needs besides whole gradients: two units' flat buffers, of which
        the second waits for the first, and the shards.
        """
        widest = np.sort(self.reduced)
        return float(widest[-1] + self.sharded) if len(widest) and widest[-1] else self.bucket

    def beside_forward(self) -> Units:
        """Weights of each block while it computes, and the buffer they came in."""
        return np.zeros_like(self.gathered[:-1]) if self.once else 2 * self.gathered[:-1]

    def beside_backward(self, first: bool) -> Units:
        """Gradients of each block's backward and, where blocks are gathered for it, weights, besides gradients that
        were there before.

        Args:
            first: no backward of the step came before it.
        """
        made, summed, reduced = self.made[:-1], self.summed[:-1], self.reduced[:-1]
        later = np.append(np.cumsum(summed[::-1])[::-1], 0.0)
        if self.once or not self.gathered.any():
            new = made + later[1:] if made.any() else later[:-1]
            if self.copied:  # made one by one while the block's activations go: as measured, half at the most
                new = summed / 2 + later[1:]
            around = self.made[-1] if self.made.any() else self.summed[-1]
            return new + around if first else np.where(made > 0, made + self.made[-1], self.single)
        following, before = np.append(reduced[1:], 0.0), np.insert(self.gathered[:-2], 0, 0.0)
        waiting = self.gathered[:-1] + before + made + self.made[-1] + following
        return waiting + (later[1:] if first else 0.0)

    def end_of_backward(self, first: bool) -> float:
        """Most when the unit around the blocks is reduced with every microbatch; other arguments as before."""
        if self.once:
            return 0.0
        new = float(self.summed.sum()) if first else 0.0
        return float(self.made[-1] + self.reduced[-1] + self.reduced[0]) + new


def stage_bytes(
    shape: ModuleShape, layout: ModuleLayout, first: int, last: int, once: bool, precision: Precision
) -> StageBytes:
    """Sizes of the stage of blocks ``first`` to ``last - 1``.

    Args:
        layout: resolved.
        once: whether parameters are gathered once per step.
    """
    left = np.array([1.0, 1 / layout.tp])
    stored = (shape.stored[first:last] * left).sum(axis=3)  # [blocks, units, trains]
    stored[-1] -= (shape.counted_twice(first, last) * left).sum(axis=2)
    frozen, trained = (np.append(stored[:, 0, t], stored[:, 1, t].sum()) for t in (0, 1))
    casts = precision.compute != precision.master and bool(trained.any())
    copied = casts and once and len(layout.ranks) == layout.pp
    fsdp, shard = (layout.shards > 1 or casts) and not copied, layout.shards
    # Over a group of one rank only what trains is cast.
    gathered = precision.compute * (trained + frozen * (shard > 1)) * (fsdp or copied)
    whole = precision.master * trained
    together = fsdp and (casts or not once)
    summed = whole if once or not fsdp else whole / shard
    owned = float(whole.sum()) / shard
    single = precision.compute * float(shape.largest[first:last].max()) / layout.tp
    return StageBytes(
        masters=owned + precision.compute * float(frozen.sum()) / shard + shape.buffers,
        optimizer=ADAM_STATES * owned,
        gathered=gathered,
        once=once or not fsdp,
        copied=copied,
        made=precision.compute * trained * together,
        summed=summed,
        sharded=owned,
        single=single,
        reduced=whole * fsdp,
        bucket=min(float(BUCKET_BYTES), owned) if layout.dp_replicate > 1 and not fsdp else 0.0,
    )


@dataclass(frozen=True, eq=False)
class StageNeeds:
    """Activations of a stage, ``[microbatches, instances]``, in bytes on each rank."""

    kept: Float64[np.ndarray, "microbatches instances"]
    """From forward until backward."""
    halves: Float64[np.ndarray, "microbatches instances"]
    """Between the halves of a backward."""
    forward: Float64[np.ndarray, "microbatches instances"]
    """Most in its forward, weights gathered for it included."""
    first: Float64[np.ndarray, "microbatches instances"]
    """Most in the first backward of a step, with its activations and new gradients."""
    again: Float64[np.ndarray, "microbatches instances"]
    """The same in a later one."""
    host: Float64[np.ndarray, "microbatches instances"]
    """In host memory from forward until backward, of each rank."""


def stage_needs(
    activations: Activations,
    layout: ModuleLayout,
    parts: int,
    recompute: Recompute | None,
    sizes: StageBytes,
    blocks: tuple[int, int],
    given: Float64[np.ndarray, "microbatches instances features"],
    labelled: Num[np.ndarray, "microbatches instances"] | None,
    offload: Offload | None = None,
) -> StageNeeds:
    """Activations of the stage of some blocks.

    Args:
        parts: into which the rows that are given are cut.
        blocks: its first block and the one after its last.
        given: features of what each instance has in each microbatch.
        labelled: rows with a label, where the stage has a head.
        offload: which blocks are in host memory; one of them is on its way there in a forward, and one back, besides
            the block that computes.
    """
    first, last = blocks
    ways = {way: made.on(layout.tp, parts) for way, made in activations.blocks.items()}
    plain = ways["kept"]
    chosen = [plain] * (last - first)
    at_once = recompute is not None and recompute.whole
    if recompute is not None and not at_once:
        again = ways["all but matmuls" if recompute.keeps_matmuls else "all"]
        chosen = [again if i % recompute.every == 0 else plain for i in range(first, last)]
    kept, halves, forward, backward = (
        np.stack([given @ _row(way, name, i) for way, i in zip(chosen, range(first, last), strict=True)])
        for name in ("kept", "halves", "forward", "backward")
    )
    rows = given[:, :, 0]
    more = np.stack([way.later * rows for way in chosen]) * (backward > 0)
    more[0] = 0.0
    kept, halves = kept + more, halves + more
    moved, near = _moved(chosen, first, offload, given, kept * (backward > 0))
    kept = kept - moved
    gradient = activations.row / parts * rows
    forward[1:] += gradient * (backward[1:] == 0)  # what a block takes, where none before it keeps that for backward
    backward = backward + gradient * np.append(np.ones(last - first - 1), float(labelled is not None))[:, None, None]
    before = np.cumsum(kept, axis=0) - kept + near[:-1]
    beside = [x[:, None, None] for x in (sizes.beside_forward(), *map(sizes.beside_backward, (True, False)))]
    most = [
        (before + own + extra).max(axis=0) for own, extra in zip((forward, backward, backward), beside, strict=True)
    ]
    most[1:] = [np.maximum(m, sizes.end_of_backward(first)) for m, first in zip(most[1:], (True, False), strict=True)]
    stays = kept.sum(axis=0)
    under = stays + near[-1]
    if at_once:  # forward keeps nothing, and backward begins with a forward that keeps all
        most[0] = (forward + beside[0]).max(axis=0)
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
    chosen: Sequence[BlockBytes], first: int, offload: Offload | None, given: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each block that are in host memory, ``[blocks, microbatches, instances]``; and those of the nearest such
    block before each block, and before what comes after them.
    """
    moved, near = np.zeros_like(kept), np.zeros((len(kept) + 1, *kept.shape[1:]))
    for i, way in enumerate(chosen if offload is not None else ()):
        assert offload is not None and way.stays is not None
        near[i + 1] = near[i]
        if (first + i) % offload.every == 0:
            stays = given @ way.stays[:, i + first].sum(axis=0) + (i > 0) * way.stays_later * given[:, :, 0]
            near[i + 1] = moved[i] = np.maximum(kept[i] - stays, 0.0)
    return moved, near


def _row(way: BlockBytes, name: str, block: int) -> Float64[np.ndarray, "features"]:
    found: np.ndarray = getattr(way, name)
    return found[:, block].sum(axis=0) if name == "kept" else found[block]
