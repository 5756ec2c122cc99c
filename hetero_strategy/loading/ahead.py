"""One thread that works ahead of the main thread, in the order in which it was asked."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

GRACE = 10.0
"""Seconds that closing waits for work that may hang: a collective whose peer is gone."""


class Ahead:
    """One background thread, shared by all loaders of a data module.

    Tasks run in the order in which the main thread submits them. The main thread runs the same program on every rank,
    so collectives inside tasks run in the same order on all ranks: train and val loaders may interleave as they like.
    For the same reason a task once submitted is never taken back where the run goes on: another rank may be at it.
    And where one has failed, those behind it fail alike until the main thread knows (:meth:`forgive`): their
    collectives would meet others than their own.

    The thread starts with the first task. It is a daemon: neither an idle thread nor one that waits for a dead peer
    keeps the interpreter alive.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._work = _Work()

    def __reduce__(self) -> tuple[type[Ahead], tuple[()]]:
        return Ahead, ()  # a data module goes to spawned processes, each of which has a thread of its own

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], Result], *, always: bool = False) -> Future[Result]:
        """Run ``work()`` after everything submitted before; what it raises reaches who asks for the result.

        With ``always`` it runs even behind a task that failed: it cleans up.
        """
        if not self.alive:
            # The thread holds its work alone, so an instance that nobody holds any more ends it.
            self._work = _Work()
            self._thread = threading.Thread(target=_run, args=(self._work, _device()), name="loading", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._work.tasks.put, None)
        future: Future[Result] = Future()
        self._work.tasks.put((future, work, always))
        return future

    def forgive(self) -> None:
        """Go on after a task that failed: whoever submitted it has seen its error."""
        self._work.broken = None

    def close(self, timeout: float = GRACE) -> bool:
        """End the thread after what is submitted. The next task starts another one.

        Returns:
            Whether it ended in time; else it is left behind.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._work.tasks.put(None)
        thread.join(timeout)
        return not thread.is_alive()


_Task = tuple[Future[Any], Callable[[], Any], bool]


class _Work:
    def __init__(self) -> None:
        self.tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self.broken: BaseException | None = None


def _device() -> int | None:
    """The CUDA device that this thread uses: a new thread would use the first one, and take memory there."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _run(work: _Work, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    while (task := work.tasks.get()) is not None:
        future, function, always = task
        del task
        try:
            if work.broken is not None and not always:
                raise work.broken
            future.set_result(function())
        except BaseException as error:  # reaches the main thread, whatever it is
            work.broken = error
            future.set_exception(error)
        del future, function  # or the last batch would live until the next task
