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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

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
    cp: int = 1
    """Its context-parallel ranks."""


@dataclass(frozen=True)
class Allocation:
    """Ranks of every group where they need not be whole numbers, and the step's seconds then: no others are less."""

    choice: Choice
    ranks: tuple[float, ...]
    seconds: float


class _Way(NamedTuple):
    """Of the language model."""

    tp: int
    dp: int
    microbatches: int
    pipelined: bool
    recomputed: int
    cp: int


@dataclass(frozen=True, eq=False)
class _LanguageModel:
    """Ways to lay out the language model, a column each."""

    ways: list[_Way]
    microbatches: Float64[np.ndarray, "ways"]
    work: Float64[np.ndarray, "ways"]
    """Rank-seconds of a step."""
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
    """Choices of one partition on certain pools: a row for all degrees of all modules."""

    partition: Partition
    where: Where
    limits: Limits
    roof: Float64[np.ndarray, "groups"]
    """Ranks of each group's pools."""
    language_model: str
    ways: list[_Way]
    others: Sequence[str]
    tp: list[tuple[int, ...]]
    """Of the other modules; each goes with all ways of the language model."""
    constant: Float64[np.ndarray, "choices"]
    first: Float64[np.ndarray, "choices groups"]
    """A_g / K."""
    steady: Float64[np.ndarray, "choices groups"]
    """B_g (K - 1) / K."""
    least: Float64[np.ndarray, "choices groups"]
    most: Float64[np.ndarray, "choices groups"]

    def bounds(self) -> Float64[np.ndarray, "choices"]:
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

    def choice(self, number: int) -> Choice:
        others, way = divmod(number, len(self.ways))
        chosen = dict(zip((self.language_model, *self.others), (self.ways[way].tp, *self.tp[others]), strict=True))
        tp = {m: chosen[m] for group in self.partition for m in group}
        return Choice(self.partition, self.where, tp, *self.ways[way][1:])


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
        most_instances: module -> most instances that can all have work. It bounds the ranks of a group by that of its
            modules which has most, unless memory asks for more: the others then have idle instances.
        most: allocations of a partition that are wanted, the best; None: all within the factor.
    """
    require("cvxpy", "planner", "planner: ranks are allocated by convex programs")
    laid: dict[range, _LanguageModel] = {}
    queues: list[_Queue] = []
    for partition in partitions:
        problems: dict[frozenset[int], list[_Problems]] = {}
        for where in all_wheres(len(partition), len(estimates.cluster.pools)):
            parts = {m: estimates.of(pools) for group, pools in zip(partition, where, strict=True) for m in group}
            fits = {m: [t for t in tp[m] if part.cluster.ranks_per_node % t == 0] for m, part in parts.items()}
            home = next(pools for group, pools in zip(partition, where, strict=True) if language_model in group)
            if home not in laid:
                given = parts[language_model], language_model, fits[language_model], dp, microbatches
                laid[home] = _language_model(*given)
            room = limits(where, estimates.cluster), np.array([len(estimates.cluster.ranks_of(w)) for w in where])
            made = _problems(parts, partition, where, room, language_model, laid[home], fits, most_instances)
            problems.setdefault(frozenset(chain(*where)), []).append(made)
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


def _language_model(
    estimates: Estimates, name: str, tp: Sequence[int], dp: Sequence[int], microbatches: Mapping[int, Sequence[int]]
) -> _LanguageModel:
    blocks, ways, rows = estimates.blocks(name), [], []
    for degree, cp, instances in product(tp, estimates.contexts(name), dp):
        plain = Degrees(degree, 1, 1, instances, cp=cp)
        if estimates.cluster.ranks_per_node % (degree * cp) or not estimates.worth(name, plain):
            continue
        needed, one = estimates.least_ranks(name, plain.shards), plain.ranks
        for count in microbatches[instances]:
            given = estimates.fitting(name, plain, count)
            if given is None:
                continue
            alone = estimates.work(name, degree, given.recomputed, cp).total
            first, work = alone / (instances * count), degree * cp * alone
            room = 1 - estimates.activations(name, given, count) / estimates.memory
            if blocks > 1:
                waits = estimates.synchronized_ranks(name, given, count)
                ways.append(_Way(degree, instances, count, True, given.recomputed, cp))
                rows.append((count, work, first, waits, 2 * one, needed / room, room, one * blocks))
            if estimates.bytes(name, given, count) <= estimates.memory:
                ways.append(_Way(degree, instances, count, False, given.recomputed, cp))
                more = estimates.synchronized(name, given, count)
                rows.append((count, work, first + more, 0.0, one, 0.0, 1.0, one))
    return _LanguageModel(ways, *np.array(rows, np.float64).reshape(-1, 8).T)


def _problems(
    estimates: Mapping[str, Estimates],
    partition: Partition,
    where: Where,
    room: tuple[Limits, Float64[np.ndarray, "groups"]],
    name: str,
    model: _LanguageModel,
    tp: Mapping[str, Sequence[int]],
    most_instances: Mapping[str, int],
) -> _Problems:
    """Problems of one partition on given pools, with all degrees of tensor parallelism of all modules."""
    others = [m for m in tp if m != name]
    degrees = list(product(*(tp[m] for m in others)))
    of = np.array([[m in group for group in partition] for m in others]).reshape(len(others), len(partition))
    home = next(g for g, group in enumerate(partition) if name in group)
    held = np.array([estimates[m].least_ranks(m) for m in others]) @ of
    lines = [[(n * estimates[m].work(m, n).total, n, n * most_instances[m]) for m, n in zip(others, way, strict=True)]
             for way in degrees]  # fmt: skip
    seconds, widest, fits = np.moveaxis(np.array(lines, np.float64).reshape(len(degrees), len(others), 3), -1, 0)
    work, count = (seconds @ of)[:, None], model.microbatches[:, None]
    widest = np.where(of, widest[:, :, None], 0.0).max(axis=1, initial=0.0)
    fits = np.maximum(np.where(of, fits[:, :, None], 0.0).max(axis=1, initial=0.0), np.maximum(widest, held))
    shape = (len(degrees), len(model.ways), len(partition))
    first, steady = work / count, np.broadcast_to(work, shape).copy()
    least, most = (np.broadcast_to(n[:, None], shape).copy() for n in (np.maximum(widest, held), fits))
    first[:, :, home] += model.synchronized
    steady[:, :, home] += model.work
    needed = np.maximum(model.least, model.holds + held[home] / model.room)
    least[:, :, home] = np.maximum(least[:, :, home], needed)
    most[:, :, home] = model.most
    constant = np.tile(model.constant, len(degrees))
    groups = [n.reshape(-1, len(partition)) for n in (first, steady * (count - 1) / count, least, most)]
    return _Problems(partition, where, *room, name, model.ways, others, degrees, constant, *groups)


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
        program.solve(solver="CLARABEL", warm_start=False)  # else bits depend on what was solved before
    return share.value[:count]


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
