"""Observe every communication of a process at torch's dispatcher: in forwards, backwards, FSDP and DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGES = ("send", "recv_")
"""Torch's operators that carry messages between two ranks."""


class Operation(NamedTuple):
    """One communication that this rank's host has started."""

    name: str
    """Name of torch's operator, such as ``allreduce_`` or ``send``."""
    group: str
    """Name of the process group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    peer: int | None
    """Global rank of the other side of a message."""
    tag: int
    """Tag of a message; 0 for a collective."""
    beside: bool
    """Whether NCCL runs it on a stream of its group's own, beside what the host enqueues next."""

    @property
    def is_message(self) -> bool:
        """Whether it is one side of a message; else it is a collective."""
        return self.name in MESSAGES


class Operations(TorchDispatchMode):
    """Tells a subclass of every operator that runs: of communications, of what waits for them, and of all others."""

    def started(self, operation: Operation, work: Work | torch.Tensor) -> None:
        """A communication was started; ``work`` is what its caller waits for: a work, or a tensor of DTensor's."""

    def waited(self, tensor: torch.Tensor) -> None:
        """The host let its stream wait for a tensor that :meth:`started` had as ``work``."""

    def computed(self) -> None:
        """An operator ran that communicates nothing."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        name = operator._opname
        if operator.namespace == "c10d":
            group = next(group for group in map(_unboxed, args) if group is not None)
            message = name in MESSAGES
            peer, tag = (dist.get_global_rank(group, args[2]), args[3]) if message else (None, 0)
            work = Work.unbox(out[-1] if isinstance(out, (tuple, list)) else out)
            self.started(_operation(name, group, peer, tag, message or _asynchronous(operator, args)), work)
        elif operator.namespace == "_c10d_functional" and name == "wait_tensor":
            self.waited(args[0])
        elif operator.namespace == "_c10d_functional" and isinstance(args[-1], str):
            self.started(_operation(name, _resolve_process_group(args[-1]), None, 0, True), out)
        else:
            self.computed()
        return out


def _operation(name: str, group: ProcessGroup, peer: int | None, tag: int, beside: bool) -> Operation:
    return Operation(name, group.group_name, tuple(dist.get_process_group_ranks(group)), peer, tag, beside)


def _unboxed(value: Any) -> ProcessGroup | None:
    try:
        return ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, ValueError):
        return None


def _asynchronous(operator: Any, args: tuple[Any, ...]) -> bool:
    """Return what a collective was told, or torch's default, which the dispatcher leaves out."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name in ("asyncOp", "async_op"):
            return bool(args[place] if place < len(args) else argument.default_value)
    return True
