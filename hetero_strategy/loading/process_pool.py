"""Worker processes on this machine that make the steps of a data set.

Not torch's DataLoader: that raises the death of a worker in the main thread wherever it is, in the middle of a
backward too, names no step, and cannot go on. Here every worker has a socket of its own, so one that is killed in the
middle of a message spoils nobody else's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing as multiprocessing

from hetero_strategy.loading.transport import padded, unpack
from hetero_strategy.loading.worker_pool import Place, Steps, WorkerDied, attempt

CHECK = 5.0
"""Seconds between looks at whether the other side is still there, where its socket does not say so."""

HINTS = {
    "SIGKILL": " (out of memory, most likely)",
    "SIGBUS": " (out of memory, most likely, or a file was cut while it was read)",
    "SIGSEGV": " (a decoder crashed, most likely on a damaged file)",
}
"""Signal -> why."""


class ProcessPool:
    """A :class:`~hetero_strategy.loading.worker_pool.WorkerPool` of processes on this machine."""

    def __init__(self, steps: Steps, size: int) -> None:
        self.size, self.kind = size, "loader worker"
        self._steps = steps
        self._workers: list[_Worker] = []
        # multiprocessing runs this before it sends its daemons SIGTERM, which these ignore, and waits for them.
        self._end = Finalize(self, _kill, (self._workers, os.getpid()), exitpriority=0)
        for _ in range(size):
            self._workers.append(_Worker(steps))

    def submit(self, worker: int, place: Place) -> None:
        self._workers[worker].submit(place)

    def result(self, worker: int) -> Any:
        return self._workers[worker].receive()

    def replace(self, worker: int) -> None:
        _kill(self._workers[worker : worker + 1], os.getpid())
        self._workers[worker] = _Worker(self._steps)

    def close(self) -> None:
        self._end()

    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid or 0 for worker in self._workers]


class _Worker:
    """One process, and the blocks of memory that it shares with this one.

    A block is written again when nobody holds a tensor in it any more: to make a block, to map it and to give it back
    takes tens of milliseconds for some hundred megabytes.
    """

    def __init__(self, steps: Steps) -> None:
        context = multiprocessing.get_context()
        self.pipe, theirs = context.Pipe()
        self._free: deque[int] = deque()
        self._files: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        # A daemon: it has no children.
        self.process: BaseProcess = context.Process(
            target=_work, args=(theirs, self.pipe, os.getpid(), steps), daemon=True
        )
        self.process.start()
        theirs.close()

    def submit(self, place: Place) -> None:
        block = self._free.popleft() if self._free else None
        with contextlib.suppress(OSError):
            self.pipe.send((place, block))

    def receive(self) -> Any:
        """The next step; WorkerDied where there is none to come."""
        try:
            while self.pipe not in (ready := wait([self.pipe, self.process.sentinel], CHECK)):
                # What it sent before it died is still to be had.
                if (ready or not self.process.is_alive()) and not self.pipe.poll():
                    raise EOFError
            answer: _Answer = self.pipe.recv()
            if answer.new:
                self._files[answer.block] = recv_handle(self.pipe)
        except (EOFError, ConnectionError):
            raise WorkerDied(self._obituary()) from None
        if answer.error is not None:
            self._free.extend([] if answer.block < 0 else [answer.block])
            raise answer.error
        return unpack(answer.head, self._block(answer.block, sum(map(padded, answer.sizes))), answer.sizes)

    def _block(self, number: int, size: int) -> np.ndarray:
        """Memory that goes back to the worker with its last view."""
        if size > len(self._maps.get(number, b"")):
            self._maps[number] = mmap.mmap(self._files[number], size)
        # An empty mapping is not allowed, and an empty answer has no views.
        block = np.frombuffer(self._maps[number], np.uint8, size) if size else np.zeros(0, np.uint8)
        weakref.finalize(block, self._free.append, number).atexit = False
        return block

    def forget(self) -> None:
        """Close what belongs to this side."""
        self.pipe.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _obituary(self) -> str:
        self.process.join(CHECK)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{HINTS.get(name, '')}"


def _kill(workers: Sequence[_Worker], parent: int) -> None:
    """They only read: nothing is lost, and nothing is waited for."""
    if os.getpid() != parent:  # a copy of the parent, forked later: these are not its workers
        return
    for worker in workers:
        worker.process.kill()
        worker.forget()
    for worker in workers:
        worker.process.join(CHECK)


def _work(pipe: Connection, other: Connection, parent: int, steps: Steps) -> None:
    """One worker, until the socket or the process at its other end is gone."""
    import torch

    starter = multiprocessing.parent_process()  # not os.getppid(): under forkserver that is the server
    other.close()  # or this process would itself keep the other end open
    torch.set_num_threads(1)
    # Ctrl-C and an end that all processes of a job are told of are for the main process, which ends this one: until it
    # has made its last step it needs this one.
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)
    blocks: list[Any] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not pipe.poll(CHECK):
                if starter is None or not starter.is_alive():
                    return
            place, block = pipe.recv()
            made = attempt(steps, place)
            if isinstance(made, Exception):
                pipe.send(_Answer(error=made, block=-1 if block is None else block))
                continue
            head, buffers = made
            new = block is None
            if new:
                block = len(blocks)
                blocks.append(_memory())
            _write(blocks[block], buffers)
            pipe.send(_Answer(head, [buffer.nbytes for buffer in buffers], block, new))
            if new:
                send_handle(pipe, blocks[block].fileno(), parent)
            del made, head, buffers


class _Answer(NamedTuple):
    """What a worker says of a step."""

    head: bytes = b""
    sizes: Sequence[int] = ()
    block: int = -1
    """Number of the block it lies in, or that was to be used; -1: none."""
    new: bool = False
    """The block's descriptor follows."""
    error: Exception | None = None


def _write(file: Any, buffers: Iterable[memoryview]) -> None:
    file.seek(0)
    for buffer in buffers:
        file.write(buffer)
        file.write(bytes(padded(buffer.nbytes) - buffer.nbytes))
    file.flush()


def _memory() -> Any:
    """A file in memory without a name: nothing is left behind by whoever is killed, and /dev/shm may be small."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("step"), "wb")
    return tempfile.TemporaryFile()
