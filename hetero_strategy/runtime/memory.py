"""Report of the memory's owners when a rank runs out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hetero_strategy.parallelize.gradients import local

if TYPE_CHECKING:
    from hetero_strategy.runtime.executor import Executor

LARGEST = 12
"""Most owners that are listed."""


def out_of_memory(executor: Executor, optimizers: Sequence[Optimizer]) -> str:
    """Report at which action a rank ran out of memory, which microbatches its stages hold, and the largest owners.

    Only tensors that this rank can name (:func:`owners`) are counted. The rest is what layers keep for backward, which
    grows with the microbatches held, gathered weights, messages in transit, and the user's own tensors.
    """
    device, step = executor.device, executor.running
    where = f"rank {executor.rank} ran out of memory"
    if step is not None and step.action is not None:
        kind, node, microbatch = step.action
        where += f" in {kind} of module '{node.module}', stage {node.stage}"
        where += f", microbatch {microbatch}" if microbatch >= 0 else ""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        where += f", with {size(allocated)} allocated and {size(reserved)} reserved on {device}"
    lines = [where]
    for node in executor.stages:
        microbatches = [] if step is None else [m for other, m in step.live if other == node]
        if microbatches:
            lines.append(f"module '{node.module}', stage {node.stage} holds activations of microbatches {microbatches}")
    totals = owners(executor, optimizers)
    lines += [f"{size(count):>10}  {what}" for what, count in totals.most_common(LARGEST)]
    lines.append(
        f"{size(totals.total()):>10}  in all of these; what layers keep for backward and what is gathered or on its way"
        " are not counted"
    )
    lines.append("less: recompute, offload, max_in_flight, smaller budgets, more microbatches, dp_shard, tp, cp or pp")
    return "\n".join(lines)


def owners(executor: Executor, optimizers: Sequence[Optimizer]) -> Counter[str]:
    """Count the bytes of each owner on this rank.

    Owners are every stage's parameters, gradients (``.grad``, and those of a failed step) and optimizer states as
    stored here, and the rows that came into a stage for each microbatch whose backward is to come. Memory that several
    owners share counts for the first.
    """
    bytes_by_owner, seen = Counter[str](), set[int]()
    failed = {} if executor.running is None else executor.running.gradients
    for node, local_stage in executor.local.items():
        parameters = local_stage.parameters
        stage = f"module '{node.module}', stage {node.stage}"
        bytes_by_owner[f"parameters of {stage}"] = _bytes(parameters, seen)
        bytes_by_owner[f"gradients of {stage}"] = _bytes(
            (x for p in parameters for x in (p.grad, failed.get(id(p)))), seen
        )
        states = (optimizer.state.get(p, {}).values() for optimizer in optimizers for p in parameters)
        bytes_by_owner[f"optimizer states of {stage}"] = _bytes(chain.from_iterable(states), seen)
    for (node, microbatch), live in ({} if executor.running is None else executor.running.live).items():
        stage = f"module '{node.module}', stage {node.stage}"
        bytes_by_owner[f"rows into {stage}, microbatch {microbatch}"] = _bytes(live.leaves, seen)
    return +bytes_by_owner


def _bytes(values: Iterable[Any], seen: set[int]) -> int:
    """Count the bytes of this rank's parts of tensors, except memory that was seen before."""
    count = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = local(value.detach()).untyped_storage()
            count += 0 if storage.data_ptr() in seen else storage.nbytes()
            seen.add(storage.data_ptr())
    return count


def size(count: float) -> str:
    """Format bytes for people, as in ``1.50 GiB``."""
    unit = next((u for u in ("GiB", "MiB") if count >= UNITS[u]), "KiB")
    return f"{count / UNITS[unit]:.2f} {unit}"


UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
