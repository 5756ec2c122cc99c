"""Routers of transformers' mixtures: counts, the loss on balance, biases, and frozen routers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import ModelError
from hetero_strategy.model import MultimodalModel, SequenceInputs
from hetero_strategy.model.routing import Routing, StepRouting, counting, note_choices, running
from hetero_strategy.testing.families import tiny_family
from hetero_strategy.zoo.hf_causal_lm import HFCausalLM, hf_causal_lm
from hetero_strategy.zoo.hf_experts import make_routing
from tests.model.helpers import HandBatch, ready, tokens
from tests.zoo.families import TINY
from tests.zoo.test_hf_experts import theirs, worst

LENGTHS = (5, 3, 4)
BIASED = (
    *("deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe", "laguna", "minimax_m2", "mimo_v2_flash", "hy_v3"),
    *("afmoe", "lfm2_moe", "exaone_moe", "solar_open"),
)
OTHERS = (
    *("qwen2_moe", "phimoe", "gpt_oss", "deepseek_v2", "olmoe", "granitemoe", "qwen3_next", "granitemoehybrid"),
    *("minimax", "mixtral"),
)
GEMMA = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4}
MORE: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA | {"hidden_size_per_layer_input": 0},
    "lfm2_moe": LFM2 | {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1},
}
"""Fields of families besides those of :func:`tiny_family`."""


def sizes(model_type: str) -> dict[str, Any]:
    return TINY[model_type] if model_type in TINY else {**tiny_family(model_type), **MORE.get(model_type, {})}


def made(model_type: str, **options: Any) -> HFCausalLM:
    return ready(hf_causal_lm(model_type=model_type, check=False, **sizes(model_type), **options))


def labels_of(inputs: SequenceInputs) -> np.ndarray:
    """Labels of each of the three sequences."""
    return np.array([int((part >= 0).sum()) for part in inputs.labels[: sum(LENGTHS)].split(LENGTHS)])


def load_balancing_loss(*given: Any) -> Tensor:
    """transformers' own, in fp64."""
    source = inspect.getsource(modeling_mixtral.load_balancing_loss_func)
    names = dict(vars(modeling_mixtral))
    exec(source.replace("torch.float32", "torch.float64").replace(".float()", ".double()"), names)
    return names["load_balancing_loss_func"](*given)


