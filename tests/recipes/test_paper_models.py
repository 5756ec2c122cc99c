"""The models of published papers have the sizes that the papers print, and their data have the same modules."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.errors import ConfigError
from hetero_strategy.model import Encoder, MultimodalModel
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import edge_blocks
from recipes import build, cli
from tests.recipes.test_conf import compose


class Printed(NamedTuple):
    """What a paper prints of one module; None: it does not."""

    layers: int
    width: int
    mlp: int | None
    billions: str
    """Parameters."""
    projector: bool = False
    """Whether an encoder's are counted with its projector."""


VIT_HUGE = Printed(32, 1280, 5120, "0.63")
DRAW = Printed(32, 1280, None, "1")  # Stable Diffusion 2.1: layers are not comparable
VIT_3B = Printed(48, 2304, 9216, "3")
VIT_5B = Printed(48, 3072, 12288, "5.5")
VIT_11B = Printed(48, 4096, 16384, "10")
VIT_22B = Printed(48, 6144, 24576, "22")
LLAMA_70B = Printed(80, 8192, None, "70")
GPT_11B = Printed(80, 3072, None, "11")
GPT_175B = Printed(96, 12288, None, "175")
EVA = {"s": Printed(40, 1408, None, "1"), "m": Printed(32, 4096, None, "8"), "l": Printed(48, 5120, None, "18")}
WHISPER = {"s": Printed(32, 1920, None, "1.4"), "m": Printed(40, 3840, None, "7"), "l": Printed(48, 5120, None, "15")}
LLAMA = {"s": Printed(16, 2048, None, "1.2"), "m": Printed(32, 4096, None, "8"), "l": Printed(64, 5120, None, "32")}

PAPERS: dict[str, tuple[str, dict[str, Printed]]] = {
    # DistTrain, arXiv:2408.04275, section 7 and table 1
    "mllm_9b": ("laion", {"vision": VIT_HUGE, "llm": Printed(32, 4096, 11008, "7"), "draw": DRAW}),
    "mllm_15b": ("laion", {"vision": VIT_HUGE, "llm": Printed(40, 5120, 13824, "13"), "draw": DRAW}),
    "mllm_72b": ("laion_1024", {"vision": VIT_HUGE, "llm": Printed(80, 8192, 28672, "70"), "draw": DRAW}),
    # OrchMLLM, arXiv:2503.23830, table 1
    "mllm_10b": (
        "orchmllm_10b",
        {
            "vision": Printed(36, 2048, 8192, "2"),
            "audio": Printed(32, 1280, 5120, "0.6"),
            "llm": Printed(28, 3584, 18944, "7"),
        },
    ),
    "mllm_18b": (
        "orchmllm_18b",
        {
            "vision": Printed(40, 2400, 9600, "3"),
            "audio": Printed(32, 1280, 5120, "0.6"),
            "llm": Printed(48, 5120, 13824, "14"),
        },
    ),
    "mllm_84b": (
        "orchmllm_84b",
        {
            "vision": Printed(45, 3200, 12800, "6"),
            "audio": Printed(48, 3072, 12288, "6", projector=True),  # 5.5 without
            "llm": Printed(80, 8192, 29568, "72"),
        },
    ),
    # Optimus, arXiv:2408.03505, tables 3, 4, 6, 8 and 9
    "vit3b_gpt11b": ("optimus", {"vision": VIT_3B, "llm": GPT_11B}),
    "vit11b_llama70b": ("optimus", {"vision": VIT_11B, "llm": LLAMA_70B}),
    "vit22b_llama70b": ("optimus", {"vision": VIT_22B, "llm": LLAMA_70B}),
    "vit11b_gpt175b": ("optimus", {"vision": VIT_11B, "llm": GPT_175B}),
    "vit22b_gpt175b": ("optimus", {"vision": VIT_22B, "llm": GPT_175B}),
    "vit11b_vit5b_gpt175b": ("optimus_dual", {"vision": VIT_11B, "vision_2": VIT_5B, "llm": GPT_175B}),
    "vit22b_vit5b_gpt175b": ("optimus_dual", {"vision": VIT_22B, "vision_2": VIT_5B, "llm": GPT_175B}),
    "vit22b_vit11b_gpt175b": ("optimus_dual", {"vision": VIT_22B, "vision_2": VIT_11B, "llm": GPT_175B}),
    # Cornstarch, arXiv:2503.11367, table 1
    "vlm": ("cornstarch_vision", {"vision": EVA["m"], "llm": LLAMA["m"]}),
    "alm": ("cornstarch_audio", {"audio": WHISPER["m"], "llm": LLAMA["m"]}),
    "valm": ("cornstarch", {"vision": EVA["m"], "audio": WHISPER["m"], "llm": LLAMA["m"]}),
    # LLaVA-1.5, arXiv:2310.03744; CLIP ViT-L/14, arXiv:2103.00020, table 20: 0.30B without its text tower
    "llava_7b": ("llava", {"vision": Printed(24, 1024, 4096, "0.30"), "llm": Printed(32, 4096, 11008, "7")}),
}


