from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint.__main__ import main
from hetero_strategy.checkpoint.hf_export import Saved
from hetero_strategy.checkpoint.tensorfile import TensorReader
from hetero_strategy.errors import CheckpointError
from tests.checkpoint.helpers import owned, same


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


def test_a_save_of_version_0_1_names_the_class_of_whisper(tmp_path: Path) -> None:
    config = {"model_type": "whisper", "architectures": ["WhisperEncoder"]}
    recorded = {"vision": {"names": {"w": "conv1.weight"}, "paired_heads": {}, "config": config, "processor": None}}
    ck.Checkpointer().save(owned(), {ck.EXPORT_KEY: recorded}, tmp_path / "c")
    (exported,) = ck.export(tmp_path / "c", tmp_path / "out", module="vision")
    assert exported.model_class == "transformers.models.whisper.modeling_whisper.WhisperEncoder"
    text = (tmp_path / "out" / "README.md").read_text()
    assert "from transformers.models.whisper.modeling_whisper import WhisperEncoder" in text and "No auto class" in text


def test_a_part_of_joined_tensors_reads_those_alone(tmp_path: Path) -> None:
    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    index = ck.describe(tmp_path / "c")
    with TensorReader(index.path, index.files) as reader:
        joined = torch.cat([Saved(reader, index, "model.vision.w")] * 2)  # type: ignore[arg-type, list-item]
        assert torch.equal(joined.read({0: torch.tensor([5])}), owned()["model.vision.w"][1:2])  # type: ignore[attr-defined]
