"""`Pipeline`: how a module's stages lie on its pipeline ranks. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pipeline:
    """Stages of one module.

    Args:
        pp: pipeline ranks.
        vpp: virtual stages on each of them.
        style: stage ``s`` is on pipeline rank ``s % pp`` (loop), or every other turn runs backwards (v): with two
            stages per rank the first and the last stage share a rank.
    """

    pp: int = 1
    vpp: int = 1
    style: Literal["loop", "v"] = "loop"

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """Pipeline rank of a stage."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.style == "v" and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, ascending."""
        return tuple(s for s in range(self.stages) if self.rank_of(s) == rank)
