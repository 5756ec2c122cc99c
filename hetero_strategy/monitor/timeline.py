"""`Timeline`: what every rank ran and when, simulated or measured; written as a trace for ui.perfetto.dev.

`timeline_draw.draw` makes the picture of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.result import Simulation


class Event(NamedTuple):
    """One action on one rank; times in seconds from the step's start."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step."""

    name: str
    """Where it is from: ``simulated``, ``measured``."""
    ranks: tuple[int, ...]
    """Shown, ascending; also those that ran nothing."""
    events: tuple[Event, ...]
    """Of these ranks: by rank, then by time."""
    time: float
    """Of the step, in seconds."""
    bubble: float
    """Idle part of the time of all ranks of the step, shown or not."""
    world: int
    """How many ranks the step had."""


def from_simulation(simulation: Simulation, most: int | None = None, name: str = "simulated") -> Timeline:
    """What was simulated, of at most ``most`` evenly chosen ranks (None: of all)."""
    ranks = evenly([int(r) for r in simulation.ranks], most)
    events = (Event(rank, *event) for rank in ranks for event in simulation.of(rank))
    return Timeline(name, ranks, tuple(events), simulation.time, simulation.bubble, len(simulation.ranks))


def from_measured(
    events: Mapping[int, Sequence[tuple[Action, float, float]]],
    span: tuple[float, float] | None = None,
    most: int | None = None,
    name: str = "measured",
) -> Timeline:
    """What was measured, of at most ``most`` evenly chosen ranks (None: of all).

    Args:
        events: by rank: (action, start, end) in seconds of one clock, in the order in which they ran.
        span: begin and end of the step on that clock; None: from the first start to the last end.
    """
    first, last = span or (
        min((start for own in events.values() for _, start, _ in own), default=0.0),
        max((end for own in events.values() for *_, end in own), default=0.0),
    )
    busy = sum(end - start for own in events.values() for _, start, end in own)
    ranks = evenly(events, most)
    shown = (Event(r, action, start - first, end - first) for r in ranks for action, start, end in events[r])
    bubble = 1.0 - busy / ((last - first) * len(events)) if last > first else 0.0
    return Timeline(name, ranks, tuple(shown), last - first, bubble, len(events))


def evenly(ranks: Iterable[int], most: int | None) -> tuple[int, ...]:
    """At most ``most`` of them, evenly chosen, ascending, the first and the last among them where it is above 1."""
    found = tuple(sorted(ranks))
    if most is None or len(found) <= most:
        return found
    return tuple(found[round(i * (len(found) - 1) / max(1, most - 1))] for i in range(most))


def write_trace(path: Path | str, *timelines: Timeline) -> None:
    """Write a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

    A process per timeline, a thread per rank. Source: "Trace Event Format" (complete events ``X``, metadata ``M``),
    times in microseconds.
    """
    found: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines):
        label = f"{timeline.name}: {1e3 * timeline.time:.3f} ms, bubble {timeline.bubble:.1%}"
        found.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}})
        found.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for rank in timeline.ranks:
            thread = {"ph": "M", "pid": pid, "tid": rank}
            found.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            found.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
        found += [_complete(pid, event) for event in timeline.events]
    Path(path).write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))


def _complete(pid: int, event: Event) -> dict[str, Any]:
    kind, node, microbatch = event.action
    args: dict[str, Any] = {"kind": kind, "module": node.module, "stage": node.stage}
    if microbatch >= 0:
        args["microbatch"] = microbatch
    return {
        "ph": "X",
        "pid": pid,
        "tid": event.rank,
        "name": str(event.action),
        "cat": f"{node.module},{kind}",
        "ts": 1e6 * event.start,
        "dur": 1e6 * (event.end - event.start),
        "args": args,
    }
