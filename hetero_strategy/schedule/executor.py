"""Runs a step's actions on this rank.

Every (module, microbatch) is its own autograd graph between detached leaves, and so is every exchange: the order of
work is the order of actions, never what the autograd engine happens to choose. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hetero_strategy.boundary.exchange import Edge, InFlight, exchange
from hetero_strategy.boundary.route import Side, local_slots, route
from hetero_strategy.data.batch import Batch
from hetero_strategy.data.plan import EdgeBlocks, StepPlan, edge_blocks, expand, slots
from hetero_strategy.layout.placement import Placement
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM, LMOutput
from hetero_strategy.model.inputs import IGNORE, SequenceInputs, host_index
from hetero_strategy.parallelize.gradients import settle
from hetero_strategy.schedule.order import Action, Graph, sequential


@dataclass
class _Microbatch:
    """What is alive of one microbatch on this rank."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """A module's output as its consumers see it: gradients of all outgoing edges add up here."""
    arrived: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Per edge: the exchange's output, and the leaf that the target module reads."""


@dataclass
class Outcome:
    """What a step yields, the same on every rank."""

    losses: torch.Tensor
    """fp64 ``[sinks]``: cross entropy summed over loss tokens, over N."""
    correct: torch.Tensor
    """fp64 ``[sinks]``: loss tokens predicted right."""
    exact: torch.Tensor
    """fp64 ``[sinks]``: samples with labels, every one of them right."""
    predicted: torch.Tensor | None
    """int64 ``[N]``: predicted token at every loss token in sample order (evaluation only), of the first sink."""


class Executor:
    """Runs steps of one model on this rank.

    Args:
        modules: all modules by name; only those owned here are ever called.
        graph: of the modules.
        placement: where they live.
        registry: its groups and meshes.
        device: of this rank.
        wire_dtype: of rows on every edge.
    """

    def __init__(
        self,
        modules: dict[str, Adapter],
        graph: Graph,
        placement: Placement,
        registry: GroupRegistry,
        device: torch.device,
        wire_dtype: torch.dtype,
    ) -> None:
        self.modules = modules
        self.graph = graph
        self.placement = placement
        self.registry = registry
        self.device = device
        self.wire_dtype = wire_dtype
        self.rank = dist.get_rank()
        self.owned = set(placement.modules_on(self.rank))
        self.sinks = [m for m in graph.modules if not graph.outgoing(m)]
        self.in_flight = InFlight()

    def run(self, batch: Batch, *, train: bool, seed_scale: torch.Tensor | None = None) -> Outcome:
        """Run one global batch: forwards, and with ``train`` backwards into ``p.grad`` of the owned parameters.

        Args:
            batch: as this rank's loader made it.
            train: with backward.
            seed_scale: scalar tensor that multiplies the loss before backward (fp16 loss scaling), or None.

        A collective over the world: every rank calls it with the same plan.
        """
        plan = batch.plan
        step = _Step(self, batch, train, seed_scale)
        active = {m: plan.active(m) for m in self.graph.modules}
        last = {m: numbers[-1] for m, numbers in active.items() if numbers}
        actions = sequential(self.graph, active, len(plan.microbatches), train=train)
        final_forward = max((i for i, a in enumerate(actions) if a.kind == "F"), default=-1)
        reduction = None
        for i, action in enumerate(actions):
            if self._takes_part(action):
                step.do(action, is_last=action.kind == "B" and last[str(action.node)] == action.microbatch)
            if i == final_forward:
                reduction = dist.all_reduce(step.totals, async_op=True)  # hidden behind the last backward
        if train:
            for name in self.graph.modules:
                if name in self.owned and name in self.graph.backward and active[name]:
                    self._settle(name)
        for name in self.owned:
            module = self.modules[name]
            if isinstance(module, FSDPModule) and not (train and name in self.graph.backward):
                # Without a backward FSDP leaves the root's whole weights as its parameters: an optimizer made after a
                # validation would train those, and not the shards.
                module.reshard()
        predicted = None
        if not train:
            predicted = step.predicted
            dist.all_reduce(predicted)
        if reduction is not None:
            reduction.wait()
        self.in_flight.drain()
        loss_tokens = max(1, plan.loss_tokens)
        return Outcome(step.totals[:, 0] / loss_tokens, step.totals[:, 1], step.totals[:, 2], predicted)

    def side(self, module: str, plan: StepPlan, microbatch: int) -> Side:
        """How a module's rows lie on its ranks in one microbatch."""
        layout = self.placement.layouts[module]
        adapter = self.modules[module]
        totals = plan.microbatches[microbatch].assignments[module].totals()
        return Side(layout.instances(), totals, sharded=adapter.sequence_parallel and layout.tp > 1)

    def _takes_part(self, action: Action) -> bool:
        names = (action.node,) if isinstance(action.node, str) else action.node
        return any(name in self.owned for name in names)

    def _settle(self, name: str) -> None:
        layout = self.placement.layouts[name]
        replicas = None
        if layout.dp_replicate > 1 and layout.dp_shard == 1:
            mesh = self.registry.mesh(name)
            assert mesh is not None
            replicas = mesh.get_group("dp_replicate")
        settle((p for p in self.modules[name].parameters() if p.requires_grad), replicas)


