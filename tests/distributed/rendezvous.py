"""gloo made as unforgiving as NCCL can be: messages and collectives that hold up their hosts until all have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.distributed.operations import collectives_block

PATIENCE = 30.0
"""Seconds that a host is held up before it is said to hang."""
KINDS = ("first message", "receive", "everything")
"""``first message`` of two ranks in one group and direction: both hosts wait for each other (NCCL connects them then).
``receive``: its host waits until the other side has sent. ``everything``: both hosts of a message wait for each other,
and the hosts of a collective until it has ended, also where FSDP or DTensor starts it."""


@contextmanager
def unforgiving(kind: str, patience: float = PATIENCE) -> Iterator[None]:
    """While it lasts, batches of messages hold up this rank's host, round by round, for so many seconds at most each.

    Raises:
        RuntimeError: in the step that hangs.
    """
    original = dist.batch_isend_irecv
    store, me = _get_default_store(), dist.get_rank()
    counted: Counter[tuple[Any, ...]] = Counter()

    def batch(ops: Sequence[dist.P2POp]) -> Any:
        rounds: list[list[tuple[Any, int, bool]]] = []  # NCCL takes one to and one from each peer at a time
        before: Counter[tuple[bool, int]] = Counter()
        for op in ops:
            sends = op.op is dist.isend
            way = (me, op.peer) if sends else (op.peer, me)
            group = dist.get_process_group_ranks(op.group or dist.group.WORLD)
            # Each hop and direction of an edge has a group of its own; edges of cohorts, which share one, count apart.
            place = (*way, tuple(group), op.tag)
            if (turn := before[sends, op.peer]) == len(rounds):
                rounds.append([])
            rounds[turn].append((place, counted[place], sends))
            before[sends, op.peer] += 1
            counted[place] += 1
        works = original(ops)
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

    dist.batch_isend_irecv = batch
    try:
        with collectives_block(patience) if kind == "everything" else nullcontext():
            yield
    finally:
        dist.batch_isend_irecv = original
