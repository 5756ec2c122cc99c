"""Modules on a stream of their own: what crosses to another stream is waited for, as far as that can be seen without a
GPU. Streams here are a record of what comes before what; kernels run at once, as always on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from hetero_strategy.boundary.transport import Transport
from hetero_strategy.model.inputs import ModuleInputs
from hetero_strategy.runtime import executor as running
from hetero_strategy.runtime.payload import Moving, Payload
from hetero_strategy.runtime.side_stream import SideStream
from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.harness import Pool
from tests.distributed.stepping import Run, Setting, data, steps_on_rank


@dataclass(eq=False)
class Stream:
    """Counts what is put on it, and knows how much of every other stream comes before that."""

    before: dict[int, int] = field(default_factory=dict)

    def record_event(self) -> dict[int, int]:
        self.before[id(self)] = self.before.get(id(self), 0) + 1
        return dict(self.before)

    def wait_event(self, event: dict[int, int]) -> None:
        for stream, count in event.items():
            self.before[stream] = max(count, self.before.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Watch:
    """Stands in for torch's streams, and looks at every row that is taken."""

    def __init__(self) -> None:
        self.stack = [Stream()]
        self.given: dict[tuple[int, int], tuple[Stream, dict[int, int]]] = {}
        self.arriving: dict[tuple[int, int], Stream] = {}
        self.copied: dict[int, Stream] = {}
        self.crossed = self.unordered = self.kept = self.astray = self.own = self.sent = 0

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        self.stack.append(stream or self.stack[-1])
        yield
        self.stack.pop()

    def give(self, original: Any) -> Any:
        def give(transport: Transport, number: int, rows: torch.Tensor) -> None:
            original(transport, number, rows)
            if number in transport._given:
                self.given[id(transport), number] = self.stack[-1], dict(self.stack[-1].before)

        return give

    def take(self, original: Any) -> Any:
        def take(transport: Transport, number: int, *rest: Any) -> torch.Tensor:
            found: torch.Tensor = original(transport, number, *rest)
            if (memory := self.arriving.get((id(transport), number))) is not None and number not in transport._crosses:
                self.placed(memory)
            stream, event = self.given.get((id(transport), number), (self.stack[-1], {}))
            if stream is not self.stack[-1]:
                here = self.stack[-1].before
                self.crossed += 1
                self.unordered += any(here.get(other, 0) < count for other, count in event.items())
            return found

        return take

    def post(self, original: Any) -> Any:
        """Where messages arrive that no other stream carries."""

        def start(transport: Transport, numbers: Any, *, first: bool) -> None:
            original(transport, numbers, first=first)
            for number in set(numbers) & {*transport._arriving, *transport._out} if first else ():
                self.arriving[id(transport), number] = self.stack[-1]

        return start

    def leave(self, original: Any) -> Any:
        """Rows that another stream carries away: it waits for them, and their memory is kept for it."""

        def leaving(transport: Transport, number: int, take: Any, carries: Stream | None) -> torch.Tensor:
            kept = self.kept
            found: torch.Tensor = original(transport, number, take, carries)
            if carries is not None:
                _, event = self.given[id(transport), number]
                self.sent += 1
                self.unordered += any(carries.before.get(other, 0) < count for other, count in event.items())
                self.astray += self.kept == kept
                self.kept = kept
            return found

        return leaving

    def placed(self, memory: Stream) -> None:
        """Memory of a stream is used on the current one."""
        self.own += 1
        self.astray += memory is not self.stack[-1]

    def start(self, inputs: ModuleInputs) -> Moving:
        self.copied[id(inputs)] = self.stack[-1]
        return Moving(inputs)

    def finish(self, moving: Moving) -> ModuleInputs:
        self.placed(self.copied[id(moving.inputs)])
        return moving.inputs

    def payload(self, inputs: Any, uses: Any, copies: Any, on: Any) -> Payload:
        """What modules take besides rows, copied by this one."""
        return Payload(inputs, uses, self, on)

    def record_stream(self, *_: Any) -> None:
        self.kept += 1


Counts = tuple[int, int, int, int, int, int]


def on_rank(rank: int, world: int, setting: Setting, wanted: Any) -> list[tuple[Run, Counts]]:
    """With streams that wait for each other, and with streams that do not."""
    return [watched(rank, world, setting, wanted, waits) for waits in (True, False)]


def watched(rank: int, world: int, setting: Setting, wanted: Any, waits: bool) -> tuple[Run, Counts]:
    watch = Watch()
    made = lambda device, graph, bubbles: SideStream(device, set(graph.filling))  # noqa: E731
    with (
        patch.multiple(
            torch.cuda, Stream=lambda *_, **__: Stream(), stream=watch.using, current_stream=lambda *_: watch.stack[-1]
        ),
        patch.object(torch.Tensor, "record_stream", watch.record_stream, create=True),
        patch.multiple(running, side_stream=made, Payload=watch.payload),
        patch.multiple(
            Transport,
            give=watch.give(Transport.give),
            take=watch.take(Transport.take),
            _start=watch.post(Transport._start),
            _leaving=watch.leave(Transport._leaving),
        ),
        patch.object(Stream, "wait_event", Stream.wait_event if waits else lambda *_: None),
    ):
        run = steps_on_rank(rank, world, setting, wanted, (4,), 0)
    return run, (watch.crossed, watch.unordered, watch.kept, watch.own, watch.astray, watch.sent)


def test_what_crosses_is_waited_for(pool: Pool, tmp_path: Any) -> None:
    layouts = {"vision": on(0, 1, 2, 3, tp=2), "audio": on(0, 1, 2, 3), "llm": on(0, 1, 2, 3, tp=2, pp=2)}
    folders, bubbles = {False: data(tmp_path / "data", draws=False)}, {"llm": 0.5}
    setting = setting_of(folders, layouts, "1f1b", fill="fine", tp_bubbles=bubbles)
    wanted = expected(setting)
    ranks = pool.run(setting.world, on_rank, setting, wanted, timeout=360)
    for waits, found in zip((True, False), zip(*ranks, strict=True), strict=True):
        compare(wanted, [run for run, _ in found])
        crossed, unordered, kept, own, astray, sent = map(sum, zip(*(counts for _, counts in found), strict=True))
        assert crossed and sent and kept >= crossed
        assert own and not astray  # memory of one stream, which nothing keeps for another, is used on that one
        assert unordered == (0 if waits else crossed + sent)  # the control: streams that wait for nothing
