"""``Timeline``: what every rank ran and when, simulated or measured; written as a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hetero_strategy.schedule.action import Action
from hetero_strategy.simulator.bubbles import Filling
from hetero_strategy.simulator.result import Cause, Simulation, Wait

BESIDE = 1 << 24
"""What is added to a rank's number for the thread of its stream of lower priority in a trace."""


class Event(NamedTuple):
    """One action on one rank; times in seconds from the step's start."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What the ranks of one step ran."""

    name: str
    """Origin: ``simulated`` or ``measured``."""
    ranks: tuple[int, ...]
    """Ranks that are shown, ascending, including those that ran nothing."""
    events: tuple[Event, ...]
    """Events of these ranks, by rank, then by time."""
    time: float
    """Duration of the step in seconds."""
    bubble: float
    """Idle share of the time of all ranks of the step, shown or not."""
    world: int
    """Number of ranks that the step had."""
    causes: Mapping[Cause, float] = field(default_factory=dict)
    """Cause -> its part of ``bubble``, where that is known."""
    filling: Filling | None = None
    """What filling bubbles does to the step, where modules do and where that is known."""
    waits: tuple[Wait, ...] = ()
    """When these ranks are idle, where it is known why."""
    apart: frozenset[str] = frozenset()
    """Modules that run on a stream of their own, beside others."""


def from_simulation(simulation: Simulation, most: int | None = None, filling: Filling | None = None) -> Timeline:
    """Make the timeline of a simulation, of at most ``most`` evenly chosen ranks (None: of all)."""
    ranks = evenly([int(r) for r in simulation.ranks], most)
    events = tuple(Event(rank, *event) for rank in ranks for event in simulation.of(rank))
    waits = tuple(wait for rank in ranks for wait in simulation.waits(rank))
    world, causes = len(simulation.ranks), simulation.bubble_by_cause
    apart, bubble = frozenset(action.node.module for action in simulation.beside), simulation.bubble
    return Timeline("simulated", ranks, events, simulation.time, bubble, world, causes, filling, waits, apart)


def from_measured(
    events: Mapping[int, Sequence[tuple[Action, float, float]]],
    span: tuple[float, float],
    most: int | None = None,
    apart: Collection[str] = (),
) -> Timeline:
    """Make the timeline of a measured step, of at most ``most`` evenly chosen ranks (None: of all).

    Args:
        events: rank -> (action, start, end) in seconds of one clock, in the sequence in which they ran.
        span: begin and end of the step on that clock.
        apart: modules that ran on a stream of their own, beside others.
    """
    first, last = span
    busy = sum(_covered((start, end) for _, start, end in own) for own in events.values())
    ranks = evenly(events, most)
    shown = (Event(r, action, start - first, end - first) for r in ranks for action, start, end in events[r])
    bubble = 1.0 - busy / ((last - first) * len(events)) if last > first else 0.0
    return Timeline("measured", ranks, tuple(shown), last - first, bubble, len(events), apart=frozenset(apart))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which any of them is under way."""
    covered, until = 0.0, -float("inf")
    for start, end in sorted(spans):
        covered, until = covered + max(0.0, end - max(start, until)), max(until, end)
    return covered


def evenly(ranks: Iterable[int], most: int | None) -> tuple[int, ...]:
    """Choose at most ``most`` ranks evenly, ascending, including the first and the last where ``most`` is above 1."""
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
            threads = {rank: f"rank {rank}"} | ({rank + BESIDE: f"rank {rank}, beside"} if timeline.apart else {})
            for number, name in threads.items():
                thread = {"ph": "M", "pid": pid, "tid": number}
                trace.append({**thread, "name": "thread_name", "args": {"name": name}})
                trace.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
        trace += [_complete(pid, event, event.action.node.module in timeline.apart) for event in timeline.events]
    Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))


def _complete(pid: int, event: Event, beside: bool) -> dict[str, Any]:
    kind, stage_id, microbatch = event.action
    args: dict[str, Any] = {"kind": kind, "module": stage_id.module, "stage": stage_id.stage}
    if microbatch >= 0:
        args["microbatch"] = microbatch
    return {
        "ph": "X",
        "pid": pid,
        "tid": event.rank + BESIDE * beside,
        "name": str(event.action),
        "cat": f"{stage_id.module},{kind}",
        "ts": 1e6 * event.start,
        "dur": 1e6 * (event.end - event.start),
        "args": args,
    }
