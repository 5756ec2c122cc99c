"""How many ranks each group of modules gets, as a convex problem: DistTrain's allocation for any mixture of placements.

For given degrees of tensor parallelism, ``dp`` instances of the language model and K microbatches, a step takes

    T = C / (dp K) + sum over groups of A_g / (K n_g) + (K - 1) / K * max over groups of B_g / n_g

with n_g ranks of group g, its rank-seconds B_g, those A_g of them that are not the language model's, and the seconds C
of the language model on one instance: the first microbatch goes through all modules, the others follow at the pace of
the slowest group (DistTrain, arXiv:2408.04275, section 4.2, equations 1 and 2, for groups of modules that share ranks).
It is convex in n. Pipelines follow: the language model has n_g / (tp dp) pipeline ranks. Where that is to be 1, n_g is
given. Parameters are gathered, and gradients summed, in time that is proportional to 1 / n_g, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.space import Degrees, Partition

EPSILON = 1e-6
"""Room that a solver needs where ranks are all given."""
CHUNK = 48
"""Problems that are solved as one."""


class Choice(NamedTuple):
    """What is decided before ranks are allocated."""

    partition: Partition
    tp: Mapping[str, int]
    dp: int
    """Instances of the language model."""
    microbatches: int
    pipelined: bool
    """Whether the language model has several pipeline ranks."""
    recomputed: bool
    """Whether it keeps no activations, because they would not fit."""


@dataclass(frozen=True)
class Allocation:
    """Ranks of every group where they need not be whole numbers, and the step's seconds then: no others are less."""

    choice: Choice
    ranks: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class _Problems:
    """Many choices with one partition."""

    choices: list[Choice]
    constant: Float64[np.ndarray, "choices"]
    first: Float64[np.ndarray, "choices groups"]
    """A_g / K."""
    steady: Float64[np.ndarray, "choices groups"]
    """B_g (K - 1) / K."""
    least: Float64[np.ndarray, "choices groups"]
    most: Float64[np.ndarray, "choices groups"]

    def bounds(self, ranks: int) -> Float64[np.ndarray, "choices"]:
        """Seconds that no allocation of so many ranks is below; infinite where there is none."""
        seconds = self.constant + (np.sqrt(self.first).sum(axis=1) ** 2 + self.steady.sum(axis=1)) / ranks
        return np.where(self.least.sum(axis=1) <= ranks, seconds, np.inf)


def allocate(
    estimates: Estimates,
    partitions: Sequence[Partition],
    language_model: str,
    tp: Mapping[str, Sequence[int]],
    dp: Sequence[int],
    microbatches: Mapping[int, Sequence[int]],
    ranks: int,
    *,
    most_instances: Mapping[str, int],
    within: float = 1.05,
) -> list[Allocation]:
    """Solve the problem for all choices that can be within a factor of the best; the best comes first.

    Choices whose bound is above that of the best found are not solved, so nothing is lost.

    Args:
        tp: module -> degrees to try.
        dp: instances of the language model to try.
        microbatches: for each of these, the numbers to try.
        most_instances: module -> most instances that can all have work.
    """
    problems = [
        made
        for partition in partitions
        if (made := _problems(estimates, partition, language_model, tp, dp, microbatches, most_instances)) is not None
    ]
    bounds = np.concatenate([p.bounds(ranks) for p in problems])
    owner = np.concatenate([np.full(len(p.choices), i) for i, p in enumerate(problems)])
    place = np.concatenate([np.arange(len(p.choices)) for p in problems])
    found: list[Allocation] = []
    best = np.inf
    order = np.argsort(bounds, kind="stable")
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        chunk = chunk[np.isfinite(bounds[chunk]) & (bounds[chunk] <= best * within)]
        if not len(chunk):
            break
        for i in np.unique(owner[chunk]):
            found += _solve(problems[i], place[chunk[owner[chunk] == i]], ranks)
        best = min((a.seconds for a in found), default=np.inf)
    found = [a for a in found if a.seconds <= best * within]
    return sorted(found, key=lambda a: a.seconds)


