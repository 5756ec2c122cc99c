"""What is saved loads again, and who writes which piece: as torch's own planner says, which sees all ranks."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint.saving import Coordinates, Inventory, stored_tensors, take_inventory
from hetero_strategy.errors import CheckpointError
from tests.checkpoint.helpers import blank, owned, same


def test_save_and_load_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.ckpt"
    ck.Checkpointer().save(
        owned(), {"epoch": 1, "global_step": 7, "x": (torch.ones(2),)}, path, rank_state={"rng": torch.arange(3)}
    )
    into = blank()
    loaded = ck.load(into, path)
    assert same(into, owned())
    assert same(loaded.metadata, {"epoch": 1, "global_step": 7, "x": (torch.ones(2),)})
    assert same(loaded.rank_state, {"rng": torch.arange(3)})
    assert loaded.missing == loaded.unexpected == ()
    found = ck.describe(path)
    assert (found.step, found.epoch, found.world_size) == (7, 1, 1)
    assert {key: (t.shape, t.dtype) for key, t in found.tensors.items()} == {
        key: (tuple(t.shape), t.dtype) for key, t in owned().items()
    }
    assert os.listdir(path.parent) == ["c.ckpt"]
    ck.Checkpointer().save(owned(2), {}, path)  # in place of the first
    ck.load(into, path)
    assert same(into, owned(2))
    assert os.listdir(path.parent) == ["c.ckpt"]
    ck.remove(path)
    assert os.listdir(path.parent) == []
    ck.remove(path)


def test_load_fills_parameters_in_place(tmp_path: Path) -> None:
    linear = nn.Linear(3, 4)
    ck.Checkpointer().save({f"model.{k}": v for k, v in linear.named_parameters()}, {}, tmp_path / "c")
    other = nn.Linear(3, 4)
    turned = nn.Parameter(torch.zeros(3, 4).T)  # not contiguous
    ck.load({"model.weight": turned, "model.bias": other.bias}, tmp_path / "c")
    assert torch.equal(turned, linear.weight) and torch.equal(other.bias, linear.bias)
    assert turned.requires_grad and turned.is_leaf


def test_load_tells_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "c"
    ck.Checkpointer().save(owned(), {}, path)

    def told(change: dict[str, torch.Tensor], drop: tuple[str, ...] = (), strict: bool = True) -> Any:
        into = {key: tensor for key, tensor in (blank() | change).items() if key not in drop}
        try:
            return ck.load(into, path, strict=strict)
        except CheckpointError as fault:
            return str(fault)

    many = {f"model.new{i}": torch.zeros(1) for i in range(7)}
    message = told(many)
    assert "lacks 7 tensors" in message and "model.new4, ..." in message and "model.new5" not in message
    assert "strict=False" in message
    assert told(many, strict=False).missing == tuple(many)
    assert "2 tensors that the model does not have: model.llm.b, model.llm.none" in told(
        {}, ("model.llm.b", "model.llm.none")
    )
    assert told({}, ("model.llm.b",), strict=False).unexpected == ("model.llm.b",)
    assert "has shape (4, 3)" in told({"model.vision.w": torch.zeros(3, 4)})
    assert "torch.int64" in told({"model.llm.count": torch.zeros((), dtype=torch.int32)})
    double = tmp_path / "double.ckpt"
    ck.Checkpointer().save({"model.w": torch.ones(1, dtype=torch.float64)}, {}, double)
    with pytest.raises(CheckpointError, match="float64"):
        ck.load({"model.w": torch.ones(1)}, double)
    # a wider dtype loses nothing, and what is kept in half precision is not trained
    into = {"model.llm.b": torch.zeros(2), "model.vision.w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    ck.load(blank() | into, path)
    ck.load(into, path, strict=False)
    assert into["model.llm.b"].tolist() == [1.5, -2.0] and into["model.vision.w"][3].tolist() == [9, 10, 11]
    # a parameter that never had a gradient has no state: reported, not refused
    fresh = {"optim.0.llm.b.exp_avg": torch.ones(2), "optim.0.llm.b.step": torch.ones(())}
    assert told(fresh).missing == tuple(fresh)
    assert fresh["optim.0.llm.b.exp_avg"].tolist() == [1, 1]
    assert "another optimizer" in told({"optim.0.vision.w.momentum_buffer": torch.zeros(4, 3)})
    assert "meta device" in told({"model.vision.w": torch.zeros(4, 3, device="meta")})
    # optimizer states that nobody asks for are no fault: weights alone are loaded to evaluate
    assert told({}, ("optim.0.vision.w.exp_avg", "optim.0.vision.w.step")).missing == ()


def test_save_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    for tensors, metadata, said in [
        ({"model.w": torch.empty(1, device="meta")}, {}, "meta device"),
        ({"model.w": torch.eye(2).to_sparse()}, {}, "layout"),
        ({"model.w": torch.ones(1, dtype=torch.complex128)}, {}, "complex128"),
        ({"model.w": 3}, {}, "not a tensor"),
        (owned(2), {"a": object()}, r"checkpoint\['a'\]"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            ck.Checkpointer().save(tensors, metadata, tmp_path / "c")  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == ["c"]
    into = blank()
    ck.load(into, tmp_path / "c")
    assert same(into, owned())


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    ck.Checkpointer().save(owned(), {"k": torch.ones(1)}, path, rank_state={"r": 1})
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    for name in (".metadata", "meta.pt", "__0_0.distcp", "metadata.pkl", "rank-00001.safetensors"):
        (path / name).write_bytes(pickle.dumps(Bomb()))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    into = blank()
    assert ck.load(into, path).metadata["k"].tolist() == [1]
    assert same(into, owned())
    for name in ("checkpoint.json", "metadata.json", "rank-00000.safetensors"):
        other = tmp_path / name
        ck.Checkpointer().save(owned(), {}, other)
        size = (other / name).stat().st_size
        (other / name).write_bytes(pickle.dumps(Bomb()).ljust(size, b"\0")[:size])
        with pytest.raises(CheckpointError):
            ck.load(blank(), other)
    assert not (tmp_path / "exploded").exists()
    monkeypatch.undo()
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    pickle.loads((path / ".metadata").read_bytes())
    assert (tmp_path / "exploded").exists()  # the bomb was live


def test_background_save_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    tensors = owned()
    state = {"list": [1]}
    saver = ck.Checkpointer()
    saver.save(tensors, state, tmp_path / "c", async_=True)
    for tensor in tensors.values():
        tensor.zero_()
    state["list"].append(2)
    saver.finalize()
    saver.finalize()
    into = blank()
    assert ck.load(into, tmp_path / "c").metadata == {"list": [1]}
    assert same(into, owned())


def test_background_saves_copy_to_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, empty = [], torch.empty
    tensors = owned()

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        made.append(empty(*size, **options))
        return made[-1]

    saver = ck.Checkpointer()
    monkeypatch.setattr(torch, "empty", counted)
    for scale in (1.0, 2.0):
        saver.save(owned(scale), {}, tmp_path / f"{scale}", async_=True)
    saver.finalize()
    assert [tensor.numel() for tensor in made] == [0, 5 * 64], "of five tensors that are not empty"
    saver.save(tensors | {"model.more": torch.ones(100)}, {}, tmp_path / "more", async_=True)
    saver.finalize()
    monkeypatch.undo()
    for name, scale in (("1.0", 1.0), ("2.0", 2.0)):
        into = blank()
        ck.load(into, tmp_path / name)
        assert same(into, owned(scale))
    into = {"model.more": torch.zeros(100)}
    ck.load(into, tmp_path / "more", strict=False)
    assert into["model.more"].eq(1).all()


def test_background_fault_is_raised_where_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = ck.Checkpointer()
    saver.save(owned(), {}, tmp_path / "c")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        saver.save(owned(2), {}, tmp_path / "c", async_=True)
        with pytest.raises(CheckpointError, match=r"No space left on device; a previous checkpoint there is untouched"):
            saver.save(owned(3), {}, tmp_path / "c", async_=True)
    into = blank()
    ck.load(into, tmp_path / "c")
    assert same(into, owned())
    assert os.listdir(tmp_path) == ["c"]
    saver.save(owned(4), {}, tmp_path / "c")  # the fault was told once
    saver.finalize()


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


def owned_by(rank: int) -> dict[str, torch.Tensor]:
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
            tensors = owned_by(rank)
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
