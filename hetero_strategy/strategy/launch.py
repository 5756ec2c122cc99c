"""How the processes of a run start, and how they end together."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _set_num_threads_if_needed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hetero_strategy.errors import ConfigError
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.runtime.agreement import Stop

STARTED_BY = "HETERO_STRATEGY_STARTED_BY"
"""Environment variable of processes that run a script again: id of the process that started them."""
TO_END = 3.0
"""Seconds in which a rank that has lost another one ends by itself, or is ended."""
TO_NOTICE = 10.0
"""Seconds after which a rank that has not noticed that another one failed is ended with it."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's popen launcher; its processes end with the one that started them, which waits for them at its end."""

    failed = False
    """This process is on its way out of an exception."""

    def launch(self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the script on all other ranks, then go on with this one.

        Raises:
            ConfigError: see :func:`check_microbatches`.
        """
        check_microbatches(args, trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:  # nor has an earlier call made them
            self._call_children_scripts()
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[STARTED_BY] = str(os.getpid())
        _set_num_threads_if_needed(num_processes=self.num_processes)  # before: the others inherit OMP_NUM_THREADS
        super()._call_children_scripts()
        atexit.register(self._await_children)

    def _watch(self) -> None:
        """A rank that was killed may leave this one in a collective for ever: then both are ended.

        Lightning's own thread for this ends this process at once, and with it the message and the ``finally`` blocks.
        """
        while any(process.poll() is None for process in self.procs) and not self.fallen():
            time.sleep(1.0)
        if self.fallen():
            time.sleep(TO_NOTICE)
            self.kill(signal.SIGKILL)
            if not self.failed:
                sys.stderr.write(f"{self.fallen()}; ending\n")
                os.kill(os.getpid(), signal.SIGKILL)

    def fallen(self) -> str:
        """Ranks that have ended with an error, and how; empty: none."""
        first = self.cluster_environment.node_rank() * self.num_processes
        codes = {first + i: process.poll() for i, process in enumerate(self.procs, 1)}
        return ", ".join(f"rank {rank} ended with code {code}" for rank, code in codes.items() if code)

    def wait(self, seconds: float) -> None:
        """For the other ranks to end."""
        end = time.monotonic() + seconds
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def _await_children(self, seconds: float = 60.0) -> None:
        """Let the others finish the script; after an error here they are not waited for, as they may wait for us."""
        if hasattr(sys, "last_value"):
            return
        self.wait(seconds)
        if self.fallen():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit code cannot be changed in any other way here


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's fork/spawn launcher, without bringing weights back: no single rank has them all."""

    _trained: ClassVar[WeakSet[LightningModule]] = WeakSet()
    """Modules whose weights ended with the processes that trained them, whichever Trainer started these."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes and wait for them.

        Raises:
            ConfigError: the weights that are asked for are gone; or see :func:`check_microbatches`.
        """
        check_microbatches(args, trainer)
        self._started_by = os.getpid()
        module = args[0] if args and isinstance(args[0], LightningModule) else None
        if module in self._trained and not any(isinstance(one, str | os.PathLike) for one in args):
            raise ConfigError(
                "HeteroStrategy: with start_method='fork' or 'spawn' trained weights end with the processes of fit, and"
                " this module has its initial ones: give ckpt_path=..., or use start_method='popen'"
            )
        found = super().launch(function, *args, trainer=trainer, **kwargs)
        if module is not None and trainer is not None and trainer.state.fn == "fit":
            self._trained.add(module)
        return found

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any, **kwargs: Any) -> None:
        die_with_parent(self._started_by)
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            if trainer is not None:  # Lightning does this in the process that started the ranks, and in no rank
                _interrupt(trainer, error)
                trainer._teardown()
            raise

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", None) if callback is not None else None
        if self._strategy.local_rank != 0:
            return None
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))


def check_microbatches(given: Sequence[Any], trainer: Trainer | None) -> None:
    """Refuse a data module whose microbatches nobody counts, before processes start.

    Args:
        given: to the function that they run.

    Raises:
        ConfigError: ``microbatches="auto"`` without a budget, and layouts are not planned.
    """
    context = getattr(trainer and trainer.strategy, "context", None)
    if trainer is None or context is None or context.placed_later or context.microbatches is not None:
        return
    for data in given:
        if isinstance(data, MultimodalDataModule):
            data.check_microbatches(fit=trainer.state.fn == "fit")


def minutes(option: str, given: timedelta | float) -> timedelta:
    """A time as a person says it.

    Raises:
        ConfigError: it is none, or not above 0.
    """
    try:
        found = given if isinstance(given, timedelta) else timedelta(minutes=given)
    except (TypeError, ValueError, OverflowError):
        found = timedelta()
    if found <= timedelta():
        raise ConfigError(f"HeteroStrategy: {option}={given}; give a number of minutes above 0, such as 30")
    return found


def prepare_device(device: torch.device, *, streams: bool = False) -> None:
    """Set what CUDA and NCCL read when they start, unless the environment says otherwise.

    * Memory grows in segments, for every microbatch has other sizes.
    * torch's flight recorder, which keeps a rank's last messages of NCCL, writes them when one hangs.
    * Operations of different communicators start in the order in which the host asks for them, which is one order on
      all ranks: so NCCL promises that they end, whatever else runs on the device.
    * The device has queues for all streams: messages, collectives, copies and kernels run beside each other.

    Args:
        streams: modules compute on two streams: collectives go before kernels of the one of low priority.
    """
    if device.type != "cuda":
        return
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    needed = {"CUDA_DEVICE_MAX_CONNECTIONS": (8, "messages, collectives, copies and kernels of one queue run in turns")}
    if streams:
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        needed["TORCH_NCCL_HIGH_PRIORITY"] = (1, "what tp_bubbles puts beside collectives waits for them")
    for name, (enough, cost) in needed.items():
        if os.environ[name].isdigit() and int(os.environ[name]) < enough:
            rank_zero_warn(
                f"HeteroStrategy: {name}={os.environ[name]} is set, so {cost}; unset it, or set it to {enough} or more"
            )


