"""Which activations a module's blocks keep in host memory between a forward and its backward.

torch's ``save_on_cpu`` moves one saved tensor after the other, weights too, on the stream that computes, and back when
each is needed. Here the saved tensors of a block leave together at its end on a stream of their own, those that share
memory once, and come back one block ahead of the backward. Pinned memory is torch's, whose allocator keeps what is
freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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

from hetero_strategy.errors import ConfigError
from hetero_strategy.parallelize.per_module import per_module
from hetero_strategy.parallelize.recompute import Recompute, SomeBlocks, every

SMALLEST = 4096
"""Bytes below which a copy takes longer to start than the memory is worth."""
WAYS = "all, every 2 (or another number)"


@dataclass(frozen=True)
class Offload(SomeBlocks):
    """Which blocks of a module have their activations in host memory."""


def offloads(given: Iterable[str] | Mapping[str, Any] | None) -> dict[str, Offload]:
    """What a person says: nothing, module names, or module name -> one of :data:`WAYS`.

    Raises:
        ConfigError: another value.
    """
    said = per_module("offload", given, "all")
    for name, way in said.items():
        if every(way) is None:
            raise ConfigError(f"HeteroStrategy: offload of '{name}' is {way!r}; use one of: {WAYS}")
    return {name: Offload(every(way) or 1) for name, way in said.items()}


def check_offload(
    offload: Collection[str], recompute: Mapping[str, Recompute], compile: Collection[str], tp: Mapping[str, int]
) -> None:
    """Refuse to move what is not kept, what torch keeps elsewhere, and what it compiles otherwise when it runs again.

    Args:
        compile: modules whose blocks are compiled.
        tp: tensor-parallel degree of every module.

    Raises:
        ConfigError: a module whose recompute is ``whole`` or ``all but matmuls``, or that is compiled, recomputed and
            tensor parallel.
    """
    for name in offload:
        if (why := refusal(name, recompute.get(name), name in compile, tp[name])) is not None:
            raise ConfigError(why)


def refusal(name: str, how: Recompute | None, compiled: bool, tp: int) -> str | None:
    """Why a module's blocks cannot be offloaded beside what else is done with them; None: they can."""
    if how is not None and (how.whole or how.keeps_matmuls):
        why = "keeps nothing in its blocks" if how.whole else "keeps what torch does not let go"
        fix = f"set recompute of '{name}' to 'all' or 'every 2'"
    elif how is not None and compiled and tp > 1:
        why = f"with compile and tp={tp} compares compiled code with that of other tensors"
        fix = f"leave '{name}' out of recompute or compile"
    else:
        return None
    return (
        f"HeteroStrategy: offload names '{name}', whose recompute is '{how}' and {why}; {fix}, or leave '{name}' out of"
        " offload"
    )


@dataclass
class HostMemory:
    """Where blocks of one module on one rank put what they keep.

    On CUDA the tensors of a block that has left are let go where the stream that computes comes after their copies: at
    the end of the next block, or at the start of a backward. So at most one block's are on their way, and no memory
    waits for a stream that the allocator would have to ask.
    """

    device: torch.device
    latest: SavedBlock | None = None
    """The last block of a stage's last forward that moved anything."""
    bytes: int = 0
    """On the host now."""
    most: int = 0
    """The most that ever were."""
    _streams: list[torch.cuda.Stream] = field(init=False)
    _leaving: list[Tensor] = field(init=False, default_factory=list)
    _left: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2 * (self.device.type == "cuda"))]

    @contextmanager
    def holding(self, stays: Iterable[Tensor], *, first: bool) -> Iterator[None]:
        """Put on the host what one block saves for its backward meanwhile.

        Args:
            stays: tensors that are not moved, nor what shares memory with them.
            first: no block of its stage came before it.
        """
        block = SavedBlock(self, None if first else self.latest, {_key(_plain(tensor)[0]) for tensor in stays})
        with saved_tensors_hooks(block.pack, _unpack):
            yield
        block.close()
        self.let_go()
        self.leave(block)
        # One that saved nothing is never reached, and would not start the one before it.
        self.latest = block if block.alive() else block.before

    def come(self, block: SavedBlock) -> None:
        """Start to copy back what is still needed of a block."""
        self.let_go()
        found = block.alive()
        made = [torch.empty(m.size, dtype=torch.uint8, device=self.device) for m in found]
        with self._aside(1) as block.event:
            for memory, data in zip(found, made, strict=True):
                data.copy_(memory.tensor, non_blocking=True)
                memory.tensor = data

    def let_go(self) -> None:
        """Let the memory go of what has left: whatever is computed from here on comes after the copies."""
        if self._left is not None:
            torch.cuda.current_stream(self.device).wait_event(self._left)
        self._leaving, self._left = [], None

    def leave(self, block: SavedBlock) -> None:
        """Start to copy what a block saved to the host."""
        found = block.alive()
        made = [self._made(m.size) for m in found]
        with self._aside(0) as event:
            for memory, data in zip(found, made, strict=True):
                data.copy_(memory.whole(), non_blocking=True)
                memory.tensor, left = data, memory.tensor
                self._leaving.append(left)
        self._left = event
        if event is None:
            self.let_go()

    @contextmanager
    def _aside(self, number: int) -> Iterator[torch.cuda.Event | None]:
        """Copies that come after all that was computed so far, beside what follows; the event after them."""
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
        """Memory of the host; on a CPU made apart from what operators make, so that those who count that see it."""
        if self._streams:
            made = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            made = _bytes(torch.UntypedStorage(size))
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(made.untyped_storage(), self._freed, size)
        return made

    def _freed(self, size: int) -> None:
        self.bytes -= size


