"""When each action of the last steps really ran on this rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hetero_strategy.data.plan import StepPlan
from hetero_strategy.schedule.action import Action, Schedule

STEPS = 8
"""Steps that are kept."""
Mark = float | torch.cuda.Event


@dataclass
class Recording:
    """One step. An action's time begins when its inputs have arrived and ends when its outputs are on their way."""

    schedule: Schedule
    plan: StepPlan
    host_begin: float
    begin: Mark
    end: Mark | None = None
    marks: list[tuple[Action, Mark, Mark]] = field(default_factory=list)

    def events(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in seconds of this machine's clock. Waits for the device."""
        if isinstance(self.begin, torch.cuda.Event):
            torch.cuda.synchronize()
        return [(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self.marks]

    def span(self) -> tuple[float, float]:
        """Begin and end of the step on the same clock."""
        assert self.end is not None
        return self._seconds(self.begin), self._seconds(self.end)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert isinstance(self.begin, torch.cuda.Event)
        return self.host_begin + self.begin.elapsed_time(mark) / 1000


class Recorder:
    """Marks the beginning and the end of actions: by the clock, on CUDA by events, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.steps: deque[Recording] = deque(maxlen=STEPS)
        """The last training steps, oldest first."""
        self._current: Recording | None = None

    @contextmanager
    def step(self, schedule: Schedule, plan: StepPlan) -> Iterator[None]:
        """Around a step; what is not trained is not kept."""
        self._current = Recording(schedule, plan, time.perf_counter(), self._now())
        yield
        self._current.end = self._now()
        if schedule.train:
            self.steps.append(self._current)

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Around an action."""
        assert self._current is not None
        begin = self._now()
        yield
        self._current.marks.append((action, begin, self._now()))

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
