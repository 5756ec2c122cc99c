"""Any decoder of transformers over packed rows, against its own eager forward, one sequence at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from hetero_strategy.errors import ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.parallelize.apply import check
from hetero_strategy.testing.families import tiny_family
from hetero_strategy.zoo import HFCausalLM, hf_causal_lm
from hetero_strategy.zoo.hf_stand_ins import StandIn
from hetero_strategy.zoo.hf_trace import parts_of
from tests.model.helpers import ready, tokens
from tests.zoo.families import TINY

FEW = ("qwen2", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "granite")
"""Biases, soft caps, windows, fused maps, experts, sinks, narrow values, chunks and scales."""
STATES = ("qwen3_next", "qwen3_5_text", "bamba", "lfm2", "mamba", "mamba2")
pytestmark = pytest.mark.filterwarnings("ignore:.* keep a state from row to row")
LENGTHS = [5, 9, 1, 14, 3]


def made(model_type: str, **fields: Any) -> HFCausalLM:
    return ready(hf_causal_lm(model_type=model_type, **TINY[model_type] | fields), dtype=torch.float32).eval()


def theirs(ours: HFCausalLM) -> Any:
    """The same model as transformers runs it."""
    config = type(ours.config)(**ours.config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tied = set(model.all_tied_weights_keys)
    missing, unexpected = model.load_state_dict(ours.model.state_dict(), strict=False)
    assert not unexpected and not set(missing) - tied
    model.tie_weights()
    return model


def two_microbatches() -> list[SequenceInputs]:
    return [tokens(LENGTHS), tokens([4, 11])]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("model_type", FEW + STATES)
def test_packed_rows_are_those_of_each_sequence_alone(model_type: str) -> None:
    """Logits, and gradients of two microbatches."""
    ours = made(model_type)
    reference = theirs(ours)
    for inputs in two_microbatches():
        out = ours(inputs, keep_logits=True)
        lengths = inputs.packing.lengths.tolist()
        alone = [reference(input_ids=ids[None], use_cache=False).logits[0] for ids in inputs.ids.split(lengths)]
        assert error(out.logits, torch.cat(alone)) < 1e-5
        out.loss_sum.backward()
        F.cross_entropy(torch.cat(alone), inputs.labels, reduction="sum").backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for name, parameter in ours.model.named_parameters():
        assert error(parameter.grad, gradients[name]) < 5e-5, name  # decays of states are summed in fp32: 3e-5


@pytest.mark.parametrize("model_type", FEW + STATES[:1])
def test_three_stages_are_the_whole_bit_for_bit(model_type: str) -> None:
    ours = made(model_type)
    for inputs in two_microbatches():
        ours(inputs).loss_sum.backward()
    expected = {name: p.grad.clone() for name, p in ours.named_parameters()}
    ours.zero_grad()
    blocks = list(ours.blocks())
    cut = (blocks[:1], blocks[1:2], blocks[2:])
    stages = [ours.stage(part, first=n == 0, last=n == 2) for n, part in enumerate(cut)]
    for inputs in two_microbatches():
        sent, received = [], [None]
        for stage in stages:
            sent.append(stage(inputs, hidden=received[-1]))
            received.append(sent[-1].detach().requires_grad_() if stage is not stages[-1] else None)
        sent[2].loss_sum.backward()
        sent[1].backward(received[2].grad)
        sent[0].backward(received[1].grad)
    tied = (ours.tied_weight() or ("",))[0]
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, expected[name]) or (
            name == tied and error(parameter.grad, expected[name]) < 1e-6  # two shares, added in another order
        ), name


def test_what_attention_does_is_read_from_one_run_without_values() -> None:
    calls = {name: [call for block in made(name).attention for call in block] for name in FEW}
    assert {call.window for call in calls["gemma3_text"]} == {4, None}
    assert {call.chunk for call in calls["llama4_text"]} == {4, None}
    narrow = calls["deepseek_v3"][0]
    assert (narrow.heads, narrow.key_width, narrow.value_width) == (4, 24, 16)
    assert narrow.flops(np.array([3, 2])) == 2 * 4 * (24 + 16) * (6 + 3)
    assert [name for name in FEW if not made(name).context_parallel] == ["llama4_text"]
    assert next(c for c in calls["llama4_text"] if c.chunk).flops(np.array([9])) == 2 * 4 * 32 * (10 + 10 + 1)


@pytest.mark.parametrize(
    ("model_type", "layers"), [("llama4_text", "chunks of 4 rows"), ("qwen3_next", "layers that keep a state")]
)
def test_layers_that_know_no_rule_refuse_it(model_type: str, layers: str) -> None:
    with pytest.raises(ModelError, match=rf"ForCausalLM: {layers}.* know no rule of attention: leave attend_by out"):
        hf_causal_lm(model_type=model_type, check=False, **TINY[model_type]).attend_by("bidirectional_items")


def test_the_head_calls_parts_alone_where_the_forward_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = made("llama", num_hidden_layers=8)
    rows = torch.randn(3, ours.hidden_width)
    made_modules: list[nn.Module] = []
    init = StandIn.__init__
    with monkeypatch.context() as now:
        now.setattr(
            StandIn, "__init__", lambda self, *args, **more: made_modules.append(self) or init(self, *args, **more)
        )
        logits = ours.head(rows)
        assert len(made_modules) <= 2
        ours.finish = None
        assert torch.equal(ours.head(rows), logits) and len(made_modules) > 8


class Base(nn.Module):
    """A base whose forward ends with one of several operations."""

    def __init__(self, last: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.norm, self.last = nn.ModuleList([nn.Linear(4, 4)]), nn.LayerNorm(4), last

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.layers:
            rows = block(rows)
        return self.last(self.norm(rows))


@pytest.mark.parametrize(
    ("last", "finish"),
    [(lambda rows: rows, ["norm"]), (lambda rows: 2 * rows, None), (lambda rows: rows.mul_(2), None)],
)
def test_what_a_forward_does_to_the_last_rows(last: Callable[[Tensor], Tensor], finish: list[str] | None) -> None:
    with torch.device("meta"):
        assert parts_of(Base(last), "layers", lambda base: base(torch.empty(1, 2, 4))).finish == finish


def test_a_block_that_does_not_run_without_values_is_said_unless_it_asks_for_them() -> None:
    def traced(fail: Callable[[Tensor], Any]) -> None:
        base = Base(lambda rows: rows)
        base.layers[0].register_forward_pre_hook(lambda _, args: fail(args[0]))
        parts_of(base, "layers", lambda base: base(torch.empty(1, 2, 4, device="meta")))

    with torch.device("meta"):
        with warnings.catch_warnings(action="error"):
            traced(lambda rows: rows.nonzero())
            traced(lambda rows: rows.sum().item())
        with pytest.warns(UserWarning, match="Linear: .* without values ends with ZeroDivisionError"):
            traced(lambda rows: 1 // 0)


def test_states_end_with_their_sequence_and_survive_recompute() -> None:
    with pytest.warns(UserWarning, match=r"3 of 4 layers keep a state .* \(linear_attn\).* one sequence at a time"):
        ours = hf_causal_lm(model_type="qwen3_next", **TINY["qwen3_next"])
    ours = ready(ours, dtype=torch.float32).eval()
    assert not ours.context_parallel
    inputs, found = tokens(LENGTHS), []
    for block in (None, *ours.blocks().values()):
        if block is not None:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        ours.zero_grad()
        ours(inputs).loss_sum.backward()
        found.append({name: p.grad.clone() for name, p in ours.named_parameters()})
    assert all(torch.equal(found[0][name], found[-1][name]) for name in found[0])
    # Without boundaries the rows differ.
    one = tokens([sum(LENGTHS)])
    assert (
        error(
            ours(replace(inputs, packing=one.packing), keep_logits=True).logits, ours(inputs, keep_logits=True).logits
        )
        > 0.3
    )


def test_several_shared_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {f"model.layers.{n}.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight" for n in (1, 2)}
    monkeypatch.setattr(Qwen2ForCausalLM, "get_expanded_tied_weights_keys", lambda *_, **__: pairs)
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM shares several weights, .*stages know one"):
        hf_causal_lm(model_type="qwen2", check=False, **TINY["qwen2"])


STAGES_LACK = {
    "zamba2": r"Zamba2MambaDecoderLayer: a block takes other rows \(1\) beside those of the block before it",
    "gemma3n_text": r"Gemma3nTextDecoderLayer: a block keeps something for later blocks \(shared_kv_states\)",
    "mllama": "MllamaCrossAttentionDecoderLayer: 1 of 4 blocks of MllamaTextModel do not run on rows alone, as cross",
    "bloom": "BloomModel has attention, masks or mixers of its own .* take another class",
    "xglm": "XGLMForCausalLM of transformers .*XGLMForCausalLM has attention, masks or mixers of its own",
    "xlstm": "xLSTMForCausalLM of transformers .* a change of one sequence changes rows of other sequences by 0",
}


@pytest.mark.parametrize("model_type", STAGES_LACK)
def test_blocks_that_are_no_stages_of_packed_rows_are_refused(model_type: str) -> None:
    with pytest.raises(ModelError, match=STAGES_LACK[model_type]):
        hf_causal_lm(model_type=model_type, **tiny_family(model_type))


def test_layouts_that_do_not_fit_are_refused_before_processes_start() -> None:
    def fault(model_type: str, **degrees: int) -> str:
        fields = TINY[model_type] | {"num_key_value_heads": 2}
        module = hf_causal_lm(model_type=model_type, check=False, **fields)
        (said,) = check("llm", module, ModuleLayout(ranks=4, **degrees).resolved())
        return said

    assert fault("qwen3", tp=4) == "layout of 'llm': kv heads 2 not divisible by tp 4; set tp=2"
    for model_type, kind in (("qwen3_next", "states"), ("llama4_text", "chunks")):
        assert "cp=2, but HFCausalLM is not made for a part of its rows; set cp=1" in fault(model_type, cp=2), kind


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="transformers has no model_type 'lama'"):
        hf_causal_lm(model_type="lama")
    with pytest.raises(ModelError, match="'t5gemma' is an encoder-decoder"):
        hf_causal_lm(model_type="t5gemma")
    with pytest.raises(ModelError, match="transformers has no causal language model of model_type 'clip'"):
        hf_causal_lm(model_type="clip")
    config = {"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has auto_map: code from a folder is not run"):
        hf_causal_lm(checkpoint=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {}}))
    with pytest.raises(ModelError, match="of a composite, 'llava'; hf_composite reads it"):
        hf_causal_lm(checkpoint=tmp_path)
