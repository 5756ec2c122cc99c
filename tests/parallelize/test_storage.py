"""In which dtypes parameters are kept, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision

from hetero_strategy.errors import ConfigError, HeteroError
from hetero_strategy.model import Adapter, MultimodalModel
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.strategy.precision import check_trainable, storage_of
from hetero_strategy.zoo import hf_llama, siglip2_encoder
from tests.model.helpers import LLAMA, VIT

BF16 = Storage(torch.bfloat16, torch.float32)


def model(tied: bool = False) -> MultimodalModel:
    with torch.device("meta"):
        vision = siglip2_encoder(out_width=LLAMA["hidden_size"], **VIT)
        modules = {"vision": vision, "llm": hf_llama(**LLAMA, tie_word_embeddings=tied)}
        return MultimodalModel(modules, freeze=["vision.backbone"])


class Bare(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("storage", "tied", "says"),
    [
        (Storage(keep=("llm.*",)), False, "keep_fp32 needs precision='bf16-mixed'"),
        (Storage(torch.bfloat16, keep=("lm.*",)), False, "keep_fp32 names 'lm.*', but no parameter is called so"),
        (Storage(torch.bfloat16, keep=("llm.model.lm_head.weight",)), True, "set tie_word_embeddings=false"),
        (
            Storage(torch.bfloat16, keep=("bare.*",)),
            False,
            "keep_fp32='bare.*' names a parameter that lies in no",
        ),
    ],
)
def test_refused(storage: Storage, tied: bool, says: str) -> None:
    with pytest.raises(HeteroError, match=says.replace("*", r"\*").replace(".", r"\.")):
        storage.check({**model(tied).modules_by_name, "bare": Bare()})


@pytest.mark.parametrize("given", [["llm.*.q_proj.weight"], ("llm.norm",), None])
def test_names_of_parameters_are_a_list(given: Sequence[str] | None) -> None:
    assert HeteroStrategy(keep_fp32=given)._keep_fp32 == tuple(given or ())
    with pytest.raises(ConfigError, match=r"keep_fp32='llm.norm' is one string; give a list, \['llm.norm'\]"):
        HeteroStrategy(keep_fp32="llm.norm")


def test_kept_layers_are_those_of_the_named_parameters() -> None:
    llm = model().modules_by_name["llm"]
    storage = Storage(torch.bfloat16, keep=("llm.*.q_proj.weight", "llm.model.model.norm.weight"))
    names = {name for name, part in llm.named_modules() if any(part is layer for layer in storage.kept("llm", llm))}
    layers = {f"model.model.layers.{i}.self_attn.q_proj" for i in range(LLAMA["num_hidden_layers"])}
    assert names == layers | {"model.model.norm"}


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_without_a_master_copy_are_not_trained(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"train with precision='{precision.replace('true', 'mixed')}'"):
        check_trainable(HalfPrecision(precision), fit=True)  # type: ignore[arg-type]
    check_trainable(HalfPrecision(precision), fit=False)  # type: ignore[arg-type]
    check_trainable(MixedPrecision("bf16-mixed", "cpu"), fit=True)
    assert storage_of(MixedPrecision("bf16-mixed", "cpu")) == BF16
