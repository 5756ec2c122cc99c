"""A person's own backbone under the strategy: what is right in it stays right, what cannot be is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero_strategy.errors import ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import Encoder, EncoderInputs, MultimodalModel, Projector
from hetero_strategy.parallelize.apply import check
from tests.distributed import scenario
from tests.distributed.harness import Pool
from tests.distributed.scenario import WIDTH, Job, Lit, Result, data, worst_gradient
from tests.distributed.test_ready_backbone import Flat


class Early(Flat):
    """Returns at once where there is nothing to do: its parameters get no gradient there."""

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        return super().forward(inputs) if len(inputs.sizes) else self.first.weight.new_zeros(0, 24)


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
    kind: type[Flat] = Early

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            modules: dict[str, Any] = dict(self.model.modules_by_name)
            modules["vision"] = Encoder(self.kind, Projector(24, WIDTH))
            self.model = MultimodalModel(modules, seed=11)


def fit(job: Job, kind: type[Flat]) -> Result:
    trainer, module, datamodule = scenario.build(job)
    module = Own(job, module.vocabulary)
    module.kind = kind
    trainer.fit(module, datamodule=datamodule)
    return Result([float(x) for x in module.losses], module.gradients, [], {}, {})


def on_rank(rank: int, world: int, job: Job) -> tuple[Result, str]:
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    found = fit(job, Early)
    with pytest.raises(ModelError) as error:
        fit(job, Counting)
    return found, str(error.value)


def test_own_backbones(pool: Pool, tmp_path: Path) -> None:
    """Two samples a step: some instance often has no picture."""
    job = Job(str(data(tmp_path)), steps=3, batch=2, microbatches=1, precision="64-true")
    both = {"ranks": [0, 1], "dp_replicate": 2, "dp_shard": 1}
    ranks = pool.run(2, on_rank, job.on(vision=both, audio=both, llm=both), group=False, timeout=90)
    expected = fit(job, Early)
    worst, where = worst_gradient(expected, [found for found, _ in ranks])
    assert worst < 1e-10, where
    for found, message in ranks:
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert "buffer 'vision.backbone.seen'" in message and "evaluation mode" in message


def test_batch_statistics_are_refused_unless_they_are_frozen() -> None:
    module, layout = Encoder(Normed, Projector(24, WIDTH)), ModuleLayout.from_config("vision", {"ranks": [0]})
    (fault,) = check("vision", module, layout)
    assert fault.startswith("module 'vision': backbone.norm is a BatchNorm1d in training mode") and "GroupNorm" in fault
    module.get_submodule("backbone.norm").eval()
    assert not check("vision", module, layout)
