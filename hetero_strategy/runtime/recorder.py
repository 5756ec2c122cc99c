"""Record when each action of the last steps really ran on this rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.schedule.action import Action, Schedule
from hetero_strategy.schedule.compile import StepCompiler

STEPS = 8
"""Number of steps that are kept."""
LEAD = 4
"""Actions by which the host may be ahead of its device."""
Mark = float | torch.cuda.Event


class Lead:
    """A bound on how far the host is ahead of its device: it waits for the end of the action :data:`LEAD` actions
    before.

    torch reuses a message's memory once the device has run all work that its communicator had queued when Python
    released the rows. A host that is a whole step ahead would thus keep the rows of all microbatches.

    The host only waits for work that it has queued before. So the order of transfers and collectives that all ranks
    keep prevents a deadlock, as it does where a message blocks its host.
    """

    def __init__(self) -> None:
        self._ends = deque[torch.cuda.Event]()

    def wait(self) -> None:
        """Wait before an action until the device has fewer than :data:`LEAD` actions left to run."""
        while len(self._ends) >= LEAD:
            self._ends.popleft().synchronize()

    def ran(self, end: torch.cuda.Event) -> None:
        """Note the end of an action that was queued on the device."""
        self._ends.append(end)


@dataclass
class Recording:
    """A record of one step. An action's time runs from the arrival of its inputs until its outputs are ready."""

    compiler: StepCompiler
    plan: StepPlan
    train: bool
    requested: Mark
    """When this rank was called to run the step: it makes the schedule after that."""
    begin: Mark
    end: Mark | None = None
    done: Mark | None = None
    """When the step's results were summed over all ranks."""
    marks: list[tuple[Action, Mark, Mark]] = field(default_factory=list)

    @cached_property
    def schedule(self) -> Schedule:
        """Return the schedule that was run, made again from the plan."""
        return self.compiler.schedule(self.plan, train=self.train)

    def events(self) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) in seconds of this machine's clock. Waits for the device."""
        return [(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self.marks]

    def span(self) -> tuple[float, float]:
        """Return begin and end of the schedule on the same clock."""
        assert self.end is not None
        return self._seconds(self.begin), self._seconds(self.end)

    def whole(self) -> tuple[float, float]:
        """Return when this rank was called to run the step and when it had the results, on the same clock."""
        assert self.done is not None
        return self._seconds(self.requested), self._seconds(self.done)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        clock, now = self._reference
        return clock - mark.elapsed_time(now) / 1000

    @cached_property
    def _reference(self) -> tuple[float, torch.cuda.Event]:
        """Return one moment on this machine's clock and on the device's: the host was ahead of the device during the
        step.
        """
        torch.cuda.synchronize()
        now = _event()
        assert isinstance(now, torch.cuda.Event)
        now.synchronize()
        return time.perf_counter(), now


class Recorder:
    """A recorder of the begin and the end of actions: by the clock, or on CUDA by events whose ends bound the host's
    lead.
    """

    def __init__(self, device: torch.device, compiler: StepCompiler) -> None:
        self._compiler = compiler
        self.now: Callable[[], Mark] = _event if device.type == "cuda" else time.perf_counter
        """Mark this moment on the device's own time line."""
        self.lead = Lead() if device.type == "cuda" else None
        """Bound on the host's lead over its device; None: the host is the device."""
        self.steps: deque[Recording] = deque(maxlen=STEPS)
        """The last training steps, oldest first."""
        self._asked: Mark = 0.0
        self._current: Recording | None = None

    @property
    def last(self) -> list[Recording]:
        """Return the kept steps, without a run's first step, which warms up, if there are more."""
        steps = list(self.steps)
        return steps[1:] if 1 < len(steps) < STEPS else steps

    def open(self) -> None:
        """Note that a step is called."""
        self._asked = self.now()

    @contextmanager
    def step(self, plan: StepPlan, *, train: bool) -> Iterator[None]:
        """Record the actions of a step that run inside this context."""
        self._current = Recording(self._compiler, plan, train, self._asked, self.now())
        yield
        self._current.end = self.now()

    def close(self) -> None:
        """End the step; keep it only if it trains."""
        assert self._current is not None
        self._current.done = self.now()
        if self._current.train:
            self.steps.append(self._current)

    def ran(self, action: Action, begin: Mark) -> None:
        """Mark the end of an action that began at ``begin``."""
        assert self._current is not None
        end = self.now()
        self._current.marks.append((action, begin, end))
        if self.lead is not None:
            assert not isinstance(end, float)
            self.lead.ran(end)


def _event() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
