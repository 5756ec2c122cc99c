"""Gradients as plain lists of tensors."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hetero_strategy.parallelize import gradients
from hetero_strategy.parallelize.gradients import Owned, clip_by_norm, clip_by_value, local, scale, settle
from hetero_strategy.testing import Pool


def test_gradients_of_every_dtype_are_scaled_and_no_gradients_are_none() -> None:
    grads = [torch.full((2,), 3.0), torch.full((3,), 5.0, dtype=torch.bfloat16), torch.full((1,), 7.0)]
    scale(grads, torch.tensor(0.5))
    assert [g.tolist() for g in grads] == [[1.5] * 2, [2.5] * 3, [3.5]]
    scale([], torch.tensor(0.5))  # of a rank on which nothing trains


def test_entries_are_clamped_on_both_sides_and_no_gradients_are_none() -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    weights[0].grad = torch.tensor([-2.0, 0.25, 2.0])
    clip_by_value([Owned(weight, 1) for weight in weights], 0.5)
    assert weights[0].grad.tolist() == [-0.5, 0.25, 0.5] and weights[1].grad is None


def steps_on_rank(rank: int, world: int) -> list[tuple[float, bool]]:
    """Of a convolution in channels_last and two matrices, with and without replicas: how far a step of fused AdamW is
    from one of contiguous tensors, and whether gradients lie as their parameters.
    """
    found = []
    for replicas in (dist.group.WORLD, None):
        parts = [nn.Conv2d(3, 4, 2).weight.detach().to(memory_format=torch.channels_last)]
        parts += [torch.randn(4, 6), torch.randn(2, 5)]
        weights = [nn.Parameter(part) for part in parts]
        plain = [nn.Parameter(part.clone(memory_format=torch.contiguous_format)) for part in parts]
        for weight, same in zip(weights, plain, strict=True):
            given = torch.randn(world, *weight.shape, generator=torch.Generator().manual_seed(5))
            same.grad = given.sum(0) if replicas is not None else given[rank]
            weight.grad = given[rank].transpose(0, 1).contiguous().transpose(0, 1)  # as that of half a backward may be
        with patch.object(gradients, "BUCKET_BYTES", 300):  # the last has a flat piece of its own
            settle(weights, replicas, None, {})()
        optim.AdamW(weights, lr=0.1, fused=True).step()
        optim.AdamW(plain, lr=0.1, foreach=False).step()
        for weight, same in zip(weights, plain, strict=True):
            assert weight.grad is not None
            found.append((float((weight - same).detach().abs().max()), weight.grad.stride() == weight.stride()))
    return found


@pytest.mark.distributed
def test_gradients_lie_as_their_parameters_for_kernels_that_walk_memory(pool: Pool) -> None:
    for found in pool.run(2, steps_on_rank):
        assert all(apart < 1e-6 and alike for apart, alike in found), found


def drifting_on_rank(rank: int, world: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights that tensor-parallel ranks hold whole, and one they split, after 5 steps in which kernels of each rank
    round otherwise.
    """
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parts = {p: distribute_tensor(torch.ones(4, 3), mesh, [p]) for p in (Replicate(), Shard(0))}
    plain, whole, split = map(nn.Parameter, (torch.ones(5), *parts.values()))
    weights = [plain, whole, split]
    for step in range(5):
        for weight in weights:
            weight.grad = (weight * 0.1).detach().clone() * (1 + 1e-7 * (1 + step) * rank)
        with patch.object(gradients, "BUCKET_BYTES", 20):
            settle(weights, None, dist.group.WORLD, {})()
        optim.SGD(weights, 0.5).step()
    return [plain.detach(), local(whole).detach()], local(split).detach()


@pytest.mark.distributed
def test_what_ranks_of_tensor_parallelism_hold_whole_stays_equal_bit_by_bit(pool: Pool) -> None:
    (whole, split), (other, rest) = pool.run(2, drifting_on_rank)
    assert all(torch.equal(one, same) for one, same in zip(whole, other, strict=True))
    assert whole[0][0] == split[0, 0] != rest[0, 0]  # what is split has each rank's own


def missing_on_rank(rank: int, world: int) -> list[float]:
    """Gradients of two parameters, of which the second rank has computed none for the one, and nobody for the other."""
    some, none = (nn.Parameter(torch.zeros(())) for _ in range(2))
    some.grad = torch.tensor(3.0) if not rank else None
    settle([some, none], dist.group.WORLD, None, {})()
    return [float(p.grad) for p in (some, none) if p.grad is not None]


@pytest.mark.distributed
def test_a_replica_without_a_gradient_brings_zeros(pool: Pool) -> None:
    assert pool.run(2, missing_on_rank) == [[3.0, 0.0]] * 2


def clipped_on_rank(rank: int, world: int) -> tuple[float, list[float], list[float]]:
    """The norm of a parameter on each rank and of one that both have, and their gradients once it is 1."""
    both, one = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    both.grad, one.grad = torch.full_like(both, 1.5), torch.full_like(one, 1.0 + rank)
    owned = [Owned(one, 1), Owned(both, 2)]
    clip_by_norm(owned, 10.0, torch.device("cpu"))  # which it is below
    norm = clip_by_norm(owned, 1.0, torch.device("cpu"))
    return float(norm), both.grad.tolist(), one.grad.tolist()


@pytest.mark.distributed
def test_a_norm_is_of_all_ranks_and_counts_copies_once(pool: Pool) -> None:
    norm = (2 * 2.25 + 2 * 1.0 + 2 * 4.0) ** 0.5
    for rank, (found, both, one) in enumerate(pool.run(2, clipped_on_rank)):
        assert found == pytest.approx(norm)
        assert both == pytest.approx([1.5 / norm] * 2, rel=1e-5)
        assert one == pytest.approx([(1.0 + rank) / norm] * 2, rel=1e-5)
