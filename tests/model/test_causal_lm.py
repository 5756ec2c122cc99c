from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.causal_lm import CausalLMKind, fill_slots, head_rows_of
from hetero_strategy.model.combine import StepSums
from hetero_strategy.model.inputs import IGNORE
from hetero_strategy.model.token_loss import token_loss
from hetero_strategy.zoo import hf_llama, hf_qwen3, titan_llama
from hetero_strategy.zoo.hf import PreciseRMSNorm
from hetero_strategy.zoo.titan import TitanLlama, _titan
from tests.model.helpers import LLAMA, TITAN, ready, tokens

QWEN = LLAMA | {"head_dim": 6}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
"""In the second layer."""
LENGTHS = [5, 9, 8, 1, 3]


def loss_of(logits, labels):
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def per_sample(model, inputs):
    """Logits of each sample run on its own, end to end."""
    start, outs = 0, []
    for length in inputs.packing.lengths:
        outs.append(model(inputs.ids[None, start : start + length])[0])
        start += length
    return torch.cat(outs)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_windowed", "llama_tied"])
def test_hugging_face_packed_equals_its_own_forward(kind):
    if kind.startswith("qwen3"):
        fields = QWEN | (WINDOW if kind == "qwen3_windowed" else {})
        ours, theirs = hf_qwen3(**fields), Qwen3ForCausalLM(Qwen3Config(**fields))
    else:
        fields = LLAMA | {"tie_word_embeddings": kind == "llama_tied"}
        ours, theirs = hf_llama(**fields), LlamaForCausalLM(LlamaConfig(**fields))
    ours = ready(ours, dtype=torch.float32)
    theirs.load_state_dict(ours.model.state_dict())
    inputs = tokens(LENGTHS)
    out = ours(inputs, {}, keep_logits=True)
    expected = per_sample(lambda ids: theirs(ids).logits, inputs)
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.loss_sum, loss_of(expected, inputs.labels))
    out.loss_sum.backward()
    loss_of(expected, inputs.labels).backward()
    theirs_grads = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs_grads[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_window_costs_what_is_in_it():
    whole, windowed = hf_qwen3(**QWEN), hf_qwen3(**QWEN | WINDOW)
    (_, blocks, _), (_, fewer, _) = (model.part_flops(np.array([9, 2])) for model in (whole, windowed))
    assert (blocks - fewer).tolist() == [0, 4 * 4 * 6 * (45 - 24)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "fails .* Could not find a `sliding_window`"),
        ({**WINDOW, "sliding_window": 0}, "Qwen3Attention has a window of 0 rows, which sees nothing"),
        ({"layer_types": ["chunked_attention"] * 2}, "Qwen3Model: its forward fails .* KeyError 'chunked_attention'"),
    ],
)
def test_layers_whose_attention_would_be_another_are_refused(fields, said):
    with pytest.raises(ModelError, match=said):
        hf_qwen3(**QWEN | fields)


def test_titan_packed_equals_titan_per_sample():
    ours = ready(titan_llama(**TITAN), dtype=torch.float32)
    theirs = _titan().Transformer(ours.args)
    theirs.load_state_dict(ours.model.state_dict())
    inputs = tokens(LENGTHS)
    out = ours(inputs, {}, keep_logits=True)
    expected = per_sample(theirs, inputs)
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-5)
    out.loss_sum.backward()
    loss_of(expected, inputs.labels).backward()
    theirs_grads = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs_grads[name].grad, rtol=1e-4, atol=1e-5, msg=name)
    # Negative control: without boundaries between samples the logits differ.
    merged = ours(tokens([sum(LENGTHS)]), {}, keep_logits=True)
    assert not torch.allclose(merged.logits, out.logits, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: titan_llama(**TITAN), lambda: hf_llama(**LLAMA), lambda: hf_qwen3(**QWEN)])
