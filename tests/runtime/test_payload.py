"""Inputs on their way to a device."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from hetero_strategy.model.inputs import EncoderInputs, ModuleInputs, Packing
from hetero_strategy.runtime.payload import AHEAD, Moving, Payload, ToCuda

FEATURES = 1 << 12


def pictures(rows: int, number: int) -> EncoderInputs:
    values = torch.full((rows, FEATURES), float(number))
    return EncoderInputs(values, np.array([[1, rows]]), np.array([rows]), Packing.of(np.array([rows])))


def test_on_the_host_they_are_what_was_loaded() -> None:
    made = tuple(pictures(2, number) for number in range(3))
    uses = [("vision", 2), ("vision", 0), ("vision", 2)]
    payload = Payload({"vision": (*made, None)}, uses, None)
    assert all(payload.take(use) is made[use[1]] for use in uses)
    with pytest.raises(AssertionError, match="microbatch 3 of vision has no inputs"):
        payload.take(("vision", 3))


class Cloned:
    """Copies within the host; knows which of them are alive."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def start(self, inputs: ModuleInputs) -> Moving:
        def clone(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.clone()
            if made.numel() >= FEATURES:
                self.alive.add(made)
            return made

        return Moving(inputs.each(clone))

    def finish(self, moving: Moving) -> ModuleInputs:
        return moving.inputs


def test_copies_are_made_one_microbatch_ahead_and_let_go_after_their_last_forward() -> None:
    made, copies = [pictures(2, number) for number in range(5)], Cloned()
    uses = [("vision", number) for number in (3, 0, 3, 1, 4, 2)]  # 3 is the first of two forwards and has to stay
    payload = Payload({"vision": tuple(made)}, uses, copies)
    assert len(copies.alive) == AHEAD
    for use, alive in zip(uses, (2, 3, 2, 2, 2, 1), strict=True):
        inputs = payload.take(use)
        assert inputs is not made[use[1]] and torch.equal(inputs.values, made[use[1]].values)
        assert len(copies.alive) == alive, use
        del inputs
    assert not copies.alive


def test_a_stream_that_computes_has_one_stream_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only how many are made: there is no CUDA device here."""
    made: list[MagicMock] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "computes")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(MagicMock()) or made[-1])
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    copies = ToCuda(torch.device("cuda"))
    for _ in range(3):
        copies.start(MagicMock())
    assert len(made) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [True, False])
def test_a_host_that_runs_ahead_takes_no_more_memory(pinned: bool) -> None:
    """The device is kept busy while all microbatches are asked for; each is read when it is time, and is right."""
    device, rows, count = torch.device("cuda", 0), 1 << 10, 12
    made = [pictures(rows, number) for number in range(count)]
    if pinned:
        made = [one.pin_memory() for one in made]
    sums = torch.zeros(count, device=device)
    copies = ToCuda(device)
    copies.finish(copies.start(made[0]))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        uses = [("vision", number) for number in range(count)]
        payload = Payload({"vision": tuple(made)}, uses, copies)
        for number, use in enumerate(uses):
            torch.cuda._sleep(10_000_000)
            sums[number].copy_(payload.take(use).values.mean())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated(device) - before < (1.5 + AHEAD) * 4 * rows * FEATURES
    assert sums.tolist() == [float(number) for number in range(count)]
