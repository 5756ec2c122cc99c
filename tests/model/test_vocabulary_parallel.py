"""An embedding in parts, beside a whole one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from hetero_strategy.model.token_loss import VocabularyParallel
from hetero_strategy.testing import Pool

IDS = torch.tensor([3, 0, 7, 7, 5, 9, 4, 3])


def looked_up(rank: int, world: int, padding: int | None, parts: bool, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """This rank's rows of two microbatches, and of the gradient of their sum, weighted by place."""
    embedding = _made(padding, vocabulary)
    style = VocabularyParallel(input_layouts=Replicate(), output_layouts=Shard(0) if parts else Replicate())
    parallelize_module(embedding, init_device_mesh("cpu", (world,)), style)
    for ids in (IDS, IDS.flip(0)):
        rows = embedding(ids)
        weights = _weights().chunk(world)[rank] if parts else _weights()
        (rows * weights).sum().backward()
    return rows.detach(), embedding.weight.grad.to_local()  # type: ignore[union-attr]


def _made(padding: int | None, vocabulary: int) -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(vocabulary, 4, padding_idx=padding, dtype=torch.float64)


def _weights() -> torch.Tensor:
    return torch.arange(1.0, 1 + len(IDS), dtype=torch.float64)[:, None]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("padding", "parts", "vocabulary"), [(None, False, 10), (3, True, 10), (7, False, 10), (7, True, 11)]
)
def test_rows_and_gradient_are_those_of_a_whole_one(
    pool: Pool, padding: int | None, parts: bool, vocabulary: int
) -> None:
    whole = _made(padding, vocabulary)
    for ids in (IDS, IDS.flip(0)):
        rows = whole(ids)
        (rows * _weights()).sum().backward()
    ranks = pool.run(2, looked_up, padding, parts, vocabulary, timeout=60)
    assert whole.weight.grad is not None
    of_rows = rows.detach().chunk(2) if parts else (rows.detach(),) * 2
    shared = vocabulary % 2 == 0  # else DTensor's own way: the whole gradient
    gradients = whole.weight.grad.chunk(2) if shared else (whole.weight.grad,) * 2
    for found, wanted in zip(ranks, zip(of_rows, gradients, strict=True), strict=True):
        assert all(map(torch.equal, found, wanted))
