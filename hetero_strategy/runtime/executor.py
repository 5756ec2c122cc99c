"""Runs a step's program on this rank: receive, run, send.

Every (stage, microbatch) is its own autograd graph between detached leaves: the order of work is the program's, never
what the autograd engine happens to choose. The program says what each action reads, where its rows go and when each
transfer starts (``schedule.compile``). Nothing here waits for the device, but for actions that lie some before
(``runtime.recorder.Lead``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from hetero_strategy.boundary.transport import Channel, Crossing, Transport
from hetero_strategy.layout.placement import Coordinate, Placement
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.combine import StepSums
from hetero_strategy.model.inputs import ModuleInputs, without_waiting
from hetero_strategy.model.kind import check_output
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.copies import masters_kept
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.parallelize.tied import Tied
from hetero_strategy.plan.ahead import computing
from hetero_strategy.runtime import backward
from hetero_strategy.runtime.agreement import Agreement
from hetero_strategy.runtime.held import Held
from hetero_strategy.runtime.local_stage import Live, LocalStage, Output
from hetero_strategy.runtime.payload import Copies, Payload, ToCuda
from hetero_strategy.runtime.recorder import Recorder
from hetero_strategy.runtime.side_stream import SideStream, side_stream
from hetero_strategy.runtime.unreached import Unreached
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.compile import RankAction, StepCompiler, StepProgram

Factors = Mapping[str, float | torch.Tensor | None]


@dataclass
class Executor:
    """Runs steps of one model on this rank.

    Args:
        stages: those of this rank.
        compiler: makes schedules and programs of steps.
        channels: by number of the stage edge, and whether gradients travel; those that this rank is part of.
        row_bytes: by number of the stage edge: bytes of a row on the way, on every rank.
        modules: all modules by name.
        placement: where they live.
        weights: of the loss of every module that has one, every source before its targets.
        replicas: ranks with equal parameters that saw other data (``dp_replicate`` without FSDP), by stage.
        tensor_parallel: ranks that split an instance's layers, by stage.
        tied: parameters that two stages share.
        device: of this rank.
        storage: dtypes of parameters; rows between modules have that in which they compute.
    """

    stages: Mapping[StageId, Adapter]
    compiler: StepCompiler
    channels: Mapping[tuple[int, bool], Channel]
    row_bytes: Sequence[int]
    modules: Mapping[str, Adapter]
    placement: Placement
    weights: Mapping[str, float]
    replicas: Mapping[StageId, dist.ProcessGroup | None]
    tensor_parallel: Mapping[StageId, dist.ProcessGroup | None]
    tied: Tied
    device: torch.device
    storage: Storage = FP32
    warms_up: bool = False
    """Whether stages run by themselves before the first step."""
    rank: int = field(default_factory=dist.get_rank)
    agreement: Agreement = field(default_factory=Agreement)
    recorder: Recorder = field(init=False)
    coordinates: dict[str, Coordinate] = field(init=False)
    """Of this rank, by module."""
    parameters: dict[StageId, list[nn.Parameter]] = field(init=False)
    """This rank's parts, as they are while nothing is gathered."""
    local: dict[StageId, LocalStage] = field(init=False)
    """What actions need of each of ``stages``."""
    held: Held = field(init=False)
    """Rows of modules that run a step ahead."""
    copies: Copies | None = field(init=False)
    """Bring inputs to the device; None where it is the host."""
    side: SideStream | None = field(init=False)
    """Where modules compute that fill bubbles inside actions."""
    crossing: set[int] = field(init=False)
    """Edges whose rows come from there or go there."""
    running: RunningStep | None = field(init=False, default=None)
    """The step in progress, or the one that failed."""
    unreached: Unreached = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.device, self.compiler)
        self.copies = ToCuda(self.device) if self.device.type == "cuda" else None
        self.parameters = {stage_id: list(stage.parameters()) for stage_id, stage in self.stages.items()}
        names = self.compiler.graph.pipelines  # of modules, and of what they do ahead
        seats = {name: self.placement.coordinate(computing(name), self.rank) for name in names}
        self.coordinates = {name: seat for name, seat in seats.items() if seat is not None}
        graph = self.compiler.graph
        self.side = side = side_stream(self.device, graph, self.compiler.config.tp_bubbles)
        self.crossing = side.crossing(graph) if side else set()
        self.local = {}
        for node, stage in self.stages.items():
            tp, stream = self.placement.layouts[computing(node.module)].tp, side.of(node.module) if side else None
            self.local[node] = LocalStage.of(node, stage, graph.stages[node], self.coordinates[node.module], tp, stream)
        self.unreached = Unreached.of(self.modules, self.placement)
        early = {node: self.parameters[node] for node, one in self.local.items() if one.early}
        self.held = Held({computing(node.module): [local(p) for p in parts] for node, parts in early.items()})

    @property
    def exact(self) -> bool:
        """Rows between modules are fp64: losses stay so too."""
        return self.storage.compute == torch.float64

    def run(self, batch: Batch, *, train: bool, factors: Factors | None = None, call: int = 0) -> StepSums:
        """Run one global batch: forwards, and with ``train`` backwards into ``p.grad`` of the owned parameters.

        A collective over the world: every rank calls it with the same plan.

        Args:
            batch: as this rank's loader made it; what it holds goes to the device microbatch by microbatch.
            train: with backward.
            factors: what multiplies a module's loss before backward, a number or a scalar tensor, or None where the
                loss is not used; 1 for modules that are not named.
            call: how often the model was given this batch before, for random numbers of its own.

        Returns:
            Losses, metrics and results of the whole step, the same on every rank.

        Raises:
            DataError: ranks have different plans.
        """
        self.recorder.open()
        batch = self.ready(batch, train=train)
        self.held.turn(batch.plan, train=train)
        assert batch.program is not None
        step = self.begin(batch, batch.program, Transport, factors, call)
        transport = step.transport
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        masters = masters_kept(self.stages.values())
        with random_state_kept(self.device), self.recorder.step(batch.plan, train=train), masters:
            with self.side or nullcontext():
                transport.start(batch.program.starts)
                for action in batch.program.actions:
                    if profiled:
                        with record_function(str(action.action)):
                            step.run(action)
                    else:
                        step.run(action)
            for finish in step.sums_under_way:
                finish()
            if train:
                self.tied.settle({a.action.node.module for a in batch.program.actions if a.last}, self.unreached.noted)
        self.release(train=train)
        self._reduce(step.sums, batch)
        transport.drain()
        self.running = None
        self.recorder.close()
        self.agreement.check()
        return step.sums

    def begin(
        self,
        batch: Batch,
        program: StepProgram,
        travels: type[Transport],
        factors: Factors | None = None,
        call: int = 0,
    ) -> RunningStep:
        """A step whose actions are still to run: those of the batch's program, or some of them."""
        assert batch.index is not None
        transfers = [(self.channels[t.edge, t.backward], t.transfer) for t in program.transfers]
        crossing: Crossing | None = None
        if self.side is not None:
            numbers = {number for number, t in enumerate(program.transfers) if t.edge in self.crossing}
            crossing = Crossing(self.side.carries, numbers)
        transport = travels(transfers, without_waiting(batch.index, self.device), crossing)
        self.running = RunningStep(self, batch, program, transport, factors or {}, call)
        return self.running

    def release(self, *, train: bool) -> None:
        """Free gathered weights of stages whose gradients are not reduced, which frees them."""
        for stage_id, stage in self.stages.items():
            if not (train and self.compiler.graph.stages[stage_id].trains):
                fsdp.release(stage)

    def _reduce(self, sums: StepSums, batch: Batch) -> None:
        """Sums over all ranks, and what these agree on. A collective; `Unreached.drop` may wait for the device."""
        missing, agreed = sums.spare.split([len(sums.spare) - Agreement.SUMMANDS, Agreement.SUMMANDS])
        self.agreement.write(batch.plan, agreed)
        self.unreached.write(missing)
        if self.placement.world_size > 1:
            for summed in (sums.totals, *sums.results.values()):
                dist.all_reduce(summed)
        self.agreement.note(batch.plan, agreed)
        self.unreached.drop(missing)

    def ready(self, batch: Batch, *, train: bool) -> Batch:
        """The batch with its program, which the loader made for the kind of step that it expected."""
        if batch.program is not None and batch.program.train == train:
            return batch
        return batch.with_program(self.compiler.program(batch.plan, rank=self.rank, train=train))


