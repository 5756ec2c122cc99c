"""Batches of one epoch after another, ahead of need and resumable.

DistTrain's asynchronous loader (sections 5 and 7.3.2) decodes on CPU nodes while GPUs train. Here:

    workers (processes, or Ray actors)  ->  finish, in one background thread  ->  training
    up to prefetch_factor steps each        up to prefetch_factor batches

Batches stay on the host; training brings what a microbatch needs to the device just before it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler, SequentialSampler

from hetero_strategy.data.faults import most_skipped
from hetero_strategy.errors import CheckpointError, ConfigError, DataError
from hetero_strategy.loading.agree import Agree
from hetero_strategy.loading.ahead import GRACE, Ahead
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.item_reader import OnError
from hetero_strategy.loading.options import Engine
from hetero_strategy.loading.process_pool import ProcessPool
from hetero_strategy.loading.ray_pool import RayPool
from hetero_strategy.loading.steps import StepDataset
from hetero_strategy.loading.worker_pool import Place, PooledSteps, WorkerDied, WorkerPool

log = logging.getLogger(__name__)


class StepLoader:
    """Batches of one epoch after another, resumable in the middle of an epoch. A data module has checked its options.

    It is not a torch ``DataLoader``, so Lightning injects no distributed sampler and rebuilds nothing. Lightning calls
    ``sampler.set_epoch`` at the start of every epoch and saves :meth:`state_dict` with the fit loop. Iteration is lazy:
    the epoch and the place are read when the first batch is asked for, because Lightning calls ``iter`` before it sets
    the epoch. The process's random state is not touched.

    Never more than ``num_workers * prefetch_factor`` steps are made and ``prefetch_factor`` batches finished before
    they are asked for. Without ``finish``, CUDA and Ray there is no thread and nothing to finish; without workers
    besides, nothing is made ahead.

    Args:
        steps: makes the batch of (epoch, step), or what ``finish`` makes a batch of. Its ``on_error`` is set.
        num_workers: processes or actors that make steps; 0: this process.
        prefetch_factor: see above.
        pin_memory: batches in page-locked memory; only where there is CUDA.
        engine: ``local`` for processes on this machine, ``ray`` for actors on any machine of a Ray cluster; see
            :mod:`hetero_strategy.loading.ray_pool`.
        on_error: ``stop``: a file that cannot be read, or a worker that dies, ends the run with a :class:`DataError`.
            ``skip``: samples with such a file count for nothing, on every rank alike; a dead worker is replaced and
            the run goes on at the very step, unless the same step has killed two.
        finish: applied in order to what the workers made, in the background thread; the last one gives a
            :class:`Batch`. May hold collectives.
        background: the thread, shared by all loaders of a data module; default: one of the loader's own.
        max_skipped: with ``skip``, more samples in one epoch end the run; default: 1% of the samples, at least 10.

    Raises:
        ConfigError: ``skip`` in several processes without :class:`Agree` in ``finish``.
    """

    def __init__(
        self,
        steps: StepDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        engine: Engine = "local",
        on_error: OnError = "stop",
        finish: Sequence[Callable[[Any], Any]] = (),
        background: Ahead | None = None,
        max_skipped: int | None = None,
    ) -> None:
        self.steps = steps
        steps.on_error = on_error
        self.epoch = 0
        self.consumed = 0
        """Steps of this epoch handed out, not counting those made ahead."""
        self.skipped = 0
        """Samples that counted for nothing, over all epochs."""
        self.restarts = 0
        """Workers replaced."""
        self.waited = 0.0
        """Seconds that whoever iterates has waited for batches, over all epochs."""
        self.num_workers, self.prefetch_factor, self.engine, self.on_error = (
            num_workers, prefetch_factor, engine, on_error,
        )  # fmt: skip
        self.max_skipped = most_skipped(max_skipped, len(steps.index))
        self._skipped_in_epoch = 0
        self._resume_at = 0
        self._changed = ""
        self._warned: set[str] = set()
        self._deadly: Place | None = None
        self._left = Event()
        self._pool: WorkerPool | None = None
        self._line: PooledSteps | None = None
        self._finish = _with_agreement(finish) if on_error == "skip" else tuple(finish)
        self._pin = pin_memory and torch.cuda.is_available()
        self._own_background = background is None
        threaded = bool(self._finish) or self._pin or engine == "ray"
        self._background = (background or Ahead()) if threaded else None
        self.batch_sampler = None  # Lightning reads it wherever it finds a sampler
        self.sampler: Sampler[int] = _ShuffledEpochs(self) if steps.shuffle else _OrderedEpochs(self)

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, before: StepLoader | None) -> StepLoader:
        """Take the place of another one, which is closed, and go on counting where it was; return this one."""
        if before is not None:
            before.close()
            self.skipped, self.restarts, self.waited = before.skipped, before.restarts, before.waited
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the place restored by `load_state_dict` survives in its own epoch."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._resume_at = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        asked = time.perf_counter()
        first, self._resume_at = self._resume_at, 0
        if first and self._changed:
            raise CheckpointError(self._changed)
        self.consumed = first
        self._skipped_in_epoch = self._skipped_in_epoch if first else 0
        places: list[Place] = [(self.epoch, step) for step in range(first, len(self))]
        if self.steps.prefetch:
            places[1:] = [(*place, True) for place in places[1:]]
        line = self._workers()
        made = (self.steps[place] for place in places) if line is None else line.run(places)
        batches = made if self._background is None else self._handed(made, len(places), self._background)
        for number, batch in enumerate(batches, first + 1):
            self.consumed = number
            self._count(batch)
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones. Waits no longer than some seconds for a thread that
        hangs in a collective whose peer is gone.
        """
        background, stop = self._background, partial(self._stop, self._pool)
        if background is None or not background.alive:
            stop()
            return
        if wait([background.submit(stop, always=True)], GRACE).not_done:  # after an epoch that was left early
            log.warning("the loading thread does not end: it waits for another rank; it is left behind")
            self._left.set()  # should it ever go on, its pass is over, and no failure of other loaders
            self._left = Event()
            stop()
            background.forgive()
        if self._own_background:
            background.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, and what must not change for that to have a meaning."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "skipped": self.skipped,
            "skipped_in_epoch": self._skipped_in_epoch,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Where the data set or the order is another one, iterating in the middle of that epoch raises a
        :class:`CheckpointError`. Only then is it known that the epoch goes on: a limit may have ended it there.
        """
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        was, now = {"window": 1, **state}, self._identity()  # older runs had no windows
        changed = [f"{name} was {was[name]}, is {now[name]}" for name in now if was[name] != now[name]]
        self._changed = (
            f"cannot resume in the middle of epoch {epoch}, after {consumed} of {state['steps']} steps:"
            f" {'; '.join(changed)}; use the old values or a checkpoint from the end of an epoch"
            if changed and consumed < int(state["steps"])
            else ""
        )
        self.epoch, self.consumed, self._resume_at = epoch, consumed, consumed
        self.skipped = int(state.get("skipped", 0))
        self._skipped_in_epoch = int(state.get("skipped_in_epoch", 0))

    def _workers(self) -> PooledSteps | None:
        """Started by the caller's thread: a Ray ends with the thread that starts it."""
        if self.num_workers and self._line is None:
            make = ProcessPool if self.engine == "local" else RayPool
            self._pool = pool = make(self.steps, self.num_workers)
            self._line = PooledSteps(pool, self.prefetch_factor, partial(self._died, pool))
        return self._line

    def _handed(self, given: Iterator[Any], count: int, background: Ahead) -> Iterator[Batch]:
        """Finished batches of what is given, made in the background; errors at the step they belong to."""
        finish, pin, left = self._finish, self._pin, self._left  # tasks do not keep the loader alive
        failed = dropped = False

        def step() -> Batch | None:
            """Make the next batch; none where the pass is over by a failure."""
            nonlocal failed
            if failed or left.is_set():
                return None
            try:
                batch = next(given)
                for function in finish:
                    batch = function(batch)
                return batch.pin_memory() if pin else batch
            except BaseException:
                failed = True
                # Of several processes others wait for this one in a collective: nothing may follow as if all were well.
                if left.is_set() or (dropped and not _several()):
                    return None
                raise

        try:
            for future in _submitted(background, step, count, self.prefetch_factor):
                yield future.result()
        except Exception:
            background.forgive()
            raise
        finally:
            dropped = True  # the epoch was left early, or it failed; what is submitted runs, as it does on other ranks

    def _stop(self, pool: WorkerPool | None) -> None:
        """End a pool, and leave one alone that was started since."""
        if pool is self._pool:
            self._pool = self._line = None
        if pool is not None:
            pool.close()

    def _died(self, pool: WorkerPool, place: Place, worker: int, how: str) -> None:
        if pool is not self._pool:  # closed under a thread that was left behind
            raise WorkerDied(how)
        again = place == self._deadly
        text = f"{pool.kind} {worker} of {self.num_workers} {how} while it made step {place[1]} of epoch {place[0]}"
        if again or self.on_error == "stop":
            fix = "look at this step's files" if again else "on_error='skip' to replace workers that die"
            raise DataError(
                f"{text}{', as did the one before it' if again else ''}; use fewer workers (num_workers="
                f"{self.num_workers}) or a smaller prefetch_factor ({self.prefetch_factor}), or {fix}"
            )
        self._deadly, self.restarts = place, self.restarts + 1
        log.warning("%s; a new one goes on at that step", text)

    def _count(self, batch: Batch) -> None:
        """Skipped samples: never silent, never many."""
        for message in batch.failed.values():
            if message not in self._warned:
                self._warned.add(message)
                log.warning("skipped: %s", message)
        self.skipped += batch.skipped
        self._skipped_in_epoch += batch.skipped
        if self._skipped_in_epoch > self.max_skipped:
            last = next(iter(batch.failed.values()), "see the warnings of other ranks")
            raise DataError(
                f"{self._skipped_in_epoch} samples of epoch {self.epoch} could not be read, more than max_skipped="
                f"{self.max_skipped}; the last: {last}; mend the data or raise max_skipped"
            )

    def _identity(self) -> dict[str, Any]:
        steps = self.steps
        return {
            "steps": len(self),
            "samples": len(steps.index),
            "global_batch_size": steps.global_batch_size,
            "seed": steps.seed,
            "shuffle": steps.shuffle,
            "data": steps.index.content,
            "window": steps.window,
        }


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _submitted(background: Ahead, one: Callable[[], Batch | None], count: int, ahead: int) -> Iterator[Future[Any]]:
    """``count`` tasks in order; ``ahead`` more are submitted than were asked for."""
    waiting: deque[Future[Any]] = deque()
    for number in range(count):
        while len(waiting) <= min(ahead, count - number - 1):
            waiting.append(background.submit(one))
        yield waiting.popleft()


def _with_agreement(finish: Sequence[Callable[[Any], Any]]) -> tuple[Callable[[Any], Any], ...]:
    if any(isinstance(function, Agree) for function in finish):
        return tuple(finish)
    if _several():
        raise ConfigError(
            f"on_error='skip' in {dist.get_world_size()} processes without Agree(group) in finish: every rank has to"
            " know which samples count for nothing"
        )
    return (*finish, Agree(None))


class _ShuffledEpochs(Sampler[int]):
    """What Lightning finds as the loader's sampler: passes the epoch on."""

    def __init__(self, loader: StepLoader) -> None:
        self._steps, self.set_epoch = range(len(loader)), loader.set_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


class _OrderedEpochs(SequentialSampler):
    """The same for a fixed order: Lightning recognises unshuffled data by this base class."""

    def __init__(self, loader: StepLoader) -> None:
        super().__init__(range(len(loader)))
        self.set_epoch = loader.set_epoch
