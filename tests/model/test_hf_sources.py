"""Folders of transformers' own models: every part of every tensor has its values, and nothing else is read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Split

from hetero_strategy.errors import ModelError
from hetero_strategy.model.hf_folder import INDEX, SINGLE, Selection, TensorFolder, select
from hetero_strategy.model.hf_sources import sources_of
from hetero_strategy.model.materialize import check_folders, initial_units, materialize
from hetero_strategy.model.unread import Stored
from tests.model.helpers import reads
from tests.model.hf_models import MODELS, Anything, clip, made


def halves(tensor: torch.Tensor, rank: int) -> Selection:
    """A rank's part of two: half of the experts and, of both halves of joined columns, a half; or half of the rows."""
    if not tensor.ndim:
        return {}
    rows = torch.arange(tensor.shape[0]).tensor_split(2)[rank]
    if tensor.ndim < 3:
        return {0: rows}
    middle = tensor.shape[1] // 2
    return {
        0: rows,
        1: torch.cat([columns.tensor_split(2)[rank] for columns in torch.arange(2 * middle).split(middle)]),
    }


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("max_shard_size", ["50GB", "8KB"])
def test_a_rank_reads_its_part_alone(tmp_path: Path, family: str, max_shard_size: str) -> None:
    theirs = made(family)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "8KB")
    ours, expected = Anything(theirs, tmp_path), theirs.state_dict()
    names = ours.hf_weights().names
    stacked = [fqn for fqn in names if "experts." in fqn and not fqn.endswith(".weight")]
    assert bool(stacked) == (family in ("qwen3_moe", "mixtral", "deepseek_v3"))
    tables = {fqn for fqn, _ in ours.named_buffers()} - names.keys()
    for rank in range(2):
        wanted = {fqn: halves(expected[name], rank) for fqn, name in names.items()}
        owned = {fqn: select(expected[name], wanted[fqn]) for fqn, name in names.items()}
        with reads() as found:
            values = dict(initial_units("m", ours, 0, wanted))
        assert values.keys() == owned.keys() and tables.isdisjoint(values)
        assert all(torch.equal(values[fqn], owned[fqn]) for fqn in owned)
        assert sum(found) == sum(value.nbytes for value in owned.values()), family
        places = {fqn: torch.empty_like(value) for fqn, value in owned.items()}
        with patch.object(sys.modules[initial_units.__module__], "SLICE", 100), reads() as found:
            assert not dict(initial_units("m", ours, 0, wanted, places))
        assert all(torch.equal(places[fqn], owned[fqn]) for fqn in owned)
        assert sum(found) == sum(value.nbytes for value in owned.values()), family
    materialize(ours, 0, name="m")
    assert all(torch.equal(ours.state_dict()[fqn], expected[name]) for fqn, name in names.items())


def test_a_part_of_a_whole_folder(tmp_path: Path) -> None:
    """Each of two modules takes its own tensors, and those of the other are no fault."""
    theirs = made("qwen2_5_vl")
    theirs.save_pretrained(tmp_path)
    for others in (("model.visual",), ("model.language_model", "lm_head")):
        ours = Anything(theirs, tmp_path, others)
        names = ours.hf_weights().names
        values = dict(initial_units("m", ours, 0, {fqn: {} for fqn in names}))
        assert values and all(torch.equal(values[fqn], theirs.state_dict()[name]) for fqn, name in names.items())


def test_a_tower_is_found_in_a_whole_model(tmp_path: Path) -> None:
    """Its names have a prefix there, which nobody says."""
    whole = clip()
    whole.save_pretrained(tmp_path)
    tower = transformers.CLIPVisionModel(whole.config.vision_config)
    values = dict(initial_units("m", ours := Anything(tower, tmp_path), 0))
    stored = load_file(tmp_path / SINGLE)
    for fqn, name in ours.hf_weights().names.items():
        assert torch.equal(values[fqn], stored[f"vision_model.{name}"])


