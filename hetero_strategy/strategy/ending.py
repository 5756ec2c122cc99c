"""End all ranks of a run together: on a signal, or because one of them failed."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.distributed_c10d import _abort_process_group

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import CheckpointError, ConfigError
from hetero_strategy.runtime.agreement import Stop, said
from hetero_strategy.strategy.launch import STARTED_BY, TO_END, TO_NOTICE, ScriptLauncher

LOST, VAIN = "lost another rank, whose own message tells why", "waited for another rank until the timeout"
"""Marks of an exception that is not the cause."""
PACKAGE, AROUND = Path(__file__).parents[1], {Path(__file__), Path(__file__).with_name("launch.py")}
"""This package, and its files that call the user's code."""

TO_COME = 60.0
"""Seconds within which all ranks set ``trainer.should_stop`` after the same step; their hosts are that close."""


def lost_a_rank(error: BaseException | None) -> bool:
    """Return whether an exception, or its cause, only says that another rank is gone: torch.distributed raised it
    inside a call of this package, in a world of several ranks.
    """
    if any(mark in note for note in getattr(error, "__notes__", ()) for mark in (LOST, VAIN)):  # groups may be aborted
        return True
    if error is None or not (dist.is_initialized() and dist.get_world_size() > 1):
        return False
    files = {Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)}
    ours = any(file.is_relative_to(PACKAGE) for file in files - AROUND)
    theirs = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
    return (ours and theirs) or lost_a_rank(error.__cause__)


def stop_together(trainer: Trainer, stop: Stop) -> None:
    """Make SIGTERM on any rank end all ranks after the same step, so that a callback's ``on_exception`` can still save.

    SLURM's signal that the job will be queued again lets all ranks save together before the next batch, also of a
    validation. Outside of training nothing is saved, and the first rank asks SLURM at once.

    This replaces Lightning's handling. It runs collectives and saves inside signal handlers, which ranks enter at
    different places, some in the middle of a step. It also broadcasts before every batch, and the host waits for the
    result.
    """
    connector = trainer._signal_connector
    stop.agreed = stop.requeue_agreed = False  # a signal that came too late for a fit is for the next run
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
        before = trainer.should_stop
        type(batches).advance(batches, fetcher)
        if trainer.should_stop and not before and trainer.world_size > 1:
            step = f"{trainer.global_step}/{batches.total_batch_idx}"
            if ranks := {*range(trainer.world_size)} - {*said(f"should_stop/{step}", "yes", TO_COME)}:
                raise ConfigError(
                    f"rank {trainer.global_rank} set trainer.should_stop in step {trainer.global_step}, and ranks"
                    f" {sorted(ranks)} did not within {TO_COME:g} s; set it on all ranks: decide from what all have,"
                    " such as out.loss, or ask trainer.strategy.reduce_boolean_decision"
                )

    def validate(*given: Any) -> None:
        if stop.requeue_agreed and may() and not trainer.sanity_checking:
            requeue()
        type(validation)._evaluation_step(validation, *given)

    connector.__dict__.update(_sigterm_notifier_fn=told, _slurm_sigusr_handler_fn=told_to_requeue)
    batches.__dict__.update(advance=advance, _broadcast_sigterm_tensor=lambda: None)
    validation.__dict__.update(_evaluation_step=validate)
    if stop.requeue and trainer.state.fn != fitting:
        told_to_requeue(signal.SIGUSR1, None)


def explained(error: BaseException) -> str:
    """Explain whether a rank waited in vain or lost another, and where the other ranks that ended like this are."""
    here = _place(error)
    others = said("place", here)
    del others[dist.get_rank()]
    places = "".join(f"; rank {rank} was in {place}" for rank, place in others.items())
    if not re.search("timed out|timeout", str(error), re.IGNORECASE):
        return LOST + places
    silent = sorted({*range(dist.get_world_size())} - {*others} - {dist.get_rank()})
    if silent:
        places += f"; ranks {silent} have not said where they are: they compute, sleep or wait elsewhere"
    return (
        f"{VAIN}, in {here}{places}. All ranks have to make the same calls: look for one that only some make, as in"
        " `if trainer.is_global_zero:`, of save_checkpoint, self.log(sync_dist=True) or a collective of your own, and"
        " for a rank that is slow"
    )


