"""Parts of joined matrices, which tensor parallelism divides each: gaps in a rank's part of the whole tensor."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint.boxes import Box, boxes
from hetero_strategy.checkpoint.optimizer_state import part_of
from hetero_strategy.testing import Pool

JOINED = _StridedShard(1, split_factor=2)
WHOLE = torch.arange(3 * 16 * 2).reshape(3, 16, 2)


@pytest.mark.parametrize(
    ("placements", "count"),
    [
        ([Replicate(), JOINED], 2),
        ([Shard(0), JOINED], 2),
        ([Shard(1), _StridedShard(1, split_factor=4)], 4),
        ([_StridedShard(1, split_factor=2), Shard(1)], 1),
        ([Shard(2), Shard(1)], 1),
    ],
)
def test_boxes_are_the_rows_that_torch_gives_to_each_rank(placements: list[Placement], count: int) -> None:
    for coordinate in itertools.product(range(2), range(2)):
        part = WHOLE
        for placement, place in zip(placements, coordinate, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                part = placement._split_tensor(part, 2, with_padding=False)[0][place]
        found = boxes(WHOLE.shape, (2, 2), coordinate, placements)
        assert len(found) == count
        copy = torch.full_like(part, -1)
        for box in found:
            box.of(copy).copy_(Box(box.offsets, box.sizes, box.offsets).of(WHOLE))
        assert torch.equal(copy, part), (placements, coordinate)


def saved_and_loaded(rank: int, world: int, folder: str) -> list[bool]:
    """Save joined matrices that two ranks hold in parts, and load them whole, otherwise divided, and as they were."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    def divided(values: torch.Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(values, mesh, [placement], src_data_rank=None)

    own = divided(WHOLE, JOINED)
    ck.Checkpointer().save({"w": own}, {}, folder)
    equal = [torch.equal(part_of(own, WHOLE).to_local(), own.to_local())]
    into = [torch.zeros_like(WHOLE), *(divided(torch.zeros_like(WHOLE), p) for p in (JOINED, Shard(1), Shard(0)))]
    for tensor in into:
        ck.load({"w": tensor}, folder)
    equal.append(torch.equal(into[0], WHOLE))
    for tensor, placement in zip(into[1:], (JOINED, Shard(1), Shard(0)), strict=True):
        assert isinstance(tensor, DTensor)
        equal.append(torch.equal(tensor.to_local(), divided(WHOLE, placement).to_local()))
    return equal


@pytest.mark.distributed
def test_joined_matrices_are_saved_for_every_layout(pool: Pool, tmp_path: Path) -> None:
    assert all(all(equal) for equal in pool.run(2, saved_and_loaded, str(tmp_path / "c")))
