"""What processes that torchrun has started agree on before there is a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any


def started() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def said_by_first(what: str, value: Callable[[], str]) -> str:
    """What rank 0 says, to all ranks: others may see files later, work in another folder or have been restarted more
    often.
    """
    store, key = _store(), _key(what)
    if not int(os.environ.get("RANK") or 0):
        store.set(key, value())
    return str(store.get(key).decode())


def began() -> datetime:
    """When torchrun began on the first of the nodes that there are: processes that it starts again have the same, also
    beside a node that took the place of another.
    """
    env, store = os.environ, _store()
    if not int(env.get("LOCAL_RANK") or 0):
        store.set(_key(f"launched/{env.get('GROUP_RANK', '0')}"), str(_launched().timestamp()))

    def first() -> str:
        nodes = range(int(env.get("GROUP_WORLD_SIZE") or 1))
        return str(min(float(store.get(_key(f"launched/{node}"))) for node in nodes))

    return datetime.fromtimestamp(float(said_by_first("began", first)))


def _key(what: str) -> str:
    """Torchrun's own store outlives the processes that it starts again; counts of restarts differ between nodes, where
    each attempt has another store.
    """
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"hetero_strategy/{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if own else ''}"


@cache
def _store() -> Any:
    """The store through which the process group will be made, too. Rank 0 keeps it where torchrun does not."""
    from torch.distributed import rendezvous

    return next(iter(rendezvous("env://")))[0]


def _launched() -> datetime:
    """When torchrun began, which started this process; now, where no Linux tells."""
    parent = Path(f"/proc/{os.getppid()}/stat")
    if not parent.is_file():
        return datetime.now()
    ticks = int(parent.read_text().rpartition(")")[2].split()[19])
    booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return datetime.fromtimestamp(int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))
