"""The whole model: named modules and the edges between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM, LMOutput
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.init import materialize
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, Ragged, SequenceInputs


@dataclass(frozen=True)
class Edge:
    """Rows of ``source`` fill slots of ``target``."""

    source: str
    target: str


@dataclass
class ModelOutput:
    """What one global batch gives."""

    loss: Tensor
    """Scalar: over consumers, the sum of (cross entropy summed over loss tokens / N)."""
    loss_tokens: int
    """N, loss tokens of the global batch."""
    accuracy: Tensor
    """Scalar: share of loss tokens predicted right, averaged over consumers."""
    exact_match: Tensor
    """Scalar: of samples with labels, the share whose every label is predicted right, averaged over consumers."""
    predictions: Ragged | None = None
    """Evaluation only: predicted tokens at label positions, run ``i`` is sample ``i`` of the batch; first consumer."""
    logits: tuple[Tensor, ...] | None = None
    """Where asked for: per microbatch ``[T, vocabulary]``; first consumer."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The share of each consumer in ``loss``."""


class BatchLike(Protocol):
    """What :meth:`MultimodalModel.forward` reads of a batch."""

    @property
    def plan(self) -> Any: ...

    @property
    def inputs(self) -> Sequence[Mapping[str, EncoderInputs | SequenceInputs]]: ...

    def local_rows(self, microbatch: int, source: str, target: str) -> Tensor | None:
        """Source row of each slot of ``target``; None for identity."""


class Scored(NamedTuple):
    """One consumer's output of one microbatch, with what says whose rows they are."""

    output: LMOutput
    inputs: SequenceInputs
    units: np.ndarray
    """Sample numbers of the sequences, int64 ``[n]``."""


