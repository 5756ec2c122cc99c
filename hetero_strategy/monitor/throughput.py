"""``ThroughputMonitor``: how fast a run is, for every module and for the whole."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import numpy as np
import torch
from typing_extensions import override

from hetero_strategy.errors import ConfigError, check_options
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.monitor.flops import Part, device_peak_flops, utilization, work
from hetero_strategy.monitor.measure import OPTIONS, Spent, Watch, most_allocated, over_ranks, waited
from hetero_strategy.parallelize.offload import host_memory
from hetero_strategy.plan.ahead import computing
from hetero_strategy.planner.layers import fed_by_trainable

if TYPE_CHECKING:
    from hetero_strategy.loading.batch import Batch

GIB = 2**30


@dataclass
class _Window:
    """Sums over the steps since the last log point, equal on all ranks."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    padding: int = 0
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sequences: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    """Module -> lengths of the sequences inside it, on all its instances."""

    def add(self, batch: Batch) -> None:
        """Count one step."""
        self.steps += 1
        metadata = batch.plan.metadata
        self.samples += len(metadata.samples)
        self.tokens += int(metadata.tokens.sum())
        self.labels += int(metadata.labels.sum())
        for name, assignments in batch.plan.assignments.items():
            if computing(name) != name:  # counts in the step that it is for
                continue
            for assignment in assignments:
                self.rows[name] += int(assignment.edge_rows.sum())
                self.padding += int(assignment.padding.sum())
                self.sequences[name].append(assignment.inner_rows)


class Totals(NamedTuple):
    """Totals of a whole run."""

    steps: int
    tokens: int
    spent: Spent
    """What the rank spent that waited longest for data."""
    rank: int
    """Number of that rank."""


