from __future__ import annotations

import builtins
import datetime
import enum
import errno
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import zlib
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint import saving, tensorfile
from hetero_strategy.checkpoint.__main__ import main
from hetero_strategy.checkpoint.tensorfile import DTYPES, Entry, TensorReader, write_tensors
from hetero_strategy.errors import CheckpointError


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, tensors and arrays included, NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def through(value: Any) -> Any:
    encoded, tensors = ck.encode(value)
    return ck.decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


class Color(enum.StrEnum):
    RED = "red"


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: "b", (3, "c"): None, True: [1.5, -0.0]},
        {"$": "a key that looks like ours", "v": [1]},
        [math.inf, -math.inf, math.nan, 1e-320, 10**40, 0.1],
        (1, (2,), []),
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({5: 2, 3: 1}),
        {"p": Path("/a/b"), "b": b"\x00\xff", "s": {1, 2}, "f": frozenset("x"), "c": complex(1, math.inf)},
        [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), range(0, 8, 2), slice(1, None)],
        [datetime.timedelta(days=1, microseconds=3), datetime.datetime(2024, 1, 2, 3, 4, 5)],
        [np.float32(0.1), np.float64(math.nan), np.int64(7), np.bool_(True), np.datetime64("2024-01-01")],
        [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array(["a", "bc"])],
        [torch.tensor(3), torch.ones(2, 0), torch.tensor([1.5], dtype=torch.bfloat16)],
        ["\ud800 lone surrogate", "", "ünï"],
        [random.getstate(), torch.get_rng_state()],
    ],
)
def test_codec_returns_equal_values_of_equal_types(value: Any) -> None:
    assert same(through(value), value)


def test_codec_makes_configs_plain_and_enums_values() -> None:
    config = OmegaConf.create({"lr": 0.1, "twice": ["${lr}", "???"]})
    assert same(
        through({"h": config, "part": config.twice}), {"h": {"lr": 0.1, "twice": [0.1, "???"]}, "part": [0.1, "???"]}
    )
    assert same(through({"t": type(config), "e": Color.RED}), {"t": "DictConfig", "e": "red"})


def test_codec_copies_tensors() -> None:
    tensor = torch.zeros(2)
    encoded, tensors = ck.encode({"t": tensor})
    tensor += 1
    assert ck.decode(encoded, tensors)["t"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: 0, "function"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Point(1, 2), "Point"),
        (object(), "builtins.object"),
        (dict, "builtins.type"),
        (torch.empty(1, device="meta"), "Tensor"),
        (np.array([object()]), "dtype object"),
        (OmegaConf.create({"x": "${nowhere}"}), "does not resolve"),
    ],
)
def test_codec_refuses_with_place_and_type(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\['callbacks\.EMA\.1'\]") as fault:
        ck.encode({"callbacks": {"EMA": [0, value]}})
    assert said in str(fault.value)


def test_codec_refuses_cycles() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(CheckpointError, match="contains itself"):
        ck.encode({"a": ring})
    twice = [1]
    assert through([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "call", "v": "os.system"},
        {"$": "dtype", "v": "load"},
        {"$": "tensor", "v": 3},
        {"$": "array", "v": "AAAA", "dtype": "|O", "shape": [1]},
        {"$": "tuple"},
    ],
)
def test_codec_refuses_what_it_did_not_write(encoded: Any) -> None:
    with pytest.raises(CheckpointError):
        ck.decode(encoded)


class Fitted(BoringModel):
    def __init__(self, plateau: bool, config: Any = None, root: Path = Path("x")) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.plateau = plateau

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.log("loss", out["loss"])
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().validation_step(batch, batch_idx)
        self.log("val", out["x"])
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        first = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        second = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [1])]


def fit(directory: Path, module: LightningModule, epochs: int, ckpt: Path | None = None) -> Trainer:
    callbacks = [
        ModelCheckpoint(directory, monitor="val", save_top_k=2, save_last=True),
        EarlyStopping("val", patience=50),
        LearningRateMonitor(),
        Timer(),
    ]
    trainer = Trainer(
        default_root_dir=directory,
        max_epochs=epochs,
        limit_train_batches=3,
        limit_val_batches=1,
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=True,
    )
    trainer.fit(module, ckpt_path=ckpt, weights_only=False)
    return trainer


