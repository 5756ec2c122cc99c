"""A Hugging Face folder as the model: `python -m recipes.train folder=... data.module.train=...`."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from PIL import Image
from torch.nn.functional import cross_entropy

from hetero_strategy.errors import ConfigError, LayoutError, ModelError
from hetero_strategy.testing import Pool
from hetero_strategy.testing.composites import built, tiny
from recipes import build, cli
from tests.data.hf_folders import made
from tests.recipes.commands import run_on_ranks
from tests.recipes.test_conf import compose
from tests.zoo.families import TINY

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
NO_AUDIO = "layout.audio=null"
TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL with processor, tokenizer and chat template, and train.json of four pictures."""
    folder = made(tmp_path_factory.mktemp("models"), "qwen2_5_vl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = tiny("qwen2_5_vl", **{f"{n}_token_id": tokenizer.convert_tokens_to_ids(t) for n, t in TOKENS.items()})
    config.text_config.vocab_size, config.vision_config.patch_size = len(tokenizer), 14
    built(config).save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))  # as in older folders
    generator, samples = np.random.default_rng(0), []
    for number in range(4):
        pixels = generator.integers(0, 255, (56 + 28 * number, 84, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        talk = [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": f"number {number}"}]
        samples.append({"id": str(number), "image": f"{number}.png", "conversations": talk})
    (folder / "train.json").write_text(json.dumps(samples))
    return folder


def own_loss(folder: Path) -> float:
    """The mean loss over the answers and their ends, by transformers alone."""
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    pictures: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    losses = []
    for sample in json.loads((folder / "train.json").read_text()):
        seen = pictures(Image.open(folder / sample["image"]), return_tensors="pt")
        rows = TOKENS["image"] * int(seen["image_grid_thw"].prod() // 4)
        question = [{"type": "image"}, {"type": "text", "text": " What?"}]
        answer = sample["conversations"][1]["value"]
        talk = [("user", question), ("assistant", [{"type": "text", "text": answer}])]
        messages = [{"role": role, "content": content} for role, content in talk]
        text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
        ids = tokenizer(text.replace(TOKENS["image"], rows), return_tensors="pt")["input_ids"]
        count = len(tokenizer(f"{answer}<|im_end|>")["input_ids"])
        end = int((ids[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")).nonzero()[-1]) + 1
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[0]
        losses.append(cross_entropy(logits[end - count - 1 : end - 1], ids[0, end - count : end], reduction="none"))
    return float(torch.cat(losses).mean())


def test_a_folder_and_a_manifest_are_enough(pool: Pool, folder: Path, tmp_path: Path) -> None:
    """The first loss is transformers' own: model, weights, processor, tokenizer and template are the folder's."""
    given = (f"folder={folder}", f"data.module.train={folder}/train.json", "layout=colocated", "layout.audio=null")
    small = ("trainer.max_steps=2", "trainer.log_every_n_steps=1", "data.module.global_batch_size=4")
    quiet = ("trainer.accelerator=cpu", "trainer.precision=32-true", "monitor.progress_bar=false")
    run_on_ranks(pool, 2, tmp_path / "run", *given, *small, *quiet)
    lines = csv.DictReader((tmp_path / "run" / "metrics" / "version_0" / "metrics.csv").open())
    first = next(float(line["train/loss"]) for line in lines if line.get("train/loss"))
    assert first == pytest.approx(own_loss(folder), rel=1e-5)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_dir()
    assert OmegaConf.load(tmp_path / "run" / cli.SAVED).folder == str(folder)  # which resume= and run= read


def test_a_shard_that_is_missing_is_found_before_processes_start(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).save_pretrained(copy, max_shard_size="90KB")
    lost = sorted(copy.glob("model-*"))[1]
    lost.unlink()
    cfg = compose("experiment=folder", f"folder={copy}", "data.module.train=train.json", "layout=colocated", NO_AUDIO)
    build.check_configuration(cfg)
    with pytest.raises(ModelError, match=rf"vision: {lost} cannot be read: .*No such file"):
        build.check_model(build.model_maker(cfg), None, build.placement(cfg))  # type: ignore[arg-type]


def test_what_a_folder_does_not_go_with(folder: Path, tmp_path: Path) -> None:
    of_folder = "experiment=folder", f"folder={folder}", "data.module.train=train.json"
    assert cli.of_no_experiment(list(of_folder[1:])) == [*of_folder[1:], "experiment=folder"]
    for overrides, message in (
        ((f"folder={tmp_path}",), "folder=.* has no config.json; give a local folder"),
        (("model=digits",), "it is the model, and model=... has one, too, with a module 'vision'"),
        (("++model.modules.audio=null",), "model.modules: no field 'audio'; the fields are vision, llm"),
    ):
        with pytest.raises(ConfigError, match=message):
            build.check_configuration(compose(*of_folder, *overrides))
    cfg = compose(*of_folder, "layout=colocated")
    build.check_configuration(cfg)
    make = build.model_maker(cfg)
    with pytest.raises(LayoutError, match="names 'audio', but the model's modules are vision, llm"):
        build.check_model(make, None, build.placement(cfg))  # type: ignore[arg-type]
    cfg = compose(*of_folder, "++model.modules.vision=null", "model.freeze=[llm.model.lm_head]")
    build.check_configuration(cfg)
    with torch.device("meta"):
        model: Any = build.model_maker(cfg)()
    assert list(model.modules_by_name) == ["llm"] and build.placement(cfg).layouts.keys() == {"llm"}
    assert not model.llm.model.lm_head.weight.requires_grad


def test_options_of_its_experts_reach_the_language_model(tmp_path: Path) -> None:
    transformers.Qwen3MoeConfig(**TINY["qwen3_moe"]).save_pretrained(tmp_path)
    given = "experiment=folder", f"folder={tmp_path}", "data.module.train=train.json", "layout=colocated"
    cfg = compose(*given, "folder_options.balance_loss=0.25", NO_AUDIO)
    for _ in range(2):  # a run's own configuration is read again
        build.check_configuration(cfg)
    make = build.model_maker(cfg)
    for _ in range(2):  # the second one is made anew
        with torch.device("meta"):
            assert make().modules_by_name["llm"].routing.balance == 0.25  # type: ignore[union-attr]
    for options, error, message in (
        (("folder_options.router_bias_step=0.1",), ModelError, "router_bias_step=0.1, but not all of its routers"),
        (("folder_options.balance_loss=some",), ConfigError, "folder_options: balance_loss='some'; give"),
        (("+folder_options.balance=1",), ConfigError, "folder_options: no field 'balance'; did you mean"),
        (("folder_options.balance_loss=0.1", "folder=null"), ConfigError, "is for folder=..., which is missing"),
    ):
        with pytest.raises(error, match=message):
            build.check_configuration(compose(*given, *options))
