"""Language models, towers for pictures and towers for sound of unlike origin, each from its folder, in one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typing_extensions import override

from hetero_strategy import checkpoint
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.inputs import EncoderInputs, Packing, runs_of
from hetero_strategy.plan.step_plan import Assignment, StepItems, StepMetadata, StepPlan
from hetero_strategy.testing import Pool, Setting, relative_errors
from hetero_strategy.testing.setting import VOCABULARY, in_dtype, ragged_step, steps_alone, steps_on_rank
from hetero_strategy.zoo import hf_causal_lm, hf_encoder
from tests.zoo.families import TINY
from tests.zoo.test_hf_encoder import CASES as PICTURES
from tests.zoo.test_hf_encoder import PATCH
from tests.zoo.test_hf_sound import CASES as SOUNDS

LLMS = ("llama", "qwen3", "gemma2", "phi3", "qwen3_moe", "deepseek_v3", "granite", "olmo2")
VISIONS = ("clip", "siglip", "dinov2", "dinov3", "internvl", "qwen2_5_vl")
AUDIOS = ("whisper", "wav2vec2")
SIZES = {"vision": [(4, 4), (2, 4), (2, 2)], "whisper": [(1,), (2,)], "wav2vec2": [(400,), (333,)]}
"""Sizes of items."""
TRIOS: list[tuple[str, ...]] = [(LLMS[n % 8], *towers) for n, towers in enumerate(product(VISIONS, AUDIOS))]
"""Every pair of towers and every language model; ``product(LLMS, VISIONS, AUDIOS)`` in its place tries all 96."""
QUICK: list[tuple[str, ...]] = [("llama", "clip", "whisper"), ("qwen3", "qwen2_5_vl", "wav2vec2")]
STEPS, RATE = 2, 1e-2
LAYOUTS: dict[str, dict[str, ModuleLayout]] = {
    "shards": {
        "vision": ModuleLayout(range(2), dp_shard=2),
        "audio": ModuleLayout(range(2), dp_shard=2),
        "llm": ModuleLayout(range(2), pp=2),
    },
    "stages": {
        "vision": ModuleLayout(range(2), pp=2),
        "audio": ModuleLayout(range(2), pp=2),
        "llm": ModuleLayout(range(2), tp=2),
    },
    "divided": {
        "vision": ModuleLayout(range(2), tp=2),
        "audio": ModuleLayout(range(2), tp=2),
        "llm": ModuleLayout(range(2), dp_shard=2),
    },
}


@dataclass(frozen=True)
class Trio(Setting):
    """A setting whose modules are those of transformers' folders."""

    folders: Mapping[str, Path] = field(default_factory=dict)

    @override
    def model(self, device: str = "meta") -> MultimodalModel:
        with torch.device(device):
            llm = hf_causal_lm(checkpoint=self.folders["llm"], check=False)
            encoders = {name: hf_encoder(self.folders[name], llm.width) for name in ("vision", "audio")}
            return MultimodalModel({**encoders, "llm": llm}, seed=7).train()

    @cached_property
    def backbones(self) -> dict[str, Any]:
        modules = self.model().modules_by_name
        return {name: module.backbone for name, module in modules.items() if name != "llm"}

    @override
    def metadata(self, seed: int) -> StepMetadata:
        chosen: dict[str, np.ndarray] = {}
        kinds, backbones = {name: self.folders[name].name for name in ("vision", "audio")}, self.backbones

        def draw(name: str) -> Any:
            def rows(rng: np.random.Generator, count: int) -> np.ndarray:
                sizes = np.array(SIZES.get(kinds[name], SIZES["vision"]), np.int64)
                chosen[name] = sizes[rng.integers(0, len(sizes), count)]
                return backbones[name].output_rows(chosen[name])

            return rows

        step = ragged_step(seed, self.samples, {name: draw(name) for name in kinds}, items=self.items, text=self.text)
        items: dict[str, StepItems] = {
            name: replace(of, inner_rows=backbones[name].packing_rows(chosen[name])) for name, of in step.items.items()
        }
        return replace(step, items=items)

    @override
    def items_of(
        self, plan: StepPlan, module: str, assignment: Assignment, instance: int, generator: torch.Generator
    ) -> EncoderInputs:
        units, items, kind = assignment.of(instance), plan.metadata.items[module], self.folders[module].name
        possible = np.array(SIZES.get(kind, SIZES["vision"]), np.int64)
        same = self.backbones[module].output_rows(possible) == items.edge_rows[:, None]  # each size has its own rows
        sizes = possible[same.argmax(axis=1)]
        raw = sizes.prod(axis=1)
        numbers = SOUNDS[kind].numbers if module == "audio" else 3 * PATCH**2
        values = torch.randn(int(raw.sum()), numbers, generator=generator, dtype=torch.float32)
        packing = Packing.of(items.inner_rows[units])
        return EncoderInputs(
            runs_of(values, raw, units), sizes[units], items.edge_rows[units], packing, raw_rows=raw[units]
        )


