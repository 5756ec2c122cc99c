"""The scripts of examples/ run as they are printed."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetero_strategy.checkpoint import describe, load
from hetero_strategy.schedule import policies
from hetero_strategy.testing import Pool
from tests import stock

ROOT = Path(__file__).parents[1]
EXCHANGE = (ROOT / "docs/exchange.md").read_text()


def script(rank: int, world: int, name: str, *arguments: str) -> str:
    """Run an example as ``torchrun`` would, in a process that has paid for its imports; return what it prints."""
    multiprocessing.set_start_method("fork", force=True)  # as in a script
    os.environ["PL_TRAINER_ACCELERATOR"] = "cpu"
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return printed.getvalue()


def test_the_exchange_prints_what_its_page_says(pool: Pool) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```", EXCHANGE, re.M | re.S)
    assert "".join(pool.run(3, script, "exchange.py", group=False)) == shown


def test_the_page_prints_lines_of_the_script() -> None:
    (printed,) = re.findall(r"^```python\n(.*?)^```", EXCHANGE, re.M | re.S)
    script = {line.strip() for line in (ROOT / "examples/exchange.py").read_text().splitlines()}
    assert {line.strip() for line in printed.splitlines()} <= script


def test_a_step_by_hand_has_the_gradients_of_one_process(pool: Pool) -> None:
    """The script compares them itself."""
    first, *_ = pool.run(3, script, "one_step.py", group=False)
    assert first.startswith("samples of the microbatches: [[0, 2], [1, 3]], images: [[0, 1], [2, 3]]\nrank 0 ")


@pytest.mark.parametrize("name", ["own_encoder.py", "own_kind.py", "own_processor.py"])
def test_modules_of_ones_own_learn_the_same_on_any_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    (alone,) = pool.run(1, script, name, "--folder", str(tmp_path), group=False)
    first, *_ = pool.run(4, script, name, "--folder", str(tmp_path), "--ranks", "4", group=False)
    losses, placed = ([float(x) for x in re.findall(r"loss (\S+)", printed)] for printed in (alone, first))
    assert losses[0] > losses[2] and placed == pytest.approx(losses, rel=1e-11)


def test_a_schedule_of_ones_own_hides_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: policy for name, policy in policies._policies.items() if name != "eager_1f1b"}
    monkeypatch.setattr(policies, "_policies", known)  # tests of schedules have one of the name
    seconds = [float(x) for x in re.findall(r"latency \S+: (\S+) s", script(0, 1, "own_schedule.py"))]
    near, far, eager_near, eager_far = seconds
    assert near == eager_near and eager_far < 0.9 * far


def stored(path: Path, name: str) -> torch.Tensor:
    tensor = torch.empty(describe(path).tensors[name].shape)
    load({name: tensor}, path, strict=False)
    return tensor


def test_llavas_stages_train_what_they_name(pool: Pool, tmp_path: Path) -> None:
    """The second stage starts with the weights of the first, on another layout."""
    stock.models_of_readme(tmp_path / "models")
    (tmp_path / "data").mkdir()
    runpy.run_path(str(ROOT / "examples/own_encoder.py"))["write_data"](tmp_path / "data", samples=16)
    saved = {stage: tmp_path / f"{stage}.ckpt" for stage in ("projector", "both")}
    options = {"vision": "models/siglip2-so400m", "llm": "models/llama-3-8b", "train": "data/train.json"}
    options |= {"val": "data/train.json"}
    common = [word for name, path in options.items() for word in (f"--{name}", str(tmp_path / path))]
    common += ["--devices", "2", "--batch", "8", "--microbatches", "2", "--steps", "2", "--precision", "32-true"]
    pool.run(2, script, "train_llava.py", "projector", *common, "--save", str(saved["projector"]), group=False)
    more = ["--tp", "2", "--weights", str(saved["projector"]), "--save", str(saved["both"])]
    pool.run(2, script, "train_llava.py", "both", *common, *more, group=False)
    projectors, heads = (
        [stored(path, f"model.model.{name}") for path in saved.values()]
        for name in ("vision.projector.up.weight", "llm.model.lm_head.weight")
    )
    head = load_file(tmp_path / "models/llama-3-8b/model.safetensors")["lm_head.weight"]
    assert torch.equal(heads[0], head) and not torch.equal(heads[1], head)
    assert 0 < (projectors[1] - projectors[0]).abs().max() < 1e-4  # AdamW's steps of 2e-5
