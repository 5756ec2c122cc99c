"""Weights of a stage on a single rank, in the dtype that computes: copies of its masters while a step runs.

This does what FSDP2 does over a group of one, without hooks around every block: forwards and backwards run as in a
single precision, and gradients are added to those of the masters group by group, as a backward makes them.
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
"""Alignment in bytes of the begin of each copy, as for a separate allocation."""
FOLD_BYTES = 64 * 2**20
"""Bytes of copies' gradients after which they are folded and freed, about."""


class WeightCopies:
    """The copies of a stage's trained weights.

    Layers hold them from :meth:`gather` to :meth:`release`, and during a forward without gradients outside of a step.

    Args:
        stage: stage with its masters, on their device.
        dtype: dtype of the copies.
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
        """Masters by copy."""
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
        for master, copy in reversed(copies.items()):  # about the order of a backward
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
        """Return the bytes of the copies."""
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
        fresh: tuple[list[Tensor], list[Tensor]] = [], []
        sums: tuple[list[Tensor], list[Tensor]] = [], []
        for copy in self._arrived:
            (gradient, copy.grad), master = (copy.grad, None), self._masters[copy]
            if gradient is None:  # half a backward may bring it twice
                continue
            total, into = master.grad, sums
            if total is None:
                master.grad = total = torch.empty_like(gradient, dtype=master.dtype)
                into = fresh
            into[0].append(total)
            into[1].append(gradient)
        self._arrived.clear()
        with torch.no_grad():
            if fresh[0]:
                torch._foreach_copy_(*fresh)
            if sums[0]:
                torch._foreach_add_(*sums)

    def release(self) -> None:
        """Give the masters back to their layers; free the copies, and any gradients of a failed backward."""
        for copy in self._arrived:
            copy.grad = None
        self._arrived.clear()
        if self.there:
            for put, name, master, _ in self._places:
                put(name, master)
            self._memory.resize_(0)
            self.there = False

    def __deepcopy__(self, _: object) -> NoReturn:
        """Refuse to copy: copies have no memory between steps, and have hooks of their own."""
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
    """Make a parameter like ``like`` that begins at byte ``place`` of a memory."""
    tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
    return nn.Parameter(tensor.set_(memory, place // like.itemsize, like.shape, like.stride()))


def _weakly(method: Callable[[], None]) -> Callable[[Tensor], None]:
    """Make a hook that does not keep its owner alive: Python's collector does not see the hooks of a tensor."""
    owned = WeakMethod(method)

    def hook(_: Tensor) -> None:
        if (call := owned()) is not None:
            call()

    return hook


def _putting(part: nn.Module) -> Callable[[str, nn.Parameter], None]:
    """Return the function that sets a parameter of a layer."""
    if type(part).__setattr__ is nn.Module.__setattr__:
        return part._parameters.__setitem__
    return partial(setattr, part)  # such as an LSTM, which keeps a list of its weights


def copies_of(stage: nn.Module) -> WeightCopies | None:
    """Return the copies that a stage computes with, if :func:`compute_with_copies` made some."""
    return vars(stage).get("_hetero_copies")


def compute_with_copies(stage: nn.Module, dtype: torch.dtype) -> None:
    """Let a stage compute with copies of its weights in a dtype; call it once its parameters are in place."""
    vars(stage)["_hetero_copies"] = WeightCopies(stage, dtype)


def release_copies(stage: nn.Module) -> None:
    """Call :meth:`WeightCopies.release` for a stage that has copies."""
    if (copies := copies_of(stage)) is not None:
        copies.release()


@contextmanager
def masters_kept(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Give layers their masters back if the body fails, so that saving or training the model finds them."""
    try:
        yield
    except BaseException:
        for stage in stages:
            release_copies(stage)
        raise
