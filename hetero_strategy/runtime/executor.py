"""Run a step's program on this rank, action by action.

The program says what each action reads, where its rows go and when each transfer starts (``schedule.compile``);
``runtime.actions`` runs one action. The host waits for the device only to bound how many actions it runs ahead
(``runtime.recorder.Lead``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.profiler import record_function

from hetero_strategy.boundary.transport import Channel, Transport
from hetero_strategy.layout.spec import Placement
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.combine import StepSums
from hetero_strategy.model.inputs import without_waiting
from hetero_strategy.model.random_numbers import Seeding, random_state_kept
from hetero_strategy.model.routing import StepRouting
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.copies import masters_kept
from hetero_strategy.parallelize.gradients import Tied
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime.actions import Factor, LocalStage, RunningStep
from hetero_strategy.runtime.agreement import Agreement, Unreached
from hetero_strategy.runtime.payload import Payload, ToCuda
from hetero_strategy.runtime.recorder import Recorder
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.compile import RankTransfer, StepCompiler, StepProgram

Factors = Mapping[str, Factor | None]


@dataclass
class Executor:
    """An executor: it runs steps of one model on this rank.

    Args:
        local: stages of this rank.
        compiler: maker of schedules and programs of steps.
        channels: channels that this rank is part of, by number of the stage edge and whether gradients travel.
        row_bytes: bytes of a row in transit, by number of the stage edge, on every rank.
        modules: all modules by name.
        placement: layouts of the modules on ranks.
        weights: loss weight of every module with a loss, every source before its targets.
        tied: parameters that two stages share.
        device: device of this rank.
        storage: dtypes of parameters; rows between modules have the dtype of computing.
        warms_up: whether each stage runs alone once before the first step.
    """

    local: Mapping[StageId, LocalStage]
    compiler: StepCompiler
    channels: Mapping[tuple[int, bool], Channel]
    row_bytes: Sequence[int]
    modules: Mapping[str, Adapter]
    placement: Placement
    weights: Mapping[str, float]
    tied: Tied
    device: torch.device
    storage: Storage = FP32
    warms_up: bool = False
    rank: int = field(default_factory=dist.get_rank)
    agreement: Agreement = field(default_factory=Agreement)
    recorder: Recorder = field(init=False)
    stages: Mapping[StageId, Adapter] = field(init=False)
    """Modules of ``local``."""
    copies: ToCuda | None = field(init=False)
    """Copies of inputs to the device; None: the device is the host."""
    running: RunningStep | None = field(init=False, default=None)
    """The step in progress, or the one that failed."""
    expert_rows: Mapping[str, torch.Tensor] = field(init=False, default_factory=dict)
    """Rows that chose each expert in the last training step, by module with routers, int64 ``[layers, experts]``: sums
    over all ranks, the same on every rank, reduced with the step's losses. :attr:`Routing.routers` names the layers.
    These counts equal :attr:`ModelOutput.expert_rows`."""
    seeding: Seeding = field(init=False)
    """Switch for the seeding of modules."""
    unreached: Unreached = field(init=False)
    _of_choices: dict[tuple[int, bool, int], Channel] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.device, self.compiler)
        self.copies = ToCuda(self.device) if self.device.type == "cuda" else None
        self.stages = {node: local.adapter for node, local in self.local.items()}
        self.seeding = Seeding({local.random_numbers for local in self.local.values()})
        self.unreached = Unreached.of(self.modules, self.placement)

    @property
    def exact(self) -> bool:
        """Return whether rows between modules are fp64; losses are then too."""
        return self.storage.compute == torch.float64

    def run(self, batch: Batch, *, train: bool, factors: Factors | None = None, call: int = 0) -> StepSums:
        """Run one global batch: forwards, and with ``train`` backwards into ``p.grad`` of the owned parameters.

        A collective over the world: every rank calls it with the same plan.

        Args:
            batch: batch from this rank's loader; its tensors go to the device microbatch by microbatch.
            train: whether to run backwards.
            factors: factor of a module's loss before backward, a number or a scalar tensor, or None if the loss is not
                used; 1 for modules that are not named.
            call: number of earlier calls of the model with this batch, so that each call draws its own random numbers.

        Returns:
            Losses, metrics and results of the whole step, the same on every rank.
        """
        self.recorder.open()
        batch = self.ready(batch, train=train)
        assert batch.program is not None
        step = self.begin(batch, batch.program, Transport, factors, call)
        complete = train and self._has_rows(batch.plan)
        seeding = self.seeding.step(batch.plan.metadata.step, self.device, complete=complete)
        with self.step_scope(batch.plan, train=train), seeding:
            self.run_actions(step)
            if train:
                self.tied.settle({a.action.node.module for a in batch.program.actions if a.last}, self.unreached.noted)
        for routed in step.routed.values():
            routed.finish()
        self.release(train=train)
        self._reduce(step.sums, batch)
        self.expert_rows = step.sums.expert_rows or self.expert_rows
        step.transport.drain()
        self.running = None
        self.recorder.close()
        self.agreement.check()
        return step.sums

    @contextmanager
    def step_scope(self, plan: StepPlan, *, train: bool) -> Iterator[None]:
        """Record the actions that run inside; keep the masters of copied weights and the process's random state."""
        with (
            random_state_kept(self.device),
            self.recorder.step(plan, train=train),
            masters_kept(self.stages.values()),
        ):
            yield

    def _has_rows(self, plan: StepPlan) -> bool:
        """Return whether each module on this rank has units in a step."""
        seats = {node.module: local.seat.instance for node, local in self.local.items()}
        return all(any(len(a.of(own)) for a in plan.assignments[name]) for name, own in seats.items())

    def run_actions(self, step: RunningStep, *, named: bool = True) -> None:
        """Run the actions of a step's program, by name in a profile, and wait for the sums of gradients that they
        started.
        """
        profiled = named and torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        step.transport.start(step.program.starts)
        for do in step.program.actions:
            if profiled:
                with record_function(str(do.action)):
                    step.run(do)
            else:
                step.run(do)
        for finish in step.sums_under_way:
            finish()

    def begin(
        self,
        batch: Batch,
        program: StepProgram,
        travels: type[Transport],
        factors: Factors | None = None,
        call: int = 0,
    ) -> RunningStep:
        """Begin a step without running its actions: all actions of the batch's program, or some of them."""
        assert batch.index is not None
        plan = batch.plan
        transfers = [(self._channel(t), t.transfer) for t in program.transfers]
        self.unreached.noted.clear()
        sums = StepSums(
            self.modules,
            self.weights,
            plan,
            evaluation=not program.train,
            device=self.device,
            dtype=torch.float64 if self.exact else torch.float32,
            pipelined={name for name, layout in self.placement.layouts.items() if layout.pipeline.stages > 1},
            spare=len(self.unreached) * program.train + Agreement.SUMMANDS,
        )
        uses = ((a.action.node.module, a.action.microbatch) for a in program.actions if a.action.kind == "F")
        factors = dict.fromkeys(self.weights, 1.0) | dict(factors or {})
        self.running = RunningStep(
            local=self.local,
            graph=self.compiler.graph,
            plan=plan,
            program=program,
            transport=travels(transfers, without_waiting(batch.index, self.device)),
            payload=Payload(batch.inputs, uses, self.copies),
            sums=sums,
            recorder=self.recorder,
            reached=self.unreached.noted,
            losses={n: (w / plan.normalizer(n), x) for n, w in self.weights.items() if (x := factors[n]) is not None},
            dtype=self.storage.compute,
            device=self.device,
            call=call,
            seeds=not self.seeding.idle,
            routed=self._routed(sums, factors) if travels is Transport else {},
        )
        return self.running

    def _channel(self, transfer: RankTransfer) -> Channel:
        """Return the channel of a transfer; choices of experts have one of their own with the groups of the rows."""
        channel = self.channels[transfer.edge, transfer.backward]
        if not transfer.numbers:
            return channel
        key = transfer.edge, transfer.backward, transfer.numbers
        return self._of_choices.setdefault(key, replace(channel, width=transfer.numbers, dtype=torch.float64))

    def _routed(self, sums: StepSums, factors: Factors) -> dict[str, StepRouting]:
        """Return the routing of the modules on this rank that count choices of experts in a step."""
        routed = {}
        for name, local in {node.module: local for node, local in self.local.items()}.items():
            factor = factors.get(name, 1.0)
            routing = sums.routing(
                name,
                speaks=local.speaks,
                seed=None if factor is None else factor * self.weights.get(name, 0.0),
                group=local.balanced,
            )
            if routing is not None:
                routed[name] = routing
        return routed

    def release(self, *, train: bool) -> None:
        """Free gathered weights of stages whose gradients are not reduced; reducing gradients would free them."""
        for stage_id, stage in self.stages.items():
            if not (train and self.compiler.graph.stages[stage_id].trains):
                fsdp.release(stage)

    def _reduce(self, sums: StepSums, batch: Batch) -> None:
        """Sum results and agreements over all ranks. A collective; `Unreached.drop` may wait for the device."""
        missing, agreed = sums.spare.split([len(sums.spare) - Agreement.SUMMANDS, Agreement.SUMMANDS])
        self.agreement.write(batch.plan, agreed)
        self.unreached.write(missing)
        if self.placement.world_size > 1:
            for summed in (sums.totals, *sums.results.values()):
                dist.all_reduce(summed)
        self.agreement.note(batch.plan, agreed)
        self.unreached.drop(missing)

    def ready(self, batch: Batch, *, train: bool) -> Batch:
        """Return the batch with its program; compile it if the loader expected another kind of step."""
        if batch.program is not None and batch.program.train == train:
            return batch
        return batch.with_program(self.compiler.program(batch.plan, rank=self.rank, train=train))
