"""Run the shared experts of transformers' mixtures while rows travel to routed experts.

A block of experts calls its router, its routed experts and its shared experts, in an order of its family. Here its
router and its routed experts run first, and shared experts inside of the latter, once rows have started to travel. Then
the block's own forward runs, with stand-ins that return these results: gates, scales and sums are transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.zoo.hf_stand_ins import Joined, Result, join, shallow

_SHARED = ("shared_experts", "shared_expert")


@dataclass(frozen=True)
class Order:
    """The children of a block of experts, and whether each takes rows ``[T, width]`` instead of the block's."""

    router: tuple[str, bool]
    experts: tuple[str, bool]
    shared: tuple[str, bool]


class SharedMeanwhile(Joined):
    """A block whose shared experts run while rows travel, if its experts lie on several ranks."""

    order: Order

    @override
    def forward(self, hidden_states: Tensor) -> Any:
        names = self.order
        experts: Any = self._modules[names.experts[0]]
        # Compiled code ends where experts are exchanged, and shared experts stay in it.
        if "exchange" not in vars(experts) or torch.compiler.is_compiling():
            return super().forward(hidden_states)
        _, weights, chosen = choice = self._run(names.router, hidden_states)
        shared: list[Any] = []
        vars(experts)["meanwhile"] = lambda: shared.append(self._run(names.shared, hidden_states))
        try:
            routed = self._run(names.experts, hidden_states, chosen, weights)
        finally:  # a recompute may end inside
            del vars(experts)["meanwhile"]
        results = zip((names.router, names.experts, names.shared), (choice, routed, *shared), strict=True)
        stand_ins = {name: Result(result, self._modules[name]) for (name, _), result in results}
        whole: Any = super().forward
        return whole.__func__(shallow(self, stand_ins), hidden_states)

    def _run(self, child: tuple[str, bool], rows: Tensor, *more: Tensor) -> Any:
        name, flat = child
        return getattr(self, name)(rows.flatten(0, -2) if flat else rows, *more)


@contextmanager
def shared_meanwhile(model: nn.Module, experts: dict[str, int]) -> Iterator[None]:
    """Change blocks of experts that run in this context, and whose calls are known, to :class:`SharedMeanwhile`.

    Args:
        model: a model of transformers on the meta device.
        experts: FQNs of its routed experts.
    """
    handles, known = [], dict[nn.Module, Order]()
    for fqn in experts:
        path, _, name = fqn.rpartition(".")
        block, calls = model.get_submodule(path), dict[str, tuple[tuple[Any, ...], Any]]()
        shared = [child for child, _ in block.named_children() if child in _SHARED]
        if len(shared) != 1:
            continue
        for child, part in block.named_children():
            handles.append(part.register_forward_hook(partial(_note_call, calls, child), with_kwargs=True))
        handles.append(block.register_forward_hook(partial(_note_order, known, calls, name, shared[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for block, order in known.items():
        join(block, SharedMeanwhile)
        vars(block)["order"] = order


def _note_call(calls: dict[str, Any], name: str, _: nn.Module, args: Any, more: dict[str, Any], result: Any) -> None:
    """Note a child's positional arguments and its result; nothing of one that takes keywords or runs twice."""
    calls[name] = ((), None) if more or name in calls else (args, result)


def _note_order(
    known: dict[nn.Module, Order], calls: dict[str, Any], experts: str, shared: str, block: nn.Module, rows: Any, _: Any
) -> None:
    """Note a block's children if each takes nothing but the block's rows, and experts the results of a router."""
    inputs = calls.get(experts, ((), None))[0]
    results = {name: result for name, (_, result) in calls.items() if isinstance(result, tuple) and len(result) == 3}
    routers = [
        name for name, (_, *of) in results.items() if len(inputs) == 3 and not any(map(is_not, of, inputs[:0:-1]))
    ]
    if len(rows) != 1 or len(routers) != 1 or shared not in calls:
        return
    flat = {}
    for name, more in ((routers[0], 0), (experts, 2), (shared, 0)):
        args = calls[name][0]
        if len(args) != 1 + more or not _same(args[0], rows[0]):
            return
        flat[name] = args[0].shape != rows[0].shape
    known[block] = Order(*((name, flat[name]) for name in (routers[0], experts, shared)))


def _same(rows: Tensor, whole: Tensor) -> bool:
    """Return whether rows are a tensor's, ``[..., width]`` or ``[T, width]``."""
    first, second = (x if x._base is None else x._base for x in (rows, whole))
    return first is second and rows.shape in (whole.shape, whole.flatten(0, -2).shape)
