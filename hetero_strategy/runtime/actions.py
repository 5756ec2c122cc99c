"""Run one action of a step: one function for each kind.

Every (stage, microbatch) is its own autograd graph between detached leaves, so the program sets the order of work, and
not the autograd engine. Rows and gradients travel by :class:`~hetero_strategy.boundary.transport.Transport`, as in the
public ``exchange``. But no autograd function calls it: F gives rows to it, and B or I gives it their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from hetero_strategy.boundary.transport import Transport
from hetero_strategy.layout.spec import Coordinate
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.combine import StepSums
from hetero_strategy.model.inputs import ModuleInputs
from hetero_strategy.model.kind import LossOutput, check_output
from hetero_strategy.model.routing import StepRouting, Tally, counting, running
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.copies import copies_of
from hetero_strategy.parallelize.gradients import Reached, settle
from hetero_strategy.parallelize.host_memory import host_memory
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime.backward import Roots, WeightsLater, inputs_first, whole
from hetero_strategy.runtime.payload import Payload
from hetero_strategy.runtime.recorder import Mark, Recorder
from hetero_strategy.schedule.action import Action, Stage, StageGraph, StageId
from hetero_strategy.schedule.compile import RankAction, StepProgram

Factor = float | torch.Tensor
"""Factor of a loss before backward, a number or a scalar tensor."""


class LocalStage:
    """A stage of this rank: what it runs, looked up once and not between two kernels.

    Args:
        adapter: module of the stage.
        node: the stage in the schedule's graph.
        seat: coordinate of this rank in the stage's module.
        replicas: ranks with equal parameters that saw other data (``dp_replicate`` without FSDP).
        tensor_parallel: ranks that split an instance's layers.
        balanced: ranks that sum the choices of experts, see :func:`balance_sets`.
    """

    def __init__(
        self,
        adapter: Adapter,
        node: Stage,
        seat: Coordinate,
        replicas: dist.ProcessGroup | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
        balanced: dist.ProcessGroup | None = None,
    ) -> None:
        self.adapter, self.node, self.seat = adapter, node, seat
        self._replicas, self._tensor_parallel, self.balanced = replicas, tensor_parallel, balanced
        self.rows_of = node.row_sharding.part_of(seat.shard, node.grid.shape[1])
        """Number of the part of the instance's rows that this rank has."""
        self.speaks = seat.tensor == 0
        """Whether this rank counts the loss and the metrics of its rows, which other tensor-parallel ranks have too."""
        assert adapter.random_numbers is not None
        self.random_numbers = adapter.random_numbers
        self.host = host_memory(adapter)
        """Host memory in which its blocks keep activations for backward."""
        self.parameters = list(adapter.parameters())
        """This rank's parts of parameters, as they are while nothing is gathered."""
        self._wrapped = isinstance(adapter, FSDPModule)
        self._copies = copies_of(adapter)
        """Low-precision copies of weights with which the stage computes, if it has them."""
        self._recomputed = adapter.recomputed_parts()
        """Parts whose forward runs again in a backward."""

    def forward(
        self,
        inputs: ModuleInputs,
        rows: Mapping[tuple[StageId, int], torch.Tensor],
        hidden: torch.Tensor | None,
        *,
        differentiable: bool,
    ) -> torch.Tensor | LossOutput:
        """Run the forward, with or without a graph for backward."""
        if self.host is not None:
            self.host.latest = None  # drop a block of another microbatch, in case this one runs none
        if differentiable:
            out = self.adapter(inputs, rows, hidden)
        else:
            with torch.no_grad():
                out = self.adapter(inputs, rows, hidden)
        if self.adapter.last_stage:
            check_output(self.adapter, out)
        return out

    def backward(self, roots: Roots, do: RankAction, reached: Reached) -> None:
        """Run a whole backward from ``roots``; note in ``reached`` which gradients are missing where it sums them."""
        if not self._wrapped:
            whole(roots)
            if self._copies is not None:
                self._copies.fold()
            return
        # Instances that act on their own may run other work now.
        sums_now = do.last and self.node.sharded and do.action.node.cohort < 0
        if not self.node.sharded:
            fsdp.per_microbatch(self.adapter, do.last, reached)
        silent = not roots
        with fsdp.reducing(self.adapter, reached) if sums_now else nullcontext():
            whole(roots)
        if silent and not self.node.sharded:
            fsdp.finish(self.adapter)  # no backward hook finishes it, and the next step would use these weights

    def inputs_first(self, roots: Roots, leaves: list[torch.Tensor]) -> WeightsLater:
        """Run the half of a backward that makes the gradients of inputs; return the other half."""
        weights = [p for p in self.adapter.parameters() if p.requires_grad]
        later = inputs_first(roots, [leaf for leaf in leaves if leaf.requires_grad], weights, self._recomputed)
        self.accumulate()
        return later

    def accumulate(self) -> None:
        """Add up gradients in the masters' dtype: those of copies, and of half a backward, which FSDP's hooks do not
        see.
        """
        if self._copies is not None:
            self._copies.fold()
        elif self._wrapped:
            fsdp.accumulate(self.adapter)

    def start_sums(self, reached: Reached) -> Callable[[], None]:
        """Start to sum gradients over data-parallel ranks; return a function that waits for the sums. See
        :func:`settle`.
        """
        if self._copies is not None:
            self._copies.release()
        trained = [p for p in self.parameters if p.requires_grad]
        if not (self._wrapped and self.node.sharded):
            return settle(trained, self._replicas, self._tensor_parallel, reached)
        fsdp.reduce(self.adapter, reached)

        def finish() -> None:
            fsdp.finish(self.adapter)
            settle(trained, self._replicas, self._tensor_parallel, reached)()

        return finish


