from __future__ import annotations

import itertools
import os
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint import saving
from hetero_strategy.errors import CheckpointError
from hetero_strategy.testing import Pool, WorkerError

Layout = Mapping[str, tuple[str, list[int]]]
SIZES = {"vision": (6, 10), "llm": (8, 14)}  # no multiple of 4 in a hidden size: shards are uneven

SOURCE: Layout = {"vision": ("fsdp", [0, 1]), "llm": ("tp", [2, 3])}
TARGETS_4: tuple[Layout, ...] = (
    SOURCE,
    {"vision": ("fsdp", [0, 1, 2, 3]), "llm": ("tp", [0, 1, 2, 3])},
    {"vision": ("tp", [2, 3]), "llm": ("fsdp", [0, 1])},
    {"vision": ("hsdp", [0, 1, 2, 3]), "llm": ("tp+fsdp", [0, 1, 2, 3])},
    {"vision": ("fsdp", [0, 1, 2]), "llm": ("plain", [1, 2, 3])},
)
TARGETS_3: tuple[Layout, ...] = ({"vision": ("plain", [0]), "llm": ("fsdp", [1, 2])},)
ALONE: Layout = {"vision": ("plain", [0]), "llm": ("plain", [0])}


class Net(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.tensor(0))


def build(layout: Layout, rank: int, seed: int) -> dict[str, nn.Module]:
    """The modules of this rank, sharded; every rank makes all meshes."""
    owned: dict[str, nn.Module] = {}
    for name, (kind, ranks) in layout.items():
        mesh = None
        if kind in ("fsdp", "tp"):
            mesh = DeviceMesh("cpu", ranks)
        elif kind in ("hsdp", "tp+fsdp"):
            mesh = DeviceMesh("cpu", torch.tensor(ranks).view(2, -1), mesh_dim_names=("dp", "inner"))
        if rank not in ranks:
            continue
        torch.manual_seed(seed)
        net = Net(*SIZES[name])
        if kind in ("tp", "tp+fsdp"):
            assert mesh is not None
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(net, mesh if kind == "tp" else mesh["inner"], plan)
        if kind in ("fsdp", "hsdp"):
            fully_shard(net.norm, mesh=mesh)  # apart: a group of FSDP has one dtype
            fully_shard(net, mesh=mesh)
        elif kind == "tp+fsdp":
            assert mesh is not None
            fully_shard(net.norm, mesh=mesh["dp"])
            fully_shard(net, mesh=mesh["dp"])
        owned[name] = net
    return owned


def trained(modules: Mapping[str, nn.Module]) -> torch.optim.Optimizer:
    params = [p for m in modules.values() for p in m.parameters()]
    optimizer = torch.optim.AdamW([{"params": params}], lr=0.01, foreach=False)
    for step in range(2):
        for module in modules.values():
            for name, p in module.named_parameters():
                if name != "unused":
                    p.grad = p.detach() * 0.5 + step  # a forward pass would import a compiler, for seconds
            module.seen += 2**33 + 1
        optimizer.step()
    return optimizer