class _Step:
    """One step in progress."""

    def __init__(self, executor: Executor, batch: Batch, train: bool, seed_scale: torch.Tensor | None) -> None:
        self.x = executor
        self.batch = batch
        self.plan = batch.plan
        self.train = train
        self.seed = 1.0 / max(1, self.plan.loss_tokens)
        self.seed_scale = seed_scale
        self.live = [_Microbatch() for _ in self.plan.microbatches]
        self.blocks: dict[tuple[tuple[str, str], int], EdgeBlocks] = {}
        device = executor.device
        self.totals = torch.zeros(len(executor.sinks), 3, dtype=torch.float64, device=device)
        self.predicted = torch.zeros(0 if train else self.plan.loss_tokens, dtype=torch.int64, device=device)

    def do(self, action: Action, is_last: bool) -> None:
        match action.kind:
            case "F":
                self._forward(str(action.node), action.microbatch)
            case "B":
                self._backward(str(action.node), action.microbatch, is_last)
            case "XF":
                self._send_rows(action.node, action.microbatch)  # type: ignore[arg-type]
            case "XB":
                self._return_gradients(action.node, action.microbatch)  # type: ignore[arg-type]

    def _forward(self, name: str, mb: int) -> None:
        live = self.live[mb]
        module = self.x.modules[name]
        inputs = self.batch.inputs[mb][name]
        with torch.set_grad_enabled(self.train and name in self.x.graph.backward):
            if not isinstance(module, CausalLM):
                out = module(inputs).to(self.x.wire_dtype)
                live.outputs[name] = out
                live.leaves[name] = out.detach().requires_grad_(out.requires_grad)
                return
            assert isinstance(inputs, SequenceInputs)
            rows = {}
            for edge in self.x.graph.incoming(name):
                if edge in live.arrived:
                    rows[edge[0]] = live.arrived[edge][1]
            result = module(self._local(inputs, name, mb), rows)
        live.outputs[name] = result.loss_sum
        self._count(name, mb, inputs, result)

    def _local(self, inputs: SequenceInputs, name: str, mb: int) -> SequenceInputs:
        """The inputs with slots as row numbers of this rank, where the rows are sharded over the instance."""
        side = self.x.side(name, self.plan, mb)
        where = self.x.placement.coordinate(name, self.x.rank)
        if not side.sharded or where is None:
            return inputs
        local = {}
        for source in inputs.slots:
            rows = local_slots(slots(self._blocks((source, name), mb), where.instance), side, *where)
            local[source] = host_index(rows, inputs.ids)
        return replace(inputs, slots=local)

    def _send_rows(self, edge: tuple[str, str], mb: int) -> None:
        live = self.live[mb]
        crossing = self._edge(edge, mb)
        carries = self.train and edge[0] in self.x.graph.backward
        leaf = live.leaves.get(edge[0])
        if leaf is None:
            leaf = crossing.empty_source().requires_grad_(carries)
        with torch.set_grad_enabled(carries):
            out = exchange(leaf, crossing)
        live.arrived[edge] = (out, out.detach().requires_grad_(carries))

    def _return_gradients(self, edge: tuple[str, str], mb: int) -> None:
        out, leaf = self.live[mb].arrived.pop(edge)
        torch.autograd.backward(out, torch.zeros_like(out) if leaf.grad is None else leaf.grad)

    def _backward(self, name: str, mb: int, is_last: bool) -> None:
        live = self.live[mb]
        module = self.x.modules[name]
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last)
        out = live.outputs.pop(name)
        if not out.requires_grad:
            return
        if isinstance(module, CausalLM):
            seed = torch.full_like(out, self.seed)
            grad = seed if self.seed_scale is None else seed * self.seed_scale.to(seed.dtype)
        else:
            leaf = live.leaves.pop(name)
            grad = torch.zeros_like(out) if leaf.grad is None else leaf.grad
        with torch.autocast(self.x.device.type, enabled=False):  # autocast would change gradients of custom functions
            torch.autograd.backward(out, grad)

    def _edge(self, edge: tuple[str, str], mb: int) -> Edge:
        source, target = edge
        sides = self.x.side(source, self.plan, mb), self.x.side(target, self.plan, mb)
        ranks = {*self.x.placement.layouts[source].ranks, *self.x.placement.layouts[target].ranks}
        return Edge(
            route=route(self._blocks(edge, mb), *sides, self.x.rank),
            width=self.x.modules[target].width,
            dtype=self.x.wire_dtype,
            device=self.x.device,
            group=self.x.registry.group(ranks),
            tag=self.x.graph.edges.index(edge),
            in_flight=self.x.in_flight,
        )

    def _blocks(self, edge: tuple[str, str], mb: int) -> EdgeBlocks:
        key = (edge, mb)
        if key not in self.blocks:
            self.blocks[key] = edge_blocks(self.plan, mb, *edge)
        return self.blocks[key]

    @torch.no_grad()
    def _count(self, name: str, mb: int, inputs: SequenceInputs, result: LMOutput) -> None:
        """Add one instance's sums to the step's; its first rank speaks for the instance."""
        where = self.x.placement.coordinate(name, self.x.rank)
        if where is None or where.shard:
            return
        sink = self.x.sinks.index(name)
        labelled = inputs.labels != IGNORE
        per_sequence = result.loss_sum.new_zeros(2, len(inputs.packing.lengths), dtype=torch.int64)
        per_sequence.index_add_(1, inputs.packing.sequence, torch.stack([labelled, result.correct]).to(torch.int64))
        wanted, right = per_sequence
        exact = ((wanted == right) & (wanted > 0)).sum()
        assignment = self.plan.microbatches[mb].assignments[name]
        samples = assignment.of(where.instance)
        counts = torch.stack([result.loss_sum.double(), right.sum().double(), exact.double()])
        self.totals[sink] += counts
        if sink == 0 and not self.train:
            labels = self.plan.metadata.labels
            place = expand((np.cumsum(labels) - labels)[samples], labels[samples])
            # Evaluation only: finding labelled rows on the device waits for it.
            self.predicted[host_index(place, self.predicted)] = result.predicted[labelled]
