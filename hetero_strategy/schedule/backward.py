"""One stage's backward, whole or in two halves.

The halves are those of torch.distributed.pipelining (``_backward.py``), whose search for the parts of the autograd
graph that belong to parameters is used as it is. Its drivers are not: that of I detaches outputs in place, which views
(the last operation of most modules here) do not allow, and that of W counts a weight twice that is used twice in a row,
before torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
)

Roots = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Outputs with a gradient function, and their gradients."""


def whole(roots: Roots) -> None:
    """Gradients of everything below the roots, into ``.grad``."""
    if roots:
        torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])


WeightsLater = Callable[[], None]
"""W: gradients of the weights, into ``.grad``."""


def inputs_first(roots: Roots, inputs: Sequence[torch.Tensor], weights: list[nn.Parameter]) -> WeightsLater:
    """I: gradients of ``inputs`` (leaves) into ``.grad``; keeps what W needs.

    Args:
        roots: see :data:`Roots`.
        inputs: leaves that require a gradient.
        weights: trainable parameters of the stage.
    """
    if not inputs:  # nothing came in that trains, such as the rows of pictures in a microbatch of text
        return partial(whole, roots)
    outputs, gradients = [r for r, _ in roots], [g for _, g in roots]
    starts = [node for node in map(_get_grad_fn_or_grad_acc, outputs) if node is not None]
    input_nodes = [node for node in map(_get_grad_fn_or_grad_acc, inputs) if node is not None]
    weight_nodes = [node for node in map(_get_grad_fn_or_grad_acc, weights) if node is not None]
    groups = get_param_groups(input_nodes, weight_nodes, construct_reverse_graph(starts))
    handles = []
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [None] * len(group["intermediates"])
        for i, node in enumerate(group["intermediates"]):
            handles.append(node.register_prehook(_keeper(group["grads"], i)))
    try:
        found = torch.autograd.grad(outputs, list(inputs), gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return partial(_weights, weights, groups)


def _weights(weights: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Go on from the nodes at which a group's weights join the way of the inputs, with the gradients kept there."""
    accumulates = {_get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    for group in groups:
        kept = [(node, grads) for node, grads in zip(group["intermediates"], group["grads"], strict=True) if grads]
        starts = [(GradientEdge(node, i), g) for node, grads in kept for i, g in enumerate(grads) if g is not None]
        if not starts:
            continue
        # What reaches a node from another one of the group is in its kept gradient already.
        handles = [node.register_prehook(_constant(grads)) for node, grads in kept] if len(kept) > 1 else []
        ends = [GradientEdge(node, 0) for node in group["params"]]
        try:
            found = torch.autograd.grad([edge for edge, _ in starts], ends, [g for _, g in starts])
        finally:
            for handle in handles:
                handle.remove()
        for node, gradient in zip(group["params"], found, strict=True):
            weight = accumulates[node]
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        group.clear()  # nodes and gradients hold each other


def _constant(grads: Any):  # type: ignore[no-untyped-def]
    return lambda _: grads


def _keeper(grads: list[Any], place: int):  # type: ignore[no-untyped-def]
    def keep(gradients):  # type: ignore[no-untyped-def]
        grads[place] = gradients

    return keep
