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


class Copies:
    """Those of what trains in a stage; layers hold them from :meth:`gather` to :meth:`release`.

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
            (part._parameters, name, master)
            for part in stage.modules()
            for name, master in part._parameters.items()
            if master is not None and master in copies
        ]
        self._at = [copies[master] for _, _, master in self._places]
        self._sizes = [copy.untyped_storage().size() for copy in self._copies]
        self.there = True
        """Whether layers hold the copies."""
        for master, copy in copies.items():
            vars(copy).update(vars(master))
            copy.register_post_accumulate_grad_hook(partial(_fold, master))
        self.release()

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
        for (held, name, _), copy in zip(self._places, self._at, strict=True):
            held[name] = copy

    def release(self) -> None:
        """Give the masters back to their layers, and free the copies."""
        if self.there:
            self.there = False
            for held, name, master in self._places:
                held[name] = master
            for copy in self._copies:
                copy.untyped_storage().resize_(0)


def copies_of(stage: nn.Module) -> Copies | None:
    """Return the copies that a stage computes with, where :func:`compute_with_copies` made some."""
    return vars(stage).get("_hetero_copies")


def compute_with_copies(stage: nn.Module, dtype: torch.dtype) -> None:
    """Let a stage compute with copies of its weights in this dtype; call it once its parameters are where they stay."""
    vars(stage)["_hetero_copies"] = Copies(stage, dtype)


@contextmanager
def masters_kept(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Give layers their masters back if what is done fails: whoever saves the model then is to find them."""
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
