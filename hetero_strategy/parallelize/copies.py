"""Weights of a stage that one rank has for itself, in the dtype that computes: copies of its masters while a step runs.

It is what FSDP2 does over a group of one, without hooks around every block: forwards and backwards run as in one
precision, and gradients go into those of the masters some at a time, as a backward makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from math import ceil
from typing import NoReturn
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError

ALIGNED = 512
"""Bytes at a multiple of which each copy begins, as if it had been allocated by itself."""
FOLD_BYTES = 64 * 2**20
"""Gradients of copies are let go once they take about this much."""


class WeightCopies:
    """Those of what trains in a stage; layers hold them from :meth:`gather` to :meth:`release`, and while a forward
    without gradients runs outside of a step.

    Args:
        stage: with its masters, on their device.
        dtype: of the copies.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype) -> None:
        masters = [master for master in stage.parameters() if master.requires_grad and master.is_floating_point()]
        sizes = [master.numel() * dtype.itemsize for master in masters]
        places = [0, *accumulate(ceil(size / ALIGNED) * ALIGNED for size in sizes)]
        self._bytes = places.pop()
        device = masters[0].device if masters else None
        self._memory = torch.empty(self._bytes, dtype=torch.uint8, device=device).untyped_storage()
        self._masters = {
            _at(place, self._memory, torch.empty_like(master, dtype=dtype, device="meta")): master
            for master, place in zip(masters, places, strict=True)
        }
        """By copy."""
        copies = {master: copy for copy, master in self._masters.items()}
        self._places = [
            (_putting(part), name, master, copies[master])
            for part in stage.modules()
            for name, master in part._parameters.items()
            if master is not None and master in copies
        ]
        self.there = True
        """Whether layers hold the copies."""
        self._arrived: list[nn.Parameter] = []
        """Copies whose gradients a backward has made."""
        waiting = 0
        for master, copy in reversed(copies.items()):  # about as a backward goes
            vars(copy).update(vars(master))
            copy.register_post_accumulate_grad_hook(self._arrived.append)
            waiting += copy.nbytes
            if waiting >= FOLD_BYTES:
                waiting = 0
                copy.register_post_accumulate_grad_hook(_weakly(self.fold))
        self.release()
        self._lent = False
        stage.register_forward_pre_hook(self._lend)
        stage.register_forward_hook(self._take_back, always_call=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._masters)

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the masters, and let layers compute with the copies."""
        self.there = True
        self._memory.resize_(self._bytes)
        torch._foreach_copy_(list(self._masters), list(self._masters.values()))
        for put, name, _, copy in self._places:
            put(name, copy)

    def fold(self) -> None:
        """Move gradients of copies into those of the masters, in whose dtype they add up. Call it after a backward."""
        if not self._arrived:
            return
        made: tuple[list[Tensor], list[Tensor]] = [], []
        sums: tuple[list[Tensor], list[Tensor]] = [], []
        for copy in self._arrived:
            (gradient, copy.grad), master = (copy.grad, None), self._masters[copy]
            if gradient is None:  # half a backward may bring it twice
                continue
            total, into = master.grad, sums
            if total is None:
                master.grad = total = torch.empty_like(gradient, dtype=master.dtype)
                into = made
            into[0].append(total)
            into[1].append(gradient)
        self._arrived.clear()
        with torch.no_grad():
            if made[0]:
                torch._foreach_copy_(*made)
            if sums[0]:
                torch._foreach_add_(*sums)

    def release(self) -> None:
        """Give the masters back to their layers, and free the copies, and what a backward that failed has left."""
        for copy in self._arrived:
            copy.grad = None
        self._arrived.clear()
        if self.there:
            for put, name, master, _ in self._places:
                put(name, master)
            self._memory.resize_(0)
            self.there = False

    def __deepcopy__(self, _: object) -> NoReturn:
        """Copies have no memory between steps, and hooks of theirs."""
        raise ModelError(
            "a model that computes with half-precision copies of its weights cannot be deep-copied; copy it before the"
            " Trainer has placed it, or load a checkpoint into another one"
        )

    def _lend(self, *_: object) -> None:
        if not self.there and not torch.is_grad_enabled():
            self._lent = True
            self.gather()

    def _take_back(self, *_: object) -> None:
        if self._lent:
            self._lent = False
            self.release()


def _at(place: int, memory: torch.UntypedStorage, like: Tensor) -> nn.Parameter:
    """A tensor of this dtype, shape and strides that begins at this byte."""
    tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
    return nn.Parameter(tensor.set_(memory, place // like.itemsize, like.shape, like.stride()))


def _weakly(method: Callable[[], None]) -> Callable[[Tensor], None]:
    """A hook that does not keep the method's owner: a tensor keeps its hooks where Python's collector does not look."""
    owned = WeakMethod(method)

    def hook(_: Tensor) -> None:
        if (call := owned()) is not None:
            call()

    return hook


def _putting(part: nn.Module) -> Callable[[str, nn.Parameter], None]:
    """What gives a layer another parameter."""
    if type(part).__setattr__ is nn.Module.__setattr__:
        return part._parameters.__setitem__
    return partial(setattr, part)  # such as an LSTM, which keeps a list of its weights


def copies_of(stage: nn.Module) -> WeightCopies | None:
    """Return the copies that a stage computes with, where :func:`compute_with_copies` made some."""
    return vars(stage).get("_hetero_copies")


def compute_with_copies(stage: nn.Module, dtype: torch.dtype) -> None:
    """Let a stage compute with copies of its weights in this dtype; call it once its parameters are where they stay."""
    vars(stage)["_hetero_copies"] = WeightCopies(stage, dtype)


def release_copies(stage: nn.Module) -> None:
    """:meth:`WeightCopies.release` of a stage that has copies."""
    if (copies := copies_of(stage)) is not None:
        copies.release()


@contextmanager
def masters_kept(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Give layers their masters back if what is done fails: who saves or trains the model then is to find them."""
    try:
        yield
    except BaseException:
        for stage in stages:
            release_copies(stage)
        raise