class TestEveryModel:
    def test_fp64_keeps_fp64(self, make):
        """A model that went through fp32 anywhere would differ between packings by 1e-7."""
        model = ready(make())
        inputs = tokens(LENGTHS)
        together = model(inputs, {}, keep_logits=True).logits
        start = 0
        for length in LENGTHS:
            part = tokens([length])
            alone = model(
                type(part)(inputs.ids[start : start + length], part.labels, part.packing), {}, keep_logits=True
            )
            torch.testing.assert_close(together[start : start + length], alone.logits, rtol=1e-12, atol=1e-13)
            start += length

    def test_slots_take_rows_and_pass_gradients(self, make):
        model = ready(make())
        slots = {"vision": torch.tensor([1, 2, 7])}
        inputs = tokens([6, 5], slots=slots)
        rows = torch.randn(3, model.width, dtype=torch.float64, requires_grad=True)
        out = model(inputs, {"vision": rows})
        (grad,) = torch.autograd.grad(out.loss_sum, rows, retain_graph=True)
        assert (grad.abs().sum(1) > 0).all()
        other = model(inputs, {"vision": rows * 2})
        assert other.loss_sum != out.loss_sum
        ids = inputs.ids.clone()
        ids[slots["vision"]] = 0  # the tokens under the rows do not matter
        same = model(type(inputs)(ids, inputs.labels, inputs.packing, slots=slots), {"vision": rows})
        torch.testing.assert_close(same.loss_sum, out.loss_sum)

    def test_no_rows_at_all(self, make):
        model = ready(make())
        out = model(tokens([], slots={"vision": torch.zeros(0, dtype=torch.long)}), {"vision": torch.zeros(0, 16)})
        assert out.loss_sum == 0
        out.loss_sum.backward()
        assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())

    def test_alignment_rows_change_nothing(self, make):
        model = ready(make())
        plain, aligned = tokens([5, 4]), tokens([5, 4], alignment=3)
        ids, labels = aligned.ids.clone(), aligned.labels.clone()
        ids[:9], labels[:9] = plain.ids, plain.labels
        out = model(type(plain)(ids, labels, aligned.packing), {})
        torch.testing.assert_close(out.loss_sum, model(plain, {}).loss_sum, rtol=1e-12, atol=0)

    def test_flops(self, make):
        model = ready(make(), dtype=torch.float32)
        with FlopCounterMode(display=False) as counter:
            given = tokens([8, 8])
            model(replace(given, labels=given.ids, labelled=None), {})
        head_dim = getattr(getattr(model, "config", None), "head_dim", 4)
        causal = 2 * 36  # pairs of rows in attention, which torch does not count
        expected = counter.get_total_flops() + 4 * 4 * head_dim * 2 * causal
        assert model.flops(np.array([8, 8])) == expected

    def test_precisions_leave_positions_alone(self, make):
        model = ready(make(), dtype=torch.float32)
        expected = model(tokens(LENGTHS), {}).loss_sum
        out = model.to(torch.bfloat16)(tokens(LENGTHS), {}).loss_sum
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0)
        tables = [b for _, b in model.named_buffers()]
        assert tables and all(b.dtype in (torch.float32, torch.complex64) for b in tables)

    def test_tp_faults(self, make):
        model = make()
        assert model.check_tp(2) == []
        assert model.check_tp(4) == ["kv heads 2 not divisible by tp 4; set tp=2"]
        assert any("heads 4" in fault for fault in model.check_tp(3))


