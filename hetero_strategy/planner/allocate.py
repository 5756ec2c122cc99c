"""The fastest layouts of all modules by a formula, with whole numbers of ranks. Pure.

Groups of modules share ranks, and a step of K microbatches takes

    T = max over groups of later_g(n_g) + sum over groups of through_g(n_g)

with n_g ranks of group g: the first microbatch goes through all modules, and later ones follow at the pace of the
slowest group (DistTrain, arXiv:2408.04275, section 4.2, equations 1 and 2, for groups of modules that share ranks).
Groups have nothing in common but K and whether parameters are gathered once per step. So all layouts of each group are
estimated alone. Of as many ranks and microbatches, the first fronts are kept: layouts that no other dominates (neither
of its two times is longer), then those that no other of the rest dominates. They are merged group by group.

Two groups on 4 ranks, (ranks, later, through) of each, of which the third of the first group is dominated:

    vision  (1, 4, 2) (2, 2, 1) (2, 3, 1)        llm  (2, 5, 3) (3, 3, 2)
    merged  (1 + 3: max(4, 3) + 2 + 2 = 8) (2 + 2: max(2, 5) + 1 + 3 = 9) (1 + 2: max(4, 5) + 2 + 3 = 10)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.space import Degrees, EntryTimes, GroupLayouts, ModuleTable, Partition

ALIKE = 1.05
"""Factor by which the next layout with the same layout of the language model is tried later than its seconds say."""
LATE = 1000
"""Number of layouts with the same layout of the language model from which the delay stays constant."""
LAYERS = 4
"""Fronts of a group's layouts, of as many ranks and microbatches, that are kept."""
OF_ALL = 1024
"""Most layouts that are returned."""
WORTH = 1.5
"""Other layouts are tried up to this multiple of the seconds of all modules on all ranks, if not all are tried."""
DIFFER = 1.05
"""Numbers of ranks within this factor count as one, unless every layout is tried."""
SLACK = 16
"""Exponent by which groups that are equally busy count as slower: their times vary, and they wait for each other."""
FEW_NODES = 32
"""Largest number of nodes up to which each number is tried, unless every layout is tried."""
SHIFT = 2**32
"""A number above any number of microbatches."""
OF_KIND = 16
"""Layouts of each partition that are returned in any case."""
CHUNK = 2**21
"""Pairs of layouts that are merged at a time."""


class Estimated(NamedTuple):
    """A layout of all modules and its estimated seconds."""

    seconds: float
    partition: Partition
    sizes: tuple[int, ...]
    """Number of ranks of each group."""
    degrees: Mapping[str, Degrees]
    microbatches: int


