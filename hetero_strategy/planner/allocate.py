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

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from hetero_strategy.errors import require
from hetero_strategy.planner.areas import Limits, Where, all_wheres, limits
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.space import Degrees, Partition

EPSILON = 1e-6
"""Room that a solver needs where ranks are all given."""
CHUNK = 16
"""Choices of each partition that are solved as one problem."""


class Choice(NamedTuple):
    """What is decided before ranks are allocated."""

    partition: Partition
    where: Where
    tp: Mapping[str, int]
    dp: int
    """Instances of the language model."""
    microbatches: int
    pipelined: bool
    """Whether the language model has several pipeline ranks."""
    recomputed: int
    """Whether it keeps no activations, because they would not fit."""


@dataclass(frozen=True)
class Allocation:
    """Ranks of every group where they need not be whole numbers, and the step's seconds then: no others are less."""

    choice: Choice
    ranks: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class _LanguageModel:
    """Ways to lay out the language model with one degree of tensor parallelism."""

    tp: int
    ways: list[tuple[int, int, bool, int]]
    """dp, microbatches, whether pipelined, whether recomputed."""
    microbatches: Float64[np.ndarray, "ways"]
    pipelined: Bool[np.ndarray, "ways"]
    alone: Float64[np.ndarray, "ways"]
    """Seconds of all its work on one instance."""
    constant: Float64[np.ndarray, "ways"]
    """Seconds of a step that do not depend on ranks."""
    synchronized: Float64[np.ndarray, "ways"]
    """Rank-seconds of gathering and summing, where pipelined."""
    least: Float64[np.ndarray, "ways"]
    """Fewest ranks to run it."""
    holds: Float64[np.ndarray, "ways"]
    """Fewest ranks to hold it, where pipelined."""
    room: Float64[np.ndarray, "ways"]
    """Share of the memory that its activations leave."""
    most: Float64[np.ndarray, "ways"]


@dataclass(frozen=True, eq=False)
class _Problems:
    """Choices of one partition on certain pools and certain degrees of tensor parallelism."""

    partition: Partition
    where: Where
    limits: Limits
    roof: Float64[np.ndarray, "groups"]
    """Ranks of each group's pools."""
    tp: Mapping[str, int]
    ways: list[tuple[int, int, bool, int]]
    constant: Float64[np.ndarray, "ways"]
    first: Float64[np.ndarray, "ways groups"]
    """A_g / K."""
    steady: Float64[np.ndarray, "ways groups"]
    """B_g (K - 1) / K."""
    least: Float64[np.ndarray, "ways groups"]
    most: Float64[np.ndarray, "ways groups"]

    def bounds(self) -> Float64[np.ndarray, "ways"]:
        """Seconds that no allocation is below; infinite where there is none."""
        bounds = np.where((self.least <= self.most).all(axis=1), 0.0, np.inf)
        for groups, ranks in self.limits:
            others = np.delete(np.arange(len(self.partition)), groups)
            first, steady, least = (n[:, groups] for n in (self.first, self.steady, self.least))
            alone = (self.first[:, others] / self.roof[others]).sum(axis=1)
            seconds = (np.sqrt(first).sum(axis=1) ** 2 + steady.sum(axis=1)) / ranks + alone
            fits = least.sum(axis=1) <= ranks
            bounds = np.maximum(bounds, np.where(fits, self.constant + seconds, np.inf))
        return bounds

    def choice(self, way: int) -> Choice:
        return Choice(self.partition, self.where, self.tp, *self.ways[way])


