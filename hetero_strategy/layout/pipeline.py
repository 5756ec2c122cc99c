"""``Pipeline``: how a module's stages lie on its pipeline ranks. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pipeline:
    """The stages of one module on its pipeline ranks.

    Args:
        pp: number of pipeline ranks.
        vpp: stages on each of them.
        style: ``"loop"`` puts stage ``s`` on pipeline rank ``s % pp``. In ``"v"`` every other round of ``pp`` stages
            runs backwards, so with two stages per rank the first and the last stage share a rank. ``"consecutive"``
            puts stages that follow each other on one rank: they are the parts in which its work is cut.
    """

    pp: int = 1
    vpp: int = 1
    style: Literal["loop", "v", "consecutive"] = "loop"

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        if self.style == "consecutive":
            return stage // self.vpp
        turn, rank = divmod(stage, self.pp)
        return self.pp - 1 - rank if self.style == "v" and turn % 2 else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, ascending."""
        return tuple(s for s in range(self.stages) if self.rank_of(s) == rank)