def _place(error: BaseException) -> str:
    """Name the call of this package that raised an exception, and the line of the user's code that made it."""
    if not (frames := traceback.extract_tb(error.__traceback__)) and error.__cause__ is not None:
        return _place(error.__cause__)
    files = [Path(frame.filename) for frame in frames]
    libraries = (PACKAGE, Path(os.__file__).parent)
    own = [
        n for n, f in enumerate(files) if "site-packages" not in f.parts and not any(map(f.is_relative_to, libraries))
    ]
    after = own[-1] + 1 if own else 0
    ours = (n for n in range(after, len(files)) if files[n].is_relative_to(PACKAGE) and files[n] not in AROUND)
    at = next(ours, len(files) - 1)
    by = f", called by {frames[own[-1]].name} ({files[own[-1]].name}:{frames[own[-1]].lineno})" if own else ""
    return f"{frames[at].name} ({files[at].name}){by}"


def end_together(error: BaseException, rank: int, launcher: _Launcher | None, stop: Stop) -> None:
    """Handle an exception on one rank for the sake of the others, before it is raised further.

    An exception that only says that another rank is lost is marked as such, and waits until that rank has reported.
    Ranks that never notice are ended. If all ranks were told to stop, nothing is done.

    Args:
        launcher: launcher of the Trainer; None: the processes were started from outside.
        stop: stop request of this rank; it is cleared once it has ended a run.
    """
    if stop.agreed and isinstance(error, SIGTERMException):
        stop.asked = False
        return
    lost = lost_a_rank(error)
    if lost:
        text = f"rank {rank} {explained(error)}"
        sys.stderr.write(f"{text} (here: {error!s:.300})\n")
        error.add_note(text)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        error.add_note(f"rank {rank} ended the run with this")
    # Lightning destroys NCCL's groups when a process exits, which waits for messages that no rank will send.
    atexit.unregister(_destroy_dist_connection)
    if isinstance(launcher, ScriptLauncher):
        launcher.failed, launcher.torn_down = error, False
        if lost:
            launcher.wait(TO_END)
            error.add_note(launcher.fallen() or "all ranks that this one started are still there")
        late = threading.Timer(TO_NOTICE, launcher.kill, [signal.SIGKILL])
        late.daemon = True
        late.start()
    elif lost and STARTED_BY not in os.environ and not stop.asked:  # else the process that did it ends them already
        # torchrun and SLURM take the first rank that ends for the cause.
        terminated = threading.Event()
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, lambda *_: terminated.set())
        terminated.wait(TO_END)


def free(device: torch.device, error: BaseException, save: TrainingState | None) -> bool:
    """Free a device that waits for messages which no rank will send any more, or let this process end without it.

    On NCCL a rank's host is ahead of its device, so ranks that were interrupted at different actions leave kernels
    behind that spin, and every call that waits for the device (such as ``torch.cuda.empty_cache``) would hang. If the
    device ends its work within some seconds nothing is done: the user may catch the exception and go on.

    Args:
        error: exception that ends this rank.
        save: checkpoints; one that is being written in the background is finished first; its messages are the host's.

    Returns:
        Whether the device has ended its work. If not, this process ends within seconds, whatever it waits for.
    """
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return True

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # of kernels, reported elsewhere
            torch.cuda.synchronize(device)

    waits = threading.Thread(target=wait, name="device", daemon=True)
    waits.start()
    waits.join(TO_END)
    if not waits.is_alive():
        return True
    sys.stderr.write(f"rank {dist.get_rank()} ends with {error!r:.300}; its device waits for others; aborting groups\n")
    try:
        if save is not None:
            save.finalize()
    except CheckpointError as fault:
        error.add_note(str(fault))
    faulthandler.dump_traceback_later(TO_END + TO_NOTICE, exit=True)  # a Python thread might never run
    _abort_process_group()
    waits.join(TO_END)
    if not waits.is_alive():
        faulthandler.cancel_dump_traceback_later()
    return not waits.is_alive()


def tear_down(accelerator: Accelerator, launcher: _Launcher | None, *, device_waits: bool) -> None:
    """End a Trainer's use of the device, for which CUDA's accelerator waits; the user's own code follows."""
    if not device_waits:
        accelerator.teardown()
    if isinstance(launcher, ScriptLauncher):
        launcher.torn_down = True
