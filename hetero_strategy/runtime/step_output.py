"""What a step yields: sums over microbatches and instances, the same on every rank in the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy import ragged
from hetero_strategy.layout.placement import Coordinate
from hetero_strategy.loading.batch import Batch, ModuleInputs
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import LMOutput
from hetero_strategy.model.generator import Generator, GeneratorOutput
from hetero_strategy.model.inputs import IGNORE, SequenceInputs, host_index
from hetero_strategy.plan.step_plan import Assignment
from hetero_strategy.runtime.agreement import Agreement
from hetero_strategy.schedule.action import StageId


@dataclass
class StepOutput:
    """What a step yields, the same on every rank."""

    losses: dict[str, torch.Tensor]
    """By module with a loss: fp64 scalar, summed over its elements, over N; not weighted."""
    correct: torch.Tensor
    """fp64 ``[language models]``: loss tokens predicted right."""
    exact: torch.Tensor
    """fp64 ``[language models]``: samples with labels, every one of them right."""
    predicted: torch.Tensor | None
    """int64 ``[N]``: predicted token at every loss token in sample order (evaluation only), of the first language
    model.
    """
    drawn: dict[str, torch.Tensor]
    """Evaluation only, by generator without a pipeline: fp32 ``[target rows of the batch, feature]`` in item order."""


class StepMetrics:
    """Adds up one step on this rank. An instance's first rank speaks for the instance."""

    def __init__(
        self,
        modules: Mapping[str, Adapter],
        coordinates: Mapping[str, Coordinate],
        batch: Batch,
        *,
        train: bool,
        pipelined: Collection[str],
        device: torch.device,
    ) -> None:
        self._modules, self._coordinates = modules, coordinates
        self._plan, self._train, self._device = batch.plan, train, device
        self._with_loss = [n for n, m in modules.items() if m.has_loss]
        self._language_models = [n for n in self._with_loss if n not in self._plan.metadata.items]
        self._totals = torch.zeros(len(self._with_loss) + 2, 3, dtype=torch.float64, device=device)
        Agreement.write(batch.plan, self._totals[-2:, :2])
        self._predicted = torch.zeros(0 if train else self._plan.loss_tokens, dtype=torch.int64, device=device)
        draws = [n for n in self._with_loss if not train and n not in self._language_models and n not in pipelined]
        self._drawn = {name: self._canvas(name) for name in draws}

    @torch.no_grad()
    def add(self, node: StageId, microbatch: int, inputs: ModuleInputs, out: LMOutput | GeneratorOutput) -> None:
        """Count one microbatch of a last stage."""
        name = node.module
        where = self._coordinates[name]
        if where.shard:
            return
        assignment = self._plan.assignments[name][microbatch]
        units = assignment.of(where.instance)
        mine = self._totals[self._with_loss.index(name)]
        mine[0] += out.loss_sum.double()
        if isinstance(out, GeneratorOutput):
            if name in self._drawn and out.drawn is not None:
                place = host_index(self._rows_of(name, units), out.drawn)
                self._drawn[name].index_copy_(0, place, out.drawn.float())
            return
        assert isinstance(inputs, SequenceInputs)
        self._count_tokens(mine, name, assignment, units, inputs, out)

    def output(self, agreement: Agreement) -> StepOutput:
        """Sums over all ranks. A collective over the world; nothing waits for the device."""
        dist.all_reduce(self._totals)
        agreement.note(self._plan, self._totals[-2:, :2])
        if not self._train:
            dist.all_reduce(self._predicted)
            for drawn in self._drawn.values():
                dist.all_reduce(drawn)
        losses = {n: self._totals[i, 0] / self._plan.normalizer(n) for i, n in enumerate(self._with_loss)}
        language_models = [self._with_loss.index(n) for n in self._language_models]
        return StepOutput(
            losses,
            self._totals[language_models, 1],
            self._totals[language_models, 2],
            None if self._train else self._predicted,
            self._drawn,
        )

    def _count_tokens(
        self,
        mine: torch.Tensor,
        name: str,
        assignment: Assignment,
        units: np.ndarray,
        inputs: SequenceInputs,
        out: LMOutput,
    ) -> None:
        labelled = inputs.labels != IGNORE
        per_sequence = out.loss_sum.new_zeros(2, len(inputs.packing.lengths), dtype=torch.int64)
        per_sequence.index_add_(1, inputs.packing.sequence, torch.stack([labelled, out.correct]).to(torch.int64))
        wanted, right = per_sequence
        mine[1] += right.sum().double()
        mine[2] += ((wanted == right) & (wanted > 0)).sum().double()
        if self._train or name != self._language_models[0]:
            return
        labels = self._plan.metadata.labels
        place = ragged.expand(ragged.starts(labels)[units], labels[units])
        # Evaluation only: finding labelled rows on the device waits for it.
        self._predicted[host_index(place, self._predicted)] = out.predicted[labelled]

    def _canvas(self, name: str) -> torch.Tensor:
        generator = self._modules[name]
        assert isinstance(generator, Generator)
        return torch.zeros(int(self._target_rows(name).sum()), generator.feature, device=self._device)

    def _target_rows(self, name: str) -> np.ndarray:
        """Rows that each item of a generator becomes: those inside the module that are not conditions."""
        items = self._plan.metadata.items[name]
        return items.inner_rows - items.edge_rows

    def _rows_of(self, name: str, units: np.ndarray) -> np.ndarray:
        rows = self._target_rows(name)
        return ragged.expand(ragged.starts(rows)[units], rows[units])
