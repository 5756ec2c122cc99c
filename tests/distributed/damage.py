"""Negative controls: break one thing in the product while a run lasts. And what must not break it: late messages."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetero_strategy.boundary.transport import Transport


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """``forward:2`` shifts the rows that cross edge 2 by one place, so that one is lost, ``backward:2`` halves its
    gradients; ``""`` breaks nothing.

    Edges are those between stages, in the order of the stage graph.
    """
    if not what:
        yield
        return
    original = Transport.take
    kind, _, number = what.partition(":")

    def take(self: Transport, transfer: int, add_to: torch.Tensor | None = None) -> torch.Tensor:
        edge, backward = divmod(self._transfers[transfer][0].tag, 2)
        out = original(self, transfer)
        if edge == int(number) and kind == "forward" and not backward and len(out):
            out = torch.cat([torch.zeros_like(out[:1]), out[:-1]])
        if edge == int(number) and kind == "backward" and backward:
            out = out * 0.5
        return out if add_to is None else add_to.add_(out)

    Transport.take = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transport.take = original  # type: ignore[method-assign]


@contextmanager
def late(seconds: float, rank: int) -> Iterator[None]:
    """Every other time that this rank starts to send or to receive, it does so at most this much later: results must
    not depend on which rank is ahead.
    """
    if not seconds:
        yield
        return
    original = Transport._start
    rng = random.Random(f"{rank} {seconds}")

    def start(self: Transport, *args: Any, **options: Any) -> Any:
        if rng.random() < 0.5:
            time.sleep(rng.random() * seconds)
        return original(self, *args, **options)

    Transport._start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transport._start = original  # type: ignore[method-assign]
