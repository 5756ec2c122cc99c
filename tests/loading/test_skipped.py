"""Faulty samples of every kind are left out when a data set is indexed, all of them in one run."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from hetero_strategy.data.manifest import list_path
from hetero_strategy.errors import DataError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.datamodule import MultimodalDataModule
from tests.manifests import entry
from tests.small_models import READING, reader

NOISE = np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8)


class Lit(L.LightningModule):
    def configure_model(self) -> None:
        self.model = reader()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.loss = self.model(batch).loss
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def files(folder: Path) -> None:
    """What samples of the data set name, whole or not."""
    Image.fromarray(NOISE).save(folder / "a.png")
    whole = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:-30])
    (folder / "empty.png").touch()
    (folder / "page.png").write_text("<!DOCTYPE html><html>404</html>")
    (folder / "drawing.svg").write_text("<svg></svg>")
    (folder / "pictures").mkdir()
    sound = 0.1 * np.sin(np.arange(8000))
    soundfile.write(folder / "a.wav", sound, 8000)
    heard = (folder / "a.wav").read_bytes()
    (folder / "cut.wav").write_bytes(heard[:-500])
    soundfile.write(folder / "two.flac", sound, 8000)
    (folder / "two.flac").write_bytes((folder / "two.flac").read_bytes() * 2)
    (folder / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(500))
    soundfile.write(folder / "none.wav", sound[:0], 8000)
    soundfile.write(folder / "long.wav", np.zeros(4 * 8000 + 1), 8000)
    soundfile.write(folder / "nan.wav", np.array([0.1, np.nan] * 900, np.float32), 8000, subtype="FLOAT")


def picture(name: str) -> dict[str, Any]:
    return {"question": "<image>1", "image": name}


def recording(name: str) -> dict[str, Any]:
    return {"question": "<audio>1", "audio": name}


FAULTY: dict[str, tuple[str, dict[str, Any]]] = {
    "missing": ("missing file", picture("none.png")),
    "cut": ("damaged image", picture("cut.png")),
    "empty": ("not a picture", picture("empty.png")),
    "page": ("not a picture", picture("page.png")),
    "drawing": ("not a picture", picture("drawing.svg")),
    "folder": ("folder", picture("pictures")),
    "url": ("URL", picture("https://example.com/a.png")),
    "data": ("inline data", picture("data:image/png;base64," + "iVBORw0KGgo" * 99)),
    "cut sound": ("truncated audio", recording("cut.wav")),
    "two sounds": ("several recordings", recording("two.flac")),
    "m4a": ("not a recording", recording("a.m4a")),
    "no sound": ("zero length", recording("none.wav")),
    "long sound": ("too long", recording("long.wav")),
    "nan": ("NaN or infinite", recording("nan.wav")),
    "long text": ("too long", {"question": "1" * 300}),
    "no answer": ("manifest", {"question": "1", "answer": " "}),
    "tags": ("manifest", {"question": "<image><image>", "image": "a.png"}),
}
"""Why a sample is faulty -> the kind it is counted by, and what it holds."""


def write(folder: Path, samples: int, faulty: int) -> dict[str, str]:
    """Write a data set with faulty samples spread over it; return their ids and kinds."""
    files(folder)
    every, kinds, lines = samples // faulty, {}, []
    for number in range(samples):
        name, held = f"s{number}", {"question": "1", **(picture("a.png") if number % 2 else recording("a.wav"))}
        if number % every == every - 1 and number // every < faulty:
            why = list(FAULTY)[number // every % len(FAULTY)]
            kind, held = FAULTY[why]
            kinds[name] = kind
        lines.append(json.dumps(entry(name, **held)))  # type: ignore[arg-type]
    samples_as_others_keep_them(folder, [json.loads(line) for line in lines])
    lines.insert(3, "{no JSON")
    (folder / "train.jsonl").write_text("\n".join(lines))
    return kinds


def samples_as_others_keep_them(folder: Path, samples: list[dict[str, Any]]) -> None:
    """Write the samples as a parquet file, as a folder of Hugging Face datasets, and in OpenAI's format."""
    import datasets

    keys = dict.fromkeys(key for sample in samples for key in sample)
    rows = datasets.Dataset.from_list([{key: sample.get(key) for key in keys} for sample in samples])
    rows.to_parquet(folder / "train.parquet")
    rows.save_to_disk(folder / "saved")
    roles = {"human": "user", "gpt": "assistant"}
    with (folder / "messages.jsonl").open("w") as file:
        for sample in samples:
            turns = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in sample["conversations"]]
            media = {f"{field}s": [sample[field]] for field in ("image", "audio") if field in sample}
            file.write(json.dumps({"id": sample["id"], "messages": turns, **media}) + "\n")


def data(folder: Path, digits: Path, **options: Any) -> MultimodalDataModule:
    options = {"model": reader, "processors": READING, "index": {"max_tokens": 200}, "on_error": "skip", **options}
    train = options.pop("train", folder / "train.jsonl")
    return MultimodalDataModule(train, tokenizer=digits, global_batch_size=8, seed=1, **options)


