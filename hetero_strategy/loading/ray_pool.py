"""Steps made by Ray actors on CPU nodes: ``engine="ray"``.

DistTrain's loader (section 5): producers on dedicated CPU nodes read and decode, the consumer in every training process
receives what is ready. Same steps, same order and same policy on errors as with worker processes on this machine.

On a cluster:

1. The index (``cache_folder``) and the media lie on a file system that all nodes mount under the same path, and the
   package is installed on all of them with the extra: ``pip install -e '.[ray]'``. An actor is sent the
   data set without its arrays, once, and maps the index itself.
2. One Ray cluster: ``ray start --head --port=6379`` on a CPU node, ``ray start --address=<head>:6379`` on the others.
   Machines that train join it too but offer no processor, so that no actor lands there:
   ``ray start --address=<head>:6379 --num-cpus=0``.
3. Training is started with ``RAY_ADDRESS=<head>:6379``, and with ``RAY_AUTH_MODE=token`` and the token where the
   cluster asks for one. Without an address a process that trains alone starts a Ray of its own.

How many: every rank has ``num_workers`` actors of one processor each for training data and as many for validation. A
rank waits for nothing where ``num_workers >= seconds to make its part of a step / seconds of a step``. Up to
``num_workers * prefetch_factor`` steps of a rank lie in Ray's object store, which is memory of the nodes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hetero_strategy.errors import ConfigError, require
from hetero_strategy.loading.transport import padded, unpack
from hetero_strategy.loading.worker_pool import Place, Steps, WorkerDied, attempt

PATIENCE = 120.0
"""Seconds that actors may take to start."""
LOADERS = 4
"""Sets of actors that a Ray of our own has room for: one per data split."""


class RayPool:
    """A :class:`hetero_strategy.loading.worker_pool.WorkerPool` of Ray actors.

    Raises:
        ConfigError: Ray is not installed, has no address, or not all actors find a processor.
    """

    def __init__(self, steps: Steps, size: int) -> None:
        self.size, self.kind = size, "Ray actor"
        self._ray = _ray()
        _connect(self._ray, size)
        # Each on the node with most room: one busy node would hold up all of them.
        self._remote = self._ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(_Actor)
        self._steps = self._ray.put(steps)
        self._actors: list[Any] = [None] * size
        self._asked: list[deque[Any]] = [deque() for _ in range(size)]
        self._end = weakref.finalize(self, _kill, self._ray, self._actors)
        for worker in range(size):
            self._start(worker)
        self._wait(range(size))

    def submit(self, worker: int, place: Place) -> None:
        self._asked[worker].append(self._actors[worker].make.remote(place))

    def result(self, worker: int) -> Any:
        """The next step of an actor."""
        errors = self._ray.exceptions
        deaths = (errors.RayActorError, errors.ObjectLostError, errors.RaySystemError)
        try:
            made = self._ray.get(self._asked[worker].popleft())
        except (*deaths, errors.OutOfMemoryError, errors.LocalRayletDiedError) as error:
            raise WorkerDied(f"died ({_line(error)})") from None
        if isinstance(made, Exception):
            raise made
        head, sizes, block = made
        # A copy, as the object store's memory is read-only; numpy lets other threads work meanwhile.
        return unpack(head, np.array(block), sizes)

    def replace(self, worker: int) -> None:
        _kill(self._ray, [self._actors[worker]])
        self._start(worker)
        self._wait([worker])

    def close(self) -> None:
        self._end()

    def pids(self) -> list[int]:
        """Process ids, each on its actor's machine."""
        return list(self._ray.get([actor.pid.remote() for actor in self._actors]))

    def _start(self, worker: int) -> None:
        self._actors[worker] = self._remote.remote(self._steps)
        self._asked[worker].clear()

    def _wait(self, workers: Sequence[int]) -> None:
        """Actors that find no processor would wait for ever."""
        errors = self._ray.exceptions
        greetings = [self._actors[worker].pid.remote() for worker in workers]
        ready, missing = self._ray.wait(greetings, num_returns=len(greetings), timeout=PATIENCE)
        if missing:
            total, free = (
                what().get("CPU", 0) for what in (self._ray.cluster_resources, self._ray.available_resources)
            )
            self.close()
            raise ConfigError(
                f"only {len(ready)} of {len(greetings)} Ray actors have started within {PATIENCE:g} s: the cluster has"
                f" {total:g} processors, {free:g} of them free, and every rank takes num_workers={self.size} for each"
                " of its loaders; use fewer workers or add CPU nodes"
            )
        try:
            self._ray.get(ready)
        except errors.RayError as error:
            self.close()
            raise ConfigError(
                f"a Ray actor could not start ({_line(error)}); index, media and this package have to be on all nodes,"
                " under the same paths"
            ) from None


class _Actor:
    def __init__(self, steps: Steps) -> None:
        import torch

        torch.set_num_threads(1)
        self._steps = steps

    def make(self, place: Place) -> Any:
        """One step: its head, and its buffers' sizes and block; or what is to be raised in its place."""
        answer = attempt(self._steps, place)
        if isinstance(answer, Exception):
            return answer
        head, buffers = answer
        sizes = [buffer.nbytes for buffer in buffers]
        block = np.zeros(sum(map(padded, sizes)), np.uint8)
        start = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            block[start : start + size] = np.frombuffer(buffer, np.uint8)
            start += padded(size)
        return head, sizes, block

    def pid(self) -> int:
        return os.getpid()


def _ray() -> Any:
    require("ray", "ray", "engine='ray'")
    import ray
    import ray.exceptions

    return ray


def _connect(ray: Any, actors: int) -> None:
    """To the cluster of RAY_ADDRESS; a process that trains alone may have a Ray of its own.

    In the main thread: a Ray ends with the thread that starts it, and ends its processes with it.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "engine='ray' in several processes needs the address of one Ray cluster for all of them: start it with"
            " `ray start --head --port=6379` and train with RAY_ADDRESS=<that machine>:6379; or use engine='local'"
        )
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        # As many as are wanted: what is on this machine anyway, processors do not limit.
        quiet |= {"num_cpus": max(os.cpu_count() or 1, LOADERS * actors), "include_dashboard": False}
        # Ray gives its processes the least priority (15), and beside a busy trainer an actor would not even start.
        os.environ.setdefault("RAY_worker_niceness", "0")
    with _own_signals():
        try:
            ray.init(address=address or "local", **quiet)
        except (ConnectionError, RuntimeError) as error:
            raise ConfigError(
                f"Ray at {address or 'this machine'} cannot be reached ({_line(error)}); look whether it runs, whether"
                " it has the same version, and whether it asks for a token (RAY_AUTH_MODE)"
            ) from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM; it belongs to the trainer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(error: BaseException) -> str:
    """What a Ray error says, without its pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line), "") if "creation task" in str(error) else ""
    return last or next(iter(lines), type(error).__name__)


def _kill(ray: Any, actors: list[Any]) -> None:
    if ray.is_initialized():
        for actor in actors:
            if actor is not None:
                ray.kill(actor)
