"""A causal language model whose token rows are partly filled by the rows of other modules."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import DataError
from hetero_strategy.mask import Causal, MaskRule, Spans, by_window
from hetero_strategy.model.adapter import NO_ROWS, Adapter, previous_rows
from hetero_strategy.model.inputs import IGNORE, Packing, SequenceInputs
from hetero_strategy.model.kind import InstanceUnits, LossOutput, ModuleKind
from hetero_strategy.model.token_loss import token_loss

if TYPE_CHECKING:
    from hetero_strategy.plan.step_plan import StepMetadata


@dataclass
class LMOutput(LossOutput):
    """A language model's output for one microbatch of T rows, L of them labelled. The loss is the cross entropy summed
    over these; ``hidden`` are all rows after the last block and before the final norm. With context parallelism the L
    labels are those of :attr:`SequenceInputs.spread`, which may be of rows on other ranks.
    """

    correct: Tensor
    """bool ``[L]``: whether the likeliest token is the label."""
    predicted: Tensor
    """int64 ``[L]``: the likeliest token."""
    logits: Tensor | None = None
    """``[T, vocabulary]``, if requested."""


register_dataclass(LMOutput)  # as for LossOutput


class CausalLMKind(ModuleKind):
    """A kind for language models: units are samples, the loss counts loss tokens, evaluation gives predicted tokens."""

    name = "CausalLM"
    takes_from = ("Encoder",)
    samplewise = True

    @override
    def inputs(self, units: InstanceUnits) -> SequenceInputs:
        tokens, learnt = units.content.text(units.numbers)
        packing, lengths = Packing.of(units.inner_rows, alike=units.alike), units.edge_rows
        if self.rules:
            packing.masks = self.masks(units.inner_rows, self.spans(units, learnt))
        ids = np.zeros(packing.rows, np.int64)
        ids[: len(tokens)] = tokens
        labels = np.full(packing.rows, IGNORE, np.int64)
        # Labels are shifted within each sample: its last token predicts nothing, whatever sample follows.
        last = np.zeros(len(tokens), bool)
        last[np.cumsum(lengths)[lengths > 0] - 1] = True
        source = np.flatnonzero(~last)
        source = source[learnt[source + 1]]
        labels[source] = ids[source + 1]
        columns = {}
        for name, column in self.columns(units, tokens, learnt).items():
            columns[name] = torch.zeros(*column.shape[:-1], packing.rows, dtype=column.dtype)
            columns[name][..., : len(tokens)] = column
        return SequenceInputs(
            torch.from_numpy(ids), torch.from_numpy(labels), packing, slots=units.slots, columns=columns
        )

    def spans(self, units: InstanceUnits, learnt: np.ndarray) -> Spans:
        """Return the items in some samples, and the samples' rows before the first predicted token.

        Arguments are those of :meth:`columns`.
        """
        placed, none = units.content.placed(units.numbers), Spans.none()
        columns = [
            np.concatenate([getattr(none, name), *(getattr(each, theirs) for each in placed)])
            for name, theirs in (("sequence", "sample"), ("start", "start"), ("rows", "rows"))
        ]
        source = np.repeat([each.module for each in placed], [len(each.rows) for each in placed])
        prompts = np.zeros(len(units.inner_rows), np.int64)
        prompts[: len(units.edge_rows)] = ragged.before_first(learnt, units.edge_rows)
        return Spans(columns[0], columns[1], columns[2], source, prompts, {each.module: each.field for each in placed})

    def masks(self, lengths: np.ndarray, spans: Spans) -> dict[int | None, Tensor]:
        """Return :attr:`Packing.masks` of sequences by the rules; none where each layer is causal in its own window."""
        slices = {window: rule.slices(lengths, spans) for window, rule in self.rules.items()}
        if all(mask.same(Causal(window).slices(lengths, spans)) for window, mask in slices.items()):
            return {}
        return {window: torch.from_numpy(mask.intervals()) for window, mask in slices.items()}

    def columns(self, units: InstanceUnits, tokens: np.ndarray, learnt: np.ndarray) -> Mapping[str, Tensor]:
        """Return :attr:`SequenceInputs.columns` of some samples, without alignment rows: ``[..., n]`` on the host.

        Args:
            units: the samples; ``units.content.placed(units.numbers)`` are the items in them.
            tokens: token ids of all samples end to end, int32 ``[n]``.
            learnt: whether each token is predicted, bool ``[n]``.
        """
        return {}

    @override
    def metrics(self, metadata: StepMetadata, module: str) -> dict[str, int]:
        """Count loss tokens (for the share predicted right) and samples with labels (for the share with all labels
        right).
        """
        return {"accuracy": int(metadata.labels.sum()), "exact_match": int((metadata.labels > 0).sum())}

    @override
    def measured(self, inputs: SequenceInputs, output: LMOutput) -> tuple[Tensor, Tensor]:
        assert inputs.labelled is not None
        if inputs.spread is None:
            sequence = inputs.packing.sequence.index_select(0, inputs.labelled)
        else:
            sequence = inputs.spread.sequence
        per_sequence = output.loss_sum.new_zeros(2, len(inputs.packing.lengths), dtype=torch.int64)
        counted = torch.stack([torch.ones_like(output.correct), output.correct])
        wanted, right = per_sequence.index_add_(1, sequence, counted.to(torch.int64))
        if (context := inputs.packing.context) is None:
            return right.sum(), ((wanted == right) & (wanted > 0)).sum()
        of_all = context.summed(per_sequence)  # one rank counts the sequences
        return right.sum(), ((of_all[0] == of_all[1]) & (of_all[0] > 0)).sum() * (context.rank == 0)

    @override
    def result(self, module: Adapter, metadata: StepMetadata, like: Tensor, *, pipelined: bool) -> Tensor:
        """Return zeros for the predicted token of every loss token, in sample order, int64 ``[N]``."""
        return like.new_zeros(int(metadata.labels.sum()), dtype=torch.int64)

    @override
    def placed(
        self, metadata: StepMetadata, module: str, units: np.ndarray, inputs: SequenceInputs, output: LMOutput
    ) -> tuple[np.ndarray, Tensor]:
        labels = metadata.labels
        starts = ragged.starts(labels)[units]
        if inputs.spread is None:
            place = ragged.expand(starts, labels[units])
        else:
            sequence, number = inputs.spread.own.T
            place = starts[sequence] + number
        if len(place) != len(output.predicted):
            raise DataError(f"the plan says {len(place)} labels, the batch holds {len(output.predicted)}")
        return place, output.predicted


HEAD_BYTES, MOST_HEAD_ROWS = 2**29, 8192


class CausalLM(Adapter):
    """A base of language models: embed, callback ``before``, fill slots with rows, blocks, loss.

    Args:
        before: function of the embedded rows ``[T_local, width]`` and the inputs that returns rows, called before slots
            are filled. With context parallelism all inputs but ``packing.lengths`` describe this rank's part of the
            rows.
        attention: rule by which rows see each other, or its name in :data:`hetero_strategy.mask.RULES`; None: causal.
            Its items are those of modules with an edge to this one.

    Raises:
        ModelError: there is no such rule.
    """

    kind = CausalLMKind()
    max_length: int | None = None
    """Longest sequence in the position tables; None if there is no limit."""
    windows: Collection[int | None] = (None,)
    """Windows of the layers' attention, None for layers without one."""
    head_rows: int = 1024
    """Labelled rows whose logits exist at once; backward makes them again. Default: :func:`head_rows_of`."""
    _transforms_inputs = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Classes written for 0.1 have transform(hidden, packing), and the parameter's name tells.
        cls._transforms_inputs = [*inspect.signature(cls.transform).parameters][2:3] == ["inputs"]

    def __init__(
        self,
        *,
        before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
        attention: MaskRule | str | None = None,
    ) -> None:
        super().__init__()
        self.before = before
        if attention is not None:
            self.attend_by(attention)

    def attend_by(self, rule: MaskRule | str) -> None:
        """Let rows see each other by a rule, or by its name; arguments and errors as in the constructor."""
        self.kind = copy(self.kind)
        self.kind.rules = by_window(rule, self.windows)

    def block_windows(self) -> Sequence[Collection[int | None]]:
        """Return the windows of the attentions of each block; default: all :attr:`windows`."""
        return [self.windows] * max(1, len(self.blocks()))

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Turn token ids int64 ``[T]`` into rows ``[T_local, width]`` (this rank's slice if sequence parallel)."""

    @abstractmethod
    def transform(self, hidden: Tensor, inputs: SequenceInputs) -> Tensor:
        """Run rows ``[T_local, width]`` through this stage's blocks; it may read packing and columns of the inputs.

        A class whose second parameter has another name than ``inputs`` is given their packing alone.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Turn rows ``[n, width]`` into logits ``[n, vocabulary]`` by final norm and output projection.

        The rows are some labelled rows, the same on all tensor-parallel ranks of an instance. The logits may be a
        DTensor split over its last dimension.
        """

    def whole_rows(self, hidden: Tensor) -> Tensor:
        """Gather rows ``[T_local, width]`` of all tensor-parallel ranks into ``[T, width]``."""
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
            inputs: token sequences; ``slots`` are positions in the rows of :meth:`embed`. Only the first stage reads
                ids and slots, only the last one labels.
            rows: key of ``inputs.slots`` -> ``[len(slots[key]), width]``, in the first stage.
            hidden: rows ``[T_local, width]`` of the previous pipeline stage, unless this is the first.
            keep_logits: return the logits too.

        Returns:
            :class:`LMOutput`, or rows for the next stage if this one has no head.

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
        read: Any = inputs if self._transforms_inputs else inputs.packing
        hidden = self.transform(previous_rows(hidden), read)
        if not self.last_stage:
            return hidden
        output = self.score(self.whole_rows(hidden), inputs)
        return replace(output, hidden=hidden, logits=self.head(hidden) if keep_logits else None)

    @override
    def example(self, lengths: np.ndarray) -> SequenceInputs:
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        return SequenceInputs(ids, torch.full_like(ids, IGNORE), Packing.of(lengths), labelled=ids[:0])

    @override
    def recomputed_parts(self) -> list[nn.Module]:
        """Return the parts of the head, whose chunks :meth:`score` computes again."""
        if not self.last_stage:
            return []
        parts = (reduce(_part, fqn.split("."), cast("nn.Module | None", self)) for fqn in self.around_blocks()[1])
        return [part for part in parts if part is not None]

    def score(self, rows: Tensor, inputs: SequenceInputs) -> LMOutput:
        """Compute loss and likeliest tokens of labelled rows among ``[T, width]``, one chunk of logits at a time; with
        context parallelism a collective that spreads labelled rows evenly.
        """
        assert inputs.labelled is not None
        labels, rows = (x.index_select(0, inputs.labelled) for x in (inputs.labels, rows))
        if inputs.spread is not None:
            labels, rows = inputs.spread.tokens, inputs.spread.scored(rows, self.context_group)
        chunks = zip(rows.split(self.head_rows), labels.split(self.head_rows), strict=True)
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
    """Return the number of rows whose logits take half a GiB in fp32, at most 8192.

    More rows at once mean fewer gradients of the head to add up, each as large as the head.
    """
    return max(1, min(MOST_HEAD_ROWS, HEAD_BYTES // (4 * vocabulary)))


def fill_slots(hidden: Tensor, slots: Mapping[Hashable, Tensor], rows: Mapping[Hashable, Tensor]) -> Tensor:
    """Return ``hidden`` with the rows of every source at its slots; errors as in :func:`check_slots`."""
    check_slots(slots, rows)
    for source, index in slots.items():
        if source in rows:
            hidden = hidden.index_copy(0, index, rows[source].to(hidden.dtype))
    return hidden


def check_slots(slots: Mapping[Hashable, Tensor], rows: Mapping[Hashable, Tensor]) -> None:
    """Raise DataError if the rows of a source are missing or differ in number from its slots."""
    if unknown := set(rows) - set(slots):
        raise DataError(f"rows of {sorted(map(str, unknown))} have no slots: slots exist for {sorted(map(str, slots))}")
    for source, index in slots.items():
        count = len(rows[source]) if source in rows else 0
        if count != len(index):
            raise DataError(f"source {source!r} gives {count} rows for {len(index)} slots")
