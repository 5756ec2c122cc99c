"""When each action of the last steps really ran on this rank."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action, Schedule
from hetero_strategy.schedule.compile import StepCompiler

STEPS = 8
"""Steps that are kept."""
LEAD = 4
"""Actions of a stream that its host may be ahead of the device."""
Mark = float | torch.cuda.Event


class Moment(Protocol):
    """A moment on the device for which the host can wait."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Lead:
    """Bounds how far the host is ahead of its device, by waiting for the end of the action :data:`LEAD` before.

    torch gives a message's memory out again once the device has run what its communicator was asked for when Python let
    go of the rows. A host that is a whole step ahead would thus keep the rows of all microbatches.

    What a host waits for here it has asked for itself, before; so the order of transfers and collectives that all ranks
    keep bars a circle, as it does where a message holds up its host.
    """

    def __init__(self) -> None:
        self._ends: defaultdict[Hashable, deque[Moment]] = defaultdict(deque)
        """By stream: a host that waits for one of two streams would keep the other one from its work."""

    def wait(self, stream: Hashable) -> None:
        """Before an action: wait until the device has fewer than :data:`LEAD` of the stream before it."""
        ends = self._ends[stream]
        while len(ends) >= LEAD:
            ends.popleft().synchronize()

    def ran(self, stream: Hashable, end: Moment) -> None:
        """Note the end of an action that the stream was asked for."""
        self._ends[stream].append(end)


@dataclass
class Recording:
    """One step. An action's time begins when its inputs have arrived and ends when it has made its outputs."""

    compiler: StepCompiler
    plan: StepPlan
    train: bool
    asked: Mark
    """When this rank was asked to run the step: it makes the schedule then."""
    begin: Mark
    end: Mark | None = None
    done: Mark | None = None
    """When what the step yields was summed over all ranks."""
    marks: list[tuple[Action, Mark, Mark]] = field(default_factory=list)

    @cached_property
    def schedule(self) -> Schedule:
        """What was run, made again from the plan."""
        return self.compiler.schedule(self.plan, train=self.train)

    def events(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in seconds of this machine's clock. Waits for the device."""
        return [(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self.marks]

    def span(self) -> tuple[float, float]:
        """Begin and end of the schedule on the same clock."""
        assert self.end is not None
        return self._seconds(self.begin), self._seconds(self.end)

    def whole(self) -> tuple[float, float]:
        """From when this rank was asked for the step until it had what the step yields, on the same clock."""
        assert self.done is not None
        return self._seconds(self.asked), self._seconds(self.done)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        clock, now = self._reference
        return clock - mark.elapsed_time(now) / 1000

    @cached_property
    def _reference(self) -> tuple[float, torch.cuda.Event]:
        """A moment on this machine's clock, and the same on the device's: the host was ahead of it during the step."""
        torch.cuda.synchronize()
        now = _event()
        assert isinstance(now, torch.cuda.Event)
        now.synchronize()
        return time.perf_counter(), now


class Recorder:
    """Marks the beginning and the end of actions: by the clock, on CUDA by events, whose ends bound the host's lead."""

    def __init__(self, device: torch.device, compiler: StepCompiler) -> None:
        self._compiler = compiler
        self.now: Callable[[], Mark] = _event if device.type == "cuda" else time.perf_counter
        """This moment, on the device's own time line."""
        self.lead = Lead() if device.type == "cuda" else None
        """Of the host before its device; None: they are one."""
        self.steps: deque[Recording] = deque(maxlen=STEPS)
        """The last training steps, oldest first."""
        self._asked: Mark = 0.0
        self._current: Recording | None = None

    @property
    def last(self) -> list[Recording]:
        """The steps that are kept, without a run's first one, which warms up, where there are others."""
        steps = list(self.steps)
        return steps[1:] if 1 < len(steps) < STEPS else steps

    def open(self) -> None:
        """A step is asked for."""
        self._asked = self.now()

    @contextmanager
    def step(self, plan: StepPlan, *, train: bool) -> Iterator[None]:
        """Around the actions of a step."""
        self._current = Recording(self._compiler, plan, train, self._asked, self.now())
        yield
        self._current.end = self.now()

    def close(self) -> None:
        """The step is over; one that was not trained is not kept."""
        assert self._current is not None
        self._current.done = self.now()
        if self._current.train:
            self.steps.append(self._current)

    def ran(self, action: Action, begin: Mark, stream: Hashable = None) -> None:
        """An action that began then is over, on one of a device's streams."""
        assert self._current is not None
        end = self.now()
        self._current.marks.append((action, begin, end))
        if self.lead is not None:
            assert not isinstance(end, float)
            self.lead.ran(stream, end)


def _event() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
