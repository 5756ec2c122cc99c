"""Keep activations of some blocks of a module in host memory between a forward and its backward.

torch's ``save_on_cpu`` moves one saved tensor after another, weights too, on the stream that computes, and back when
each is needed. Here the saved tensors of a block leave together at its end on a stream of their own, tensors that share
memory once, and come back one block ahead of the backward. Pinned memory comes from torch's allocator, which keeps
freed memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

SMALLEST = 4096
"""Bytes below which starting a copy takes longer than the memory is worth."""


@dataclass
class HostMemory:
    """The host memory in which blocks of one module on one rank keep activations.

    On CUDA the tensors of a block that has left are freed at a point where the computing stream comes after their
    copies: at the end of the next block, or at the start of a backward. So at most one block's tensors are in transit,
    and no memory waits for a stream that the allocator would have to ask. On the meta device tensors that leave are
    dropped, so what stays can be measured.
    """

    device: torch.device
    latest: SavedBlock | None = None
    """Last block of a stage's last forward that moved anything."""
    bytes: int = 0
    """Bytes on the host now."""
    most: int = 0
    """Most bytes that ever were on the host."""
    _streams: list[torch.cuda.Stream] = field(init=False)
    _leaving: list[Tensor] = field(init=False, default_factory=list)
    _left: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2 * (self.device.type == "cuda"))]

    @contextmanager
    def holding(self, stays: Iterable[Tensor], *, first: bool) -> Iterator[None]:
        """Put the tensors that one block saves for its backward in this context on the host.

        Args:
            stays: tensors that are not moved, nor any tensor that shares memory with them.
            first: whether no block of its stage came before it.
        """
        block = SavedBlock(self, None if first else self.latest, {_key(_plain(tensor)[0]) for tensor in stays})
        with saved_tensors_hooks(block.pack, _unpack):
            yield
        block.close()
        self.let_go()
        self.leave(block)
        # A block that saved nothing is never reached, and would not start the one before it.
        self.latest = block if block.alive() else block.before

    def come(self, block: SavedBlock) -> None:
        """Start to copy back the tensors of a block that are still needed."""
        self.let_go()
        memories = block.alive()
        buffers = [torch.empty(m.size, dtype=torch.uint8, device=self.device) for m in memories]
        with self._aside(1) as block.event:
            for memory, data in zip(memories, buffers, strict=True):
                data.copy_(memory.tensor, non_blocking=True)
                memory.tensor = data

    def let_go(self) -> None:
        """Free device memory of moved tensors: all later computing comes after the copies."""
        if self._left is not None:
            torch.cuda.current_stream(self.device).wait_event(self._left)
        self._leaving, self._left = [], None

    def leave(self, block: SavedBlock) -> None:
        """Start to copy a block's saved tensors to the host."""
        memories = block.alive()
        if self.device.type == "meta":
            for memory in memories:
                memory.tensor = torch.empty(0)
            return
        buffers = [self._made(m.size) for m in memories]
        with self._aside(0) as event:
            for memory, data in zip(memories, buffers, strict=True):
                data.copy_(memory.whole(), non_blocking=True)
                memory.tensor, left = data, memory.tensor
                self._leaving.append(left)
        self._left = event
        if event is None:
            self.let_go()

    @contextmanager
    def _aside(self, number: int) -> Iterator[torch.cuda.Event | None]:
        """Run copies after all computing so far, overlapping later work; yield the event after them."""
        with torch.no_grad():
            if not self._streams:
                yield None
                return
            stream, event = self._streams[number], torch.cuda.Event()
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                yield event
                event.record()

    def _made(self, size: int) -> Tensor:
        """Allocate host memory; on a CPU apart from operators' memory, so that tools which count that see it."""
        if self._streams:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            memory = _bytes(torch.UntypedStorage(size))
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(memory.untyped_storage(), self._freed, size)
        return memory

    def _freed(self, size: int) -> None:
        self.bytes -= size