def owned_tensors(modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {p: f"{n}.{k}" for n, m in modules.items() for k, p in m.named_parameters()}
    found = {f"model.{n}.{k}": t for n, m in modules.items() for k, t in m.state_dict().items()}
    return found | {f"optim.0.{names[p]}.{k}": t for p, state in optimizer.state.items() for k, t in state.items()}


def blank_state(modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Zeros everywhere, and optimizer state for every parameter, even those that had none."""
    for module in modules.values():
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            local(tensor.data).zero_()
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = state


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for k, t in tensors.items()}


def write_source(rank: int, world: int, layout: Layout, path: str) -> dict[str, torch.Tensor]:
    modules = build(layout, rank, seed=3)
    tensors = owned_tensors(modules, trained(modules))
    ck.Checkpointer().save(tensors, {"global_step": 2}, path, rank_state={"rank": rank})
    return whole(tensors)


def read_and_write_back(rank: int, world: int, layouts: tuple[Layout, ...], path: str) -> list[tuple[Any, ...]]:
    """Loads every layout, saves it again, and returns what it then held and was told."""
    results = []
    for number, layout in enumerate(layouts):
        modules = build(layout, rank, seed=4)
        params = [p for m in modules.values() for p in m.parameters()]
        optimizer = torch.optim.AdamW([{"params": params}], lr=0.01)
        blank_state(modules, optimizer)
        tensors = owned_tensors(modules, optimizer)
        loaded = ck.load(tensors, path if rank == 0 else "/only/rank/0's/path/counts")
        kept = {key: tensor for key, tensor in tensors.items() if key not in loaded.missing}
        ck.Checkpointer().save(kept, {}, f"{path}-{world}-{number}")
        results.append((whole(kept), loaded.missing, loaded.rank_state))
    return results


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    union: dict[str, torch.Tensor] = {}
    for part in parts:
        for key, tensor in part.items():
            assert key not in union or equal(union[key], tensor), f"replicas of {key} differ"
            union[key] = tensor
    return union


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    assert [key for key in expected if not equal(found[key], expected[key])] == []


def test_a_checkpoint_moves_between_layouts(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    expected = merged(pool.run(4, write_source, SOURCE, path))
    assert len(expected) == 2 * 8 + 2 * 6 * 3
    assert all(tensor.float().abs().sum() > 0 for tensor in expected.values())
    stored = ck.describe(path).tensors
    assert {key: (t.shape, t.dtype) for key, t in stored.items()} == {
        key: (tuple(t.shape), t.dtype) for key, t in expected.items()
    }
    assert {piece.rank for piece in stored["model.vision.up.weight"].pieces} == {0, 1}
    assert {piece.rank for piece in stored["model.llm.up.weight"].pieces} == {2, 3}
    assert {piece.rank for piece in stored["model.llm.norm.weight"].pieces} == {2}  # replicated: the lowest rank's

    for world, layouts in ((4, TARGETS_4), (3, TARGETS_3)):
        per_rank = pool.run(world, read_and_write_back, layouts, path, timeout=240)
        for number, layout in enumerate(layouts):
            parts = [results[number] for results in per_rank]
            assert_same(merged([part for part, _, _ in parts]), expected)
            for rank, (_, missing, state) in enumerate(parts):
                owns = [name for name, (_, ranks) in layout.items() if rank in ranks]
                states = itertools.product(owns, ("step", "exp_avg", "exp_avg_sq"))
                assert sorted(missing) == sorted(f"optim.0.{name}.unused.{key}" for name, key in states)
                assert state == ({"rank": rank} if world == 4 else None)
            assert_same(alone(f"{path}-{world}-{number}", expected), expected)
    assert_same(alone(path, expected), expected)

    ck.export(path, tmp_path / "out", module="llm")  # offline, of pieces of several files
    inside = {key.removeprefix("model.llm."): t for key, t in expected.items() if key.startswith("model.llm.")}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), inside)

    flip(f"{path}/rank-00003.state.json", 5)  # of use to nobody in this process, but told
    with pytest.raises(CheckpointError, match=r"rank-00003\.state\.json is damaged"):
        alone(path, expected)


def alone(path: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint as plain tensors in this process."""
    found = {key: torch.full_like(tensor, 77) for key, tensor in like.items()}
    assert ck.load(found, path).missing == ()
    return found


def uneven(rank: int, world: int, path: str) -> list[list[Any]]:
    """Shards of every small size over 4 ranks, some of them empty, and loads into other shards of them."""
    flat = DeviceMesh("cpu", [0, 1, 2, 3])
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    kinds = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(0), Shard(0)]),
        (grid, [Replicate(), Shard(1)]),
    ]
    tensors = {}
    for n, (k, (mesh, placements)) in itertools.product(range(6), enumerate(kinds)):
        full = torch.arange(n * 3).view(n, 3) + 100 * n
        tensors[f"model.{n}.{k}"] = distribute_tensor(full, mesh, placements)
    ck.Checkpointer().save(tensors, {}, path)
    wrong = []
    for n, k, (j, (mesh, placements)) in itertools.product(range(6), range(len(kinds)), enumerate(kinds)):
        key = f"model.{n}.{k}"
        expected = distribute_tensor(torch.arange(n * 3).view(n, 3) + 100 * n, mesh, placements).to_local()
        into = distribute_tensor(torch.full((n, 3), -1), mesh, placements)
        ck.load({key: into}, path, strict=False)
        if not equal(into.to_local(), expected):
            wrong.append([n, k, j])
    return wrong


