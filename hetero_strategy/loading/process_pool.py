"""Worker processes on this machine that make the steps of a data set: those of a torch ``DataLoader``.

A worker writes a step to one block of memory, whose arrays and tensors are neither pickled nor copied by its reader.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hetero_strategy.errors import HeteroError
from hetero_strategy.loading.steps import Place, StepDataset

HINTS = {
    "SIGKILL": " (out of memory, most likely)",
    "SIGBUS": " (out of memory, most likely, or a file was cut while it was read)",
    "SIGSEGV": " (a decoder crashed, most likely on a damaged file)",
}
"""Signal -> likely reason."""
ALIGNMENT = 64
"""Bytes; enough for any number type and vector unit."""
PREFIX = 8
"""Bytes that hold the length of the pickle at the head of a block."""


class WorkerDied(Exception):
    """A worker died without an error; the message says how."""


class WorkerFailed(RuntimeError):
    """A fault of the program in a worker, with the worker's traceback."""


class ProcessPool:
    """The workers of one loader on this machine, which stay for all its passes.

    Args:
        steps: maker of a step; an item of the ``DataLoader`` is a whole step.
        size: number of processes; 0: this process makes steps when they are asked for.
        prefetch_factor: steps that each process makes ahead.
    """

    def __init__(self, steps: StepDataset, size: int, prefetch_factor: int) -> None:
        self._blocks = Blocks()
        self._places = _Places(self._blocks if size else None)
        self._loader: DataLoader[Any] = DataLoader(
            _Items(steps),
            batch_size=None,
            sampler=self._places,
            num_workers=size,
            prefetch_factor=prefetch_factor if size else None,
            persistent_workers=size > 0,
            worker_init_fn=_prepare_worker,
            generator=torch.Generator(),  # the process's own is not touched
        )
        self._end: Finalize | None = None
        self._workers: list[Any] = []
        self._iterator: Any = None

    def run(self, places: Sequence[Place]) -> Iterator[Any]:
        """Begin a pass and return its steps in order; those of a pass that was left early are dropped."""
        self._places.places = places
        with self._deaths():
            self._iterator = self._begun()
        return self._steps(self._iterator)

    def _steps(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._deaths():
                step = next(iterator, None)
            if step is None:
                return
            if self._workers:
                step = unpack(step)
            if isinstance(step, Exception):
                raise step
            yield step
            del step

    def close(self) -> None:
        """Kill the workers; a thread that waits for a step gets a :class:`WorkerDied`.

        torch's own shutdown follows with the end of its iterator: in its midst, such a thread would wait for ever.
        """
        if self._end is not None:
            self._end()
        self._blocks.close()

    def _begun(self) -> Any:
        if self._workers or not self._loader.num_workers:
            return iter(self._loader)
        # torch would raise a worker's death in the main thread at any point, even in the middle of a backward.
        handler = signal.getsignal(signal.SIGCHLD)
        iterator: Any = iter(self._loader)
        with contextlib.suppress(ValueError, TypeError):  # not the main thread, where torch sets no handler
            signal.signal(signal.SIGCHLD, handler)
        self._workers = iterator._workers
        # multiprocessing runs this before it sends its daemons SIGTERM, which these ignore, and waits for them.
        self._end = Finalize(self, _kill, (self._workers, iterator._workers_done_event._cond), exitpriority=0)
        return iterator

    @contextlib.contextmanager
    def _deaths(self) -> Iterator[None]:
        """Turn whatever torch raises where a worker died into one error that says how it died."""
        try:
            yield
        except (RuntimeError, OSError, EOFError):
            if not wait([worker.sentinel for worker in self._workers], 1.0 if self._workers else 0.0):
                raise
            number, worker = next((n, w) for n, w in enumerate(self._workers) if not w.is_alive())
            code = worker.exitcode
            name = signal.Signals(-code).name if code < 0 else ""
            how = f"was killed by {name}{HINTS.get(name, '')}" if name else f"exited with code {code}"
            raise WorkerDied(f"loader worker {number} of {len(self._workers)} {how}") from None


class _Places(Sampler[tuple[Place, str]]):
    """The steps of the pass that begins, each with the block that it is written to; "": it is made in this process."""

    def __init__(self, blocks: Blocks | None) -> None:
        self._blocks = blocks
        self.places: Sequence[Place] = ()

    def __iter__(self) -> Iterator[tuple[Place, str]]:
        for place in self.places:
            yield place, self._blocks.lend() if self._blocks else ""


class _Items(Dataset[Any]):
    """Whole steps, or the exceptions that they raise; workers write them to blocks."""

    def __init__(self, steps: StepDataset) -> None:
        self._steps = steps

    def __getitem__(self, place: tuple[Place, str]) -> Any:
        step, block = place
        return write(block, attempt(self._steps, step)) if block else self._steps[step]


def _prepare_worker(worker: int) -> None:
    """Let a worker end with its main process, and not before.

    Ctrl-C, and a signal to all processes of a job, are for the main process, which needs this worker until it has made
    its last step. torch looks whether the parent lives, but under forkserver that is the server.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_main, daemon=True).start()


def _end_with_main() -> None:
    main: Any = multiprocessing.parent_process()
    main.join()
    os._exit(1)


def _kill(workers: Sequence[Any], lock: Any) -> None:
    """Kill workers, none of which may hold the lock that torch's shutdown takes; they only read, so nothing is lost."""
    locked = lock.acquire(True, 1.0)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(5.0)
    if locked:
        lock.release()


def attempt(steps: Any, place: tuple[int, int]) -> Any:
    """Make the step of (epoch, step) in a worker; return an exception instead of raising it."""
    try:
        return steps[place]
    except HeteroError as error:
        return type(error)(*error.args)  # without the traceback: the message says all
    except Exception as error:
        return WorkerFailed(f"{type(error).__name__} in a loader worker: {error}\n{traceback.format_exc()}")


class Blocks:
    """Blocks of memory that a reader of steps owns and lends to the workers that write them.

    A block is lent again when no tensor in it is referenced any more: making, mapping and freeing a block takes about a
    millisecond a megabyte. Blocks are files in memory without a name, so a killed process leaves nothing behind, and
    ``/dev/shm``, which is small in many containers, is not needed.
    """

    def __init__(self) -> None:
        self._free: deque[str] = deque()
        self._paths: list[str] = []
        weakref.finalize(self, _forget, self._paths).atexit = False

    def lend(self) -> str:
        """Return the path under which a worker opens a block."""
        if self._free:
            return self._free.popleft()
        file: Any = _memory()
        path = f"/proc/{os.getpid()}/fd/{file.name}" if isinstance(file.name, int) else file.name
        _lent[path] = _Block(file, self._free)
        self._paths.append(path)
        return path

    def close(self) -> None:
        """Forget all blocks; those that tensors reference live on."""
        _forget(self._paths)


class WrittenBlock(NamedTuple):
    """A value that a worker has written to a block; unpickled by the block's owner it is the block, uint8 ``[n]``."""

    path: str
    size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, tuple(self)


def write(path: str, value: Any) -> WrittenBlock:
    """Pack a value into a lent block."""
    parts, size = _packed(value)
    with open(path, "r+b") as file:
        if file.seek(0, os.SEEK_END) < size:
            file.truncate(size)
        for start, part in parts:
            file.seek(start)
            file.write(part.data)
    return WrittenBlock(path, size)


@dataclass
class _Block:
    file: Any
    free: deque[str]
    """Paths of its owner's blocks in which there is no tensor."""
    mapped: Any = b""


_lent: dict[str, _Block] = {}
"""Path -> block of this process."""


def _forget(paths: list[str]) -> None:
    while paths:
        del _lent[paths.pop()]


def _memory() -> Any:
    return open(os.memfd_create("step"), "r+b") if hasattr(os, "memfd_create") else tempfile.NamedTemporaryFile()


def _read(path: str, size: int) -> torch.Tensor:
    block = _lent[path]
    if size > len(block.mapped):
        block.mapped = mmap.mmap(block.file.fileno(), 0)
    array = np.frombuffer(block.mapped, np.uint8, size)
    weakref.finalize(array, block.free.append, path).atexit = False
    return torch.from_numpy(array)


def pack(value: Any) -> np.ndarray:
    """Return a value as one block, uint8 ``[n]``: its pickle, then the bytes of every array and host tensor in it."""
    parts, size = _packed(value)
    block = np.zeros(size, np.uint8)
    for start, part in parts:
        block[start : start + len(part)] = part
    return block


def unpack(block: torch.Tensor) -> Any:
    """Invert `pack`, given a writable block, uint8 ``[n]``; arrays and tensors are views of it and keep it alive."""
    size = int(block[:PREFIX].view(torch.int64))
    return _Unpickler(BytesIO(block[PREFIX : PREFIX + size].numpy().tobytes()), block[_padded(PREFIX + size) :]).load()


def _packed(value: Any) -> tuple[list[tuple[int, np.ndarray]], int]:
    """Return (start, bytes) of each part of a block, and the size of the block."""
    stream = BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    head = np.frombuffer(stream.getvalue(), np.uint8)
    first = _padded(PREFIX + len(head))
    parts = [(first + start, raw) for _, raw, (start, *_) in pickler.parts.values()]
    return [(0, np.array([len(head)]).view(np.uint8)), (PREFIX, head), *parts], first + pickler.size


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """A pickler that leaves the bytes of arrays and of tensors on the host out of the pickle."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.parts: dict[int, tuple[Any, np.ndarray, tuple[Any, ...]]] = {}
        """(value, its bytes, its key) by id; the value is kept, so that no other one gets its id."""
        self.size = 0

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if id(value) not in self.parts:
            if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
                # Dimensions of one element may have any stride.
                flat = value.detach().contiguous().as_strided((value.numel(),), (1,))
                raw = flat.view(torch.uint8).numpy()
            elif type(value) is np.ndarray and not value.dtype.hasobject:
                raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            else:
                return None
            self.parts[id(value)] = value, raw, (self.size, len(raw), value.dtype, tuple(value.shape))
            self.size += _padded(len(raw))
        return self.parts[id(value)][2]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BytesIO, block: torch.Tensor) -> None:
        super().__init__(stream)
        self._block = block

    def persistent_load(self, key: tuple[Any, ...]) -> torch.Tensor | np.ndarray:
        start, size, dtype, shape = key
        part = self._block[start : start + size]
        if isinstance(dtype, torch.dtype):
            return part.view(dtype).reshape(shape)
        return part.numpy().view(dtype).reshape(shape)