@pytest.mark.filterwarnings("ignore:.* keep a state from row to row")
@pytest.mark.parametrize("model_type", [
    "qwen3_moe", "deepseek_v3", "gemma4_text",
    *(pytest.param(t, marks=pytest.mark.full) for t in (*OTHERS, *BIASED[1:])),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_transformers(model_type: str) -> None:
    """One microbatch, with alignment rows, which count nowhere; theirs has a sequence in each row of a batch."""
    steps = {"router_bias_step": 0.01} if model_type in BIASED else {}
    ours = made(model_type, balance_loss=0.3, **steps)
    inputs = tokens(LENGTHS, vocab=ours.vocab_size, alignment=2)
    model = MultimodalModel({"llm": ours}, check_packing=False).train()
    out = model(HandBatch([{"llm": inputs}], [{"llm": [0, 1, 2]}], labels_of(inputs)))
    out.loss.backward()
    reference = theirs(ours)
    ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    for row, part in enumerate(inputs.ids[: sum(LENGTHS)].split(LENGTHS)):
        ids[row, : len(part)], mask[row, : len(part)] = part, 1
    found = reference(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    routing = ours.routing
    assert routing is not None
    logits = tuple(each.log() if routing.normalized else each for each in found.router_logits)
    assert routing.normalized == (model_type == "gemma4_text")
    aux = load_balancing_loss(logits, routing.experts, sizes(model_type).get("moe_k", 2), mask)
    token_loss = F.cross_entropy(found.logits[mask.bool()], inputs.labels[: sum(LENGTHS)])
    (token_loss + 0.3 * aux).backward()
    gradients = [
        {n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (ours.model, reference)
    ]
    wanted = (token_loss + 0.3 * aux).detach()
    assert float(out.balance_losses["llm"]) == pytest.approx(float(aux.detach()), rel=1e-7)
    assert float(out.loss.detach()) == pytest.approx(float(wanted), rel=1e-7)
    assert worst(*gradients) < 1e-5  # routers, and layers with a state, compute in fp32
    assert out.expert_rows["llm"].sum(1).tolist() == [2 * sum(LENGTHS)] * len(routing.routers)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma4_text"])
def test_backward_adds_the_gradient_that_autograd_has(model_type: str) -> None:
    """One process differentiates the loss; a pipeline adds its slope."""
    ours = made(model_type, balance_loss=3.0)
    routing, inputs, gradients = ours.routing, tokens(LENGTHS, vocab=ours.vocab_size), []
    assert routing is not None
    for by_autograd in (True, False):
        into = torch.zeros(len(routing.routers), routing.experts, dtype=torch.float64), torch.zeros(())
        step = StepRouting(routing, [12], into)
        with counting(step, 0, np.arange(3), by_autograd=by_autograd) as tally:
            loss = ours(inputs).loss_sum
        assert tally is not None
        if not by_autograd:
            tally.slope = step.slope(0, step.likeliest(0))
        with running(routing, None if by_autograd else tally):
            (loss + step.finish() * by_autograd).backward()
        gradients.append({n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
        ours.zero_grad()
    assert worst(*gradients) < 1e-6


def test_skipped_samples_count_for_nothing() -> None:
    """As if they were not in the batch."""
    ours, found = made("deepseek_v3", balance_loss=0.3), []
    inputs, bad = tokens(LENGTHS, vocab=ours.vocab_size, alignment=2), np.array([False, True, False])
    labels = labels_of(inputs)
    model = MultimodalModel({"llm": ours}, check_packing=False).train()
    for batch in (
        HandBatch([{"llm": inputs.silenced(bad)}], [{"llm": [0, 1, 2]}], labels * ~bad, skipped=bad),
        HandBatch([{"llm": inputs.only(np.flatnonzero(~bad))}], [{"llm": [0, 2]}], labels * ~bad),
    ):
        out = model(batch)
        out.loss.backward()
        gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
        found.append((out.expert_rows["llm"], float(out.balance_losses["llm"]), gradients))
        model.zero_grad()
    (rows, loss, gradients), (wanted_rows, wanted_loss, wanted) = found
    assert torch.equal(rows, wanted_rows) and loss == pytest.approx(wanted_loss, rel=1e-7)
    assert worst(gradients, wanted) < 1e-5  # routers compute in fp32


def test_without_gradients_nothing_is_counted() -> None:
    """As on many ranks, where such a step is an evaluation."""
    ours = made("deepseek_v3", balance_loss=0.3, router_bias_step=0.5)
    model = MultimodalModel({"llm": ours}, check_packing=False).train()
    inputs = tokens(LENGTHS, vocab=ours.vocab_size)
    batch = HandBatch([{"llm": inputs}], [{"llm": [0, 1, 2]}], labels_of(inputs))
    with torch.no_grad():
        out = model(batch)
    assert not out.expert_rows and not out.balance_losses
    assert ours.routing is not None and ours.routing.chosen is None


@pytest.mark.parametrize("model_type", ["deepseek_v3", "ernie4_5_moe", "minimax_m2", "afmoe", "lfm2_moe"])
def test_biases_follow_the_rows_of_all_batches_before_a_step(model_type: str) -> None:
    ours = made(model_type, router_bias_step=0.5).bfloat16()
    routing = ours.routing
    assert routing is not None
    names = {fqn.removeprefix("model.") for fqn in routing.biases}
    assert names <= {*ours.hf_weights().names.values()} and not {*routing.biases} & {
        n for n, _ in ours.named_parameters()
    }
    buffers = {name: buffer for name, buffer in ours.named_buffers() if name in routing.biases}
    assert len(buffers) == len(routing.routers) and {b.dtype for b in buffers.values()} == {torch.float32}
    rows = torch.zeros(len(routing.routers), routing.experts, dtype=torch.int64)
    rows[:, 0] = 3
    optimizer = torch.optim.SGD(ours.parameters(), 0.0)
    note_choices(ours, rows)
    note_choices(ours, rows.flip(1))
    optimizer.step()
    for buffer in buffers.values():
        assert buffer.flatten().tolist() == [-0.5, 0.5, 0.5, -0.5]
    optimizer.step()  # no rows since the last step
    assert all(buffer.flatten().tolist() == [-0.5, 0.5, 0.5, -0.5] for buffer in buffers.values())


def test_frozen_routers_keep_weights_and_biases() -> None:
    model = MultimodalModel(
        {"llm": made("deepseek_v3", router_bias_step=0.5)}, freeze=["llm.router"], check_packing=False
    )
    llm = model.modules_by_name["llm"]
    assert llm.routing is not None
    frozen = {name for name, p in llm.named_parameters() if not p.requires_grad}
    assert frozen == {f"{router}.weight" for router in llm.routing.routers}
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    note_choices(llm, torch.arange(12).view(3, 4))
    optimizer.step()
    assert all(not llm.get_buffer(bias).any() for bias in llm.routing.biases)
    for router in llm.routing.routers:
        llm.get_submodule(router).requires_grad_(True)
    optimizer.step()  # rows of steps in which they were frozen do not count
    assert all(not llm.get_buffer(bias).any() for bias in llm.routing.biases)


def test_a_loaded_checkpoint_drops_rows_of_batches_before(tmp_path: Path) -> None:
    """As of a run that stopped inside a window of accumulation, whose gradients are gone, too."""
    ours = made("deepseek_v3", router_bias_step=0.5)
    state = TrainingState("net", {"llm": ours}, group=None)
    state.save({"state_dict": state.model_tensors()}, tmp_path / "saved")
    note_choices(ours, torch.arange(12).view(3, 4))
    state.load(tmp_path / "saved", [])
    torch.optim.SGD(ours.parameters(), 0.0).step()
    assert ours.routing is not None
    assert all(not ours.get_buffer(bias).any() for bias in ours.routing.biases)


def test_a_layer_that_runs_again_counts_once() -> None:
    """Recompute runs routers a second time."""
    ours = made("qwen3_moe", balance_loss=0.1)
    routing, inputs = ours.routing, tokens(LENGTHS, vocab=ours.vocab_size)
    assert routing is not None
    into = torch.zeros(len(routing.routers), routing.experts), torch.zeros(())
    tally, sums = StepRouting(routing, [12], into).tally(np.arange(3)), []
    for again in (False, True, False):  # the last as if nothing noted that the microbatch has run
        tally.again = again
        with running(routing, tally):
            ours(inputs)
        sums.append((int(tally.rows.sum()), int(tally.likeliest.sum()), float(tally.probabilities.sum())))
    assert sums[0] == sums[1] == (96, 96, pytest.approx(48)) and sums[2] == (192, 192, pytest.approx(96))


@pytest.mark.parametrize(("model_type", "options", "message"), [
    ("qwen3_moe", {"balance_loss": -1.0}, "balance_loss=-1.0; use a number of at least 0"),
    ("llama", {"balance_loss": 0.1}, "balance_loss=0.1, but it has no routers"),
    ("qwen3_moe", {"router_bias_step": 0.1}, "router_bias_step=0.1, but not all of its routers have e_score"),
])  # fmt: skip
def test_wrong_options_are_refused(model_type: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        hf_causal_lm(model_type=model_type, check=False, **sizes(model_type), **options)


@pytest.mark.parametrize("made_by", [("Sigmoid",), ("", "Softmax")])
def test_a_loss_of_routers_without_logits_is_refused(made_by: tuple[str, ...]) -> None:
    model = nn.ModuleDict({f"router{n}": nn.Linear(1, 1) for n in range(len(made_by))})
    routers = dict(zip(model, made_by, strict=True))
    experts: Any = nn.Linear(1, 2, bias=False)
    experts._is_expert_parallel, experts.num_experts = True, 2
    model["experts"] = experts
    with pytest.raises(ModelError, match=r"balance_loss=0.1, but its routers return.*set balance_loss=0"):
        make_routing("Model", model, routers, None, 0.1, 0.0)
    routing = make_routing("Model", model, routers, None, 0.0, 0.0)
    assert routing is not None and not routing.balance and len(routing.routers) == len(made_by)


def test_routers_without_a_block_of_their_own_have_labels_of_their_own() -> None:
    routing = Routing(("blocks.1.a", "blocks.1.b", "blocks.2.a", "last"), 3)
    assert routing.labels(f"blocks.{n}" for n in range(3)) == ["blocks.1.a", "blocks.1.b", 2, "last"]


def test_the_loss_is_on_where_the_config_asks_for_it() -> None:
    for asked, coefficient in ((False, 0.0), (True, 0.001)):
        module = hf_causal_lm(model_type="qwen3_moe", check=False, **TINY["qwen3_moe"], output_router_logits=asked)
        assert module.routing is not None and module.routing.balance == coefficient


def test_a_loss_that_the_config_asks_for_and_is_not_known_warns() -> None:
    """JetMoe's layers have two kinds of routers, and its coefficient another name."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 16, "vocab_size": 64}
    with pytest.warns(UserWarning, match="output_router_logits is true in its config, but its loss of routers is left"):
        module = hf_causal_lm(
            model_type="jetmoe", check=False, **sizes, intermediate_size=32, output_router_logits=True
        )
    assert module.routing is None