class Output(NamedTuple):
    """An output whose memory may be freed: backward needs only its place in the graph."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Output | None:
        """Return the output's place in the graph, if it is in one."""
        return Output(get_gradient_edge(tensor), tensor.shape, tensor.dtype) if tensor.requires_grad else None

    def filled(self, value: float, device: torch.device) -> torch.Tensor:
        return torch.full(self.shape, value, dtype=self.dtype, device=device)


@dataclass(slots=True)
class Live:
    """The activations of one microbatch of one stage, from its forward until its backward."""

    leaves: list[torch.Tensor]
    """Incoming rows, one tensor per transfer."""
    seed: int = 0
    """Seed of its random numbers."""
    rows: Output | None = None
    loss: Output | None = None
    later: WeightsLater | None = None
    tally: Tally | None = None
    """Choices of its routers, which layers that run again do not count again."""
    come_back: Callable[[], None] | None = None
    """Function that starts to copy activations back from host memory."""


@dataclass
class RunningStep:
    """A step in progress on this rank."""

    local: Mapping[StageId, LocalStage]
    graph: StageGraph
    plan: StepPlan
    program: StepProgram
    transport: Transport
    payload: Payload
    sums: StepSums
    """Losses, metrics and results so far."""
    recorder: Recorder
    reached: Reached
    """Parameters whose gradients are summed over ranks so far, and whether this rank had one."""
    losses: Mapping[str, tuple[float, Factor]]
    """Weight over normalizer, and factor, of each module whose loss is used."""
    dtype: torch.dtype
    """Data type of rows between stages."""
    device: torch.device
    call: int
    """Number of earlier calls of the model with this batch."""
    seeds: bool
    """Whether random numbers are seeded, see :class:`Seeding`."""
    action: Action | None = None
    """The action that runs, or ran last."""
    live: dict[tuple[StageId, int], Live] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of a failed step by ``id`` of their parameter, whose ``.grad`` has its earlier value again."""
    routed: dict[str, StepRouting] = field(default_factory=dict)
    """Routing of the modules that have routers, in training."""
    sums_under_way: list[Callable[[], None]] = field(default_factory=list)
    """Functions that wait for sums of gradients over data-parallel ranks; the sums overlap the rest of the step."""

    def run(self, do: RankAction) -> None:
        """Run one action: take its rows, compute, give its output, and start the transfers that are due."""
        self.action, recorder = do.action, self.recorder
        if recorder.lead is not None:
            recorder.lead.wait()
        stage = self.local[do.action.node]
        match do.action.kind:
            case "F":
                begin = self._forward(do, stage)
            case "B" | "I":
                begin = self._backward(do, stage)
            case "W":
                begin = self._weights(do, stage)
            case "UNSHARD":
                begin = recorder.now()
                fsdp.gather(stage.adapter)
            case "REDUCE":
                begin = recorder.now()
                self.sums_under_way.append(stage.start_sums(self.reached))
        recorder.ran(do.action, begin)
        if do.starts:
            self.transport.start(do.starts)

    def _forward(self, do: RankAction, stage: LocalStage) -> Mark:
        """F: run a microbatch forward; return when its rows had come."""
        leaves = [self.transport.take(number) for number in do.reads]
        begin, node, microbatch = self.recorder.now(), do.action.node, do.action.microbatch
        differentiable = self.program.train and stage.node.backward
        hidden, rows = None, {}
        for source, leaf in zip(do.sources, leaves, strict=True):
            if differentiable and self.graph.stages[source.node].backward:
                leaf.requires_grad_()
            if source.node.module == node.module:
                hidden = leaf
            else:
                rows[source.node, source.microbatch] = leaf
        plan, seat, inputs = self.plan, stage.seat, self._inputs(do)
        live = Live(leaves)
        if self.seeds:
            where = self.call, microbatch, seat.instance, seat.shard, self.device
            live.seed = stage.random_numbers.start(plan.metadata, *where, rows_of=stage.rows_of)
        units = plan.assignments[node.module][microbatch].of(seat.instance)
        routed, (arriving, leaving) = self.routed.get(node.module), do.choices
        before = None if routed is None or arriving is None else self.transport.take(arriving)
        with counting(routed, microbatch, units, before, last=leaving is None) as live.tally:
            out = stage.forward(inputs, rows, hidden, differentiable=differentiable)
        if live.tally is not None and leaving is not None:
            self.transport.give(leaving, live.tally.sums())
        if stage.host is not None and stage.host.latest is not None:
            live.come_back = stage.host.latest.start
        if isinstance(out, torch.Tensor):
            live.rows = self._give(do, out)
        else:
            live.loss, live.rows = Output.of(out.loss_sum), self._give(do, out.hidden)
            if stage.speaks:
                self.sums.add(node.module, units, inputs, out)
        if differentiable:
            self.live[node, microbatch] = live
        return begin

    def _backward(self, do: RankAction, stage: LocalStage) -> Mark:
        """B and I: run a microbatch's backward, or its half for the inputs; return when its gradients had come."""
        key = do.action.node, do.action.microbatch
        live = self.live[key]
        gradient = self._gradient(do, live)
        begin = self.recorder.now()
        if self.seeds:
            stage.random_numbers.again(live.seed)
        roots = self._roots(do, live, gradient)
        if roots and live.come_back is not None:
            live.come_back()
        if live.tally is not None:
            self._lead_back(do, live.tally)
        with running(stage.adapter.routing, live.tally):
            if do.action.kind == "I":
                live.later = stage.inputs_first(roots, live.leaves)
            else:
                del self.live[key]
                stage.backward(roots, do, self.reached)
        for number, leaf in zip(do.gives, live.leaves, strict=True):
            if number is not None:
                self.transport.give(number, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        live.leaves = []
        return begin

    def _lead_back(self, do: RankAction, tally: Tally) -> None:
        """Set the slope of a microbatch's loss on balance from the counts of all stages, and pass the counts on."""
        routed, (arriving, leaving) = self.routed[do.action.node.module], do.choices
        likeliest = routed.likeliest(do.action.microbatch) if arriving is None else self.transport.take(arriving)
        tally.slope = routed.slope(do.action.microbatch, likeliest)
        if leaving is not None and likeliest is not None:
            self.transport.give(leaving, likeliest)

    def _weights(self, do: RankAction, stage: LocalStage) -> Mark:
        """W: run the half of a microbatch's backward for the weights."""
        begin, live = self.recorder.now(), self.live.pop((do.action.node, do.action.microbatch))
        assert live.later is not None
        live.later()
        stage.accumulate()
        return begin

    def _give(self, do: RankAction, rows: torch.Tensor | None) -> Output | None:
        """Send an action's rows to all that read them; return what their backward needs, if they have one."""
        if not do.gives:
            return None
        assert rows is not None
        if rows.dtype is not (dtype := self.dtype):
            rows = rows.to(dtype)
        detached = rows.detach()
        for number in do.gives:
            assert number is not None
            self.transport.give(number, detached)
        return Output.of(rows)

    def _inputs(self, do: RankAction) -> ModuleInputs:
        """Return the module's inputs besides rows, with the slots of this rank."""
        inputs = self.payload.take((do.action.node.module, do.action.microbatch))
        if do.action.node.stage or not do.sources:
            return inputs
        slots: dict[Hashable, torch.Tensor] = {
            (source.node, source.microbatch): self.transport.index.narrow(0, filled.at, filled.size)
            for source, filled in zip(do.sources, do.slots, strict=True)
            if filled is not None
        }
        return replace(inputs, slots=slots)

    def _gradient(self, do: RankAction, live: Live) -> torch.Tensor | None:
        """Receive the gradients of an action's rows; return their sum, or None if nobody sends any or no input
        trains.
        """
        gradient: torch.Tensor | None = None
        if live.rows is not None and len(do.reads) > 1:  # a sum of its own: sends may still read a part
            gradient = live.rows.filled(0.0, self.device)
        for number in do.reads:
            taken = self.transport.take(number, gradient)
            gradient = None if live.rows is None else taken
        for number in do.frees:
            self.transport.free(number)
        return gradient

    def _roots(self, do: RankAction, live: Live, gradient: torch.Tensor | None) -> Roots:
        """Return the outputs from which a backward starts, with their gradients: the loss and the rows."""
        roots: Roots = []
        if live.loss is not None and (loss := self.losses.get(do.action.node.module)) is not None:
            weight, factor = loss
            roots.append((live.loss.edge, live.loss.filled(weight, self.device) * factor))
        if live.rows is not None:
            roots.append((live.rows.edge, live.rows.filled(0.0, self.device) if gradient is None else gradient))
        live.rows = live.loss = None
        return roots
