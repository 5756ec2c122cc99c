"""Worlds of gloo processes on one machine, in which a test calls a function on every rank."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRELOADED = ("hetero_strategy.testing", "hetero_strategy.strategy.strategy", "torch.distributed.tensor.parallel")
GRACE = 0.5
"""Seconds that other ranks have to report after one has failed: often all fail alike."""


class WorkerError(RuntimeError):
    """A rank raised, died or did not finish. The message holds tracebacks, stacks and the rank's output.

    Attributes:
        rank: the first rank that failed.
        error: name of the exception's class on that rank; "" if the rank died or hung.
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
        # A dying interpreter ends with a long list of modules, which would displace the cause.
        text = "\n".join(line for line in lines if not line.startswith("Extension modules:"))
        text = (text if len(text) < 9000 else f"{text[:4500]}\n[...]\n{text[-4500:]}").strip()
        return f"--- output of rank {self.number} ---\n{text}\n" if text else ""


class Pool:
    """Start worlds of gloo processes on this machine.

    Each call has fresh processes, forked from one process that has paid for the imports. No state of an earlier test is
    left, and a world that hangs is killed.

    Args:
        preload: names of modules that the first process imports.
    """

    def __init__(self, preload: Sequence[str] = PRELOADED) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 120, group: bool = True
    ) -> list[Any]:
        """Call ``function(rank, world, *args)`` on every rank and return the results by rank.

        Args:
            world: number of ranks.
            function: function of a module. It, ``args`` and the results are pickled.
            timeout: seconds after which ranks that have not finished are killed.
            group: whether to make the default process group. Without it only torchrun's environment variables are set,
                so that a Trainer in the function makes its own.

        Raises:
            WorkerError: as soon as a rank raises or dies, or at the timeout.
        """
        payload = pickle.dumps((function, args))  # by value: ForkingPickler would share tensors by file descriptor
        with tempfile.TemporaryDirectory(prefix="world-") as directory:
            port = _free_port()
            ranks = [self._start(directory, r, world, port, payload, timeout, group) for r in range(world)]
            try:
                return _collect(ranks, timeout)
            finally:
                for rank in ranks:
                    rank.process.kill()
                    rank.process.join()
                    rank.pipe.close()

    def _start(self, directory: str, rank: int, world: int, *given: Any) -> _Rank:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, directory, rank, world, *given))
        process.start()
        theirs.close()
        return _Rank(rank, process, ours, Path(directory, f"rank{rank}.log"))


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Wait for all ranks; raise at the first failure."""
    deadline = time.monotonic() + timeout
    pending = dict(enumerate(ranks))
    failures: list[tuple[int, str, str]] = []  # rank, class of the exception, text
    while pending:
        ready = wait([r.pipe for r in pending.values()], max(deadline - time.monotonic(), 0))
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
    # A rank that died is why others lost their connections, whichever reports first.
    cause = first, error, text = next((one for one in failures if one[2].startswith("died")), failures[0])
    others = sorted(one[0] for one in failures if one is not cause)
    also = f"\nranks {others} failed too, {sorted(pending)} were still at work" if others or pending else ""
    raise WorkerError(f"rank {first} of {len(ranks)} {text}{also}", first, error)


def _hang(pending: dict[int, _Rank], timeout: float) -> tuple[int, str, str]:
    """Wait for the stacks that workers dump a second after the timeout, and return them."""
    for rank in pending.values():
        rank.process.join(3)
    text = f"did not finish within {timeout:g} s, nor did any of the ranks {sorted(pending)}\n"
    return min(pending), "", text + "".join(rank.output() for rank in pending.values())


def _free_port() -> int:
    """Return a port that no system hands out by itself, so that no listener takes it before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def _work(
    pipe: Connection,
    directory: str,
    rank: int,
    world: int,
    port: int,
    payload: bytes,
    timeout: float,
    group: bool,
) -> None:
    """Run one rank in its own process."""
    output = open(Path(directory, f"rank{rank}.log"), "w", buffering=1)  # noqa: SIM115  (open until the process ends)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    # Later than the test's own timeout, which is to be the one that is reported; also ends ranks of a killed test.
    faulthandler.dump_traceback_later(timeout + 1, exit=True, file=output)
    gc.freeze()  # a collection would write to, and so copy, every page that holds an object
    here = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",  # tells Lightning that the processes exist already
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if group:
            patience, store = timedelta(seconds=timeout + 30), f"file://{directory}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
        function, args = pickle.loads(payload)
        report = pickle.dumps(("result", "", function(rank, world, *args)))
    except BaseException as error:
        report = pickle.dumps(("error", type(error).__name__, traceback.format_exc()))
    output.flush()
    pipe.send_bytes(report)
    # Other ranks may still need this rank's sockets: it is killed when all have reported, or ends with the test.
    try:
        pipe.recv_bytes()
    except EOFError:
        os._exit(0)


class Operations(TorchDispatchMode):
    """A record of the matmuls and collectives of this process in the order in which they start."""

    COLLECTIVES: ClassVar[Mapping[str, str]] = {
        "all_reduce": "all-reduce", "allreduce_": "all-reduce",
        "reduce_scatter_tensor": "reduce-scatter", "_reduce_scatter_base_": "reduce-scatter",
        "all_gather_into_tensor": "all-gather", "_allgather_base_": "all-gather",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """``matmul``, ``all-reduce``, ``reduce-scatter`` or ``all-gather``."""
        self.bytes: Counter[str] = Counter()
        """Bytes of all ranks' rows by collective: before a reduce-scatter, after an all-gather."""

    @property
    def collectives(self) -> dict[str, int]:
        """Return how often each collective was started."""
        return dict(Counter(name for name in self.names if name != "matmul"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it runs on local tensors comes by later
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if any(issubclass(kind, FakeTensor) for kind in types):
            return result
        if name in ("mm", "addmm"):
            self.names.append("matmul")
        elif collective := self.COLLECTIVES.get(name):
            self.names.append(collective)
            self.bytes[collective] += max(t.nbytes for t in tree_leaves([args, result]) if isinstance(t, torch.Tensor))
        return result
