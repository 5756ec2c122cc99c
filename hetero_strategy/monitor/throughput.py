"""``ThroughputMonitor``: the speed of a run, for every module and in total.

Model FLOPs are the FLOPs of a step's mathematics; hardware FLOPs add the forwards that backward runs again (PaLM,
appendix B): of recompute, and of a language model's head.
"""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from hetero_strategy.errors import ConfigError, check_types
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.read_spec import causal_squares, flops_by_length
from hetero_strategy.model.spec import fed_by_trainable
from hetero_strategy.monitor.measure import Spent, Watch, Window, most_allocated, over_ranks, waited
from hetero_strategy.parallelize.host_memory import host_memory
from hetero_strategy.parallelize.transforms import recomputed

if TYPE_CHECKING:
    from hetero_strategy.loading.batch import Batch

GIB = 2**30
UNEVEN = 3.0
"""Rows of a layer's busiest expert over the mean from which a warning names the layer."""


@dataclass
class _Window:
    """The sums over the steps since the last log point, equal on all ranks."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    padding: int = 0
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sequences: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    """Module -> lengths of the sequences inside it, on all its instances."""
    squares: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Module whose rows do not see all earlier ones -> squares of its masks, on all its instances."""
    experts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Module with routers -> rows that chose each expert, ``[layers, experts]``."""

    def count_experts(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Add one step's counts, without a wait for the device."""
        self.experts |= {name: self.experts[name] + own if name in self.experts else own for name, own in rows.items()}

    def add(self, batch: Batch) -> None:
        """Count one step."""
        self.steps += 1
        metadata = batch.plan.metadata
        self.samples += len(metadata.samples)
        self.tokens += int(metadata.tokens.sum())
        self.labels += int(metadata.labels.sum())
        for name, assignments in batch.plan.assignments.items():
            for assignment in assignments:
                self.rows[name] += int(assignment.edge_rows.sum())
                self.padding += int(assignment.padding.sum())
                self.sequences[name].append(assignment.inner_rows)
                if assignment.squares is not None:
                    self.squares[name] += float(assignment.squares.sum())


class Totals(NamedTuple):
    """The totals of a whole run."""

    steps: int
    tokens: int
    spent: Spent
    """Times of the rank that waited longest for data."""
    rank: int
    """Number of that rank."""
    expert_load: Mapping[str, Mapping[int | str, float]] = MappingProxyType({})
    """Module with experts -> label of a router, see :meth:`Routing.labels` -> rows of its busiest expert over the mean,
    in the last window."""


Flops = Annotated[float, ("FLOP/s of one device, such as 989e12,", lambda flops: flops > 0)]