@pytest.mark.full_cases("inductor")
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_token_loss(backend):
    for rows in (0, 1, 4, 6):
        logits = (20 * torch.randn(rows, 7)).requires_grad_()
        labels = torch.arange(rows)
        loss, likeliest = token_loss(logits, labels, backend)
        assert likeliest.equal(logits.argmax(-1))
        expected = -torch.log_softmax(logits.double(), -1)[range(rows), labels].sum()
        torch.testing.assert_close(loss, expected.float())
        gradients = [torch.autograd.grad(3 * one, logits)[0] for one in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
        half = logits.detach().bfloat16().requires_grad_()
        halved, _ = token_loss(half, labels, backend)
        halved.backward()
        assert halved.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
        exact, _ = token_loss(logits.double(), labels, backend)
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
    sure = torch.tensor([[100.0, 90.0, -50.0]] * 2, requires_grad=True)  # a large logit rounds none of the loss away
    loss, _ = token_loss(sure, torch.tensor([0, 0]), backend)
    torch.testing.assert_close(float(loss), 2 * math.log1p(math.exp(-10)), rtol=1e-3, atol=0)
    (gradient,) = torch.autograd.grad(loss, sure)
    torch.testing.assert_close(float(gradient[0, 1]), math.exp(-10) / (1 + math.exp(-10)), rtol=1e-3, atol=0)


def test_heads_of_large_vocabularies_have_fewer_rows_at_once():
    assert [head_rows_of(size) for size in (100, 32_000, 128_256, 2**40)] == [8192, 4194, 1046, 1]
    assert titan_llama(**TITAN | {"vocab_size": 2**18}).head_rows == 512


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_only_labelled_rows_reach_the_head_and_never_too_many(rows):
    model = ready(titan_llama(**TITAN), dtype=torch.float64)
    inputs = tokens(LENGTHS)
    labels = inputs.labels.clone()
    labels[::3] = -100
    inputs = replace(inputs, labels=labels, labelled=None)
    full = model(replace(inputs), {}, keep_logits=True).logits
    wanted = loss_of(full, labels)
    wanted_grads = torch.autograd.grad(wanted, list(model.parameters()))
    model.head_rows, seen = rows, []
    model.model.output.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    out = model(inputs, {})
    assert sum(seen) == int((labels != -100).sum()) and max(seen) <= rows
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        model(inputs, {})
    assert not [shape for shape in kept if shape[-1:] == (TITAN["vocab_size"],) and len(shape) == 2]
    torch.testing.assert_close(out.loss_sum, wanted, rtol=1e-12, atol=0)
    assert out.predicted.equal(full[labels != -100].argmax(-1))
    assert out.correct.equal(out.predicted == labels[labels != -100])
    for found, expected in zip(torch.autograd.grad(out.loss_sum, list(model.parameters())), wanted_grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_head_that_draws_numbers_draws_them_again_in_backward(backend):
    model, inputs = ready(titan_llama(**TITAN)), tokens(LENGTHS)
    model.head_rows, model.compiled_by = 3, backend
    model.head = lambda rows: model.model.output(F.dropout(model.model.norm(rows), 0.5))
    weight, labelled = model.model.output.weight, inputs.labels != -100
    torch.manual_seed(3)
    out = model(inputs, {})
    (found,) = torch.autograd.grad(out.loss_sum, [weight])
    torch.manual_seed(3)
    chunks = zip(out.hidden.detach()[labelled].split(3), inputs.labels[labelled].split(3), strict=True)
    wanted = sum(loss_of(model.head(rows), labels) for rows, labels in chunks)
    torch.testing.assert_close(out.loss_sum, wanted)
    torch.testing.assert_close(found, *torch.autograd.grad(wanted, [weight]))


def test_rows_and_slots_must_match():
    hidden = torch.zeros(4, 2)
    slots = {"vision": torch.tensor([0, 2])}
    with pytest.raises(DataError, match="'vision' gives 1 rows for 2 slots"):
        fill_slots(hidden, slots, {"vision": torch.zeros(1, 2)})
    with pytest.raises(DataError, match="0 rows for 2"):
        fill_slots(hidden, slots, {})
    with pytest.raises(DataError, match="audio"):
        fill_slots(hidden, slots, {"vision": torch.zeros(2, 2), "audio": torch.zeros(1, 2)})


def test_before_sees_embedded_rows_before_slots_are_filled():
    seen = []

    def before(hidden, inputs):
        seen.append(hidden.detach().clone())
        return hidden * 0

    model = ready(hf_llama(**LLAMA, before=before))
    inputs = tokens([4], slots={"vision": torch.tensor([1])})
    rows = torch.ones(1, 16, dtype=torch.float64, requires_grad=True)
    model(inputs, {"vision": rows}).loss_sum.backward()
    assert (seen[0] != 0).all() and rows.grad.abs().sum() > 0
    assert (model.model.model.embed_tokens.weight.grad == 0).all()


def test_what_cannot_run_is_refused():
    with pytest.raises(ModelError, match="n_layer'"):
        titan_llama(n_layer=2)
    with pytest.raises(ModelError, match="hidden"):
        hf_qwen3(**QWEN, hidden=3)
    with pytest.raises(ModelError, match="n_kv_heads"):
        titan_llama(**TITAN | {"n_kv_heads": 3})
    with pytest.raises(ModelError, match="dim 12 / n_heads 4 is 3; it must be even"):
        titan_llama(**TITAN | {"dim": 12})
    with pytest.raises(ModelError, match=r"unknown field \['factor'\] of rope_scaling_args: .*scaling_factor"):
        titan_llama(**TITAN, rope_scaling_args={"factor": 8.0})
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .* of this config: KeyError 'gleu'; correct the field"):
        hf_llama(**LLAMA, hidden_act="gleu")
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM: .* AssertionError Padding_idx must be within"):
        hf_qwen3(**QWEN, pad_token_id=40)
    with pytest.raises(DataError, match="65 tokens exceeds the model's maximum 64"):
        ready(titan_llama(**TITAN))(tokens([65]), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_transformers(dtype):
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    ours, rows = PreciseRMSNorm(norm), torch.randn(5, 64, dtype=dtype)
    torch.testing.assert_close(ours(rows), norm(rows), rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_titan_takes_the_rotary_base_wherever_it_is_and_no_dropout(tmp_path):
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def base(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return titan_llama(checkpoint=tmp_path).args.rope_theta

    assert base(rope_parameters={"rope_type": "default"}, rope_theta=7.0) == 7.0
    assert base(rope_parameters={"rope_type": "default", "rope_theta": 9.0}) == 9.0
    with pytest.raises(ModelError, match=r"has attention_dropout=0\.5, .* use hf_llama"):
        base(attention_dropout=0.5)


def test_the_last_token_of_a_sample_predicts_nothing_whatever_sample_lies_behind_it() -> None:
    for lengths, labels in (([2, 0, 3], [1, IGNORE, 3, 4, IGNORE]), ([0], [])):
        rows, text = np.array(lengths), (np.arange(len(labels)), np.ones(len(labels), bool))
        content = SimpleNamespace(text=lambda numbers, text=text: text)
        units: Any = SimpleNamespace(
            content=content, numbers=np.arange(len(rows)), inner_rows=rows, edge_rows=rows, alike=False, slots={}
        )
        assert CausalLMKind().inputs(units).labels.tolist() == labels


def test_metrics_are_of_samples_with_labels_and_the_mean_of_language_models() -> None:
    plan: Any = SimpleNamespace(metadata=SimpleNamespace(labels=np.array([3, 0, 2])), normalizer=lambda name: 5)
    modules: Any = {name: SimpleNamespace(kind=CausalLMKind(), routing=None) for name in ("one", "other")}
    order = ["other", "one"]
    sums = StepSums(modules, order, plan, evaluation=False, device=torch.device("cpu"), dtype=torch.float32)
    sums.totals += torch.tensor([0.0, 5, 2, 0, 0, 0])  # of each its loss, right tokens and right samples
    out = sums.output(torch.zeros(()), {})
    assert (float(out.accuracy), float(out.exact_match)) == (0.5, 0.5)
    assert list(sums.losses) == list(out.metrics) == order
    assert float(out.metrics["other"]["accuracy"]) == 1.0


def with_columns(lengths):
    plain = tokens(lengths)
    axes = torch.stack([plain.packing.positions, plain.packing.positions // 2])
    return replace(plain, columns={"axes": axes, "weight": torch.rand(len(plain.ids))})


def test_columns_go_wherever_the_rows_go():
    whole = with_columns([5, 9, 8])
    two = whole.only(np.array([2, 0]))
    rows = torch.tensor([*range(14, 22), *range(5)])
    assert two.columns.keys() == {"axes", "weight"} and torch.equal(two.columns["axes"], whole.columns["axes"][:, rows])
    assert torch.equal(two.columns["weight"], whole.columns["weight"][rows])
    moved = whole.to("meta")
    assert all(column.is_meta for column in moved.columns.values()) and not whole.columns["axes"].is_meta
    with pytest.raises(DataError, match=r"column 'axes' has shape \[2, 21\] for 22 rows: its last dimension"):
        replace(whole, columns={"axes": whole.columns["axes"][:, :21]})


def test_a_kind_gives_rows_columns_and_alignment_rows_zeros():
    class Kind(CausalLMKind):
        def columns(self, units, tokens, learnt):
            return {
                "twice": torch.from_numpy(2 * tokens.astype(np.int64)).expand(3, -1),
                "half": torch.ones(len(tokens)),
            }

    content = SimpleNamespace(text=lambda numbers: (np.arange(1, 6, dtype=np.int32), np.ones(5, bool)))
    units: Any = SimpleNamespace(
        content=content,
        numbers=np.arange(2),
        inner_rows=np.array([2, 3, 3]),
        edge_rows=np.array([2, 3]),
        alike=False,
        slots={},
    )
    made = Kind().inputs(units)
    assert made.columns["twice"].tolist() == [[2, 4, 6, 8, 10, 0, 0, 0]] * 3
    assert made.columns["half"].tolist() == [1.0] * 5 + [0.0] * 3 and not CausalLMKind().inputs(units).columns


class OneAxis(TitanLlama):
    """Positions from a column instead of the packing's."""

    def transform(self, hidden, inputs):
        return OldForm.transform(self, hidden, replace(inputs.packing, positions=inputs.columns["axes"][1]))


class OldForm(TitanLlama):
    def transform(self, hidden, packing):
        return TitanLlama.transform(self, hidden, SimpleNamespace(packing=packing))


def test_every_stage_reads_columns_and_the_old_form_still_works():
    def loss(llm_class, inputs, stages=False):
        llm = ready(llm_class(titan_llama(**TITAN).args))
        if not stages:
            return llm(inputs).loss_sum
        one, two = (llm.stage([name], first=not at, last=bool(at)) for at, name in enumerate(llm.blocks()))
        return two(inputs, hidden=one(inputs)).loss_sum

    inputs = with_columns([5, 9])
    plain = replace(inputs, columns={"axes": inputs.packing.positions.expand(2, -1)})
    whole = loss(OneAxis, inputs)
    assert torch.equal(loss(OneAxis, inputs, stages=True), whole)
    assert (loss(OneAxis, plain) - whole).abs() > 1e-3
    assert torch.equal(loss(OneAxis, plain), loss(TitanLlama, inputs)) and torch.equal(
        loss(OldForm, inputs), loss(TitanLlama, inputs)
    )
