"""A causal language model whose token rows are partly filled by the rows of other modules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError
from hetero_strategy.model.adapter import NO_ROWS, Adapter, previous_rows
from hetero_strategy.model.inputs import IGNORE, Packing, SequenceInputs
from hetero_strategy.model.kind import LossOutput, ModuleKind
from hetero_strategy.model.token_loss import token_loss

if TYPE_CHECKING:
    from hetero_strategy.loading.payload import InstanceUnits
    from hetero_strategy.plan.step_plan import StepMetadata


@dataclass
class LMOutput(LossOutput):
    """What a language model makes of one microbatch of T rows, L of them labelled. The loss is the cross entropy summed
    over these; ``hidden`` are all rows after the last block and before the final norm.
    """

    correct: Tensor
    """bool ``[L]``: whether the likeliest token is the label."""
    predicted: Tensor
    """int64 ``[L]``: the likeliest token."""
    logits: Tensor | None = None
    """``[T, vocabulary]``, where asked for."""


register_dataclass(LMOutput)  # as LossOutput


class CausalLMKind(ModuleKind):
    """Units are samples; the loss is counted in loss tokens, and an evaluation gives the tokens predicted for them."""

    name = "CausalLM"
    takes_from = ("Encoder",)
    samplewise = True

    @override
    def inputs(self, units: InstanceUnits) -> SequenceInputs:
        tokens, learnt = units.content.text(units.numbers)
        packing, lengths = Packing.of(units.inner_rows, alike=units.alike), units.edge_rows
        ids = np.zeros(packing.rows, np.int64)
        ids[: len(tokens)] = tokens
        labels = np.full(packing.rows, IGNORE, np.int64)
        # Shifted within each sample: its last token predicts nothing, whatever sample lies behind it.
        last = np.zeros(len(tokens), bool)
        last[np.cumsum(lengths)[lengths > 0] - 1] = True
        source = np.flatnonzero(~last)
        source = source[learnt[source + 1]]
        labels[source] = ids[source + 1]
        return SequenceInputs(torch.from_numpy(ids), torch.from_numpy(labels), packing, slots=units.slots)

    @override
    def metrics(self, metadata: StepMetadata, module: str) -> dict[str, int]:
        """Loss tokens predicted right, of all; samples with labels, every one of them right, of all with labels."""
        return {"accuracy": int(metadata.labels.sum()), "exact_match": int((metadata.labels > 0).sum())}

    @override
    def measured(self, inputs: SequenceInputs, output: LMOutput) -> tuple[Tensor, Tensor]:
        assert inputs.labelled is not None
        sequence = inputs.packing.sequence.index_select(0, inputs.labelled)
        per_sequence = output.loss_sum.new_zeros(2, len(inputs.packing.lengths), dtype=torch.int64)
        counted = torch.stack([torch.ones_like(output.correct), output.correct])
        wanted, right = per_sequence.index_add_(1, sequence, counted.to(torch.int64))
        if (context := inputs.packing.context) is None:
            return right.sum(), ((wanted == right) & (wanted > 0)).sum()
        of_all = context.summed(per_sequence)  # and one rank counts the sequences
        return right.sum(), ((of_all[0] == of_all[1]) & (of_all[0] > 0)).sum() * (context.rank == 0)

    @override
    def result(self, module: Adapter, metadata: StepMetadata, like: Tensor, *, pipelined: bool) -> Tensor:
        """Predicted token of every loss token in sample order, int64 ``[N]``."""
        return like.new_zeros(int(metadata.labels.sum()), dtype=torch.int64)

    @override
    def placed(
        self, metadata: StepMetadata, module: str, units: np.ndarray, inputs: SequenceInputs, output: LMOutput
    ) -> tuple[np.ndarray, Tensor]:
        labels = metadata.labels
        starts = ragged.starts(labels)[units]
        if inputs.own_labels is None:
            place = ragged.expand(starts, labels[units])
        else:
            sequence, number = inputs.own_labels.T
            place = starts[sequence] + number
        if len(place) != len(output.predicted):
            raise DataError(f"the plan says {len(place)} labels, the batch holds {len(output.predicted)}")
        return place, output.predicted


HEAD_BYTES, MOST_HEAD_ROWS = 2**29, 8192


class CausalLM(Adapter):
    """Base of language models: embed, callback ``before``, fill slots with rows, blocks, loss.

    Args:
        before: called with the embedded rows ``[T_local, width]`` and the inputs before slots are filled; returns rows.
            With context parallelism all but ``packing.lengths`` is of this rank's part of the rows.
    """

    kind = CausalLMKind()
    max_length: int | None = None
    """Length of the longest sequence that the position tables reach; None if there is no limit."""
    head_rows: int = 1024
    """Labelled rows whose logits exist at once; backward makes them again. See :func:`head_rows_of`."""

    def __init__(self, *, before: Callable[[Tensor, SequenceInputs], Tensor] | None = None) -> None:
        super().__init__()
        self.before = before

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Turn token ids int64 ``[T]`` into rows ``[T_local, width]`` (this rank's slice where sequence parallel)."""

    @abstractmethod
    def transform(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Run rows ``[T_local, width]`` through the blocks that this stage holds."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Turn rows ``[n, width]`` into logits ``[n, vocabulary]`` by final norm and output projection.

        It is given some labelled rows, the same on all tensor-parallel ranks of an instance; the logits may be a
        DTensor that is split over its last dimension.
        """

    def whole_rows(self, hidden: Tensor) -> Tensor:
        """Turn rows ``[T_local, width]`` into those of all tensor-parallel ranks ``[T, width]``."""
        return hidden

    @override
    def forward(
        self,
        inputs: SequenceInputs,
        rows: Mapping[Hashable, Tensor] = NO_ROWS,
        hidden: Tensor | None = None,
        *,
        keep_logits: bool = False,
    ) -> LMOutput | Tensor:
        """Run one microbatch.

        Args:
            inputs: token sequences; ``slots`` are positions in the rows that :meth:`embed` gives. Only the first stage
                reads ids and slots, only the last one labels.
            rows: key of ``inputs.slots`` -> ``[len(slots[key]), width]``, in the first stage.
            hidden: rows ``[T_local, width]`` of the previous pipeline stage, where this is not the first.
            keep_logits: return the logits too.

        Returns:
            :class:`LMOutput`, or rows for the next stage where this one has no head.

        Raises:
            DataError: rows and slots do not match, or a sequence is longer than the position tables.
        """
        if self.max_length is not None and inputs.packing.longest > self.max_length:
            raise DataError(
                f"{type(self).__name__}: a sequence of {inputs.packing.longest} tokens exceeds the model's maximum "
                f"{self.max_length}: shorten samples or raise the maximum"
            )
        if inputs.packing.context is not None:
            inputs.packing.context.group = self.context_group
        if self.first_stage:
            hidden = self.embed(inputs.ids)
            if self.before is not None:
                hidden = self.before(hidden, inputs)
            hidden = fill_slots(hidden, inputs.slots, rows)
        hidden = self.transform(previous_rows(hidden), inputs.packing)
        if not self.last_stage:
            return hidden
        output = self.score(self.whole_rows(hidden), inputs)
        return replace(output, hidden=hidden, logits=self.head(hidden) if keep_logits else None)

    @override
    def recomputed_parts(self) -> list[nn.Module]:
        """The head, whose chunks :meth:`score` computes again."""
        if not self.last_stage:
            return []
        found = (reduce(_part, fqn.split("."), cast("nn.Module | None", self)) for fqn in self.around_blocks()[1])
        return [part for part in found if part is not None]

    def score(self, rows: Tensor, inputs: SequenceInputs) -> LMOutput:
        """Loss and likeliest tokens of the labelled rows among ``[T, width]``; logits never exist for all of them."""
        assert inputs.labelled is not None
        labels = inputs.labels.index_select(0, inputs.labelled)
        chunks = zip(
            rows.index_select(0, inputs.labelled).split(self.head_rows), labels.split(self.head_rows), strict=True
        )
        if torch.is_grad_enabled():
            again = partial(checkpoint, self._of_chunk, use_reentrant=False)
            scored = [again(*chunk) for chunk in chunks]
        else:
            scored = [self._of_chunk(*chunk) for chunk in chunks]
        losses, predicted = zip(*scored, strict=True)
        likeliest = torch.cat(predicted)
        return LMOutput(torch.stack(losses).sum(), likeliest == labels, likeliest)

    def _of_chunk(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss(self.head(rows), labels, self.compiled_by)


def _part(holder: nn.Module | None, name: str) -> nn.Module | None:
    return getattr(holder, name, None)


def head_rows_of(vocabulary: int) -> int:
    """Return how many rows' logits take half a GiB in fp32, but 8192 at most: with more of them at once fewer gradients
    of the head are added up, each as large as the head.
    """
    return max(1, min(MOST_HEAD_ROWS, HEAD_BYTES // (4 * vocabulary)))


def fill_slots(hidden: Tensor, slots: Mapping[Hashable, Tensor], rows: Mapping[Hashable, Tensor]) -> Tensor:
    """Return ``hidden`` with the rows of every source at its slots; errors as :func:`check_slots`."""
    check_slots(slots, rows)
    for source, index in slots.items():
        if source in rows:
            hidden = hidden.index_copy(0, index, rows[source].to(hidden.dtype))
    return hidden


def check_slots(slots: Mapping[Hashable, Tensor], rows: Mapping[Hashable, Tensor]) -> None:
    """Raise DataError if the rows of a source are missing or are not as many as its slots."""
    if unknown := set(rows) - set(slots):
        raise DataError(f"rows of {sorted(map(str, unknown))} have no slots: slots exist for {sorted(map(str, slots))}")
    for source, index in slots.items():
        count = len(rows[source]) if source in rows else 0
        if count != len(index):
            raise DataError(f"source {source!r} gives {count} rows for {len(index)} slots")
