"""What a global batch gives, from what its microbatches gave."""

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
    """What one global batch gives."""

    loss: Tensor
    """Scalar: over modules with a loss, the sum of (weight * loss summed over its elements / N of the module)."""
    loss_tokens: int
    """N of language models: loss tokens of the global batch."""
    accuracy: Tensor
    """Scalar: share of loss tokens predicted right, averaged over language models."""
    exact_match: Tensor
    """Scalar: of samples with labels, the share whose every label is predicted right, averaged over language models."""
    predictions: Ragged | None = None
    """Evaluation only: predicted tokens at label positions, run ``i`` is sample ``i`` of the batch; first language
    model.
    """
    logits: tuple[Tensor, ...] | None = None
    """Where asked for: per microbatch ``[T, vocabulary]``; first language model."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The share of each module in ``loss``, its weight included."""
    drawn: dict[str, Tensor] | None = None
    """Evaluation only, by generator: what it drew, ``[target rows of the batch, feature]`` in the order of items."""


class Scored(NamedTuple):
    """One language model's output of one microbatch, with what says whose rows they are."""

    output: LMOutput
    inputs: SequenceInputs
    units: np.ndarray
    """Sample numbers of the sequences, int64 ``[n]``."""


class Generated(NamedTuple):
    """One generator's output of one microbatch."""

    output: GeneratorOutput
    inputs: GeneratorInputs
    units: np.ndarray
    """Item numbers, int64 ``[n]``."""


def combine(
    plan: Any,
    scored: Mapping[str, Sequence[Scored]],
    generated: Mapping[str, Sequence[Generated]],
    weights: Mapping[str, float],
    *,
    evaluation: bool,
    device: torch.device,
) -> ModelOutput:
    """Loss and metrics of a global batch from its microbatches; no host sync unless predictions are wanted.

    Args:
        plan: of the step.
        scored: language model -> outputs of its microbatches.
        generated: generator -> outputs of its microbatches.
        weights: of every module's loss.
        evaluation: whether to gather predicted tokens and drawings.
        device: of the scalars.
    """
    labels = plan.metadata.labels
    loss_tokens = int(labels.sum())
    losses: dict[str, Tensor] = {}
    accuracy = exact = torch.zeros((), device=device)
    sums = {name: [one.output.loss_sum for one in outputs] for name, outputs in scored.items()}
    sums |= {name: [made.output.loss_sum for made in outputs] for name, outputs in generated.items()}
    for name, parts in sums.items():
        total = sum(parts, torch.zeros((), device=device))
        losses[name] = total * (weights[name] / plan.normalizer(name))
    for outputs in scored.values():
        right = correct_per_sample(outputs, len(labels), device)
        wanted = torch.from_numpy(labels).to(device)
        accuracy = accuracy + right.sum() / max(1, loss_tokens) / len(scored)
        exact = exact + ((right == wanted) & (wanted > 0)).sum() / max(1, int((labels > 0).sum())) / len(scored)
    first = next(iter(scored.values()))
    logits = tuple(one.output.logits for one in first if one.output.logits is not None)
    return ModelOutput(
        loss=sum(losses.values(), torch.zeros((), device=device)),
        loss_tokens=loss_tokens,
        accuracy=accuracy,
        exact_match=exact,
        predictions=gather_predictions(first, labels) if evaluation else None,
        logits=logits or None,
        losses=losses,
        drawn={name: gather_drawn(made) for name, made in generated.items() if made} or None if evaluation else None,
    )


def correct_per_sample(outputs: Sequence[Scored], samples: int, device: torch.device) -> Tensor:
    """Labels predicted right in each sample of the batch, int64 ``[samples]``."""
    right = torch.zeros(samples + 1, dtype=torch.int64, device=device)
    for one in outputs:
        packing = one.inputs.packing
        # Alignment sequences come after the samples and belong to none: they count for an extra last place.
        numbers = np.full(len(packing.lengths), samples, dtype=np.int64)
        numbers[: len(one.units)] = one.units
        sample = torch.from_numpy(numbers).to(device)[packing.sequence]
        right.index_add_(0, sample, one.output.correct.to(torch.int64))
    return right[:samples]


def gather_predictions(outputs: Sequence[Scored], labels: np.ndarray) -> Ragged:
    """Predicted tokens at label positions, in the order of the batch's samples."""
    offsets = ragged.offsets(labels)
    if not outputs:
        return Ragged(torch.zeros(0, dtype=torch.int64), np.zeros_like(offsets))
    values = torch.cat([one.output.predicted[one.inputs.labels != IGNORE] for one in outputs])
    units = np.concatenate([one.units for one in outputs])
    counts = labels[units]
    if int(counts.sum()) != len(values):
        raise DataError(f"the plan says {int(counts.sum())} labels, the batch holds {len(values)}")
    return Ragged(_in_unit_order(values, units, counts), offsets)


def gather_drawn(outputs: Sequence[Generated]) -> Tensor:
    """What a generator drew, ``[target rows, feature]``, in the order of the batch's items."""
    drawn = [one.output.drawn for one in outputs if one.output.drawn is not None]
    units = np.concatenate([one.units for one in outputs])
    return _in_unit_order(torch.cat(drawn), units, np.concatenate([one.inputs.target_rows for one in outputs]))


def _in_unit_order(values: Tensor, units: np.ndarray, counts: np.ndarray) -> Tensor:
    """Runs of ``counts`` values, one per unit and in the order of ``units``, put in the order of unit numbers."""
    rank = np.argsort(np.argsort(units))
    ascending = counts[np.argsort(units)]
    start = ragged.starts(ascending)[rank]
    place = np.arange(len(values)) + np.repeat(start - ragged.starts(counts), counts)
    return torch.empty_like(values).index_copy_(0, torch.from_numpy(place).to(values.device), values)
