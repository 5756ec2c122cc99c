"""What a loader yields on one rank and what ``model(batch)`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hetero_strategy import ragged
from hetero_strategy.model.inputs import ModuleInputs, tensors_of
from hetero_strategy.plan.ahead import computing
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks
from hetero_strategy.schedule.compile import NO_INDEX, StepProgram


@dataclass(frozen=True)
class LoadTimes:
    """Seconds that making a batch took where it was made, ahead of need or not."""

    plan: float
    """Balancing, packing, ordering, composing: the step plan."""
    payload: float
    """Reading and decoding what this rank computes."""


class Batch:
    """One global batch as one rank sees it: the whole plan, and the payload of what this rank computes.

    Deliberately not a dataclass or a container: Lightning's precision plugins and device transfer would take those
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
        """By module, then by its microbatch; None where the whole module is idle. Without modules this rank lacks."""
        self.mine = dict(mine or {})
        """Module -> the instance whose inputs these are; a module with one instance need not be named."""
        self.failed = dict(failed or {})
        """Data set index of each sample, of this step or what is read ahead for the next one, with an item that this
        rank could not read -> why not, with the file's name.
        """
        self.skipped = skipped
        """Samples of the global batch that count for nothing, on whatever rank they failed."""
        self.program = program
        """What this rank runs, where a strategy runs steps."""
        self.index = index
        """int64: the row numbers that the program points to; they travel with the inputs."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """This batch with its tensors on ``device``."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory."""
        return self._each(lambda x: x.pin_memory())

    def with_program(self, program: StepProgram) -> Batch:
        """This batch with what its rank runs."""
        bare = replace(program, index=NO_INDEX)
        return self._with(program=bare, index=torch.from_numpy(program.index))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that move with the batch."""
        inputs = [x for made in self.inputs.values() for x in made if x is not None]
        return [*(tensor for x in inputs for tensor in tensors_of(x)), *([] if self.index is None else [self.index])]

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        made = {n: tuple(None if x is None else change(x) for x in inputs) for n, inputs in self.inputs.items()}
        return self._with(inputs=made, index=None if self.index is None else change(self.index))

    def _with(self, **changes: Any) -> Batch:
        names = ("plan", "inputs", "times", "mine", "failed", "skipped", "program", "index")
        return Batch(**{name: getattr(self, name) for name in names} | changes)

    def without(self, bad: np.ndarray) -> Batch:
        """This batch with ``bad`` samples, bool ``[S]``, counting for nothing: no label, no target, not part of N.

        They are still computed, so that every shape and every route stays as planned. All ranks have to name the same
        samples: `hetero_strategy.loading.agree.Agree` sees to that.
        """
        known = self.plan.metadata
        items = {
            module: table
            if table.targets is None
            else replace(table, targets=np.where(bad[table.sample], 0, table.targets))
            for module, table in known.items.items()
        }
        plan = replace(self.plan, metadata=replace(known, labels=np.where(bad, 0, known.labels), items=items))
        inputs = {
            module: tuple(None if x is None else x.silenced(self._of_units(module, n, bad)) for n, x in enumerate(made))
            for module, made in self.inputs.items()
            if computing(module) == module  # else they are of the next step
        }
        return self._with(plan=plan, inputs={**self.inputs, **inputs}, skipped=int(bad.sum()))

    def _of_units(self, module: str, number: int, bad: np.ndarray) -> np.ndarray:
        """The same of the units that this rank computes in a microbatch, bool ``[n]``."""
        assignment = self.plan.assignments[module][number]
        instance = self.mine.get(module)
        if instance is None:
            if len(assignment.offsets) > 2:
                raise ValueError(
                    f"the batch says not which of {len(assignment.offsets) - 1} instances of {module} it is"
                )
            instance = 0
        return bad[self.plan.metadata.sample_of(module)[assignment.of(instance)]]

    def __len__(self) -> int:
        """Samples of the global batch."""
        return len(self.plan.samples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Data set indices of the samples, int64 ``[S]``: lets Lightning infer the batch size for epoch means.

        A copy: the plan's may be part of the epoch's order, which nobody may write to.
        """
        yield torch.tensor(self.plan.samples)

    def local_rows(
        self, source: str, source_microbatch: int, target: str, target_microbatch: int
    ) -> torch.Tensor | None:
        """Where every module has one instance: the source row of each slot that this pair fills, int64.

        None where that is all of the source's rows in their order.
        """
        blocks = edge_blocks(self.plan, source, source_microbatch, target, target_microbatch)
        rows = ragged.expand(blocks.source_start, blocks.rows)
        total = int(self.plan.assignments[source][source_microbatch].totals().sum())
        return None if np.array_equal(rows, np.arange(total)) else torch.from_numpy(rows)