@pytest.mark.parametrize(
    ("samples", "faulty"), [(120, 34), pytest.param(10_000, 500, marks=pytest.mark.full)], ids=["small", "large"]
)
def test_one_run_leaves_out_all_faulty_samples(
    digits: Path, tmp_path: Path, samples: int, faulty: int, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = write(tmp_path, samples, faulty)
    expected = Counter([*kinds.values(), "manifest"])  # a line that is no JSON
    caplog.set_level(logging.INFO, "lightning.fabric")
    with pytest.raises(DataError) as refused:
        data(tmp_path, digits, max_skipped=faulty).prepare_data()
    assert f"{faulty + 1} of {samples + 1} samples are faulty, more than max_skipped={faulty}: " in str(refused.value)
    assert f"{expected['too long']} too long" in str(refused.value)
    (listed,) = (tmp_path / ".hetero_index").iterdir()
    assert f"; all are listed in {listed}; mend them, or raise max_skipped" in str(refused.value)

    module = data(tmp_path, digits, max_skipped=faulty + 1)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, max_steps=1, enable_checkpointing=False, enable_progress_bar=False
    )
    lit = Lit()
    trainer.fit(lit, datamodule=module)
    assert torch.isfinite(lit.loss)
    index = module.indices["train"]
    assert [index.names[i] for i in range(len(index))] == [f"s{n}" for n in range(samples) if f"s{n}" not in kinds]
    assert index.skipped == expected and list_path(index.folder) == listed
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert {fault["sample"]: fault["kind"] for fault in found if fault["sample"]} == kinds
    assert len(found) == faulty + 1 and all(len(fault["message"]) < 500 for fault in found)
    assert [fault["entry"] for fault in found] == sorted(fault["entry"] for fault in found)
    (said,) = (record.message for record in caplog.records if "faulty" in record.message)
    assert said.startswith(f"train: {faulty + 1} of {samples + 1} samples are left out, as they are faulty")
    assert f"{expected['missing file']} missing file" in said and str(listed) in said

    again = data(tmp_path, digits, max_skipped=faulty + 1)
    again.setup("fit")  # from its folder
    assert again.indices["train"].content == index.content and again.indices["train"].skipped == expected
    expected["manifest"] -= 1
    for name in ("train.parquet", "saved", "messages.jsonl"):
        same = data(tmp_path, digits, train=tmp_path / name, max_skipped=faulty)
        same.setup("fit")
        read = same.indices["train"]
        assert read.skipped == expected and read.content == index.content and [*read.names] == [*index.names], name
    with pytest.raises(DataError, match=f"{faulty + 1} of {samples + 1} samples are faulty, more than max_skipped=0"):
        data(tmp_path, digits, max_skipped=0).setup("fit")
    with pytest.raises(
        DataError, match=rf"{faulty + 1} faults; fix or remove(.|\n)*and {faulty - 9} more\n  all are li"
    ):
        data(tmp_path, digits, on_error="stop").setup("fit")


def test_an_index_without_faults_serves_runs_that_skip_and_runs_that_stop(digits: Path, tmp_path: Path) -> None:
    """A run that ended at a file that broke later goes on in the middle of its epoch with ``skip``."""
    folder = tmp_path / "digits"
    shutil.copytree(digits, folder, ignore=shutil.ignore_patterns(".hetero_index"))

    def made(**options: Any) -> MultimodalDataModule:
        return data(folder, digits, train=folder / "train.json", **options)

    skipping, stopping = made(), made(on_error="stop")
    for module in (skipping, stopping):
        module.setup("fit")
    index = stopping.indices["train"]
    assert skipping.indices["train"].folder == index.folder and len(list(index.folder.parent.iterdir())) == 1
    index.path("vision", 0).unlink()
    later = made()
    later.setup("fit")
    assert later.indices["train"].content == index.content
    clips = index.items["audio"]
    most = int(clips.inner_rows.max()) - 1
    longer = {index.names[s] for s in clips.sample[clips.inner_rows > most]}

    def limited() -> Any:
        model = reader()
        model.modules_by_name["audio"].max_item_rows = most
        model.modules_by_name["llm"].max_length = 10_000  # type: ignore[assignment]
        return model

    with pytest.raises(DataError, match=f"more rows than the {most} that 'audio' has positions for"):
        made(model=limited, on_error="stop").setup("fit")
    shorter = made(model=limited)
    shorter.setup("fit")
    left = shorter.indices["train"]
    gone = {index.names[i] for i in range(len(index))} - {left.names[i] for i in range(len(left))}
    assert gone == longer | {index.names[int(index.items["vision"].sample[0])]}
    assert left.skipped["too long"] == len(longer) and left.folder != index.folder


def test_where_nothing_is_left_all_faults_are_named(digits: Path, tmp_path: Path) -> None:
    files(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps(entry("x", "<image>", image="none.png")))
    with pytest.raises(
        DataError, match=r"1 fault; .*\n  sample 'x': .*none\.png: file is missing\n  all are listed in"
    ):
        data(tmp_path, digits).setup("fit")