def allocate(
    estimates: Estimates,
    partitions: Sequence[Partition],
    language_model: str,
    tp: Mapping[str, Sequence[int]],
    dp: Sequence[int],
    microbatches: Mapping[int, Sequence[int]],
    *,
    most_instances: Mapping[str, int],
    within: float = 1.05,
    most: int | None = None,
) -> list[Allocation]:
    """Solve the problem for all choices that can be within a factor of the best of their partition and pools.

    Choices whose bound is above that of the best found are not solved, so nothing is lost. Partition by partition, the
    best comes first. On several pools groups are allocated ranks of one pool or of neighbouring ones, in all ways.

    Args:
        tp: module -> degrees to try, where nodes have a multiple of so many ranks.
        dp: instances of the language model to try.
        microbatches: for each of these, the numbers to try.
        most_instances: module -> most instances that can all have work.
        most: allocations of a partition that are wanted, the best; None: all within the factor.
    """
    require("cvxpy", "planner", "planner: ranks are allocated by convex programs")
    laid: dict[range, list[_LanguageModel]] = {}
    queues: list[_Queue] = []
    for partition in partitions:
        problems: dict[frozenset[int], list[_Problems]] = {}
        for where in all_wheres(len(partition), len(estimates.cluster.pools)):
            parts = {m: estimates.of(pools) for group, pools in zip(partition, where, strict=True) for m in group}
            fits = {m: [t for t in tp[m] if part.cluster.ranks_per_node % t == 0] for m, part in parts.items()}
            home = next(pools for group, pools in zip(partition, where, strict=True) if language_model in group)
            if home not in laid:
                ways = _language_models(parts[language_model], language_model, fits[language_model], dp, microbatches)
                laid[home] = list(ways)
            others = [m for m in tp if m != language_model]
            room = limits(where, estimates.cluster), np.array([len(estimates.cluster.ranks_of(w)) for w in where])
            problems.setdefault(frozenset(chain(*where)), []).extend(
                _problems(parts, partition, where, room, language_model, way, dict(zip(others, n, strict=True)),
                          most_instances)
                for way in laid[home]
                for n in product(*(fits[m] for m in others))
            )  # fmt: skip
        queues += map(_Queue, problems.values())
    while drawn := [(queue, *problem) for queue in queues for problem in queue.next(within, most)]:
        for shared in dict.fromkeys(problem.limits for _, problem, _ in drawn):
            mine = [(queue, problem, way) for queue, problem, way in drawn if problem.limits == shared]
            solved = _solve([(problem, way) for _, problem, way in mine], estimates.cluster.ranks)
            for (queue, _, _), allocation in zip(mine, solved, strict=True):
                queue.found.append(allocation)
    return [a for queue in queues for a in queue.best(within)[:most]]


class _Queue:
    """Choices of one partition on the same pools, by what they cannot be below."""

    def __init__(self, problems: list[_Problems]) -> None:
        self.found: list[Allocation] = []
        bounds = [p.bounds() for p in problems]
        every = np.concatenate([*bounds, np.empty(0)])
        owner = np.repeat(np.arange(len(problems)), [len(b) for b in bounds])
        order = np.argsort(every, kind="stable")
        self._order = order[np.isfinite(every[order])]
        self._every, self._owner, self._problems = every, owner, problems
        self._first = np.concatenate([[0], np.cumsum([len(b) for b in bounds])])
        self._done = 0

    def next(self, within: float, most: int | None) -> list[tuple[_Problems, int]]:
        """Some that may be within a factor of the best found, and among so many of the best."""
        found = sorted(a.seconds for a in self.found)
        limit = found[0] * within if found else np.inf
        if most is not None and len(found) >= most:
            limit = min(limit, found[most - 1])
        numbers = self._order[self._done : self._done + CHUNK]
        numbers = numbers[self._every[numbers] <= limit]
        self._done += len(numbers)
        return [(self._problems[self._owner[n]], int(n - self._first[self._owner[n]])) for n in numbers]

    def best(self, within: float) -> list[Allocation]:
        """Those within a factor of the best, the best first."""
        best = min((a.seconds for a in self.found), default=0.0)
        return sorted((a for a in self.found if a.seconds <= best * within), key=lambda a: a.seconds)


def _language_models(
    estimates: Estimates, name: str, tp: Sequence[int], dp: Sequence[int], microbatches: Mapping[int, Sequence[int]]
) -> Iterator[_LanguageModel]:
    blocks = estimates.blocks(name)
    for degree in tp:
        ways, rows = [], []
        for instances in dp:
            needed, one = estimates.least_ranks(name, instances), degree * instances
            for count in microbatches[instances]:
                given = estimates.fitting(name, Degrees(degree, 1, 1, instances), count)
                if given is None:
                    continue
                alone = estimates.work(name, degree, given.recomputed).total
                first = alone / (instances * count)
                room = 1 - estimates.activations(name, given, count) / estimates.memory
                if blocks > 1:
                    waits = estimates.synchronized_ranks(name, degree, instances, count)
                    ways.append((instances, count, True, given.recomputed))
                    rows.append((count, 1, alone, first, waits, 2 * one, needed / room, room, one * blocks))
                if estimates.bytes(name, given, count) <= estimates.memory:
                    ways.append((instances, count, False, given.recomputed))
                    more = estimates.synchronized(name, given, count)
                    rows.append((count, 0, alone, first + more, 0.0, one, 0.0, 1.0, one))
        if ways:
            columns = np.array(rows, np.float64).T
            yield _LanguageModel(degree, ways, columns[0], columns[1] > 0, *columns[2:])


