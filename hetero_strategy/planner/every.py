"""Every layout on few ranks, estimated all at once, and the most promising of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees, Partition, on_nodes

FEW = 16
"""Ranks up to which all are estimated."""
ALIKE = 1.05
"""Factor by which the next of those that lie alike is looked at later than its seconds say."""
LATE = 1000
"""Of those that lie alike, number from which it makes no more difference."""
OF_PLACE = 64
"""Layouts that are kept of the same groups on the same ranks, where there are many such places."""
FASTEST = 2**14
"""Those with one number of microbatches among which they are looked for."""
OF_ALL = 1024
"""Layouts that are kept."""
OF_KIND = 16
"""Those that are kept of each partition, and with one layout for all modules, in any case."""


class Estimated(NamedTuple):
    """One layout."""

    turn: float
    """Its seconds, and more the more of those that lie alike are faster."""
    partition: Partition
    ranks: tuple[Sequence[int], ...]
    """Of each group."""
    degrees: Mapping[str, Degrees]
    microbatches: int
    alike: bool
    """Whether all modules have the same layout."""


class _Options(NamedTuple):
    """Ways for one module to lie on so many ranks, an entry each."""

    degrees: list[Degrees]
    tp: Int64[np.ndarray, "ways"]
    pp: Int64[np.ndarray, "ways"]
    dp: Int64[np.ndarray, "ways"]
    once: Bool[np.ndarray, "ways"]
    number: Int64[np.ndarray, "ways"]
    """The same for the same degrees, of any module."""


class _Times(NamedTuple):
    """Of one module's options: where no block runs again, and where more and more do."""

    later: Float64[np.ndarray, "recomputed ways"]
    through: Float64[np.ndarray, "recomputed ways"]
    bytes: Float64[np.ndarray, "recomputed ways"]
    """Infinite where a run would refuse it."""
    more: Float64[np.ndarray, "recomputed ways"]
    """Bytes of each further microbatch that is held."""


