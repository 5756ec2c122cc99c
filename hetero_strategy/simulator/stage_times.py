"""Seconds of a stage's actions as lines in its rows and pairs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Num

from hetero_strategy.schedule.action import Kind


class Line(NamedTuple):
    """A line of the seconds of sequences: ``fixed + per_row * rows + per_pair * sum of squared lengths``."""

    fixed: float
    per_row: float
    per_pair: float

    def of(self, rows: Num[np.ndarray, "*n"], squares: Num[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
        """Return the seconds of each entry; zero without rows."""
        return np.where(rows > 0, self.fixed + self.per_row * rows + self.per_pair * squares, 0.0)

    def plus(self, other: Line, times: float = 1.0) -> Line:
        """Return the seconds of both in sequence, the second ``times`` over."""
        fixed, per_row, per_pair = other
        return Line(self.fixed + times * fixed, self.per_row + times * per_row, self.per_pair + times * per_pair)

    def shared(self, ranks: float) -> Line:
        """Divide the parts that grow with rows among so many ranks."""
        return Line(self.fixed, self.per_row / ranks, self.per_pair / ranks)


NOTHING = Line(0.0, 0.0, 0.0)


class BlockSeconds(NamedTuple):
    """The measured seconds of one block on one rank, without the collectives of tensor parallelism."""

    forward: Line
    backward: Line
    """Whole backward; :data:`NOTHING` if no gradient has to reach its rows and nothing of it trains."""
    input: Line
    """Half of the backward for the rows; :data:`NOTHING` if no gradient has to reach them."""
    weight: Line
    """Half of the backward for the weights; :data:`NOTHING` if none of them trains."""


ModuleSeconds = Mapping[int, Sequence[BlockSeconds]]
"""Ranks of tensor parallelism -> every block of a module."""


class KeyTravel(NamedTuple):
    """The seconds in which a context-parallel rank receives the keys that its rows see, for all blocks of a stage.

    Keys of some heads travel while attention of others runs. In backward they come again, and their gradients return.
    """

    forward: float
    """Exchanges in forward: one for each block."""
    input: float
    weight: float
    latency: float
    """Seconds until the first key of an exchange arrives, if any rank of the instance lacks one."""
    per_key: float
    groups: int
    """Groups of heads, of which the first hides behind nothing; 1 on cores that ranks share."""

    def exchanges(self, kind: Kind) -> float:
        """Return the exchanges of an action."""
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": self.input + self.weight}[kind]

    def exposed(
        self, kind: Kind, keys: Float64[np.ndarray, "n ranks"], attention: Float64[np.ndarray, "n ranks"]
    ) -> Float64[np.ndarray, "n ranks"]:
        """Return the seconds by which the keys of an action take longer than its attention hides.

        Args:
            keys: keys that each rank of an instance receives for one block.
            attention: seconds of each rank's attention.
        """
        exchanges = self.exchanges(kind)
        travel = exchanges * self.per_key * keys
        late = (1 - 1 / self.groups) * np.maximum(0.0, travel - attention)
        return travel / self.groups + late + exchanges * self.latency * (keys.max(axis=1, keepdims=True) > 0)


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one stage's actions on each rank of an instance."""

    forward: Line
    input: Line
    """Gradient of the rows; includes a recomputed forward, which is in ``weight`` if there is no such gradient."""
    weight: Line
    """Gradient of the weights."""
    gather: float
    """All-gather of its parameters."""
    reduce: float
    """Sum of its gradients over data-parallel ranks."""
    once: bool
    """Whether both collectives run once per step; otherwise they run in every microbatch."""
    after: float
    """Time after the step's last backward: the optimizer, and the sum of replicated gradients."""
    overlapped: bool = False
    """Whether collectives once per step overlap compute: UNSHARD and REDUCE then take no time of their own."""
    beside: bool = True
    """Whether collectives of every microbatch overlap its compute; otherwise they take the cores from it."""
    whole: Line | None = None
    """Measured backward in one piece; None: not measured."""
    keys: KeyTravel | None = None
    """Travel of keys between context-parallel ranks; None: none travel."""

    @cached_property
    def backward(self) -> Line:
        """Return a backward in one piece."""
        return self.input.plus(self.weight) if self.whole is None else self.whole

    def seconds(
        self,
        kind: Kind,
        rows: Num[np.ndarray, "*n"],
        squares: Num[np.ndarray, "*n"],
        keys: Float64[np.ndarray, "*n"] | None = None,
    ) -> Float64[np.ndarray, "*n"]:
        """Return the seconds of an action over so many rows, per instance or per instance and context-parallel rank.

        Args:
            keys: keys that each context-parallel rank of an instance receives; None: none travel.
        """
        if kind in ("UNSHARD", "REDUCE"):
            alone = self.gather if kind == "UNSHARD" else self.reduce
            return np.full(np.shape(rows), 0.0 if self.overlapped else alone)
        line = {"F": self.forward, "I": self.input, "W": self.weight, "B": self.backward}[kind]
        seconds = line.of(rows, squares)
        if keys is not None and self.keys is not None:
            seconds = seconds + self.keys.exposed(kind, keys, line.per_pair * squares)
        if self.once:
            return seconds
        collectives = self.gather if kind == "F" else self.gather + self.reduce
        return np.maximum(seconds, collectives) if self.beside else seconds + collectives
