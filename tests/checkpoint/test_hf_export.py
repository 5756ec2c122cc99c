"""Exports of transformers' own folders: names and values as there, and transformers loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint.__main__ import main
from hetero_strategy.checkpoint.exporting import export_record
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.hf_folder import EXTRA
from hetero_strategy.model.materialize import materialize
from tests.checkpoint.helpers import same
from tests.model.hf_models import MODELS, Anything, clip, made

OTHER_FILES = {"tokenizer.json": "{}", "chat_template.jinja": "x", "generation_config.json": "{}", "LICENSE": "free"}


def trained(path: Path, dtype: torch.dtype = torch.float32, **modules: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Save a checkpoint of modules after a step that changes every value; return their tensors."""
    for name, module in modules.items():
        materialize(module, 0, name=name)
        for tensor in {tensor.data_ptr(): tensor for tensor in module.state_dict().values()}.values():
            tensor.mul_(2)
        module.to(dtype)
    state = TrainingState("net", modules, group=None)
    state.save({"state_dict": state.model_tensors()}, path)
    return {name: module.state_dict() for name, module in modules.items()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def loaded(model_class: Any, folder: Path) -> Any:
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_folder_is_as_its_origin(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    theirs, origin, out = made(family).eval(), tmp_path / "origin", tmp_path / "out"
    theirs.save_pretrained(origin, max_shard_size="8KB")
    for name, text in OTHER_FILES.items():
        (origin / name).write_text(text)
    trained(tmp_path / "saved", dtype, llm=Anything(theirs, origin))
    limit = [] if dtype == torch.float32 else ["--file-gb", "0.000008"]
    assert main(["export", str(tmp_path / "saved"), str(out), "--whole", *limit]) == 0
    found, before = stored(out), stored(origin)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], (2 * tensor).to(dtype)) for name, tensor in before.items())
    assert len(list(out.glob("model-*"))) > 1 or not limit
    assert {path.name for path in out.iterdir()} >= OTHER_FILES.keys()
    assert all((out / name).read_text() == text for name, text in OTHER_FILES.items())
    ids = torch.randint(3, 39, (1, 9))
    with torch.no_grad():
        for tensor in {t.data_ptr(): t for t in theirs.state_dict().values()}.values():
            tensor.mul_(2)
        again = loaded(type(theirs), out)
        assert again.dtype == dtype
        assert torch.equal(again(input_ids=ids).logits, theirs.to(dtype)(input_ids=ids).logits)