class ThroughputMonitor(L.Callback):
    """Logs what a run achieves, averaged over windows of ``every_n_steps`` global batches.

    ======================================== ====================================================================
    ``throughput/tokens_per_second``         tokens of the samples (encoder rows in them included, padding not)
    ``throughput/samples_per_second``        samples of the global batches
    ``throughput/<module>/rows_per_second``  rows of the module's units on its edges (merged ones, if it merges rows)
    ``throughput/step_seconds``              wall time of a step and of what lies between it and the next
    ``throughput/data_wait_seconds``         part of it: waiting for the next batch, where the loader counts that
    ``throughput/checkpoint_seconds``        part of it: writing and removing checkpoints, under HeteroStrategy
    ``throughput/between_seconds``           part of it: callbacks, loggers, Lightning's loop
    ``throughput/validation_seconds``        validation, per training step; not in step_seconds
    ``throughput/<module>/cached_share``     share of the module's items whose rows were read, validation's included
    ``throughput/padding_share``             share of alignment rows in all rows, over all modules
    ``tflops/total``, ``tflops/<module>``    model FLOPs per second over all ranks, in 1e12
    ``mfu/total``, ``mfu/<module>``          model FLOPs over the peak of all ranks, or of the module's own ranks
    ``hfu/total``, ``hfu/<module>``          the same with what backward runs again; MFU and HFU need a known peak
    ``memory/max_allocated_gib``             peak of the fullest rank (``memory/max_rss_gib`` on CPU)
    ``memory/max_offloaded_gib``             most activations in host memory on any rank, where there is ``offload``
    ======================================== ====================================================================

    Modules that share ranks share their peak: their MFUs add up to the ranks' MFU. Each time is that of the rank
    slowest in it, from the first step on, without validation. The device is waited for at log points only. Every rank
    needs the callback, as log points reduce over all ranks.

    Args:
        every_n_steps: length of a window.
        peak_flops: peak FLOP/s of one device; default: torchtitan's bf16 figure for a CUDA device, none on CPU.
        clock: gives seconds and never goes back.

    Raises:
        ConfigError: an option is wrong; at the first step, there is no model with named modules or no step plan.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_options("ThroughputMonitor", OPTIONS, every_n_steps=every_n_steps, peak_flops=peak_flops)
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self.last: Totals | None = None
        """Totals of the last run, equal on all ranks."""
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._window, self._watch = _Window(), Watch(self._clock)
        self._steps = self._tokens = 0
        self._spent = Spent()
        self._step = 0
        self._cached = np.zeros((1, 2))

    # ---- hooks -----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the previous run and look up the peak."""
        self._reset()
        self._peak = self.peak_flops or device_peak_flops(trainer.strategy.root_device)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the time of a step."""
        self._watch.begins("step", trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log at the end of a window."""
        if not hasattr(batch, "plan"):
            raise ConfigError(
                f"ThroughputMonitor: the batch is a {type(batch).__name__} without a step plan; "
                "train with hetero_strategy's data module or remove the callback"
            )
        self._window.add(batch)
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step that self.log writes
        full = self._window.steps == self.every_n_steps
        if full:
            _wait_for_device(trainer)
        self._watch.begins("between", trainer)
        if full:
            metrics = self._log(trainer, pl_module)
            # Equal on all ranks, so no rank has to ask another. Lightning reads what is for the bar after every step,
            # so it stays on the host.
            speed = torch.tensor(metrics["throughput/tokens_per_second"])
            pl_module.log("tokens/s", speed, prog_bar=True, logger=False)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finish training on the device before the time of validation starts."""
        self._finish_step(trainer)
        self._watch.begins("validation", trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the time of validation."""
        self._watch.begins("between", trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the last, shorter window and add up the run."""
        self._finish_step(trainer)
        if self._window.steps:
            self._log(trainer, pl_module)
        self._spent += self._watch.read()
        self.last = Totals(self._steps, self._tokens, *self._spent.of_slowest(trainer))

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def _finish_step(self, trainer: L.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda" and self._steps + self._window.steps:
            self._watch.begins("step", trainer)
            _wait_for_device(trainer)
        self._watch.begins("between", trainer)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        window, self._window = self._window, _Window()
        spent = self._watch.read()
        self._steps += window.steps
        self._tokens += window.tokens
        self._spent += spent
        modules, edges = _model(pl_module)
        placement = getattr(trainer.strategy, "placement", None)  # without one every module is on the only device
        ranks = {name: len(placement.layouts[name].ranks) if placement else 1 for name in modules}

        # A collective, equal on all ranks.
        memory_name, memory = _memory(trainer.strategy.root_device)
        away = _offloaded(trainer)
        own = [spent.training, spent.data, spent.checkpoint, spent.between, spent.validation, memory, away or 0.0]
        seconds, data, checkpoint, between, validation, memory, most_away = over_ranks(trainer, own, "max")
        parts = {name: _parts(adapter, name, window, trainer.strategy) for name, adapter in modules.items()}
        trainable = {name: _trainable(adapter) for name, adapter in modules.items()}
        fed = fed_by_trainable(trainable, edges)
        works = {name: work(parts[name], fed[name]) for name in modules}

        rows = sum(window.rows.values())
        metrics = {
            "throughput/tokens_per_second": window.tokens / seconds,
            "throughput/samples_per_second": window.samples / seconds,
            **{f"throughput/{name}/rows_per_second": window.rows[name] / seconds for name in modules},
            "throughput/step_seconds": seconds / window.steps,
            **({} if waited(trainer) is None else {"throughput/data_wait_seconds": data / window.steps}),
            "throughput/checkpoint_seconds": checkpoint / window.steps,
            "throughput/between_seconds": between / window.steps,
            "throughput/validation_seconds": validation / window.steps,
            **self._cached_shares(trainer),
            "throughput/padding_share": window.padding / max(rows + window.padding, 1),
            "tflops/total": sum(w.model for w in works.values()) / seconds / 1e12,
            **{f"tflops/{name}": w.model / seconds / 1e12 for name, w in works.items()},
            memory_name: memory,
            **({} if away is None else {"memory/max_offloaded_gib": most_away}),
        }
        if self._peak is not None:
            for kind, part in (("mfu", "model"), ("hfu", "hardware")):
                flops = {name: getattr(w, part) for name, w in works.items()}
                metrics[f"{kind}/total"] = utilization(sum(flops.values()), seconds, trainer.world_size, self._peak)
                for name, count in flops.items():
                    metrics[f"{kind}/{name}"] = utilization(count, seconds, ranks[name], self._peak)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)
        return metrics

    def _cached_shares(self, trainer: L.Trainer) -> dict[str, float]:
        """Of each module whose rows are kept on disk, over all ranks; a collective where there are such."""
        caches = getattr(trainer.strategy, "row_caches", None)
        counts = {} if caches is None else caches.counts()
        if not counts:
            return {}
        now = np.array(list(counts.values()), np.float64)
        new, self._cached = now - self._cached, now
        found = np.reshape(over_ranks(trainer, new.ravel().tolist(), "mean"), (-1, 2))
        shares = (found[:, 0] / np.maximum(found.sum(axis=1), 1e-9)).tolist()
        return {f"throughput/{name}/cached_share": share for name, share in zip(counts, shares, strict=True)}


def _wait_for_device(trainer: L.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)


def _model(pl_module: L.LightningModule) -> tuple[Mapping[str, Adapter], list[tuple[str, str]]]:
    """Named modules and edges of the multimodal model inside a LightningModule."""
    for module in pl_module.modules():
        if hasattr(module, "modules_by_name") and hasattr(module, "edges"):
            return module.modules_by_name, [(edge.source, edge.target) for edge in module.edges]  # type: ignore
    raise ConfigError(
        f"ThroughputMonitor: {type(pl_module).__name__} holds no MultimodalModel; assign one to an attribute in "
        "configure_model, or remove the callback"
    )


def _parts(adapter: Adapter, name: str, window: _Window, strategy: Any) -> list[Part]:
    """Parts of a module with the forward FLOPs of all its sequences."""
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *window.sequences.get(name, ())])
    original = adapter.meta_copy()  # before it was parallelised: FSDP modules cannot be copied, which counting may need
    how, blocks = getattr(strategy, "recompute", {}).get(name), tuple(original.blocks())
    again, whole = (0.0, False) if how is None else (how.share(len(blocks)), how.whole)
    # Rows without a label do not reach a language model's head, whose chunks run again in every backward.
    head = original.part_flops(lengths)[2] if adapter.kind.samplewise else 0.0
    labelled = head * window.labels / max(window.tokens, 1)
    chunked = labelled if original.recomputed_parts() else 0.0
    parts = [
        Part(
            flops - (head - labelled) - chunked,
            _trainable(adapter.get_submodule(part)),
            again * (whole or not part or _holds(part, blocks)),
        )
        for part, flops in original.flops_by_part(lengths).items()
    ]
    return [*parts, Part(chunked, parts[-1].trainable, 1.0 + whole)] if chunked else parts


def _holds(part: str, blocks: tuple[str, ...]) -> bool:
    """Whether a part of a module holds any of its blocks, which alone are recomputed if not all is."""
    return any(fqn.startswith(f"{part}.") for fqn in blocks)


def _trainable(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _offloaded(trainer: L.Trainer) -> float | None:
    """Most activations that were in host memory on this rank, in GiB; None where no module's may be."""
    strategy: Any = trainer.strategy
    if not getattr(strategy, "offload", {}):
        return None
    found = {id(host): host.most for host in map(host_memory, strategy.executor.stages.values()) if host is not None}
    return sum(found.values()) / GIB


def _memory(device: torch.device) -> tuple[str, float]:
    """Name and peak of this rank's memory in GiB."""
    if device.type == "cuda":
        return "memory/max_allocated_gib", most_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB elsewhere
    return "memory/max_rss_gib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
