"""What makes a module an encoder, a language model, a generator, or something else: its :class:`ModuleKind`.

The model, the data and the runtime ask a module's kind wherever modules differ. A kind of your own is a subclass;
nothing else has to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import register_dataclass

from hetero_strategy.errors import HeteroError, ModelError
from hetero_strategy.model.inputs import ModuleInputs

if TYPE_CHECKING:  # a kind speaks of plans and payloads, which are made above this room
    from hetero_strategy.loading.payload import InstanceUnits
    from hetero_strategy.model.adapter import Adapter
    from hetero_strategy.plan.step_plan import StepItems, StepMetadata


@dataclass
class LossOutput:
    """What the last stage of a module with a loss makes of one microbatch."""

    loss_sum: Tensor
    """fp32 (fp64 for an fp64 model) scalar: the loss summed over its elements, in no way divided."""
    hidden: Tensor | None = field(default=None, kw_only=True)
    """``[T_local, width]``: the rows that edges to other modules carry."""


# Otherwise FSDP of torch before 2.13 does not see its tensors, and gathers no weights for their backward. The same
# holds for every class that derives from it.
register_dataclass(LossOutput)


class ModuleKind(ABC):
    """What sets modules of one kind apart. Its one object is the ``kind`` of the adapter class; it is pickled."""

    name: str
    """As in messages, such as "CausalLM"; other kinds name it in their edge rules."""
    takes_from: tuple[str, ...] = ()
    """Kinds whose rows an edge may bring to it."""
    gives_to: tuple[str, ...] = ()
    """Kinds to which an edge may lead from it, besides those that name it in ``takes_from``."""
    sources: int | None = None
    """How many edges lead to each module; None: any number."""
    samplewise: bool = False
    """Whether its units are whole samples with all their tokens; the others have units of their own."""
    has_loss: bool = True
    """Whether the last stage gives a :class:`LossOutput`; otherwise rows, and an edge has to lead from it."""

    @property
    def has_own_units(self) -> bool:
        """Whether its units are neither samples nor files: :meth:`units` says what they are."""
        return type(self).units is not ModuleKind.units

    def units(self, metadata: StepMetadata, sources: Sequence[str]) -> StepItems:
        """Return the units of a global batch, where they are neither samples nor files of a processor.

        Their ``given`` says which rows each source gives them, their ``targets`` how many elements of the loss each
        has: the sum over the global batch is what the loss is divided by. Pure, the same on every rank.

        Args:
            metadata: of the global batch, with the items of modules that have a processor.
            sources: modules from which edges lead to this one.
        """
        raise NotImplementedError(f"{type(self).__name__}.units: a module without a processor needs them")

    @abstractmethod
    def inputs(self, units: InstanceUnits) -> ModuleInputs:
        """Return what the module takes in one microbatch besides rows."""

    def metrics(self, metadata: StepMetadata, module: str) -> dict[str, int]:
        """Return, by name of each metric of the step, what the sum over all units is divided by."""
        return {}

    def measured(self, inputs: Any, output: Any) -> Sequence[Tensor]:
        """Return one microbatch's scalar summand of each of the :meth:`metrics`; with context parallelism that of this
        rank's rows, see :class:`~hetero_strategy.model.context.Context`.
        """
        return ()

    def result(self, module: Adapter, metadata: StepMetadata, like: Tensor, *, pipelined: bool) -> Tensor | None:
        """Return zeros for what an evaluation gives of the global batch, ``[rows, ...]``; None if there is nothing.

        Args:
            module: the whole module.
            metadata: of the global batch.
            like: of the device and of the dtype of losses.
            pipelined: the module has several stages.
        """
        return None

    def placed(
        self, metadata: StepMetadata, module: str, units: np.ndarray, inputs: Any, output: Any
    ) -> tuple[np.ndarray, Tensor] | None:
        """Return one microbatch's part of the :meth:`result`: int64 row numbers and their values; None if it has none.
        With context parallelism those of this rank's rows.

        Args:
            metadata: of the global batch.
            module: its name.
            units: of the microbatch, int64 ``[n]``.
            inputs, output: of the microbatch.
        """
        return None


def check_output(module: Adapter, output: Any) -> None:
    """Refuse what the last stage of a module gives, where it is no loss although the module's kind has one."""
    if module.kind.has_loss and not isinstance(output, LossOutput):
        raise ModelError(
            f"module '{module.name}' is a {module.kind.name}, which has a loss, but its forward returned a"
            f" {type(output).__name__}: return LossOutput(loss_sum), or set has_loss = False in its kind"
        )


def joins(source: ModuleKind, target: ModuleKind) -> bool:
    """Return whether an edge may lead from a module of one kind to one of the other."""
    return source.name in target.takes_from or target.name in source.gives_to


def usual_edges(kinds: Mapping[str, ModuleKind]) -> list[tuple[str, str]]:
    """Return the edges of modules for which nobody gave any.

    They are all that the kinds allow, but of several language models only the first one feeds others.
    """
    silent = [name for name, kind in kinds.items() if kind.samplewise][1:]
    sources = sorted((name for name in kinds if name not in silent), key=lambda name: kinds[name].samplewise)
    return [(s, t) for s in sources for t in kinds if joins(kinds[s], kinds[t])]


def check_edges(kinds: Mapping[str, ModuleKind], edges: Sequence[tuple[str, str]], error: type[HeteroError]) -> None:
    """Raise ``error`` where edges do not fit the modules of these kinds."""
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
        fed = sum(target == name for _, target in edges)
        if kind.sources not in (None, fed):
            raise error(
                f"{kind.name} {name!r} is fed by {fed} modules, it needs {kind.sources}: give it edges from modules of"
                f" kind {', '.join(kind.takes_from)}"
            )
