"""Memory that each rank needs in a step, by purpose, from the step's plan, schedule and simulation. Pure.

Every tensor of a step is a pair of changes: bytes that come at one point of a rank's list of actions and go at another.
The sum of all earlier changes is alive at a time. So a peak follows from this rank's microbatches in the order that
runs, and is not a product of the largest of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout, Placement
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.parallelize.transforms import Transforms, label, settings, way
from hetero_strategy.plan.step_plan import Assignment, StepPlan
from hetero_strategy.profiling.memory_changes import AFTER, ALWAYS, DURING, Changes, Walk
from hetero_strategy.profiling.stage_memory import (
    Activations,
    StageBytes,
    StageNeeds,
    blocks_of,
    features,
    features_in_context,
    stage_bytes,
    stage_needs,
)
from hetero_strategy.runtime.connect import message_buffers, module_groups
from hetero_strategy.runtime.payload import AHEAD
from hetero_strategy.schedule.action import Schedule, StageGraph, StageId
from hetero_strategy.simulator.cost_model import MIXED, Precision, sends_keys

KINDS = ("masters", "optimizer", "gathered", "gradients", "activations", "rows", "moment", "payload", "reserved")
"""Purposes of bytes. rows: at the edges of stages, from arrival or creation until the last use. moment: needed only
while an action runs. payload: inputs of modules other than rows. reserved: communicators, and what the allocator cannot
use."""


@dataclass(frozen=True)
class Allocator:
    """A description of a device's memory besides tensors of the model, and of how long tensors stay."""

    margin: float = 0.0
    """Share of all tensors' bytes that fragmentation takes."""
    communicator: int = 0
    """Bytes of a process group for collectives on each of its ranks."""
    messages: bool = False
    """Whether messages have buffers on the device, see :func:`~hetero_strategy.runtime.connect.message_buffers`."""
    copies: bool = False
    """Whether payload is copied to the device microbatch by microbatch; False: the device is the host, and holds a
    step's."""
    holds_sent: bool = True
    """Whether sent rows stay until they are known to have arrived, as gloo does not say when they have left."""


CPU = Allocator()
"""Allocator for gloo: counts the tensors alone."""
CUDA = Allocator(margin=0.05, communicator=128 * 2**20, messages=True, copies=True, holds_sent=False)
"""Allocator for NCCL, whose buffers for collectives are 4 MiB (``NCCL_BUFFSIZE``) for each direction of 16 channels;
the margin is an assumption."""


@dataclass(frozen=True)
class KeptByStage:
    """The activations of one stage, for the microbatch and the instance that have most."""

    stage: StageId
    in_flight: int
    """Most microbatches that hold activations at a time."""
    device: float
    """Bytes on each of the instance's ranks for each microbatch."""
    host: float
    """Bytes of each microbatch in host memory."""
    transforms: Mapping[str, str | int]
    """Settings of the transforms that change what is kept, by name."""


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of a step on every rank, at the rank's peak."""

    bytes: Float64[np.ndarray, "kinds ranks"]
    """Bytes by :data:`KINDS`."""
    kept: tuple[KeptByStage, ...] = ()
    """Activations of every stage that has a backward, from forward until backward."""

    @property
    def peak(self) -> Float64[np.ndarray, "ranks"]:
        """Return the bytes on every rank."""
        return self.bytes.sum(axis=0)


