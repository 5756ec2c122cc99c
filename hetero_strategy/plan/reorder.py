"""Reordering: in which order a step runs its microbatches. Pure.

Gradients are sums, so any order is right, but bubbles depend on it. Position ``k`` of an order runs microbatch
``order[k]``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import factorial

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import ConfigError, register

Times = Callable[[Int64[np.ndarray, "candidates microbatches"]], Float64[np.ndarray, "candidates"]]
"""Orders -> time of the step with each."""
Search = Callable[
    [Times, Float64[np.ndarray, "ranks microbatches"], Float64[np.ndarray, "ranks microbatches"]],
    Int64[np.ndarray, "microbatches"],
]
"""Function that finds an order, with the arguments of :func:`best_order`. Its order is used only if the step takes less
time."""
SEARCHES: dict[str, Search | None] = {"search": None, "none": None}
"""Searches by name; ``search`` is :func:`best_order`, and with ``none`` microbatches stay as planned."""
BATCH = 128
"""Orders evaluated at once, which on arrays takes hardly longer than one."""
ROUNDS = 20
"""Most rounds of the search."""
KEPT = 4
"""Number of orders from which the next round starts."""
JOINED = 8
"""Number of improving moves that are tried together in the next round."""
ROUNDING = 1e-9
"""Share of the step's time below which a difference is no gain."""


def register_reordering(name: str, search: Search) -> None:
    """Make a search known by its name to ``BalanceConfig(reorder=name)``.

    Raises:
        ConfigError: another search has this name.
    """
    register(SEARCHES, name, search, "balance: reordering", ConfigError)


def best_order(
    times: Times,
    forward: Float64[np.ndarray, "ranks microbatches"],
    backward: Float64[np.ndarray, "ranks microbatches"],
) -> Int64[np.ndarray, "microbatches"]:
    """Search for a fast order: ``0 .. l - 1``, as planned, or one that takes less time.

    If all orders can be tried (up to 6 microbatches), the result is the best of all. Otherwise the planned one and
    orders sorted by size are evaluated, then ``ROUNDS`` rounds of ``BATCH`` changed orders each: two microbatches are
    swapped, or one or a run of them is moved; changes that improved an order are tried together.

    The work does not depend on the clock, so every rank finds the same order (law 7): ``times`` is called at most
    ``ROUNDS + 1`` times. With a replayed 1F1B schedule that takes about 15 ms for 8 ranks and 32 microbatches, and
    90 ms for 16 and 128.

    Args:
        times: function that returns the time of the step with each order; equal on all ranks.
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
    """Sort by time on each rank and on all: rising, falling, small at both ends."""
    both, orders = forward + backward, []
    for sizes in np.unique(np.concatenate([both.sum(axis=0)[None], both]), axis=0):
        ascending = np.argsort(sizes, kind="stable")
        orders += [ascending, ascending[::-1], np.concatenate([ascending[::2], ascending[1::2][::-1]])]
    return orders


def _moves(rng: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Draw changes of an order, int64 ``[count, length]``: position ``k`` of the new order takes the entry at
    ``move[k]``.

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
    goal = np.where(b > a, b + 0.3, b - 0.6)  # right after, or right before, the entry at b
    key = np.where(runs, goal[:, None] + (position - a[:, None]) * (0.3 / length), key)
    return np.argsort(key, axis=1, kind="stable")


def _composed(order: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return the orders after two moves, after three, and so on; int64 ``[max(0, moves - 1), l]``."""
    orders = np.empty((max(0, len(moves) - 1), len(order)), dtype=np.int64)
    for i, move in enumerate(moves):
        order = order[move]
        if i:
            orders[i - 1] = order
    return orders


def _fittest(orders: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``KEPT`` fastest orders of different times, fastest first; of equally fast ones the earlier one."""
    _, first = np.unique(times, return_index=True)
    return orders[first[:KEPT]], times[first[:KEPT]]
