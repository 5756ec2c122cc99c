"""In which order a step runs its microbatches. Pure.

Gradients are sums, so any order is right, but bubbles depend on it. Position ``k`` of an order runs microbatch
``order[k]``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import permutations
from math import factorial

import numpy as np
from jaxtyping import Float64, Int64

Times = Callable[[Int64[np.ndarray, "candidates microbatches"]], Float64[np.ndarray, "candidates"]]
"""Orders -> time of the step with each."""
SEARCHES = ("search", "interval", "none")
"""How an order is found: by ``best_order``, by ``interval_order`` (used only where it gains), or not at all."""
BATCH = 128
"""Orders evaluated at once, which on arrays takes hardly longer than one."""
ROUNDS = 20
"""Most rounds of the search."""
KEPT = 4
"""Orders from which the next round starts."""
JOINED = 8
"""Moves that improved an order, tried together in the next round."""
ROUNDING = 1e-9
"""Share of the step's time below which a difference is no gain."""


def interval_order(
    forward: Float64[np.ndarray, "ranks microbatches"], backward: Float64[np.ndarray, "ranks microbatches"]
) -> Int64[np.ndarray, "microbatches"]:
    """DistTrain's inter-microbatch reordering for 1F1B (arXiv:2408.04275, section 5.2, algorithm 3).

    The smallest microbatch comes first and the ``p - 1`` next smaller ones come last. Between them, the gaps that the
    first rank's forwards fill (intervals) are computed with the recurrence of 1F1B over the microbatches placed so far,
    and each gets the microbatch whose forward is nearest to it. The first interval gets ``p - 1`` of them, each time
    the one nearest to an equal share of what is left. Time ``O(l p)``, and ``l`` cheap removals from a sorted list.

    The paper loops over ``l - p`` intervals; here the loop ends when no microbatch is left, after ``l - 2p + 2``, as
    the first takes ``p - 1``. The paper leaves open what the size of a microbatch is: here its time on all ranks. Where
    a rank has several stages (interleaved 1F1B) all intervals that a microbatch fills count as one.
    """
    p, count = forward.shape
    if p <= 1 or count <= 1:
        return np.arange(count)
    by_size = np.argsort((forward + backward).sum(axis=0), kind="stable")
    pending = by_size[p:][np.argsort(forward[0, by_size[p:]], kind="stable")]
    numbers, volumes = pending.tolist(), forward[0, pending].tolist()

    def closest(volume: float) -> tuple[int, float]:
        i = bisect_left(volumes, volume)
        if i == len(volumes) or (i and volume - volumes[i - 1] <= volumes[i] - volume):
            i -= 1
        return numbers.pop(i), volumes.pop(i)

    placed = Intervals(forward, backward)
    placed.append(int(by_size[0]))
    left = placed.interval()
    for slots in range(min(p - 1, len(numbers)), 0, -1):
        number, volume = closest(left / slots)
        left -= volume
        placed.append(number)
    while numbers:
        placed.append(closest(placed.interval())[0])
    return np.array([*placed.order, *by_size[1:p].tolist()], dtype=np.int64)


class Intervals:
    """The part of 1F1B on ``p`` ranks that the first microbatches of an order decide; ``O(p)`` per microbatch."""

    def __init__(
        self, forward: Float64[np.ndarray, "ranks microbatches"], backward: Float64[np.ndarray, "ranks microbatches"]
    ) -> None:
        self._forward: list[list[float]] = forward.T.tolist()
        self._backward: list[list[float]] = backward.T.tolist()
        self._ranks = len(forward)
        self._free = [0.0] * self._ranks
        self._back = [0.0] * (self._ranks + 1)
        self.order: list[int] = []
        """Microbatches placed so far."""

    def append(self, microbatch: int) -> None:
        """Place one more microbatch: its forwards, and on each rank the backward that comes right after its forward."""
        self.order.append(microbatch)
        position = len(self.order) - self._ranks  # of the microbatch whose backward follows on this rank
        free, back = self._free, self._back
        ready = 0.0
        for rank, time in enumerate(self._forward[microbatch]):
            ready = max(ready, free[rank]) + time
            free[rank] = ready
            if position >= 0:  # back[rank + 1] is still that of the microbatch placed before: the same backward
                free[rank] = back[rank] = max(ready, back[rank + 1]) + self._backward[self.order[position]][rank]
            position += 1

    def interval(self) -> float:
        """Time that the first rank has until the backward after the next forward may start (the paper's GETINTERVAL).

        With one microbatch placed it is the time between that one's forward and backward if it were alone. With more,
        but fewer than ``p``, it cannot be known.
        """
        if len(self.order) == 1:
            only = self.order[0]
            return sum(self._forward[only][1:]) + sum(self._backward[only][1:])
        return max(0.0, self._back[1] - self._back[0])


