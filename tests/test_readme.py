"""README's example runs as it is printed."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetero_strategy.checkpoint import describe, load
from hetero_strategy.testing import Pool
from recipes.digits import write_digits
from tests import stock

ROOT = Path(__file__).parents[1]


KEPT = (
    "vision.backbone.model.embeddings.patch_embedding.weight",
    "siglip2-so400m",
    "embeddings.patch_embedding.weight",
)
TRAINED = (
    ("llm.model.tok_embeddings.weight", "llama-3-8b", "model.embed_tokens.weight"),
    ("llm.model.norm.weight", "llama-3-8b", "model.norm.weight"),
    ("audio.backbone.model.conv1.bias", "whisper-large-v3", "encoder.conv1.bias"),
)
"""Name in the run's checkpoint, folder, ending of the name in it."""


LIMITS = {"MAX_EPOCHS": "1", "NUM_SANITY_VAL_STEPS": "0", "ACCELERATOR": "cpu"}
"""Lightning's own environment variables, which end the example after an epoch of one step."""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The script as it is printed, beside models and data of its names, all of them tiny."""
    (printed,) = re.findall(r"^```python\n(import lightning.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "example.py").write_text(printed)
    stock.models_of_readme(tmp_path / "models")
    write_digits(tmp_path / "data", train=64, val=4, progress=False)
    return tmp_path


def on_rank(rank: int, world: int, folder: str) -> None:
    """What torchrun would start, in a process that has paid for its imports."""
    multiprocessing.set_start_method("fork", force=True)  # as in a script
    os.chdir(folder)
    os.environ |= {f"PL_TRAINER_{name}": value for name, value in LIMITS.items()}
    runpy.run_path("example.py", run_name="__main__")


@pytest.mark.full
def test_the_example_runs_as_printed(pool: Pool, example: Path) -> None:
    """On eight processes."""
    pool.run(8, on_rank, str(example), timeout=150, group=False)
    check_trained(example)


def check_trained(folder: Path) -> None:
    (saved,) = folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    assert describe(saved).step == 1
    tensors = {f"model.model.{KEPT[0]}": theirs(folder, *KEPT[1:])}
    tensors |= {f"model.model.{name}": theirs(folder, *place) for name, *place in TRAINED}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    load(tensors, saved, strict=False)
    changed = {name.removeprefix("model.model."): (tensors[name] - before[name]).abs().max().item() for name in tensors}
    frozen = f"model.model.{KEPT[0]}"
    assert torch.equal(tensors[frozen], before[frozen].bfloat16().float()), "frozen, and kept in bf16"
    del changed[KEPT[0]]
    assert all(0 < change < 1e-4 for change in changed.values()), changed  # AdamW's first step of 1e-5


def theirs(folder: Path, model: str, name: str) -> torch.Tensor:
    """A tensor of a Hugging Face folder, by the end of its name."""
    tensors = load_file(folder / "models" / model / "model.safetensors")
    (found,) = [tensor for key, tensor in tensors.items() if key.endswith(name)]
    return found
