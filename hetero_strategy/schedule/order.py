"""In which order a step's work runs: actions as data. Pure.

One global order is made from the step plan; a rank runs the actions it takes part in, in that order. Because every
rank follows the same order, collectives of modules and edges that share ranks meet in the same sequence everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "XF", "XB"]
"""F, B: forward and backward of a module. XF, XB: an edge's exchange of rows and of gradient rows."""


@dataclass(frozen=True)
class Action:
    """One piece of work of one microbatch."""

    kind: Kind
    node: str | tuple[str, str]
    """Module name for F and B, (source, target) for XF and XB."""
    microbatch: int


@dataclass(frozen=True)
class Graph:
    """What the order depends on besides the plan.

    Args:
        modules: in topological order.
        edges: (source, target), in one order on every rank.
        backward: modules that need a backward: something in them or upstream of them trains.
    """

    modules: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    backward: frozenset[str]

    def incoming(self, module: str) -> list[tuple[str, str]]:
        return [e for e in self.edges if e[1] == module]

    def outgoing(self, module: str) -> list[tuple[str, str]]:
        return [e for e in self.edges if e[0] == module]


def graph(modules: Sequence[str], edges: Sequence[tuple[str, str]], trains: Mapping[str, bool]) -> Graph:
    """Build a :class:`Graph`; ``trains`` says which modules have a trainable parameter of their own.

    A frozen module with something trainable upstream still carries gradients to it; a frozen module with nothing
    trainable upstream has no backward, and nothing is sent to it.
    """
    backward: set[str] = set()
    for module in modules:
        if trains[module] or any(s in backward for s, t in edges if t == module):
            backward.add(module)
    return Graph(tuple(modules), tuple(edges), frozenset(backward))


def sequential(
    graph: Graph, active: Mapping[str, Iterable[int]], microbatches: int, *, train: bool
) -> tuple[Action, ...]:
    """Microbatch after microbatch: all forwards in topological order, then all backwards in reverse.

    Args:
        graph: of the model.
        active: microbatches in which a module has any work, on any instance (law 3: from the plan, so all ranks agree).
        microbatches: of the step.
        train: with backward actions.
    """
    works = {module: frozenset(numbers) for module, numbers in active.items()}
    order: list[Action] = []
    for mb in range(microbatches):
        for module in graph.modules:
            if mb in works[module]:
                order += [Action("XF", e, mb) for e in graph.incoming(module) if mb in works[e[0]]]
                order.append(Action("F", module, mb))
        if not train:
            continue
        for module in reversed(graph.modules):
            if mb in works[module] and module in graph.backward:
                order.append(Action("B", module, mb))
                order += [
                    Action("XB", e, mb)
                    for e in reversed(graph.incoming(module))
                    if mb in works[e[0]] and e[0] in graph.backward
                ]
    return tuple(order)
