"""Shared parts of monitors: split the time of training, and combine values of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeVar

import lightning as L
import torch
import torch.distributed as dist

from hetero_strategy.errors import ConfigError

Value = TypeVar("Value")
Part = Literal["step", "between", "validation"]


Window = Annotated[int, ("a window of at least 1 step", lambda steps: steps >= 1)]


@dataclass
class Spent:
    """The seconds that this process spent on each part of training, since its first training step."""

    step: float = 0.0
    """Training steps, including the optimizer's."""
    data: float = 0.0
    """Waiting for training batches if the loader counts it (``waited``), else 0."""
    checkpoint: float = 0.0
    """Writing and removing checkpoints if the strategy counts it (``checkpoint_seconds``), else 0."""
    between: float = 0.0
    """Everything else between steps: callbacks, loggers, Lightning's loop and its waits for other ranks."""
    validation: float = 0.0

    @property
    def training(self) -> float:
        """Return the seconds of everything but validation."""
        return self.step + self.data + self.checkpoint + self.between

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of_slowest(self, trainer: L.Trainer) -> tuple[Spent, int]:
        """Return the times and number of the rank that waited longest for data; a collective, equal on all ranks."""
        rows = [[0.0] * len(fields(self)) for _ in range(trainer.world_size)]
        rows[trainer.global_rank] = [getattr(self, f.name) for f in fields(self)]
        all_rows = over_ranks(trainer, [x for row in rows for x in row], "max")
        ranks = [Spent(*all_rows[i : i + len(rows[0])]) for i in range(0, len(all_rows), len(rows[0]))]
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].data)
        return ranks[slowest], slowest


def check_strategy(trainer: L.Trainer, monitor: str, what: str) -> None:
    """Refuse a strategy without the data that a monitor needs."""
    if not hasattr(trainer.strategy, "executor"):
        raise ConfigError(
            f"{monitor}: {type(trainer.strategy).__name__} has no {what}; use HeteroStrategy or remove the callback"
        )


class Watch:
    """A stopwatch that splits the time of training into parts; call it whenever another part begins."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark: float | None = None
        self._counted = (0.0, 0.0)
        self._part: Part = "between"
        self._spent = Spent()

    def begins(self, part: Part, trainer: L.Trainer) -> None:
        """Count the time from now on as ``part``; the first step starts the watch."""
        now, counted = self._clock(), (waited(trainer) or 0.0, getattr(trainer.strategy, "checkpoint_seconds", 0.0))
        if self._mark is None and part != "step":
            return
        if self._mark is not None:
            data, checkpoint = (a - b for a, b in zip(counted, self._counted, strict=True))
            rest = now - self._mark - data - checkpoint
            self._spent += Spent(data=data, checkpoint=checkpoint, **{self._part: rest})
        self._mark, self._counted, self._part = now, counted, part

    def read(self) -> Spent:
        """Return and forget the time spent since the last call."""
        spent, self._spent = self._spent, Spent()
        return spent


def waited(trainer: L.Trainer) -> float | None:
    """Return the seconds that training has waited for batches until now; None if the loader does not count them."""
    return getattr(trainer.train_dataloader, "waited", None)


def over_ranks(trainer: L.Trainer, values: list[float], how: Literal["max", "mean"]) -> list[float]:
    """Reduce each value over all ranks to its maximum or mean; a collective, equal on all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    return trainer.strategy.reduce(tensor, reduce_op=how).tolist()


def gather_on_first(value: Value, group: dist.ProcessGroup | None) -> list[Value] | None:
    """Collect a value of every rank on rank 0, by rank; None on other ranks. A collective over ``group``, all ranks."""
    values: list[Value | None] = [None] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object(value, values if first else None, group=group)
    return values if first else None  # type: ignore[return-value]


_peaks: dict[torch.device, int] = {}
"""Peak bytes before the latest reset of torch's peak."""


def begin_peak(device: torch.device) -> None:
    """Start a new peak of a CUDA device in torch; :func:`most_allocated` remembers earlier peaks."""
    _peaks[device] = most_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)


def most_allocated(device: torch.device) -> int:
    """Return the peak bytes of tensors on a CUDA device in this process."""
    return max(_peaks.get(device, 0), torch.cuda.max_memory_allocated(device))
