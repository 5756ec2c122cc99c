"""What monitors share: where the time of training goes, and figures over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import lightning as L
import torch

Part = Literal["step", "between", "validation"]


@dataclass
class Spent:
    """Where the seconds of this process went, from its first training step on."""

    step: float = 0.0
    """Training steps, the optimizer's included."""
    data: float = 0.0
    """Waiting for training batches, as the loader says (``waited``); 0 where it does not."""
    checkpoint: float = 0.0
    """Writing and removing checkpoints, as the strategy says (``checkpoint_seconds``); 0 where it does not."""
    between: float = 0.0
    """All else between steps: callbacks, loggers, Lightning's loop and where it waits for other ranks."""
    validation: float = 0.0

    @property
    def training(self) -> float:
        """All but validation."""
        return self.step + self.data + self.checkpoint + self.between

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of_slowest(self, trainer: L.Trainer) -> tuple[Spent, int]:
        """That of the rank that waited longest for data, and its number; a collective, the same on every rank."""
        rows = [[0.0] * len(fields(self)) for _ in range(trainer.world_size)]
        rows[trainer.global_rank] = [getattr(self, f.name) for f in fields(self)]
        found = over_ranks(trainer, [x for row in rows for x in row], "max")
        ranks = [Spent(*found[i : i + len(rows[0])]) for i in range(0, len(found), len(rows[0]))]
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].data)
        return ranks[slowest], slowest


class Watch:
    """Says where the seconds of training go: call it whenever something else begins.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark: float | None = None
        self._counted = (0.0, 0.0)
        self._part: Part = "between"
        self._spent = Spent()

    def begins(self, part: Part, trainer: L.Trainer) -> None:
        """From now on seconds are those of a part; the first step starts the watch."""
        now, counted = self._clock(), (waited(trainer) or 0.0, getattr(trainer.strategy, "checkpoint_seconds", 0.0))
        if self._mark is None and part != "step":
            return
        if self._mark is not None:
            data, checkpoint = (a - b for a, b in zip(counted, self._counted, strict=True))
            rest = now - self._mark - data - checkpoint
            self._spent += Spent(data=data, checkpoint=checkpoint, **{self._part: rest})
        self._mark, self._counted, self._part = now, counted, part

    def read(self) -> Spent:
        """What was spent since it was last read."""
        spent, self._spent = self._spent, Spent()
        return spent


class Waits:
    """Seconds that training waited for each batch, as the loader says."""

    def __init__(self) -> None:
        self._before: float | None = None

    def next(self, trainer: L.Trainer) -> float | None:
        """The wait for the batch that has just come; None for the first one, or where the loader does not say."""
        before, self._before = self._before, waited(trainer)
        return None if before is None or self._before is None else self._before - before


def waited(trainer: L.Trainer) -> float | None:
    """Seconds that training has waited for batches until now, as the loader says."""
    return getattr(trainer.train_dataloader, "waited", None)


def over_ranks(trainer: L.Trainer, values: list[float], how: Literal["max", "mean"]) -> list[float]:
    """Each value's maximum or mean over all ranks; a collective, the same on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    reduced: list[float] = trainer.strategy.reduce(tensor, reduce_op=how).tolist()
    return reduced
