"""``Timeline``: every rank's actions and their times, simulated or measured; written as a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.result import Cause, Filling, Simulation, Wait


class Event(NamedTuple):
    """An action on one rank; times in seconds from the step's start."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A timeline of the ranks of one step."""

    name: str
    """Origin: ``simulated`` or ``measured``."""
    ranks: tuple[int, ...]
    """Ranks that are shown, ascending, including ranks without actions."""
    events: tuple[Event, ...]
    """Events of these ranks, by rank, then by time."""
    time: float
    """Duration of the step in seconds."""
    bubble: float
    """Idle share of the time of all ranks of the step, shown or not."""
    world: int
    """Number of ranks that the step had."""
    causes: Mapping[Cause, float] = field(default_factory=dict)
    """Cause -> its part of ``bubble``, if known."""
    filling: Filling | None = None
    """Effect of modules that fill bubbles on the step, if there are any and it is known."""
    waits: tuple[Wait, ...] = ()
    """Times and causes of these ranks' idleness, if known."""


def from_simulation(simulation: Simulation, most: int | None = None, filling: Filling | None = None) -> Timeline:
    """Make the timeline of a simulation, of at most ``most`` evenly chosen ranks (None: of all)."""
    ranks = evenly([int(r) for r in simulation.ranks], most)
    events = tuple(Event(rank, *event) for rank in ranks for event in simulation.of(rank))
    waits = tuple(wait for rank in ranks for wait in simulation.waits(rank))
    world, causes = len(simulation.ranks), simulation.bubble_by_cause
    return Timeline("simulated", ranks, events, simulation.time, simulation.bubble, world, causes, filling, waits)


def from_measured(
    events: Mapping[int, Sequence[tuple[Action, float, float]]],
    span: tuple[float, float],
    most: int | None = None,
) -> Timeline:
    """Make the timeline of a measured step, of at most ``most`` evenly chosen ranks (None: of all).

    Args:
        events: rank -> (action, start, end) in seconds of one clock, in the order in which they ran.
        span: begin and end of the step on that clock.
    """
    first, last = span
    busy = sum(end - start for own in events.values() for _, start, end in own)
    ranks = evenly(events, most)
    shown = (Event(r, action, start - first, end - first) for r in ranks for action, start, end in events[r])
    bubble = 1.0 - busy / ((last - first) * len(events)) if last > first else 0.0
    return Timeline("measured", ranks, tuple(shown), last - first, bubble, len(events))


def evenly(ranks: Iterable[int], most: int | None) -> tuple[int, ...]:
    """Choose at most ``most`` ranks evenly, ascending; above 1, they include the first and the last."""
    ascending = tuple(sorted(ranks))
    if most is None or len(ascending) <= most:
        return ascending
    return tuple(ascending[round(i * (len(ascending) - 1) / max(1, most - 1))] for i in range(most))


def write_trace(path: Path | str, *timelines: Timeline) -> None:
    """Write a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

    It has a process per timeline, named with step time and bubble by cause, and a thread per rank. The format is
    "Trace Event Format" (complete events ``X``, metadata ``M``), with times in microseconds.
    """
    trace: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines):
        label = f"{timeline.name}: {1e3 * timeline.time:.3f} ms, bubble {timeline.bubble:.1%}"
        if causes := ", ".join(f"{cause} {part:.1%}" for cause, part in timeline.causes.items() if part >= 5e-4):
            label += f" ({causes})"
        label += f", {timeline.filling}" if timeline.filling else ""
        trace.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}})
        trace.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for rank in timeline.ranks:
            thread = {"ph": "M", "pid": pid, "tid": rank}
            trace.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            trace.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
        trace += [_complete(pid, event) for event in timeline.events]
    Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))


def _complete(pid: int, event: Event) -> dict[str, Any]:
    kind, stage_id, microbatch = event.action
    args: dict[str, Any] = {"kind": kind, "module": stage_id.module, "stage": stage_id.stage}
    if microbatch >= 0:
        args["microbatch"] = microbatch
    return {
        "ph": "X",
        "pid": pid,
        "tid": event.rank,
        "name": str(event.action),
        "cat": f"{stage_id.module},{kind}",
        "ts": 1e6 * event.start,
        "dur": 1e6 * (event.end - event.start),
        "args": args,
    }
