"""In which order a step runs its microbatches: gradients are sums, so any order is right; bubbles depend on it. Pure.

An order is an int64 ``[l]``: position ``k`` runs microbatch ``order[k]``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import permutations
from math import factorial

import numpy as np

from hetero_strategy.errors import ConfigError

Times = Callable[[np.ndarray], np.ndarray]
"""Time of the step, float64 ``[candidates]``, for orders int64 ``[candidates, l]``."""
SEARCHES = ("search", "interval", "none")
"""How an order is found: `best_order`, `interval_order` (kept only where it gains), or not at all: as planned."""
BATCH = 128
"""Orders evaluated at once: an evaluator on arrays takes hardly longer for them than for one."""
ROUNDS = 20
KEPT = 4
"""Orders from which the next round starts."""
JOINED = 8
"""Moves that improved an order, tried together in the next round."""
ROUNDING = 1e-9
"""A smaller part of the step's time is no gain."""


def interval_order(forward: np.ndarray, backward: np.ndarray, vpp: int = 1) -> np.ndarray:
    """DistTrain's inter-microbatch reordering for 1F1B (arXiv:2408.04275, section 5.2, algorithm 3); int64 ``[l]``.

    The smallest microbatch comes first, the ``p - 1`` next smaller ones come last. Between them, the gaps that the
    first rank's forwards fill (intervals) are computed with the recurrence of 1F1B over the microbatches placed so far,
    and each is given the microbatch whose forward is nearest to it; the first is given ``p - 1`` of them, each time the
    one nearest to an equal share of what is left. Time ``O(l p)``, and ``l`` cheap removals from a sorted list.

    The paper's loop over ``l - p`` intervals ends here when no microbatch is left, after ``l - 2p + 2`` of them: the
    first takes ``p - 1``. Of what it leaves open, the size of a microbatch is its time on all ranks. For interleaved
    1F1B the ``vpp`` intervals that one microbatch fills are taken as one, and so are its passes on a rank.

    Args:
        forward: time of every stage per microbatch, float64 ``[p * vpp, l]``; stage ``s`` is on rank ``s % p``.
        backward: likewise.
        vpp: stages per rank.

    Raises:
        ConfigError: the shapes differ, or ``vpp`` does not divide the stages.
    """
    if forward.shape != backward.shape or forward.ndim != 2 or vpp < 1 or len(forward) % vpp:
        raise ConfigError(
            f"interval_order got forward {forward.shape} and backward {backward.shape} with vpp={vpp}: "
            f"give both as [stages, microbatches], stages a multiple of vpp"
        )
    p, count = len(forward) // vpp, forward.shape[1]
    if p <= 1 or count <= 1:
        return np.arange(count)
    forward, backward = (x.reshape(vpp, p, count).sum(axis=0) for x in (forward, backward))
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
    """1F1B on ``p`` ranks, as far as the first microbatches of an order decide it; ``O(p)`` per microbatch.

    Args:
        forward: time of every rank per microbatch, float64 ``[p, l]``.
        backward: likewise.
    """

    def __init__(self, forward: np.ndarray, backward: np.ndarray) -> None:
        self._forward: list[list[float]] = forward.T.tolist()
        self._backward: list[list[float]] = backward.T.tolist()
        self._ranks = len(forward)
        self._free = [0.0] * self._ranks
        self._back = [0.0] * (self._ranks + 1)
        self.order: list[int] = []
        """Microbatches placed so far."""

    def append(self, microbatch: int) -> None:
        """Place one more: its forwards end, and on each rank the backward that comes right after its forward."""
        self.order.append(microbatch)
        place = len(self.order) - self._ranks  # of the microbatch whose backward follows on this rank
        free, back = self._free, self._back
        ready = 0.0
        for rank, time in enumerate(self._forward[microbatch]):
            ready = max(ready, free[rank]) + time
            free[rank] = ready
            if place >= 0:  # back[rank + 1] is still that of the microbatch placed before: the same backward
                free[rank] = back[rank] = max(ready, back[rank + 1]) + self._backward[self.order[place]][rank]
            place += 1

    def interval(self) -> float:
        """GETINTERVAL: how long the first rank has until the backward after the next forward may start.

        With one microbatch placed it is the time from its forward to its backward if it were alone. With fewer than
        ``p`` it cannot be known.
        """
        if len(self.order) == 1:
            only = self.order[0]
            return sum(self._forward[only][1:]) + sum(self._backward[only][1:])
        return max(0.0, self._back[1] - self._back[0])


