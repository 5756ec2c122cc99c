"""Can kernels of NCCL that wait for other ranks fill a GPU, so that the one they wait for never starts?

A kernel of NCCL keeps its CTAs (blocks of threads) on the device until all ranks of its communicator have started
theirs. Where several communicators are in use, each rank's host enqueues their kernels in one order (docs/step.md);
but streams are free to start a later kernel first, and kernels that fill the device while they wait would stop an
earlier one for ever. NCCL_LAUNCH_ORDER_IMPLICIT=1, which the strategy sets, excludes it.

Here every rank of a layout runs a step of a small model alone, on torch's fake process group, and its communications
are written down at torch's dispatcher with the streams and events that order them. These traces are replayed on devices
with 132 places for CTAs (H100), in which whatever may start does start, the latest first or in a random order, and one
rank runs far ahead of the next.

  groups     most communicators that one rank uses in a step
  kernels    of communication, most of one rank
  counted    CTAs of a collective with which all communicators of a rank fit on the device at a time, beside a kernel
             that computes; messages have the strategy's own number
  replayed   the largest number tried with which no replay hung
  in order   the largest number tried with which none hung when kernels start in the order of the host
  swapped    the same, in order, when one rank exchanges two collectives: the control, which has to hang
"""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import FakeWork, Work

from benchmarks.common import Options, option, program, report
from benchmarks.operations import Operation, Operations
from hetero_strategy.boundary import transport
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import MESSAGE_CTAS
from hetero_strategy.testing import Setting, one_rank

PLACES = 132
"""Streaming multiprocessors of an H100, each of which takes one CTA of NCCL's."""
TRIED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of CTAs of a collective; NCCL takes at most 64, by default up to 32."""

Meeting = tuple[Any, ...]
"""One collective of a group, or one message; the same on all ranks that take part."""


class Kernel(NamedTuple):
    """One kernel of one rank; numbers are places in the order of the rank's host."""

    after: frozenset[int]
    """Kernels that end before it starts."""
    communicator: str
    """Name of its communicator; empty for a kernel that computes."""
    is_message: bool
    meets: tuple[Meeting, ...]
    """It ends when all ranks have started what takes part in these."""


@dataclass(eq=False)
class _Stream:
    """Stands in for a stream: what is enqueued on it next comes after these kernels."""

    after: frozenset[int] = frozenset()
    dirty: bool = False
    """Whether something was computed since the last kernel."""


class Trace(Operations):
    """Writes down the kernels of one rank as NCCL and FSDP would enqueue them on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._streams: dict[int, _Stream] = {}
        self._kept: list[Any] = []
        """What is told apart by its address lives as long as this."""
        self._communicators: dict[str, _Stream] = {}
        self._numbers: Counter[Meeting] = Counter()
        self._of: dict[int, int] = {}
        """By :func:`_name` of what a caller waits for."""
        self._batch: list[tuple[Operation, Work]] | None = None

    def stream(self, which: Any = None) -> _Stream:
        which = torch.cpu.current_stream() if which is None else which
        if id(which) not in self._streams:
            self._kept.append(which)
            self._streams[id(which)] = _Stream()
        return self._streams[id(which)]

    def event(self, stream: _Stream) -> frozenset[int]:
        """All that is enqueued on a stream so far."""
        if stream.dirty:
            stream.dirty = False
            self._enqueue(stream, Kernel(stream.after, "", False, ()))
        return stream.after

    def computed(self) -> None:
        self.stream().dirty = True

    def started(self, operation: Operation, work: Work | torch.Tensor) -> None:
        self._kept.append(work)
        if operation.is_message:
            assert self._batch is not None and isinstance(work, Work), "a message outside of a batch"
            self._batch.append((operation, work))
            return
        meeting = (operation.group, "all", len(operation.ranks), self._numbers[operation.group, "all"])
        self._numbers[operation.group, "all"] += 1
        self._of[_name(work)] = self._communicate(operation.group, False, (meeting,), beside=operation.beside)

    def waited(self, work: Work | torch.Tensor) -> None:
        """The current stream waits for a communication."""
        if (kernel := self._of.get(_name(work))) is not None:
            stream = self.stream()
            self.event(stream)
            stream.after |= {kernel}

    def batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Messages that start together are one kernel."""

        def started(wire: transport.Wire, messages: Sequence[transport.WireMessage]) -> Any:
            self._batch = []
            works = original(wire, messages)
            batch, self._batch = self._batch, None
            me, meets = dist.get_rank(), []
            for operation, _ in batch:
                way = (me, operation.peer) if operation.name == "send" else (operation.peer, me)
                place = (operation.group, operation.tag, *way)
                meets.append((*place, 2, self._numbers[place]))
                self._numbers[place] += 1
            one = batch[0][0]
            kernel = self._communicate(f"{one.group} {one.tag}", True, tuple(meets), beside=True)
            self._of |= {_name(work): kernel for _, work in batch}
            return works

        return started

    def _communicate(self, communicator: str, is_message: bool, meets: tuple[Meeting, ...], *, beside: bool) -> int:
        own, current = self._communicators.setdefault(communicator, _Stream()), self.stream()
        kernel = Kernel(own.after | self.event(current), communicator, is_message, meets)
        number = self._enqueue(own, kernel)  # one after another on their communicator
        if not beside:
            current.after = frozenset({number})
        return number

    def _enqueue(self, stream: _Stream, kernel: Kernel) -> int:
        self.kernels.append(kernel)
        stream.after = frozenset({len(self.kernels) - 1})
        return len(self.kernels) - 1


