"""Weights of a stage that one rank has for itself, in the dtype that computes: copies of its masters while a step runs.

It is what FSDP2 does over a group of one, without hooks around every block: forwards and backwards run as in one
precision, and gradients go into those of the masters one by one, as a backward makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class WeightCopies:
    """Those of what trains in a stage; layers hold them from :meth:`gather` to :meth:`release`, and while a forward
    without gradients runs outside of a step.

    Args:
        stage: with its masters, on their device.
        dtype: of the copies.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype) -> None:
        copies = {
            master: nn.Parameter(torch.empty_like(master, dtype=dtype))
            for master in stage.parameters()
            if master.requires_grad and master.is_floating_point()
        }
        self._masters: list[Tensor] = list(copies)
        self._copies: list[Tensor] = list(copies.values())
        self._places = [
            (part, name, master)
            for part in stage.modules()
            for name, master in part._parameters.items()
            if master is not None and master in copies
        ]
        self._at: list[nn.Parameter] = [copies[master] for _, _, master in self._places]
        self._sizes = [copy.untyped_storage().size() for copy in self._copies]
        self.there = True
        """Whether layers hold the copies."""
        for master, copy in copies.items():
            vars(copy).update(vars(master))
            copy.register_post_accumulate_grad_hook(partial(_fold, master))
        self.release()
        self._lent = False
        stage.register_forward_pre_hook(self._lend)
        stage.register_forward_hook(self._take_back, always_call=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies)

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the masters, and let layers compute with the copies."""
        self.there = True
        for copy, size in zip(self._copies, self._sizes, strict=True):
            copy.untyped_storage().resize_(size)
        torch._foreach_copy_(self._copies, self._masters)
        for (part, name, _), copy in zip(self._places, self._at, strict=True):
            _put(part, name, copy)

    def release(self) -> None:
        """Give the masters back to their layers, and free the copies."""
        if self.there:
            for part, name, master in self._places:
                _put(part, name, master)
            for copy in self._copies:
                copy.untyped_storage().resize_(0)
            self.there = False

    def _lend(self, *_: object) -> None:
        if not self.there and not torch.is_grad_enabled():
            self._lent = True
            self.gather()

    def _take_back(self, *_: object) -> None:
        if self._lent:
            self._lent = False
            self.release()


def _put(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(part).__setattr__ is nn.Module.__setattr__:
        part._parameters[name] = parameter
    else:  # such as an LSTM's, which keeps a list of its weights
        setattr(part, name, parameter)


def copies_of(stage: nn.Module) -> WeightCopies | None:
    """Return the copies that a stage computes with, where :func:`compute_with_copies` made some."""
    return vars(stage).get("_hetero_copies")


def compute_with_copies(stage: nn.Module, dtype: torch.dtype) -> None:
    """Let a stage compute with copies of its weights in this dtype; call it once its parameters are where they stay."""
    vars(stage)["_hetero_copies"] = WeightCopies(stage, dtype)


@contextmanager
def masters_kept(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Give layers their masters back if what is done fails: who saves or trains the model then is to find them."""
    try:
        yield
    except BaseException:
        for stage in stages:
            if (copies := copies_of(stage)) is not None:
                copies.release()
        raise


@torch.no_grad()
def _fold(master: nn.Parameter, copy: Tensor) -> None:
    """Move a copy's gradient into its master's, in whose dtype gradients add up."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
