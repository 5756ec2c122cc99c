"""Who writes which piece of a checkpoint: as torch's own planner says, which sees the tensors of all ranks."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hetero_strategy.checkpoint.inventory import Coordinates, Inventory, stored_tensors, take_inventory
from hetero_strategy.errors import CheckpointError

WORLD = 8
Pieces = dict[tuple[int, str], tuple[tuple[int, ...], tuple[int, ...]]]
"""Rank and name -> offsets and sizes of what is written."""


@contextmanager
def one_of(rank: int) -> Iterator[None]:
    """This process is one rank of a world whose other ranks are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(shape: tuple[int, ...], mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """A DTensor without values."""
    local, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    whole = torch.empty(shape, device="meta")
    part = torch.empty(local, device="meta")
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def owned(rank: int) -> dict[str, torch.Tensor]:
    """An encoder on all ranks, two stages of four, the second of them tensor parallel in two instances."""
    found = {"vision.w": torch.empty(3, 2, device="meta"), "step": torch.empty((), device="meta")}
    if rank < 4:
        grid = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        found["llm.0.up"] = cut((7, 6), grid, [_StridedShard(0, split_factor=2), Shard(0)])
        found["llm.0.down"] = cut((5, 6), grid, [Shard(0), Shard(1)])
        found["llm.0.norm"] = cut((3,), grid, [Shard(0), Replicate()])
        found["llm.0.none"] = cut((0, 3), grid, [Shard(0), Shard(1)])
    else:
        line = DeviceMesh("cpu", [4, 5] if rank < 6 else [6, 7])
        found["llm.1.up"] = cut((1, 6), line, [Shard(0)])
        found["llm.1.down"] = cut((5, 7), line, [Shard(1)])
        found["llm.1.norm"] = cut((3,), line, [Replicate()])
    if rank in (3, 6):
        found["alone"] = torch.empty(2, dtype=torch.bfloat16, device="meta")
    return found


def planned_by_torch(rank_plans: list[SavePlan]) -> Pieces:
    planner = DefaultSavePlanner(False, False, dedup_save_to_lowest_rank=True)
    planner.is_coordinator = True
    found: Pieces = {}
    for rank, plan in enumerate(planner.create_global_plan(rank_plans)[0]):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            found[rank, item.index.fqn] = (tuple(chunk.offsets), tuple(chunk.sizes))
    return found


def test_pieces_are_those_of_torchs_planner() -> None:
    plans: list[SavePlan] = []
    inventories: dict[bytes, Inventory] = {}
    ranks: dict[bytes, dict[int, Coordinates]] = defaultdict(dict)
    for rank in range(WORLD):
        with one_of(rank):
            tensors = owned(rank)
            planner = DefaultSavePlanner(False, False)
            planner.set_up_planner(dict(tensors))
            plan = planner.create_local_plan()
            held = [i for i in plan.items if i.index.fqn.endswith("none") or i.tensor_data.chunk.sizes.numel()]  # type: ignore[union-attr]
            plans.append(dataclasses.replace(plan, items=held))
            inventory, coordinates = take_inventory(tensors)
        inventories[inventory.digest] = inventory
        ranks[inventory.digest][rank] = coordinates
    assert len(inventories) == 4, "two stages, and in each of them a rank that owns something else"
    owners = [(inventories[digest], said) for digest, said in ranks.items()]
    stored = stored_tensors(owners)
    found = {(p.rank, key): (p.offsets, p.sizes) for key, tensor in stored.items() for p in tensor.pieces}
    assert found == planned_by_torch(plans)
    assert stored_tensors(owners, ["alone"]) == {"alone": stored["alone"]}


def on_mesh(first: int, size: int, held: int) -> tuple[Inventory, dict[int, Coordinates]]:
    """A tensor of 12 elements cut in ``size``, of which one rank holds the part of this number."""
    with one_of(first):
        mesh = DeviceMesh("cpu", list(range(first, first + size)))
        inventory, _ = take_inventory({"w": cut((12,), mesh, [Shard(0)])})
    return inventory, {first + held: ((held,),)}


def test_pieces_may_be_cut_in_two_ways_and_the_lowest_rank_writes_each() -> None:
    parts = [on_mesh(0, 2, 0), *(on_mesh(1, 6, held) for held in (3, 4, 5))]
    assert [(p.rank, p.offsets) for p in stored_tensors(parts)["w"].pieces] == [
        (0, (0,)),
        (4, (6,)),
        (5, (8,)),
        (6, (10,)),
    ]
    inventory, _ = on_mesh(0, 2, 0)
    owners = [(inventory, {0: ((0,),), 3: ((1,),)}), (inventory, {1: ((1,),)})]
    assert [(p.rank, p.offsets) for p in stored_tensors(owners)["w"].pieces] == [(0, (0,)), (1, (6,))]


def test_a_name_means_numbers_of_one_kind_on_all_ranks() -> None:
    single, half = (take_inventory({"w": torch.empty(2, dtype=dtype)})[0] for dtype in (torch.float32, torch.bfloat16))
    with pytest.raises(
        CheckpointError, match=r"w is torch.float32 \(2,\) on rank 0 but torch.bfloat16 \(2,\) on rank 1"
    ):
        stored_tensors([(single, {0: ()}), (half, {1: ()})])


def test_pieces_must_make_up_a_whole() -> None:
    half, other, third, sixth = on_mesh(0, 2, 0), on_mesh(0, 2, 1), on_mesh(4, 3, 1), on_mesh(1, 6, 5)
    assert [p.offsets for p in stored_tensors([half, other])["w"].pieces] == [(0,), (6,)]
    with pytest.raises(CheckpointError, match="w has 12 elements but the ranks hold 6 of them in 1 pieces"):
        stored_tensors([half])
    with pytest.raises(CheckpointError, match="w: the pieces of ranks 0 and 5 overlap without being equal"):
        stored_tensors([half, third, sixth])
