"""Observe every communication of a process at torch's dispatcher: in forwards, backwards, FSDP and DTensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGES = {"send": True, "recv_": False}
"""Operation of torch that carries a message -> whether this rank sends it."""
LOCAL = {"wait_tensor", "_wrap_tensor_autograd"}
"""Operations of torch's namespaces of collectives that communicate nothing."""


class Operation(NamedTuple):
    """One communication that this rank's host has started."""

    name: str
    """Of torch's operator, such as ``allreduce_`` or ``send``."""
    group: str
    """Name of the process group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    peer: int | None
    """Global rank of the other side of a message."""


class Operations(TorchDispatchMode):
    """Calls ``started`` with every communication and with what waits for it.

    A message has not left when it is seen; waiting for it alone, before the rest of its batch, would hang.
    """

    def __init__(self, started: Callable[[Operation, Callable[..., Any]], None]) -> None:
        super().__init__()
        self._started = started

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        name = operator._opname
        if operator.namespace == "c10d":
            group = next(g for g in map(_unboxed, args) if isinstance(g, ProcessGroup))
            work = Work.unbox(out[-1] if isinstance(out, (tuple, list)) else out)
            peer = dist.get_global_rank(group, args[2]) if name in MESSAGES else None
            self._started(_operation(name, group, peer), work.wait)
        elif operator.namespace == "_c10d_functional" and name not in LOCAL:
            group = _resolve_process_group(args[-1])
            # torch takes no limit here; that of the group holds.
            self._started(_operation(name, group, None), lambda *_: torch.ops._c10d_functional.wait_tensor(out))
        return out


def _operation(name: str, group: ProcessGroup, peer: int | None) -> Operation:
    return Operation(name, group.group_name, tuple(dist.get_process_group_ranks(group)), peer)


def _unboxed(value: Any) -> Any:
    try:
        return ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, ValueError):
        return None


@contextmanager
def collectives_block(patience: float) -> Iterator[None]:
    """While it lasts, the host of a rank goes on after a collective only when the collective has ended.

    Args:
        patience: seconds until the host gives up.

    Raises:
        RuntimeError: in the collective that hangs.
    """

    def started(operation: Operation, wait: Callable[..., Any]) -> None:
        if operation.name not in MESSAGES:
            try:
                wait(timedelta(seconds=patience))
            except RuntimeError as error:
                me = dist.get_rank()
                raise RuntimeError(f"rank {me} hangs: nobody came to {operation.name} of {operation.ranks}") from error

    with Operations(started):
        yield
