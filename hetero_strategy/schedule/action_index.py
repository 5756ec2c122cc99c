"""Number a step's actions as plain integers: a schedule is made in every step, which leaves no time to hash actions.
Pure.

A *unit* is one microbatch of one node; units of a node are consecutive. Action numbers: unit ``u`` has forward ``u``,
backward (B, or I where split) ``u + units`` and weight gradient ``u + 2 * units``; after them come one UNSHARD and one
REDUCE per node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import accumulate

from hetero_strategy.schedule.action import Action, Kind, Span, Stage, StageGraph, StageId, StepWork

Costs = Callable[[Action], float]
"""Function that returns the duration of an action, in any unit."""


class ActionIndex:
    """A numbering of the actions that a step may have, with the actions that each sets free, and its duration.

    Args:
        train: whether the step has backwards.
        splits: whether to split the backward of nodes that train and send gradients upstream.
        costs: duration of an action; ``None``: F, I and W take 1, B the sum of its parts (a frozen node has no W),
            UNSHARD and REDUCE nothing.

    Nodes without work are left out.
    """

    def __init__(
        self,
        graph: StageGraph,
        work: StepWork,
        *,
        train: bool,
        splits: bool,
        costs: Costs | None,
    ) -> None:
        self.nodes = [n for n in graph.stages if work.microbatches.get(n.module)]
        self.index = {n: i for i, n in enumerate(self.nodes)}
        own = ((ranks, [self.index[n] for n in nodes if n in self.index]) for nodes, ranks in graph.hosts.items())
        self.lanes = [(ranks, nodes) for ranks, nodes in own if nodes]
        """Ranks of each lane, and the indices of its nodes."""
        spans = [work.of(n) for n in self.nodes]
        self.counts = list(map(len, spans))
        self.first = [0, *accumulate(self.counts)]
        self.units = self.first[-1]
        of_units = [i for i, count in enumerate(self.counts) for _ in range(count)]
        self.node_of = [*of_units * 3, *range(len(self.nodes)), *range(len(self.nodes))]
        """Index of its node, for each action."""
        self.needed = [span.first for own in spans for span in own]
        """First of the step's microbatches that needs its rows, for each unit."""
        stages = [graph.stages[n] for n in self.nodes]
        self.backward = [train and s.backward for s in stages]
        self.trains = [back and s.trains for back, s in zip(self.backward, stages, strict=True)]
        joint = [n.cohort >= 0 for n in self.nodes]  # cohorts gather and reduce together
        self.gathers = [s.sharded and not j for s, j in zip(stages, joint, strict=True)]
        self.reduces = [t and not j for t, j in zip(self.trains, joint, strict=True)]
        sends = {
            self.index[t] for s, t in graph.edges if t in self.index and s in self.index and graph.stages[s].backward
        }
        self.split = [splits and self.trains[i] and i in sends and not s.whole for i, s in enumerate(stages)]
        self._link(graph, work, spans)
        self.actions = self._actions(stages, spans)
        closing = 3 * self.units + len(stages)
        self.opening = [3 * self.units + i for i, s in enumerate(stages) if s.sharded and joint[i]]
        """Numbers of the actions that all ranks do first."""
        self.joint_sums = [closing + i for i in range(len(stages)) if self.trains[i] and joint[i]]
        """Numbers of the REDUCE actions of cohorts; all cohorts of a stage do theirs together."""
        self.durations = self._durations() if costs is None else [0.0 if a is None else costs(a) for a in self.actions]

    def _link(self, graph: StageGraph, work: StepWork, spans: Sequence[Sequence[Span]]) -> None:
        """List the actions of other nodes that every action sets free, and count the actions that each waits for."""
        units = self.units
        after: list[list[int]] = [[] for _ in range(2 * units)]
        waits = [0] * (3 * units)
        places = [{span.number: i for i, span in enumerate(own)} for own in spans]
        for source, target in graph.edges:
            if source not in self.index or target not in self.index:
                continue
            s, t = self.index[source], self.index[target]
            a, b = self.first[s], self.first[t]
            if source.module == target.module:
                pairs = [(a + i, b + i) for i in range(self.counts[s])]
            else:
                from_, to = places[s], places[t]
                feeds = work.feeds.get((source.module, target.module), ())
                pairs = [(a + from_[p], b + to[q]) for p, q in feeds if p in from_ and q in to]
            for u, v in pairs:
                after[u].append(v)
                waits[v] += 1
            if self.backward[s]:
                for u, v in pairs:
                    after[v + units].append(u + units)
                    waits[u + units] += 1
        self.after = after
        self.waits = waits

    def count(self, node: StageId) -> int:
        """Return the number of microbatches that a node works at."""
        return self.counts[self.index[node]]

    def fork(self) -> ActionIndex:
        """Return a copy for constraints of its own."""
        other = copy(self)
        other.after, other.waits = [list(later) for later in self.after], self.waits.copy()
        return other

    def precede(self, before: int, then: int) -> None:
        """Let an action wait for a forward or a backward."""
        self.after[before].append(then)
        self.waits[then] += 1

    def in_flight(self, order: Iterable[int]) -> list[int]:
        """Return the most microbatches that each node holds in an order of actions; 0 without backward."""
        now = [0] * len(self.nodes)
        most = now.copy()
        for number in order:
            i = self.node_of[number]
            if number < self.units:
                now[i] += self.backward[i]
                most[i] = max(most[i], now[i])
            elif number < 3 * self.units and (number >= 2 * self.units) == self.split[i]:
                now[i] -= 1
        return most

    def _actions(self, stages: Sequence[Stage], spans: Sequence[Sequence[Span]]) -> list[Action | None]:
        kinds: tuple[Kind, ...] = ("F", "B", "W")
        actions: list[Action | None] = []
        for kind in kinds:
            for i, (node, own) in enumerate(zip(self.nodes, spans, strict=True)):
                if kind == "F" or (kind == "B" and self.backward[i]) or self.split[i]:
                    name: Kind = "I" if kind == "B" and self.split[i] else kind
                    actions += [Action(name, node, span.number) for span in own]
                else:
                    actions += [None] * len(own)
        actions += [Action("UNSHARD", n) if s.sharded else None for n, s in zip(self.nodes, stages, strict=True)]
        actions += [Action("REDUCE", n) if trains else None for n, trains in zip(self.nodes, self.trains, strict=True)]
        return actions

    def _durations(self) -> list[float]:
        durations = [1.0] * self.units
        for i, count in enumerate(self.counts):
            durations += [1.0 if self.split[i] or not self.trains[i] else 2.0] * count
        return durations + [1.0] * self.units + [0.0] * (2 * len(self.nodes))
