"""Start the processes of a run, and end them with the process that started them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from hetero_strategy.errors import ConfigError
from hetero_strategy.loading.datamodule import MultimodalDataModule

STARTED_BY = "HETERO_STRATEGY_STARTED_BY"
"""Environment variable of processes that run a script again: id of the process that started them."""
TO_END = 3.0
"""Seconds in which a rank that has lost another rank ends by itself, or is ended."""
TO_NOTICE = 10.0
"""Seconds after which a rank that has not noticed another rank's failure is ended with it."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """A popen launcher like Lightning's; its processes end with the process that started them, which waits for them at
    its end.
    """

    failed: BaseException | None = None
    """Exception that is ending this process."""
    torn_down = False
    """Whether Lightning's handling of it is over."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Return whether a notebook may train: a script that runs again would not know what its cells have made."""
        return self.num_processes * self.num_nodes == 1

    def launch(self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the script on all other ranks, then go on with this one."""
        check_microbatches(args, trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:  # not created by an earlier call either
            self._call_children_scripts()
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[STARTED_BY] = str(os.getpid())
        _set_num_threads_if_needed(num_processes=self.num_processes)  # first: other ranks inherit OMP_NUM_THREADS
        super()._call_children_scripts()
        atexit.register(self._await_children)

    def _watch(self) -> None:
        """End both processes if a killed rank leaves this one in a collective, or in its teardown, for ever.

        Lightning's own thread for this would end this process at once, and lose the message and the ``finally`` blocks.
        """
        while any(process.poll() is None for process in self.procs) and not self.fallen():
            time.sleep(1.0)
        if self.fallen():
            time.sleep(TO_NOTICE)
            self.kill(signal.SIGKILL)
            if not self.failed:
                sys.stderr.write(f"{self.fallen()}; ending\n")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(TO_NOTICE)
            if self.failed and not self.torn_down:  # it waits for its device, or for a lost rank
                traceback.print_exception(self.failed)
                faulthandler.dump_traceback()
                sys.stderr.write(f"{self.fallen()}, and this process hangs since; ending\n")
                os._exit(1)

    def fallen(self) -> str:
        """Return the ranks that have ended with an error, and their exit codes; empty: none."""
        first = self.cluster_environment.node_rank() * self.num_processes
        codes = {first + i: process.poll() for i, process in enumerate(self.procs, 1)}
        return ", ".join(f"rank {rank} ended with code {code}" for rank, code in codes.items() if code)

    def wait(self, seconds: float) -> None:
        """Wait for the other ranks to end."""
        end = time.monotonic() + seconds
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def _await_children(self, seconds: float = 60.0) -> None:
        """Wait until other ranks finish the script; not after an error here, since they may wait for this rank."""
        if hasattr(sys, "last_value"):
            return
        self.wait(seconds)
        if self.fallen():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no other way changes the exit code here


def check_microbatches(given: Sequence[Any], trainer: Trainer | None) -> None:
    """Refuse a data module without a number of microbatches before other processes start.

    Args:
        given: arguments of the function that every process will run, such as data modules.
    """
    context = getattr(trainer and trainer.strategy, "context", None)
    if trainer is None or context is None or context.placed_later or context.microbatches is not None:
        return
    for data in given:
        if isinstance(data, MultimodalDataModule):
            data.check_microbatches(fit=trainer.state.fn == "fit")


def minutes(option: str, given: timedelta | float) -> timedelta:
    """Convert a time option to a timedelta; refuse values that are not above 0."""
    try:
        duration = given if isinstance(given, timedelta) else timedelta(minutes=given)
    except (TypeError, ValueError, OverflowError):
        duration = timedelta()
    if duration <= timedelta():
        raise ConfigError(f"HeteroStrategy: {option}={given}; give a number of minutes above 0, such as 30")
    return duration


def prepare_device(device: torch.device) -> None:
    """Set environment variables that CUDA and NCCL read when they start, unless the user has set them.

    * Memory grows in segments, because every microbatch has other sizes.
    * torch's flight recorder, which keeps a rank's last NCCL messages, writes them when one hangs.
    * Operations of different communicators start in the order in which the host queues them, which is one order on all
      ranks: then NCCL promises that they end, whatever else runs on the device.
    * The device has queues for all streams: messages, collectives, copies and kernels run concurrently.
    """
    if device.type != "cuda":
        return
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if os.environ[name].isdigit() and int(os.environ[name]) < 8:
        rank_zero_warn(
            f"HeteroStrategy: {name}={os.environ[name]} is set, so messages, collectives, copies and kernels of one"
            " queue run in turns; unset it, or set it to 8 or more"
        )


def bound_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the device to bind the world's process group to, so that NCCL splits its other groups off it."""
    return device if device.type == "cuda" and "nccl" in backend else None


def check_process_count(environment: ClusterEnvironment, nodes: int, expected: int) -> None:
    """Refuse an outside launcher (torchrun, SLURM) whose process count is not the Trainer's, or nodes that nobody
    starts.
    """
    alone = type(environment) is LightningEnvironment and not environment.creates_processes_externally
    if nodes > 1 and alone and not {"NODE_RANK", "GROUP_RANK"} & set(os.environ):
        raise ConfigError(
            f"Trainer(num_nodes={nodes}) starts processes on this node only: start the script on every node by torchrun"
            " or srun, or with Lightning's variables MASTER_ADDR, MASTER_PORT and NODE_RANK; or set num_nodes=1"
        )
    if environment.creates_processes_externally and environment.world_size() != expected:
        raise ConfigError(
            f"the launcher started {environment.world_size()} processes, but Trainer(devices x num_nodes) says"
            f" {expected}; start {expected} processes or set devices and num_nodes to match"
        )
    if dist.is_initialized() and dist.get_world_size() != expected:
        raise ConfigError(
            f"an earlier Trainer made this process one of {dist.get_world_size()}, but Trainer(devices x num_nodes)"
            f" says {expected}; use as many in all Trainers of a script, or give each number a script of its own"
        )


def die_with_script() -> None:
    """End a process that :class:`ScriptLauncher` started soon after its parent, however that ends: no orphans.

    Until then it may notice by itself, and run its ``finally`` blocks. (Linux can do this too, but at once, and as soon
    as the thread that started this process ends.)
    """
    if STARTED_BY not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
        return
    parent = int(os.environ[STARTED_BY])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(TO_END)
        os._exit(1)

    if all(thread.name != "parent" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="parent", daemon=True).start()
