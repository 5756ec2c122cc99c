"""Where rows go that arrive late or never, and when what was sent is let go."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.route import Hop, Rows, Transfer
from hetero_strategy.boundary.transport import Channel, Transport, Wire, WireMessage, start_messages
from hetero_strategy.errors import ModelError


def test_a_message_that_is_slow_holds_up_none_of_other_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA every channel has a stream of its own, and the first reader may be a phase behind the others."""
    over: dict[int, bool] = {}
    awaited: list[int] = []

    def send(wire: Wire, messages: Sequence[WireMessage]) -> list[Any]:
        number = len(over)
        over[number] = False
        return [
            SimpleNamespace(is_completed=lambda: over[number], wait=lambda: awaited.append(number)) for _ in messages
        ]

    monkeypatch.setattr(transport, "start_messages", send)
    monkeypatch.setattr(Wire, "of", lambda group, tag, device: Wire(group, tag, {1: 0}))
    group: Any = SimpleNamespace()
    slow, fast = (Channel(group, None, tag, 4, torch.float32, torch.device("cpu")) for tag in range(2))
    nothing = Rows(0, 0)
    leaves = Transfer(2, 0, (nothing, nothing), Hop(sends=((1, Rows(0, 2, 0)),)))
    made = Transport([(slow, leaves), (fast, leaves), (slow, leaves), (fast, leaves)], torch.arange(2))
    for number in range(4):
        made.give(number, torch.zeros(2, 4))
        made.start([[number]])
    over[1] = over[2] = True
    made._let_go()
    assert sorted(made._sent) == [0, 2, 3]  # number 2 follows one that is not over
    made.free(2)
    assert awaited == [2] and sorted(made._sent) == [0, 3]
    over[0] = over[3] = True
    made._let_go()
    assert not made._sent and np.all([not numbers for numbers in made._under_way.values()])


@pytest.mark.parametrize("lets_go", [Transport.drain, Transport._let_go])
def test_rows_that_are_written_to_while_they_are_sent_are_refused(
    monkeypatch: pytest.MonkeyPatch, lets_go: Any
) -> None:
    """Of a module's rows one reader is on this rank and another on the next one."""
    over = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(transport, "start_messages", lambda wire, messages: [over for _ in messages])
    monkeypatch.setattr(Wire, "of", lambda group, tag, device: Wire(group, tag, {1: 0}))
    group: Any = SimpleNamespace()
    whole, nothing = Rows(0, 2), Rows(0, 0)
    stays = Transfer(2, 2, (whole, whole), Hop())
    leaves = Transfer(2, 0, (nothing, nothing), Hop(sends=((1, whole),)))

    def given(rows: torch.Tensor) -> tuple[Transport, torch.Tensor]:
        here, there = (
            Channel(group, None, tag, 4, torch.float32, rows.device, "module 'vision'", target)
            for tag, target in enumerate(("module 'llm'", "module 'draw'"))
        )
        made = Transport([(here, stays), (there, leaves)], torch.arange(2))
        for number in range(2):
            made.give(number, rows)
        made.start([[0], [1]])
        return made, made.take(0)

    made, read = given(torch.zeros(2, 4))
    _ = read + 1
    lets_go(made)
    made, read = given(torch.zeros(2, 4))
    read.detach().relu_()
    with pytest.raises(ModelError, match=r"module 'llm' wrote .* of module 'vision' .* to module 'draw'"):
        lets_go(made)
    made, read = given(buffer := torch.zeros(2, 4))
    made._transfers = made._transfers[1:] * 2  # nobody else reads them here
    buffer.zero_()
    with pytest.raises(ModelError, match="module 'vision' wrote in place into rows of module 'vision'"):
        lets_go(made)
    with torch.inference_mode():  # which counts nothing
        lets_go(given(torch.zeros(2, 4))[0])


def test_rows_are_taken_once_their_message_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that arrive in their place, and those that go to theirs."""

    def receive(wire: Wire, messages: Sequence[WireMessage]) -> list[Any]:
        return [SimpleNamespace(wait=lambda one=one: one.tensor.fill_(one.peer)) for one in messages]

    monkeypatch.setattr(transport, "start_messages", receive)
    monkeypatch.setattr(Wire, "of", lambda group, tag, device: Wire(group, tag, {1: 0, 2: 1}))
    group: Any = SimpleNamespace()
    channel = Channel(group, None, 0, 1, torch.float32, torch.device("cpu"))
    nothing = Rows(0, 0)
    arrives = Transfer(0, 4, (nothing, nothing), Hop(receives=((1, Rows(0, 2)), (2, Rows(0, 2, 0)))))
    made = Transport([(channel, arrives)], torch.tensor([3, 2]))
    made.start([[0]])
    assert made.take(0).flatten().tolist() == [1, 1, 2, 2]


def test_rows_that_nothing_is_sent_for_are_zero() -> None:
    """Whatever fresh memory holds: here it is NaN."""
    channel = Channel(None, None, 0, 2, torch.float32, torch.device("cpu"))
    made = Transport([(channel, Transfer(2, 4, (Rows(0, 2), Rows(1, 2))))], torch.arange(0))
    made.give(0, torch.ones(2, 2))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        assert made.take(0).tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backend_that_runs_a_batch_as_one_starts_and_ends_it_once() -> None:
    """As NCCL does: there is one handle for all messages."""
    calls: list[Any] = []
    group: Any = SimpleNamespace(
        _start_coalescing=lambda device: calls.append("start"),
        send=lambda tensors, place, tag: calls.append(("send", place, tag)),
        recv=lambda tensors, place, tag: calls.append(("recv", place, tag)),
        _end_coalescing=lambda device: calls.append("end") or "handle",
    )
    wire = Wire(group, 3, {5: 0, 7: 1}, torch.device("cpu"))
    works = start_messages(wire, [WireMessage(True, torch.zeros(1), 7), WireMessage(False, torch.zeros(1), 5)])
    assert works == ["handle", "handle"] and calls == ["start", ("send", 1, 3), ("recv", 0, 3), "end"]
