"""What processes that torchrun has started agree on, without torchrun: each is one rank on a node of its own."""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed import TCPStore

from hetero_strategy.testing import Pool
from recipes import cli, torchrun

BEGAN = (1000.0, 1007.0)
"""When torchrun began on each node."""


def agreed(
    rank: int, world: int, port: int, restarts: tuple[int, int], began: tuple[float, float], folder: Path
) -> tuple[str, Path | None]:
    """Name of the run folder, and the checkpoint that a process goes on from."""
    env = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "GROUP_WORLD_SIZE": world}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": restarts[rank]}
    env |= {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": False}
    launched = patch.object(torchrun, "_launched", lambda: datetime.fromtimestamp(began[rank]))
    torchrun._store.cache_clear()
    with patch.dict(os.environ, {name: str(value) for name, value in env.items()}), launched:
        os.environ.pop("SLURM_PROCID", None)
        return cli._agreed("other" if rank else "out", ()), cli.saved_before(folder)


def on_nodes(
    pool: Pool, folder: Path, restarts: tuple[int, int], began: tuple[float, float]
) -> set[tuple[str, Path | None]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {*pool.run(2, agreed, port, restarts, began, folder, group=False)}


@pytest.mark.parametrize(("restarts", "began"), [
    ((0, 0), BEGAN),
    ((1, 1), BEGAN),
    ((1, 0), BEGAN),  # the second node only saw that another one came or went
    ((0, 1), (2000.0, 1000.0)),  # the first node took the place of one that was lost
])  # fmt: skip
def test_all_go_on_in_the_folder_of_before(
    pool: Pool, tmp_path: Path, restarts: tuple[int, int], began: tuple[float, float]
) -> None:
    """A checkpoint is there that was written after torchrun began on the first node, and none other."""
    newest, older = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "hpc_ckpt_1.ckpt"
    for path, written in ((newest, 1500), (older, 900)):
        path.mkdir(parents=True)
        os.utime(path, (written, written))
    name = datetime.fromtimestamp(1000).strftime("out/%Y-%m-%d/%H-%M-%S")
    assert on_nodes(pool, tmp_path, restarts, began) == {(name, newest)}
    newest.rename(tmp_path / "another run's")
    assert on_nodes(pool, tmp_path, restarts, began) == {(name, None)}


def test_processes_that_are_started_again_have_the_folder_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt has a store of its own, which torchrun keeps, and comes later."""
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    found = []
    for attempt in range(2):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torchrun._store.cache_clear()
        for rank in range(2):
            env = {"RUN_ID": "x", "USE_AGENT_STORE": True, "RESTART_COUNT": attempt}
            env = {f"TORCHELASTIC_{name}": value for name, value in env.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": rank, "LOCAL_RANK": rank}
            for name, value in (env | {"WORLD_SIZE": 2, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}).items():
                monkeypatch.setenv(name, str(value))
            found.append(cli._agreed("out" if not rank else "other", ()))
            assert (cli.saved_before(tmp_path) is not None) == bool(attempt)
        (tmp_path / "checkpoints" / "last.ckpt").mkdir(parents=True, exist_ok=True)
        time.sleep(1.1)
    torchrun._store.cache_clear()
    assert len(set(found)) == 1 and found[0].startswith("out/")
