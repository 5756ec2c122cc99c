"""Shared parts of benchmarks of training steps: batches with random payloads, a LightningModule, loops by Lightning."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import lightning as L
import numpy as np
import torch

from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.context import TrainingContext
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, ModuleInputs, Packing, SequenceInputs
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks, slots

MERGE = 2
PATCH = 8
MELS = 40


def batch_of(plan: StepPlan, vocabulary: int, generator: torch.Generator) -> Batch:
    """Random values for a plan with one instance of each module: ``llm`` and, where it has them, ``vision`` of square
    pictures and ``audio``.
    """
    inputs = [_inputs(plan, number, vocabulary, generator) for number in range(len(plan.assignments["llm"]))]
    return Batch(plan, {name: tuple(mb[name] for mb in inputs) for name in plan.assignments})


def _inputs(plan: StepPlan, number: int, vocabulary: int, generator: torch.Generator) -> dict[str, ModuleInputs]:
    assignments = {name: made[number] for name, made in plan.assignments.items()}
    rows = {name: assignment.edge_rows for name, assignment in assignments.items()}
    made: dict[str, ModuleInputs] = {}
    if "vision" in rows:
        side = MERGE * np.sqrt(rows["vision"]).astype(np.int64)
        grids = np.stack([side, side], axis=1)
        patches = torch.randn(int(grids.prod(1).sum()), 3 * PATCH**2, generator=generator)
        made["vision"] = EncoderInputs(patches, grids, rows["vision"], Packing.of(grids.prod(1)))
    if "audio" in rows:
        frames = 2 * rows["audio"][:, None]
        mels = torch.randn(int(frames.sum()), MELS, generator=generator)
        made["audio"] = EncoderInputs(mels, frames, rows["audio"], Packing.of(rows["audio"]))
    lengths = rows["llm"]
    ids = torch.randint(0, vocabulary, (int(lengths.sum()),), generator=generator)
    labels = torch.full_like(ids, IGNORE)
    for end, count in zip(np.cumsum(lengths), plan.metadata.labels[assignments["llm"].units], strict=True):
        labels[end - 1 - count : end - 1] = ids[end - count : end]
    places: dict[Hashable, torch.Tensor] = {
        (encoder, number): torch.from_numpy(slots(edge_blocks(plan, encoder, number, "llm", number), 0))
        for encoder in made
    }
    packing = Packing.of(lengths, alike=plan.alike("llm"))
    made["llm"] = SequenceInputs(ids, labels, packing, slots=places)
    return made


def optimizer_of(parameters: Any, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """AdamW; by default as torch has it, which on a CPU is a loop over parameters."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)


Orders = dict[tuple[int, str, int], torch.Tensor | None]
"""Batch, encoder and microbatch -> order of the encoder's rows in the language model, on the device."""


def microbatch_loss(
    model: MultimodalModel, source: Batch, batch: Batch, number: int, orders: Orders, device: torch.device
) -> torch.Tensor:
    """Return one microbatch's part of the loss, as a loop by hand computes it.

    Args:
        model: encoders and the language model ``llm``, all on this device.
        source: the batch as the loader gives it, whose identity is the key of ``orders``.
        batch: the same on the device.
        number: number of the microbatch.
        orders: filled here, so that they are made once for each batch.
        device: device of the model.
    """
    rows: dict[Hashable, torch.Tensor] = {}
    for encoder in (name for name in model.modules_by_name if name != "llm"):
        inputs, key = batch.inputs[encoder][number], (id(source), encoder, number)
        if inputs is None:
            continue
        if key not in orders:
            order = source.local_rows(encoder, number, "llm", number)
            orders[key] = None if order is None else order.to(device)
        made, order = model.modules_by_name[encoder](inputs), orders[key]
        rows[encoder, number] = made if order is None else made.index_select(0, order)
    loss: torch.Tensor = model.modules_by_name["llm"](batch.inputs["llm"][number], rows).loss_sum
    return loss / batch.plan.normalizer("llm")


class Lit(L.LightningModule):
    """A LightningModule as a user writes it."""

    def __init__(
        self, make_model: Callable[[], MultimodalModel], losses: list[torch.Tensor], fused: bool | None = None
    ) -> None:
        super().__init__()
        self.make_model, self.losses, self.fused = make_model, losses, fused
        self.model: MultimodalModel | None = None
        self.loaded: dict[int, Batch] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make_model()

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """The batch as the data module's loader gives it: the program of its step is made ahead, like its inputs."""
        if id(batch) not in self.loaded:
            context = TrainingContext.of(self.trainer)
            program = context.compiler and context.compiler.program(batch.plan, rank=context.rank, train=True)
            made = batch if program is None else batch.with_program(program)
            self.loaded[id(batch)] = made.pin_memory() if self.device.type == "cuda" else made
        return self.loaded[id(batch)]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        loss = self.model(batch).loss
        self.losses.append(loss.detach())
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters(), fused=self.fused)


def with_trainer(
    strategy: Callable[[], Any],
    make_model: Callable[[], MultimodalModel],
    device: str,
    precision: str,
    losses: list[torch.Tensor],
    *,
    fused: bool | None = None,
) -> Callable[[Any], None]:
    """A loop by Lightning, without a logger: its cost is the person's choice."""

    def train(loader: Any) -> None:
        trainer = L.Trainer(
            accelerator=device, devices=1, strategy=strategy(), precision=cast(Any, precision), max_epochs=1,
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Lit(make_model, losses, fused), train_dataloaders=loader)

    return train