class RankAllocator:
    """A search for the fastest layouts of all modules.

    Args:
        ways: maps a module and numbers of ranks to its layouts on them; None: on any number it may have.
        counts: maps instances of the language model to numbers of microbatches to try.
        thorough: try all choices of transforms if memory is short, not only none and those that save most.
        every: try every layout. Otherwise groups have selected numbers of ranks; modules other than the language model
            are in pipelines only if all modules have the same layout; of two layouts of a group with as many ranks, the
            faster may hide the one that crosses no node.
    """

    def __init__(
        self,
        shape: ModelSpec,
        estimates: Estimates,
        ways: Callable[[str, Collection[int] | None], list[Degrees]],
        counts: Callable[[int], Collection[int]],
        thorough: bool,
        every: bool,
    ) -> None:
        self._shape, self._estimates, self._every = shape, estimates, every
        choices = estimates.choices.items()
        self._choices = {name: of if thorough or len(of) == 1 else [of[0], of[-1]] for name, of in choices}
        """Transforms that may be added to each module."""
        self._ranks, self._per_node = estimates.cluster.ranks, estimates.cluster.ranks_per_node
        self._language_model = name = shape.samplewise[0]
        self._times, numbers = cache(self._times_of), dict[Degrees, int]()
        self._tables = {name: ModuleTable.of(ways(name, None), lambda way: sorted(counts(way.dp)), numbers)}
        self.fit = 0
        """Layouts of groups that fit into memory."""
        self._apart, self._limit, self._widths = 0, np.inf, None

        def beside(widths: Collection[int] | None) -> None:
            """Make the tables of the other modules."""
            tried = np.unique(self._tables[name].microbatches).tolist()
            for other in shape.modules.keys() - {name}:
                self._tables[other] = ModuleTable.of(ways(other, widths) if tried else [], lambda _: tried, numbers)
            self._times.cache_clear()

        if every:
            beside(None)
            self._apart = max(max((way.neighbours for way in t.ways), default=1) for t in self._tables.values())
        else:
            self._widths = {self._ranks}
            beside({self._ranks})
            self._leave_out_slow()
            self._widths, widths = self._selected()
            beside(widths)

    def best(self, partitions: Sequence[Partition]) -> list[Estimated]:
        """Return the fastest layouts, some of every partition; layouts with the same layout of the language model
        follow in turns.
        """
        reshard, layouts = self._estimates.options.reshard_after_forward, list[tuple[Partition, bool, GroupLayouts]]()
        self.fit = 0
        for whole in {"never": (True,), "always": (False,)}.get(reshard, (False, True)):
            groups = {group: self._group(group, whole) for group in {g for p in partitions for g in p}}
            for partition in partitions:
                merged = self._merged([groups[group] for group in partition])
                if whole and reshard != "never":  # layouts that gather once by default are found when whole is false
                    merged = merged.at(~self._all(partition, merged, "once", lambda once, _: once > 0))
                layouts.append((partition, whole, merged))
        return self._in_turn(layouts)

    def _leave_out_slow(self) -> None:
        """Drop layouts of the language model that alone take far longer than all modules that share all ranks."""
        whole = self._estimates.options.reshard_after_forward == "never"
        self._limit = WORTH * self._group(tuple(self._shape.modules), whole).seconds.min(initial=np.inf)
        table, times = self._tables[self._language_model], self._times(self._language_model, whole)
        bubbles = times.through * (1 - 1 / table.pp)  # others compute in these, at no time here
        least = (times.later - bubbles).clip(0.0) + times.through
        fast = ((least <= self._limit) & (times.bytes <= self._estimates.memory)).any(axis=0)
        self._tables[self._language_model] = table._replace(
            **{name: getattr(table, name)[fast] for name in table._fields if name != "ways"}
        )
        self._times.cache_clear()

    def _selected(self) -> tuple[set[int], set[int]]:
        """Return numbers of ranks that the language model shares with other modules, and those that other modules may
        have. Of numbers that differ little, the language model takes the one on which it is fastest alone. Other
        modules may also have the ranks it leaves, whole nodes, and parts of a node.
        """
        whole = self._estimates.options.reshard_after_forward == "never"
        alone, nodes = self._group((self._language_model,), whole), self._per_node
        about = np.floor(np.log(alone.ranks) / np.log(DIFFER))
        order = np.lexsort((alone.seconds, about))
        fastest = order[np.diff(about[order], prepend=-1.0) > 0]
        shared = {self._ranks, *alone.ranks[fastest].tolist()}
        left = {n for width in shared for n in (self._ranks - width, (self._ranks - width) // nodes * nodes)}
        steps = (DIFFER ** np.arange(1 + np.log(self._ranks) / np.log(DIFFER))).astype(np.int64).tolist()
        others = shared | left | {*range(1, nodes)} | {nodes * n for n in (*range(1, FEW_NODES), *steps)}
        return shared, {n for n in others if 0 < n <= self._ranks}

    def _times_of(self, name: str, whole: bool) -> EntryTimes:
        e, table, choices = self._estimates, self._tables[name], self._choices[name]
        times = EntryTimes(*np.zeros((4, len(choices), len(table.way))))
        for tp, cp, ep in sorted({(way.tp, way.cp, way.ep) for way in table.ways}):
            own = np.flatnonzero((table.tp == tp * cp) & (table.cp == cp) & (table.ep == ep))
            of: Any = table.pp[own], table.replicate[own], table.dp[own] // table.replicate[own]
            for row, chosen in enumerate(choices):
                if not e.options.allows(name, tp, chosen):
                    times.bytes[row, own] = np.inf
                    continue
                pp, replicate, shard = of
                arguments = name, Degrees(tp, pp, replicate, shard, chosen, whole, cp, ep), table.microbatches[own]
                times.later[row, own], times.through[row, own] = e.later(*arguments), e.through(*arguments)
                times.bytes[row, own] = e.bytes(*arguments)
                times.more[row, own] = e.bytes(*arguments, held=2) - times.bytes[row, own]
        return times

    def _group(self, group: tuple[str, ...], whole: bool) -> GroupLayouts:
        """Return the layouts of a group that fit into memory and that few others dominate."""
        parts = [self._estimated(group, entries, whole, False) for entries in self._entries(group)]
        if len(group) == len(self._shape.modules):  # keep some with one layout for all modules
            parts = [one.at(~self._all((group,), one, "number", np.equal)) for one in parts]
            parts += [self._estimated(group, entries, whole, True) for entries in self._entries(group, alike=True)]
        self.fit += sum(len(one.ranks) for one in parts)
        return GroupLayouts.joined([one.kept(LAYERS, self._apart) for one in parts], 1, len(group))

    def _entries(self, group: tuple[str, ...], alike: bool = False) -> Iterator[Int64[np.ndarray, "layouts modules"]]:
        """Yield entries of all modules of a group with equal ranks and microbatches, or with equal degrees."""
        first = self._language_model if self._language_model in group else group[0]
        widths = np.unique(self._tables[first].ranks).tolist()
        if self._widths is not None and first == self._language_model:
            widths = [n for n in widths if n in self._widths]
        by_key = {}
        for name in (name for name in group if name != first):
            key, table = self._keys(name, alike), self._tables[name]
            open_ = np.flatnonzero(alike | self._every | (table.pp == 1))
            order = open_[np.argsort(key[open_], kind="stable")]
            by_key[name] = order, key[order]
        for width in widths if by_key else [None]:
            own = self._tables[first].ranks == width if by_key else np.ones(len(self._tables[first].way), np.bool_)
            columns = {first: np.flatnonzero(own)}
            for name, (order, keys) in by_key.items():
                wanted = self._keys(first, alike)[columns[first]]
                begin, end = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
                columns = {other: np.repeat(column, end - begin) for other, column in columns.items()}
                columns[name] = order[ragged.expand(begin, end - begin)]
            yield np.stack([columns[name] for name in group], axis=1)

    def _keys(self, name: str, alike: bool) -> Int64[np.ndarray, "entries"]:
        table = self._tables[name]
        return (table.number if alike else table.ranks) * SHIFT + table.microbatches

    def _estimated(
        self, group: tuple[str, ...], entries: Int64[np.ndarray, "layouts modules"], whole: bool, alike: bool
    ) -> GroupLayouts:
        """Estimate layouts of a group, choose the fastest transforms for each, and drop layouts that do not fit."""
        columns = list(entries.T)
        tables, times = [self._tables[name] for name in group], [self._times(name, whole) for name in group]
        count, shape = tables[0].microbatches[columns[0]], len(entries)
        e, pp = self._estimates, {name: t.pp[own] for name, t, own in zip(group, tables, columns, strict=True)}
        further = [e.ahead_of(name, pp, count, not e.feeds(name) <= {*group}) - 1 for name in group]
        later, through, choices = (
            np.full(shape, np.inf),
            np.full(shape, np.inf),
            np.zeros((shape, len(group)), np.int64),
        )
        for rows in product(*(range(len(t.bytes)) for t in times)):
            parts = [t.at(row, own) for t, row, own in zip(times, rows, columns, strict=True)]
            size = sum(part.bytes + part.more * more for part, more in zip(parts, further, strict=True))
            passes = sum(part.through for part in parts)
            better = (size <= self._estimates.memory) & (passes < through)
            if better.any():
                busy = sum(part.later for part in parts) - (0.0 if alike else self._filled(group, columns, parts))
                through, later = np.where(better, passes, through), np.where(better, busy, later)
                choices[better] = rows
            if better.all() and not any(rows):
                break
        tp = reduce(np.lcm, (table.tp[own] for table, own in zip(tables, columns, strict=True)))
        ranks = tables[0].ranks[columns[0]]
        every = GroupLayouts(ranks, count, later, through, ranks[:, None], tp[:, None], entries, choices)
        return every.at(np.isfinite(through))

    def _filled(self, group: Sequence[str], columns: list[np.ndarray], parts: Sequence[EntryTimes]) -> Any:
        """Return the seconds of other modules that fit into the bubbles of the language model's pipeline. A module
        counts if its instances are on the ranks of one stage, which idle at once.
        """
        if self._language_model not in group:
            return 0.0
        of = {n: (self._tables[n], own, part) for n, own, part in zip(group, columns, parts, strict=True)}
        table, own, part = of[self._language_model]
        bubbles, room = part.through * (1 - 1 / table.pp[own]), table.tp[own] * table.dp[own]
        others = (of[name] for name in group if name not in self._shape.samplewise)
        return np.minimum(bubbles, sum(np.where(t.tp[i] <= room, p.later, 0.0) for t, i, p in others))

    def _all(self, partition: Partition, layouts: GroupLayouts, column: str, test: Callable[[Any, Any], Any]) -> Any:
        """Return whether a column of each module's table passes a test against that of the first module."""
        names = [name for group in partition for name in group]
        values = [getattr(self._tables[n], column)[own] for n, own in zip(names, layouts.entries.T, strict=True)]
        return np.logical_and.reduce([test(value, values[0]) for value in values])

    def _merged(self, groups: Sequence[GroupLayouts]) -> GroupLayouts:
        """Return the fastest layouts of all groups together, on no more ranks than there are."""
        if len(groups) == 1:
            return groups[0].fastest(OF_ALL)
        merged = GroupLayouts.joined([], len(groups), sum(one.entries.shape[1] for one in groups))
        groups = [one.at(np.argsort(one.microbatches, kind="stable")) for one in groups]
        bounds = []
        for count in reduce(np.intersect1d, (one.microbatches for one in groups)).tolist():
            parts = [one.at(slice(*np.searchsorted(one.microbatches, (count, count + 1)))) for one in groups]
            bounds.append((max(p.later.min() for p in parts) + sum(p.through.min() for p in parts), count, parts))
        for bound, _, (first, *others, last) in sorted(bounds, key=lambda entry: entry[:2]):
            if bound > min(self._limit, merged.limit(OF_ALL)):
                break
            for other in others:
                first = self._paired(first, other, self._limit).kept(LAYERS, self._apart)
            merged = self._added(merged, first, last)
        return merged

    def _added(self, found: GroupLayouts, first: GroupLayouts, last: GroupLayouts) -> GroupLayouts:
        """Add the fastest pairs of two groups' layouts, and skip layouts that cannot be among them.

        The bound of a pair takes the least times of any layout of the last group on the ranks that the first leaves.
        """
        last = last.at(np.argsort(last.ranks, kind="stable"))
        fit = np.searchsorted(last.ranks, self._ranks - first.ranks, side="right")
        first, fit = first.at(fit > 0), fit[fit > 0] - 1
        later, through = (np.minimum.accumulate(column)[fit] for column in (last.later, last.through))
        bounds = np.maximum(first.later, later) + first.through + through
        order, step = np.argsort(bounds, kind="stable"), max(1, CHUNK // max(1, len(last.ranks)))
        shape = found.sizes.shape[1], found.entries.shape[1]
        for begin in range(0, len(order), step):
            if bounds[order[begin]] > (limit := min(self._limit, found.limit(OF_ALL))):
                break
            pairs = self._paired(first.at(order[begin : begin + step]), last, limit)
            found = GroupLayouts.joined([found, pairs.at(self._inside_nodes(pairs))], *shape).fastest(OF_ALL)
        return found

    def _paired(self, first: GroupLayouts, last: GroupLayouts, limit: float) -> GroupLayouts:
        """Merge each layout of some groups with each of another one, within a number of ranks and of seconds."""
        seconds = np.maximum.outer(first.later, last.later) + np.add.outer(first.through, last.through)
        i, j = np.nonzero((np.add.outer(first.ranks, last.ranks) <= self._ranks) & (seconds <= limit))
        a, b = first.at(i), last.at(j)
        joined = (np.concatenate(columns, axis=1) for columns in zip(a[4:], b[4:], strict=True))
        times = paced(a.later, b.later), a.through + b.through
        return GroupLayouts(a.ranks + b.ranks, a.microbatches, *times, *joined)

    def _inside_nodes(self, layouts: GroupLayouts) -> Bool[np.ndarray, "layouts"]:
        """Return whether no tensor parallelism crosses nodes, see :func:`on_nodes`."""
        inside = np.zeros(len(layouts.ranks), np.bool_)
        for order in (np.zeros_like(layouts.tp), -layouts.tp):
            by_place = np.argsort(order, axis=1, kind="stable")
            sizes, tp = (np.take_along_axis(column, by_place, axis=1) for column in (layouts.sizes, layouts.tp))
            inside |= ((np.cumsum(sizes, axis=1) - sizes) % self._per_node % tp == 0).all(axis=1)
        return inside

    def _in_turn(self, found: Sequence[tuple[Partition, bool, GroupLayouts]]) -> list[Estimated]:
        """Return the fastest of all layouts, each delayed behind those of its partition with the same layout of the
        language model.
        """
        rows = list[tuple[Partition, bool, GroupLayouts, int]]()
        kinds, numbers, seconds, same_degrees = dict[object, int](), list[int](), list[float](), list[bool]()
        for partition, whole, layouts in found:
            names, table = [name for group in partition for name in group], self._tables[self._language_model]
            own = layouts.entries[:, names.index(self._language_model)]
            of = np.stack([column[own] for column in (table.tp, table.cp, table.pp, table.dp)], axis=1).tolist()
            rows += [(partition, whole, layouts, i) for i in range(len(of))]
            numbers += [kinds.setdefault((partition, *one), len(kinds)) for one in of]
            seconds += layouts.seconds.tolist()
            same = self._all(partition, layouts, "number", np.equal) & (len(partition) == 1)
            same_degrees += same.tolist()
        turns = delayed(np.array(seconds, np.float64), np.array(numbers, np.int64))
        chosen, seen = list[Estimated](), Counter[object]()
        for row in np.argsort(turns, kind="stable").tolist():
            partition, whole, layouts, i = rows[row]
            of_kind = [partition, *["alike"] * same_degrees[row]]
            if len(chosen) < OF_ALL or any(seen[kind] < OF_KIND for kind in of_kind):
                seen.update(of_kind)
                degrees = self._degrees(partition, whole, layouts, i)
                sizes = tuple(layouts.sizes[i].tolist())
                chosen.append(Estimated(seconds[row], partition, sizes, degrees, int(layouts.microbatches[i])))
        return chosen

    def _degrees(self, partition: Partition, whole: bool, layouts: GroupLayouts, i: int) -> dict[str, Degrees]:
        """Return the degrees of all modules in one layout, in the order of the model."""
        degrees = {}
        names = (name for group in partition for name in group)
        for name, entry, row in zip(names, layouts.entries[i].tolist(), layouts.choices[i].tolist(), strict=True):
            table, choices = self._tables[name], self._choices[name]
            degrees[name] = table.ways[table.way[entry]]._replace(transforms=choices[row], whole=whole)
        return {name: degrees[name] for name in self._shape.modules}


def paced(first: Float64[np.ndarray, "n"], last: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Return the seconds at which two groups keep pace: the slower one's, and more if the other has little slack.

    >>> paced(np.array([1.0, 1.0, 1.0]), np.array([1.0, 0.9, 0.5])).round(3).tolist()
    [1.044, 1.011, 1.0]
    """
    slower, other = np.maximum(first, last), np.minimum(first, last)
    share = np.divide(other, slower, out=np.zeros_like(slower), where=slower > 0)
    return slower * (1 + share**SLACK) ** (1 / SLACK)


def delayed(seconds: Float64[np.ndarray, "n"], kinds: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Return the seconds, each multiplied by its delay behind faster entries of its kind.

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