def _name(work: Work | torch.Tensor) -> int:
    """Tell works apart, and tensors by their memory: DTensor wraps them."""
    return id(work) if isinstance(work, Work) else work.untyped_storage()._cdata


@contextmanager
def traced() -> Iterator[Trace]:
    """Write down what this rank communicates, with torch's streams on the CPU as those of a device."""
    trace = Trace()

    def record(stream: Any) -> frozenset[int]:
        return trace.event(trace.stream(stream))

    def wait_event(stream: Any, event: frozenset[int] | None) -> None:
        own = trace.stream(stream)
        trace.event(own)
        own.after |= event or frozenset()

    def waiting(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Work | torch.Tensor, *limit: Any) -> Any:
            trace.waited(work)
            return original(work, *limit)

        return wait

    class Event:
        """A CUDA event's stand-in: what was on a stream when it was recorded."""

        after: frozenset[int] = frozenset()

        def record(self, stream: Any = None) -> None:
            self.after = record(stream)

        def wait(self, stream: Any = None) -> None:
            wait_event(stream, self.after)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    with ExitStack() as stack:
        for owner, name, other in (
            (torch.cpu.Stream, "record_event", record),
            (torch.cpu.Stream, "wait_event", lambda s, e: wait_event(s, getattr(e, "after", e))),
            (torch.cpu.Stream, "wait_stream", lambda s, other: wait_event(s, record(other))),
            (torch.cpu, "Event", Event),
            (transport, "start_messages", trace.batch(transport.start_messages)),
            (Work, "wait", waiting(Work.wait)),
            (FakeWork, "wait", waiting(FakeWork.wait)),
            (functional, "wait_tensor", waiting(functional.wait_tensor)),
        ):
            stack.enter_context(patch.object(owner, name, other))
        stack.enter_context(trace)
        yield trace


def trace_of(setting: Setting, rank: int) -> list[Kernel]:
    """Kernels of one rank in one step of training."""
    with one_rank(setting, rank) as (executor, batch), traced() as trace:
        executor.run(batch, train=True)
    return trace.kernels


