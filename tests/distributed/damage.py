"""Negative controls: break one thing in the product while a run lasts. And what must not break it: late messages."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetero_strategy.boundary.exchange import Crossing


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """``forward:2`` shifts the rows that cross edge 2 by one place, so that one is lost, ``backward:2`` halves its
    gradients; ``""`` breaks nothing.

    Edges are those between stages, in the order of the stage graph.
    """
    if not what:
        yield
        return
    original = Crossing.receive
    kind, _, number = what.partition(":")

    def receive(self: Crossing, add_to: torch.Tensor | None = None) -> torch.Tensor:
        edge, backward = divmod(self.channel.tag, 2)
        out = original(self)
        if edge == int(number) and kind == "forward" and not backward and len(out):
            out = torch.cat([torch.zeros_like(out[:1]), out[:-1]])
        if edge == int(number) and kind == "backward" and backward:
            out = out * 0.5
        return out if add_to is None else add_to.add_(out)

    Crossing.receive = receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        Crossing.receive = original  # type: ignore[method-assign]


@contextmanager
def late(seconds: float, rank: int) -> Iterator[None]:
    """Every other time that this rank starts to send or to receive, it does so at most this much later: results must
    not depend on which rank is ahead.
    """
    if not seconds:
        yield
        return
    original = Crossing._start
    rng = random.Random(f"{rank} {seconds}")

    def start(self: Crossing, *args: Any, **options: Any) -> Any:
        if rng.random() < 0.5:
            time.sleep(rng.random() * seconds)
        return original(self, *args, **options)

    Crossing._start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        Crossing._start = original  # type: ignore[method-assign]
