"""Negative controls: break one thing in the product while a run lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_strategy.boundary.exchange import Crossing


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """``forward:2`` rolls the rows that cross edge 2, ``backward:2`` halves its gradients; ``""`` breaks nothing."""
    if not what:
        yield
        return
    original = Crossing.receive
    kind, _, number = what.partition(":")

    def receive(self: Crossing, add_to: torch.Tensor | None = None) -> torch.Tensor:
        edge, backward = divmod(self.channel.tag, 2)
        out = original(self)
        if edge == int(number) and kind == "forward" and not backward and len(out) > 1:
            out = out.roll(1, 0)
        if edge == int(number) and kind == "backward" and backward:
            out = out * 0.5
        return out if add_to is None else add_to.add_(out)

    Crossing.receive = receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        Crossing.receive = original  # type: ignore[method-assign]
