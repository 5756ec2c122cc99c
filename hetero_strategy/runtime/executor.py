"""Runs a step's schedule on this rank.

Every (stage, microbatch) is its own autograd graph between detached leaves: the order of work is the order of actions,
never what the autograd engine happens to choose. Rows leave as soon as they exist, receives are posted ahead of the
action that needs them, and nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hetero_strategy.boundary.exchange import InFlight
from hetero_strategy.boundary.line import Line, Pair
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import LMOutput
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.gradients import settle
from hetero_strategy.parallelize.tied import Tied
from hetero_strategy.runtime import backward
from hetero_strategy.runtime.agreement import Agreement
from hetero_strategy.runtime.recorder import Recorder
from hetero_strategy.runtime.step_output import StepMetrics, StepOutput
from hetero_strategy.runtime.wiring import NodeEdge, Wiring
from hetero_strategy.schedule.action import Action, Schedule, StageGraph, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import PlannedCosts, StageCost, work_of

AHEAD = 2
"""Actions whose receives are posted before they are reached."""


@dataclass(frozen=True)
class Program:
    """How steps are scheduled.

    Args:
        schedule: its name, see ``schedule.build``.
        costs: of every stage.
        max_in_flight: module -> most microbatches whose activations one of its stages holds.
    """

    schedule: str
    costs: Mapping[StageId, StageCost]
    max_in_flight: Mapping[str, int] = field(default_factory=dict)
    reduces_each: bool = False
    """Stages that are not gathered once per step reduce gradients after every microbatch, not after the last."""


@dataclass
class _Live:
    """What is alive of one microbatch of one stage on this rank."""

    leaves: dict[Action, torch.Tensor] = field(default_factory=dict)
    """What came in, by the forward that made it."""
    rows: torch.Tensor | None = None
    """Output rows with a gradient function."""
    loss: torch.Tensor | None = None
    later: backward.WeightsLater | None = None


class Executor:
    """Runs steps of one model on this rank.

    Args:
        stages: of this rank, by node.
        graph: of all stages.
        wiring: what crosses between them, and how.
        program: how steps are scheduled.
        weights: of the loss of every module that has one.
        replicas: node -> group of ranks with equal parameters that saw other data (``dp_replicate`` without FSDP).
        tied: parameters that two stages share.
        device: of this rank.
    """

    def __init__(
        self,
        stages: Mapping[StageId, Adapter],
        graph: StageGraph,
        wiring: Wiring,
        program: Program,
        weights: Mapping[str, float],
        replicas: Mapping[StageId, dist.ProcessGroup | None],
        tied: Tied,
        device: torch.device,
    ) -> None:
        self.stages = dict(stages)
        self.graph = graph
        self.wiring = wiring
        self.program = program
        self.weights = dict(weights)
        self.replicas = dict(replicas)
        self.tied = tied
        self.device = device
        self.rank = dist.get_rank()
        self.coordinates = {node: wiring.placement.coordinate(node.module, self.rank) for node in stages}
        self.in_flight = InFlight()
        self.recorder = Recorder(device)
        self.agreement = Agreement()

    def run(
        self,
        batch: Batch,
        *,
        train: bool,
        factors: Mapping[str, float | torch.Tensor | None] | None = None,
        call: int = 0,
    ) -> StepOutput:
        """Run one global batch: forwards, and with ``train`` backwards into ``p.grad`` of the owned parameters.

        Args:
            batch: as this rank's loader made it.
            train: with backward.
            factors: module -> what multiplies its loss before backward, a number or a scalar tensor, or None where the
                loss is not used; 1 for the others.
            call: how often the model was given this batch before, for random numbers of its own.

        A collective over the world: every rank calls it with the same plan.

        Raises:
            DataError: ranks have different plans.
        """
        self.recorder.open()
        schedule = self.schedule(batch, train=train)
        actions = schedule.of(self.rank)
        step = _Step(self, batch, schedule, factors or {}, call)
        with random_state_kept(self.device), self.recorder.step(schedule, batch.plan):
            for number, action in enumerate(actions):
                for coming in actions[number : number + 1 + AHEAD]:
                    step.post(coming)
                step.do(action)
                self.in_flight.prune()
            if train:
                self.tied.settle({node.module for node in step.last})
        for node, stage in self.stages.items():
            if isinstance(stage, FSDPModule) and not (train and self.graph.stages[node].backward):
                fsdp.release(stage)
        outcome = step.counter.outcome(self.agreement)
        self.in_flight.drain()
        self.recorder.close()
        self.agreement.check()
        return outcome

    def schedule(self, batch: Batch, *, train: bool) -> Schedule:
        """The schedule of a batch; a function of its plan alone, so the same on every rank."""
        return make_schedule(
            self.program.schedule,
            self.graph,
            work_of(batch.plan, self.graph),
            PlannedCosts(batch.plan, self.graph, self.program.costs),
            train=train,
            max_in_flight=self.program.max_in_flight,
        )


class _Step:
    """One step in progress."""

    def __init__(
        self,
        executor: Executor,
        batch: Batch,
        schedule: Schedule,
        factors: Mapping[str, float | torch.Tensor | None],
        call: int,
    ) -> None:
        self.x = executor
        self.batch = batch
        self.schedule = schedule
        self.factors = factors
        self.call = call
        self.live: dict[tuple[StageId, int], _Live] = {}
        self.lines: dict[tuple[NodeEdge, bool], Line] = {}
        self.wires = executor.wiring.step(batch.plan, executor.in_flight)
        self.counter = StepMetrics(executor.wiring, batch, train=schedule.train, device=executor.device)
        self.last = {
            action.node: action.microbatch for action in schedule.of(executor.rank) if action.kind in ("B", "W")
        }

    # ---- what crosses ----------------------------------------------------------------------------------------------

    def post(self, action: Action) -> None:
        """Start the receives of an action to come."""
        for source in self.schedule.dependencies.crossing(action):
            line, pair = self._line(source, action.node, action.microbatch)
            line.post(pair)

    def _line(self, source: Action, node: StageId, microbatch: int) -> tuple[Line, Pair]:
        """Where what an action makes (rows by F, gradient rows by B or I) travels to a node and its microbatch."""
        forward = source.kind == "F"
        edge = (source.node, node) if forward else (node, source.node)
        if (edge, forward) not in self.lines:
            self.lines[edge, forward] = self.wires.line(edge, self._pairs(edge), forward=forward)
        pair = (source.microbatch, microbatch) if forward else (microbatch, source.microbatch)
        return self.lines[edge, forward], pair

    def _pairs(self, edge: NodeEdge) -> Sequence[Pair]:
        source, target = edge
        if source.module == target.module:
            return [(span.number, span.number) for span in self.schedule.work.microbatches[source.module]]
        return self.schedule.work.feeds[(source.module, target.module)]

    def _arrive(
        self, source: Action, node: StageId, microbatch: int, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Wait for what an action sent to a node and microbatch."""
        line, pair = self._line(source, node, microbatch)
        return line.receive(pair, add_to)

    def _send(self, action: Action, node: StageId, microbatch: int, rows: torch.Tensor) -> None:
        """Let what an action made leave for a node and microbatch."""
        line, pair = self._line(action, node, microbatch)
        line.send(pair, rows)

    # ---- actions ---------------------------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        match action.kind:
            case "F":
                self._forward(action)
            case "B" | "I":
                self._backward(action)
            case "W":
                with self.x.recorder.timing(action):
                    live = self.live.pop((action.node, action.microbatch))
                    self._sync(action)
                    assert live.later is not None
                    live.later()
            case "UNSHARD":
                with self.x.recorder.timing(action):
                    fsdp.gather(self.x.stages[action.node])
            case "REDUCE":
                with self.x.recorder.timing(action):
                    self._reduce(action.node)

    def _forward(self, action: Action) -> None:
        node, microbatch = action.node, action.microbatch
        stage, inputs = self.x.graph.stages[node], self.batch.inputs[node.module][microbatch]
        assert inputs is not None, f"{action} has no inputs"
        differentiable = self.schedule.train and stage.backward
        live = _Live()
        hidden, rows = None, {}
        for source in self.schedule.dependencies.rows_from(node, microbatch):
            leaf = self._arrive(source, node, microbatch).detach()
            leaf.requires_grad_(differentiable and self.x.graph.stages[source.node].backward)
            live.leaves[source] = leaf
            if source.node.module == node.module:
                hidden = leaf
            else:
                rows[(source.node.module, source.microbatch)] = leaf
        with self.x.recorder.timing(action):
            inputs = self.wires.localized(inputs, node, microbatch)
            self._random_numbers(node, microbatch)
            with torch.set_grad_enabled(differentiable):
                out = self.x.stages[node](inputs, rows, hidden)
            made: torch.Tensor | None = out if isinstance(out, torch.Tensor) else None
            if not isinstance(out, torch.Tensor):
                made = out.hidden if isinstance(out, LMOutput) else None
                live.loss = out.loss_sum
                self.counter.add(node, microbatch, inputs, out)
            self._send_rows(action, made, live)
        if differentiable:
            self.live[(node, microbatch)] = live

    def _send_rows(self, action: Action, made: torch.Tensor | None, live: _Live) -> None:
        node, microbatch = action.node, action.microbatch
        targets = self.schedule.dependencies.readers(node, microbatch)
        if not targets:
            return
        assert made is not None
        made = made.to(self.x.wiring.form(node, targets[0][0]).dtype)
        live.rows = made
        for target, number in targets:
            self._send(action, target, number, made.detach())

    def _backward(self, action: Action) -> None:
        node, microbatch = action.node, action.microbatch
        live = self.live[(node, microbatch)]
        if action.kind == "B":
            del self.live[(node, microbatch)]
        sources = self.schedule.dependencies.gradients_from(node, microbatch)
        gradient: torch.Tensor | None = None
        if len(sources) > 1:  # added up apart: one that arrived may still be read by sends to other ranks
            assert live.rows is not None
            gradient = torch.zeros_like(live.rows)
        for source in sources:
            gradient = self._arrive(source, node, microbatch, add_to=gradient)
            line, pair = self._line(Action("F", node, microbatch), source.node, source.microbatch)
            line.settle(pair)  # whoever sends gradients has had the rows
        with self.x.recorder.timing(action):
            self._random_numbers(node, microbatch)
            roots = []
            factor = self.factors.get(node.module, 1.0)
            if live.loss is not None and live.loss.requires_grad and factor is not None:
                weight = self.x.weights[node.module] / self.batch.plan.normalizer(node.module)
                roots.append((live.loss, torch.full_like(live.loss, weight) * factor))
            if live.rows is not None and live.rows.requires_grad:
                if gradient is None:
                    gradient = torch.zeros_like(live.rows)
                roots.append((live.rows, gradient.to(live.rows.dtype)))
            inputs = [leaf for leaf in live.leaves.values() if leaf.requires_grad]
            with torch.autocast(self.x.device.type, enabled=False):  # it would change gradients of custom functions
                if action.kind == "I":
                    live.later = backward.inputs_first(
                        roots, inputs, [p for p in self.x.stages[node].parameters() if p.requires_grad]
                    )
                    live.rows = live.loss = None
                else:
                    self._sync(action)
                    backward.whole(roots)
            for source, leaf in live.leaves.items():
                if leaf.requires_grad:
                    back = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    self._send(action, source.node, source.microbatch, back)
            live.leaves = {}

    def _random_numbers(self, node: StageId, microbatch: int) -> None:
        stage = self.x.stages[node]
        where = self.x.coordinates[node]
        assert where is not None and stage.random_numbers is not None
        stage.random_numbers.start(
            self.batch.plan.metadata,
            self.call,
            microbatch,
            where.instance,
            where.shard,
            self.x.device,
            rows_apart=stage.sequence_parallel,
        )

    def _sync(self, action: Action) -> None:
        """Before gradients of weights are made: whether FSDP reduces them at once."""
        stage = self.x.stages[action.node]
        if isinstance(stage, FSDPModule) and not self.x.graph.stages[action.node].sharded:
            last = self.last[action.node] == action.microbatch
            fsdp.per_microbatch(stage, is_last=last or self.x.program.reduces_each)

    def _reduce(self, node: StageId) -> None:
        stage = self.x.stages[node]
        if isinstance(stage, FSDPModule) and self.x.graph.stages[node].sharded:
            fsdp.reduce(stage)
        settle((p for p in stage.parameters() if p.requires_grad), self.x.replicas[node])
