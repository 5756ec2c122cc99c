"""Steps made by Ray actors on CPU nodes: ``engine="ray"``.

DistTrain's loader (section 5): producers on dedicated CPU nodes read and decode, the consumer in every training process
receives what is ready. Steps, order and handling of errors are those of worker processes on this machine.

On a cluster:

1. The index (``cache_folder``) and the media lie on a file system that all nodes mount under the same path, and the
   package is installed on all of them with the extra: ``pip install -e '.[ray]'``. An actor is sent the
   data set without its arrays, once, and maps the index itself.
2. One Ray cluster: ``ray start --head --port=6379`` on a CPU node, ``ray start --address=<head>:6379`` on the others.
   Machines that train join it too but offer no processor, so that no actor lands there:
   ``ray start --address=<head>:6379 --num-cpus=0``.
3. Training is started with ``RAY_ADDRESS=<head>:6379``, and with ``RAY_AUTH_MODE=token`` and the token if the
   cluster asks for one. Without an address a process that trains alone starts a Ray of its own.

Number of actors: every rank has ``workers.count`` actors of one processor each for training data and as many for
validation. A rank never waits if ``workers.count >= seconds to make its part of a step / seconds of a step``. Up to
``workers.count * workers.prefetch`` steps of a rank lie in Ray's object store, which is memory of the nodes.
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
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from hetero_strategy.errors import ConfigError, require
from hetero_strategy.loading.process_pool import WorkerDied, attempt, pack, unpack
from hetero_strategy.loading.steps import Place, StepDataset

PATIENCE = 120.0
"""Seconds that actors may take to start."""
LOADERS = 4
"""Sets of actors for which a local Ray has room: one per data split."""


class RayPool:
    """The Ray actors of one loader, which stay for all its passes; see
    :class:`hetero_strategy.loading.process_pool.ProcessPool`.

    Raises:
        ConfigError: Ray is not installed, has no address, or not all actors find a processor.
    """

    def __init__(self, steps: StepDataset, size: int, prefetch_factor: int) -> None:
        self._ahead = size * prefetch_factor
        self._ray = _ray()
        _connect(self._ray, size)
        # Each actor goes to the node with most room: one busy node would hold up all of them.
        remote = self._ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(_Actor)
        shared = self._ray.put(steps)
        self._actors = [remote.remote(shared) for _ in range(size)]
        self._end = weakref.finalize(self, _kill, self._ray, self._actors)
        self._wait()

    def run(self, places: Sequence[Place]) -> Iterator[Any]:
        """Yield the steps of a pass in order; step k is made by actor k mod size."""
        actors = cycle(self._actors)
        requests = (next(actors).make.remote(place) for place in places)
        waiting = deque(islice(requests, self._ahead))
        for number in range(len(places)):
            step = self._result(waiting.popleft(), number % len(self._actors))
            waiting.extend(islice(requests, 1))  # before the step is used: the actor works meanwhile
            if isinstance(step, Exception):
                raise step
            yield step
            del step

    def _result(self, asked: Any, actor: int) -> Any:
        errors = self._ray.exceptions
        deaths = (errors.RayActorError, errors.ObjectLostError, errors.RaySystemError)
        try:
            block = self._ray.get(asked)
        except (*deaths, errors.OutOfMemoryError, errors.LocalRayletDiedError) as error:
            raise WorkerDied(f"Ray actor {actor} of {len(self._actors)} died ({_line(error)})") from None
        return unpack(torch.from_numpy(np.array(block)))  # a copy, as the object store's memory is read-only

    def close(self) -> None:
        self._end()

    def pids(self) -> list[int]:
        """Return the process ids, each on its actor's machine."""
        return list(self._ray.get([actor.pid.remote() for actor in self._actors]))

    def _wait(self) -> None:
        """Wait for actors to start; actors without a processor would wait for ever."""
        errors = self._ray.exceptions
        greetings = [actor.pid.remote() for actor in self._actors]
        ready, missing = self._ray.wait(greetings, num_returns=len(greetings), timeout=PATIENCE)
        if missing:
            total, free = (
                what().get("CPU", 0) for what in (self._ray.cluster_resources, self._ray.available_resources)
            )
            self.close()
            raise ConfigError(
                f"only {len(ready)} of {len(greetings)} Ray actors have started within {PATIENCE:g} s: the cluster has"
                f" {total:g} processors, {free:g} of them free, and every rank takes workers.count={len(greetings)} for"
                " each of its loaders; use fewer workers or add CPU nodes"
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
    def __init__(self, steps: StepDataset) -> None:
        torch.set_num_threads(1)
        self._steps = steps

    def make(self, place: Place) -> np.ndarray:
        """Make one step, or the exception to raise instead, as a block."""
        return pack(attempt(self._steps, place))

    def pid(self) -> int:
        return os.getpid()


def _ray() -> Any:
    require("ray", "ray", "engine='ray'")
    import ray
    import ray.exceptions

    return ray


def _connect(ray: Any, actors: int) -> None:
    """Connect to the cluster of RAY_ADDRESS; a process that trains alone may start a Ray of its own.

    This runs in the main thread: a local Ray ends with the thread that starts it, and ends its processes with it.
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
        # As many as wanted: processors do not limit work that runs on this machine anyway.
        quiet |= {"num_cpus": max(os.cpu_count() or 1, LOADERS * actors), "include_dashboard": False}
        # Ray gives its processes the lowest priority (15), so an actor might not even start beside a busy trainer.
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
    """Keep the trainer's SIGTERM handler, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(error: BaseException) -> str:
    """Return the message of a Ray error without its pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line), "") if "creation task" in str(error) else ""
    return last or next(iter(lines), type(error).__name__)


def _kill(ray: Any, actors: list[Any]) -> None:
    if ray.is_initialized():
        for actor in actors:
            if actor is not None:
                ray.kill(actor)
