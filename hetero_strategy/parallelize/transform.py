"""``Transform``: a change of how the stages of one module compute, or of what they keep for backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from hetero_strategy.errors import check_types
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter


class OnPaper(Protocol):
    """The facts about a module that a transform may ask before any process starts."""

    @property
    def has_blocks(self) -> bool: ...

    @property
    def tp_compiles(self) -> bool: ...


class Site(NamedTuple):
    """The place of a module on this rank."""

    name: str
    layout: ModuleLayout
    device: torch.device
    blocks: Sequence[str]
    """FQNs of all blocks of the module; a stage has some of them."""
    kept: Sequence[nn.Module]
    """Layers that compute in the masters' dtype."""


@dataclass(frozen=True)
class Transform:
    """A change of one module's stages. A subclass is a frozen dataclass in a file of its own.

    It is used once it stands in the table of :mod:`hetero_strategy.parallelize.transforms`, or is given to
    ``register_transform``.
    """

    name: ClassVar[str]
    """Name in ``HeteroStrategy(transforms={module: {name: setting}})``."""
    settings: ClassVar[str]
    """Its settings in words, for messages."""
    before_tp: ClassVar[bool] = False
    """Whether it is applied before tensor parallelism; all others come between tensor parallelism and FSDP2."""
    splits_backward: ClassVar[bool] = True
    """Whether a schedule may divide the module's backward in two halves."""
    moves: ClassVar[bool] = False
    """Whether activations that it changes leave the device after forward and come back for backward."""
    warms_up: ClassVar[bool] = False
    """Whether a first forward takes so long that every stage runs one before the first step."""

    def __post_init__(self) -> None:
        check_types(type(self).__name__, type(self), **vars(self))

    @classmethod
    def of(cls, setting: object) -> Self | None:
        """Make the transform from a setting, as configuration files spell it; None: there is no such setting."""
        raise NotImplementedError

    @property
    def setting(self) -> str | int:
        """Return the setting that makes an equal transform."""
        raise NotImplementedError

    @property
    def of_blocks(self) -> bool:
        """Return whether it changes nothing but blocks."""
        return True

    def faults(self, module: OnPaper, layout: ModuleLayout, others: Mapping[str, Transform]) -> Iterator[str]:
        """Yield what makes it impossible, and the fix, to follow "<name> of '<module>'".

        Args:
            others: all transforms of the module by name, itself among them.
        """
        yield from ()

    def check(self, name: str, module: Adapter, layout: ModuleLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse a module or a device that does not support it, on every rank and before any group exists.

        Args:
            dtype: dtype of rows and of weights that compute.

        Raises:
            ConfigError: the message names the module and the fix.
        """

    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        """Change this rank's stages of a module, in place. Names of parameters stay as they are."""
        raise NotImplementedError

    @classmethod
    def choices(cls, blocks: int) -> Sequence[Self]:
        """Return the values among which a plan chooses for a module of so many blocks, if the user gives the transform
        to no module: from the one that saves least memory to the one that saves most.
        """
        return ()

    def on_block(self, number: int) -> Transform | None:
        """Return the change of what the block of this number keeps for backward; None: no change.

        The memory model applies it to single blocks, and measures each value once.
        """
        return None

    @property
    def changes_memory(self) -> bool:
        """Return whether it changes what is kept for backward."""
        return self.keeps_input_alone or self.on_block(0) is not None

    @property
    def keeps_input_alone(self) -> bool:
        """Return whether a stage keeps nothing but its input from forward until backward."""
        return False

    def kept(self, numbers: Float64[np.ndarray, "kinds=4"], width: int) -> Float64[np.ndarray, "kinds=4"]:
        """Estimate the numbers per row that a block which it changes keeps on the device for backward.

        Args:
            numbers: those without this transform, by the kinds of :data:`hetero_strategy.model.spec.KEPT`.
            width: numbers in a row between blocks.
        """
        return numbers

    def recomputed(self, blocks: int) -> tuple[float, float]:
        """Return the shares of the forward that run again in backward: of ``blocks`` equal blocks, and of the rest."""
        return 0.0, 0.0
