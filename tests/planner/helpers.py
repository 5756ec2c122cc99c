"""Options of a run that plans are made for in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.transform import Site, Transform
from hetero_strategy.planner.candidate import RunOptions


def run_options(*transforms: Mapping[str, Transform]) -> RunOptions:
    """Return options of a run: transforms by module, one kind after another."""
    names = dict.fromkeys(name for of in transforms for name in of)
    return RunOptions({name: {of[name].name: of[name] for of in transforms if name in of} for name in names})


@dataclass(frozen=True)
class Squeeze(Transform):
    """Blocks that keep fewer bytes, by factors: a transform of a user's own, whose value has no hash."""

    name: ClassVar[str] = "squeeze"
    settings: ClassVar[str] = "factors, such as 2, 3"
    factors: Sequence[int] = (2,)

    @classmethod
    def of(cls, setting: object) -> Self | None:
        return cls([*map(int, str(setting).split(", "))])

    @property
    def setting(self) -> str:
        return ", ".join(map(str, self.factors))

    def apply(self, stages: Sequence[Adapter], site: Site) -> None: ...

    @classmethod
    def choices(cls, blocks: int) -> Sequence[Self]:
        return [cls([2]), cls([2, 3])] if blocks else []

    def on_block(self, number: int) -> Transform:
        return self

    def kept(self, numbers: np.ndarray, width: int) -> np.ndarray:
        return numbers / np.prod(self.factors)
