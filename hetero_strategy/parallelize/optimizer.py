"""Let optimizers step on this rank's shards, so that one kernel takes parameters of every kind and mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hetero_strategy.parallelize.gradients import Owned, local

ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""Optimizers that treat every element of a parameter alone, and so a shard as well as the whole."""
FUSED = (optim.Adam, optim.AdamW)
"""Elementwise optimizers with a fused kernel on every device. SGD's fails if some parameters have had no gradient yet.
"""


def choose_kernels(optimizers: Iterable[Optimizer], owned: Mapping[int, Owned], agree: Callable[[bool], bool]) -> None:
    """Let elementwise optimizers step on shards by a multi-tensor kernel: fused if there is one, else foreach.

    All other optimizers see parameters as they are. Multi-tensor kernels take sharded or unsharded parameters, not
    both, so such an optimizer loops over a group that has both on some rank. All ranks do the same, or copies of a
    parameter would drift apart by rounding.

    Args:
        optimizers: optimizers in the same order on all ranks.
        owned: this rank's parameters by ``id``.
        agree: a collective that returns whether any rank passes true.
    """
    for optimizer in optimizers:
        # Otherwise Lightning and torch leave unscaling to the optimizer, which only looks at this rank's gradients.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if type(optimizer).step in [kind.step for kind in ELEMENTWISE]:
            _Shards(optimizer)
            continue
        if not type(optimizer).__module__.startswith("torch."):
            rank_zero_warn(
                f"{type(optimizer).__name__} steps as it is, and every rank has its own modules' parameters alone: what"
                " it computes of each parameter is right, what it computes of all of them (a global norm, an estimate"
                " of the learning rate) differs between ranks, which then train apart"
            )
        for group in optimizer.param_groups:
            if group.get("foreach", False) is False and not group.get("fused"):
                continue
            kinds = {type(owned[id(p)].parameter) for p in group["params"] if id(p) in owned}
            if agree(len(kinds) > 1):
                if group.get("foreach") or group.get("fused"):
                    rank_zero_warn("foreach/fused is off where sharded and unsharded parameters share a group")
                group["foreach"] = False
                if "fused" in group:
                    group["fused"] = False


class _Shards:
    """A wrapper that puts this rank's parts in the place of sharded parameters and of their states while an optimizer
    steps.

    Before and after, and while a closure runs, the optimizer holds the parameters themselves, and its state is of
    DTensors, as all code that reads or saves it expects.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self._values: dict[nn.Parameter, dict[str, tuple[Any, Any]]] = {}
        """Values of each parameter's state, each with this rank's part of it, which shares its memory."""
        self._groups: list[list[nn.Parameter]] = []
        step = optimizer.step

        @functools.wraps(step)
        def on_shards(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            def outside() -> Any:
                assert closure is not None
                self._leave()
                try:
                    return closure()
                finally:
                    self._enter()

            self._enter()
            try:
                return step(None if closure is None else outside)
            finally:
                self._leave()

        optimizer.step = MethodType(on_shards, optimizer)  # type: ignore[method-assign] # schedulers wrap a method
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                fused = isinstance(optimizer, FUSED) and group.get("fused") is None
                group["fused" if fused else "foreach"] = True

    @torch.no_grad()
    def _enter(self) -> None:
        groups = self._optimizer.param_groups
        self._groups = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [self._part(p) if isinstance(p, DTensor) else p for p in group["params"]]

    @torch.no_grad()
    def _leave(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            for p, part in zip(parameters, group["params"], strict=True):
                if p is not part:
                    self._give_back(p, part)
            group["params"] = parameters

    def _part(self, p: Any) -> nn.Parameter:
        """Return this rank's part of a parameter, with its gradient and state."""
        part = self._parts.get(p)
        if part is None:
            part = self._parts[p] = nn.Parameter(local(p).detach(), p.requires_grad)
            part.whole = p  # type: ignore[attr-defined]  # for hooks of the step, which meet parts
        part.data = local(p)  # FSDP2 may have moved it
        part.grad = None if p.grad is None else local(p.grad)
        state, known = self._optimizer.state, self._values.setdefault(p, {})
        if p in state:
            for key, value in state[p].items():
                if key not in known or known[key][0] is not value:
                    known[key] = value, local(value) if isinstance(value, torch.Tensor) else value
            state[part] = {key: known[key][1] for key in state.pop(p)}
        return part

    def _give_back(self, p: Any, part: nn.Parameter) -> None:
        if part.grad is not None:  # changed, for code that compares versions
            torch.autograd.graph.increment_version(p)
        part.grad = None
        state, known = self._optimizer.state, self._values[p]
        if part in state:
            for key, value in state[part].items():
                if key not in known or known[key][1] is not value:
                    known[key] = _like(p, part, value), value
            state[p] = {key: known[key][0] for key in state.pop(part)}


def _like(p: DTensor, part: torch.Tensor, value: Any) -> Any:
    """Turn a value of a part's state into one of the whole parameter's."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != part.shape:
        return value
    options: dict[str, Any] = {"run_check": False, "shape": p.shape, "stride": p.stride()}
    return DTensor.from_local(value, p.device_mesh, p.placements, **options)
