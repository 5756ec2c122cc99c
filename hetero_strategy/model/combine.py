"""Loss, metrics and predictions of a global batch, from the outputs of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetero_strategy import ragged
from hetero_strategy.errors import DataError
from hetero_strategy.model.causal_lm import LMOutput
from hetero_strategy.model.generator import GeneratorOutput
from hetero_strategy.model.inputs import IGNORE, GeneratorInputs, Ragged, SequenceInputs


@dataclass
class ModelOutput:
    """What the model makes of one global batch."""

    loss: Tensor
    """Scalar: the sum over modules with a loss of ``weight * (loss summed over elements) / N`` of that module."""
    loss_tokens: int
    """Loss tokens of the global batch: the N of language models."""
    accuracy: Tensor
    """Scalar: the share of loss tokens predicted right, averaged over language models."""
    exact_match: Tensor
    """Scalar: the share of samples with labels whose every label is predicted right, averaged over language models."""
    predictions: Ragged | None = None
    """Evaluation only: the first language model's predicted tokens at label positions; run ``i`` is sample ``i``."""
    logits: tuple[Tensor, ...] | None = None
    """Where asked for: the first language model's logits ``[T, vocabulary]`` of each microbatch."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Each module's part of ``loss``, its weight included."""
    drawn: dict[str, Tensor] | None = None
    """Evaluation only: what each generator drew, ``[target rows of the batch, feature]`` in the order of items."""


class Scored(NamedTuple):
    """One language model's output of one microbatch."""

    output: LMOutput
    inputs: SequenceInputs
    units: np.ndarray
    """int64 ``[n]``: the sample number of each sequence."""


class Generated(NamedTuple):
    """One generator's output of one microbatch."""

    output: GeneratorOutput
    inputs: GeneratorInputs
    units: np.ndarray
    """int64 ``[n]``: the item numbers."""


def combine(
    plan: Any,
    scored: Mapping[str, Sequence[Scored]],
    generated: Mapping[str, Sequence[Generated]],
    weights: Mapping[str, float],
    *,
    evaluation: bool,
    device: torch.device,
) -> ModelOutput:
    """Combine a global batch's microbatches; no host sync unless predictions are wanted.

    Args:
        plan: the step plan, with metadata and normalisers.
        scored: outputs of the microbatches of each language model.
        generated: outputs of the microbatches of each generator.
        weights: factor of each module's loss.
        evaluation: whether to gather predicted tokens and drawings.
        device: where the scalars lie.
    """
    labels = plan.metadata.labels
    loss_tokens = int(labels.sum())
    zero = torch.zeros((), device=device)
    sums = {name: sum((out.output.loss_sum for out in outputs), zero) for name, outputs in scored.items()}
    sums |= {name: sum((out.output.loss_sum for out in outputs), zero) for name, outputs in generated.items()}
    losses = {name: total * (weights[name] / plan.normalizer(name)) for name, total in sums.items()}
    accuracy = exact = zero
    for outputs in scored.values():
        correct = _correct_per_sample(outputs, len(labels), device)
        labelled = torch.from_numpy(labels).to(device)
        accuracy = accuracy + correct.sum() / max(1, loss_tokens) / len(scored)
        exact = exact + ((correct == labelled) & (labelled > 0)).sum() / max(1, int((labels > 0).sum())) / len(scored)
    first = next(iter(scored.values()))
    drawn = {name: _gather_drawn(outputs) for name, outputs in generated.items() if outputs} if evaluation else {}
    return ModelOutput(
        loss=sum(losses.values(), zero),
        loss_tokens=loss_tokens,
        accuracy=accuracy,
        exact_match=exact,
        predictions=_gather_predictions(first, labels) if evaluation else None,
        logits=tuple(out.output.logits for out in first if out.output.logits is not None) or None,
        losses=losses,
        drawn=drawn or None,
    )


def _correct_per_sample(outputs: Sequence[Scored], samples: int, device: torch.device) -> Tensor:
    """Count the labels predicted right in each sample of the batch, int64 ``[samples]``."""
    correct = torch.zeros(samples + 1, dtype=torch.int64, device=device)
    for out in outputs:
        packing = out.inputs.packing
        # Alignment sequences come after the samples and belong to none: they count for an extra last sample.
        numbers = np.full(len(packing.lengths), samples, dtype=np.int64)
        numbers[: len(out.units)] = out.units
        sample = torch.from_numpy(numbers).to(device)[packing.sequence]
        correct.index_add_(0, sample, out.output.correct.to(torch.int64))
    return correct[:samples]


def _gather_predictions(outputs: Sequence[Scored], labels: np.ndarray) -> Ragged:
    """Collect the predicted tokens at label positions, in the order of the batch's samples."""
    offsets = ragged.offsets(labels)
    if not outputs:
        return Ragged(torch.zeros(0, dtype=torch.int64), np.zeros_like(offsets))
    values = torch.cat([out.output.predicted[out.inputs.labels != IGNORE] for out in outputs])
    units = np.concatenate([out.units for out in outputs])
    counts = labels[units]
    if int(counts.sum()) != len(values):
        raise DataError(f"the plan says {int(counts.sum())} labels, the batch holds {len(values)}")
    return Ragged(_in_unit_order(values, units, counts), offsets)


def _gather_drawn(outputs: Sequence[Generated]) -> Tensor:
    """Collect what a generator drew, ``[target rows, feature]``, in the order of the batch's items."""
    drawn = [out.output.drawn for out in outputs if out.output.drawn is not None]
    units = np.concatenate([out.units for out in outputs])
    return _in_unit_order(torch.cat(drawn), units, np.concatenate([out.inputs.target_rows for out in outputs]))


def _in_unit_order(values: Tensor, units: np.ndarray, counts: np.ndarray) -> Tensor:
    """Sort runs of ``counts`` values, one run per unit in the order of ``units``, by unit number."""
    rank = np.argsort(np.argsort(units))
    starts = ragged.starts(counts[np.argsort(units)])[rank]
    index = torch.from_numpy(ragged.expand(starts, counts)).to(values.device)
    return torch.empty_like(values).index_copy_(0, index, values)
