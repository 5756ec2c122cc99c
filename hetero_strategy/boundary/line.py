"""All crossings of one direction of one edge in one step, started in one order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetero_strategy.boundary.exchange import Crossing

Pair = tuple[int, int]
"""(microbatch of the edge's source, microbatch of its target)."""


class Line:
    """A channel carries messages between two ranks in the order in which they were started, so both have to start them
    in one order: that of the pairs. A rank that sends in a crossing starts its receives together with the sends; those
    of earlier pairs have then been started, and those of later ones wait for it.

    Args:
        pairs: between which rows flow, ascending on both sides; the same on every rank.
        make: the crossing of a pair.
    """

    def __init__(self, pairs: Sequence[Pair], make: Callable[[Pair], Crossing]) -> None:
        self._pairs = pairs
        self._place = {pair: i for i, pair in enumerate(pairs)}
        self._make = make
        self._made: dict[Pair, Crossing] = {}
        self._started = 0

    def send(self, pair: Pair, rows: torch.Tensor) -> None:
        """Let rows leave; returns at once."""
        self._start(self._place[pair])
        self._crossing(pair).send(rows)

    def post(self, pair: Pair) -> None:
        """Start to receive ahead of time, as far as the order allows."""
        self._start(self._place[pair] + 1)

    def receive(self, pair: Pair, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the rows, see :meth:`Crossing.receive`."""
        self.post(pair)
        return self._crossing(pair).receive(add_to)

    def settle(self, pair: Pair) -> None:
        """The rows of a pair are known to have arrived everywhere."""
        self._crossing(pair).settle()

    def _start(self, end: int) -> None:
        while self._started < end and self._crossing(self._pairs[self._started]).post():
            self._started += 1

    def _crossing(self, pair: Pair) -> Crossing:
        if pair not in self._made:
            self._made[pair] = self._make(pair)
        return self._made[pair]
