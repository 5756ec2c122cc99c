"""Agreement between processes that torchrun has started, before there is a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any


def started() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def said_by_first(what: str, value: Callable[[], str]) -> str:
    """Return rank 0's value on all ranks: other ranks may see files later, have another working folder or more
    restarts behind them.
    """
    store, key = _store(), _key(what)
    if not int(os.environ.get("RANK") or 0):
        store.set(key, value())
    return str(store.get(key).decode())


def began() -> datetime:
    """Return when torchrun began on the node where it began first. Restarted processes get the same time, also when a
    new node has replaced a lost one.
    """
    env, store = os.environ, _store()
    if not int(env.get("LOCAL_RANK") or 0):
        store.set(_key(f"launched/{env.get('GROUP_RANK', '0')}"), str(_launched().timestamp()))

    def first() -> str:
        nodes = range(int(env.get("GROUP_WORLD_SIZE") or 1))
        return str(min(float(store.get(_key(f"launched/{node}"))) for node in nodes))

    return datetime.fromtimestamp(float(said_by_first("began", first)))


def _key(what: str) -> str:
    """Return a key that is new in each attempt if torchrun's own store outlives the processes. Otherwise each attempt
    has a new store, and counts of restarts may differ between nodes.
    """
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"hetero_strategy/{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if own else ''}"


@cache
def _store() -> Any:
    """Return the store through which the process group will be made, too. Rank 0 hosts it unless torchrun does."""
    from torch.distributed import rendezvous

    return next(iter(rendezvous("env://")))[0]


def _launched() -> datetime:
    """Return when torchrun, the parent process, began; the present time on systems without /proc."""
    parent = Path(f"/proc/{os.getppid()}/stat")
    if not parent.is_file():
        return datetime.now()
    ticks = int(parent.read_text().rpartition(")")[2].split()[19])
    booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return datetime.fromtimestamp(int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))