def best_order(
    times: Times,
    forward: Float64[np.ndarray, "ranks microbatches"],
    backward: Float64[np.ndarray, "ranks microbatches"],
) -> Int64[np.ndarray, "microbatches"]:
    """Search for a fast order: ``0 .. l - 1``, as planned, or one that takes less time.

    If all orders can be tried (up to 6 microbatches) the result is the best there is. Otherwise the planned one,
    ``interval_order`` and orders sorted by size are evaluated, then ``ROUNDS`` rounds of ``BATCH`` changed orders each:
    two microbatches are swapped, or one or a run of them is moved; changes that improved an order are tried together.

    The work does not depend on the clock, so every rank finds the same order (law 7): ``times`` is called at most
    ``ROUNDS + 1`` times. With a replayed 1F1B schedule that takes about 15 ms for 8 ranks and 32 microbatches, and
    90 ms for 16 and 128.

    Args:
        times: judges orders; the same function on every rank.
        forward, backward: time of every rank per microbatch, for the orders to begin with.
    """
    microbatches = forward.shape[1]
    planned = np.arange(microbatches)
    if microbatches < 2:
        return planned
    all_of_them = microbatches < 10 and factorial(microbatches) <= ROUNDS * BATCH
    pool = np.array([planned, *(permutations(planned) if all_of_them else _beginnings(forward, backward))])
    pool_times = times(pool)
    enough = pool_times[0] * (1 - ROUNDING)
    pool, pool_times = _fittest(pool, pool_times)
    rng = np.random.default_rng(0)
    joined = np.empty((0, microbatches), dtype=np.int64)
    for _ in range(0 if all_of_them else ROUNDS):
        count = BATCH - len(joined)
        parent = np.minimum(rng.integers(0, len(pool), count), rng.integers(0, len(pool), count))
        moves = _moves(rng, microbatches, count)
        changed = np.concatenate([np.take_along_axis(pool[parent], moves, axis=1), joined])
        changed_times = times(changed)
        good = np.flatnonzero((parent == 0) & (changed_times[:count] < pool_times[0]))
        good = good[np.argsort(changed_times[good], kind="stable")][:JOINED]
        joined = _composed(pool[0], moves[good])
        pool, pool_times = _fittest(np.concatenate([pool, changed]), np.concatenate([pool_times, changed_times]))
    return np.asarray(pool[0]) if pool_times[0] < enough else planned


def _beginnings(forward: np.ndarray, backward: np.ndarray) -> list[np.ndarray]:
    """Orders to begin with: DistTrain's, and by time on each rank and on all: rising, falling, small at both ends."""
    both = forward + backward
    orders = [interval_order(forward, backward)]
    for sizes in np.unique(np.concatenate([both.sum(axis=0)[None], both]), axis=0):
        ascending = np.argsort(sizes, kind="stable")
        orders += [ascending, ascending[::-1], np.concatenate([ascending[::2], ascending[1::2][::-1]])]
    return orders


def _moves(rng: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Draw changes of an order, int64 ``[count, length]``: position ``k`` of the new order has what was at ``move[k]``.

    45% swap two microbatches, 35% move one, 20% move a run of up to a quarter of all.
    """
    kind = rng.random(count)
    a = rng.integers(0, length, count)
    b = (a + rng.integers(1, length, count)) % length
    size = np.where(kind < 0.8, 1, rng.integers(2, max(3, length // 4 + 1), count))
    position = np.arange(length)
    key = np.tile(position.astype(np.float64), (count, 1))
    swap = np.flatnonzero(kind < 0.45)
    key[swap, a[swap]], key[swap, b[swap]] = b[swap], a[swap]
    runs = (position >= a[:, None]) & (position < (a + size)[:, None]) & (kind >= 0.45)[:, None]
    beside = np.where(b > a, b + 0.3, b - 0.6)  # right after, or right before, what is at b
    key = np.where(runs, beside[:, None] + (position - a[:, None]) * (0.3 / length), key)
    return np.argsort(key, axis=1, kind="stable")


def _composed(order: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Orders after the first two moves, after the first three, and so on; int64 ``[max(0, moves - 1), l]``."""
    orders = np.empty((max(0, len(moves) - 1), len(order)), dtype=np.int64)
    for i, move in enumerate(moves):
        order = order[move]
        if i:
            orders[i - 1] = order
    return orders


def _fittest(orders: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ``KEPT`` fastest orders of different times, fastest first; of equally fast ones the earlier one."""
    _, first = np.unique(times, return_index=True)
    return orders[first[:KEPT]], times[first[:KEPT]]
