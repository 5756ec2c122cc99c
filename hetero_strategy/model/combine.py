"""Loss, metrics and results of a global batch, from the outputs of its microbatches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.model.inputs import ModuleInputs, Ragged, host_index
from hetero_strategy.model.kind import LossOutput


@dataclass
class ModelOutput:
    """What the model makes of one global batch."""

    loss: Tensor
    """Scalar: the sum over modules with a loss of ``weight * (loss summed over elements) / N`` of that module."""
    loss_tokens: int
    """Loss tokens of the global batch: the N of language models."""
    accuracy: Tensor
    """Scalar: the share of loss tokens predicted right, averaged over language models; NaN where none counts it."""
    exact_match: Tensor
    """Scalar: the share of samples with labels whose every label is predicted right, likewise."""
    labelled_samples: int
    """Samples with labels: what ``exact_match`` is a share of."""
    predictions: Ragged | None = None
    """Evaluation only: the first language model's predicted tokens at label positions; run ``i`` is sample ``i``."""
    logits: tuple[Tensor, ...] | None = None
    """Where asked for: the first language model's logits ``[T, vocabulary]`` of each microbatch."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Each module's part of ``loss``, its weight included; every source before its targets."""
    counts: dict[str, int] = field(default_factory=dict)
    """What each module's loss is a mean over: loss tokens, or a generator's target elements."""
    drawn: dict[str, Tensor] | None = None
    """Evaluation only: what each generator drew, ``[target rows of the batch, feature]`` in the order of items; and the
    results of modules of kinds of your own."""
    metrics: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Scalars by name of each module with a loss, as its kind counts them; in the order of ``losses``."""


class StepSums:
    """What modules with a loss add up over one step.

    Args:
        modules: by name.
        with_loss: those of them that have a loss, in the order in which results name them.
        plan: the step plan, with metadata and normalisers.
        evaluation: whether results of the whole batch (predicted tokens, drawings) are kept.
        device: where the sums lie.
        dtype: of results that are no integers.
        pipelined: modules of several stages.
        spare: numbers at the end of :attr:`totals` for whoever sums them over ranks, :attr:`spare`.
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
        self.totals = torch.zeros(sum(sizes) + spare, dtype=torch.float64, device=device)
        """fp64: of each module in turn its loss and its metrics."""
        *parts, self.spare = self.totals.split([*sizes, spare])
        self._of = dict(zip(self._kinds, parts, strict=True))
        self.results: dict[str, Tensor] = {}
        """Evaluation only: of each module that has one, its result."""
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
        """By module: fp64 scalar, summed over its elements, over N; not weighted."""
        return {name: sums[0] / self._plan.normalizer(name) for name, sums in self._of.items()}

    def output(self, loss: Tensor, losses: dict[str, Tensor], logits: tuple[Tensor, ...] | None = None) -> ModelOutput:
        """Return all that the sums say, with the loss and each module's part of it."""
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
        )

    def _mean(self, metric: str, metrics: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Of the modules whose units are samples and that count it."""
        found = [metrics[n][metric] for n, kind in self._kinds.items() if kind.samplewise and metric in metrics[n]]
        return torch.stack(found).mean() if found else self.totals.new_full((), torch.nan, dtype=torch.float32)