class Layouts:
    """All layouts of groups on their ranks, by the formula of :class:`Proposer`, the same for each that it proposes.

    Args:
        degrees: of a module on so many ranks, so many of which are on each node.
        counts: numbers of microbatches to try with so many instances of the language model.
        again: of so many blocks one runs again, where memory asks for it.
    """

    def __init__(
        self,
        shape: ModelShape,
        estimates: Estimates,
        degrees: Callable[[str, int, int], list[Degrees]],
        counts: Callable[[int], Collection[int]],
        again: Sequence[int],
    ) -> None:
        self._shape, self._estimates, self._degrees, self._again = shape, estimates, degrees, again
        self._language_model = shape.samplewise[0]
        self._counts, self._options, self._times = cache(counts), cache(self._options_of), cache(self._times_of)
        self._group = cache(self._seconds)
        self._numbers: dict[Degrees, int] = {}
        self.fit = 0
        """How many were found to fit."""

    def best(self, places: Iterable[tuple[Partition, tuple[Sequence[int], ...]]]) -> list[Estimated]:
        """The most promising of all, of every partition, and of those with one layout for all modules."""
        every, kept, seen = list(places), list[Estimated](), Counter[object]()
        most = max(OF_PLACE, OF_ALL // len(every))
        for one in sorted((found for place in every for found in self._on(*place, most)), key=lambda f: f.turn):
            kinds = [one.partition, *["alike"] * one.alike]
            if len(kept) < OF_ALL or any(seen[kind] < OF_KIND for kind in kinds):
                kept.append(one)
                seen.update(kinds)
        return kept

    def _on(self, partition: Partition, ranks: tuple[Sequence[int], ...], most: int) -> Iterator[Estimated]:
        """So many of one place, the most promising."""
        given = [(group, self._estimates.on(own), len(own)) for group, own in zip(partition, ranks, strict=True)]
        names = [name for group in partition for name in group]
        options = [self._options(name, e, size) for group, e, size in given for name in group]
        if not all(o.degrees for o in options):
            return
        once, crosses = _outer(np.logical_and, [o.once for o in options]), self._crosses(ranks, partition, options)
        instances = options[names.index(self._language_model)].dp.tolist()
        counts = sorted(set().union(*map(self._counts, instances)))
        rows = self._rows(given, names, options, once, crosses, product(counts, (False, True)))
        alike = _same([o.number for o in options]) if len(given) == 1 else np.zeros(once.shape, np.bool_)
        seconds, where, variants = [np.empty(0)], [np.empty(0, np.int64)], list[tuple[int, bool]]()
        for count, whole, row in rows:
            some = np.flatnonzero(np.isfinite(row))
            self.fit += len(some)
            if len(some) > FASTEST:
                some = np.union1d(_least(row, FASTEST), _least(np.where(alike.ravel(), row, inf), OF_KIND))
            seconds, where = [*seconds, row[some]], [*where, some]
            variants += [(count, whole)] * len(some)
        took, ways = np.concatenate(seconds), np.unravel_index(np.concatenate(where), once.shape)
        turn, of = delayed(took, _kinds(options, ways)), alike[ways]
        for i in np.union1d(_least(turn, most), _least(np.where(of, turn, inf), OF_KIND)).tolist():
            count, whole = variants[i]
            chosen = (o.degrees[way[i]]._replace(whole=whole) for o, way in zip(options, ways, strict=True))
            degrees = dict(zip(names, chosen, strict=True))
            yield Estimated(float(turn[i]), partition, ranks, degrees, count, bool(of[i]))

    def _rows(
        self,
        given: Sequence[tuple[tuple[str, ...], Estimates, int]],
        names: Sequence[str],
        options: Sequence[_Options],
        once: Bool[np.ndarray, "..."],
        crosses: Bool[np.ndarray, "..."],
        variants: Iterable[tuple[int, bool]],
    ) -> Iterator[tuple[int, bool, Float64[np.ndarray, "layouts"]]]:
        """Seconds of all layouts of one place, infinite where they are none, with each number of microbatches, gathered
        as is usual and once per step.
        """
        asked = self._estimates.given.reshard_after_forward
        for count, whole in variants:
            alone = len(given) == 1
            seconds = self._seconds if alone else self._group  # those of all modules together are asked for once
            later, through = zip(*(seconds(*g, count, whole, alone) for g in given), strict=True)
            tried = [
                np.array([name != self._language_model or count in self._counts(dp) for dp in o.dp.tolist()])
                for name, o in zip(names, options, strict=True)
            ]
            refused = (once | (asked == "always")) if whole else (~once & (asked == "never"))
            row = _outer(np.maximum, later) + _outer(np.add, through)
            row[crosses | refused | ~_outer(np.logical_and, tried)] = inf
            yield count, whole, row.ravel()

    def _crosses(
        self, ranks: tuple[Sequence[int], ...], partition: Partition, options: Sequence[_Options]
    ) -> Bool[np.ndarray, "..."]:
        """Whether tensor parallelism crosses nodes."""
        of = iter(options)
        widest = [_outer(np.lcm, [next(of).tp for _ in group]) for group in partition]
        crosses = np.zeros([n for w in widest for n in w.shape], np.bool_)
        for tp in product(*(np.unique(w).tolist() for w in widest)):
            if on_nodes(self._estimates.cluster, ranks, tp) is None:
                crosses |= _outer(np.logical_and, [w == n for w, n in zip(widest, tp, strict=True)])
        return crosses

    def _options_of(self, name: str, e: Estimates, ranks: int) -> _Options:
        degrees = self._degrees(name, ranks, e.cluster.ranks_per_node)
        rows = [(d.neighbours, d.pp, d.dp, d.once, self._numbers.setdefault(d, len(self._numbers))) for d in degrees]
        tp, pp, dp, once, number = np.array(rows, np.int64).reshape(-1, 5).T
        return _Options(degrees, tp, pp, dp, once > 0, number)

    def _times_of(self, name: str, e: Estimates, ranks: int, microbatches: int, whole: bool) -> _Times:
        module, degrees = self._shape.modules[name], self._options(name, e, ranks).degrees
        again = (0, *(n for n in self._again if module.has_blocks and n <= module.blocks))
        ways = [[d._replace(recomputed=n, whole=whole) for d in degrees] for n in again]
        allowed = np.array([[e.given.allows(name, d.tp, d.recomputed) for d in row] for row in ways])
        later, through, size, two = (
            np.array([[f(name, d, microbatches) for d in row] for row in ways])
            for f in (e.later, e.through, e.bytes, partial(e.bytes, held=2))
        )
        return _Times(later, through, np.where(allowed, size, inf), two - size)

    def _seconds(
        self, group: tuple[str, ...], e: Estimates, ranks: int, microbatches: int, whole: bool, alone: bool
    ) -> tuple[Float64[np.ndarray, "..."], Float64[np.ndarray, "..."]]:
        """Of a group: later and through, infinite where it does not fit into memory."""
        times = [self._times(name, e, ranks, microbatches, whole) for name in group]
        further = self._further(group, e, ranks, microbatches)
        best = later = np.full([t.through.shape[1] for t in times], inf)
        for again in product(*(range(len(t.through)) for t in times)):
            parts = [_Times(*(n[i] for n in t)) for t, i in zip(times, again, strict=True)]
            through = _outer(np.add, [part.through for part in parts])
            size = _outer(np.add, [part.bytes for part in parts])
            for i, part in enumerate(parts):
                size = size + self._along(part.more, i, group) * further[i]
            better = (size <= e.memory) & (through < best)
            if better.any():
                busy = _outer(np.add, [part.later for part in parts]) - self._filled(group, e, ranks, parts, alone)
                best, later = np.where(better, through, best), np.where(better, busy, later)
            if better.all() and not any(again):
                break
        return later, best

    @staticmethod
    def _along(values: np.ndarray, i: int, group: Sequence[str]) -> np.ndarray:
        """Values of one module's options, for every combination with those of the others."""
        return values.reshape([-1 if i == axis else 1 for axis in range(len(group))])

    def _further(self, group: Sequence[str], e: Estimates, ranks: int, microbatches: int) -> list[np.ndarray]:
        """Microbatches that each module holds besides one, see :meth:`Estimates.ahead_of`."""
        found, pp = [], [self._along(self._options(name, e, ranks).pp, i, group) for i, name in enumerate(group)]
        for i, name in enumerate(group):
            fed = e.feeds(name)
            apart, deepest = not fed <= {*group}, np.ones([1] * len(group), np.int64)
            for other in fed & {*group}:
                deepest = np.maximum(deepest, pp[group.index(other)])
            ahead = (pp[i] == 1) & (apart | (deepest > 1))
            found.append(np.where(ahead, np.minimum(microbatches, deepest + 1 + apart) - 1, 0))
        return found

    def _filled(
        self, group: tuple[str, ...], e: Estimates, ranks: int, parts: Sequence[_Times], alone: bool
    ) -> Float64[np.ndarray, "..."]:
        """See :meth:`Proposer._filled`."""
        shape = [len(part.through) for part in parts]
        if self._language_model not in group:
            return np.zeros(shape)
        options, lm = [self._options(name, e, ranks) for name in group], group.index(self._language_model)
        along = partial(self._along, group=group)
        bubbles = along(parts[lm].through * (1 - 1 / options[lm].pp), lm)
        room = along(options[lm].tp * options[lm].dp, lm)
        others = [
            np.where(along(options[i].tp, i) <= room, along(parts[i].later, i), 0.0)
            for i, name in enumerate(group)
            if name not in self._shape.samplewise
        ]
        filled = np.broadcast_to(np.minimum(bubbles, sum(others, np.zeros(1))), shape)
        return np.where(_same([o.number for o in options]), 0.0, filled) if alone else filled


def delayed(seconds: Float64[np.ndarray, "n"], kinds: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Seconds, where each of a kind counts as so much slower than the one before it.

    >>> delayed(np.array([1.0, 1.01, 1.02]), np.array([0, 0, 1])).round(4).tolist()
    [1.0, 1.0605, 1.02]
    """
    order = np.lexsort((seconds, kinds))
    place = np.arange(len(order))
    begins = np.diff(kinds[order], prepend=-1) != 0
    place -= np.maximum.accumulate(np.where(begins, place, 0))
    late = np.empty(len(order))
    late[order] = ALIKE ** np.minimum(place, LATE)
    return seconds * late


def _kinds(options: Sequence[_Options], ways: Sequence[Int64[np.ndarray, "n"]]) -> Int64[np.ndarray, "n"]:
    """The same number where all modules have the same tensor and pipeline parallelism."""
    kinds = np.zeros(len(ways[0]), np.int64)
    for o, way in zip(options, ways, strict=True):
        kinds = np.unique((kinds * (FEW + 1) + o.tp[way]) * (FEW + 1) + o.pp[way], return_inverse=True)[1]
    return kinds


def _outer(f: np.ufunc, values: Sequence[np.ndarray]) -> Any:
    """Of every combination of entries."""
    return reduce(f.outer, values)


def _same(numbers: Sequence[Int64[np.ndarray, "ways"]]) -> Bool[np.ndarray, "..."]:
    """Of every combination, whether all numbers are the same."""
    return _outer(np.maximum, numbers) == _outer(np.minimum, numbers)


def _least(values: Float64[np.ndarray, "n"], most: int) -> Int64[np.ndarray, "least"]:
    """Where the least are, the first of equals, without those that are infinite."""
    order = np.flatnonzero(np.isfinite(values))
    if len(order) > most:
        some = values[order]
        order = order[some <= np.partition(some, most)[most]]
        order = order[np.argsort(values[order], kind="stable")[:most]]
    return order
