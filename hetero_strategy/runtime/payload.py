"""Inputs of modules besides rows: kept on the host, and on the device from just before their first forward to their
last.

A step's inputs may be gigabytes. The device holds the inputs of the computing microbatch and of the next one; autograd
keeps what backward needs of earlier ones, like activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import torch

from hetero_strategy.model.inputs import ModuleInputs

AHEAD = 1
"""Microbatches whose copy to the device runs while another one computes."""

Microbatch = tuple[str, int]
"""Module and number of the microbatch."""


class Moving(NamedTuple):
    """The inputs of a microbatch whose copy may still be under way."""

    inputs: ModuleInputs
    copied: torch.cuda.Event | None = None


class ToCuda:
    """A copier to a CUDA device on a stream of its own.

    The copies' memory belongs to the computing stream, which reuses it in its own order once Python releases it. So a
    copy begins when the computing stream has reached the point at which the copy was asked for, and a host that runs a
    whole step ahead takes no more memory. ``record_stream`` would keep all of it until the device has caught up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, inputs: ModuleInputs) -> Moving:
        """Start a copy, for which the host does not wait; tensors on the device already stay where they are."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                return tensor
            pairs.append((torch.empty_like(tensor, device=self._device, pin_memory=False), tensor.pin_memory()))
            return pairs[-1][0]

        placed = inputs.each(place)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
        return Moving(placed, self._stream.record_event())

    def finish(self, moving: Moving) -> ModuleInputs:
        """Give the inputs to the current stream: what it computes from now on waits for the copy."""
        assert moving.copied is not None
        torch.cuda.current_stream(self._device).wait_event(moving.copied)
        return moving.inputs


class Payload:
    """The inputs of one step on this rank, each on the computing device only as long as it is needed.

    Args:
        inputs: inputs by module and microbatch, on the host.
        uses: the microbatch of every forward that takes inputs, in the order of the rank's program.
        copies: copier to the device; None: host and device are one, and nothing is copied.
    """

    def __init__(
        self,
        inputs: Mapping[str, tuple[ModuleInputs | None, ...]],
        uses: Iterable[Microbatch],
        copies: ToCuda | None,
    ) -> None:
        self._inputs, self._copies = inputs, copies
        self._left = Counter(uses if copies is not None else ())
        self._coming = iter(list(self._left))
        self._moving: dict[Microbatch, Moving] = {}
        self._there: dict[Microbatch, ModuleInputs] = {}
        for _ in range(AHEAD):
            self._start_next()

    def take(self, microbatch: Microbatch) -> ModuleInputs:
        """Return the inputs of a forward; drop the copy when the last forward that needs it takes it."""
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
            self._moving[module, number] = self._copies.start(inputs)
