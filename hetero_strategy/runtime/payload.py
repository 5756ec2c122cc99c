"""What modules take besides rows: on the host, and on the device from just before its first forward to its last.

A step's inputs may be gigabytes. The device has those of the microbatch that computes and of the next one; what
backward needs of others is kept by autograd, like activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from hetero_strategy.model.inputs import ModuleInputs

AHEAD = 1
"""Microbatches that are on their way to the device while another one computes."""

Microbatch = tuple[str, int]
"""Module and number."""


class Moving(NamedTuple):
    """Inputs whose copy may still be under way."""

    inputs: ModuleInputs
    copied: torch.cuda.Event | None = None


class Copies(Protocol):
    """Brings inputs to where they are computed with."""

    def start(self, inputs: ModuleInputs) -> Moving:
        """Begin to copy; the host waits for nothing."""
        ...

    def finish(self, moving: Moving) -> ModuleInputs:
        """Give the inputs to the current stream: what it computes from now on waits for the copy."""
        ...


class ToCuda:
    """Copies inputs to a CUDA device on streams of their own.

    Their memory is that of the stream that computes, which uses it again in its own order once Python lets go of it. So
    a copy begins when that stream is where it was asked for, and a host that runs a whole step ahead takes no more
    memory; ``record_stream`` would keep all of it until the device has caught up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        """By stream that computes: no copy for one waits for another."""

    def start(self, inputs: ModuleInputs) -> Moving:
        """See :class:`Copies`; what is on the device already stays where it is."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                return tensor
            pairs.append((torch.empty_like(tensor, device=self._device, pin_memory=False), tensor.pin_memory()))
            return pairs[-1][0]

        placed, computes = inputs.each(place), torch.cuda.current_stream(self._device)
        if computes not in self._streams:
            self._streams[computes] = torch.cuda.Stream(self._device)
        stream = self._streams[computes]
        stream.wait_stream(computes)
        with torch.cuda.stream(stream):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
        return Moving(placed, stream.record_event())

    def finish(self, moving: Moving) -> ModuleInputs:
        """See :class:`Copies`."""
        assert moving.copied is not None
        torch.cuda.current_stream(self._device).wait_event(moving.copied)
        return moving.inputs


class Payload:
    """Inputs of one step on this rank, each where it is computed with as long as it is needed.

    Args:
        inputs: by module and microbatch, on the host.
        uses: the microbatch of every forward that takes inputs, in the order of the rank's program.
        copies: how they get to the device; None: host and device are one, and nothing is copied.
        on: around what is done for a module: the stream on which it computes.
    """

    def __init__(
        self,
        inputs: Mapping[str, tuple[ModuleInputs | None, ...]],
        uses: Iterable[Microbatch],
        copies: Copies | None,
        on: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._inputs, self._copies, self._on = inputs, copies, on
        self._left = Counter(uses if copies is not None else ())
        self._coming = iter(list(self._left))
        self._moving: dict[Microbatch, Moving] = {}
        self._there: dict[Microbatch, ModuleInputs] = {}
        for _ in range(AHEAD):
            self._start_next()

    def take(self, microbatch: Microbatch) -> ModuleInputs:
        """Give the inputs that a forward takes; after the last one that does, nothing here holds their copy."""
        if self._copies is None:
            inputs = self._inputs[microbatch[0]][microbatch[1]]
            assert inputs is not None, f"microbatch {microbatch[1]} of {microbatch[0]} has no inputs"
            return inputs
        if microbatch in self._moving:
            self._start_next()
            self._there[microbatch] = self._copies.finish(self._moving.pop(microbatch))
        self._left[microbatch] -= 1
        return self._there[microbatch] if self._left[microbatch] else self._there.pop(microbatch)

    def _start_next(self) -> None:
        for module, number in islice(self._coming, 1):
            inputs = self._inputs[module][number]
            assert inputs is not None and self._copies is not None, f"microbatch {number} of {module} has no inputs"
            with self._on(module):
                self._moving[module, number] = self._copies.start(inputs)
