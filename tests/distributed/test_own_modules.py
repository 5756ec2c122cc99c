"""A person's own backbone under the strategy: what is right in it stays right, what cannot be is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero_strategy.errors import ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import Backbone, Encoder, EncoderInputs, MultimodalModel, Projector
from hetero_strategy.parallelize.apply import check
from tests.distributed import scenario
from tests.distributed.harness import Pool, WorkerError
from tests.distributed.scenario import WIDTH, Job, Lit, Result, data, worst_gradient
from tests.distributed.test_ready_backbone import Flat, merged


class Early(Flat):
    """Returns at once where there is nothing to do: its parameters get no gradient there."""

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        return super().forward(inputs) if len(inputs.sizes) else self.first.weight.new_zeros(0, 24)


class Branches(Flat):
    """Maps items of an odd number of rows otherwise than others: a microbatch may use one of two equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.more = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        rows = super().forward(inputs)
        items = rows.split(inputs.rows.tolist())
        made = [(self.one if len(item) % 2 else self.more)(item) for item in items]
        return torch.cat([rows.new_zeros(0, 24), *made])


class Cut(Backbone):
    """Its blocks run, but without items nothing that it returns follows from them."""

    block_list, before_blocks = "layers", ("first",)
    width = hidden_width = 24

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(256, 24), nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def embed(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.first(merged(inputs).to(self.first.weight.dtype))

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        for block in self.blocks().values():
            rows = rows + block(rows)
        return rows

    def finish(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return torch.cat([rows.new_zeros(0, 24), *rows.split(inputs.rows.tolist())])


class Skipping(Cut):
    """Blocks run only where there is something for them to do."""

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return super().transform(rows, inputs) if len(rows) else rows


class Counting(Flat):
    """Training changes what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.seen.zero_()  # type: ignore[operator]

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        self.seen += 1  # type: ignore[operator]
        return super().forward(inputs)


class Normed(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)


class Own(Lit):
    kind: type[nn.Module] = Early

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            modules: dict[str, Any] = dict(self.model.modules_by_name)
            modules["vision"] = Encoder(self.kind, Projector(24, WIDTH))
            self.model = MultimodalModel(modules, seed=11)


def fit(job: Job, kind: type[nn.Module]) -> Result:
    trainer, module, datamodule = scenario.build(job)
    module = Own(job, module.vocabulary)
    module.kind = kind
    trainer.fit(module, datamodule=datamodule)
    return Result([float(x) for x in module.losses], module.gradients, [], {}, {})


def on_rank(
    rank: int, world: int, job: Job, kinds: list[type[nn.Module]], refused: list[type[nn.Module]]
) -> tuple[list[Result], list[str]]:
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    found = [fit(job, kind) for kind in kinds]
    messages = []
    for kind in refused:
        with pytest.raises(ModelError) as error:
            fit(job, kind)
        messages.append(str(error.value))
    return found, messages


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"dp_replicate": 2, "dp_shard": 1},
    "sharded": {"dp_shard": 2},
    "sharded once a step": {"dp_shard": 2, "once": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_backbones(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Two samples a microbatch: some instance often has no picture, and of some parameters no gradient."""
    job = Job(str(data(tmp_path)), steps=3, batch=4, microbatches=2, precision="64-true")
    degrees = dict(LAYOUTS[layout])
    if degrees.pop("once", False):
        job = replace(job, strategy={"reshard_after_forward": "never"})
    both = {"ranks": [0, 1], **degrees}
    kinds = [Early, Branches, Cut]
    job_on = job.on(vision=both, audio=both, llm=both)
    ranks = pool.run(2, on_rank, job_on, kinds, [Counting], group=False, timeout=120)
    for number, kind in enumerate(kinds):
        expected = fit(replace(job, strategy={}), kind)
        worst, where = worst_gradient(expected, [found[number] for found, _ in ranks])
        assert worst < 1e-10, (kind, where)
        for found, _ in ranks:
            assert found[number].losses == pytest.approx(expected.losses, rel=1e-10)
    for _, (message,) in ranks:
        assert "buffer 'vision.backbone.seen'" in message and "evaluation mode" in message


def test_blocks_that_do_not_run_where_their_weights_are_gathered_are_refused(pool: Pool, tmp_path: Path) -> None:
    """The other rank would wait for this one; its own message, of a lost rank, comes later than the cause's."""
    job = Job(str(data(tmp_path)), steps=3, batch=2, microbatches=1, precision="64-true")
    both = {"ranks": [0, 1], "dp_shard": 2}
    with pytest.raises(WorkerError, match=r"module 'vision': backbone.layers.0 did not run in a microbatch"):
        pool.run(2, skipping, job.on(vision=both, audio=both, llm=both), group=False, timeout=60)


def skipping(rank: int, world: int, job: Job) -> None:
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    fit(job, Skipping)


def test_batch_statistics_are_refused_unless_they_are_frozen() -> None:
    module, layout = Encoder(Normed, Projector(24, WIDTH)), ModuleLayout.from_config("vision", {"ranks": [0]})
    (fault,) = check("vision", module, layout)
    assert fault.startswith("module 'vision': backbone.norm is a BatchNorm1d in training mode") and "GroupNorm" in fault
    module.get_submodule("backbone.norm").eval()
    assert not check("vision", module, layout)
