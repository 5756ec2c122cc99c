"""A run's checkpoint, exported by the command, is what transformers loads: every model that has a Hugging Face form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint.__main__ import main
from hetero_strategy.model import EncoderInputs, Packing, SequenceInputs
from hetero_strategy.testing import Pool
from tests.distributed.scenario import Job, Lit, data, datamodule, train_on_rank

LAYOUTS: dict[str, dict[str, Any]] = {
    "vision": {"ranks": 2, "dp_shard": 2},
    "audio": {"ranks": 2, "tp": 2},
    "titan": {"ranks": 2, "tp": 2},
    "llama": {"ranks": 2, "pp": 2},
    "mixture": {"ranks": 2, "ep": 2},
}
LANGUAGE_MODELS = {"titan": "LlamaForCausalLM", "llama": "LlamaForCausalLM", "mixture": "Qwen3MoeForCausalLM"}


class Save(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def run(rank: int, world: int, job: Job, path: str) -> None:
    train_on_rank(rank, world, replace(job, trainer={"callbacks": [Save(path)]}))


def test_transformers_loads_what_a_run_exports(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path, out = data(tmp_path / "digits"), tmp_path / "saved", tmp_path / "out"
    job = Job(
        str(folder),
        steps=1,
        lr=0.05,
        language_models=tuple(LANGUAGE_MODELS),
        lm="titan hf_llama mixture",
        capture=False,
    )
    pool.run(2, run, job.on(**LAYOUTS), str(path), timeout=240)
    assert any(len(stored.pieces) > 1 for stored in ck.describe(path).tensors.values())

    assert main(["export", str(path), str(out)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 5 and f"{out / 'audio'}: 22 tensors for {WhisperEncoder.__module__}.WhisperEncoder" in told[0]
    assert "WhisperEncoder, not AutoModel; 6 more in" in told[0]
    assert {path.name for path in out.iterdir()} == set(LAYOUTS)

    lit = Lit(job, datamodule(job).tokenizer.vocab_size)  # the run's model, in one process
    lit.configure_model()
    model: Any = lit.model
    first = {name: value.clone() for name, value in model.state_dict().items()}
    ck.load({f"model.{name}": value for name, value in lit.state_dict().items()}, path)
    learned = [name for name, value in model.state_dict().items() if not torch.equal(value, first[name])]
    assert len(learned) > 0.9 * len(first)

    draw = torch.Generator().manual_seed(0)
    for name, architecture in LANGUAGE_MODELS.items():
        theirs = loaded(AutoModelForCausalLM, out / name, architecture)
        ids = torch.randint(0, lit.vocabulary, (40,), generator=draw)
        ours = model.modules_by_name[name](
            SequenceInputs(ids, torch.full_like(ids, -100), Packing.of(np.array([40]))), keep_logits=True
        )
        torch.testing.assert_close(theirs(ids[None]).logits[0], ours.logits, rtol=1e-4, atol=1e-4)

    patches, grids = torch.randn(24, 64, generator=draw), np.array([[4, 6]])
    images = EncoderInputs(patches, grids, grids.prod(1) // 4, Packing.of(grids.prod(1)))
    theirs = loaded(AutoModel, out / "vision", "Siglip2VisionModel")
    rows = theirs(patches[None], torch.ones(1, 24, dtype=torch.long), torch.tensor(grids)).last_hidden_state[0]
    # a row of ours is a cell of 2 x 2 patches
    cells = rows.unflatten(0, (2, 2, 3, 2)).transpose(1, 2).reshape(6, -1)
    torch.testing.assert_close(cells, model.vision.backbone(images), rtol=1e-4, atol=1e-4)

    theirs = loaded(WhisperEncoder, out / "audio", "WhisperEncoder")
    mels = torch.randn(512, 40, generator=draw)  # transformers takes clips of the greatest length alone
    clip = EncoderInputs(mels, np.array([[512]]), np.array([256]), Packing.of(np.array([256])))
    torch.testing.assert_close(
        theirs(mels.T[None]).last_hidden_state[0], model.audio.backbone(clip), rtol=1e-4, atol=1e-4
    )
    for name in ("vision", "audio"):
        extra = load_file(out / name / "extra.safetensors")
        assert set(extra) == {f"projector.{key}" for key in model.modules_by_name[name].projector.state_dict()}
        for key, value in extra.items():
            assert torch.equal(value, model.modules_by_name[name].state_dict()[key])


def loaded(kind: Any, folder: Path, architecture: str) -> Any:
    """transformers' model of a folder, which must hold exactly its tensors."""
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    named: dict[str, Any] = {}
    exec(re.search(r"^ +(from .*)$", (folder / "README.md").read_text(), re.MULTILINE)[1], named)  # type: ignore[index]
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert type(model) is named[architecture]
    assert not any(info[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()
