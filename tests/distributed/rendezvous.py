"""gloo made as unforgiving as NCCL can be: messages and collectives that hold up their hosts until all have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.transport import Wire, WireMessage

PATIENCE = 30.0
"""Seconds that a host is held up before it is said to hang."""
KINDS = ("first message", "receive", "everything")
"""``first message`` of two ranks in one group and direction: both hosts wait for each other (NCCL connects them then).
``receive``: its host waits until the other side has sent. ``everything``: both hosts of a message wait for each other,
and the hosts of a collective until it has ended, also where FSDP or DTensor starts it."""


class _Blocking(TorchDispatchMode):
    """Hold up this rank's host in each collective until it has ended, also where FSDP or DTensor starts it."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self.patience = timedelta(seconds=patience)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        name = operator._opname
        try:
            if operator.namespace == "c10d" and name not in ("send", "recv_"):
                Work.unbox(out[-1] if isinstance(out, (tuple, list)) else out).wait(self.patience)
            elif operator.namespace == "_c10d_functional" and name != "wait_tensor" and isinstance(args[-1], str):
                torch.ops._c10d_functional.wait_tensor(out)  # torch takes no limit here; that of the group holds
        except RuntimeError as error:
            raise RuntimeError(f"rank {dist.get_rank()} hangs: nobody came to {name}") from error
        return out


@contextmanager
def unforgiving(kind: str, patience: float = PATIENCE) -> Iterator[None]:
    """While it lasts, batches of messages hold up this rank's host, round by round, for so many seconds at most each.

    Raises:
        RuntimeError: in the step that hangs.
    """
    original = transport.start_messages
    store, me = _get_default_store(), dist.get_rank()
    counted: Counter[tuple[Any, ...]] = Counter()

    def batch(wire: Wire, messages: Sequence[WireMessage]) -> Any:
        rounds: list[list[tuple[Any, int, bool]]] = []  # NCCL takes one to and one from each peer at a time
        before: Counter[tuple[bool, int]] = Counter()
        for sends, _, peer in messages:
            way = (me, peer) if sends else (peer, me)
            # Each hop and direction of an edge has a group of its own; edges of cohorts, which share one, count apart.
            place = (*way, tuple(wire.places), wire.tag)
            if (turn := before[sends, peer]) == len(rounds):
                rounds.append([])
            rounds[turn].append((place, counted[place], sends))
            before[sends, peer] += 1
            counted[place] += 1
        works = original(wire, messages)
        for names in rounds:
            for place, number, sends in names:
                store.set(f"{kind} {place} {number} {'sent' if sends else 'awaited'}", "")
            for place, number, sends in names:
                waits = {"first message": number == 0, "receive": not sends, "everything": True}[kind]
                if waits:
                    other = f"{kind} {place} {number} {'awaited' if sends else 'sent'}"
                    try:
                        store.wait([other], timedelta(seconds=patience))
                    except RuntimeError as error:
                        raise RuntimeError(f"rank {me} hangs: nobody came to {other}") from error
        return works

    transport.start_messages = batch  # type: ignore[assignment]
    try:
        with _Blocking(patience) if kind == "everything" else nullcontext():
            yield
    finally:
        transport.start_messages = original
