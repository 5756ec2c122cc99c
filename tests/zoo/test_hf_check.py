"""The check at the first use of a transformers class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from hetero_strategy.errors import ModelError
from hetero_strategy.model import MultimodalModel
from hetero_strategy.zoo import HFCausalLM, hf_causal_lm, hf_check
from hetero_strategy.zoo.hf_check import Verdict, checked
from tests.zoo.families import TINY

PACKS = ("gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss")
NO_CONTEXT = ("llama4_text",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hetero_strategy" / "checks"


class Mixing(nn.Module):
    """A feed-forward network that adds a function of the rows ``[1, T, width]``."""

    def __init__(self, own: nn.Module, mix: Any) -> None:
        super().__init__()
        self.own, self.mix = own, mix

    def forward(self, rows: Tensor) -> Tensor:
        return self.own(rows) + self.mix(rows)


class Leaking(Qwen3ForCausalLM):
    """Adds the sum of all rows before."""

    mix = staticmethod(lambda rows: rows.cumsum(1))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp = Mixing(self.model.layers[1].mlp, type(self).mix)


class LookingAhead(Leaking):
    mix = staticmethod(lambda rows: rows.flip(1).cumsum(1).flip(1))


class Failing(Leaking):
    @staticmethod
    def mix(rows: Tensor) -> Tensor:
        raise ValueError("no mixer here")


def check_of(model_class: type, **fields: Any) -> Verdict:
    return checked(HFCausalLM, model_class, Qwen3Config(**TINY["qwen3"] | fields))


@pytest.mark.parametrize("model_type", [*PACKS, *NO_CONTEXT])
def test_families_that_pack(model_type: str) -> None:
    module = hf_causal_lm(model_type=model_type, **TINY[model_type])
    verdict = checked(HFCausalLM, type(module.model), module.config)
    assert verdict.packs and not verdict.reasons and max(verdict.errors.values()) < 1e-5
    assert module.context_parallel == verdict.context_parallel == (model_type in PACKS)


@pytest.mark.parametrize(("model_class", "says"), [(Leaking, "of other sequences"), (LookingAhead, "before them")])
def test_a_check_that_fails_names_class_version_and_number(model_class: type, says: str) -> None:
    verdict = check_of(model_class)
    assert not verdict.packs and not verdict.context_parallel
    assert verdict.errors["eager"] > 0.5 and verdict.errors["alone"] > 0.5
    with pytest.raises(ModelError, match=f"hf_causal_lm: {model_class.__name__} of transformers") as found:
        verdict.require_packing("hf_causal_lm", model_class)
    said = str(found.value)
    assert transformers.__version__ in said and says in said and "check=False" in said
    assert f"{verdict.errors['eager']:.2g}" in said


def test_a_class_that_does_not_run_is_refused_with_its_error() -> None:
    verdict = check_of(Failing)
    with pytest.raises(ModelError, match="no mixer here"):
        verdict.require_packing("hf_causal_lm", Failing)


@pytest.mark.parametrize(
    ("place", "fault"),
    [("_eager", MemoryError()), ("packing_errors", OSError("disk")), ("_eager", RuntimeError("can't allocate memory"))],
)
def test_an_error_of_the_machine_is_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, fault: Exception
) -> None:
    def failing(*_: Any) -> Any:
        raise fault

    with monkeypatch.context() as now:
        now.setattr(hf_check, place, failing)
        with pytest.raises(ModelError, match=f"was ended by {type(fault).__name__}.*start again"):
            check_of(Qwen3ForCausalLM)
    assert not folder.exists()
    assert check_of(Qwen3ForCausalLM).context_parallel


def test_a_class_without_a_tiny_copy_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_check, "LARGEST", 1000)
    assert "parameters remain" in check_of(Qwen3ForCausalLM).failure


def test_an_adapter_that_is_wrong_on_two_ranks_alone_packs_without_context_parallelism() -> None:
    def adapter(model_class: type, config: Any) -> HFCausalLM:
        module = HFCausalLM(model_class, config)
        whole: Any = module.transform

        def transform(hidden: Tensor, given: Any) -> Tensor:
            packing = getattr(given, "packing", given)
            return whole(hidden + hidden.cumsum(0) * (packing.context is not None), given)

        module.transform = transform  # type: ignore[method-assign]
        return module

    verdict = hf_check.verdict_of(adapter, Qwen3ForCausalLM, Qwen3Config(**TINY["qwen3"]))
    assert verdict.packs and not verdict.context_parallel and verdict.errors["context"] > 0.1


def test_results_are_kept_by_class_and_kind_of_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = check_of(Leaking)
    runs: list[type] = []
    monkeypatch.setattr(hf_check, "verdict_of", lambda make, model_class, config: runs.append(model_class) or first)
    assert check_of(Leaking) == first and not runs
    larger = {"hidden_size": 128, "num_hidden_layers": 6, "vocab_size": 1000, "layer_types": ["full_attention"] * 6}
    assert check_of(Leaking, **larger) == first and not runs
    check_of(Leaking, layer_types=["full_attention", *["sliding_attention"] * 3], use_sliding_window=True)
    check_of(LookingAhead)
    monkeypatch.setattr(hf_check, "_versions", lambda: {"transformers": "6"})
    check_of(Leaking)
    assert runs == [Leaking, LookingAhead, Leaking]
    assert [file.suffix for file in folder.iterdir()] == [".json"] * 4


def test_nothing_of_the_process_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.set_default_dtype(torch.float64)
    try:
        states = torch.get_rng_state(), np.random.get_state()[1].copy()
        threads = torch.get_num_threads()
        with torch.device("meta"):
            verdict = check_of(Qwen3ForCausalLM)
            assert torch.empty(1).is_meta
        assert verdict.packs and max(verdict.errors.values()) < 1e-5
        assert torch.get_default_dtype() == torch.float64 and torch.get_num_threads() == threads
        assert torch.equal(states[0], torch.get_rng_state()) and (states[1] == np.random.get_state()[1]).all()
        assert not torch.cuda.is_initialized() and not seeds
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_check_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Verdict({"eager": 1.5}, versions={"transformers": "5.23.0"})
    monkeypatch.setattr(hf_check, "cached", lambda *_: refused)
    with pytest.raises(ModelError, match=r"hf_causal_lm: Qwen2ForCausalLM of transformers 5\.23\.0 .* by 1\.5"):
        hf_causal_lm(model_type="qwen2", **TINY["qwen2"])
    assert hf_causal_lm(model_type="qwen2", check=False, **TINY["qwen2"]).architecture == "Qwen2ForCausalLM"


def test_values_that_a_constructor_draws_follow_the_seed() -> None:
    values = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = MultimodalModel({"llm": hf_causal_lm(model_type="diffllama", check=False, **TINY["diffllama"])}, seed=1)
        values.append(model.state_dict())
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
