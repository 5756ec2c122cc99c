"""What crosses between stages, and how: the plan's routes on the registry's groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from hetero_strategy.boundary.exchange import Channel, Crossing, Format, InFlight
from hetero_strategy.boundary.line import Line, Pair
from hetero_strategy.boundary.route import Route, Side, local_slots, route, stage_route
from hetero_strategy.layout.placement import Placement
from hetero_strategy.loading.batch import ModuleInputs
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.inputs import EncoderInputs, host_index
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks, slots
from hetero_strategy.schedule.action import StageId

NodeEdge = tuple[StageId, StageId]
Inputs = TypeVar("Inputs", bound=ModuleInputs)


@dataclass(frozen=True)
class Groups:
    """Process groups of one edge: first and second hop of each direction; None where all of it is one rank."""

    forward: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
    backward: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


class Wiring:
    """Edges between stages as this rank sees them.

    Args:
        modules: all modules by name.
        placement: where they live.
        groups: of every edge, in one order on every rank.
        rank: this rank.
        device: of this rank.
        wire_dtype: of rows between modules.
        hidden_dtype: of rows between stages of one module.
    """

    def __init__(
        self,
        modules: Mapping[str, Adapter],
        placement: Placement,
        groups: Mapping[NodeEdge, Groups],
        rank: int,
        device: torch.device,
        wire_dtype: torch.dtype,
        hidden_dtype: torch.dtype,
    ) -> None:
        self.modules = dict(modules)
        self.placement = placement
        self.rank = rank
        self.device = device
        self.wire_dtype = wire_dtype
        self.hidden_dtype = hidden_dtype
        self._groups = dict(groups)
        self._number = {edge: i for i, edge in enumerate(groups)}

    def form(self, source: StageId, target: StageId) -> Format:
        """Rows between two stages."""
        module = self.modules[source.module]
        if source.module == target.module:
            return Format(module.hidden_width, self.hidden_dtype, self.device)
        return Format(module.width, self.wire_dtype, self.device)

    def channel(self, edge: NodeEdge, in_flight: InFlight, *, forward: bool) -> Channel:
        """Where an edge's rows (forward) or gradients travel."""
        groups = self._groups[edge]
        first, second = groups.forward if forward else groups.backward
        return Channel(first, second, 2 * self._number[edge] + (not forward), in_flight)

    def side(self, node: StageId, plan: StepPlan, microbatch: int, *, inner: bool) -> Side:
        """How rows lie on a stage's ranks: those inside the module, or those it gives to others."""
        layout, adapter = self.placement.layouts[node.module], self.modules[node.module]
        totals = plan.assignments[node.module][microbatch].totals(inner=inner)
        return Side(layout.stage_grid(node.stage), totals, sharded=adapter.sequence_parallel and layout.tp > 1)

    def step(self, plan: StepPlan, in_flight: InFlight) -> StepWires:
        """Routes of one step."""
        return StepWires(self, plan, in_flight)


class StepWires:
    """Routes and crossings of one step plan."""

    def __init__(self, wiring: Wiring, plan: StepPlan, in_flight: InFlight) -> None:
        self._wiring = wiring
        self._plan = plan
        self._in_flight = in_flight
        self._routes: dict[tuple[StageId, int, StageId, int], Route] = {}

    def line(self, edge: NodeEdge, pairs: Sequence[Pair], *, forward: bool) -> Line:
        """All crossings of an edge, of rows (forward) or of their gradients, on their way back to the source."""
        channel = self._wiring.channel(edge, self._in_flight, forward=forward)
        form = self._wiring.form(*edge)

        def make(pair: Pair) -> Crossing:
            way = self._route(edge[0], pair[0], edge[1], pair[1])
            return Crossing(way.forward if forward else way.backward, channel, form)

        return Line(pairs, make)

    def localized(self, inputs: Inputs, node: StageId, microbatch: int) -> Inputs:
        """The inputs with slots as row numbers of this rank, where rows are sharded over the instance."""
        if node.stage or isinstance(inputs, EncoderInputs) or not inputs.slots:
            return inputs
        side = self._wiring.side(node, self._plan, microbatch, inner=True)
        where = self._wiring.placement.coordinate(node.module, self._wiring.rank)
        if not side.sharded or where is None:
            return inputs
        local: dict[Hashable, torch.Tensor] = {}
        for key, index in inputs.slots.items():
            source, p = cast(tuple[str, int], key)
            filled = slots(edge_blocks(self._plan, source, p, node.module, microbatch), where.instance)
            local[key] = host_index(local_slots(filled, side, where.instance, where.shard), index)
        return replace(inputs, slots=local)

    def _route(self, source: StageId, p: int, target: StageId, t: int) -> Route:
        key = (source, p, target, t)
        if key not in self._routes:
            side, plan, rank = self._wiring.side, self._plan, self._wiring.rank
            if source.module == target.module:
                made = stage_route(side(source, plan, p, inner=True), side(target, plan, t, inner=True), rank)
            else:
                blocks = edge_blocks(plan, source.module, p, target.module, t)
                made = route(blocks, side(source, plan, p, inner=False), side(target, plan, t, inner=True), rank)
            self._routes[key] = made
        return self._routes[key]
