"""Training loops that take turns in one process, so that what disturbs the machine disturbs all of them alike.

Each contender runs in its own thread and asks its loader for the next batch; the loader lets it go on only when it is
its turn. A step is what happens between two requests: everything a loop does, hooks and logging included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Block:
    """One turn."""

    wall: float
    """Seconds per step."""
    cpu: float
    """Processor seconds of the process per step."""


class Contender:
    """A training loop that can be stopped at every batch.

    Args:
        name: shown.
        train: runs the loop over the loader it is given; it must take one batch per step, and end with the loader.
        batches: used round after round.
        steps: that the loop will take in all; the loader's length.
    """

    def __init__(self, name: str, train: Callable[[Any], None], batches: Sequence[Any], steps: int) -> None:
        self.name = name
        self.batches, self.steps = batches, steps
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Context in which the loop takes each of its next steps."""
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._quota = 0
        self._block: Block | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(train,), name=name, daemon=True)
        self._started = False

    def advance(self, steps: int) -> Block | None:
        """Let the loop take this many steps; None for the first call, which brings it to its first batch."""
        self._quota = steps
        if self._started:
            self._go.release()
        else:
            self._started = True
            self._thread.start()
        self._paused.acquire()
        if self._error is not None:
            raise RuntimeError(f"{self.name} failed") from self._error
        return self._block

    def finish(self) -> None:
        """Let it take its last step and end."""
        self.advance(1)
        self._thread.join()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        """Give batches as a loader does, and pause between turns."""
        self._pause(None)
        wall, cpu = time.perf_counter(), time.process_time()
        done = 0
        for step in range(self.steps):
            if done == self._quota:
                _synchronize()
                self._pause(Block((time.perf_counter() - wall) / done, (time.process_time() - cpu) / done))
                wall, cpu, done = time.perf_counter(), time.process_time(), 0
            with self.around():
                yield self.batches[step % len(self.batches)]
            done += 1

    def _pause(self, block: Block | None) -> None:
        self._block = block
        self._paused.release()
        self._go.acquire()

    def _run(self, train: Callable[[Any], None]) -> None:
        try:
            train(self)
        except BaseException as error:
            self._error = error
        self._paused.release()


def take_turns(contenders: Sequence[Contender], rounds: int, block: int, warmup: int) -> dict[str, list[Block]]:
    """Every contender's blocks, round by round, in a new random order each round.

    Args:
        contenders: made with ``steps = (warmup + rounds) * block + 1``.
        rounds: measured.
        block: steps of one turn.
        warmup: rounds before the first measured one.
    """
    order = np.random.default_rng(0)
    for contender in contenders:
        contender.advance(0)  # to its first batch, past its setup
    blocks: dict[str, list[Block]] = {c.name: [] for c in contenders}
    for number in range(warmup + rounds):
        for i in order.permutation(len(contenders)):
            taken = contenders[i].advance(block)
            if number >= warmup:
                assert taken is not None
                blocks[contenders[i].name].append(taken)
    for contender in contenders:
        contender.finish()
    return blocks


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