def _problems(
    estimates: Estimates,
    partition: Partition,
    language_model: str,
    tp: Mapping[str, Sequence[int]],
    dp: Sequence[int],
    microbatches: Mapping[int, Sequence[int]],
    most_instances: Mapping[str, int],
) -> _Problems | None:
    choices, rows = [], []
    home = next(g for g, group in enumerate(partition) if language_model in group)
    others = [[m for m in group if m != language_model] for group in partition]
    for degrees in product(*tp.values()):
        chosen = dict(zip(tp, degrees, strict=True))
        seconds = {m: n * estimates.work(m, n).total for m, n in chosen.items() if m != language_model}
        first = np.array([sum(seconds[m] for m in group) for group in others])
        least = np.array([max([chosen[m] for m in group], default=0) for group in others], np.float64)
        least = np.maximum(least, [sum(map(estimates.least_ranks, group)) for group in others])
        most = np.array([min([chosen[m] * most_instances[m] for m in g], default=np.inf) for g in others])
        for instances, count, pipelined in _counts(dp, microbatches):
            one = chosen[language_model] * instances
            given = estimates.fitting(language_model, Degrees(chosen[language_model], 1, 1, instances), count)
            if given is None:
                continue
            alone = estimates.work(language_model, given.tp, given.recomputed).total
            steady, beside, fewest, largest, more = first.copy(), first / count, least.copy(), most.copy(), 0.0
            steady[home] += given.tp * alone
            if pipelined:
                room = estimates.memory - estimates.activations(language_model, given, count)
                needed = least[home] + estimates.least_ranks(language_model, instances)
                fewest[home] = max(2 * one, needed * estimates.memory / room)
                largest[home] = min(largest[home], one * estimates.blocks(language_model))
                beside[home] += estimates.synchronized_ranks(language_model, given.tp, instances)
            else:
                fewest[home], largest[home] = max(least[home], one), min(most[home], one)
                if estimates.bytes(language_model, given, count) > estimates.memory:
                    continue
                more = estimates.synchronized(language_model, given, count)
            if (fewest <= largest).all():
                choices.append(Choice(partition, chosen, instances, count, pipelined, given.recomputed))
                constant = alone / (instances * count) + more
                rows.append((constant, beside, steady * (count - 1) / count, fewest, largest))
    if not choices:
        return None
    constants, *columns = zip(*rows, strict=True)
    return _Problems(choices, np.array(constants), *(np.array(column) for column in columns))


def _counts(dp: Sequence[int], microbatches: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int, bool]]:
    return (
        (instances, n, pipelined) for instances in dp for n in microbatches[instances] for pipelined in (False, True)
    )


def _solve(problems: _Problems, numbers: np.ndarray, ranks: int) -> list[Allocation]:
    """Some of the problems, as one: they have no variable in common, so the sum of their optima is its optimum."""
    import cvxpy  # slow to import

    cp: Any = cvxpy

    first, steady, least, most = (x[numbers] for x in (problems.first, problems.steady, problems.least, problems.most))
    if first.shape[1] == 1:
        n = np.minimum(most, float(ranks))
    else:
        share = cp.Variable(first.shape, pos=True)  # of all ranks: of order 1, as solvers want it
        slowest = cp.Variable(len(numbers))
        inverse = cp.inv_pos(share)
        seconds = cp.sum(cp.multiply(first / ranks, inverse)) + cp.sum(slowest)
        limits = [
            cp.multiply(steady / ranks, inverse) <= cp.reshape(slowest, (len(numbers), 1), order="C"),
            cp.sum(share, axis=1) <= 1 + EPSILON,
            share >= least / ranks,
            share <= np.minimum(most / ranks, 1.0),
        ]
        cp.Problem(cp.Minimize(seconds), limits).solve(solver=cp.CLARABEL)
        n = np.asarray(share.value) * ranks
    total = problems.constant[numbers] + (first / n).sum(axis=1) + (steady / n).max(axis=1)
    return [Allocation(problems.choices[k], tuple(map(float, n[i])), float(total[i])) for i, k in enumerate(numbers)]