@dataclass(eq=False)
class SavedBlock:
    """The tensors that one block saved in one forward. Only the autograd graph holds their memories."""

    host: HostMemory
    before: SavedBlock | None
    """Block before it in its stage, whose backward comes after."""
    stays: set[int]
    event: torch.cuda.Event | None = None
    """Event after which all tensors are back."""
    _coming: bool = False
    _here: bool = False
    _known: dict[int, _Memory] = field(default_factory=dict)
    """Memories by key, until the block is closed."""
    _memories: list[weakref.ref[_Memory]] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Note a saved tensor; one that stays is returned, detached from the graph."""
        plain, around = _plain(tensor)
        if not plain.is_floating_point() or plain.untyped_storage().nbytes() < SMALLEST or _key(plain) in self.stays:
            return tensor.detach()
        memory = self._known.setdefault(_key(plain), _Memory(self, plain.detach()))
        place = int(plain.storage_offset()), plain.shape, plain.stride()
        return _Saved(memory, plain.dtype, place, around)

    def close(self) -> None:
        """End the block: nothing more is saved.

        Memory that FSDP has freed already, a weight of a layer that is a unit of its own, stays: it is gathered into
        again before the backward of that layer.
        """
        self._memories = [weakref.ref(memory) for memory in self._known.values() if memory.size]
        self._known.clear()

    def alive(self) -> list[_Memory]:
        """Return the memories that are still needed."""
        return [memory for memory in (ref() for ref in self._memories) if memory is not None]

    def start(self) -> None:
        """Start to bring the block back, if that has not begun."""
        if not self._coming:
            self._coming = True
            self.host.come(self)

    def reach(self) -> None:
        """Wait until the block is back, as its backward begins; start the block that comes next."""
        if not self._here:
            self._here = True
            self.start()
            if self.event is not None:
                torch.cuda.current_stream(self.host.device).wait_event(self.event)
            if self.before is not None:
                self.before.start()


@dataclass(eq=False)
class _Memory:
    """A memory that saved tensors of one block share."""

    block: SavedBlock
    tensor: Tensor
    """Any tensor in the memory; after it has left, all its bytes."""

    @property
    def size(self) -> int:
        """Return the size of the memory in bytes."""
        return self.tensor.untyped_storage().nbytes()

    def whole(self) -> Tensor:
        """Return all its bytes."""
        return _bytes(self.tensor.untyped_storage())


class _Saved(NamedTuple):
    """A saved tensor in a memory."""

    memory: _Memory
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]
    """Offset, size and strides in numbers."""
    around: Callable[[Tensor], Tensor]


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    saved.memory.block.reach()
    data = saved.memory.tensor
    plain = torch.empty(0, dtype=saved.dtype, device=data.device).set_(data.untyped_storage(), *saved.place)
    return saved.around(plain)


def _plain(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return this rank's part of a tensor, and a function that makes such a part a tensor of the original kind."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if not isinstance(tensor, DTensor):
        return tensor, lambda plain: plain
    (plain, _), spec = _plain(tensor._local_tensor), tensor._spec
    return plain, lambda part: DTensor(part, spec, requires_grad=False)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def apply_offload(stage: nn.Module, blocks: Iterable[nn.Module], host: HostMemory) -> None:
    """Let these blocks of a stage, in their order, keep their activations in host memory; names stay as they are.

    Shared tensors stay: weights, a block's arguments besides its rows, and rows from another stage, which wait for
    their gradient.
    """
    for number, block in enumerate(blocks):
        stage.__dict__[_HOST] = host
        block.forward = partial(_moved, host, block, block.forward, not number)


_HOST = "_host_memory"


def host_memory(stage: nn.Module) -> HostMemory | None:
    """Return the host memory of a stage's blocks; None if it has none."""
    return stage.__dict__.get(_HOST)


def _moved(
    host: HostMemory,
    block: nn.Module,
    forward: Callable[..., Any],
    first: bool,
    rows: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(rows, *args, **kwargs)
    arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    came = [rows] * (rows.is_leaf and rows.requires_grad)
    with host.holding([*block.parameters(), *block.buffers(), *arguments, *came], first=first):
        return forward(rows, *args, **kwargs)