def bound_device(device: torch.device, backend: str) -> torch.device | None:
    """The device that the world's process group is told of, so that NCCL's other groups are split off it."""
    return device if device.type == "cuda" and "nccl" in backend else None


def check_process_count(environment: ClusterEnvironment, nodes: int, expected: int) -> None:
    """Compare what an outside launcher (torchrun, SLURM) started with what the Trainer was told.

    Raises:
        ConfigError: when they differ, or nobody starts the processes of other nodes.
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


def die_with_parent(parent: int) -> None:
    """End this process soon after the one that started it, however that ends: no orphans.

    Until then it may notice by itself, and run its ``finally`` blocks. (Linux can do this too, but at once, and with
    the thread that started this process.)
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(TO_END)
        os._exit(1)

    if all(thread.name != "parent" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with_script() -> None:
    """:func:`die_with_parent` in a process that :class:`ScriptLauncher` started; nothing in any other."""
    if STARTED_BY in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent(int(os.environ[STARTED_BY]))


def lost_a_rank(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, only says that another rank went away: torch.distributed raised it where this
    package called it, in a world of more than one.
    """
    if error is None or not (dist.is_initialized() and dist.get_world_size() > 1):
        return False
    files = {Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)} - {Path(__file__)}
    ours = any(file.is_relative_to(Path(__file__).parents[1]) for file in files)
    theirs = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
    return (ours and theirs) or lost_a_rank(error.__cause__)


def stop_together(trainer: Trainer, stop: Stop) -> None:
    """SIGTERM on any rank ends all of them after the same step, so that a callback's ``on_exception`` can still save.
    SLURM's signal that the job will be queued again lets them save together before the next batch, of a validation
    too. Where nothing is trained nothing is saved, and the first rank asks SLURM at once.

    What Lightning does about it goes: collectives and saves inside signal handlers, to which other ranks come from
    wherever they are, and one rank from the middle of a step; and a broadcast before every batch, whose result the host
    waits for.
    """
    connector = trainer._signal_connector
    stop.agreed = stop.requeue_agreed = False  # a signal that came too late to end or to save a fit is for what follows
    # A checkpoint has no gradients, so no run ends between batches whose gradients are added up.
    fitting, batches, validation = TrainerFn.FITTING, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
    stop.may = may = lambda: trainer.state.fn != fitting or not batches._should_accumulate()
    stop.tell = lambda: setattr(connector, "received_sigterm", True)

    def told(signum: Any, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not stop.asked:
            launcher.kill(signum)
        stop.asked = True

    def told_to_requeue(signum: Any, frame: Any) -> None:
        stop.requeue = True
        if trainer.state.fn != fitting:
            fn = cast(TrainerFn, trainer.state.fn).value
            rank_zero_warn(f"told that this job will be queued again: {fn} saves nothing, and begins anew in it")
            trainer.__dict__["save_checkpoint"] = lambda path: None
            requeue()
            del trainer.__dict__["save_checkpoint"]

    def requeue() -> None:
        type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, cast(Any, None))
        stop.requeue = stop.requeue_agreed = False

    def advance(fetcher: Any) -> None:
        if stop.requeue_agreed and may():
            requeue()
        type(batches).advance(batches, fetcher)

    def validate(*given: Any) -> None:
        if stop.requeue_agreed and may() and not trainer.sanity_checking:
            requeue()
        type(validation)._evaluation_step(validation, *given)

    connector.__dict__.update(_sigterm_notifier_fn=told, _slurm_sigusr_handler_fn=told_to_requeue)
    batches.__dict__.update(advance=advance, _broadcast_sigterm_tensor=lambda: None)
    validation.__dict__.update(_evaluation_step=validate)
    if stop.requeue and trainer.state.fn != fitting:
        told_to_requeue(signal.SIGUSR1, None)


def end_together(error: BaseException, rank: int, launcher: _Launcher | None, stop: Stop) -> None:
    """What an exception on one rank means for the others, before it goes on its way.

    One that only says that another rank is lost is marked as such and lets that rank be heard first. Ranks that never
    notice are ended. Where all were told to stop, nothing is to be done.

    Args:
        launcher: of the Trainer; None: the processes were started from outside.
        stop: of this rank, which is not told any more once that has ended a run.
    """
    if stop.agreed and isinstance(error, SIGTERMException):
        stop.asked = False
        return
    lost = lost_a_rank(error)
    if lost:
        text = f"rank {rank} lost another rank, whose own message tells why"
        sys.stderr.write(f"{text} (here: {error!s:.300})\n")
        error.add_note(text)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        error.add_note(f"rank {rank} ended the run with this")
    # Lightning destroys NCCL's groups when a process exits, which waits for messages that the others will never send.
    atexit.unregister(_destroy_dist_connection)
    if isinstance(launcher, ScriptLauncher):
        launcher.failed = True
        if lost:
            launcher.wait(TO_END)
            error.add_note(launcher.fallen() or "all ranks that this one started are still there")
        late = threading.Timer(TO_NOTICE, launcher.kill, [signal.SIGKILL])
        late.daemon = True
        late.start()
    elif lost and STARTED_BY not in os.environ and not stop.asked:  # else whoever did it ends them already
        # torchrun, SLURM and the process that forked this one take the first rank that ends for the cause.
        told = threading.Event()
        with contextlib.suppress(ValueError):  # of another thread than the main one
            signal.signal(signal.SIGTERM, lambda *_: told.set())
        told.wait(TO_END)