@pytest.mark.parametrize("plateau", [True, False])
def test_codec_carries_a_lightning_checkpoint(tmp_path: Path, plateau: bool) -> None:
    module = Fitted(plateau, config={"x": {1: (2, 3)}}, root=tmp_path)
    trainer = fit(tmp_path / "a", module, 2)
    file = tmp_path / "stock.ckpt"
    trainer.save_checkpoint(file)
    stock = torch.load(file, weights_only=False)
    assert {"loops", "callbacks", "lr_schedulers", "hyper_parameters"} <= set(stock)
    rest = {key: value for key, value in stock.items() if key not in ("state_dict", "optimizer_states")}
    groups = [optimizer["param_groups"] for optimizer in stock["optimizer_states"]]
    assert same(json.loads(json.dumps(ck.encode(rest)[0])), ck.encode(rest)[0])
    # a stock dict may hold dict subclasses (AttributeDict, defaultdict): equality is what Lightning needs of those
    back = through({"rest": rest, "groups": groups})
    assert repr(back) == repr({"rest": rest, "groups": groups})
    ends = []
    for part in (rest, back["rest"]):
        torch.save({**stock, **part}, file)
        torch.manual_seed(1)
        module = Fitted(plateau)
        resumed = fit(tmp_path / "b", module, 4, file)
        schedulers = [config.scheduler.state_dict() for config in resumed.lr_scheduler_configs]
        ends.append((resumed.current_epoch, resumed.global_step, repr(schedulers), module.layer.weight.tolist()))
    assert ends[0] == ends[1]
    assert ends[0][:2] == (4, 12)


def test_tensor_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(DTYPES.values())}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "odd": torch.ones(3, dtype=torch.bool)}
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    stored = write_tensors(tmp_path / "f", [Entry.of(name, tensor) for name, tensor in tensors.items()])
    assert stored.nbytes == (tmp_path / "f").stat().st_size
    found = load_file(tmp_path / "f")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8) if tensor.ndim else found[name], bits(tensor)), name
    with TensorReader(tmp_path, {"f": stored}) as reader:
        assert reader.read("f", "turned", (1, 0), (2, 1)).tolist() == [[1.0], [2.0]]
        assert reader.read("f", "scalar").item() == 2.5
        with pytest.raises(CheckpointError, match="no file of the checkpoint"):
            reader.read("g", "scalar")


def test_a_slice_is_checked_by_the_blocks_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "BLOCK", 16)
    tensors = {"before": torch.arange(5, dtype=torch.int16), "t": torch.arange(60.0).reshape(5, 3, 4)}
    stored = write_tensors(tmp_path / "f", [Entry.of(name, tensor) for name, tensor in tensors.items()])
    assert len(stored.checksums) == 1 + 240 // 16 + 1
    size = (tmp_path / "f").stat().st_size
    start = size - 10 - 240  # wide dtypes lie first
    draw = random.Random(1)
    noticed = 0
    for at in range(start, size - 10):
        flip(tmp_path / "f", at)
        for _ in range(5):
            offsets = tuple(draw.randrange(n) for n in (5, 3, 4))
            sizes = tuple(draw.randint(1, n - o) for o, n in zip(offsets, (5, 3, 4), strict=True))
            window = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            touched = torch.arange(60).reshape(5, 3, 4)[window]
            with TensorReader(tmp_path, {"f": stored}) as reader:
                assert reader.read("f", "before").tolist() == list(range(5))
                try:
                    assert torch.equal(reader.read("f", "t", offsets, sizes), tensors["t"][window])
                    assert (at - start) // 4 not in touched
                except CheckpointError as fault:
                    assert f"{tmp_path / 'f'} is damaged" in str(fault) and "of 't'" in str(fault)
                    block = (at - start) // 16 * 4
                    assert touched.min() < block + 4 and touched.max() >= block
                    noticed += 1
        flip(tmp_path / "f", at)
    assert 300 < noticed < 900