@pytest.mark.full
def test_uneven_and_empty_shards(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, uneven, str(tmp_path / "c")) == [[]] * 4
    for key, stored in ck.describe(tmp_path / "c").tensors.items():
        assert 0 in stored.shape or not any(0 in piece.sizes for piece in stored.pieces), key
    plain = {f"model.{n}.{k}": torch.arange(n * 3).view(n, 3) + 100 * n for n in range(6) for k in range(5)}
    assert_same(alone(str(tmp_path / "c"), plain), plain)


def told(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as fault:
        return str(fault)
    return ""


def refusals(rank: int, world: int, path: str) -> dict[str, str]:
    """Faults that one rank alone sees; what every rank is told."""
    first = rank == 0
    good = {f"model.{rank}": torch.full((4,), float(rank)), "model.shared": torch.ones(2)}
    ck.Checkpointer().save(good, {}, path)
    mesh = DeviceMesh("cpu", [0, 1])
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) if rank < 2 else torch.zeros(2)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()]) if rank < 2 else torch.zeros(2)

    def attempt(tensors: dict[str, torch.Tensor], metadata: Any = None, **more: Any) -> str:
        return told(lambda: ck.Checkpointer().save(tensors, metadata or {}, path, **more))

    def full_disk() -> str:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        message = attempt(good)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return message

    def disk_of_its_own() -> str:
        def elsewhere(file: Path, pieces: Any) -> Any:
            return write(file if first else file.with_name("elsewhere"), pieces)

        write = saving.write_tensors
        with patch.object(saving, "write_tensors", elsewhere):
            return attempt(good)

    messages = {
        "disk": full_disk(),
        "apart": disk_of_its_own(),
        "shapes": attempt({"model.w": torch.ones(2 if first else 3)}),
        "dtypes": attempt({"model.w": torch.ones(2, dtype=torch.float32 if first else torch.int64)}),
        "half": attempt({"model.w": sharded} if first else {}),
        "partial": attempt({"model.w": partial} if rank < 2 else {}),
        "meta": attempt({"model.w": torch.ones(2, device="cpu" if first else "meta")}),
        "state": attempt(good, rank_state={"rng": 1 if first else object()}),
        "metadata": attempt(good, {"bad": object()}),
        "path": told(lambda: ck.Checkpointer().save(good, {}, os.path.join(path, "checkpoint.json"))),
        "async": told(lambda: ck.Checkpointer().save(good, {}, path, async_=True)),
        "missing": told(lambda: ck.load(good if first else {"model.nope": torch.ones(1)}, path)),
        "shape": told(lambda: ck.load(good | ({} if first else {"model.shared": torch.ones(3)}), path)),
        "unexpected": told(lambda: ck.load({} if rank == 1 else good, path)),
        "nowhere": told(lambda: ck.load(good, path + "-nowhere")),
        "fine": told(lambda: ck.load(good, path)),
    }
    assert good[f"model.{rank}"].tolist() == [rank] * 4
    file = os.path.join(path, "rank-00001.safetensors")
    size = os.path.getsize(file)
    if rank == 1:
        flip(file, size - 1)
    dist.barrier()
    messages["flipped"] = told(lambda: ck.load(good, path))
    messages["unchecked"] = told(lambda: ck.load(good, path, verify=False))
    if rank == 1:
        with open(file, "wb") as stream:
            stream.write(b"\xff" * size)
    dist.barrier()
    messages["garbage"] = told(lambda: ck.load(good, path))
    if rank == 1:
        os.truncate(file, size - 1)
    dist.barrier()
    messages["truncated"] = told(lambda: ck.load(good, path))
    return messages