def test_parts_of_one_folder_make_up_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What neither trains, such as a talker that the class leaves out, is copied bit by bit."""
    theirs, origin = made("deepseek_v3"), tmp_path / "origin"
    theirs.bfloat16().save_pretrained(origin)
    more = {"model.layers.61.eh_proj.weight": torch.randn(3)}
    save_file(load_file(origin / "model.safetensors") | more, origin / "model.safetensors", {"format": "pt"})
    first, last = (
        Anything(theirs, origin, ("model.layers", "lm_head")),
        Anything(theirs, origin, ("model.layers.1", "model.norm", "model.embed_tokens")),
    )
    changed = trained(tmp_path / "saved", first=first, last=last)
    ck.export(tmp_path / "saved", tmp_path / "out", whole=True)
    found, before = stored(tmp_path / "out"), stored(origin)
    assert found.keys() == before.keys()
    kept = {name for name, tensor in before.items() if same(found[name], tensor)}
    assert kept == {name for name in before if ".layers.1." in name} | more.keys()
    assert torch.equal(found["model.norm.weight"], changed["first"]["model.model.norm.weight"])
    loaded(type(theirs), tmp_path / "out")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "parts")]) == 0
    assert [path.name for path in (tmp_path / "parts" / "last").iterdir()] == ["model.safetensors"]
    assert "under their own names" in capsys.readouterr().out


def test_a_module_is_exported_with_what_no_run_trains(tmp_path: Path) -> None:
    """CLIP's tower without its last block, as a language model reads it, has that block in its export."""
    whole, origin = clip(), tmp_path / "origin"
    whole.save_pretrained(origin)
    tower = Anything(CLIPVisionModel(whole.config.vision_config), origin, ("encoder.layers.1", "post_layernorm"))
    changed = trained(tmp_path / "saved", vision=tower)["vision"]
    ck.export(tmp_path / "saved", tmp_path / "out")
    again = loaded(CLIPVisionModel, tmp_path / "out" / "vision").state_dict()
    for name, tensor in again.items():
        expected = changed.get(f"model.{name}", whole.state_dict()[f"vision_model.{name}"])
        assert torch.equal(tensor, expected), name
    shutil.move(origin, tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"origin has 18 tensors of CLIPVisionModel that .*--origin"):
        ck.export(tmp_path / "saved", tmp_path / "again")
    ck.export(tmp_path / "saved", tmp_path / "again", module="vision", origin=tmp_path / "moved")
    assert stored(tmp_path / "again").keys() == stored(tmp_path / "out" / "vision").keys()
    less = {name: tensor for name, tensor in stored(tmp_path / "moved").items() if ".layers.1.mlp." not in name}
    save_file(less, tmp_path / "moved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"moved lacks 4 tensors of CLIPVisionModel .* encoder.layers.1.mlp.fc1."):
        ck.export(tmp_path / "saved", tmp_path / "less", module="vision", origin=tmp_path / "moved")


def test_a_new_place_is_that_of_one_folder(tmp_path: Path) -> None:
    """Modules from scratch take nothing from it."""
    whole, folders = clip(), [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        whole.save_pretrained(folder)
    one, two, scratch = (
        Anything(CLIPVisionModel(whole.config.vision_config), folder, ("post_layernorm",))
        for folder in (*folders, None)
    )
    trained(tmp_path / "saved", one=one, two=two)
    with pytest.raises(CheckpointError, match=r"of one folder, but the modules come from .*one, .*two; export module"):
        ck.export(tmp_path / "saved", tmp_path / "out", origin=folders[0])
    ck.export(tmp_path / "saved", tmp_path / "out", origin=folders[0], module="two")
    trained(tmp_path / "again", one=one, scratch=scratch)
    ck.export(tmp_path / "again", tmp_path / "both", origin=folders[1])
    names = {name: stored(tmp_path / "both" / name).keys() for name in ("one", "scratch")}
    assert {name.partition(".")[0] for name in names["one"] - names["scratch"]} == {"post_layernorm"}
    trained(tmp_path / "new", scratch=scratch)
    with pytest.raises(CheckpointError, match=r"the modules come from none; leave it out"):
        ck.export(tmp_path / "new", tmp_path / "last", origin=folders[0])


def test_tensors_outside_the_modules_lie_beside_a_whole_folder(tmp_path: Path) -> None:
    theirs, origin = made("tied"), tmp_path / "origin"
    theirs.save_pretrained(origin)
    module = Anything(theirs, origin)
    materialize(module, 0, name="llm")
    tensors = {f"model.llm.{name}": tensor for name, tensor in module.state_dict().items()}
    record = export_record({"llm.": module})
    ck.Checkpointer().save(tensors | {"model.scale": torch.ones(2)}, {ck.EXPORT_KEY: record}, tmp_path / "saved")
    (exported,) = ck.export(tmp_path / "saved", tmp_path / "out", whole=True)
    assert exported.extra == ("scale",)
    assert same(load_file(tmp_path / "out" / EXTRA), {"scale": torch.ones(2)})
    loaded(type(theirs), tmp_path / "out")


def test_models_without_a_folder_have_the_names_of_transformers(tmp_path: Path) -> None:
    theirs = made("qwen3_moe")
    theirs.save_pretrained(tmp_path / "origin")
    changed = trained(tmp_path / "saved", llm=Anything(theirs, tmp_path / "origin"))["llm"]
    shutil.rmtree(tmp_path / "origin")
    ck.export(tmp_path / "saved", tmp_path / "out")
    again = loaded(type(theirs), tmp_path / "out" / "llm").state_dict()
    assert all(torch.equal(tensor, changed[f"model.{name}"]) for name, tensor in again.items())


def test_what_is_no_whole_folder_is_refused(tmp_path: Path) -> None:
    theirs, origin = made("tied"), tmp_path / "origin"
    theirs.save_pretrained(origin)
    own = Anything(theirs, origin)
    own.register_parameter("scale", torch.nn.Parameter(torch.ones(2, device="meta")))

    def fault(message: str, **modules: Any) -> None:
        state = TrainingState("net", modules, group=None)
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        values = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state._every_tensor().items()}
        state.save({"state_dict": values}, tmp_path / "saved")
        with pytest.raises(CheckpointError, match=message):
            ck.export(tmp_path / "saved", tmp_path / "out", whole=True)
        assert not list(tmp_path.glob("out*"))

    fault(
        r"but there are net.a of .*origin, net.b of no folder; leave --whole out",
        a=Anything(theirs, origin),
        b=Anything(theirs, None),
    )
    fault(r"net.a: .*origin has no place for 1 of its tensors, such as scale; leave --whole out", a=own)
    with pytest.raises(CheckpointError, match=r"whole=True .* is for all modules; leave module='a' out"):
        ck.export(tmp_path / "saved", tmp_path / "out", whole=True, module="a")
    config = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "head_dim": 8}))
    fault(
        r"\(40, 16\) of the checkpoint has no place in .* it \(40, 32\): give .*--origin",
        a=Anything(theirs, origin),
    )
    shutil.rmtree(origin)
    fault(r"origin is gone: give the folder's new place, --origin", a=Anything(theirs, origin))