def flip(file: Path, at: int, bits: int = 1) -> None:
    """Turns bits of one byte around."""
    with open(file, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ bits]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def owned(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.vision.w": torch.arange(12.0).reshape(4, 3) * scale,
        "model.llm.b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16) * scale,
        "model.llm.count": torch.tensor(2**40 + 1),
        "model.llm.none": torch.zeros(0, 3),
        "optim.0.vision.w.exp_avg": torch.full((4, 3), 0.1) * scale,
        "optim.0.vision.w.step": torch.tensor(3.0) * scale,
    }


def blank(tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in (tensors or owned()).items()}


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


def test_foreign_paths_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "stock.ckpt").write_bytes(pickle.dumps({}))
    (tmp_path / "empty").mkdir()
    for name, said in [("home", "thesis.txt"), ("stock.ckpt", "is a file")]:
        for act in (lambda p: ck.Checkpointer().save(owned(), {}, p), ck.remove, lambda p: ck.load(blank(), p)):
            with pytest.raises(CheckpointError):
                act(tmp_path / name)
        with pytest.raises(CheckpointError, match=said):
            ck.Checkpointer().save(owned(), {}, tmp_path / name)
    assert (tmp_path / "home" / "thesis.txt").exists() and (tmp_path / "stock.ckpt").exists()
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        ck.load(blank(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint\.json"):
        ck.load(blank(), tmp_path / "empty")
    ck.Checkpointer().save(owned(), {}, tmp_path / "empty")


def test_what_a_file_system_leaves_in_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    for name in (".nfs0001", ".DS_Store"):
        ck.Checkpointer().save(owned(), {}, tmp_path / "c")
        (tmp_path / "c" / name).touch()
    ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    assert not any(name.startswith(".") for name in os.listdir(tmp_path / "c"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").touch()
    with pytest.raises(CheckpointError, match=r"it holds '\.netrc'"):
        ck.Checkpointer().save(owned(), {}, tmp_path / "home")


def test_an_old_checkpoint_that_stays_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder))

    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"c\.old.* cannot be deleted yet"):
        patch.setattr(folders.shutil, "rmtree", busy)
        ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c", "c.old"]
    ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]
    into = blank()
    ck.load(into, tmp_path / "c")
    assert same(into, owned(2))


def rewrite(**changes: Any) -> Callable[[Path], None]:
    """An index with other content and the right checksum, or without any for version 1."""

    def act(path: Path) -> None:
        content = json.loads((path / "checkpoint.json").read_text())
        del content["crc32"]
        body = json.dumps(content | changes)[:-1]
        end = f',"crc32":"{zlib.crc32(body.encode()):08x}"' if changes.get("version") != 1 else ""
        (path / "checkpoint.json").write_text(f"{body}{end}}}")

    return act


def truncate(name: str, by: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - by)


def garbage(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate("rank-00000.safetensors", 4), "bytes instead of"),
        (truncate("checkpoint.json", 10), "is damaged"),
        (lambda path: (path / "metadata.json").unlink(), "not complete"),
        (lambda path: (path / "checkpoint.json").unlink(), "cut short"),
        (lambda path: (path / "metadata.json").write_text("}" * (path / "metadata.json").stat().st_size), "damaged"),
        (lambda path: (path / "checkpoint.json").write_bytes(b"\x80\x04\xff"), "is damaged"),
        (garbage, "its header changed since it was written"),
        (rewrite(version=9), "version 9"),
        (rewrite(files={"../../etc/passwd": 1}), "damaged"),
        (rewrite(tensors={}), "lacks 4 tensors"),
    ],
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    ck.Checkpointer().save(owned(), {"k": 1}, tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match=said):
        ck.load(blank(), tmp_path / "c")


