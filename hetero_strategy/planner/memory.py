"""How much memory each rank needs in a step, by what it is for, from the step's plan, schedule and simulation. Pure.

Every tensor of a step is a pair of changes: bytes that come at one point of a rank's list of actions and go at another.
What is alive at a time is the sum of all changes before, so a peak is that of the order that runs, of this rank's
microbatches, and not a product of the largest of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.model.inputs import Packing
from hetero_strategy.plan.ahead import computing
from hetero_strategy.plan.step_plan import Assignment
from hetero_strategy.planner.activations import FEATURES, Activations, features, features_in_context
from hetero_strategy.planner.evaluate import Candidate, Evaluator, Placed, Step
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.stage_memory import StageBytes, StageNeeds, stage_bytes, stage_needs
from hetero_strategy.planner.times import MIXED, Precision
from hetero_strategy.planner.transfers import AFTER, ALWAYS, DURING, Changes, Walk
from hetero_strategy.runtime.connect import message_buffers, process_groups
from hetero_strategy.runtime.payload import AHEAD
from hetero_strategy.schedule.action import StageId

KINDS = ("masters", "optimizer", "gathered", "gradients", "activations", "rows", "moment", "payload", "reserved")
"""What bytes are for. rows: at the edges of stages, from their arrival or making until nobody needs them. moment: what
an action needs while it runs, besides what it keeps. payload: what modules take besides rows. reserved: communicators,
and what the allocator cannot use."""


@dataclass(frozen=True)
class Allocator:
    """What a device's memory holds besides tensors of the model, and how long."""

    margin: float = 0.0
    """Share of all tensors' bytes that fragmentation takes."""
    communicator: int = 0
    """Bytes of a process group for collectives on each of its ranks."""
    messages: bool = False
    """Whether messages have buffers on the device, see :func:`~hetero_strategy.runtime.connect.message_buffers`."""
    copies: bool = False
    """Payload comes to the device microbatch by microbatch, else all of a step's is there: the device is the host."""
    holds_sent: bool = True
    """Sent rows stay until they are known to have arrived, as gloo does not say when they have left."""
    buckets: bool = True
    """Attention pads sequences of similar length together."""


CPU = Allocator()
"""gloo, and a count of the tensors alone."""
CUDA = Allocator(margin=0.05, communicator=128 * 2**20, messages=True, copies=True, holds_sent=False, buckets=False)
"""NCCL, whose buffers for collectives are 4 MiB (``NCCL_BUFFSIZE``) for each direction of 16 channels; the margin is an
assumption."""


