"""How the processes of a run start, and how they end together."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from hetero_strategy.errors import ConfigError, HeteroError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

PEER_IS_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
)
START_METHODS = ("popen", "fork", "spawn")
STARTED_BY = "HETERO_STRATEGY_STARTED_BY"
"""Environment variable of processes that run a script again: id of the process that started them."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's popen launcher; its processes end with the one that started them, which waits for them at its end."""

    def _call_children_scripts(self) -> None:
        os.environ[STARTED_BY] = str(os.getpid())
        _set_num_threads_if_needed(num_processes=self.num_processes)  # before: the others inherit OMP_NUM_THREADS
        super()._call_children_scripts()
        atexit.register(self._await_children)

    def _await_children(self, seconds: float = 60.0) -> None:
        """Let the others finish the script; after an error here they are not waited for, as they may wait for us."""
        if hasattr(sys, "last_value"):
            return
        end = time.monotonic() + seconds
        for process in self.procs:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        if any(process.poll() for process in self.procs):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit code cannot be changed in any other way here


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's fork/spawn launcher, without bringing weights back: no single rank has them all."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and wait for them."""
        self._started_by = os.getpid()
        return super().launch(*args, **kwargs)

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent(self._started_by)
        super()._wrapping_function(*args, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", None) if callback is not None else None
        if self._strategy.local_rank != 0:
            return None
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))


def check_process_count(environment: ClusterEnvironment, expected: int) -> None:
    """Compare what an outside launcher (torchrun, SLURM) started with what the Trainer was told.

    Raises:
        ConfigError: when they differ.
    """
    if environment.creates_processes_externally and environment.world_size() != expected:
        raise ConfigError(
            f"the launcher started {environment.world_size()} processes, but Trainer(devices x num_nodes) says"
            f" {expected}; start {expected} processes or set devices and num_nodes to match"
        )


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the one that started it ends, however that ends: no orphans."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def die_with_script() -> None:
    """:func:`die_with_parent` in a process that :class:`ScriptLauncher` started; nothing in any other."""
    if STARTED_BY in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent(int(os.environ[STARTED_BY]))


def lost_another_rank(exception: BaseException) -> bool:
    """Whether an exception only says that some other process went away."""
    if isinstance(exception, HeteroError):
        return False
    text = str(exception).lower()
    return any(sign in text for sign in PEER_IS_GONE)


def wait_for_the_end(rank: int, seconds: float) -> None:
    """A rank that merely lost a peer stays quiet until it is ended with the others: the cause is what is read."""
    with contextlib.suppress(ValueError):  # of another thread than the main one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stderr.write(f"rank {rank}: another rank stopped; ending\n")
    time.sleep(seconds)
    os._exit(1)