@dataclass(frozen=True)
class MemoryModel:
    """A predictor of the memory of steps.

    Args:
        activations: activations of every module, see ``profiling.activations``.
        precision: numbers of parameters and compute, as when activations were measured.
    """

    shape: ModelSpec
    activations: Mapping[str, Activations]
    precision: Precision = MIXED
    allocator: Allocator = CPU
    accumulates: bool = False
    """Whether gradients of earlier batches are held throughout, as if an optimizer step has several batches."""

    def of(
        self,
        plan: StepPlan,
        schedule: Schedule,
        placement: Placement,
        transforms: Transforms,
    ) -> Memory:
        """Predict the memory of one step on every rank.

        Args:
            placement: placement in which every layout has its ``split``.
            transforms: transforms of each module, including those that ``fill="decoupled"`` adds.
        """
        graph, layouts = schedule.graph, placement.layouts
        self._check_measured(transforms)
        sizes = {stage_id: self._sizes(layouts, graph, stage_id) for stage_id in graph.stages}
        needs = self._needs(plan, graph, layouts, transforms, sizes)
        changes = Changes(KINDS, graph)
        for stage_id, stage in graph.stages.items():
            size = sizes[stage_id]
            earlier = size.sharded * self.accumulates
            for kind, amount in (("masters", size.masters), ("optimizer", size.optimizer), ("gradients", earlier)):
                changes.add(-1, stage_id, kind, np.full(len(stage.grid), amount))
        self._payload(plan, schedule, changes)
        widths = {(s, t): self.precision.compute * self.shape.width(s.module, t.module) for s, t in graph.edges}
        Walk(plan, schedule, widths, sizes, needs, self.allocator.holds_sent, changes).run()
        bytes_ = changes.at_peak(placement.world_size)
        shared = self.allocator.communicator * communicators(placement, graph.balanced)
        bytes_[-1] = self.allocator.margin * bytes_.sum(axis=0) + shared
        if self.allocator.messages:
            bytes_[-1] += message_buffers(graph, placement.world_size)
        kept = (
            _kept(stage_id, count, needs[stage_id], transforms.get(stage_id.module, {}))
            for stage_id, count in schedule.in_flight.items()
            if count
        )
        return Memory(bytes_, tuple(kept))

    def _check_measured(self, transforms: Transforms) -> None:
        """Refuse transforms with which some block's activations were not measured."""
        for name, of in transforms.items():
            blocks = range(self.shape.modules[name].blocks)
            labels = {label(way(of, i, moved=moved)) for i in blocks for moved in (False, True)}
            if missing := sorted(labels - self.activations[name].blocks.keys()):
                raise ConfigError(
                    f"memory of '{name}': activations of blocks with '{missing[0]}' were not measured; give its"
                    f" transforms {settings({name: of})[name]} to memory_model(), or ways_of(blocks, transforms) as"
                    f" ways['{name}'] to activations_of()"
                )

    def _sizes(self, layouts: Mapping[str, ModuleLayout], graph: StageGraph, stage_id: StageId) -> StageBytes:
        layout, once = layouts[stage_id.module], graph.stages[stage_id].sharded
        module = self.shape.modules[stage_id.module]
        return stage_bytes(module, layout, *blocks_of(layout, stage_id), once, self.precision)

    def _needs(
        self,
        plan: StepPlan,
        graph: StageGraph,
        layouts: Mapping[str, ModuleLayout],
        transforms: Transforms,
        sizes: Mapping[StageId, StageBytes],
    ) -> dict[StageId, StageNeeds]:
        needs = {}
        for name in graph.pipelines:
            assignments, layout = plan.assignments[name], layouts[name]
            rows = np.stack([self._given(a, name, layout) for a in assignments])
            labels = plan.metadata.labels if self.shape.modules[name].samplewise else None
            for nodes in graph.chains[name]:
                stage = graph.stages[nodes[0]]
                own = slice(None) if stage.members is None else stage.members
                for node in nodes:
                    labelled = None
                    if labels is not None and node == nodes[-1]:
                        labelled = np.stack([np.diff(ragged.offsets(labels[a.units])[a.offsets]) for a in assignments])
                        labelled = -(-labelled[:, own] // layout.cp)
                    parts = max(1, stage.row_sharding.parts // layout.cp)  # replicated rows of encoders have one
                    needs[node] = stage_needs(
                        self.activations[name], layout, parts, transforms.get(name, {}),
                        sizes[node], blocks_of(layout, node), rows[:, own], labelled,
                    )  # fmt: skip
        return needs

    def _given(
        self, assignment: Assignment, name: str, layout: ModuleLayout
    ) -> Float64[np.ndarray, "instances features"]:
        """Return the features of every instance's packing, on a rank; those that exchange heads get no keys."""
        if not sends_keys(self.shape.modules[name], layout):
            return features(assignment.totals(inner=True) / layout.cp)
        instances = range(len(assignment.offsets) - 1)
        return np.stack([features_in_context(assignment.inner_rows_of(i), layout.cp) for i in instances])

    def _payload(self, plan: StepPlan, schedule: Schedule, changes: Changes) -> None:
        """Note payload on the first stage of each module that a rank has. If payload is copied, it is on the device
        from the turn of the computation before, when its copy begins, until its backward, which may need it.
        """
        graph, turns = schedule.graph, _turns(plan, schedule)
        for node, own in turns.items():
            stage, payload = graph.stages[node], self.activations[node.module].payload
            totals = np.array([stage.own(a.totals(inner=True)) for a in plan.assignments[node.module]])
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


def _turns(plan: StepPlan, schedule: Schedule) -> dict[StageId, list[tuple[int, int, int]]]:
    """Return, for the first stage on its ranks of every module, the first and the last action that computes with each
    microbatch's inputs, and the microbatch.
    """
    graph, spans = schedule.graph, dict[tuple[StageId, int], tuple[int, int]]()
    for n, (_, node, microbatch) in enumerate(schedule.starts):
        spans[node, microbatch] = spans.get((node, microbatch), (n, n))[0], n
    turns = {}
    for nodes in chain.from_iterable(graph.chains.values()):
        for node in nodes:
            here = [other for other in nodes if graph.stages[other].ranks & graph.stages[node].ranks]
            if here[0] == node:
                used = [
                    [spans[other, m] for other in here if (other, m) in spans]
                    for m in range(len(plan.assignments[node.module]))
                ]
                turns[node] = [(min(some)[0], max(last for _, last in some), m) for m, some in enumerate(used) if some]
    return turns


def communicators(placement: Placement, balanced: Collection[str]) -> Int64[np.ndarray, "ranks"]:
    """Count NCCL's communicators for collectives that each rank is part of."""
    ranks = [rank for group in module_groups(placement, (), balanced) if len(group) > 1 for rank in group]
    return np.bincount(ranks, minlength=placement.world_size)


def _kept(stage: StageId, in_flight: int, needs: StageNeeds, transforms: Mapping[str, Transform]) -> KeptByStage:
    most = np.unravel_index((needs.kept + needs.host).argmax(), needs.kept.shape)
    changing = {n: each.setting for n, each in transforms.items() if each.changes_memory}
    return KeptByStage(stage, in_flight, float(needs.kept[most]), float(needs.host[most]), changing)
