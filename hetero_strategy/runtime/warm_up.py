"""Run every stage alone before the first step of training and the first step of evaluation.

First, once, the outputs of two packed units are compared with the output of each unit alone. Then a stage runs its
largest microbatch: kernels are loaded, blocks compiled and memory allocated while no message between stages is under
way. First-time work of a device may wait for everything that runs on it; and the blocks of a pipeline compile at once
instead of stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from hetero_strategy.boundary.transport import Transport
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.packed_alone import Pair, check_packed_alone, due
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.copies import masters_kept
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.compile import RankAction, StepProgram

ORDER = ("UNSHARD", "F", "B", "I", "W", "REDUCE")


def warm_up(executor: Executor, batch: Batch, *, train: bool) -> None:
    """Run the largest microbatch of each of this rank's stages alone, forward and in training backward; keep nothing of
    it.

    A collective over the ranks of each module. Only losses have gradients other than zero, and the user's hooks see one
    more call.
    """
    batch = executor.ready(batch, train=train)
    assert batch.program is not None
    plan, modules = batch.plan, list(executor.modules)
    stages = sorted(executor.stages, key=lambda node: (modules.index(node.module), node.stage))
    alone = largest_alone(batch.program, plan, stages, lambda node: executor.local[node].seat.instance)
    step = executor.begin(batch, replace(batch.program, actions=tuple(alone)), Alone)
    before = {p: p.grad for own in executor.local.values() for p in own.parameters}
    for p in before:
        p.grad = None
    try:
        # Zeros are no rows that modules are made for.
        with executor.step_scope(plan, train=train), torch.autograd.set_detect_anomaly(False):
            executor.run_actions(step, named=False)
        executor.release(train=train)
    finally:
        for p, gradient in before.items():
            p.grad = gradient
    executor.running = None


class Alone(Transport):
    """A transport that moves no rows: it returns zeros for each arrival and drops all outgoing rows."""

    @override
    def start(self, batches: Collection[Sequence[int]]) -> None: ...

    @override
    def give(self, number: int, rows: torch.Tensor) -> None: ...

    @override
    def take(self, number: int, add_to: torch.Tensor | None = None) -> torch.Tensor:
        if add_to is not None:
            return add_to
        channel, transfer = self._transfers[number]
        return torch.zeros((transfer.outputs, channel.width), dtype=channel.dtype, device=channel.device)


def check_packing(executor: Executor, batch: Batch) -> None:
    """Compare packed units with each unit alone in this rank's stages; a collective over the ranks of each module.

    A module is compared once, in the first step with two units in one of its microbatches.
    """
    plan, edges = batch.plan, executor.compiler.graph.edges
    numbers = {name: due(one, plan) for name, one in executor.modules.items()}
    with masters_kept(executor.stages.values()), random_state_kept(executor.device):
        for name, number in numbers.items():
            if number is None:
                continue
            sources = sorted({source.module for source, target in edges if target.module == name} - {name})
            for node in sorted(node for node in executor.stages if node.module == name):
                local, inputs = executor.local[node], batch.inputs[name][number]
                stage, module = local.adapter, executor.modules[name]
                assert inputs is not None
                where = f"module '{name}'" + ("" if stage.first_stage and stage.last_stage else f", stage {node.stage}")
                pair = Pair.of(module, plan, number, sources, local.seat.instance)
                if local.node.sharded:
                    fsdp.gather(stage)
                check_packed_alone(stage, inputs, pair, where, executor.device, local.node.row_sharding, local.rows_of)
                fsdp.release(stage)
            executor.modules[name].packed_equals_alone = True


def largest_alone(
    program: StepProgram, plan: StepPlan, stages: Iterable[StageId], instance_of: Callable[[StageId], int]
) -> list[RankAction]:
    """Return the actions of each stage's largest microbatch, stage by stage in the order of ``stages``.

    Instances that act together run the same microbatch: the modules that feed them, and so the weights that a backward
    gathers, differ by microbatch. Instances that act on their own, whose weights are gathered once, each run their
    largest; one without any microbatch takes part in gathers and reductions.

    Args:
        program: program of a step on this rank.
        plan: plan of the same step.
        stages: stages of this rank, in an order that all ranks keep.
        instance_of: returns the instance of a stage's module that this rank is in.
    """
    of_stage: dict[StageId, list[RankAction]] = {stage: [] for stage in stages}
    for action in program.actions:
        if action.action.node in of_stage:
            of_stage[action.action.node].append(action)
    chosen: list[RankAction] = []
    for stage, actions in of_stage.items():
        numbers = sorted({one.action.microbatch for one in actions if one.action.kind == "F"})
        instance = None if stage.cohort < 0 else instance_of(stage)
        largest = max(numbers, key=partial(_rows, plan, stage.module, instance), default=None)
        once = [one for one in actions if one.action.kind in ("UNSHARD", "REDUCE") or one.action.microbatch == largest]
        once.sort(key=lambda one: ORDER.index(one.action.kind))
        chosen += [one._replace(last=one.action.kind in ("B", "W")) for one in once]
    return chosen


def _rows(plan: StepPlan, module: str, instance: int | None, microbatch: int) -> int:
    """Count the rows inside a module in a microbatch, of one instance or of the largest instance."""
    totals = plan.assignments[module][microbatch].totals(inner=True)
    return int(totals.max() if instance is None else totals[instance])
