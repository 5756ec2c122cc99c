"""A model of known cost, a loader and a step that take known seconds by a fake clock."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.plan.step_plan import Assignment, StepItems, StepMetadata, StepPlan

STEP, WAIT, VALIDATION = 2.0, 0.5, 1000.0
"""Seconds that the fake clock is moved by a training step, by the loader and by a validation batch."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Counted(Adapter):
    """Costs ``per_row`` FLOPs a row, those of its head among them."""

    kind = CausalLMKind()

    def __init__(self, per_row: float, head: float = 0.0) -> None:
        super().__init__()
        self.per_row, self.head = per_row, head
        self.weight = nn.Parameter(torch.zeros(1))

    def flops(self, packing_lengths: np.ndarray) -> float:
        return self.per_row * float(np.sum(packing_lengths))

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows = float(np.sum(packing_lengths))
        return (self.per_row - self.head) * rows, np.zeros(0), self.head * rows

    def recomputed_parts(self) -> list[nn.Module]:
        return [self] if self.head else []


class CountedEncoder(Encoder):
    """Backbone 1000 FLOPs a row, projector 10."""

    def __init__(self) -> None:
        super().__init__(Counted(1000.0), Counted(10.0), width=1)

    def flops(self, packing_lengths: np.ndarray) -> float:
        return 1010.0 * float(np.sum(packing_lengths))


class Model(nn.Module):
    def __init__(self, **modules: Adapter) -> None:
        super().__init__()
        self.modules_by_name = modules
        self.parts = nn.ModuleDict(modules).to_empty(device="cpu")
        self.edges = (SimpleNamespace(source="vision", target="llm"),)


class Lit(L.LightningModule):
    def __init__(self, clock: Clock, model: nn.Module) -> None:
        super().__init__()
        self.clock = clock
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.now += STEP
        return sum(p.sum() for p in self.model.parameters() if p.requires_grad)  # type: ignore[return-value]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += VALIDATION

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


class Loader:
    def __init__(self, clock: Clock, batch: Any) -> None:
        self.clock, self.batch = clock, batch
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.clock.now += WAIT
            self.waited += WAIT
            yield self.batch


class Remember(Logger):
    name, version = "remember", 0

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        if "throughput/step_seconds" in metrics:
            self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make_batch() -> SimpleNamespace:
    """3 samples of 10, 20 and 30 tokens on one LLM instance with 4 alignment rows, in 2 microbatches; 1 image that
    the encoder sees as 16 rows and merges to 4."""
    metadata = StepMetadata(
        epoch=0,
        step=0,
        samples=ints(7, 8, 9),
        tokens=ints(10, 20, 30),
        labels=ints(1, 1, 1),
        items={"vision": StepItems(ints(1), ints(4), ints(0), ints(16))},
    )
    none = Assignment(ints(), ints(), ints(), ints(0, 0), ints(0), 0, 0)
    image = Assignment(ints(0), ints(4), ints(16), ints(0, 1), ints(0), 1, 1)
    first = Assignment(ints(0, 2), ints(10, 30), ints(10, 30), ints(0, 2), ints(0), 0, 0)
    second = Assignment(ints(1), ints(20), ints(20), ints(0, 1), ints(4), 1, 1)
    plan = StepPlan(metadata, 2, {"llm": (first, second), "vision": (none, image)})
    return SimpleNamespace(plan=plan)