class _Device:
    """One rank's device in a replay, which starts the first of the kernels that may start, sorted by ``key``."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        places: int,
        ctas: Callable[[Kernel], int],
        key: Callable[[int], float],
        in_order: bool,
    ) -> None:
        self.kernels, self.free, self._key, self.in_order = kernels, places, key, in_order
        self.needs = [ctas(kernel) for kernel in kernels]
        self._missing = [len(kernel.after) for kernel in kernels]
        self._followers: list[list[int]] = [[] for _ in kernels]
        for number, kernel in enumerate(kernels):
            for before in kernel.after:
                self._followers[before].append(number)
        self._ready = [(key(number), number) for number, missing in enumerate(self._missing) if not missing]
        heapq.heapify(self._ready)
        self._turns = deque(number for number, kernel in enumerate(kernels) if kernel.communicator)
        self.open = set(range(len(kernels)))
        """Kernels that have not started."""

    def start(self) -> int | None:
        """Start a kernel; in order, one of communication only after all that come before it."""
        passed, found = [], None
        while self._ready and found is None:
            place = heapq.heappop(self._ready)
            number = place[1]
            early = self.in_order and self.kernels[number].communicator and number != self._turns[0]
            if early or self.needs[number] > self.free:
                passed.append(place)
            else:
                found = number
        for one in passed:
            heapq.heappush(self._ready, one)
        if found is not None:
            self.free -= self.needs[found]
            self.open.remove(found)
            if self.in_order and self.kernels[found].communicator:
                self._turns.popleft()
        return found

    def end(self, number: int) -> None:
        """A kernel that started has ended."""
        self.free += self.needs[number]
        for follower in self._followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                heapq.heappush(self._ready, (self._key(follower), follower))


def hangs(
    traces: Mapping[int, Sequence[Kernel]],
    ctas: Callable[[Kernel], int],
    *,
    in_order: bool,
    seed: int,
    places: int = PLACES,
) -> str:
    """Replay one step on all ranks; return what hangs, or nothing.

    Args:
        traces: kernels of every rank.
        ctas: says how many places a kernel needs.
        in_order: kernels of communication start in the order of the host, as with NCCL_LAUNCH_ORDER_IMPLICIT=1.
        seed: seed of the order in which ranks run ahead; with an odd one kernels start in a random order, too.
        places: on each device.
    """
    generator = random.Random(seed)
    key: Callable[[int], float] = (lambda number: generator.random()) if seed % 2 else (lambda number: -number)
    devices = {rank: _Device(kernels, places, ctas, key, in_order) for rank, kernels in traces.items()}
    came: dict[Meeting, list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    waiting = dict.fromkeys(sorted(devices))
    while waiting:
        rank = generator.choice(list(waiting))
        del waiting[rank]
        device = devices[rank]
        while (number := device.start()) is not None:
            kernel = device.kernels[number]
            if not kernel.communicator:
                device.end(number)
                continue
            missing[rank, number] = len(kernel.meets)
            for meeting in kernel.meets:
                here = came.setdefault(meeting, [])
                here.append((rank, number))
                for one, other in here if len(here) == meeting[-2] else ():
                    missing[one, other] -= 1
                    if not missing[one, other]:
                        devices[one].end(other)
                        waiting[one] = None
    hanging = {rank: min(device.open) for rank, device in devices.items() if device.open}
    if not hanging:
        return ""
    rank, number = min(hanging.items())
    return f"{len(hanging)} ranks hang, rank {rank} at kernel {number} of {len(devices[rank].kernels)}"


def counted(kernels: Sequence[Kernel], messages: int) -> int:
    """CTAs of a collective with which all communicators of a rank fit at a time, beside a kernel that computes."""
    groups = {(k.communicator, k.is_message) for k in kernels if k.communicator}
    of_messages = sum(is_message for _, is_message in groups)
    return (PLACES - 1 - messages * of_messages) // max(1, len(groups) - of_messages)


def most(traces: Mapping[int, Sequence[Kernel]], messages: int, rounds: int, *, in_order: bool) -> int:
    """Return the largest number of CTAs tried, up to the first that hangs, with which no replay did."""
    found = 0
    for number in TRIED:

        def ctas(kernel: Kernel, number: int = number) -> int:
            return 1 if not kernel.communicator else messages if kernel.is_message else number

        if any(hangs(traces, ctas, in_order=in_order, seed=seed) for seed in range(rounds)):
            break
        found = number
    return found


def swapped(traces: Mapping[int, Sequence[Kernel]]) -> dict[int, Sequence[Kernel]]:
    """Let one rank exchange two collectives that follow each other and that another rank takes part in, too."""
    present: dict[Meeting, set[int]] = {}
    for rank, kernels in traces.items():
        for meeting in (meeting for kernel in kernels for meeting in kernel.meets):
            present.setdefault(meeting, set()).add(rank)
    for rank, kernels in traces.items():
        collectives = [n for n, k in enumerate(kernels) if k.communicator and not k.is_message]
        for one, other in pairwise(collectives):
            first, second = kernels[one], kernels[other]
            both = present[first.meets[0]] & present[second.meets[0]]
            if first.communicator != second.communicator and one not in second.after and len(both) > 1:
                changed = list(kernels)
                changed[one] = second._replace(after=first.after)
                changed[other] = first._replace(after=second.after)
                return {**traces, rank: changed}
    raise ValueError("no rank has two such collectives")


def layouts(ranks: int) -> dict[str, dict[str, ModuleLayout]]:
    """README's layout repeated over so many ranks, and others of the same size."""
    half, quarter = ranks // 2, ranks // 4
    all_, shard = range(ranks), min(8, ranks)
    return {
        "README": {
            "vision": ModuleLayout(range(half), dp_shard=min(8, half), dp_replicate=max(1, half // 8)),
            "audio": ModuleLayout(range(half, half + quarter), dp_shard=quarter),
            "llm": ModuleLayout(all_, tp=2, pp=2, dp_shard=quarter),
        },
        "colocated": {
            "vision": ModuleLayout(all_, dp_shard=ranks),
            "audio": ModuleLayout(all_, dp_shard=shard, dp_replicate=ranks // shard),
            "llm": ModuleLayout(all_, tp=2, dp_shard=half),
        },
        "pipeline, tp, cp": {
            "vision": ModuleLayout(all_, dp_shard=ranks),
            "llm": ModuleLayout(all_, pp=2, tp=2, cp=2, dp_shard=ranks // 8),
        },
        "disjoint": {
            "vision": ModuleLayout(range(quarter), dp_shard=quarter),
            "audio": ModuleLayout(range(quarter, half), dp_shard=quarter),
            "llm": ModuleLayout(range(half, ranks), pp=2, dp_shard=quarter),
        },
        "pipeline, experts in balance": {
            "vision": ModuleLayout(all_, dp_shard=ranks),
            "llm": ModuleLayout(all_, pp=2, dp_shard=half),
        },
    }


def setting_of(name: str, placed: Mapping[str, ModuleLayout], ranks: int) -> Setting:
    """A model as small as it can be: what is measured does not depend on its size."""
    return Setting(
        name, placed, vision=(64, 2), audio=(64, 2), llm=(128, 4), samples=2 * ranks, microbatches=4, cells=(1, 2),
        clip=(2, 6), text=(8, 16), **({"experts": 4, "balance_loss": 0.1} if "experts" in name else {}),
    )  # fmt: skip


@program(
    option("--ranks", type=int, nargs="+", default=[8, 64], help="worlds (default 8 64)"),
    option("--layouts", nargs="+", metavar="NAME", help="some of the layouts (default: all)"),
    option("--rounds", type=int, default=20, help="replays in random orders (default 20)"),
    option("--workers", type=int, default=os.cpu_count(), help="processes that trace (default: the cores)"),
    option("--messages", type=int, default=MESSAGE_CTAS, help="CTAs of a message (default: as set)"),
)
def main(given: Options) -> Any:
    """Run, print, write; return the figures."""
    found = []
    chosen = [(n, name) for n in given.ranks for name in layouts(n) if not given.layouts or name in given.layouts]
    with ProcessPoolExecutor(given.workers, get_context("forkserver")) as pool:
        for ranks, name in chosen:
            settings = [setting_of(name, layouts(ranks)[name], ranks)] * ranks
            traces = dict(enumerate(pool.map(trace_of, settings, range(ranks))))
            groups = [{k.communicator for k in kernels if k.communicator} for kernels in traces.values()]
            kernels = [sum(bool(k.communicator) for k in own) for own in traces.values()]
            control = most(swapped(traces), given.messages, 1, in_order=True)
            found.append({
                "layout": name, "ranks": ranks, "groups": max(map(len, groups)), "kernels": max(kernels),
                "counted": min(counted(own, given.messages) for own in traces.values()),
                "replayed": most(traces, given.messages, given.rounds, in_order=False),
                "in order": most(traces, given.messages, given.rounds, in_order=True), "swapped": control,
            })  # fmt: skip
    names = ("layout", "ranks", "groups", "kernels", "counted", "replayed", "in order", "swapped")
    title = f"CTAs of a collective that are safe on {PLACES} places, messages with {given.messages}"
    report(title, names, [tuple(one[name] for name in names) for one in found])
    return {"layouts": found}


if __name__ == "__main__":
    main()
