"""An encoder around a module that has values already: they are kept, sharded, and exist only where owned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hetero_strategy.model import Encoder, EncoderInputs, MultimodalModel, Projector
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed import scenario
from tests.distributed.scenario import WIDTH, Job, Lit, data


class Flat(nn.Module):
    """A person's own backbone: rows of merged patches through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 16)
        self.second = nn.Linear(16, 24)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.second(torch.tanh(self.first(merged(inputs).to(self.first.weight.dtype))))


def merged(inputs: EncoderInputs) -> torch.Tensor:
    """Rows of 2 x 2 patches of 64 values each."""
    rows = []
    at = 0
    for height, width in inputs.sizes:
        image = inputs.values[at : at + height * width].reshape(height // 2, 2, width // 2, 2, 64)
        rows.append(image.permute(0, 2, 1, 3, 4).reshape(-1, 256))
        at += height * width
    return torch.cat(rows) if rows else inputs.values.new_zeros(0, 256)


class WithReady(Lit):
    random: torch.Tensor
    """State in which the backbone was made."""
    backbone: Callable[[], Flat] = Flat

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            modules: dict[str, Any] = dict(self.model.modules_by_name)
            self.random = torch.get_rng_state()
            modules["vision"] = Encoder(self.backbone(), Projector(24, WIDTH))
            self.model = MultimodalModel(modules, seed=11)


def on_rank(rank: int, world: int, job: Job) -> dict[str, Any]:
    torch.manual_seed(rank)  # as where nobody seeds: every process has random numbers of its own
    return first_values(job)


def made_before(rank: int, world: int, job: Job) -> dict[str, Any]:
    torch.manual_seed(rank)
    made = Flat()
    return first_values(job, lambda: made)


def first_values(job: Job, backbone: Callable[[], Flat] = Flat) -> dict[str, Any]:
    trainer, module, datamodule = scenario.build(job)
    module = WithReady(job, module.vocabulary)
    module.backbone = backbone
    found: dict[str, Any] = {}

    def at_start() -> None:
        for name, p in module.named_parameters():
            if "vision.backbone" in name:
                full = p.full_tensor() if isinstance(p, DTensor) else p
                found[name.split("backbone.")[1]] = None if p.is_meta else full.detach().clone()

    module.on_train_start = at_start  # type: ignore[method-assign]
    trainer.fit(module, datamodule=datamodule)
    return {"values": found, "random": module.random, "losses": [float(x) for x in module.losses]}


@pytest.mark.full
def test_values_are_kept(pool: Pool, tmp_path: Path) -> None:
    folder = data(tmp_path / "digits")
    layouts: dict[str, Any] = {"vision": {"ranks": [0, 1]}, "audio": {"ranks": [2]}, "llm": {"ranks": [1, 2]}}
    results = pool.run(3, on_rank, Job(str(folder), steps=2, capture=False, layouts=layouts), timeout=120)
    torch.set_rng_state(results[0]["random"])
    expected = dict(Flat().named_parameters())
    for rank, result in enumerate(results):
        assert set(result["values"]) == set(expected)
        for name, value in result["values"].items():
            if rank in (0, 1):
                assert torch.equal(value, expected[name]), name
            else:
                assert value is None, "a rank that does not own the module holds its values"
    torch.manual_seed(0)
    alone = first_values(Job(str(folder), steps=2, capture=False))
    torch.testing.assert_close(results[0]["losses"], alone["losses"], rtol=1e-5, atol=0)


def test_values_that_each_process_drew_are_refused(pool: Pool, tmp_path: Path) -> None:
    layouts: dict[str, Any] = {"vision": {"ranks": [0, 1]}, "audio": {"ranks": [0]}, "llm": {"ranks": [0, 1]}}
    job = Job(str(data(tmp_path / "digits")), steps=1, capture=False, layouts=layouts)
    with pytest.raises(WorkerError, match="'vision' was given with values that are not the same on ranks 0 and 1"):
        pool.run(2, made_before, job, timeout=120)