@dataclass(frozen=True)
class KeptByStage:
    """Activations of one stage, of the microbatch and the instance that have most."""

    stage: StageId
    in_flight: int
    """Most microbatches that have them at a time."""
    device: float
    """Bytes on each of the instance's ranks for each microbatch."""
    host: float
    """The same in host memory."""
    recompute: str
    """What runs again, as a person says it; empty: nothing."""
    offload: str
    """Which blocks are in host memory; empty: none."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory of a step on every rank, at the moment when most is needed there."""

    step: Step
    bytes: Float64[np.ndarray, "kinds ranks"]
    """By :data:`KINDS`."""
    needs: Mapping[StageId, StageNeeds] = field(repr=False)

    def kept(self) -> list[KeptByStage]:
        """What every stage keeps from forward until backward, of those that have one."""
        candidate, found = self.step.placed, []
        for stage_id, count in self.step.schedule.in_flight.items():
            if count:
                name, needs = computing(stage_id.module), self.needs[stage_id]
                most = np.unravel_index((needs.kept + needs.host).argmax(), needs.kept.shape)
                again, away = candidate.recompute.get(name), candidate.candidate.offload.get(name)
                sizes = float(needs.kept[most]), float(needs.host[most])
                found.append(KeptByStage(stage_id, count, *sizes, str(again or ""), str(away or "")))
        return found

    @property
    def peak(self) -> Float64[np.ndarray, "ranks"]:
        """Bytes on every rank."""
        return self.bytes.sum(axis=0)


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of steps.

    Args:
        activations: of every module, see ``profiling.activations``.
        precision: in which parameters are kept and compute; that in which activations were measured.
    """

    shape: ModelShape
    activations: Mapping[str, Activations]
    precision: Precision = MIXED
    allocator: Allocator = CPU
    accumulates: bool = False
    """Gradients of batches before are there throughout, as where an optimizer step has several."""

    def of(self, step: Step) -> Memory:
        """Memory of one step on every rank."""
        placed, graph = step.placed, step.placed.graph
        ranks = placed.placement.world_size
        sizes = {stage_id: self._sizes(placed, stage_id) for stage_id in graph.stages}
        needs = self._needs(step, sizes)
        changes = Changes(KINDS, graph)
        for stage_id, stage in graph.stages.items():
            size = sizes[stage_id]
            kept = size.sharded * self.accumulates
            for kind, amount in (("masters", size.masters), ("optimizer", size.optimizer), ("gradients", kept)):
                changes.add(-1, stage_id, kind, np.full(len(stage.grid), amount))
        self._payload(step, changes)
        early = self._rows_ahead(step)
        for stage_id, made in early.items():  # as much of the step before is there throughout
            changes.add(-1, stage_id, "rows", made.sum(axis=0))
        widths = {edge: self.precision.compute * self.shape.width(*edge) for edge in graph.edges}
        Walk(step, widths, sizes, needs, early, self.allocator.holds_sent, changes).run()
        bytes_ = changes.at_peak(ranks)
        bytes_[-1] = self.allocator.margin * bytes_.sum(axis=0) + self.allocator.communicator * communicators(placed)
        if self.allocator.messages:
            bytes_[-1] += message_buffers(graph, ranks)
        return Memory(step, bytes_, needs)

    def shown(self, evaluator: Evaluator, candidate: Candidate, batch: int = 0) -> Memory:
        """Memory of a step, see :meth:`Evaluator.shown`."""
        return self.of(evaluator.shown(evaluator.place(candidate), batch))

    def _sizes(self, placed: Placed, stage_id: StageId) -> StageBytes:
        name, times = computing(stage_id.module), placed.times[stage_id]
        layout = placed.placement.layouts[name]
        size = stage_bytes(self.shape.modules[name], layout, *_blocks(placed, stage_id), times.once, self.precision)
        if name != stage_id.module:  # the weights are those of the stage that holds its rows
            return replace(size, masters=0.0, optimizer=0.0)
        return replace(size, gathered=0.0 * size.gathered) if _holds(placed, stage_id) else size

    def _rows_ahead(self, step: Step) -> dict[StageId, Float64[np.ndarray, "microbatches instances"]]:
        """Bytes on each rank of the rows that stages make for the next step."""
        placed, made = step.placed, {}
        for stage_id, stage in placed.graph.stages.items():
            if (name := computing(stage_id.module)) != stage_id.module:
                inside, module = placed.placement.layouts[name].pipeline.stages > 1, self.shape.modules[name]
                width = self.precision.compute * (module.width if inside else module.edge_width)
                rows = [stage.own(a.totals(inner=inside)) for a in step.plan.assignments[stage_id.module]]
                made[stage_id] = np.stack(rows) * width / stage.row_sharding.parts
        return made

    def _needs(self, step: Step, sizes: Mapping[StageId, StageBytes]) -> dict[StageId, StageNeeds]:
        placed, plan, found = step.placed, step.plan, {}
        for module in placed.graph.pipelines:
            name, assignments = computing(module), plan.assignments[module]
            cp = placed.placement.layouts[name].cp
            given = np.stack([self._given(a, cp) for a in assignments])
            labels = plan.metadata.labels if self.shape.modules[name].samplewise else None
            how = placed.recompute.get(name)
            for nodes in placed.graph.chains[module]:
                stage = placed.graph.stages[nodes[0]]
                own = slice(None) if stage.members is None else stage.members
                for node in nodes:
                    labelled = None
                    if labels is not None and node == nodes[-1]:
                        labelled = np.stack([np.diff(ragged.offsets(labels[a.units])[a.offsets]) for a in assignments])
                        labelled = np.minimum(labelled[:, own], given[:, own, 0])  # all may be those of one rank
                    found[node] = stage_needs(
                        self.activations[name], placed.placement.layouts[name], stage.row_sharding.parts // cp, how,
                        sizes[node], _blocks(placed, node), given[:, own], labelled, placed.candidate.offload.get(name),
                    )  # fmt: skip
        return found

    def _given(self, assignment: Assignment, cp: int) -> Float64[np.ndarray, "instances features"]:
        """Features of every instance's packing, on a rank."""
        instances = range(len(assignment.offsets) - 1)
        if cp > 1:
            masked = self.allocator.buckets
            return np.stack([features_in_context(assignment.inner_rows_of(i), cp, masked) for i in instances])
        if self.allocator.buckets:
            return np.stack([features(Packing.of(assignment.inner_rows_of(i))) for i in instances])
        given = np.zeros((len(assignment.offsets) - 1, len(FEATURES)))
        given[:, 0] = assignment.totals(inner=True)
        return given

    def _payload(self, step: Step, changes: Changes) -> None:
        """Note what modules take besides rows, on the first stage of theirs that a rank has. Where it is copied, it is
        there from the turn of what is computed before it on, when its copy begins, until its backward, which may need
        it.
        """
        graph, turns = step.placed.graph, _turns(step)
        for node, own in turns.items():
            stage, payload = graph.stages[node], self.activations[computing(node.module)].payload
            totals = np.array([stage.own(a.totals(inner=True)) for a in step.plan.assignments[node.module]])
            sizes = totals * float(payload)
            if not self.allocator.copies:
                changes.add(ALWAYS, node, "payload", sizes.sum(axis=0))
                continue
            begin = sorted(
                first for n, its in turns.items() if stage.ranks <= graph.stages[n].ranks for first, *_ in its
            )
            for first, last, m in own:
                number = bisect_left(begin, first) - AHEAD
                changes.add(3 * begin[number] + DURING if number >= 0 else ALWAYS, node, "payload", sizes[m])
                changes.add(3 * last + AFTER, node, "payload", -sizes[m])


