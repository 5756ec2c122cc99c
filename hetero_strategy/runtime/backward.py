"""Backward of one stage, whole or in two halves.

The halves are those of torch.distributed.pipelining (``_backward.py``). Its search for the parts of the autograd graph
that belong to parameters is used as it is. Its drivers are not: the driver of I detaches outputs in place, which views
(the last operation of most modules here) do not allow, and before torch 2.13 the driver of W counts a weight twice that
is used twice in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
)
from torch.distributed.tensor import DTensor

from hetero_strategy.parallelize.gradients import local

Roots = list[tuple[GradientEdge, torch.Tensor]]
"""Outputs as edges of the graph, with their gradients. A backward empties the list, so that the graph is freed with it.
"""


def whole(roots: Roots) -> None:
    """Compute gradients of everything below the roots into ``.grad``."""
    outputs, gradients = [r for r, _ in roots], [g for _, g in roots]
    roots.clear()
    if outputs:
        torch.autograd.backward(outputs, gradients)


WeightsLater = Callable[[], None]
"""W: compute gradients of the weights into ``.grad``."""
Taken = WeakValueDictionary[int, torch.UntypedStorage]
"""Storages that hold the gradient of some leaf, by address."""


def inputs_first(
    roots: Roots, inputs: Sequence[torch.Tensor], weights: list[nn.Parameter], recomputed: Iterable[nn.Module] = ()
) -> WeightsLater:
    """Compute gradients of ``inputs`` (leaves) into ``.grad``: the half I. Keep what W needs.

    A weight that is used in several places, such as a tied embedding in a stage that holds both ends, gets its gradient
    here, because W would have to run the layers between these places a second time.

    Args:
        roots: outputs and their gradients, see :data:`Roots`.
        inputs: leaves that require a gradient.
        weights: trainable parameters of the stage.
        recomputed: parts whose forward runs again in a backward; their weights get their gradients here, since W would
            run the forward again for each weight.

    Returns:
        The half W.
    """
    if not inputs:  # no input needs a gradient, such as the image rows of a text microbatch
        return partial(whole, roots)
    outputs, gradients = [r for r, _ in roots], [g for _, g in roots]
    starts = [edge.node for edge in outputs]
    input_nodes = [node for node in map(_get_grad_fn_or_grad_acc, inputs) if node is not None]
    accumulates: dict[Any, nn.Parameter] = {_get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    groups = get_param_groups(input_nodes, list(accumulates), construct_reverse_graph(starts))
    at_once = {id(weight) for part in recomputed for weight in part.parameters()}
    groups = [
        group for group in groups
        if len(group["intermediates"]) == 1
        and not any(id(accumulates[node]) in at_once for node in group["params"])
    ]  # fmt: skip
    later = {node for group in groups for node in group["params"]}
    now = [weight for node, weight in accumulates.items() if node not in later]
    handles = []
    for group in groups:
        (node,) = group["intermediates"]
        group["intermediate"] = node
        handles.append(node.register_prehook(partial(_keep, group, _may_overwrite(node))))
    leaves = [*inputs, *now]
    try:
        leaf_gradients = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    taken = Taken()
    for leaf, gradient in zip(leaves, leaf_gradients, strict=True):
        _add(leaf, gradient, taken)
    return partial(_weights, accumulates, groups, taken)


def _weights(accumulates: dict[Any, nn.Parameter], groups: list[dict[str, Any]], taken: Taken) -> None:
    """Continue from the node at which a group's weights join the path of the inputs, with the gradients kept there."""
    for group in groups:
        kept = [(GradientEdge(group["intermediate"], i), g) for i, g in enumerate(group["grads"]) if g is not None]
        if kept:
            ends = [GradientEdge(node, 0) for node in group["params"]]
            weight_gradients = torch.autograd.grad([edge for edge, _ in kept], ends, [g for _, g in kept])
            for node, gradient in zip(group["params"], weight_gradients, strict=True):
                _add(accumulates[node], gradient, taken)
        group.clear()  # nodes and gradients reference each other


def _keep(group: dict[str, Any], overwritten: bool, gradients: Any) -> None:
    group["grads"] = [None if g is None else g.clone() for g in gradients] if overwritten else gradients


def _may_overwrite(node: Any) -> bool:
    """Return whether a backward is custom code that may write over its incoming gradient, as some fused norms do.

    The backwards of torch, including compiled ones, do not; nor do those of this package, which receive gradients that
    are still to arrive.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    written: type = type(node)._forward_cls  # type: ignore[attr-defined]
    return written.__module__.partition(".")[0] not in ("torch", "hetero_strategy")


def _add(leaf: torch.Tensor, gradient: torch.Tensor | None, taken: Taken) -> None:
    """Accumulate a gradient as autograd does. Two leaves that are summed share a gradient: give each its own."""
    if gradient is None:
        return
    if leaf.grad is not None:
        gradient = leaf.grad + gradient
    elif local(gradient).untyped_storage()._cdata in taken:
        gradient = _with_own_memory(gradient)
    memory = local(gradient).untyped_storage()
    taken[memory._cdata] = memory
    leaf.grad = gradient
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def _with_own_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Copy a gradient; partial sums stay partial, while ``clone`` would add them up over ranks."""
    part = local(gradient).clone()
    if not isinstance(gradient, DTensor):
        return part
    mesh = gradient.device_mesh
    return DTensor.from_local(
        part, mesh, gradient.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
    )
