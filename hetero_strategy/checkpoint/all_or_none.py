"""Steps that all ranks of a group take together: all succeed, or all raise the same CheckpointError.

A rank that raised alone would leave the others waiting in the next collective until it times out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from hetero_strategy.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class AllOrNone:
    """The ranks that save or load together. `group` None: the default group, or one process without any."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> AllOrNone:
        """The team of a process group, which this rank must be part of."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return AllOrNone(None, 0, 1)
        return AllOrNone(group, dist.get_rank(group), dist.get_world_size(group))

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on every rank."""
        mine: list[Any] = [None]
        own: Exception | None = None
        if self.rank == 0:
            try:
                mine = [(work(), None)]
            except Exception as fault:
                own, mine = fault, [(None, _told(fault))]
        try:
            if self.size > 1:
                dist.broadcast_object_list(mine, src=self._first(), group=self.group)
        except RuntimeError as lost:
            raise self._lost(lost) from lost
        result, verdict = mine[0]
        if verdict is not None:
            raise self._fault(own, verdict)
        return cast(T, result)

    def together(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank and returns this rank's result once all have succeeded."""
        kept: list[T] = []
        self.centrally(lambda: kept.append(work()), lambda none: none)
        return kept[0]

    def centrally(self, work: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """Runs `work` everywhere, `combine` on rank 0 with all results by rank, and returns to each rank its element.

        Raises:
            CheckpointError: `work` or `combine` failed somewhere, or a rank is lost; the same text on all ranks.
            Exception: a fault that is no matter of files or input, on the rank where it happened.
        """
        own: Exception | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = (work(), None)
        except Exception as fault:
            own, mine = fault, (None, _told(fault))
        try:
            everyone = self._gather(mine)
            answers: list[tuple[R | None, str | None]] | None = None
            if everyone is not None:
                faults = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
                if faults:
                    answers = [(None, self._verdict(faults))] * self.size
                else:
                    try:
                        answers = [(part, None) for part in combine([cast(T, result) for result, _ in everyone])]
                    except Exception as fault:
                        own = fault
                        answers = [(None, _told(fault))] * self.size
            result, verdict = self._scatter(answers)
        except RuntimeError as lost:
            raise self._lost(lost) from lost
        if verdict is not None:
            raise self._fault(own, verdict)
        return cast(R, result)

    def _lost(self, lost: RuntimeError) -> CheckpointError:
        return CheckpointError(f"rank {self.rank}: another rank is lost or did not answer: {lost}")

    def _fault(self, own: Exception | None, verdict: str) -> Exception:
        # a fault of the program itself keeps its type and traceback on the rank where it happened
        if own is not None and not isinstance(own, (CheckpointError, OSError)):
            return own
        return CheckpointError(verdict)

    def _verdict(self, faults: list[tuple[int, str]]) -> str:
        rank, text = faults[0]
        if self.size == 1:
            return text
        others = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        return f"{text} [rank {rank}{others}]"

    def _gather(self, value: T) -> list[T] | None:
        if self.size == 1:
            return [value]
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, everyone, dst=self._first(), group=self.group)
        return everyone

    def _scatter(self, values: Sequence[T] | None) -> T:
        if self.size == 1:
            return cast(Sequence[T], values)[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, cast("list[Any] | None", values), src=self._first(), group=self.group)
        return cast(T, mine[0])

    def _first(self) -> int:
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)


def _told(fault: Exception) -> str:
    if isinstance(fault, CheckpointError):
        return str(fault)
    if isinstance(fault, OSError) and fault.strerror:
        return f"{fault.filename or 'checkpoint'}: {fault.strerror}"
    return f"{type(fault).__name__}: {fault}"
