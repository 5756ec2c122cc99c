"""Steps that all ranks of a group take together: all succeed, or all raise the same CheckpointError.

A rank that raised alone would leave the other ranks waiting in the next collective until it times out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hetero_strategy.checkpoint.tensorfile import bytes_of
from hetero_strategy.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class AllOrNone:
    """A team of ranks that save or load together.

    Every method raises the same CheckpointError on all ranks if the work fails on one of them or a rank is lost. An
    exception that is neither a CheckpointError nor an OSError keeps its type and traceback on the rank that raised it.
    """

    group: dist.ProcessGroup | None
    """The process group; None: the default group, or a single process without one."""
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> AllOrNone:
        """Return the team of a process group, which this rank must be part of."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return AllOrNone(None, 0, 1)
        return AllOrNone(group, dist.get_rank(group), dist.get_world_size(group))

    def from_one(self, work: Callable[[], T], rank: int = 0) -> T:
        """Run ``work`` on one rank and return its result on every rank."""
        result, message, fault = _attempt(work) if self.rank == rank else (None, None, None)
        if self.size > 1:
            sent: list[Any] = [(result, message)]
            with self._lost_rank_named():
                dist.broadcast_object_list(sent, src=self._global(rank), group=self.group)
            result, message = sent[0]
        _raise_fault(message, fault)
        return cast(T, result)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result once all have succeeded."""
        result, message, fault = _attempt(work)
        if not self.everywhere(fault is None):
            if self.size > 1:
                faults = [(rank, text) for rank, text in enumerate(self.shared(message)) if text is not None]
                more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
                message = f"{faults[0][1]} [rank {faults[0][0]}{more}]"
            _raise_fault(message, fault)
        return cast(T, result)

    def everywhere(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on every rank: one all-reduce of a byte."""
        return not self.anywhere([not flag])[0]

    def anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is true on any rank: one all-reduce of a byte per flag."""
        if self.size == 1 or not flags:
            return list(flags)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        bits = torch.tensor(flags, dtype=torch.uint8, device=device)
        with self._lost_rank_named():
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return bits.bool().tolist()

    def shared(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank. They should be small."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self._lost_rank_named():
                dist.all_gather_object(values, value, group=self.group)
        return values

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on rank 0, and an empty list on every other rank."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._lost_rank_named():
            dist.gather_object(value, values, dst=self._global(0), group=self.group)
        return values or []

    @contextmanager
    def _lost_rank_named(self) -> Iterator[None]:
        """Turn the failure of a collective, which another rank did not join, into a CheckpointError."""
        try:
            yield
        except RuntimeError as lost:
            raise CheckpointError(f"rank {self.rank}: another rank is lost or did not answer: {lost}") from lost

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None, Exception | None]:
    """Return the result of ``work``, or a message for all ranks and the exception."""
    try:
        return work(), None, None
    except CheckpointError as fault:
        return None, str(fault), fault
    except Exception as fault:
        if isinstance(fault, OSError) and fault.strerror:
            return None, f"{fault.filename or 'checkpoint'}: {fault.strerror}", fault
        return None, f"{type(fault).__name__}: {fault}", fault


def _raise_fault(message: str | None, fault: Exception | None) -> None:
    """Raise the message of the rank that failed; on that rank raise a fault of the program itself as it is."""
    if message is None:
        return
    if fault is not None and not isinstance(fault, (CheckpointError, OSError)):
        raise fault
    raise CheckpointError(message)


def refuse_unequal(team: AllOrNone, states: Mapping[str, object]) -> None:
    """Refuse states whose tensors differ between ranks, such as an average of the weights that a rank owns.

    A checkpoint keeps rank 0's tensors and returns them to all ranks. Tensors of a single number are not compared,
    because ranks may round a score differently.
    """
    if team.size == 1:
        return
    digests = {name: digest for name, state in states.items() if (digest := _digest(state)) is not None}
    if not team.anywhere([bool(digests)])[0]:
        return
    first = team.from_one(lambda: digests)
    names = sorted(first)
    differs = team.anywhere([digests.get(name) != first[name] for name in names] + [digests.keys() != first.keys()])
    if any(differs):
        unequal = [name for name, so in zip([*names, "one that is not on all ranks"], differs, strict=True) if so]
        raise CheckpointError(
            f"checkpoint: tensors in the state of {', '.join(unequal)} differ between ranks, and rank 0's are kept for"
            " all; leave them out of its state_dict() or on_save_checkpoint(), or keep them the same on all ranks"
        )


def _digest(state: object) -> int | None:
    """Return a checksum of all tensors of several numbers in a state; None if it has none."""
    leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor))
    dense = (leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta)  # the codec refuses others
    tensors, digest = [leaf for leaf in dense if leaf.numel() > 1], 0
    for tensor in tensors:
        digest = zlib.crc32(repr((tensor.dtype, tensor.shape)).encode(), digest)
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
        digest = zlib.crc32(bytes_of(plain), digest)
    return digest if tensors else None
