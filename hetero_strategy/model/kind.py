""":class:`ModuleKind`: the difference between encoders, language models, generators and custom modules.

The model, the data and the runtime ask a module's kind wherever modules differ. A custom kind is a subclass; no other
code has to know it. A kind makes a module's inputs from the units that an instance computes and the processor of their
files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils._pytree import register_dataclass

from hetero_strategy.errors import HeteroError, ModelError
from hetero_strategy.mask import MaskRule, rule_faults
from hetero_strategy.model.inputs import EncoderInputs, ModuleInputs

if TYPE_CHECKING:  # plans are defined in a higher room
    from hetero_strategy.model.adapter import Adapter
    from hetero_strategy.plan.step_plan import StepItems, StepMetadata


Sizes = tuple[int, ...]


class Media(Protocol):
    """A processor of one kind of media file, which measures and reads files."""

    @property
    def field(self) -> str:
        """Return the manifest field that names the files; ``<field>`` stands for an item in the text."""

    @property
    def feature(self) -> int:
        """Return the width of a raw row."""

    @property
    def size_names(self) -> tuple[str, ...]:
        """Return the names of the numbers in the sizes that ``measure`` returns."""

    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        """Return sizes, and rows at the edge, from the header. Raise DataError.

        The product of the sizes is the number of raw rows, unless the processor has a ``raw_rows`` of its own, a
        function of sizes, int64 ``[n, k]``, to raw rows, int64 ``[n]``.
        """

    def check(self, path: str | Path) -> str | None:
        """Decode the whole file and discard the result; return a warning about it, if any. Raise DataError."""

    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Return rows ``[R, feature]``, float32 or the media's own ``dtype``.

        Raises:
            DataError: the file cannot be read, or no longer has the given ``sizes``.
        """

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return rows inside the module, int64 ``[n]``, of items with these sizes, int64 ``[n, k]``."""

    def settings(self) -> dict[str, Any]:
        """Return settings, ready for JSON; they are part of the index's key."""


class Processor(Media, Protocol):
    """A processor that makes the inputs of an encoder."""

    def collate(self, values: Sequence[np.ndarray], sizes: np.ndarray, rows: np.ndarray) -> EncoderInputs:
        """Put items end to end; no items give ``[0, feature]``."""


