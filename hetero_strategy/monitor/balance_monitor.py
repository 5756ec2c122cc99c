"""``BalanceMonitor``: how evenly the work is spread, how many bytes that costs, and whether training waits for it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch.distributed as dist
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from hetero_strategy.errors import ConfigError, check_types, require
from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.measure import Window, gather_on_first, over_ranks, waited
from hetero_strategy.plan.balance import Cost, fit_cost
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.compile import Traffic, sent

if TYPE_CHECKING:
    from hetero_strategy.loading.batch import Batch
    from hetero_strategy.runtime.executor import Executor


LOGGED = (
    "plan_seconds", "payload_seconds", "plan_hidden_share", "microbatches", "skipped_samples",
)  # fmt: skip
"""Fields of the summary that are logged unchanged."""


@dataclass
class _Sums:
    """The sums over steps. Spreads are equal on all ranks; traffic and times, in seconds, belong to this rank."""

    steps: int = 0
    spreads: dict[str, Spread] = field(default_factory=dict)
    traffic: Traffic | None = None
    counted: int = 0
    """Number of steps whose traffic was counted."""
    wait: float = 0.0
    timed: int = 0
    plan: float = 0.0
    payload: float = 0.0
    known: float = 0.0
    """Part of ``plan`` in steps whose wait is known."""
    exposed: float = 0.0
    """Most of ``known`` that training can have waited for."""
    microbatches: int = 0
    skipped: int = 0

    def add(self, batch: Batch, wait: float | None, spreads: Mapping[str, Spread], moved: Traffic | None) -> None:
        """Count one step; ``moved`` is None if its traffic was not counted."""
        self.steps += 1
        self.microbatches += batch.plan.microbatches
        self.skipped += int(getattr(batch, "skipped", 0))
        self.wait += wait or 0.0
        for name, spread in spreads.items():
            self.spreads[name] = self.spreads[name] + spread if name in self.spreads else spread
        if moved is not None:
            self.traffic = moved if self.traffic is None else self.traffic + moved
            self.counted += 1
        times = getattr(batch, "times", None)
        if times is None:
            return
        self.timed += 1
        self.plan += times.plan
        self.payload += times.payload
        if wait is not None:
            self.known += times.plan
            self.exposed += min(wait, times.plan)


class BalanceMonitor(L.Callback):
    """A callback that logs how the work of steps is spread, averaged over windows of ``every_n_steps`` global batches.

    ================================= ==========================================================================
    ``balance/<m>/imbalance_before``  time of the slowest instance of every microbatch of module ``m`` over the mean of
                                      its instances, with samples dealt as drawn; 1: no waits
    ``balance/<m>/imbalance_after``   this ratio with samples dealt as planned
    ``balance/bytes_within_nodes``    bytes of rows and of their gradients that leave a rank for another of its node, at
                                      the edges between modules, per step (counted in the window's first one)
    ``balance/bytes_between_nodes``   bytes that leave a rank for a rank of another node
    ``data/plan_seconds``             making the step plan, in any process
    ``data/payload_seconds``          reading and decoding
    ``data/plan_hidden_share``        least share of planning in which training did not wait for data
    ``data/microbatches``             microbatches per step
    ``data/skipped_samples``          samples of the window that could not be read
    ================================= ==========================================================================

    :class:`ThroughputMonitor` logs how long training waits for data. Modules without loads in their plan, bytes under a
    strategy without layouts, and times missing in batches are left out. :func:`hetero_strategy.schedule.compile.sent`
    counts the bytes, summed over all ranks: a row that its reader already has costs none, and rows between stages of
    one module are not counted. Times are the slowest rank's, without validation. Every rank needs the callback, because
    log points reduce over all ranks.

    At the end of fit it writes ``balance.json`` and ``balance.png``: the load of every module's instances over the
    whole run, before and after. Under ``costs``, ``balance.json`` has the measured seconds of every module's forward in
    the last steps, for ``balance.costs`` of another run. A Weights & Biases logger also receives the picture.

    Args:
        folder: folder of both files; default: the Trainer's ``default_root_dir``.
        every_n_steps: length of a window.

    Raises:
        ConfigError: an option is wrong; at the first step, the batch has no step plan.
    """

    def __init__(self, folder: Path | str | None = None, every_n_steps: Window = 10) -> None:
        require("matplotlib", "plots", "BalanceMonitor")
        check_types("BalanceMonitor", BalanceMonitor.__init__, folder=folder, every_n_steps=every_n_steps)
        self.folder = None if folder is None else Path(folder)
        self.every_n_steps = every_n_steps
        self.last: BalanceSummary | None = None
        """Summary of the last run, on every rank."""
        self._waited: float | None
        """Seconds waited for batches up to the previous one."""
        self._wait: float | None = None
        """Seconds waited for the latest batch."""
        self._reset()

    def _reset(self) -> None:
        self._window, self._total, self._waited = _Sums(), _Sums(), None
        self._step = 0

    # ---- hooks -----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        before, self._waited = self._waited, waited(trainer)
        self._wait = None if before is None or self._waited is None else self._waited - before
        if not hasattr(batch, "plan"):
            raise ConfigError(
                f"BalanceMonitor: the batch is a {type(batch).__name__} without a step plan; "
                "train with hetero_strategy's data module or remove the callback"
            )

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch here, because batches that a hook skips never reach this hook; log at the end of a window."""
        # Counting reads all transfers of the rank, so only one step of a window counts them.
        moved = None if self._window.steps else self._moved(trainer, batch)
        spreads = {name: Spread.of(load) for name, load in batch.plan.loads.items()}
        for sums in (self._window, self._total):
            sums.add(batch, self._wait, spreads, moved)
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step that self.log writes
        if self._window.steps == self.every_n_steps:
            self._log(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window.steps:
            self._log(trainer)
        if not self._total.steps:
            return
        self.last = _summary(trainer, self._total)
        strategy: Any = trainer.strategy
        costs = fitted_costs(strategy.executor, strategy.background) if hasattr(strategy, "executor") else None
        if trainer.is_global_zero:
            self._write(trainer, self.last, costs or {})

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def _moved(self, trainer: L.Trainer, batch: Batch) -> Traffic | None:
        """Count the bytes that this rank sends in one step at edges between modules; None under a strategy without
        layouts.
        """
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "executor"):
            return None
        executor: Executor = strategy.executor
        program = executor.ready(batch, train=True).program
        assert program is not None
        edges = {n for n, (s, t) in enumerate(executor.compiler.graph.edges) if s.module != t.module}
        return sent(executor.rank, program, executor.row_bytes, strategy.num_processes, edges)

    def _log(self, trainer: L.Trainer) -> None:
        window, self._window = self._window, _Sums()
        summary = _summary(trainer, window)
        metrics: dict[str, float | None] = {f"data/{name}": getattr(summary, name) for name in LOGGED}
        for name, spread in summary.spreads.items():
            metrics[f"balance/{name}/imbalance_before"] = spread.imbalance_before
            metrics[f"balance/{name}/imbalance_after"] = spread.imbalance_after
        if summary.traffic is not None:
            metrics["balance/bytes_within_nodes"] = summary.traffic.within
            metrics["balance/bytes_between_nodes"] = summary.traffic.between
        for logger in trainer.loggers:
            logger.log_metrics({name: value for name, value in metrics.items() if value is not None}, step=self._step)

    def _write(self, trainer: L.Trainer, summary: BalanceSummary, costs: Mapping[str, Cost]) -> None:
        folder = self.folder or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        content = {**summary.to_json(), "costs": {name: asdict(cost) for name, cost in costs.items()}}
        (folder / "balance.json").write_text(json.dumps(content, indent=1))
        if not summary.spreads:
            return
        from hetero_strategy.monitor.draw import draw_balance  # matplotlib takes a second to import

        draw_balance(folder / "balance.png", summary)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("balance", [str(folder / "balance.png")])


def _summary(trainer: L.Trainer, sums: _Sums) -> BalanceSummary:
    """Summarise some steps; a collective, equal on all ranks."""
    own = [sums.wait, sums.timed, sums.plan, sums.payload, sums.known, sums.exposed / (sums.known or 1.0)]
    wait, timed, plan, payload, known, exposed = over_ranks(trainer, own, "max")
    own = list(sums.traffic or Traffic(0.0, 0.0))
    moved = [mean * trainer.world_size for mean in over_ranks(trainer, own, "mean")]
    return BalanceSummary(
        steps=sums.steps,
        spreads=dict(sums.spreads),
        traffic=None if sums.traffic is None else Traffic(*moved).times(1 / sums.counted),
        wait_seconds=wait / sums.steps,
        plan_seconds=plan / timed if timed else None,
        payload_seconds=payload / timed if timed else None,
        plan_hidden_share=1.0 - exposed if known else None,
        microbatches=sums.microbatches / sums.steps,
        skipped_samples=sums.skipped,
    )


def fitted_costs(executor: Executor, group: dist.ProcessGroup | None) -> dict[str, Cost] | None:
    """Fit the seconds of every module's forward, as a function of its items, to the recorded steps of all ranks.

    Use them as ``balance.costs`` of the next run where FLOPs predict time badly (small items, slow kernels). This is a
    collective over ``group``, all ranks on the host, after training, and waits for the device.

    Returns:
        Module -> its cost, on rank 0; None on other ranks. Modules that never ran are left out.
    """
    seen: list[tuple[StageId, np.ndarray, np.ndarray, float]] = []
    steps = list(executor.recorder.steps)
    for step in steps[1:] or steps:  # the first step warms up
        for action, start, end in step.events():
            if action.kind == "F":
                assignment = step.plan.assignments[action.node.module][action.microbatch]
                instance = executor.local[action.node].seat.instance
                rows, squares = assignment.inner_rows_of(instance), assignment.squares_of(instance)
                seen.append((action.node.all_instances, rows, squares, end - start))
    ranks = gather_on_first(seen, group)
    if ranks is None:
        return None
    lengths: dict[StageId, list[np.ndarray]] = defaultdict(list)
    squares_of: dict[StageId, list[np.ndarray]] = defaultdict(list)
    seconds: dict[StageId, list[float]] = defaultdict(list)
    for node, rows, squares, took in chain.from_iterable(ranks):
        lengths[node].append(rows)
        squares_of[node].append(squares)
        seconds[node].append(took)
    costs: dict[str, list[Cost]] = defaultdict(list)
    for node in sorted(lengths):
        costs[node.module].append(fit_cost(lengths[node], seconds[node], squares_of[node]))
    return {
        module: Cost(*(sum(getattr(cost, part) for cost in stages) for part in ("linear", "quadratic", "fixed")))
        for module, stages in costs.items()
    }
