"""Combine outputs of microbatches into loss, metrics and results of a global batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.model.inputs import ModuleInputs, Ragged, host_index
from hetero_strategy.model.kind import LossOutput
from hetero_strategy.model.routing import StepRouting


@dataclass
class ModelOutput:
    """The model's output for one global batch."""

    loss: Tensor
    """Scalar: sum of ``weight * (loss summed over elements) / N`` over modules with a loss, each with its own N."""
    loss_tokens: int
    """Number of loss tokens in the global batch: the N of language models."""
    accuracy: Tensor
    """Scalar: the share of loss tokens predicted right, averaged over language models; NaN if none counts it."""
    exact_match: Tensor
    """Scalar: the share of labelled samples whose every label is predicted right, averaged over language models."""
    labelled_samples: int
    """Number of samples with labels: the divisor of ``exact_match``."""
    predictions: Ragged | None = None
    """Evaluation only: the first language model's predicted tokens at label positions; run ``i`` is sample ``i``."""
    logits: tuple[Tensor, ...] | None = None
    """The first language model's logits ``[T, vocabulary]`` of each microbatch, if requested."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Each module's part of ``loss``, its weight included; every source before its targets."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of elements in each module's loss: loss tokens, or a generator's target elements."""
    drawn: dict[str, Tensor] | None = None
    """Evaluation only: each generator's drawings, ``[target rows of the batch, feature]`` in item order; and results of
    modules of custom kinds."""
    metrics: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Metrics of each module with a loss, scalars by name, as its kind counts them; in the order of ``losses``."""
    expert_rows: dict[str, Tensor] = field(default_factory=dict)
    """Training only: module with known routers -> rows of the global batch that chose each expert, int64 ``[layers,
    experts]``, the same on every rank; only layers with experts count."""
    balance_losses: dict[str, Tensor] = field(default_factory=dict)
    """Training only: loss on the balance of experts of each module that has it, 1 at best for each expert that a row
    visits. It is in ``loss`` and ``losses``, times its coefficient."""


class StepSums:
    """The sums over one step of modules with a loss.

    Args:
        modules: modules by name.
        with_loss: names of modules with a loss, in the order of the results.
        plan: the step plan, with metadata and normalisers.
        evaluation: whether results of the whole batch (predicted tokens, drawings) are kept.
        device: device of the sums.
        dtype: data type of floating-point results.
        pipelined: modules with several stages.
        spare: size of :attr:`spare`, the end of :attr:`totals`, for other numbers to be summed over ranks.
    """

    def __init__(
        self,
        modules: Mapping[str, Adapter],
        with_loss: Iterable[str],
        plan: Any,
        *,
        evaluation: bool,
        device: torch.device,
        dtype: torch.dtype,
        pipelined: Collection[str] = (),
        spare: int = 0,
    ) -> None:
        self._plan = plan
        self._kinds = {name: modules[name].kind for name in with_loss}
        kinds = {name: module.kind for name, module in modules.items()}
        self._language_models = [name for name, kind in kinds.items() if isinstance(kind, CausalLMKind)]
        self._counts = {name: kind.metrics(plan.metadata, name) for name, kind in self._kinds.items()}
        sizes = [1 + len(counts) for counts in self._counts.values()]
        routings = {} if evaluation else {n: module.routing for n, module in modules.items()}
        self._routings = routed = {name: routing for name, routing in routings.items() if routing is not None}
        self._coefficients = {name: routing.balance for name, routing in routed.items() if routing.balance}
        choices = sum(routing.size for routing in routed.values())
        self.totals = torch.zeros(sum(sizes) + choices + len(routed) + spare, dtype=torch.float64, device=device)
        """fp64: loss and metrics of each module in turn, choices of experts, losses on their balance, and spare ones.
        Numbers of rows are exact up to 2^53."""
        *parts, chosen, balance, self.spare = self.totals.split([*sizes, choices, len(routed), spare])
        self._of = dict(zip(self._kinds, parts, strict=True))
        counts = chosen.split([routing.size for routing in routed.values()])
        self.routed = {
            name: (rows.view(-1, routing.experts), share)
            for (name, routing), rows, share in zip(routed.items(), counts, balance, strict=True)
        }
        """Module with routers -> :attr:`ModelOutput.expert_rows` as fp64, and its loss on the balance of experts."""
        self.results: dict[str, Tensor] = {}
        """Evaluation only: module -> its result, if it has one."""
        like = torch.zeros((), dtype=dtype, device=device)
        for name, kind in self._kinds.items() if evaluation else ():
            result = kind.result(modules[name], plan.metadata, like, pipelined=name in pipelined)
            if result is not None:
                self.results[name] = result

    @torch.no_grad()
    def add(self, module: str, units: np.ndarray, inputs: ModuleInputs, output: LossOutput) -> None:
        """Count one microbatch of these units, int64 ``[n]``; nothing waits for the device in training."""
        kind = self._kinds[module]
        summands = (output.loss_sum, *kind.measured(inputs, output))
        self._of[module] += torch.stack([summand.double() for summand in summands])
        if module in self.results:
            placed = kind.placed(self._plan.metadata, module, units, inputs, output)
            if placed is not None:
                result = self.results[module]
                result.index_copy_(0, host_index(placed[0], result), placed[1].to(result.dtype))

    @property
    def losses(self) -> dict[str, Tensor]:
        """Return each module's loss, fp64 scalars: summed over its elements, over N, and on the balance of its experts;
        not weighted.
        """
        losses = {name: sums[0] / self._plan.normalizer(name) for name, sums in self._of.items()}
        for name, coefficient in self._coefficients.items():
            losses[name] = losses[name] + coefficient * self.routed[name][1]
        return losses

    def routing(self, module: str, *, speaks: bool = True, **options: Any) -> StepRouting | None:
        """Return the routing of a module's rows, which adds its sums here; None: it has no routers, or none count.

        Options are those of :class:`StepRouting`; without ``speaks`` another rank adds the sums of the same rows.
        """
        if module not in self.routed:
            return None
        assignments, known = self._plan.assignments[module], self._plan.metadata
        skipped = None if known.skipped is None else known.skipped[known.sample_of(module)]
        counted = [slice(None) if skipped is None else ~skipped[each.units] for each in assignments]
        rows = [int(each.inner_rows[own].sum()) for each, own in zip(assignments, counted, strict=True)]
        into = self.routed[module]
        into = into if speaks else (torch.zeros_like(into[0]), torch.zeros_like(into[1]))
        return StepRouting(self._routings[module], rows, into, skipped=skipped, **options)

    @cached_property
    def expert_rows(self) -> dict[str, Tensor]:
        """Return :attr:`ModelOutput.expert_rows`, once the sums are those of all ranks."""
        return {name: rows.to(torch.int64) for name, (rows, _) in self.routed.items()}

    def output(self, loss: Tensor, losses: dict[str, Tensor], logits: tuple[Tensor, ...] | None = None) -> ModelOutput:
        """Return the output of the sums, with the loss and each module's part of it."""
        metrics = {
            name: {metric: (sums[1 + i] / max(1, count)).float() for i, (metric, count) in enumerate(counts.items())}
            for (name, sums), counts in zip(self._of.items(), self._counts.values(), strict=True)
        }
        first = next((self.results[name] for name in self._language_models if name in self.results), None)
        labels = self._plan.metadata.labels
        others = {name: rows for name, rows in self.results.items() if name not in self._language_models and len(rows)}
        return ModelOutput(
            loss=loss,
            loss_tokens=int(labels.sum()),
            accuracy=self._mean("accuracy", metrics),
            exact_match=self._mean("exact_match", metrics),
            labelled_samples=int((labels > 0).sum()),
            predictions=None if first is None else Ragged(first, ragged.offsets(labels)),
            logits=logits,
            losses=losses,
            counts={name: self._plan.counted(name) for name in losses},
            drawn=others or None,
            metrics=metrics,
            expert_rows=self.expert_rows,
            balance_losses={name: self.routed[name][1] for name in self._coefficients},
        )

    def _mean(self, metric: str, metrics: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Average a metric over the modules whose units are samples and that count it."""
        values = [metrics[n][metric] for n, kind in self._kinds.items() if kind.samplewise and metric in metrics[n]]
        return torch.stack(values).mean() if values else self.totals.new_full((), torch.nan, dtype=torch.float32)