def _problems(
    estimates: Mapping[str, Estimates],
    partition: Partition,
    where: Where,
    room: tuple[Limits, Float64[np.ndarray, "groups"]],
    name: str,
    language_model: _LanguageModel,
    tp: Mapping[str, int],
    most_instances: Mapping[str, int],
) -> _Problems:
    """Problems of one partition on given pools, with given degrees of the language model's and of all other modules."""
    others = [[m for m in group if m != name] for group in partition]
    home = next(g for g, group in enumerate(partition) if name in group)
    seconds = {m: n * estimates[m].work(m, n).total for m, n in tp.items()}
    work = np.array([sum(seconds[m] for m in group) for group in others])
    held = np.array([sum(estimates[m].least_ranks(m) for m in group) for group in others], np.float64)
    widest = np.array([max([tp[m] for m in group], default=0) for group in others], np.float64)
    fits = np.array([min([tp[m] * most_instances[m] for m in group], default=np.inf) for group in others])
    model, count = language_model, language_model.microbatches[:, None]
    shape = (len(model.ways), len(partition))
    first, steady = np.broadcast_to(work, shape) / count, np.broadcast_to(work, shape).copy()
    least, most = (np.broadcast_to(n, shape).copy() for n in (np.maximum(widest, held), fits))
    first[:, home] += model.synchronized
    steady[:, home] += model.tp * model.alone
    needed = np.maximum(model.least, model.holds + held[home] / model.room)
    least[:, home], most[:, home] = np.maximum(least[:, home], needed), np.minimum(most[:, home], model.most)
    degrees = {m: model.tp if m == name else tp[m] for group in partition for m in group}
    steady = steady * (count - 1) / count
    return _Problems(partition, where, *room, degrees, model.ways, model.constant, first, steady, least, most)


def _solve(problems: Sequence[tuple[_Problems, int]], ranks: int) -> list[Allocation]:
    """Some problems of the same limits, as one: they share no variable, so the sum of their optima is its optimum."""
    names = ("first", "steady", "least", "most")
    first, steady, least, most = (np.stack([getattr(p, name)[way] for p, way in problems]) for name in names)
    n = np.minimum(most, np.stack([p.roof for p, _ in problems]))
    shared = tuple((groups, there / ranks) for groups, there in problems[0][0].limits if len(groups) > 1)
    if shared:
        values = first / ranks, steady / ranks, least / ranks, n / ranks
        chunks = [_shares(shared, *(v[i : i + CHUNK] for v in values)) for i in range(0, len(first), CHUNK)]
        n = np.concatenate(chunks) * ranks
    total = np.array([p.constant[way] for p, way in problems]) + (first / n).sum(axis=1) + (steady / n).max(axis=1)
    return [
        Allocation(p.choice(way), tuple(map(float, row)), float(t))
        for (p, way), row, t in zip(problems, n, total, strict=True)
    ]


def _shares(
    limits: tuple[tuple[tuple[int, ...], float], ...], *values: Float64[np.ndarray, "some groups"]
) -> Float64[np.ndarray, "some groups"]:
    """Shares of all ranks: of order 1, as solvers want it."""
    count, groups = values[0].shape
    program, parameters, share = _program(CHUNK, groups, limits)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.value = value[np.arange(CHUNK) % count]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")  # shares are rounded anyway
        program.solve(solver="CLARABEL")
    found: np.ndarray = share.value[:count]
    return found


@lru_cache(maxsize=64)
def _program(count: int, groups: int, shared: tuple[tuple[tuple[int, ...], float], ...]) -> tuple[Any, list[Any], Any]:
    """A program of so many problems, compiled once for all values of its parameters; these; and shares of ranks.

    Args:
        shared: groups, and the share of all ranks that they have together.
    """
    import cvxpy  # slow to import

    cp: Any = cvxpy
    shape = (count, groups)
    first, steady, least, most = (parameters := [cp.Parameter(shape, nonneg=True) for _ in range(4)])
    share, slowest = cp.Variable(shape, pos=True), cp.Variable((count, 1))
    inverse = cp.inv_pos(share)
    seconds = cp.sum(cp.multiply(first, inverse)) + cp.sum(slowest)
    limits = [
        cp.multiply(steady, inverse) <= slowest,
        *(cp.sum(share[:, list(members)], axis=1) <= there + EPSILON for members, there in shared),
        share >= least,
        share <= most,
    ]
    return cp.Problem(cp.Minimize(seconds), limits), parameters, share
