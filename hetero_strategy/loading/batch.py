"""The batch of one rank, which ``model(batch)`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hetero_strategy import ragged
from hetero_strategy.model.inputs import ModuleInputs, tensors_of
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks
from hetero_strategy.schedule.compile import NO_INDEX, StepProgram


@dataclass(frozen=True)
class LoadTimes:
    """The seconds that making a batch took where it was made, ahead of need or not."""

    plan: float
    """Seconds of balancing, packing, ordering and composing: the step plan."""
    payload: float
    """Seconds of reading and decoding the payload that this rank computes."""


class Batch:
    """A global batch as one rank sees it: the whole plan, and the payload that this rank computes.

    It is not a dataclass or a container on purpose: Lightning's precision plugins and device transfer would take those
    apart field by field. It moves as a whole, by :meth:`to`.
    """

    def __init__(
        self,
        plan: StepPlan,
        inputs: Mapping[str, tuple[ModuleInputs | None, ...]],
        times: LoadTimes | None = None,
        *,
        mine: Mapping[str, int | None] | None = None,
        failed: Mapping[int, str] | None = None,
        skipped: int = 0,
        program: StepProgram | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.times = times
        self.inputs = inputs
        """Inputs by module, then by its microbatch; None if the whole module is idle. Modules that this rank lacks are
        missing."""
        self.mine = dict(mine or {})
        """Module -> the instance whose inputs these are; a module with one instance need not be named."""
        self.failed = dict(failed or {})
        """Data set index of each sample with an item that this rank could not read -> reason, with the file's name."""
        self.skipped = skipped
        """Samples of the global batch that count for nothing, on whatever rank they failed."""
        self.program = program
        """Program of this rank, if a strategy runs steps."""
        self.index = index
        """Row numbers, int64, to which the program points; they travel with the inputs."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """Return this batch with its tensors on ``device``."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return this batch in page-locked memory."""
        return self._each(lambda x: x.pin_memory())

    def with_program(self, program: StepProgram) -> Batch:
        """Return this batch with the program of its rank."""
        bare = replace(program, index=NO_INDEX)
        return self._with(program=bare, index=torch.from_numpy(program.index))

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that move with the batch."""
        inputs = [x for instances in self.inputs.values() for x in instances if x is not None]
        return [*(tensor for x in inputs for tensor in tensors_of(x)), *([] if self.index is None else [self.index])]

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        changed = {n: tuple(None if x is None else change(x) for x in inputs) for n, inputs in self.inputs.items()}
        return self._with(inputs=changed, index=None if self.index is None else change(self.index))

    def _with(self, **changes: Any) -> Batch:
        names = ("plan", "inputs", "times", "mine", "failed", "skipped", "program", "index")
        return Batch(**{name: getattr(self, name) for name in names} | changes)

    def without(self, bad: np.ndarray) -> Batch:
        """Return this batch with ``bad`` samples, bool ``[S]``, counting for nothing: no label, no target, not part of
        N.

        They are still computed, so that every shape and every route stays as planned. All ranks must name the same
        samples, see `hetero_strategy.loading.loader.agreed`.
        """
        known = self.plan.metadata
        items = {
            module: table
            if table.targets is None
            else replace(table, targets=np.where(bad[table.sample], 0, table.targets))
            for module, table in known.items.items()
        }
        labels = np.where(bad, 0, known.labels)
        plan = replace(self.plan, metadata=replace(known, labels=labels, items=items, skipped=bad))
        inputs = {
            module: tuple(
                None if x is None else x.silenced(self._of_units(module, n, bad)) for n, x in enumerate(module_inputs)
            )
            for module, module_inputs in self.inputs.items()
        }
        return self._with(plan=plan, inputs=inputs, skipped=int(bad.sum()))

    def _of_units(self, module: str, number: int, bad: np.ndarray) -> np.ndarray:
        """Return the bad ones of the units that this rank computes in a microbatch, bool ``[n]``."""
        assignment = self.plan.assignments[module][number]
        instance = self.mine.get(module)
        if instance is None:
            if len(assignment.offsets) > 2:
                raise ValueError(
                    f"the batch does not say which of {len(assignment.offsets) - 1} instances of {module} it is for"
                )
            instance = 0
        return bad[self.plan.metadata.sample_of(module)[assignment.of(instance)]]

    def __len__(self) -> int:
        """Return the number of samples of the global batch."""
        return len(self.plan.samples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the data set indices of the samples, int64 ``[S]``, so that Lightning infers the batch size for epoch
        means.

        They are a copy: the plan's array may be part of the epoch's order, which is read-only.
        """
        yield torch.tensor(self.plan.samples)

    def local_rows(
        self, source: str, source_microbatch: int, target: str, target_microbatch: int
    ) -> torch.Tensor | None:
        """Return the source row of each slot that this pair fills, int64, if every module has one instance.

        None if the rows are all of the source's in their order.
        """
        blocks = edge_blocks(self.plan, source, source_microbatch, target, target_microbatch)
        rows = ragged.expand(blocks.source_start, blocks.rows)
        total = int(self.plan.assignments[source][source_microbatch].totals().sum())
        return None if np.array_equal(rows, np.arange(total)) else torch.from_numpy(rows)