REPEATED = ("vit11b_llama70b", "vit11b_gpt175b", "vit22b_gpt175b", "vit22b_vit5b_gpt175b", "vit22b_vit11b_gpt175b")
"""Models whose modules others have too, as a test says."""
MODELS = [name for name in PAPERS if name not in REPEATED]


@functools.cache
def made(*overrides: str) -> MultimodalModel:
    cfg = compose(*overrides)
    build.check_configuration(cfg)
    with torch.device("meta"):
        return build.model_maker(cfg)()


def backbone(module: Any) -> Any:
    return module.backbone if isinstance(module, Encoder) else module


def agrees(count: float, printed: str) -> bool:
    """Within 5 %, or what is printed is the count rounded or cut: some papers print one digit. Where that is coarse,
    the layers and widths that they print decide.
    """
    unit = 10.0 ** -len(printed.partition(".")[2])
    off = count - float(printed)
    return abs(off) <= 0.05 * float(printed) or -unit / 2 <= off < unit


def check(model: MultimodalModel, printed: dict[str, Printed]) -> None:
    assert list(model.modules_by_name) == list(printed)
    for name, module in model.modules_by_name.items():
        made, paper = backbone(module), printed[name]
        blocks = list(made.blocks().values())
        assert (len(blocks), made.hidden_width) == (paper.layers, paper.width)
        wide = max(m.out_features for m in blocks[0].modules() if isinstance(m, nn.Linear))
        assert paper.mlp is None or wide == paper.mlp
        billions = sum(p.numel() for p in (module if paper.projector else made).parameters()) / 1e9
        assert agrees(billions, paper.billions), f"{name}: {billions:.2f}B, printed {paper.billions}B"


def test_every_model_and_data_set_is_in_the_table() -> None:
    def names(group: str) -> set[str]:
        return {path.stem for path in Path(cli.CONF, group).glob("*.yaml")}

    assert names("model") == {*PAPERS, "digits", "digits_draw", "folder"}
    assert names("data") == {
        *(data for data, _ in PAPERS.values()),
        "digits",
        "digits_draw",
        "manifest",
        "text",
        "video_long_tail",
    }


@pytest.mark.parametrize("name", MODELS)
def test_modules_have_the_sizes_that_are_printed(name: str) -> None:
    check(made(f"model={name}"), PAPERS[name][1])


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_modules_are_those_of_other_models(name: str) -> None:
    """But for the rows that an encoder makes, which are as wide as the language model."""
    modules, paper = compose(f"model={name}").model.modules, PAPERS[name][1]
    assert list(modules) == list(paper)
    for module, printed in paper.items():
        other, there = next((o, m) for o in MODELS for m, one in PAPERS[o][1].items() if one is printed)
        same = compose(f"model={other}").model.modules[there]
        assert {**modules[module], "out_width": 0} == {**same, "out_width": 0}
        assert modules[module].get("out_width", paper["llm"].width) == paper["llm"].width


@pytest.mark.parametrize("size", "sl")
def test_cornstarch_models_are_put_together_from_sizes(size: str) -> None:
    groups = {"encoder@model.modules.vision": "eva_clip", "encoder@model.modules.audio": "whisper"}
    groups["language_model@model.modules.llm"] = "llama"
    model = made("model=valm", *(f"model/{group}={module}_{size}" for group, module in groups.items()))
    check(model, {"vision": EVA[size], "audio": WHISPER[size], "llm": LLAMA[size]})
    trained = {n.rpartition(".projector.")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"vision", "audio"}


