"""Load batches of one epoch after another, ahead of need and resumable.

DistTrain's asynchronous loader (sections 5 and 7.3.2) decodes on CPU nodes while GPUs train. Here:

    workers (of torch's DataLoader, or Ray actors)  ->  a background thread, with collectives  ->  training
    up to workers.prefetch steps each                   up to workers.prefetch batches

Without workers and collectives there is no thread: a step is made when it is asked for.
Batches stay on the host; training brings what a microbatch needs to the device just before it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler, SequentialSampler

from hetero_strategy.data.manifest import most_skipped
from hetero_strategy.errors import CheckpointError, ConfigError, DataError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.process_pool import ProcessPool, WorkerDied
from hetero_strategy.loading.ray_pool import RayPool
from hetero_strategy.loading.steps import OnError, Place, StepDataset

log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that closing waits for a thread that may hang in a collective whose peer is gone."""


class StepLoader:
    """A loader of batches of one epoch after another, resumable in the middle of an epoch. A data module has checked
    its options.

    It has a torch ``DataLoader`` whose items are whole steps, but is none itself, so Lightning injects no distributed
    sampler and rebuilds nothing. Lightning calls ``sampler.set_epoch`` at the start of every epoch and saves
    :meth:`state_dict` with the fit loop. Iteration is lazy: the epoch and the position are read when the first batch is
    asked for, because Lightning calls ``iter`` before it sets the epoch. The process's random state is not touched.

    At most ``workers.count * workers.prefetch`` steps are made, and ``workers.prefetch`` batches finished, before they
    are asked for. A worker that dies ends the run with a :class:`DataError` when its next step is asked for.

    Args:
        steps: maker of the batch of (epoch, step), or of the object that ``finish`` turns into a batch. The loader sets
            its ``on_error``.
        workers: processes or actors that make steps. A thread takes steps from them, pins them and runs ``finish``;
            it makes ``workers.prefetch`` batches ahead.
        on_error: ``stop``: a file that cannot be read ends the run with a :class:`DataError`. ``skip``: samples with
            such a file count for nothing, on every rank.
        finish: function that makes a :class:`Batch` of what a worker has made, with collectives of ``group``; None:
            workers make batches.
        group: host group of all ranks, for the collectives of ``finish`` and of ``skip``, which run in the background;
            None: this process is the only one.
        background: thread for these collectives, shared by all loaders of a data module; loaders without collectives
            have a thread each.
        max_skipped: most samples skipped in one epoch; more end the run; default: 1% of the samples, at least 10.
    """

    def __init__(
        self,
        steps: StepDataset,
        *,
        workers: Workers = Workers(),  # noqa: B008  # frozen
        on_error: OnError = "stop",
        finish: Callable[[Any], Batch] | None = None,
        group: dist.ProcessGroup | None = None,
        background: Background | None = None,
        max_skipped: int | None = None,
    ) -> None:
        self.steps = steps
        steps.on_error = on_error
        self.epoch = 0
        self.consumed = 0
        """Steps of this epoch handed out, not counting those made ahead."""
        self.skipped = 0
        """Samples that counted for nothing, over all epochs."""
        self.waited = 0.0
        """Seconds that the consumer has waited for batches, over all epochs."""
        self.workers, self.on_error = workers, on_error
        self.max_skipped = most_skipped(max_skipped, len(steps.index))
        self._skipped_in_epoch = 0
        self._resume_at = 0
        self._changed = ""
        self._warned: set[str] = set()
        self._finish, self._group = finish, group
        if on_error == "skip" and group is None and _several():
            raise ConfigError(
                f"on_error='skip' in {dist.get_world_size()} processes without a group: every rank has to know which"
                " samples count for nothing"
            )
        pin = torch.cuda.is_initialized() if workers.pin_memory is None else workers.pin_memory
        self._pin = pin and torch.cuda.is_available()
        self._collective = group is not None and (finish is not None or on_error == "skip")
        shared = background if self._collective else None
        self._background = shared or (Background() if self._collective or workers.count else None)
        self._waiting: deque[Future[Batch]] = deque()
        """Batches that the thread makes or has made, in order."""
        self._pool: ProcessPool | RayPool | None = None
        self._pass = 0
        """Number of the pass that may make batches."""
        self.batch_sampler = None  # Lightning reads it wherever it finds a sampler
        self.sampler: Sampler[int] = _ShuffledEpochs(self) if steps.shuffle else _OrderedEpochs(self)

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, before: StepLoader | None) -> StepLoader:
        """Replace another loader, which is closed, and continue its counts; return this one."""
        if before is not None:
            before.close()
            self.skipped, self.waited = before.skipped, before.waited
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; the position restored by `load_state_dict` survives in its own epoch."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._resume_at = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        asked_at = time.perf_counter()
        first, self._resume_at = self._resume_at, 0
        if first and self._changed:
            raise CheckpointError(self._changed)
        self.consumed = first
        self._skipped_in_epoch = self._skipped_in_epoch if first else 0
        for number, batch in enumerate(self._batches(first), first + 1):
            self.consumed = number
            self._count(batch)
            self.waited += time.perf_counter() - asked_at
            yield batch
            asked_at = time.perf_counter()

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones.

        The wait for a thread that hangs in a collective whose peer is gone is limited to some seconds.
        """
        self._drop_waiting(GRACE)
        self._pass += 1
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, and all options that must stay the same for it to be valid."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "skipped": self.skipped,
            "skipped_in_epoch": self._skipped_in_epoch,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        If the data set or the order has changed, iterating in the middle of that epoch raises a
        :class:`CheckpointError`. The error waits until then, because a limit may have ended the epoch there.
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

    def _batches(self, first: int) -> Iterator[Batch]:
        """Begin a pass at a step of the epoch, and yield its batches."""
        self._drop_waiting()
        self._pass += 1
        places = [(self.epoch, step) for step in range(first, len(self))]
        if self._pool is None:
            make = ProcessPool if self.workers.engine == "local" else RayPool
            self._pool = make(self.steps, self.workers.count, self.workers.prefetch)
        try:
            steps = self._made(self._pool.run(places), places, self._pass)
        except WorkerDied as death:
            raise self._died(death, places[0]) from None
        if self._background is None:
            return map(self._finished, steps)
        return self._in_background(steps, len(places), self._pass, self._background)

    def _drop_waiting(self, seconds: float | None = None) -> None:
        """Wait for batches of a pass that was left early, which other ranks make, too, and forget them.

        A thread that hangs or has failed is left behind. If a collective was to follow, other ranks wait in it, and the
        failed thread stays, so that nothing follows as if all were well.
        """
        late = wait(self._waiting, seconds).not_done
        if late:
            log.warning("the loading thread does not end: it waits for a worker or another rank; it is left behind")
        failed = any(batch.exception() for batch in self._waiting if batch.done())
        if self._background and (late or not self._collective or (failed and not _several())):
            self._background.close()
        self._waiting.clear()

    def _check(self, this: int) -> None:
        if this != self._pass:
            raise RuntimeError("an iterator of this loader is used after the loader was closed or a later one began")

    def _made(self, results: Iterator[Any], places: Sequence[Place], this: int) -> Iterator[Any]:
        for place in places:
            self._check(this)  # a thread that was left behind goes on without harm
            try:
                result = next(results)
            except WorkerDied as death:
                raise self._died(death, place) from None
            yield result
            del result

    def _died(self, death: WorkerDied, place: Place) -> DataError:
        return DataError(
            f"{death} before step {place[1]} of epoch {place[0]} was there; use fewer workers (workers.count="
            f"{self.workers.count}) or a smaller workers.prefetch ({self.workers.prefetch}), and go on from the newest"
            " checkpoint: trainer.fit(..., ckpt_path=<folder>) or python -m recipes.train resume=<folder>"
        )

    def _in_background(self, made: Iterator[Any], count: int, this: int, background: Background) -> Iterator[Batch]:
        """Yield finished batches, of which the thread has made ``workers.prefetch`` more than were asked for."""
        submitted = 0
        for number in range(count):
            self._check(this)
            while submitted < min(count, number + 1 + self.workers.prefetch):
                self._waiting.append(background.submit(lambda: self._finished(next(made))))
                submitted += 1
            batch = self._waiting.popleft()
            if batch.exception():
                self._waiting.clear()
                background.close()  # its later tasks fail, too; the next pass has a new thread
            yield batch.result()
            del batch

    def _finished(self, made: Any) -> Batch:
        batch: Batch = made if self._finish is None else self._finish(made)
        if self.on_error == "skip":
            batch = agreed(batch, self._group)
        return batch.pin_memory() if self._pin else batch

    def _count(self, batch: Batch) -> None:
        """Count skipped samples: never silent, never many."""
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


def agreed(batch: Batch, group: dist.ProcessGroup | None) -> Batch:
    """Silence the samples that any rank of a host group could not read; None: this process is the only one.

    Every rank sees only a part of the payload, but a sample without its image has to lose its labels wherever they are,
    and its share of N (law 1) everywhere. The agreement is one all-reduce (max) of uint8 ``[S]``.
    """
    bad = torch.from_numpy(np.isin(batch.plan.samples, list(batch.failed)).astype(np.uint8))
    if group is not None:
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
    return batch.without(bad.numpy().astype(bool)) if bad.any() else batch


class Background:
    """A thread beside training, for one loader or for the collectives of all loaders of a data module.

    Tasks run in the order in which the main thread submits them. The main thread runs the same program on every rank,
    so collectives inside tasks run in the same order on all ranks: train and val loaders may interleave freely. After a
    failed task all later tasks fail, too, until it is closed: their collectives would meet other ones.

    The thread starts with the first task. It is a daemon: neither an idle thread nor one that waits for a dead peer
    keeps the interpreter alive.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] | None = None

    def __reduce__(self) -> tuple[type[Background], tuple[()]]:
        return Background, ()  # each spawned process that gets a data module has a thread of its own

    def submit(self, work: Callable[[], Batch]) -> Future[Batch]:
        """Run ``work()`` after all submitted tasks; asking for the result raises its exception."""
        if self._tasks is None:
            # The thread references its tasks only, so deleting the last reference to an instance ends it.
            self._tasks = SimpleQueue()
            # A new thread would use the first CUDA device, and take memory there.
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(target=_run, args=(self._tasks, device), name="loading", daemon=True).start()
            self._end = weakref.finalize(self, self._tasks.put, None)
        future: Future[Batch] = Future()
        self._tasks.put((future, work))
        return future

    def close(self) -> None:
        """End the thread after the submitted tasks; the next task starts another thread."""
        if self._tasks is not None:
            self._end()
            self._tasks = None


_Task = tuple[Future[Batch], Callable[[], Batch]]


def _run(tasks: SimpleQueue[_Task | None], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    broken: BaseException | None = None
    while (task := tasks.get()) is not None:
        future, work = task
        del task
        try:
            if broken is not None:
                raise broken
            future.set_result(work())
        except BaseException as error:  # reaches the main thread, whatever it is
            broken = error
            future.set_exception(error)
        del future, work  # or the last batch would live until the next task


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _ShuffledEpochs(Sampler[int]):
    """A sampler for Lightning to find in the loader: it passes the epoch on."""

    def __init__(self, loader: StepLoader) -> None:
        self._steps, self.set_epoch = range(len(loader)), loader.set_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


class _OrderedEpochs(SequentialSampler):
    """A sampler for a fixed order: Lightning recognises unshuffled data by this base class."""

    def __init__(self, loader: StepLoader) -> None:
        super().__init__(range(len(loader)))
        self.set_epoch = loader.set_epoch