def flip(file: str, at: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


def test_every_rank_is_told_the_same(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(3, refusals, str(tmp_path / "c"))
    assert others == [first, first]
    for name, said in {
        "disk": "File too large; a previous checkpoint there is untouched [rank 1]",
        "apart": "must lie on a file system that all ranks share",
        "shapes": "model.w is torch.float32 (2,) on rank 0 but torch.float32 (3,) on rank 1",
        "dtypes": "model.w is torch.float32 (2,) on rank 0 but torch.int64 (2,) on rank 1",
        "half": "model.w has 4 elements but the ranks hold 2 of them",
        "partial": "reduce it before saving [rank 0 and 1 more]",
        "meta": "meta device: a rank saves only what it owns [rank 1 and 1 more]",
        "state": "checkpoint['rng'] is a builtins.object",
        "metadata": "checkpoint['bad'] is a builtins.object",
        "path": "is a file",
        "async": "process group of its own",
        "missing": "lacks 1 tensors of the model: model.nope",
        "shape": "model.shared has shape (2,)",
        "unexpected": "1 tensors that the model does not have: model.1",
        "nowhere": "no checkpoint at",
        "flipped": "rank-00001.safetensors is damaged: bytes 0 to 16 of 'model.1' changed since it was written",
        "garbage": "rank-00001.safetensors is damaged: its header changed",
        "truncated": "bytes instead of",
    }.items():
        assert said in first.pop(name), name
    assert first == {"fine": "", "unchecked": ""}
    assert os.listdir(tmp_path) == ["c"]


def background(rank: int, world: int, path: str) -> list[Any]:
    """Saves in the background while the training thread goes on with its own collectives."""
    saver = ck.Checkpointer(dist.new_group(backend="gloo"))
    mesh = DeviceMesh("cpu", list(range(world)))
    weight = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    ticks = []
    for step in range(4):
        saver.save({"model.w": weight}, {"step": step}, f"{path}{step % 2}", async_=True)
        for _ in range(20):
            weight.to_local().add_(1)
            tick = torch.ones(1)
            dist.all_reduce(tick)
            ticks.append(tick.item())
    saver.finalize()
    into = distribute_tensor(torch.zeros(10), mesh, [Shard(0)])
    steps = [ck.load({"model.w": into}, f"{path}{i}").metadata["step"] for i in (0, 1)]

    file = f"{path}0/rank-{rank:05d}.safetensors"
    flip(file, os.path.getsize(file) - 1)
    dist.barrier()
    noticed = told(lambda: ck.load({"model.w": into}, f"{path}0"))

    if rank == 1:  # one rank's file cannot be written: the others hear of it at their next save
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    saver.save({"model.w": weight}, {"step": 9}, f"{path}1", async_=True)
    message = told(lambda: saver.save({"model.w": weight}, {"step": 10}, f"{path}1", async_=True))
    after = ck.load({"model.w": into}, f"{path}1").metadata["step"]
    return [set(ticks), steps, whole({"w": into})["w"].tolist(), message, after, noticed]


def test_saves_in_the_background(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, background, str(tmp_path / "c"))
    assert results[0] == results[1]
    ticks, steps, values, message, after, noticed = results[0]
    assert "0/rank-00000.safetensors is damaged: bytes 0 to 20 of 'model.w@0'" in noticed
    assert ticks == {2.0} and steps == [2, 3] and after == 3
    assert values == [60.0 + i for i in range(10)]
    assert "File too large" in message and "[rank 1]" in message


def saves_in_turn(rank: int, world: int, path: str) -> list[tuple[str, int, dict[str, torch.Tensor]]]:
    """One save after another: what changed, the plans made so far, and what the checkpoint holds."""
    saver, found = ck.Checkpointer(dist.new_group(backend="gloo")), []
    mesh, turned = (DeviceMesh("cpu", list(range(world))[::way]) for way in (1, -1))
    plans = Mock(wraps=saving._make_plan)

    def sharded(placement: Placement, dtype: torch.dtype, start: int, mesh: DeviceMesh = mesh) -> torch.Tensor:
        return distribute_tensor(torch.arange(10 * start, 10 * start + 10, dtype=dtype), mesh, [placement])

    fp32, bf16, shard = torch.float32, torch.bfloat16, Shard(0)
    step, alone = {"optim.step": torch.tensor(1.0)}, {"model.alone": torch.ones(2)} if rank == 1 else {}
    turns: dict[str, dict[str, Any]] = {
        "first": {"w": sharded(shard, fp32, 0)},
        "values": {"w": sharded(shard, fp32, 1)},
        "optimizer": {"w": sharded(shard, fp32, 2)} | step,
        "values again": {"w": sharded(shard, fp32, 3)} | step,
        "one rank": {"w": sharded(shard, fp32, 4)} | step | alone,
        "dtype": {"w": sharded(shard, bf16, 5)} | step | alone,
        "placement": {"w": sharded(Replicate(), bf16, 6)} | step | alone,
        "refused on one rank": {"w": sharded(Replicate(), bf16, 7)} | step | ({"model.alone": 3} if rank == 1 else {}),
        "after that": {"w": sharded(Replicate(), bf16, 8)} | step | alone,
        "values at last": {"w": sharded(Replicate(), bf16, 9)} | step | alone,
        "other places": {"w": sharded(Replicate(), bf16, 10, turned)} | step | alone,
    }
    with patch.object(saving, "_make_plan", plans):
        for turn, tensors in turns.items():
            said = told(lambda tensors=tensors: saver.save(tensors, {}, path, async_="values" in turn))  # noqa: B023
            saver.finalize()
            into = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in ck.describe(path).tensors.items()}
            ck.load(into, path)
            found.append((turn + said, plans.call_count, into))
    return found


def test_a_plan_holds_until_a_rank_owns_something_else(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(3, saves_in_turn, str(tmp_path / "c"))
    for turns in results:
        assert [(turn.partition("model")[0], plans) for turn, plans, _ in turns] == [
            ("first", 1), ("values", 1), ("optimizer", 2), ("values again", 2), ("one rank", 3), ("dtype", 4),
            ("placement", 5), ("refused on one rank", 5), ("after that", 5), ("values at last", 5),
            ("other places", 6),
        ]  # fmt: skip
        for number, (turn, _, tensors) in enumerate(turns):
            start = 10 * (number - turn.startswith("refused"))  # the one before stays
            dtype = torch.float32 if number < 5 else torch.bfloat16
            assert equal(tensors["w"], torch.arange(start, start + 10, dtype=dtype)), turn
            assert ("optim.step" in tensors) == (number > 1) and ("model.alone" in tensors) == (number > 3)


def save_and_die(rank: int, world: int, path: str, async_: bool, last_words: str) -> None:
    """Rank 1 is killed in the middle of writing its file."""
    group = dist.new_group(backend="gloo")
    ck.Checkpointer(group).save({f"model.{rank}": torch.full((4,), 1.0)}, {"n": 1}, path)
    saver = ck.Checkpointer(group)
    if rank == 1:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    try:
        saver.save({f"model.{rank}": torch.full((4,), 2.0)}, {"n": 2}, path, async_=async_)
        saver.finalize()
    except CheckpointError as fault:
        Path(last_words).write_text(str(fault))
        raise


@pytest.mark.parametrize("async_", [False, True])
def test_killed_while_saving_the_one_before_stays(pool: Pool, tmp_path: Path, async_: bool) -> None:
    path, last_words = tmp_path / "c", tmp_path / "words"
    with pytest.raises(WorkerError):
        pool.run(2, save_and_die, str(path), async_, str(last_words), timeout=120)
    assert "another rank is lost" in last_words.read_text()
    into = {"model.0": torch.zeros(4), "model.1": torch.zeros(4)}
    assert ck.load(into, path).metadata == {"n": 1}
    assert into["model.0"].tolist() == into["model.1"].tolist() == [1.0] * 4
