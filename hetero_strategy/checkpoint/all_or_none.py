"""Steps that all ranks of a group take together: all succeed, or all raise the same CheckpointError.

A rank that raised alone would leave the others waiting in the next collective until it times out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hetero_strategy.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class AllOrNone:
    """The ranks that save or load together.

    Every method raises the same CheckpointError on all ranks if a step fails somewhere or a rank is lost. A fault that
    is no matter of files or input keeps its type and traceback on the rank where it happened.
    """

    group: dist.ProcessGroup | None
    """None stands for the default group, or for one process without any."""
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> AllOrNone:
        """Return the team of a process group, which this rank must be part of."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return AllOrNone(None, 0, 1)
        return AllOrNone(group, dist.get_rank(group), dist.get_world_size(group))

    def from_one(self, work: Callable[[], T], rank: int = 0) -> T:
        """Run ``work`` on one rank and return its result on every rank."""
        answer, fault = _attempt(work) if self.rank == rank else (None, None)
        shared: list[Any] = [answer]
        if self.size > 1:
            with self._answered():
                dist.broadcast_object_list(shared, src=self._global(rank), group=self.group)
        return cast(T, _result(shared[0], fault))

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result once all have succeeded."""
        answer, fault = _attempt(work)
        if not self.everywhere(fault is None):
            self.centrally(lambda: _result(answer, fault), lambda nothing: nothing)  # raises what went wrong where
        return cast(T, answer[0])

    def everywhere(self, here: bool) -> bool:
        """Return whether something is so on every rank: one all-reduce of a byte."""
        return not self.anywhere([not here])[0]

    def anywhere(self, here: Sequence[bool]) -> list[bool]:
        """Return of each of several things whether it is so on any rank: one all-reduce of a byte for each."""
        if self.size == 1 or not here:
            return list(here)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        so = torch.tensor(here, dtype=torch.uint8, device=device)
        with self._answered():
            dist.all_reduce(so, dist.ReduceOp.MAX, group=self.group)
        return so.bool().tolist()

    def shared(self, here: T) -> list[T]:
        """Return what every rank passes, by rank, on all of them. It should be small."""
        everyone: list[Any] = [here] * self.size
        if self.size > 1:
            with self._answered():
                dist.all_gather_object(everyone, here, group=self.group)
        return everyone

    def centrally(self, work: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """Run ``work`` everywhere and ``combine`` on rank 0 with all results by rank; return this rank's element."""
        answer, fault = _attempt(work)
        if self.size == 1:
            if fault is None:
                answer, fault = _attempt(lambda result=answer[0]: combine([result])[0])  # type: ignore[misc]
            return cast(R, _result(answer, fault))
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        answers: list[Any] | None = None
        received: list[Any] = [None]
        with self._answered():
            dist.gather_object(answer, everyone, dst=self._global(0), group=self.group)
            if everyone is not None:
                faults = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
                if faults:
                    others = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
                    answers = [(None, f"{faults[0][1]} [rank {faults[0][0]}{others}]")] * self.size
                else:
                    (parts, text), fault = _attempt(lambda: combine([result for result, _ in everyone]))
                    answers = [(part, text) for part in parts or [None] * self.size]
            dist.scatter_object_list(received, answers, src=self._global(0), group=self.group)
        return cast(R, _result(received[0], fault))

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Around a collective, which fails where another rank does not come."""
        try:
            yield
        except RuntimeError as lost:
            raise CheckpointError(f"rank {self.rank}: another rank is lost or did not answer: {lost}") from lost

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


_Answer = tuple[Any, str | None]
"""A result, or None and what went wrong."""


def _attempt(work: Callable[[], Any]) -> tuple[_Answer, Exception | None]:
    try:
        return (work(), None), None
    except Exception as fault:
        if isinstance(fault, CheckpointError):
            return (None, str(fault)), fault
        if isinstance(fault, OSError) and fault.strerror:
            return (None, f"{fault.filename or 'checkpoint'}: {fault.strerror}"), fault
        return (None, f"{type(fault).__name__}: {fault}"), fault


def _result(answer: _Answer, fault: Exception | None) -> Any:
    """Return the result of an answer, or raise: a fault of the program itself as it is, where it happened."""
    result, text = answer
    if text is None:
        return result
    if fault is not None and not isinstance(fault, (CheckpointError, OSError)):
        raise fault
    raise CheckpointError(text)
