"""How the processes of a run start, and how they end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput

from hetero_strategy.errors import ConfigError, HeteroError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

START_METHODS = ("popen", "fork", "spawn")


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's fork/spawn launcher, without bringing weights back: no single rank has them all."""

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
            f"the launcher started {environment.world_size()} processes, but Trainer(devices x num_nodes) says {expected};"
            f" start {expected} processes or set devices and num_nodes to match"
        )


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends, however that ends: no orphans."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def lost_another_rank(exception: BaseException) -> bool:
    """Whether an exception only says that some other process went away."""
    if isinstance(exception, HeteroError):
        return False
    text = str(exception).lower()
    signs = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "remote process exited")
    return any(sign in text for sign in signs)


def wait_for_the_end(rank: int, seconds: float = 10.0) -> None:
    """A rank that merely lost a peer stays quiet until it is ended with the others, so that the cause is what is read."""
    print(f"rank {rank}: another rank stopped; ending", file=sys.stderr, flush=True)
    time.sleep(seconds)
    os._exit(1)
