"""Shared by monitors: where the time of training goes, and figures over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

import lightning as L
import torch
import torch.distributed as dist

from hetero_strategy.errors import FLAG, Allowed, ConfigError, is_whole

Value = TypeVar("Value")
Part = Literal["step", "between", "validation"]


def _whole(numbers: object, least: int) -> bool:
    return isinstance(numbers, Sequence) and all(is_whole(number, least) for number in numbers)


OPTIONS: dict[str, Allowed] = {
    "every_n_steps": ("a window of at least 1 step", lambda v: is_whole(v, 1)),
    "peak_flops": (
        "FLOP/s of one device, such as 989e12",
        lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool) and v > 0),
    ),
    "batch": ("1 or more, as the first makes optimizer states", lambda v: is_whole(v, 1)),
    "steps": ("[first, last] with 1 <= first < last", lambda v: _whole(v, 1) and len(v) == 2 and v[0] < v[1]),
    "ranks": ("a list of ranks, such as [0]", lambda v: _whole(v, 0)),
    "memory_history": FLAG,
}
"""Of monitors: what they may be."""


@dataclass
class Spent:
    """Seconds that this process spent on each part of training, from its first training step on."""

    step: float = 0.0
    """Training steps, including the optimizer's."""
    data: float = 0.0
    """Waiting for training batches, where the loader counts it (``waited``), else 0."""
    checkpoint: float = 0.0
    """Writing and removing checkpoints, where the strategy counts it (``checkpoint_seconds``), else 0."""
    between: float = 0.0
    """Everything else between steps: callbacks, loggers, Lightning's loop and its waits for other ranks."""
    validation: float = 0.0

    @property
    def training(self) -> float:
        """Everything but validation."""
        return self.step + self.data + self.checkpoint + self.between

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of_slowest(self, trainer: L.Trainer) -> tuple[Spent, int]:
        """Find what the rank spent that waited longest for data, and its number; a collective, equal on all ranks."""
        rows = [[0.0] * len(fields(self)) for _ in range(trainer.world_size)]
        rows[trainer.global_rank] = [getattr(self, f.name) for f in fields(self)]
        all_rows = over_ranks(trainer, [x for row in rows for x in row], "max")
        ranks = [Spent(*all_rows[i : i + len(rows[0])]) for i in range(0, len(all_rows), len(rows[0]))]
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].data)
        return ranks[slowest], slowest


def check_strategy(trainer: L.Trainer, monitor: str, what: str) -> None:
    """Refuse a strategy that has none of what a monitor looks at.

    Raises:
        ConfigError: it is not HeteroStrategy.
    """
    if not hasattr(trainer.strategy, "executor"):
        raise ConfigError(
            f"{monitor}: {type(trainer.strategy).__name__} has no {what}; use HeteroStrategy or remove the callback"
        )


class Watch:
    """Splits the time of training into parts; it is to be called whenever another part begins."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark: float | None = None
        self._counted = (0.0, 0.0)
        self._part: Part = "between"
        self._spent = Spent()

    def begins(self, part: Part, trainer: L.Trainer) -> None:
        """Count the time from now on to a part; the first step starts the watch."""
        now, counted = self._clock(), (waited(trainer) or 0.0, getattr(trainer.strategy, "checkpoint_seconds", 0.0))
        if self._mark is None and part != "step":
            return
        if self._mark is not None:
            data, checkpoint = (a - b for a, b in zip(counted, self._counted, strict=True))
            rest = now - self._mark - data - checkpoint
            self._spent += Spent(data=data, checkpoint=checkpoint, **{self._part: rest})
        self._mark, self._counted, self._part = now, counted, part

    def read(self) -> Spent:
        """Return and forget what was spent since the last call."""
        spent, self._spent = self._spent, Spent()
        return spent


def waited(trainer: L.Trainer) -> float | None:
    """Seconds that training has waited for batches until now; None where the loader does not count them."""
    return getattr(trainer.train_dataloader, "waited", None)


def over_ranks(trainer: L.Trainer, values: list[float], how: Literal["max", "mean"]) -> list[float]:
    """Reduce each value over all ranks to its maximum or mean; a collective, equal on all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    return trainer.strategy.reduce(tensor, reduce_op=how).tolist()


def gather_on_first(value: Value, group: dist.ProcessGroup | None) -> list[Value] | None:
    """Collect a value of every rank on rank 0, by rank; None on the others. A collective over ``group``, all ranks."""
    values: list[Value | None] = [None] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object(value, values if first else None, group=group)
    return values if first else None  # type: ignore[return-value]


_peaks: dict[torch.device, int] = {}
"""Bytes at most until a peak was last begun anew."""


def begin_peak(device: torch.device) -> None:
    """Let torch measure a peak of a CUDA device from now on; :func:`most_allocated` knows of those before."""
    _peaks[device] = most_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)


def most_allocated(device: torch.device) -> int:
    """Bytes of tensors on a CUDA device, when they were most in this process."""
    return max(_peaks.get(device, 0), torch.cuda.max_memory_allocated(device))
