"""A CUDA stream of lower priority for modules that fill bubbles inside actions of others (Optimus, section 4.3.2).

Kernels of both streams share the device: those of the side stream where the other one waits for rows or for collectives
of tensor parallelism. What crosses from one to the other waits for the event after which it exists, and its memory is
not used again before its reader is done with it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero_strategy.plan.ahead import computing
from hetero_strategy.schedule.action import StageGraph


def prefer_others(device: torch.device) -> None:
    """Let this process compute on a stream of high priority from now on: torch's own one has the lowest there is."""
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


@dataclass
class SideStream:
    """The stream, one that carries what goes to it or comes from it, and the one of all other modules.

    Args:
        device: CUDA.
        modules: that compute on it, and what they do ahead.
    """

    device: torch.device
    modules: Collection[str]
    computes: torch.cuda.Stream = field(init=False)
    carries: torch.cuda.Stream = field(init=False)
    main: torch.cuda.Stream = field(init=False)
    """Of the step in progress."""

    def __post_init__(self) -> None:
        self.computes, self.carries = torch.cuda.Stream(self.device, priority=0), torch.cuda.Stream(self.device)

    def of(self, module: str) -> torch.cuda.Stream | None:
        """Where a module computes; None: on the current stream."""
        return self.computes if computing(module) in self.modules else None

    def using(self, module: str) -> AbstractContextManager[Any]:
        """Around what is done for a module, also while another one computes."""
        return torch.cuda.stream(self.of(module) or self.main)

    def crossing(self, graph: StageGraph) -> set[int]:
        """Numbers of the edges whose rows come from it or go to it."""
        return {number for number, edge in enumerate(graph.edges) if any(self.of(node.module) for node in edge)}

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        """What comes next on the current stream, also after a failure, comes after all of it."""
        for stream in (self.computes, self.carries):
            self.main.wait_stream(stream)

    def fork(self) -> None:
        """A step begins: what is on the current stream so far comes before it."""
        self.main = torch.cuda.current_stream(self.device)
        for stream in (self.computes, self.carries):
            stream.wait_stream(self.main)


def side_stream(device: torch.device, graph: StageGraph, bubbles: Collection[str]) -> SideStream | None:
    """The stream of what fills bubbles inside actions, if some modules have any and the device has streams."""
    if device.type != "cuda" or not bubbles:
        return None
    return SideStream(device, {computing(name) for name in graph.filling})