@dataclass(eq=False)
class SavedBlock:
    """What one block saved in one forward. Its memories are the autograd graph's alone, and go with it."""

    host: HostMemory
    before: SavedBlock | None
    """The one before it in its stage, whose backward comes after."""
    stays: set[int]
    event: torch.cuda.Event | None = None
    """After which all has come back."""
    _coming: bool = False
    _here: bool = False
    _known: dict[int, _Memory] = field(default_factory=dict)
    """Until it is closed."""
    _memories: list[weakref.ref[_Memory]] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Note a saved tensor; what stays is kept as it is, apart from its place in the graph."""
        plain, around = _plain(tensor)
        if not plain.is_floating_point() or plain.untyped_storage().nbytes() < SMALLEST or _key(plain) in self.stays:
            return tensor.detach()
        memory = self._known.setdefault(_key(plain), _Memory(self, plain.detach()))
        place = int(plain.storage_offset()), plain.shape, plain.stride()
        return _Saved(memory, plain.dtype, place, around)

    def close(self) -> None:
        """Nothing more is saved. What FSDP has freed already, a weight of a layer that is a unit of its own, stays: its
        memory is gathered into again before the backward of that layer.
        """
        self._memories = [weakref.ref(memory) for memory in self._known.values() if memory.size]
        self._known.clear()

    def alive(self) -> list[_Memory]:
        """Memories that something still needs."""
        return [memory for memory in (ref() for ref in self._memories) if memory is not None]

    def start(self) -> None:
        """Start to bring it back, if that has not begun."""
        if not self._coming:
            self._coming = True
            self.host.come(self)

    def reach(self) -> None:
        """The backward is here: what it needs next starts too."""
        if not self._here:
            self._here = True
            self.start()
            if self.event is not None:
                torch.cuda.current_stream(self.host.device).wait_event(self.event)
            if self.before is not None:
                self.before.start()


@dataclass(eq=False)
class _Memory:
    """Memory that saved tensors of one block share."""

    block: SavedBlock
    tensor: Tensor
    """Any tensor in it, or from when it has left on all its bytes."""

    @property
    def size(self) -> int:
        """Of all of it, in bytes."""
        return self.tensor.untyped_storage().nbytes()

    def whole(self) -> Tensor:
        """All its bytes."""
        return _bytes(self.tensor.untyped_storage())


class _Saved(NamedTuple):
    """A tensor in a memory."""

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
    """This rank's part of a tensor, and what makes of such a part what the tensor was."""
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

    What is shared stays: weights, what a block is given besides its rows, and rows that came from another stage, which
    wait for their gradient.
    """
    for number, block in enumerate(blocks):
        stage.__dict__[_HOST] = host
        block.forward = partial(_moved, host, block, block.forward, not number)


_HOST = "_host_memory"


def host_memory(stage: nn.Module) -> HostMemory | None:
    """Where blocks of a stage put what they keep; None where none does."""
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
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    came = [rows] * (rows.is_leaf and rows.requires_grad)
    with host.holding([*block.parameters(), *block.buffers(), *given, *came], first=first):
        return forward(rows, *args, **kwargs)
