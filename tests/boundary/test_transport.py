"""When what was sent is let go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.route import Hop, Rows, Transfer
from hetero_strategy.boundary.transport import Channel, Transport, Wire


def test_a_message_that_is_slow_holds_up_none_of_other_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA every channel has a stream of its own, and the first reader may be a phase behind the others."""
    over: dict[int, bool] = {}

    def send(ops: list[Any]) -> list[Any]:
        number = len(over)
        over[number] = False
        return [SimpleNamespace(is_completed=lambda: over[number], wait=lambda: None) for _ in ops]

    monkeypatch.setattr(dist, "batch_isend_irecv", send)
    monkeypatch.setattr(transport.Wire, "of", lambda group, tag: Wire(group, tag, {1: 0}))
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
    over[0] = over[3] = True
    made._let_go()
    assert not made._sent and np.all([not numbers for numbers in made._under_way.values()])
