"""Packing: which microbatch each sample is in, and with which microbatch each item is computed. Pure.

Samples are packed by cost, not by length alone, so that attention's quadratic part counts. A microbatch is what all
instances of the first language model compute at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import Cost, OverLimit, balance, loads

LEVEL_WITHIN = 1.01
"""Most that the language model's time may grow so that microbatches are level for the other modules too."""

FULL_BINS = range(1, 9)
"""Numbers of samples in a bin for which the samples are counted that are so long that no more fit into a budget."""


@dataclass(frozen=True)
class Packed:
    """The microbatch and the instance of each sample."""

    microbatch: Int64[np.ndarray, "samples"]
    """Microbatch of each sample."""
    instance: Int64[np.ndarray, "samples"]
    """Instance of the first language model that computes each sample."""
    count: int
    """Number of microbatches."""

    def reordered(self, order: Int64[np.ndarray, "microbatches"]) -> Packed:
        """Renumber the microbatches so that ``order[k]`` becomes number ``k``."""
        if not np.array_equal(np.sort(order), np.arange(self.count)):
            raise ValueError(f"{order.tolist()} is no order of {self.count} microbatches")
        return replace(self, microbatch=np.argsort(order)[self.microbatch])


@lru_cache(8)
def deal(samples: int, instances: int, microbatches: int) -> Packed:
    """Deal samples as they come: ``s`` goes to microbatch ``s mod M``, and there to one instance after the other."""
    number = np.arange(samples, dtype=np.int64)
    return Packed(number % microbatches, number // microbatches % instances, microbatches)


def pack(
    tokens: Int64[np.ndarray, "samples"],
    instances: int,
    microbatches: int | None,
    cost: Cost,
    *,
    module: str,
    policy: str | None = "auto",
    budget: int | None = None,
    other_costs: Float64[np.ndarray, "samples"] | None = None,
    squares: Float64[np.ndarray, "samples"] | None = None,
) -> Packed:
    """Pack samples into microbatches and instances of a language model.

    All bins (a microbatch and an instance) are balanced at once, so that samples move to any place in the step with
    room. Bins of nearly equal cost are then joined to microbatches that cost the other modules nearly equal work; if
    bins are too unequal for that, each microbatch gets bins as equal as possible.

    Args:
        microbatches: number of microbatches, or more if these cannot keep the budget; None: as few as can.
        instances: number of the language model's instances.
        cost: cost of the language model.
        module: name of the language model, for messages.
        policy: policy of :func:`hetero_strategy.plan.balance.balance`; None: samples are dealt in turn.
        budget: most tokens of an instance in a microbatch; None: any number.
        other_costs: cost of each sample in other modules; None: nothing.
        squares: see :meth:`Cost.alone`.
    """
    if budget is not None and len(tokens) and int(tokens.max()) > budget:
        raise ConfigError(
            f"a sample has {int(tokens.max())} tokens, more than the budget of {budget} of '{module}' for an instance"
            f" and microbatch; raise the budget to at least {int(tokens.max())}, or leave longer samples out"
        )
    into = partial(
        _into, tokens, instances, cost, module=module, policy=policy, other_costs=other_costs, budget=budget,
        squares=squares,
    )  # fmt: skip
    if budget is not None:
        return _fewest(into, tokens, instances, budget, microbatches or 1)
    if microbatches is None:
        raise ConfigError(
            f"the number of microbatches is to follow from a budget, but '{module}' has none; give"
            f" budget={{{module}: tokens}}, or a number of microbatches"
        )
    return into(microbatches)


def _fewest(into: Callable[[int], Packed], tokens: np.ndarray, instances: int, budget: int, least: int) -> Packed:
    """Pack into as few microbatches as the budget allows, at least so many; ``into`` packs into a number of them."""
    bins = -(-int(tokens.sum()) // budget)
    for most in FULL_BINS:  # bound from samples of which more do not fit into a bin
        bins = max(bins, -(-int(((most + 1) * tokens > budget).sum()) // most))
    first = max(least, -(-bins // instances))
    for count in range(first, max(first, len(tokens)) + 1):
        with suppress(OverLimit):  # whole samples leave gaps: one microbatch more
            return into(count)
    return deal(len(tokens), instances, max(least, len(tokens)))  # a sample at a time: each of them fits


def _into(
    tokens: np.ndarray,
    instances: int,
    cost: Cost,
    microbatches: int,
    *,
    module: str,
    policy: str | None,
    other_costs: np.ndarray | None,
    budget: int | None,
    squares: np.ndarray | None,
) -> Packed:
    """Pack into this number of microbatches; raise OverLimit if they do not keep the budget. See :func:`pack`."""
    if policy is None:
        dealt = deal(len(tokens), instances, microbatches)
        most = int(np.bincount(dealt.microbatch * instances + dealt.instance, weights=tokens, minlength=1).max())
        if budget is not None and most > budget:
            raise OverLimit(f"as sampled, an instance of '{module}' has {most} tokens in a microbatch, not {budget}")
        return dealt
    bins = instances * microbatches
    try:
        bin_of = balance(tokens, bins, cost, policy=policy, limit=budget, squares=squares)
    except ConfigError as error:
        raise type(error)(f"'{module}', {microbatches} microbatches x {instances} instances: {error}") from None
    if microbatches == 1:
        return Packed(np.zeros(len(tokens), dtype=np.int64), bin_of, 1)
    load = loads(tokens, bin_of, bins, cost, squares)
    others = np.zeros(bins) if other_costs is None else np.bincount(bin_of, weights=other_costs, minlength=bins)
    number, instance = _together(load, others, instances, microbatches)
    return Packed(number[bin_of], instance[bin_of], microbatches)


def _together(
    load: np.ndarray, other_costs: np.ndarray, instances: int, microbatches: int
) -> tuple[np.ndarray, np.ndarray]:
    """Join bins to microbatches, ``instances`` in each; return the microbatch and the instance of each bin."""
    ranked = np.argsort(-load, kind="stable")
    number = np.empty(len(load), dtype=np.int64)
    number[ranked] = np.arange(len(load)) // instances
    time = np.maximum.reduceat(load[ranked], np.arange(0, len(load), instances)).sum()
    level = levelled(other_costs, instances, microbatches)
    slowest = np.zeros(microbatches)
    np.maximum.at(slowest, level, load)
    if slowest.sum() <= LEVEL_WITHIN * time:
        number = level
    instance = np.empty(len(load), dtype=np.int64)
    instance[ragged.argsort_small(number)] = np.arange(len(load)) % instances
    return number, instance


def levelled(other_costs: Float64[np.ndarray, "bins"], instances: int, microbatches: int) -> Int64[np.ndarray, "bins"]:
    """Find the microbatch of each of ``instances * microbatches`` bins, so that microbatches cost nearly equal work.

    The next largest bins go to the microbatches with the least cost so far, one to each.
    """
    ranked = np.argsort(-other_costs, kind="stable").reshape(instances, microbatches)
    total, number = np.zeros(microbatches), np.empty(len(other_costs), dtype=np.int64)
    for bins in ranked:
        poorest = np.argsort(total, kind="stable")
        number[bins] = poorest
        total[poorest] += other_costs[bins]
    return number


def regroup(
    of_step: Int64[np.ndarray, "units"], rows: Int64[np.ndarray, "units"], microbatches: int, budget: int
) -> tuple[Int64[np.ndarray, "units"], int]:
    """Make microbatches of about ``budget`` rows by joining neighbouring step microbatches and splitting large ones.

    Args:
        of_step: step microbatch of each unit.
        microbatches: number of the step's microbatches.
        budget: rows of one microbatch over all instances.

    Returns:
        The new microbatch of each unit, and how many there are (at least 1).
    """
    group = np.zeros(len(of_step), dtype=np.int64)
    totals = np.bincount(of_step, weights=rows, minlength=microbatches)
    number, filled = 0, 0.0
    for microbatch in range(microbatches):
        units = np.flatnonzero(of_step == microbatch)
        if not len(units):
            continue
        if filled and filled + totals[microbatch] > budget:
            number, filled = number + 1, 0.0
        count = max(1, -(-int(totals[microbatch]) // budget))
        used, dense = np.unique(_piece(rows[units], count), return_inverse=True)
        group[units] = number + dense
        number, filled = number + len(used) - 1, (filled + totals[microbatch] if len(used) == 1 else float(budget))
    return group, number + 1


def pieces(
    of_step: Int64[np.ndarray, "units"], costs: Float64[np.ndarray, "units"], count: int
) -> tuple[Int64[np.ndarray, "units"], int]:
    """Make at most ``count`` microbatches of equal cost, in the order of the step's.

    An item may be computed before or after the rest of its sample's microbatch, but never after an item of a later one.

    Returns:
        The new microbatch of each unit, and how many there are (at least 1).
    """
    order = ragged.argsort_small(of_step)
    used, dense = np.unique(_piece(costs[order], count), return_inverse=True)
    group = np.empty(len(of_step), dtype=np.int64)
    group[order] = dense
    return group, max(1, len(used))


def _piece(costs: np.ndarray, count: int) -> np.ndarray:
    """Cut the running sum of costs into ``count`` equal pieces; return the piece that holds the middle of each unit."""
    total = max(float(costs.sum()), np.finfo(np.float64).tiny)
    return np.minimum(((np.cumsum(costs) - costs / 2) * count / total).astype(np.int64), count - 1)
