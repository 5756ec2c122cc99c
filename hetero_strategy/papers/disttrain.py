"""Algorithms of DistTrain (arXiv:2408.04275), as published.

Importing this file registers ``interval`` for ``BalanceConfig(reorder=...)``.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import require
from hetero_strategy.plan.reorder import Times, register_reordering


class Unit(NamedTuple):
    """A parallelism unit with one degree of tensor parallelism: encoder, backbone or generator (section 4.2)."""

    tp: int
    seconds: float
    """C(TP): forward and backward of one sample through the whole module."""
    weights: float
    """P: bytes of parameters and gradients."""
    states: float
    """S: bytes of optimizer states, over which ZeRO-1 shards them."""
    activations: float
    """L: bytes that one microbatch keeps in the whole module, without tensor parallelism."""


class Resources(NamedTuple):
    """An allocation: GPUs of every unit, not necessarily whole numbers, and the seconds of a step with them."""

    seconds: float
    tp: Mapping[str, int]
    dp: int
    """Instances of the backbone."""
    gpus: Mapping[str, float]


def allocate_resources(
    units: Mapping[str, Sequence[Unit]],
    backbone: str,
    dp: Iterable[int],
    samples: int,
    gpus: int,
    memory: float,
) -> Resources | None:
    """Return the allocation with the shortest step (algorithm 1); None: nothing fits into memory.

    All degrees of tensor parallelism of all units and all numbers of instances are enumerated, and a convex program is
    solved for each.

    Args:
        units: module -> its units, one for each degree of tensor parallelism to try.
        dp: numbers of instances of the backbone to try, factors of ``samples``.
        samples: size of the global batch (BS).
        gpus: number of GPUs of the cluster (N).
        memory: bytes of memory of a GPU.
    """
    best = None
    for chosen, instances in product(product(*units.values()), dp):
        every = dict(zip(units, chosen, strict=True))
        allocation = _solve(every, backbone, instances, samples / instances, gpus, memory)
        if allocation is not None and (best is None or allocation.seconds < best.seconds):
            best = allocation
    return best


def _solve(
    units: Mapping[str, Unit], backbone: str, dp: int, microbatches: float, gpus: int, memory: float
) -> Resources | None:
    """Minimize warm-up and steady phase (equations 1 and 2) over the GPUs of all units.

    With x GPUs a unit takes ``DP_lm TP / x C(TP)`` seconds for a microbatch on each stage. A unit's share of the
    warm-up equals these seconds, except for the backbone, whose microbatch of one sample takes C(TP) whatever its
    pipeline. The backbone holds ``DP_lm P / x + S / x + L / TP`` bytes on a GPU, as its first stage keeps a microbatch
    for each of its stages; encoders and generators have one stage and hold ``P / TP + S / x + DP_lm L / x``.
    """
    names = list(units)
    work = np.array([dp * unit.tp * unit.seconds for unit in units.values()])
    home = np.array([name == backbone for name in names])
    each = [
        (dp * u.weights + u.states, u.activations / u.tp) if name == backbone else
        (u.states + dp * u.activations, u.weights / u.tp) for name, u in units.items()
    ]  # fmt: skip
    shared, fixed = np.array(each).T
    if (fixed >= memory).any():
        return None
    parts = np.array([u.tp * (dp if name == backbone else 1) for name, u in units.items()])
    least = np.maximum(parts, shared / (memory - fixed)) / gpus
    if least.sum() > 1:
        return None
    program, parameters, share = _program(len(units))
    values = np.where(home, 0.0, work) / gpus, work * (microbatches - 1) / gpus, least
    for parameter, value in zip(parameters, values, strict=True):
        parameter.value = value
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        program.solve(solver="CLARABEL", warm_start=False)
    shares = np.maximum(share.value, least)
    seconds = units[backbone].seconds + (values[0] / shares).sum() + (values[1] / shares).max()
    chosen = {name: unit.tp for name, unit in units.items()}
    return Resources(float(seconds), chosen, dp, dict(zip(names, (shares * gpus).tolist(), strict=True)))


@lru_cache
def _program(units: int) -> tuple[Any, list[Any], Any]:
    """Return the program of so many units, its parameters, and its variable: the shares of all GPUs."""
    require("cvxpy", "papers", "papers.disttrain: GPUs are allocated by convex programs")
    import cvxpy  # slow to import

    cp: Any = cvxpy
    first, steady, least = (parameters := [cp.Parameter(units, nonneg=True) for _ in range(3)])
    share, slowest = cp.Variable(units, pos=True), cp.Variable()
    inverse = cp.inv_pos(share)
    limits = [cp.multiply(steady, inverse) <= slowest, cp.sum(share) <= 1, share >= least]
    return cp.Problem(cp.Minimize(first @ inverse + slowest), limits), parameters, share


def by_intervals(
    times: Times,
    forward: Float64[np.ndarray, "ranks microbatches"],
    backward: Float64[np.ndarray, "ranks microbatches"],
) -> Int64[np.ndarray, "microbatches"]:
    """Return :func:`interval_order`; the paper does not judge orders by their times."""
    return interval_order(forward, backward)


def interval_order(
    forward: Float64[np.ndarray, "ranks microbatches"], backward: Float64[np.ndarray, "ranks microbatches"]
) -> Int64[np.ndarray, "microbatches"]:
    """Order microbatches for 1F1B by DistTrain's inter-microbatch reordering (section 5.2, algorithm 3).

    The smallest microbatch comes first and the ``p - 1`` next smaller ones come last. Between them, the gaps that the
    first rank's forwards fill (intervals) are computed with the recurrence of 1F1B over the microbatches placed so far.
    Each gap gets the microbatch with the nearest forward. The first interval gets ``p - 1`` microbatches, each the
    nearest to an equal share of the remaining gap. Time ``O(l p)``, and ``l`` cheap removals from a sorted list.

    The paper loops over ``l - p`` intervals; here the loop ends when no microbatch is left, after ``l - 2p + 2``, as
    the first takes ``p - 1``. The paper does not define the size of a microbatch: here it is the time on all ranks. If
    a rank has several stages (interleaved 1F1B), all intervals that a microbatch fills count as one.
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
        """Return the time until the first rank's backward after its next forward may start (the paper's GETINTERVAL).

        With one microbatch placed, the interval is the time between its forward and its backward if it were alone. With
        more, but fewer than ``p``, the interval cannot be known.
        """
        if len(self.order) == 1:
            only = self.order[0]
            return sum(self._forward[only][1:]) + sum(self._backward[only][1:])
        return max(0.0, self._back[1] - self._back[0])


register_reordering("interval", by_intervals)
