"""What monitors share: how long training waits for each batch, and figures over all ranks."""

from __future__ import annotations

from typing import Literal

import lightning as L
import torch


class Waits:
    """Seconds between the end of a training step and the start of the next one, validation left out."""

    def __init__(self) -> None:
        self._end: float | None = None

    def start(self, now: float) -> float | None:
        """A step starts: the wait for its batch; None where the time before it was not the loader's."""
        return None if self._end is None else now - self._end

    def end(self, now: float) -> None:
        """A step ends."""
        self._end = now

    def forget(self) -> None:
        """What passes now is not a wait."""
        self._end = None


def over_ranks(trainer: L.Trainer, values: list[float], how: Literal["max", "mean"]) -> list[float]:
    """Each value's maximum or mean over all ranks; a collective, the same on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    reduced: list[float] = trainer.strategy.reduce(tensor, reduce_op=how).tolist()
    return reduced
