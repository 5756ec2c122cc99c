from __future__ import annotations

import datetime
import enum
import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from torch import nn

from hetero_strategy import checkpoint as ck
from hetero_strategy.errors import CheckpointError
from tests.checkpoint.helpers import same


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
        {"p": Path("/a/b"), "b": b"\x00\xff", "s": {1, 2}, "f": frozenset("x")},
        [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        {"ranks": range(4), "backwards": range(9, -1, -2), "empty": range(0)},
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
        (slice(1, 2), "builtins.slice"),
        (1 + 2j, "builtins.complex"),
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