@runtime_checkable
class TargetProcessor(Media, Protocol):
    """A processor that makes the targets of a generator. ``measure`` returns the condition rows as an item's rows."""

    def target_elements(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of values in the loss, int64 ``[n]``, of items with these sizes, int64 ``[n, k]``."""


@dataclass(frozen=True)
class Items:
    """A selection of items of one module."""

    numbers: np.ndarray
    """Numbers in the module's item table, int64 ``[n]``."""
    sizes: np.ndarray
    """Sizes of each item, int64 ``[n, k]``."""
    rows: np.ndarray
    """Rows that cross the module's edges, int64 ``[n]``."""


@dataclass(frozen=True)
class PlacedItems:
    """The items of one encoder in some samples, by sample, then position; one that is several runs of rows, with tokens
    between them, is here once for each run.
    """

    module: str
    field: str
    """Manifest field of the encoder's files, such as "image"."""
    size_names: tuple[str, ...]
    """Names of the numbers in :attr:`sizes`."""
    sample: np.ndarray
    """Place of each item's sample among these samples, int64 ``[n]``, ascending."""
    sizes: np.ndarray
    """Sizes of each item, int64 ``[n, k]``."""
    start: np.ndarray
    """Position of each item's first row in its sample's tokens, int64 ``[n]``."""
    rows: np.ndarray
    """Rows of each item in the tokens, int64 ``[n]``."""


@dataclass(frozen=True)
class Content:
    """Access to the units of one step that a rank computes."""

    text: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    """Function of numbers of samples in the step: returns their token ids, int32 ``[T]``, and whether each is
    predicted, bool ``[T]``."""
    items: Callable[[str, np.ndarray], Items]
    """Function of a module and numbers of some of its items in the step: returns these items."""
    values: Callable[[str, np.ndarray], list[np.ndarray]]
    """Function of the same arguments: returns raw rows of each item, ``[R, feature]``; raises DataError if one cannot
    be read."""
    placed: Callable[[np.ndarray], list[PlacedItems]] = lambda samples: []
    """Function of numbers of samples in the step: returns the items in them of every encoder with an edge to the
    module."""


@dataclass(frozen=True)
class InstanceUnits:
    """The units that one instance of a module computes in one of its microbatches, and access to their payload."""

    module: str
    numbers: np.ndarray
    """Units, int64 ``[n]``: numbers of samples, or of items in :attr:`StepMetadata.items`."""
    edge_rows: np.ndarray
    """Rows of each unit that cross edges, int64 ``[n]``."""
    inner_rows: np.ndarray
    """Rows of each unit inside the module, int64 ``[n]``; alignment rows follow as one more unit."""
    slots: dict[Hashable, Tensor]
    """Slots for the module's inputs."""
    first: bool
    """Whether this rank holds the module's first stage."""
    last: bool
    """Whether this rank holds the module's last stage."""
    seed: tuple[int, int]
    """Seed of random inputs: the data's seed and the epoch."""
    processor: Any
    """Processor of the module's media; None if it has none."""
    content: Content
    alike: bool = False
    """Whether all units of the module in the step have the same number of rows inside it."""


@dataclass
class LossOutput:
    """The last stage's output for one microbatch of a module with a loss."""

    loss_sum: Tensor
    """fp32 (fp64 for an fp64 model) scalar: the loss summed over its elements, not divided."""
    hidden: Tensor | None = field(default=None, kw_only=True)
    """``[T_local, width]``: rows for edges to other modules."""


# Otherwise FSDP of torch before 2.13 misses its tensors and gathers no weights for their backward. Every derived class
# needs this, too.
register_dataclass(LossOutput)


class ModuleKind(ABC):
    """A base of module kinds. Its one object is the ``kind`` of the adapter class; it is pickled."""

    name: str
    """Name in messages and in the edge rules of other kinds, such as "CausalLM"."""
    takes_from: tuple[str, ...] = ()
    """Kinds from which an edge may lead to this kind."""
    gives_to: tuple[str, ...] = ()
    """Kinds to which an edge may lead from this kind, besides kinds that name it in ``takes_from``."""
    sources: int | None = None
    """Number of edges that lead to each module; None: any number."""
    samplewise: bool = False
    """Whether its units are whole samples with all their tokens; other kinds have smaller units."""
    has_loss: bool = True
    """Whether the last stage returns a :class:`LossOutput`; otherwise it returns rows, and an edge must lead from it.
    """
    rules: Mapping[int | None, MaskRule] = MappingProxyType({})
    """Window of layers, None for those without one -> rule of their attention; empty: that of the module's blocks."""

    @property
    def has_own_units(self) -> bool:
        """Return whether its units are neither samples nor files: :meth:`units` then defines them."""
        return type(self).units is not ModuleKind.units

    def units(self, metadata: StepMetadata, sources: Sequence[str]) -> StepItems:
        """Return the units of a global batch if they are neither samples nor files of a processor.

        Their ``given`` has the rows from each source, their ``targets`` the number of loss elements of each unit; the
        loss is divided by the sum of ``targets`` over the global batch. Pure, the same on every rank.

        Args:
            metadata: metadata of the global batch, with the items of modules that have a processor.
            sources: modules from which edges lead to this one.
        """
        raise NotImplementedError(f"{type(self).__name__}.units: a module without a processor needs them")

    @abstractmethod
    def inputs(self, units: InstanceUnits) -> ModuleInputs:
        """Return the module's inputs in one microbatch, besides rows."""

    def metrics(self, metadata: StepMetadata, module: str) -> dict[str, int]:
        """Return metric of the step -> divisor of its sum over all units."""
        return {}

    def measured(self, inputs: Any, output: Any) -> Sequence[Tensor]:
        """Return one microbatch's scalar summand of each of the :meth:`metrics`; with context parallelism, of the
        labels that this rank scores, see :class:`~hetero_strategy.model.spread_labels.SpreadLabels`.
        """
        return ()

    def result(self, module: Adapter, metadata: StepMetadata, like: Tensor, *, pipelined: bool) -> Tensor | None:
        """Return zeros for an evaluation's result of the global batch, ``[rows, ...]``; None without a result.

        Args:
            module: the whole module.
            metadata: metadata of the global batch.
            like: tensor with the device and the dtype of losses.
            pipelined: whether the module has several stages.
        """
        return None

    def placed(
        self, metadata: StepMetadata, module: str, units: np.ndarray, inputs: Any, output: Any
    ) -> tuple[np.ndarray, Tensor] | None:
        """Return one microbatch's part of the :meth:`result`: int64 row numbers and their values, or None. With context
        parallelism, for the labels that this rank scores.

        Args:
            metadata: metadata of the global batch.
            module: name of the module.
            units: unit numbers of the microbatch, int64 ``[n]``.
            inputs, output: inputs and output of the microbatch.
        """
        return None


def check_output(module: Adapter, output: Any) -> None:
    """Raise ModelError if the last stage of a module whose kind has a loss returns no loss."""
    if module.kind.has_loss and not isinstance(output, LossOutput):
        raise ModelError(
            f"module '{module.name}' is a {module.kind.name}, which has a loss, but its forward returned a"
            f" {type(output).__name__}: return LossOutput(loss_sum), or set has_loss = False in its kind"
        )


def joins(source: ModuleKind, target: ModuleKind) -> bool:
    """Return whether an edge may lead from a module of one kind to a module of the other."""
    return source.name in target.takes_from or target.name in source.gives_to


def usual_edges(kinds: Mapping[str, ModuleKind]) -> list[tuple[str, str]]:
    """Return the default edges: all that kinds allow, but of several language models only the first feeds others."""
    silent = [name for name, kind in kinds.items() if kind.samplewise][1:]
    sources = sorted((name for name in kinds if name not in silent), key=lambda name: kinds[name].samplewise)
    return [(s, t) for s in sources for t in kinds if joins(kinds[s], kinds[t])]


def check_edges(kinds: Mapping[str, ModuleKind], edges: Sequence[tuple[str, str]], error: type[HeteroError]) -> None:
    """Raise ``error`` if edges do not fit modules of these kinds."""
    for source, target in edges:
        where = f"edge {source} -> {target}"
        for end in (source, target):
            if end not in kinds:
                raise error(f"{where}: no module {end!r} among {list(kinds)}")
        if not joins(kinds[source], kinds[target]):
            allowed = {f"{a.name} to {b.name}" for a in kinds.values() for b in kinds.values() if joins(a, b)}
            raise error(
                f"{where} leads from a {kinds[source].name} to a {kinds[target].name}: between these modules edges may"
                f" lead from {', '.join(sorted(allowed)) or 'none to none'}"
            )
        if kinds[source].samplewise and kinds[target].samplewise:
            raise error(
                f"{where}: the units of both are whole samples, between which no edge brings rows; let {target}'s kind"
                " say in units() what its units are, in place of samplewise"
            )
    if len(set(edges)) != len(edges):
        raise error("an edge is given twice")
    for name, kind in kinds.items():
        if not kind.has_loss and not any(source == name for source, _ in edges):
            raise error(f"{kind.name} {name!r} feeds nothing: add an edge from it, or remove it")
        sources = [source for source, target in edges if target == name]
        with_files = [source for source in sources if not kinds[source].has_own_units]
        for fault in (fault for rule in kind.rules.values() for fault in rule_faults(name, rule, with_files)):
            raise error(fault)
        fed = len(sources)
        if kind.sources not in (None, fed):
            raise error(
                f"{kind.name} {name!r} is fed by {fed} modules, it needs {kind.sources}: give it edges from modules of"
                f" kind {', '.join(kind.takes_from)}"
            )