def saved(root: Path, name: str) -> Path:
    """Save a tiny model of transformers, once."""
    folder = root / name
    if folder.exists():
        return folder
    torch.manual_seed(0)
    if name in TINY:
        known = {"vocab_size": VOCABULARY, "pad_token_id": None}
        config = CONFIG_MAPPING[name](**TINY[name] | known)
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        config = (PICTURES | SOUNDS)[name].config()
        if name == "qwen2_5_vl":
            text = {"model_type": "qwen2_5_vl_text", **TINY["qwen2"]}
            config = transformers.Qwen2_5_VLConfig(vision_config=config.to_dict(), text_config=text)
        for chance in ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"):
            if name in SOUNDS:
                setattr(config, chance, 0.0)
        model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    return folder


def trio(root: Path, names: Sequence[str], **layouts: ModuleLayout) -> Trio:
    folders = dict(zip(("llm", "vision", "audio"), (saved(root, name) for name in names), strict=True))
    placed = layouts or dict.fromkeys(("vision", "audio", "llm"), ModuleLayout((0,)))
    return Trio("-".join(names), placed, samples=6, microbatches=2, items=(0, 2), text=(3, 20), folders=folders)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(t, id="-".join(t), marks=[] if t in QUICK else pytest.mark.full)
        for t in dict.fromkeys(QUICK + TRIOS)
    ],
)
def test_a_trio_trains_is_saved_loaded_and_exported(names: tuple[str, ...], root: Path, tmp_path: Path) -> None:
    setting = trio(root, names)
    gradients, model = steps_alone(setting, STEPS, RATE)
    before = setting.model("cpu").state_dict()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert {name.partition(": ")[2].partition(".")[0] for name in gradients} == {"vision", "audio", "llm"}
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    changed = {name for name in trained if not torch.equal(values[name], before[name])}
    assert len(changed) > 0.9 * len(trained)
    state = TrainingState("net", model.modules_by_name, group=None)
    state.save({"state_dict": state.model_tensors()}, tmp_path / "saved")
    fresh = setting.model("cpu")
    TrainingState("net", fresh.modules_by_name, group=None).load(tmp_path / "saved", [])
    loaded = fresh.state_dict()
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    checkpoint.export(tmp_path / "saved", tmp_path / "out")
    for name, module in model.modules_by_name.items():
        weights = module.hf_weights()
        assert weights is not None and weights.model_class is not None
        again, faults = weights.model_class.from_pretrained(tmp_path / "out" / name, output_loading_info=True)
        assert not any(faults[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), faults
        theirs = again.state_dict()
        for fqn, key in weights.names.items():
            if key in theirs:
                assert torch.equal(theirs[key], values[f"{name}.{fqn}"]), key
        assert len({*weights.names.values()} & {*theirs}) > 0.5 * len(theirs)


@pytest.mark.distributed
def test_two_processes_have_the_gradients_of_one(root: Path, pool: Pool) -> None:
    """Towers with shards, in stages and divided; they run once for each size, and so not equally often on all ranks."""
    trios = {
        "shards": ("llama", "clip", "whisper"),
        "stages": ("qwen3", "siglip", "wav2vec2"),
        "divided": ("gemma2", "dinov2", "whisper"),
    }
    with in_dtype(torch.float32):
        settings = {name: trio(root, trios[name], **layouts) for name, layouts in LAYOUTS.items()}
        ranks = pool.run(2, steps_on_rank, settings, STEPS, RATE, timeout=120)
        for name, names in trios.items():
            expected, _ = steps_alone(trio(root, names), STEPS, RATE)
            errors = [error for rank in ranks for error in relative_errors(rank[name], expected, 1e-3).items()]
            assert {fqn for fqn, _ in errors} == expected.keys()
            worst = max(errors, key=lambda one: one[1])
            assert worst[1] < 1e-5, (name, worst)
    other = steps_alone(trio(root, (*trios["shards"][:2], "wav2vec2")), STEPS, RATE)[0]
    assert max(relative_errors(ranks[0]["shards"], other, 1e-3).values()) > 0.01  # another tower is not the same
