"""`BalanceMonitor`: how evenly the work is spread, what that costs in bytes, and whether training waits for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger

from hetero_strategy.errors import ConfigError
from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.fitted import fitted_costs
from hetero_strategy.monitor.measure import Waits, over_ranks
from hetero_strategy.monitor.traffic import Traffic, traffic
from hetero_strategy.plan.step_plan import StepPlan, edge_runs
from hetero_strategy.schedule.compile import rows_on

if TYPE_CHECKING:
    from hetero_strategy.loading.batch import Batch
    from hetero_strategy.plan.balance import Cost
    from hetero_strategy.runtime.executor import Executor


@dataclass
class _Sums:
    """Over steps. Spreads and traffic are the same on every rank, times are this rank's."""

    steps: int = 0
    spreads: dict[str, Spread] = field(default_factory=dict)
    traffic: Traffic | None = None
    counted: int = 0
    """Steps whose traffic was counted."""
    wait: float = 0.0
    timed: int = 0
    plan: float = 0.0
    payload: float = 0.0
    known: float = 0.0
    """Of the time for plans, that of steps whose wait is known."""
    exposed: float = 0.0
    """Of which training waited, at most."""
    microbatches: int = 0
    skipped: int = 0

    def add(self, batch: Batch, wait: float | None, moved: Traffic | None) -> None:
        self.steps += 1
        self.microbatches += batch.plan.microbatches
        self.skipped += int(getattr(batch, "skipped", 0))
        self.wait += wait or 0.0
        for name, load in batch.plan.loads.items():
            spread = Spread.of(load)
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
    """Logs how the work of steps is spread, averaged over windows of ``every_n_steps`` global batches.

    ================================= ==========================================================================
    ``balance/<m>/imbalance_before``  time of the slowest instance of every microbatch of module ``m`` over the mean of
                                      its instances, samples dealt as drawn; 1: nobody waits
    ``balance/<m>/imbalance_after``   the same as planned
    ``balance/bytes_within_nodes``    bytes of rows and of their gradients that leave a rank for another of its node, at
                                      the edges between modules, per step (counted in the window's first one)
    ``balance/bytes_between_nodes``   likewise for a rank of another node
    ``data/plan_seconds``             making the step plan, where it was made
    ``data/payload_seconds``          reading and decoding
    ``data/plan_hidden_share``        of the time for plans, what passed while training did not wait for data; at least
    ``data/microbatches``             per step
    ``data/skipped_samples``          in the window, of samples that could not be read
    ``data/worker_restarts``          since the start of the run, over all ranks
    ================================= ==========================================================================

    How long training waits for data is ``throughput/data_wait_seconds`` of :class:`ThroughputMonitor`. Modules whose
    plan says no loads are left out, bytes under a strategy without layouts, times where batches have none. Bytes are
    those of :func:`hetero_strategy.monitor.traffic.traffic`: a row that its reader has already costs none, rows between
    stages of one module are not counted; counting takes 25 to 40 ms of rank 0's main thread, once per window, at 2560
    instances with 60 samples each. Times are those of the slowest rank; validation is left out. Every rank has to
    have the callback, since log points reduce over all ranks.

    At the end of fit it writes ``balance.json`` and ``balance.png``: the load of every module's instances over the
    whole run, before and after; and in ``balance.json``, under ``costs``, the seconds that the forward of every module
    was measured to take in the last steps, as ``balance.costs`` of another run takes them. The picture also goes to
    Weights & Biases where that is a logger.

    Args:
        folder: where they go; default: the Trainer's ``default_root_dir``.
        every_n_steps: length of a window.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node; default: as many as the strategy starts on one.

    Raises:
        ConfigError: a bad option; at the first step, if the batch has no step plan.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        every_n_steps: int = 10,
        ranks_per_node: int | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"BalanceMonitor: every_n_steps={every_n_steps}; give a window of at least 1 step")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ConfigError(f"BalanceMonitor: ranks_per_node={ranks_per_node}; a node has at least 1 rank")
        self.folder = None if folder is None else Path(folder)
        self.every_n_steps = every_n_steps
        self.ranks_per_node = ranks_per_node
        self.last: BalanceSummary | None = None
        """Of the last run; on every rank, but bytes on rank 0 only."""
        self._reset()

    def _reset(self) -> None:
        self._window, self._total, self._waits = _Sums(), _Sums(), Waits()
        self._step = 0

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the run before."""
        self._reset()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The wait for data is over: count the batch."""
        wait = self._waits.next(trainer)
        if not hasattr(batch, "plan"):
            raise ConfigError(
                f"BalanceMonitor: the batch is a {type(batch).__name__} without a step plan; "
                "train with hetero_strategy's data module or remove the callback"
            )
        # Counting takes the time of sorting all items, 25 to 40 ms of 150,000: one step of a window has to do.
        moved = None if self._window.steps else self._moved(trainer, batch.plan)
        for sums in (self._window, self._total):
            sums.add(batch, wait, moved)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at the end of a window."""
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step that self.log writes
        if self._window.steps == self.every_n_steps:
            self._log(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the last, shorter window; draw and write the whole run."""
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

    def _moved(self, trainer: L.Trainer, plan: StepPlan) -> Traffic | None:
        """Bytes of one step, on the rank that logs."""
        strategy: Any = trainer.strategy
        if not trainer.is_global_zero or not hasattr(strategy, "executor"):
            return None
        return step_traffic(strategy.executor, plan, self.ranks_per_node or strategy.num_processes)

    def _log(self, trainer: L.Trainer) -> None:
        window, self._window = self._window, _Sums()
        found = _summary(trainer, window)
        metrics: dict[str, float | None] = {
            "data/plan_seconds": found.plan_seconds,
            "data/payload_seconds": found.payload_seconds,
            "data/plan_hidden_share": found.plan_hidden_share,
            "data/microbatches": found.microbatches,
            "data/skipped_samples": found.skipped_samples,
            "data/worker_restarts": found.worker_restarts,
        }
        for name, spread in found.spreads.items():
            metrics[f"balance/{name}/imbalance_before"] = spread.imbalance_before
            metrics[f"balance/{name}/imbalance_after"] = spread.imbalance_after
        if found.traffic is not None:
            metrics["balance/bytes_within_nodes"] = found.traffic.within
            metrics["balance/bytes_between_nodes"] = found.traffic.between
        for logger in trainer.loggers:
            logger.log_metrics({name: value for name, value in metrics.items() if value is not None}, step=self._step)

    def _write(self, trainer: L.Trainer, summary: BalanceSummary, costs: Mapping[str, Cost]) -> None:
        folder = self.folder or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        found = {**summary.to_json(), "costs": {name: asdict(cost) for name, cost in costs.items()}}
        (folder / "balance.json").write_text(json.dumps(found, indent=1))
        if not summary.spreads:
            return
        from hetero_strategy.monitor.balance_draw import draw  # matplotlib takes a second to import

        draw(folder / "balance.png", summary)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("balance", [str(folder / "balance.png")])


def step_traffic(executor: Executor, plan: StepPlan, ranks_per_node: int) -> Traffic:
    """Bytes that a step moves between ranks at the edges between modules, and back where gradients flow.

    Args:
        executor: knows the stages, their ranks and what travels between them.
        plan: of the step.
        ranks_per_node: ranks ``[k * n, (k + 1) * n)`` share a node.
    """
    total, graph = Traffic(0.0, 0.0), executor.compiler.graph
    for row_bytes, (source, target) in zip(executor.row_bytes, graph.edges, strict=True):
        if source.module == target.module:
            continue
        runs = edge_runs(plan, source.module, target.module)
        for p, t in runs.pairs:
            sides = (
                rows_on(graph.stages[source], plan.assignments[source.module][p].totals()),
                rows_on(graph.stages[target], plan.assignments[target.module][t].totals(inner=True)),
            )
            for backward in (False, True) if graph.stages[source].backward else (False,):
                rows = traffic(runs.between(p, t), *sides, ranks_per_node, backward=backward)
                total += rows.times(row_bytes)
    return total


def _summary(trainer: L.Trainer, sums: _Sums) -> BalanceSummary:
    """Of some steps; a collective, the same on every rank."""
    mine = [sums.wait, sums.timed, sums.plan, sums.payload, sums.known, sums.exposed / (sums.known or 1.0)]
    wait, timed, plan, payload, known, exposed = over_ranks(trainer, mine, "max")
    (restarts,) = over_ranks(trainer, [float(getattr(trainer.train_dataloader, "restarts", 0))], "mean")
    return BalanceSummary(
        steps=sums.steps,
        spreads=dict(sums.spreads),
        traffic=None if sums.traffic is None else sums.traffic.times(1 / sums.counted),
        wait_seconds=wait / sums.steps,
        plan_seconds=plan / timed if timed else None,
        payload_seconds=payload / timed if timed else None,
        plan_hidden_share=1.0 - exposed if known else None,
        microbatches=sums.microbatches / sums.steps,
        skipped_samples=sums.skipped,
        worker_restarts=round(restarts * trainer.world_size),
    )
