"""``ProfileMonitor``: write torch profiler's traces of some steps of some ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
from lightning.fabric.utilities import rank_zero_warn
from torch.profiler import profile, schedule, supported_activities
from typing_extensions import override

from hetero_strategy.errors import ConfigError, check_types

ENTRIES = 100_000
"""Length of the history of memory events: torch has no limit by default, and host memory is finite."""


Steps = Annotated[
    Sequence[int], ("[first, last] with 1 <= first < last", lambda steps: len(steps) == 2 and 1 <= steps[0] < steps[1])
]
Ranks = Annotated[Sequence[int], ("a list of ranks, such as [0]", lambda ranks: min(ranks, default=0) >= 0)]


class ProfileMonitor(L.Callback):
    """A callback that profiles some training steps with torch and writes ``rank<n>.json`` (for ui.perfetto.dev) per
    rank. Every action has its name from schedule and timeline, above its operators, collectives and kernels. Other
    steps and ranks run unchanged; Lightning's ``PyTorchProfiler`` in contrast runs on every rank and counts validation
    by the same schedule.

    Args:
        folder: folder of the files; default: ``profile`` in the Trainer's ``default_root_dir``.
        steps: first profiled batch, at least 1 because the batch before warms up, and first batch after the profile;
            batches of this process are counted from 0.
        ranks: ranks to profile.
        memory_history: keep the history of the last 100,000 allocations and frees on every CUDA device, which slows
            training down. A rank that runs out of memory writes it as ``memory<n>.pickle`` (for
            docs.pytorch.org/memory_viz).

    Raises:
        ConfigError: an option is wrong; at the start of training, a rank does not exist, or there is no CUDA device for
            the history.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        steps: Steps = (10, 12),
        ranks: Ranks = (0,),
        memory_history: bool = False,
    ) -> None:
        check_types("ProfileMonitor", ProfileMonitor.__init__, steps=steps, ranks=ranks, memory_history=memory_history)
        self.folder = None if folder is None else Path(folder)
        self.steps, self.ranks, self.memory_history = (steps[0], steps[1]), tuple(ranks), memory_history
        self._batch = 0
        self._profile: profile | None = None
        self._remembers = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if outside := [rank for rank in self.ranks if rank not in range(trainer.world_size)]:
            raise ConfigError(
                f"ProfileMonitor: ranks={outside} do not exist; give ranks of 0 to {trainer.world_size - 1}"
            )
        self._batch = 0
        if self.memory_history:
            if trainer.strategy.root_device.type != "cuda":
                raise ConfigError("ProfileMonitor: memory_history=True needs CUDA devices; leave it out")
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
            self._remembers = True

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        first, last = self.steps
        if self._batch != first - 1 or trainer.global_rank not in self.ranks:
            return
        path = self._path(trainer, f"rank{trainer.global_rank}.json")
        self._profile = profile(
            activities=supported_activities(),
            schedule=schedule(wait=0, warmup=1, active=last - first, repeat=1),
            on_trace_ready=lambda seen: seen.export_chrome_trace(str(path)),
        )
        self._profile.start()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch += 1
        if self._profile is not None:
            self._profile.step()
        if self._batch == self.steps[1]:
            self._stop()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()
        if self._batch <= self.steps[0]:
            rank_zero_warn(
                f"ProfileMonitor: no trace, as the run had {self._batch} batches; give steps below that, not"
                f" {list(self.steps)}"
            )

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the trace of a run that fails within these steps, and the history if memory ran out."""
        if self._remembers and isinstance(exception, torch.OutOfMemoryError):
            torch.cuda.memory._dump_snapshot(str(self._path(trainer, f"memory{trainer.global_rank}.pickle")))
        self._end()

    def _path(self, trainer: L.Trainer, name: str) -> Path:
        folder = self.folder or Path(trainer.default_root_dir) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def _end(self) -> None:
        self._stop()
        if self._remembers:
            self._remembers = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def _stop(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