def _turns(step: Step) -> dict[StageId, list[tuple[int, int, int]]]:
    """Of the first stage of every module that ranks have: numbers of the first and the last action on them that
    computes with each microbatch's inputs, and the microbatch.
    """
    graph, spans = step.placed.graph, dict[tuple[StageId, int], tuple[int, int]]()
    for n, (_, node, microbatch) in enumerate(step.schedule.starts):
        spans[node, microbatch] = spans.get((node, microbatch), (n, n))[0], n
    turns = {}
    for nodes in chain.from_iterable(graph.chains.values()):
        for node in nodes:
            here = [other for other in nodes if graph.stages[other].ranks & graph.stages[node].ranks]
            if here[0] == node and not step.plan.holds(node.module, node.stage):
                used = [
                    [spans[other, m] for other in here if (other, m) in spans]
                    for m in range(len(step.plan.assignments[node.module]))
                ]
                turns[node] = [(min(some)[0], max(last for _, last in some), m) for m, some in enumerate(used) if some]
    return turns


def communicators(placed: Placed) -> Int64[np.ndarray, "ranks"]:
    """NCCL's communicators for collectives that each rank is part of."""
    groups = process_groups(placed.placement, placed.graph, (), "cuda")["modules"]
    ranks = [rank for group in groups if len(group) > 1 for rank in group]
    return np.bincount(ranks, minlength=placed.placement.world_size)


def _holds(placed: Placed, stage_id: StageId) -> bool:
    """Whether a stage has its rows from the step before and computes nothing."""
    return stage_id.stage == 0 and stage_id.module in placed.scheduling.prefetch


def _blocks(placed: Placed, stage_id: StageId) -> tuple[int, int]:
    """Its first block and the one after its last; a module without blocks counts as one."""
    split = placed.placement.layouts[computing(stage_id.module)].split
    assert split is not None
    counts = np.maximum(split, 1)
    end = int(counts[: stage_id.stage + 1].sum())
    return end - int(counts[stage_id.stage]), end