def best_order(
    times: Times,
    microbatches: int,
    *,
    start: np.ndarray | None = None,
    forward: np.ndarray | None = None,
    backward: np.ndarray | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> np.ndarray:
    """The best order found, int64 ``[l]``: ``start`` itself, or one that takes less time.

    Where all orders are no more than it may try (up to 6 microbatches), it is the best there is. Else ``start``,
    `interval_order` and orders sorted by size are evaluated, then ``rounds`` rounds of ``BATCH`` changed orders each:
    two microbatches swapped, or one or a run of them moved; what improved an order is also tried together.

    It does the same work on every rank, whatever the clock says, and so finds the same order (law 7): ``times`` is
    called ``rounds + 1`` times at most. With a replayed 1F1B schedule that takes about 15 ms for 8 ranks and 32
    microbatches, 90 ms for 16 and 128.

    Args:
        times: judges orders; the same function on every rank.
        microbatches: ``l``.
        start: the order to improve; None: as they are numbered.
        forward: time of every rank per microbatch, float64 ``[p, l]``, for the orders to begin with; None: only
            ``start`` is changed.
        backward: likewise.
        rounds: of the search.
        seed: of its random numbers.
    """
    first = np.arange(microbatches) if start is None else np.asarray(start, dtype=np.int64)
    if microbatches < 2:
        return first
    if microbatches < 10 and factorial(microbatches) <= rounds * BATCH:
        pool = np.array([first, *permutations(range(microbatches))])
        rounds = 0
    else:
        pool = np.array([first] if forward is None or backward is None else [first, *_beginnings(forward, backward)])
    found = times(pool)
    enough = found[0] * (1 - ROUNDING)
    pool, found = _fittest(pool, found)
    rng = np.random.default_rng(seed)
    joined = np.empty((0, microbatches), dtype=np.int64)
    for _ in range(rounds):
        count = BATCH - len(joined)
        parent = np.minimum(rng.integers(0, len(pool), count), rng.integers(0, len(pool), count))
        moves = _moves(rng, microbatches, count)
        changed = np.concatenate([np.take_along_axis(pool[parent], moves, axis=1), joined])
        took = times(changed)
        good = np.flatnonzero((parent == 0) & (took[:count] < found[0]))
        good = good[np.argsort(took[good], kind="stable")][:JOINED]
        joined = _composed(pool[0], moves[good])
        pool, found = _fittest(np.concatenate([pool, changed]), np.concatenate([found, took]))
    return np.asarray(pool[0]) if found[0] < enough else first


def _beginnings(forward: np.ndarray, backward: np.ndarray) -> list[np.ndarray]:
    """Orders worth a look: DistTrain's; ascending, descending, and small ones at both ends, by each rank's time and all
    of it.
    """
    both = forward + backward
    found = [interval_order(forward, backward)]
    for sizes in np.unique(np.concatenate([both.sum(axis=0)[None], both]), axis=0):
        ascending = np.argsort(sizes, kind="stable")
        found += [ascending, ascending[::-1], np.concatenate([ascending[::2], ascending[1::2][::-1]])]
    return found


def _moves(rng: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Changes of an order, int64 ``[count, length]``: position ``k`` of the new order has what was at ``move[k]``.

    45% swap two microbatches, 35% move one, 20% move a run of up to a quarter of all.
    """
    kind = rng.random(count)
    a = rng.integers(0, length, count)
    b = (a + rng.integers(1, length, count)) % length
    size = np.where(kind < 0.8, 1, rng.integers(2, max(3, length // 4 + 1), count))
    place = np.arange(length)
    key = np.tile(place.astype(np.float64), (count, 1))
    swap = np.flatnonzero(kind < 0.45)
    key[swap, a[swap]], key[swap, b[swap]] = b[swap], a[swap]
    runs = (place >= a[:, None]) & (place < (a + size)[:, None]) & (kind >= 0.45)[:, None]
    beside = np.where(b > a, b + 0.3, b - 0.6)  # right after, or right before, what is at b
    key = np.where(runs, beside[:, None] + (place - a[:, None]) * (0.3 / length), key)
    return np.argsort(key, axis=1, kind="stable")


def _composed(order: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """The order after the first two moves, after the first three, ...; int64 ``[max(0, moves - 1), l]``."""
    found = np.empty((max(0, len(moves) - 1), len(order)), dtype=np.int64)
    for i, move in enumerate(moves):
        order = order[move]
        if i:
            found[i - 1] = order
    return found


def _fittest(orders: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ``KEPT`` fastest of different times, fastest first; of equal ones the earlier."""
    _, first = np.unique(times, return_index=True)
    return orders[first[:KEPT]], times[first[:KEPT]]
