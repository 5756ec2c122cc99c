"""Run a function on every rank of a small gloo world, from a test.

    def sums(rank: int, world: int, scale: float) -> float:       # module level, so that workers can import it
        x = torch.tensor(rank * scale)
        dist.all_reduce(x)
        return x.item()

    def test_sums(pool):
        assert pool.run(4, sums, 2.0) == [12.0] * 4

Every call gets fresh processes, forked from one process that has paid for the imports: no state of an earlier test
(process groups, DTensor caches, random numbers) is left, and a hanging world can simply be killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

MAX_WORLD = 8
GRACE = 0.5
"""Seconds that other ranks have to report once one has failed: often all fail alike."""


class WorkerError(RuntimeError):
    """A rank raised, died or did not finish; the message holds tracebacks, stacks and what the rank printed.

    Attributes:
        rank: the first rank that failed.
        error: name of the exception's class on that rank; "" where it died or hung.
    """

    def __init__(self, message: str, rank: int, error: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass
class _Rank:
    number: int
    process: ForkServerProcess
    pipe: Connection
    log: Path
    result: Any = None

    def output(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        # What a dying interpreter lists last is long and would push what it died of out of the end that is shown.
        text = "\n".join(line for line in lines if not line.startswith("Extension modules:"))
        text = (text if len(text) < 9000 else f"{text[:4500]}\n[...]\n{text[-4500:]}").strip()
        return f"--- output of rank {self.number} ---\n{text}\n" if text else ""


class Pool:
    """Starts worlds of at most ``MAX_WORLD`` processes; the process they are forked from starts with the first."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.distributed.preload"])

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120,
        group: bool = True,
    ) -> list[Any]:
        """Call ``function(rank, world, *args)`` on every rank; the results by rank.

        Args:
            world: number of ranks, 1 to ``MAX_WORLD``.
            function: of a module; it, ``args`` and the results are pickled.
            timeout: seconds until ranks that have not finished are killed.
            group: make the default process group (gloo). Without it only torchrun's environment variables are set, so
                the function, or a Trainer in it, makes its own.

        Raises:
            WorkerError: as soon as a rank raises or dies, or at the timeout.
        """
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world={world}: a test has 1 to {MAX_WORLD} ranks")
        payload = pickle.dumps((function, args))  # by value: ForkingPickler would share tensors by file descriptor
        with tempfile.TemporaryDirectory(prefix="world-") as directory:
            ranks = [self._start(Path(directory), r, world, payload, timeout, group) for r in range(world)]
            try:
                return _collect(ranks, time.monotonic() + timeout, timeout)
            finally:
                for rank in ranks:
                    rank.process.kill()
                    rank.process.join()
                    rank.pipe.close()

    def _start(self, directory: Path, rank: int, world: int, payload: bytes, timeout: float, group: bool) -> _Rank:
        ours, theirs = self._context.Pipe()
        log = directory / f"rank{rank}.log"
        port = _free_port() if rank == 0 else int((directory / "port").read_text())
        (directory / "port").write_text(str(port))
        process = self._context.Process(
            target=_work, args=(theirs, str(directory), str(log), rank, world, port, payload, timeout, group)
        )
        process.start()
        theirs.close()
        return _Rank(rank, process, ours, log)


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> list[Any]:
    """Wait for all ranks; raise at the first failure."""
    pending = dict(enumerate(ranks))
    failures: list[tuple[int, str, str]] = []  # rank, class of the exception, text
    while pending:
        left = deadline - time.monotonic()
        ready = wait([r.pipe for r in pending.values()], max(left, 0))
        if not ready and not failures:
            failures.append(_hang(pending, timeout))
        if not ready:
            break
        for number, rank in list(pending.items()):
            if rank.pipe not in ready:
                continue
            del pending[number]
            try:
                kind, error, value = pickle.loads(rank.pipe.recv_bytes())
            except EOFError:
                rank.process.join(5)
                failures.append((number, "", f"died with exit code {rank.process.exitcode}\n{rank.output()}"))
                continue
            if kind == "result":
                rank.result = value
            else:
                failures.append((number, error, f"raised\n{value}{rank.output()}"))
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE)
    if not failures:
        return [rank.result for rank in ranks]
    # A rank that died is why others lost their connections, whoever is heard first.
    cause = first, error, text = next((one for one in failures if one[2].startswith("died")), failures[0])
    others = sorted(one[0] for one in failures if one is not cause)
    also = f"\nranks {others} failed too, {sorted(pending)} were still at work" if others or pending else ""
    raise WorkerError(f"rank {first} of {len(ranks)} {text}{also}", first, error)


def _hang(pending: dict[int, _Rank], timeout: float) -> tuple[int, str, str]:
    """The workers dump their own stacks a second after the timeout; wait for those and show them."""
    for rank in pending.values():
        rank.process.join(3)
    text = f"did not finish within {timeout:g} s, nor did any of the ranks {sorted(pending)}\n"
    return min(pending), "", text + "".join(rank.output() for rank in pending.values())


def _free_port() -> int:
    """Of those that no system hands out by itself, so that no listener of another world takes it before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def _work(
    pipe: Connection,
    directory: str,
    log: str,
    rank: int,
    world: int,
    port: int,
    payload: bytes,
    timeout: float,
    group: bool,
) -> None:
    """One rank, in its own process."""
    output = open(log, "w", buffering=1)  # noqa: SIM115  (open until the process ends)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    # After the test has given up on this rank, so that it tells the two apart; also ends ranks whose test was killed.
    faulthandler.dump_traceback_later(timeout + 1, exit=True, file=output)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",  # by which Lightning knows that the processes exist already
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    try:
        report = pickle.dumps(("result", "", _call(directory, rank, world, payload, timeout, group)))
    except BaseException as error:
        report = pickle.dumps(("error", type(error).__name__, traceback.format_exc()))
    output.flush()
    pipe.send_bytes(report)
    # The others may still need this rank's sockets: it is killed when all have reported, or when the test is gone.
    try:
        pipe.recv_bytes()
    except EOFError:
        os._exit(0)


def _call(directory: str, rank: int, world: int, payload: bytes, timeout: float, group: bool) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if group:
        store = dist.FileStore(os.path.join(directory, "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout + 30)
        )
    function, args = pickle.loads(payload)
    return function(rank, world, *args)