class RunningStep:
    """One step in progress."""

    def __init__(
        self, executor: Executor, batch: Batch, program: StepProgram, transport: Transport, factors: Factors, call: int
    ) -> None:
        self.executor, self.batch, self.program, self.transport = executor, batch, program, transport
        self.factors, self.call = factors, call
        self.graph = executor.compiler.graph
        self.action: Action | None = None
        """What runs, or ran last."""
        self.live: dict[tuple[StageId, int], Live] = {}
        self.gradients: dict[int, torch.Tensor | None] = {}
        """Those of a step that failed, by ``id`` of their parameter: it has the gradients of before again."""
        executor.unreached.noted.clear()
        self.sums_under_way: list[Callable[[], None]] = []
        """What waits for sums of gradients over data-parallel ranks that run beside the rest of the step."""
        self.sums = StepSums(
            executor.modules,
            executor.weights,
            batch.plan,
            evaluation=not program.train,
            device=executor.device,
            dtype=torch.float64 if executor.exact else torch.float32,
            pipelined={name for name, layout in executor.placement.layouts.items() if layout.pipeline.stages > 1},
            spare=len(executor.unreached) * program.train + Agreement.SUMMANDS,
        )
        on: Callable[[str], AbstractContextManager[Any]] = nullcontext
        if executor.side is not None:
            executor.side.fork()
            on = executor.side.using
        forwards = (a.action for a in program.actions if a.action.kind == "F")
        uses = ((a.node.module, a.microbatch) for a in forwards if not batch.plan.holds(a.node.module, a.node.stage))
        self.payload = Payload(batch.inputs, uses, executor.copies, on)

    def run(self, step: RankAction) -> None:
        """Run one action: take its rows, compute, give what it makes, and start what starts then."""
        local = self.executor.local[step.action.node]
        if (lead := self.executor.recorder.lead) is not None:
            lead.wait(local.stream)
        if local.stream is None:
            self._run(step, local)
        else:
            with torch.cuda.stream(local.stream):
                self._run(step, local)
        if step.starts:  # not on the stream of this action: what arrives may be for another one
            self.transport.start(step.starts)

    def _run(self, step: RankAction, local: LocalStage) -> None:
        action, recorder = step.action, self.executor.recorder
        self.action = action
        match action.kind:
            case "F":
                arrived = [self.transport.take(number).detach() for number in step.reads]
                begin = recorder.now()
                self._forward(step, local, arrived)
            case "B" | "I":
                gradient = self._gradient(step)
                begin = recorder.now()
                self._backward(step, local, gradient)
            case "W":
                begin = recorder.now()
                live = self.live.pop((action.node, action.microbatch))
                assert live.later is not None
                live.later()
                local.accumulate()
            case "UNSHARD":
                begin = recorder.now()
                fsdp.gather(local.adapter)
            case "REDUCE":
                begin = recorder.now()
                groups = self.executor.replicas[action.node], self.executor.tensor_parallel[action.node]
                self.sums_under_way.append(local.start_sums(*groups, self.executor.unreached.noted))
        recorder.ran(action, begin, local.stream)

    def _forward(self, step: RankAction, local: LocalStage, arrived: list[torch.Tensor]) -> None:
        stage_id, microbatch = step.action.node, step.action.microbatch
        differentiable = self.program.train and local.node.backward
        hidden, rows = None, {}
        for source, leaf in zip(step.sources, arrived, strict=True):
            if differentiable and self.graph.stages[source.node].backward:
                leaf.requires_grad_()
            if source.node.module == stage_id.module:
                hidden = leaf
            else:
                rows[source.node, source.microbatch] = leaf
        plan, held = self.batch.plan, self.executor.held
        if plan.held and plan.holds(stage_id.module, stage_id.stage):
            self._give(step, held.rows(plan, stage_id.module, microbatch))
            return
        inputs = self._inputs(step)
        seed = local.random_numbers.start(
            replace(plan.metadata, step=plan.metadata.step + 1) if local.early else plan.metadata,
            0 if local.early else self.call,  # rows are made once, whatever number this call has
            microbatch, local.seat.instance, local.seat.shard, self.executor.device, rows_of=local.rows_of,
        )  # fmt: skip
        live = Live(arrived, seed)
        if differentiable:
            if local.host is not None:
                local.host.latest = None  # no block of another microbatch, where this one runs none
            out = local.adapter(inputs, rows, hidden)
            if local.host is not None and local.host.latest is not None:
                live.come_back = local.host.latest.start
        else:
            with torch.no_grad():
                out = local.adapter(inputs, rows, hidden)
        if local.adapter.last_stage:
            check_output(local.adapter, out)
        made: torch.Tensor | None = out if isinstance(out, torch.Tensor) else out.hidden
        if local.early:
            assert made is not None
            held.keep(plan, computing(stage_id.module), microbatch, made, train=self.program.train)
            return
        if not isinstance(out, torch.Tensor):
            live.loss = Output.of(out.loss_sum) if out.loss_sum.requires_grad else None
            if local.speaks:
                units = plan.assignments[stage_id.module][microbatch].of(local.seat.instance)
                self.sums.add(stage_id.module, units, inputs, out)
        live.rows = self._give(step, made)
        if differentiable:
            self.live[stage_id, microbatch] = live

    def _give(self, step: RankAction, made: torch.Tensor | None) -> Output | None:
        """Give what an action makes to all that read it; what its backward needs of it, if it has one."""
        if not step.gives:
            return None
        assert made is not None and step.gives[0] is not None
        dtype = self.executor.channels[self.program.transfers[step.gives[0]].edge, False].dtype
        made = made.to(dtype)
        given = made.detach()
        for number in step.gives:
            assert number is not None
            self.transport.give(number, given)
        return Output.of(made) if made.requires_grad else None

    def _inputs(self, step: RankAction) -> ModuleInputs:
        """What the module takes besides rows, with the slots of this rank."""
        inputs = self.payload.take((step.action.node.module, step.action.microbatch))
        if step.action.node.stage or not step.sources:
            return inputs
        slots: dict[Hashable, torch.Tensor] = {
            (source.node, source.microbatch): self.transport.index.narrow(0, filled.at, filled.size)
            for source, filled in zip(step.sources, step.slots, strict=True)
            if filled is not None
        }
        return replace(inputs, slots=slots)

    def _gradient(self, step: RankAction) -> torch.Tensor | None:
        """Sum of the gradients of an action's rows; None where nobody sends any, or nothing came in that trains."""
        gradient: torch.Tensor | None = None
        rows = self.live[step.action.node, step.action.microbatch].rows
        if rows is not None and len(step.reads) > 1:  # added up apart: one may still be read by sends to other ranks
            gradient = rows.filled(0.0, self.executor.device)
        for number in step.reads:
            taken = self.transport.take(number, gradient)
            gradient = None if rows is None else taken
        for number in step.frees:
            self.transport.free(number)
        return gradient

    def _backward(self, step: RankAction, local: LocalStage, gradient: torch.Tensor | None) -> None:
        stage_id, microbatch = step.action.node, step.action.microbatch
        halved = step.action.kind == "I"
        live = self.live[stage_id, microbatch] if halved else self.live.pop((stage_id, microbatch))
        local.random_numbers.again(live.seed)
        roots: backward.Roots = []
        device = self.executor.device
        if live.loss is not None and (factor := self.factors.get(stage_id.module, 1.0)) is not None:
            weight = self.executor.weights[stage_id.module] / self.batch.plan.normalizer(stage_id.module)
            roots.append((live.loss.edge, live.loss.filled(weight, device) * factor))
        if live.rows is not None:
            gradient = live.rows.filled(0.0, device) if gradient is None else gradient
            roots.append((live.rows.edge, gradient.to(live.rows.dtype)))
        live.rows = live.loss = None
        if roots and live.come_back is not None:
            live.come_back()
        if halved:
            weights = [p for p in local.adapter.parameters() if p.requires_grad]
            leaves = [leaf for leaf in live.leaves if leaf.requires_grad]
            live.later = backward.inputs_first(roots, leaves, weights, local.recomputed)
            local.accumulate()
        elif local.wrapped is None:
            backward.whole(roots)
            if local.copies is not None:
                local.copies.fold()
        else:
            self._backward_of_wrapped(step, local, roots)
        for number, leaf in zip(step.gives, live.leaves, strict=True):
            if number is not None:
                self.transport.give(number, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        live.leaves = []

    def _backward_of_wrapped(self, step: RankAction, local: LocalStage, roots: backward.Roots) -> None:
        around: AbstractContextManager[None] = nullcontext()
        if not local.node.sharded:
            fsdp.per_microbatch(local.adapter, step.last, self.executor.unreached.noted)
        elif step.last and step.action.node.cohort < 0:  # else other instances may be at other work
            around = fsdp.reducing(local.adapter, self.executor.unreached.noted)
        silent = not roots
        with around:
            backward.whole(roots)
        if silent and not local.node.sharded:
            fsdp.finish(local.adapter)  # no hook of a backward does, and the next step would compute with these weights