def test_a_wrong_size_is_noticed() -> None:
    with pytest.raises(AssertionError, match="llm: "):
        check(made("model=vit3b_gpt11b", "model.modules.llm.intermediate_size=8192"), PAPERS["vit3b_gpt11b"][1])
    assert agrees(7.61, "7") and agrees(5.5, "6") and not agrees(8.1, "7") and not agrees(0.68, "0.63")


def drawn(*overrides: str, samples: int = 24) -> Any:
    cfg = compose(*overrides)
    assert set(cfg.data) == {"sample", "global_batch", "microbatches"} and cfg.data.global_batch > 0
    load = hydra.utils.instantiate(cfg.data.sample, samples=samples, seed=0)
    assert len(load.text) == samples
    return load


@pytest.mark.parametrize("name", MODELS)
def test_data_have_the_rows_of_the_model(name: str) -> None:
    load, model = drawn(f"model={name}", f"data={PAPERS[name][0]}"), made(f"model={name}")
    assert {*load.items, "llm"} == set(model.modules_by_name) and load.assumptions
    for module, items in load.items.items():
        made_by = backbone(model.modules_by_name[module])
        if items.targets is not None:
            np.testing.assert_array_equal(items.targets, (items.inner_rows - items.rows) * made_by.feature)
            continue
        joined = getattr(made_by, "merge", 1) ** 2 * getattr(made_by, "stack", 1)
        np.testing.assert_array_equal(items.rows, -(-items.inner_rows // joined))
    assert load.tokens().max() <= backbone(model.modules_by_name["llm"]).config.max_position_embeddings


@pytest.mark.parametrize("data", ["laion", "laion_1024"])
def test_every_picture_is_drawn_again_from_rows_of_its_sequence(data: str) -> None:
    load = drawn(f"data={data}")
    pictures, draw = load.items["vision"], load.items["draw"]
    np.testing.assert_array_equal(pictures.sample, draw.sample)
    side = 512 // 16 if data == "laion" else 1024 // 16
    assert set(draw.rows) == {8} and set(draw.inner_rows) == {8 + side**2} and load.tokens().max() <= 8192
    metadata = load.metadata()
    plan = plan_step(metadata, {"vision": 3, "llm": 2, "draw": 4}, ["llm"], microbatches=4)
    assert plan.normalizer("draw") == len(draw.rows) * side**2 * 16 * 16 * 3
    crossing = sum(int(edge_blocks(plan, "llm", p, "draw", t).rows.sum()) for p, t in plan.feeds("llm", "draw"))
    assert crossing == 8 * len(draw.rows)
    assert set(drawn(f"data={data}", "data.sample.drawn_from=0").items) == {"vision"}


def test_sequences_of_one_size() -> None:
    load = drawn("data=optimus_dual")
    assert set(load.tokens()) == {2048} and set(load.text) == {1024} and set(load.items) == {"vision", "vision_2"}
    load = drawn("data=text", "data.sample.tokens=8192")
    assert set(load.tokens()) == {8192} and not load.items
    np.testing.assert_array_equal(load.metadata().labels, np.full(24, 8191))
    for data, encoders in {"": ["vision", "audio"], "_vision": ["vision"], "_audio": ["audio"]}.items():
        load = drawn(f"data=cornstarch{data}")  # section 6.1: 1k tokens of text, 1.5k to 4k in all
        assert set(load.text) == {1000} and list(load.items) == encoders and 1500 <= load.tokens().max() <= 4000
    with pytest.raises(hydra.errors.InstantiationException, match="the items take 512 of 512 tokens") as error:
        drawn("data=optimus", "data.sample.tokens=512")
    assert isinstance(error.value.__cause__, ConfigError)


@pytest.mark.parametrize("data", ["laion_1024", "llava", "text"])
def test_statistics_are_not_trained_on(data: str) -> None:
    with pytest.raises(ConfigError, match=r"data.sample: .* no files to train on; name your manifests: data=manifest"):
        build.check_configuration(compose(f"data={data}"))