class ThroughputMonitor(L.Callback):
    """A callback that logs the speed of a run, averaged over windows of ``every_n_steps`` global batches.

    ======================================== ====================================================================
    ``throughput/tokens_per_second``         tokens of the samples (encoder rows in them included, padding not)
    ``throughput/samples_per_second``        samples of the global batches
    ``throughput/<module>/rows_per_second``  rows of the module's units on its edges (merged ones, if it merges rows)
    ``throughput/step_seconds``              wall time from the start of a step to the start of the next
    ``throughput/data_wait_seconds``         part of it: waiting for the next batch, if the loader counts it
    ``throughput/checkpoint_seconds``        part of it: writing and removing checkpoints, under HeteroStrategy
    ``throughput/between_seconds``           part of it: callbacks, loggers, Lightning's loop
    ``throughput/validation_seconds``        validation, per training step; not in step_seconds
    ``throughput/padding_share``             share of alignment rows in all rows, over all modules
    ``tflops/total``, ``tflops/<module>``    model FLOPs per second over all ranks, in 1e12
    ``mfu/total``, ``mfu/<module>``          model FLOPs over the peak of all ranks, or of the module's own ranks
    ``hfu/total``, ``hfu/<module>``          MFU plus recomputed FLOPs; MFU and HFU need a known peak
    ``memory/max_allocated_gib``             peak of the fullest rank (``memory/max_rss_gib`` on CPU)
    ``memory/max_offloaded_gib``             most activations in host memory on any rank, with ``offload``
    ``experts/<module>/<block>``             rows of the block's busiest expert over the mean of its experts
    ======================================== ====================================================================

    Modules that share ranks share their peak: their MFUs add up to the ranks' MFU. Each time is the
    slowest rank's, from the first step on, without validation. Only log points wait for the device. Every rank needs
    the callback, because log points reduce over all ranks.

    Args:
        every_n_steps: length of a window.
        peak_flops: peak FLOP/s of one device; default: torchtitan's bf16 figure for a CUDA device, none on CPU.
        clock: function that returns seconds and never goes back.

    Raises:
        ConfigError: an option is wrong; at the first step, there is no model with named modules or no step plan.
    """

    def __init__(
        self,
        every_n_steps: Window = 10,
        peak_flops: Flops | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_types("ThroughputMonitor", ThroughputMonitor.__init__, every_n_steps=every_n_steps, peak_flops=peak_flops)
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self.last: Totals | None = None
        """Totals of the last run, equal on all ranks."""
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._window, self._watch = _Window(), Watch(self._clock)
        self._steps = self._tokens = 0
        self._loads: dict[str, dict[int | str, float]] = {}
        self._warned: set[tuple[str, int | str]] = set()
        self._spent = Spent()
        self._step = 0

    # ---- hooks -----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset()
        self._peak = self.peak_flops or device_peak_flops(trainer.strategy.root_device)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._watch.begins("step", trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not hasattr(batch, "plan"):
            raise ConfigError(
                f"ThroughputMonitor: the batch is a {type(batch).__name__} without a step plan; "
                "train with hetero_strategy's data module or remove the callback"
            )
        self._window.add(batch)
        self._window.count_experts(getattr(getattr(trainer.strategy, "executor", None), "expert_rows", {}))
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step that self.log writes
        full = self._window.steps == self.every_n_steps
        if full:
            _wait_for_device(trainer)
        self._watch.begins("between", trainer)
        if full:
            metrics = self._log(trainer, pl_module)
            # The speed is equal on all ranks, so no collective is needed. Lightning reads values for the bar after
            # every step, so it stays on the host.
            speed = torch.tensor(metrics["throughput/tokens_per_second"])
            pl_module.log("tokens/s", speed, prog_bar=True, logger=False)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the device to finish training before the time of validation starts."""
        self._finish_step(trainer)
        self._watch.begins("validation", trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._watch.begins("between", trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish_step(trainer)
        if self._window.steps:
            self._log(trainer, pl_module)
        self._spent += self._watch.read()
        self.last = Totals(self._steps, self._tokens, *self._spent.of_slowest(trainer), self._loads)

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

        # A collective; its results are equal on all ranks.
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
            "throughput/padding_share": window.padding / max(rows + window.padding, 1),
            "tflops/total": sum(w.model for w in works.values()) / seconds / 1e12,
            **{f"tflops/{name}": w.model / seconds / 1e12 for name, w in works.items()},
            memory_name: memory,
            **({} if away is None else {"memory/max_offloaded_gib": most_away}),
        }
        for name, rows_of_experts in window.experts.items():
            routing: Any = modules[name].routing
            labels = routing.labels(modules[name].meta_copy().blocks())
            self._loads[name] = dict(zip(labels, expert_loads(rows_of_experts), strict=True))
            metrics |= {f"experts/{name}/{block}": load for block, load in self._loads[name].items()}
            self._warn_of_uneven(name)
        if self._peak is not None:
            for kind, part in (("mfu", "model"), ("hfu", "hardware")):
                flops = {name: getattr(w, part) for name, w in works.items()}
                metrics[f"{kind}/total"] = utilization(sum(flops.values()), seconds, trainer.world_size, self._peak)
                for name, count in flops.items():
                    metrics[f"{kind}/{name}"] = utilization(count, seconds, ranks[name], self._peak)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)
        return metrics

    def _warn_of_uneven(self, name: str) -> None:
        """Warn once of each block of a module whose busiest expert has many times the mean of rows."""
        new = {n: load for n, load in self._loads[name].items() if load >= UNEVEN and (name, n) not in self._warned}
        if not new:
            return
        self._warned |= {(name, block) for block in new}
        busiest = max(new, key=new.__getitem__)
        others = f"{len(new) - 1} other block{'s' * (len(new) > 2)}"
        more = f" (and at least {UNEVEN:g} times it in {others})" if len(new) > 1 else ""
        rank_zero_warn(
            f"experts of {name!r}: the busiest one of block {busiest} had {new[busiest]:.1f} times the mean of"
            f" rows{more}; a larger balance_loss or router_bias_step spreads them"
        )


@dataclass(frozen=True)
class Part:
    """A stretch of one module's forward that is trained or frozen as a whole."""

    forward: float
    """FLOPs of its forward."""
    trainable: bool
    recomputed: float = 0.0
    """Share of the forward that backward runs again because activations are not kept."""


@dataclass(frozen=True)
class ModuleFlops:
    """The forward and backward FLOPs of one module."""

    model: float
    hardware: float


def work(parts: Iterable[Part], upstream: bool) -> ModuleFlops:
    """Count the FLOPs of a module whose parts run in sequence.

    Backward costs a forward for the gradient of the weights and one for the gradient of the rows. A frozen part needs
    only the second, and that only if something before it is trained.

    Args:
        upstream: whether gradients have to reach the module's input rows (``model.spec.fed_by_trainable``).
    """
    model = hardware = 0.0
    for part in parts:
        backward = 2 if part.trainable else int(upstream)
        model += part.forward * (1 + backward)
        hardware += part.forward * (1 + backward + part.recomputed * (backward > 0))
        upstream = upstream or part.trainable
    return ModuleFlops(model, hardware)


def expert_loads(rows: torch.Tensor) -> list[float]:
    """Return the rows of each layer's busiest expert over the mean, from rows ``[layers, experts]``.

    >>> expert_loads(torch.tensor([[3, 1], [2, 2], [0, 0]]))
    [1.5, 1.0, 1.0]
    """
    loads: list[float] = (rows.amax(1) / rows.double().mean(1)).nan_to_num(1.0).tolist()
    return loads


def utilization(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the utilisation of ``ranks`` devices of ``peak`` FLOP/s: MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / (seconds * ranks * peak)


def device_peak_flops(device: torch.device) -> float | None:
    """Return the peak dense bf16 FLOP/s of a CUDA device by torchtitan's table; None if unknown, as on CPU."""
    if device.type != "cuda":
        return None
    try:
        from torchtitan.tools.utils import get_peak_flops
    except ModuleNotFoundError:
        warnings.warn(
            "no MFU: it needs torchtitan's table of peak FLOP/s (pip install 'hetero-strategy[titan]'), or"
            " ThroughputMonitor(peak_flops=...)",
            stacklevel=2,
        )
        return None
    name = torch.cuda.get_device_name(device)
    peak = float(get_peak_flops(name))
    if peak == 312e12 and "A100" not in name:  # the table's answer for unknown devices
        warnings.warn(
            f"peak FLOP/s of {name} is not known: no MFU; give ThroughputMonitor(peak_flops=...)", stacklevel=2
        )
        return None
    return peak


def _wait_for_device(trainer: L.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)


def _model(pl_module: L.LightningModule) -> tuple[Mapping[str, Adapter], list[tuple[str, str]]]:
    """Return named modules and edges of the multimodal model inside a LightningModule."""
    for module in pl_module.modules():
        if hasattr(module, "modules_by_name") and hasattr(module, "edges"):
            return module.modules_by_name, [(edge.source, edge.target) for edge in module.edges]  # type: ignore
    raise ConfigError(
        f"ThroughputMonitor: {type(pl_module).__name__} holds no MultimodalModel; assign one to an attribute in "
        "configure_model, or remove the callback"
    )


def _parts(adapter: Adapter, name: str, window: _Window, strategy: Any) -> list[Part]:
    """Return parts of a module with the forward FLOPs of all its sequences."""
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *window.sequences.get(name, ())])
    original = adapter.meta_copy()  # not parallelised: counting may copy modules, and FSDP modules cannot be copied
    transforms, blocks = getattr(strategy, "transforms", {}).get(name, {}), tuple(original.blocks())
    again, around = recomputed(transforms, len(blocks))
    # Rows without a label skip a language model's head, whose chunks run again in every backward.
    head = original.part_flops(lengths)[2] if adapter.kind.samplewise else 0.0
    masked = _masked(original, lengths, window.squares[name]) if name in window.squares else 0.0
    labelled = head * window.labels / max(window.tokens, 1)
    chunked = labelled if original.recomputed_parts() else 0.0
    parts = [
        Part(
            flops - (head - labelled) - chunked + masked,
            _trainable(adapter.get_submodule(part)),
            again if not part or _holds(part, blocks) else around,
        )
        for part, flops in original.flops_by_part(lengths).items()
    ]
    return [*parts, Part(chunked, parts[-1].trainable, 1.0 + around)] if chunked else parts


def _masked(module: Adapter, lengths: np.ndarray, squares: float) -> float:
    """Return the FLOPs of the pairs that the step's masks have beyond the causal ones of :meth:`Adapter.flops`."""
    split = [1] * len(module.blocks())
    _, per_pair = flops_by_length(module, split)
    return float((per_pair * (squares - causal_squares(module, split, lengths))).sum())


def _holds(part: str, blocks: tuple[str, ...]) -> bool:
    """Return whether a part contains a block; partial recompute covers only blocks."""
    return any(fqn.startswith(f"{part}.") for fqn in blocks)


def _trainable(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _offloaded(trainer: L.Trainer) -> float | None:
    """Return this rank's peak of activations in host memory, in GiB; None without offload."""
    strategy: Any = trainer.strategy
    if not any(each.moves for of in getattr(strategy, "transforms", {}).values() for each in of.values()):
        return None
    peaks = {id(host): host.most for host in map(host_memory, strategy.executor.stages.values()) if host is not None}
    return sum(peaks.values()) / GIB


def _memory(device: torch.device) -> tuple[str, float]:
    """Return the name and the peak of this rank's memory in GiB."""
    if device.type == "cuda":
        return "memory/max_allocated_gib", most_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB elsewhere
    return "memory/max_rss_gib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
