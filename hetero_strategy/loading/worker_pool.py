"""Workers that make the steps of a data set somewhere else, and their results in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from hetero_strategy.errors import HeteroError
from hetero_strategy.loading.transport import pack

Place = tuple[int, int] | tuple[int, int, bool]
"""(epoch, step), and True where it follows another step that may have computed rows for it."""


class Steps(Protocol):
    """A map-style data set over the steps of an epoch."""

    def __getitem__(self, place: Place, /) -> Any: ...


class WorkerDied(Exception):
    """A worker went without a word; the message says how."""


class WorkerFailed(RuntimeError):
    """A fault of the program in a worker, with the worker's traceback."""


class WorkerPool(Protocol):
    """Workers, each of which makes what it is given in the order given."""

    size: int
    """Number of workers."""
    kind: str
    """What a worker is called in messages."""

    def submit(self, worker: int, place: Place) -> None:
        """Let a worker make one more step. That it is dead, :meth:`result` finds out."""

    def result(self, worker: int) -> Any:
        """The worker's next step in the order submitted; waits for it.

        Raises:
            HeteroError: as raised by the data set.
            WorkerFailed: any other exception of the data set.
            WorkerDied: it will never come, nor anything else that was submitted to this worker.
        """

    def replace(self, worker: int) -> None:
        """A new worker, with nothing submitted, in the place of a dead one."""

    def close(self) -> None:
        """End all workers."""


class PooledSteps:
    """Steps made by a pool, handed out in order: step k of a pass by worker ``k mod size``.

    Args:
        each: most steps that a worker has been given and that are not yet handed out.
        on_death: told (step, worker, how it died); raises where the pass is not to go on.
    """

    def __init__(self, pool: WorkerPool, each: int, on_death: Callable[[Place, int, str], None]) -> None:
        self._pool, self._each, self._on_death = pool, each, on_death
        self._owed = [0] * pool.size
        """Steps that each worker has been given and has not handed over."""
        self._passes = 0

    def run(self, places: Sequence[Place]) -> Iterator[Any]:
        """One pass; ends one that was left early.

        A new worker in the place of a dead one gets what that one has not handed over: nothing is lost and nothing
        comes twice.
        """
        self._passes += 1
        this = self._passes
        self._clear()
        size, ahead = self._pool.size, self._pool.size * self._each
        given = taken = 0
        while taken < len(places):
            if this != self._passes:
                raise RuntimeError("an iterator of this loader is used after a later one has begun")
            given = self._give(places, given, taken + ahead)
            worker = taken % size
            try:
                made = self._take(worker)
            except WorkerDied as death:
                self._on_death(places[taken], worker, str(death))
                self._replace(worker)
                for number in range(taken, given, size):
                    self._submit(worker, places[number])
                continue
            taken += 1
            given = self._give(places, given, taken + ahead)  # now, not when the next one is asked for
            yield made
            del made

    def _give(self, places: Sequence[Place], given: int, upto: int) -> int:
        upto = min(upto, len(places))
        for number in range(given, upto):
            self._submit(number % self._pool.size, places[number])
        return max(given, upto)

    def _submit(self, worker: int, place: Place) -> None:
        self._owed[worker] += 1
        self._pool.submit(worker, place)

    def _take(self, worker: int) -> Any:
        self._owed[worker] -= 1
        return self._pool.result(worker)

    def _replace(self, worker: int) -> None:
        self._pool.replace(worker)
        self._owed[worker] = 0

    def _clear(self) -> None:
        """Take what is left of a pass that was left early."""
        for worker in range(self._pool.size):
            while self._owed[worker]:
                try:
                    self._take(worker)
                except WorkerDied:
                    self._replace(worker)
                except (HeteroError, WorkerFailed):  # of a step that nobody wants any more
                    continue


def attempt(steps: Steps, place: Place) -> tuple[bytes, list[memoryview]] | Exception:
    """One step, packed, or what is to be raised in its place."""
    try:
        return pack(steps[place])
    except HeteroError as error:
        return type(error)(*error.args)  # without the traceback: the message says all
    except Exception as error:
        return WorkerFailed(f"{type(error).__name__} in a loader worker: {error}\n{traceback.format_exc()}")