def all_kinds(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with a file of every kind, and tensors to load it into."""
    ck.Checkpointer().save(
        owned(), {"epoch": 1, "t": torch.arange(3.0)}, path, rank_state={"rng": torch.arange(5), "n": 1}
    )
    assert len(os.listdir(path)) == 6
    return blank()


def test_a_flip_of_any_byte_is_noticed(tmp_path: Path) -> None:
    into, draw = all_kinds(tmp_path / "c"), random.Random(0)
    ck.load(into, tmp_path / "c")
    named: list[str] = []
    for file in sorted((tmp_path / "c").iterdir()):
        size, header = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
        for at in range(size):
            flip(file, at, bits := draw.randrange(1, 256))
            with pytest.raises(CheckpointError) as fault:
                ck.load(into, tmp_path / "c")
            assert str(file) in str(fault.value), (at, bits)
            if file.name == "rank-00000.safetensors" and at >= header:
                named.append(str(fault.value).split("of '")[1].split("'")[0])
            flip(file, at, bits)
    assert {key: named.count(key) for key in named} == {key: t.nbytes for key, t in owned().items() if t.nbytes}
    ck.load(into, tmp_path / "c")
    assert same(into, owned())


def test_checks_of_tensors_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "c"
    into = all_kinds(path)
    flip(path / "rank-00000.safetensors", (path / "rank-00000.safetensors").stat().st_size - 1, 0x40)
    ck.load(into, path, verify=False)
    assert not torch.equal(into["model.llm.b"], owned()["model.llm.b"])
    with pytest.raises(CheckpointError, match=r"of 'model\.llm\.b' changed since it was written"):
        ck.export(path, tmp_path / "out")
    flip(path / "metadata.safetensors", (path / "metadata.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"metadata\.safetensors is damaged"):
        ck.load(into, path, verify=False)


def test_a_checkpoint_without_checksums_loads_and_says_so(tmp_path: Path) -> None:
    into = all_kinds(tmp_path / "c")
    files = {
        name: entry[0] for name, entry in json.loads((tmp_path / "c" / folders.INDEX).read_text())["files"].items()
    }
    rewrite(version=1, files=files)(tmp_path / "c")
    with pytest.warns(UserWarning, match="saved without checksums: damage of its tensors is not noticed"):
        ck.load(into, tmp_path / "c")
    assert same(into, owned())


def test_a_damaged_index_is_told_though_an_older_one_is_there(tmp_path: Path) -> None:
    ck.Checkpointer().save(owned(), {}, tmp_path / "c.old")
    ck.Checkpointer().save(owned(2), {}, tmp_path / "new")
    os.rename(tmp_path / "new", tmp_path / "c")
    flip(tmp_path / "c" / folders.INDEX, 50)
    with pytest.raises(CheckpointError, match=r"c/checkpoint\.json"):
        ck.load(blank(), tmp_path / "c")


def test_a_link_gives_way_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    """``ModelCheckpoint(save_last="link")`` leaves one, where a later run saves."""
    ck.Checkpointer().save(owned(), {}, tmp_path / "best")
    os.symlink("best", tmp_path / "last")
    for _ in range(2):
        ck.Checkpointer().save(owned(2), {}, tmp_path / "last")
    assert sorted(os.listdir(tmp_path)) == ["best", "last"] and not (tmp_path / "last").is_symlink()
    for name, wanted in (("best", owned()), ("last", owned(2))):
        into = blank()
        ck.load(into, tmp_path / name)
        assert same(into, wanted)


def test_incomplete_folder_falls_back_to_the_old_one(tmp_path: Path) -> None:
    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / "c.old")
    for _ in ("missing", "incomplete"):
        into = blank()
        ck.load(into, tmp_path / "c")
        assert same(into, owned())
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "metadata.json").write_text("{}")
    (tmp_path / "c.tmp-0badcafe").mkdir()
    ck.load(into, tmp_path / "c.tmp-0badcafe")  # what "the newest folder" finds after a kill
    ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    ck.load(into, tmp_path / "c")
    assert same(into, owned(2))
    assert os.listdir(tmp_path) == ["c"]


def test_a_killed_save_is_not_what_a_job_that_is_queued_again_goes_on_from(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", barebones=True)
    for number in (1, 2):
        path = trainer._checkpoint_connector.hpc_save_path(tmp_path)
        ck.Checkpointer().save(owned(number), {}, path)
    killed = folders.temporary_of(Path(path), "0badcafe")
    os.rename(path, killed)
    os.remove(killed / "checkpoint.json")
    assert trainer._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert trainer._checkpoint_connector.hpc_save_path(tmp_path) == path
    ck.Checkpointer().save(owned(), {}, path)
    assert sorted(os.listdir(tmp_path)) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]


def test_a_run_that_finds_what_another_one_saved_in_place_of_its_own_ends(tmp_path: Path) -> None:
    """Each of the two would go on from the other's checkpoint, or lose its own. A run may replace an older one's."""
    path, saver = tmp_path / "c", ck.Checkpointer()
    for number in (1, 2):
        saver.save(owned(number), {}, path)
    ck.Checkpointer().save(owned(3), {}, path)  # of a later Trainer of this process
    saver.save(owned(4), {"global_step": 7}, tmp_path / "theirs")
    shutil.rmtree(path)
    os.rename(tmp_path / "theirs", path)
    with pytest.raises(
        CheckpointError, match=r"another run has saved step 7 there since this one saved; two runs would"
    ):
        saver.save(owned(5), {}, path)
    assert ck.describe(path).step == 7
    (path / "checkpoint.json").write_text("{")  # of a damaged one nothing is lost
    saver.save(owned(6), {}, path)


def test_two_runs_that_save_to_one_path_do_not_delete_what_the_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, write = [], saving.write_tensors

    def meanwhile(path: Path, entries: Any) -> Any:
        for act in (lambda: ck.Checkpointer().save(owned(2), {}, tmp_path / "c"), lambda: ck.remove(tmp_path / "c")):
            with pytest.raises(CheckpointError, match="another process is saving there now") as refused:
                act()
            said.append(refused)
        return write(path, entries)

    (tmp_path / "c.tmp-0badcafe").mkdir()  # of a killed one
    monkeypatch.setattr(saving, "write_tensors", meanwhile)
    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    assert len(said) == 2 and os.listdir(tmp_path) == ["c"] and not folders._handles
    monkeypatch.setattr(saving, "write_tensors", lambda path, entries: shutil.rmtree(path.parent) or {})
    with pytest.raises(CheckpointError, match="no other run may save there"):
        ck.Checkpointer().save(owned(3), {}, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"] and not folders._handles
    into = blank()
    ck.load(into, tmp_path / "c")
    assert same(into, owned())


class Kill:
    """Counts file operations of this process and kills it at one of them."""

    def __init__(self, at: int) -> None:
        self.left = at

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    def install(self) -> None:
        for name in ("rename", "unlink", "rmdir", "mkdir", "fsync", "truncate"):
            setattr(os, name, self.around(getattr(os, name)))
        builtins.open = self.around(builtins.open)  # type: ignore[assignment]


def killed(at: int, act: Callable[[], Any]) -> bool:
    """Whether `act`, in a child process, was killed at its file operation number `at`."""
    child = os.fork()
    if child == 0:
        try:
            folders._seals.clear()  # this is a run of its own
            Kill(at).install()
            act()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def stands(path: Path, damaged: bool) -> None:
    """Checkpoint 1 at `path`, or in `.old` beside a damaged folder at `path`."""
    folders._seals.clear()
    ck.Checkpointer().save(owned(), {"n": 1}, path)
    if damaged:
        os.rename(path, path.with_name("c.old"))
        path.mkdir()
        (path / "metadata.json").write_text("{}")


def loaded_number(path: Path) -> int:
    into = blank()
    number = ck.load(into, path).metadata["n"]
    assert same(into, owned(number))
    return int(number)


@pytest.mark.parametrize("damaged", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_at_any_file_operation_one_checkpoint_is_whole(tmp_path: Path, damaged: bool) -> None:
    path = tmp_path / "c"
    seen = []
    for at in itertools.count():
        stands(path, damaged)
        dead = killed(at, lambda: ck.Checkpointer().save(owned(2), {"n": 2}, path))
        seen.append(loaded_number(path))
        if not dead:
            break
        # a second kill, with the leftovers of the first in the way
        killed(at // 2, lambda: ck.Checkpointer().save(owned(3), {"n": 3}, path))
        assert loaded_number(path) in (seen[-1], 3)
    assert seen == sorted(seen) and set(seen) == {1, 2} and len(seen) > 12
    ck.remove(path)
    assert os.listdir(tmp_path) == []


def test_killed_removal_does_not_bring_back_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for at in itertools.count():
        ck.Checkpointer().save(owned(), {"n": 1}, path.with_name("c.old"))
        ck.Checkpointer().save(owned(2), {"n": 2}, tmp_path / "new")
        os.rename(tmp_path / "new", path)  # as a kill before the last deletion of a save leaves them
        dead = killed(at, lambda: ck.remove(path))
        if not dead:
            break
        try:
            assert loaded_number(path) == 2, at
        except CheckpointError:
            assert at > 0
        ck.remove(path)
    assert at > 6 and os.listdir(tmp_path) == []


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


def test_export_one_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden": 3, "dtype": "float64", "architectures": ["Eye"]}
    recorded = {"vision": {"names": {"w": "visual.weight"}, "config": config}}
    tensors = owned() | {"model.vision.scale": torch.ones(2), "model.count": torch.tensor(3)}
    ck.Checkpointer().save(tensors, {ck.EXPORT_KEY: recorded, "global_step": 5}, tmp_path / "c")
    assert (
        main(["export", str(tmp_path / "c"), str(tmp_path / "out"), "--module", "vision", "--dtype", "bfloat16"]) == 0
    )
    assert sorted(os.listdir(tmp_path / "out")) == [
        "README.md",
        "config.json",
        "extra.safetensors",
        "model.safetensors",
    ]
    assert same(
        load_file(tmp_path / "out" / "model.safetensors"), {"visual.weight": owned()["model.vision.w"].bfloat16()}
    )
    assert same(load_file(tmp_path / "out" / "extra.safetensors"), {"scale": torch.ones(2, dtype=torch.bfloat16)})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"dtype": "bfloat16"}
    assert "1 tensors for transformers.Eye; 1 more in extra.safetensors" in capsys.readouterr().out
    main(["export", str(tmp_path / "c"), str(tmp_path / "all")])
    assert sorted(os.listdir(tmp_path / "all")) == ["extra.safetensors", "vision"]
    outside = {key.removeprefix("model."): t for key, t in tensors.items() if key in ("model.count",) or "llm" in key}
    assert same(dict(sorted(load_file(tmp_path / "all" / "extra.safetensors").items())), dict(sorted(outside.items())))
    assert "extra.safetensors: 4 tensors outside the modules" in capsys.readouterr().out
    assert main(["describe", str(tmp_path / "c")]) == 0
    assert "model.vision.w  float32 [4, 3]" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "out"), "--module", "vision"]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "new"), "--module", "audio"]) == 1
    assert "no parameters for module 'audio': there is count, llm, vision" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"cast to torch.float8_e4m3fn; give one of float64, float32, bfloat16,"):
        ck.export(tmp_path / "c", tmp_path / "new", dtype=torch.float8_e4m3fn)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "c"), str(tmp_path / "new"), "--dtype", "float8_e4m3fn"])
    recorded = {"llm": {"names": {"lost": "w"}}}
    ck.Checkpointer().save(owned(), {ck.EXPORT_KEY: recorded}, tmp_path / "d")
    with pytest.raises(CheckpointError, match="lacks 1 parameters of a module, such as 'lost'"):
        ck.export(tmp_path / "d", tmp_path / "new", module="llm")
    assert sorted(os.listdir(tmp_path)) == ["all", "c", "d", "out"]


def test_the_folder_of_a_run_names_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("best", "last"):
        ck.Checkpointer().save(owned(), {}, tmp_path / "checkpoints" / f"{name}.ckpt")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    places = ", ".join(f"{tmp_path}/checkpoints/{name}.ckpt" for name in ("best", "last"))
    assert f"give one of those in it: {places}\n" in capsys.readouterr().err


def test_export_in_several_files(tmp_path: Path) -> None:
    tensors = {f"model.net.m.layers.{i}.w": torch.randn(8, 8) for i in range(5)} | {"model.other.w": torch.ones(1)}
    ck.Checkpointer().save(tensors, {}, tmp_path / "c")
    ck.export(tmp_path / "c", tmp_path / "out", module="m", file_bytes=600)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 256
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    found = {key: load_file(tmp_path / "out" / file)[key] for key, file in index["weight_map"].items()}
    assert same(dict(sorted(found.items())), {f"layers.{i}.w": tensors[f"model.net.m.layers.{i}.w"] for i in range(5)})


def test_a_folder_of_safetensors_is_no_checkpoint(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint of hetero_strategy"):
        ck.load({"model.w": torch.zeros(1)}, tmp_path)