class MultimodalModel(nn.Module):
    """Named modules and edges. ``model(batch)`` runs them on one device, or as an attached runner does.

    Args:
        modules: name -> :class:`Encoder` or :class:`CausalLM`; they become children under their names.
        edges: (source, target) pairs; by default every encoder feeds the single language model.
        freeze: modules or parts ("vision", "vision.backbone") whose parameters are not trained.
        seed: of the initialisation.

    Raises:
        ModelError: names, edges, widths or frozen parts do not fit together.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        edges: Sequence[Edge | tuple[str, str]] | None = None,
        *,
        freeze: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.modules_by_name: dict[str, Adapter] = {}
        for name, module in modules.items():
            _check_module(name, module, self)
            self.modules_by_name[name] = module  # type: ignore[assignment]
            self.add_module(name, module)
        self.edges = _checked_edges(self.modules_by_name, edges)
        self.seed = seed
        self._runner: Callable[..., ModelOutput] | None = None
        for part in freeze:
            _part(self, part).requires_grad_(False)
        for adapter in self.modules_by_name.values():
            adapter.twin()
        if torch.get_default_device().type != "meta":
            materialize(self, seed)

    def topological(self) -> tuple[str, ...]:
        """Module names, every source before its targets."""
        sources = {edge.source for edge in self.edges}
        return tuple(sorted(self.modules_by_name, key=lambda name: name not in sources))

    def consumers(self) -> tuple[str, ...]:
        """Modules with a loss, in the order they were given."""
        return tuple(name for name, module in self.modules_by_name.items() if isinstance(module, CausalLM))

    def attach(self, runner: Callable[..., ModelOutput]) -> None:
        """Let ``runner(batch)`` compute :meth:`forward` from now on."""
        self._runner = runner

    def detach(self) -> None:
        """Back to one device."""
        self._runner = None

    def forward(self, batch: BatchLike, *, keep_logits: bool = False) -> ModelOutput:
        """One global batch, all its microbatches.

        Args:
            batch: plan and inputs.
            keep_logits: return the first consumer's logits.
        """
        if self._runner is not None:
            return self._runner(batch, keep_logits=keep_logits) if keep_logits else self._runner(batch)
        scored: dict[str, list[Scored]] = {name: [] for name in self.consumers()}
        for number, inputs in enumerate(batch.inputs):
            assignments = batch.plan.microbatches[number].assignments
            for name, output in self._microbatch(batch, number, inputs, keep_logits).items():
                made = inputs[name]
                assert isinstance(made, SequenceInputs)
                scored[name].append(Scored(output, made, assignments[name].units))
        return combine(scored, batch.plan.metadata.labels, predictions=not self.training, device=self._device())

    def _microbatch(
        self, batch: BatchLike, number: int, inputs: Mapping[str, EncoderInputs | SequenceInputs], keep_logits: bool
    ) -> dict[str, LMOutput]:
        rows: dict[str, Tensor] = {}
        outputs: dict[str, LMOutput] = {}
        for name in self.topological():
            given = inputs.get(name)
            if isinstance(given, EncoderInputs):
                if len(given.rows):  # a microbatch without the module's items skips it
                    rows[name] = self.modules_by_name[name](given)
            elif given is not None:
                mine = {}
                for edge in self.edges:
                    if edge.target == name and edge.source in rows:
                        order = batch.local_rows(number, edge.source, name)
                        source = rows[edge.source]
                        mine[edge.source] = source if order is None else source[order.to(source.device)]
                outputs[name] = self.modules_by_name[name](given, mine, keep_logits=keep_logits)
        return outputs

    def _device(self) -> torch.device:
        return next(self.parameters()).device


def combine(
    scored: Mapping[str, Sequence[Scored]], labels: np.ndarray, *, predictions: bool, device: torch.device
) -> ModelOutput:
    """Loss and metrics of a global batch from its microbatches; no host sync unless predictions are wanted.

    Args:
        scored: consumer -> outputs of its microbatches.
        labels: loss tokens of each sample, int64 ``[S]``.
        predictions: whether to gather predicted tokens.
        device: of the scalars.
    """
    loss_tokens = int(labels.sum())
    losses: dict[str, Tensor] = {}
    accuracy = exact = torch.zeros((), device=device)
    for name, outputs in scored.items():
        total = sum((one.output.loss_sum for one in outputs), torch.zeros((), device=device))
        losses[name] = total / max(1, loss_tokens)
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
        predictions=gather_predictions(first, labels) if predictions else None,
        logits=logits or None,
        losses=losses,
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
    offsets = np.concatenate([[0], np.cumsum(labels)])
    if not outputs:
        return Ragged(torch.zeros(0, dtype=torch.int64), np.zeros_like(offsets))
    values = torch.cat([one.output.predicted[one.inputs.labels != IGNORE] for one in outputs])
    units = np.concatenate([one.units for one in outputs])
    counts = labels[units]
    if int(counts.sum()) != len(values):
        raise DataError(f"the plan says {int(counts.sum())} labels, the batch holds {len(values)}")
    before = np.cumsum(counts) - counts
    place = np.arange(len(values)) + np.repeat(offsets[units] - before, counts)
    ordered = values.new_zeros(int(offsets[-1]))
    ordered[torch.from_numpy(place).to(values.device)] = values
    return Ragged(ordered, offsets)


def _check_module(name: str, module: nn.Module, model: nn.Module) -> None:
    if not isinstance(module, (Encoder, CausalLM)):
        raise ModelError(f"module {name!r} is a {type(module).__name__}: wrap it in Encoder or CausalLM")
    if not name.isidentifier() or hasattr(model, name):
        raise ModelError(f"module name {name!r} is taken or not an identifier: choose another")
    if any(module is other for other in model.children()):
        raise ModelError(f"module {name!r} is given under two names")


def _checked_edges(modules: Mapping[str, Adapter], edges: Sequence[Edge | tuple[str, str]] | None) -> tuple[Edge, ...]:
    consumers = [name for name, module in modules.items() if isinstance(module, CausalLM)]
    encoders = [name for name in modules if name not in consumers]
    if not consumers:
        raise ModelError(f"no CausalLM among modules {list(modules)}: nothing has a loss")
    if edges is None:
        if len(consumers) != 1:
            raise ModelError(f"modules {consumers} are all CausalLMs: say edges=[(source, target), ...]")
        edges = [Edge(name, consumers[0]) for name in encoders]
    checked = tuple(edge if isinstance(edge, Edge) else Edge(*edge) for edge in edges)
    for edge in checked:
        for end in (edge.source, edge.target):
            if end not in modules:
                raise ModelError(f"edge {edge.source} -> {edge.target}: no module {end!r} among {list(modules)}")
        if edge.source not in encoders or edge.target not in consumers:
            raise ModelError(f"edge {edge.source} -> {edge.target}: edges lead from an Encoder to a CausalLM")
        if (given := modules[edge.source].width) != (taken := modules[edge.target].width):
            raise ModelError(
                f"edge {edge.source} -> {edge.target}: source rows have width {given}, the target takes {taken}: set "
                f"out_width={taken} for {edge.source}"
            )
    if len(set(checked)) != len(checked):
        raise ModelError("an edge is given twice")
    if unused := set(encoders) - {edge.source for edge in checked}:
        raise ModelError(f"encoders {sorted(unused)} feed nothing: add an edge or remove them")
    return checked


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name) if name else model
    except AttributeError:
        parts = [part for part, _ in model.named_modules() if part and part.count(".") <= 1]
        raise ModelError(f"freeze={name!r} is no part of the model: parts are such as {parts}") from None