class Scaled(Split):
    """A conversion that computes."""

    def convert(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return super().convert({name: [t * 1 for t in many] for name, many in tensors.items()}, *args, **kwargs)


WHOLE = ("projections are permuted", "joined projections are scaled")


@pytest.mark.parametrize("change", ["plain", "queries, keys and values are joined", *WHOLE])
def test_other_conversions(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined projections are read by slices; a permutation, which is none of slices, whole and with a warning."""
    from transformers import conversion_mapping, core_model_loading

    theirs = made("tied")
    stored = {name: tensor.clone() for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    theirs.save_pretrained(tmp_path)
    first = "model.layers.0.self_attn."
    if change != "plain":
        parts = [stored.pop(f"{first}{kind}_proj.weight") for kind in "qkv"]
        sources, targets = "self_attn.qkv.weight", [f"self_attn.{kind}_proj.weight" for kind in "qkv"]
        stored[f"{first}qkv.weight"] = torch.cat(parts)
        operation: Any = core_model_loading.Split(dim=0)
        if change == "joined projections are scaled":
            operation = Scaled(dim=0)
        if change == "projections are permuted":
            stored |= {f"{first}{kind}.weight": part for kind, part in zip("qkv", parts, strict=True)}
            stored[f"{first}q.weight"] = parts[0].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            del stored[f"{first}qkv.weight"]
            sources, targets = "self_attn.q.weight", ["self_attn.q_proj.weight"]
            operation = core_model_loading.Interleave(dim=0)
        maps = [core_model_loading.WeightConverter(sources, targets, operations=[operation])]
        maps += [
            core_model_loading.WeightRenaming(f"self_attn.{kind}.weight", f"self_attn.{kind}_proj.weight")
            for kind in "kv"
        ]
        monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: maps)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / SINGLE)
    ours, fqn = Anything(theirs, tmp_path), f"model.{first}q_proj.weight"
    wanted = {fqn: {0: torch.tensor([5, 2])}}
    expected = theirs.state_dict()[f"{first}q_proj.weight"]
    if change not in WHOLE:
        with reads() as found:
            values = dict(initial_units("m", ours, 0, wanted))
        assert sum(found) == expected[:2].nbytes and not check_folders({"m": ours})
    else:
        alone = change == "projections are permuted"
        wanted |= {} if alone else {f"model.{first}{kind}_proj.weight": {} for kind in "kv"}
        some = f"{first}{'q' if alone else 'k'}_proj.weight"
        told = f"m: read whole on every rank: {len(wanted)} tensors, such as {some},"
        with reads() as found, pytest.warns(UserWarning, match=told):
            values = dict(initial_units("m", ours, 0, wanted))
        assert sum(found) == (expected.nbytes if alone else torch.cat(parts).nbytes), "once for all results"
        with pytest.warns(UserWarning, match=told):
            assert check_folders({"m": ours}) == {"m": len(wanted)}
    assert torch.equal(values[fqn], expected[[5, 2]])


INDICES = st.lists(st.integers(0, 3), max_size=4, unique=True)


@given(st.dictionaries(st.integers(0, 2), INDICES))
def test_slices_of_every_movement(chosen: dict[int, list[int]]) -> None:
    """As torch moves them, to any depth."""
    with pytest.MonkeyPatch.context() as patch:
        tensors = {str(i): torch.randn(4, 4) for i in range(4)}
        patch.setattr(TensorFolder, "__init__", lambda self: None)
        patch.setattr(TensorFolder, "shape", lambda self, name: tuple(tensors[name].shape))
        patch.setattr(TensorFolder, "dtype", lambda self, name: tensors[name].dtype)
        patch.setattr(TensorFolder, "read", lambda self, name, selection: select(tensors[name], selection))

        def moved(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
            rows = torch.cat([torch.split(a, [1, 3])[1], torch.chunk(b, 4, dim=0)[2]])
            joined = torch.chunk(torch.cat([a, d], dim=-1), 2, dim=-1)[0]
            stack = torch.stack([rows, torch.transpose(c, 0, 1).contiguous(), d, joined])
            return [stack, torch.transpose(stack, 1, -1), *(part.squeeze(0) for part in torch.chunk(stack, 4))]

        folder = TensorFolder()  # type: ignore[call-arg]
        unread = moved(*(Stored(folder, name) for name in tensors))
        for ours, theirs in zip(unread, moved(*tensors.values()), strict=True):
            selection = {
                dim: torch.tensor(index, dtype=torch.int64) for dim, index in chosen.items() if dim < theirs.ndim
            }
            assert ours.shape == theirs.shape and torch.equal(ours.read(selection), select(theirs, selection))
        with pytest.raises(TypeError, match="moves more than slices"):
            torch.exp(Stored(folder, "0"))  # type: ignore[call-overload]


def test_faults_of_a_folder_are_named(tmp_path: Path) -> None:
    theirs = made("qwen3_moe")
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    ours = Anything(theirs, tmp_path)

    def fault(message: str) -> None:
        with pytest.raises(ModelError, match=message):
            materialize(ours, 0, name="llm")

    lost = sorted(tmp_path.glob("model-*"))[1]
    lost.rename(tmp_path / "kept")
    fault(rf"llm: {re.escape(str(lost))} cannot be read: .*No such file")
    (tmp_path / "kept").rename(lost)
    stored = {name: tensor for path in tmp_path.glob("model-*") for name, tensor in load_file(path).items()}
    for path in tmp_path.glob("model*"):
        path.unlink()

    def write(**changed: torch.Tensor | None) -> None:
        tensors = {name: tensor for name, tensor in (stored | changed).items() if tensor is not None}
        save_file(tensors, tmp_path / SINGLE)

    write(**{"model.other.weight": torch.zeros(2)})
    fault(r"llm: .* holds 1 tensors this model has no place for, such as \['model.other.weight'\]$")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    fault(r"has no place for, such as .*; its weights are quantised: save them in bfloat16 with transformers first$")
    (tmp_path / "config.json").write_text(json.dumps(config))
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    for changed, count in ((None, 7), (torch.zeros(5, 16), 8)):
        write(**{expert: changed})
        fault(rf"layers.1.mlp.experts.gate_up_proj cannot be made of {count} tensors in .* do not belong together$")
    write(**{"model.norm.weight": torch.zeros(5)})
    fault(
        r"llm: model.norm.weight in .* has shape \(5,\), the model has \(16,\): config.json and weights do not belong"
    )
    write(**{"model.norm.weight": None, "model.layers.0.mlp.gate.weight": None})
    fault(r"llm: .* lacks 2 tensors, such as \['model.layers.0.mlp.gate.weight', 'model.norm.weight'\]$")


def test_tensors_that_a_class_leaves_out_are_no_fault(tmp_path: Path) -> None:
    """Heads that predict more tokens, and rotary frequencies of old folders."""
    theirs = made("deepseek_v3")
    theirs.save_pretrained(tmp_path)
    more = {
        "model.layers.61.eh_proj.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    save_file(load_file(tmp_path / SINGLE) | more, tmp_path / SINGLE)
    materialize(Anything(theirs, tmp_path), 0, name="llm")


def test_modules_without_a_class_keep_their_names(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 4)
    save_file(
        {"tower.weight": linear.weight, "tower.bias": linear.bias, "old.b": linear.bias.clone()}, tmp_path / SINGLE
    )
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyHasThis"]}')
    with TensorFolder(tmp_path) as folder:
        assert sorted(sources_of(folder, None).tensors) == ["old.b", "tower.bias", "tower.weight"]
