from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_strategy.errors import ModelError
from hetero_strategy.model import (
    MultimodalModel,
    SequenceInputs,
    hf_llama,
    siglip2_encoder,
    titan_llama,
    whisper_encoder,
)
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, HandBatch, clips, images, tokens


def vision():
    return siglip2_encoder(out_width=16, merge=2, **VIT)


def audio():
    return whisper_encoder(out_width=16, stack=2, **WHISPER)


def model_of(modules=None, **options):
    model = MultimodalModel(modules or {"vision": vision(), "audio": audio(), "llm": titan_llama(**TITAN)}, **options)
    return model.double()


def batch():
    """Four samples in two microbatches. Microbatch 0: samples 0 and 2, two images, one clip. Microbatch 1: samples 3
    and 1, text only. Images lie in the order (of sample 2, of sample 0), unlike the slots."""
    picture = images([(2, 4), (4, 4)], merge=2)  # 2 rows, 4 rows
    clip = clips([7], stack=2)  # 4 -> 2 rows
    slots = {"vision": torch.tensor([1, 2, 3, 4, 9, 10]), "audio": torch.tensor([12, 13])}
    first = tokens([8, 9], slots=slots, seed=1)
    second = tokens([5, 6], slots={name: torch.zeros(0, dtype=torch.long) for name in slots}, seed=2)
    counts = np.zeros(4, dtype=np.int64)
    for inputs, units in ((first, [0, 2]), (second, [3, 1])):
        for unit, part in zip(units, inputs.labels.split(inputs.packing.lengths.tolist()), strict=True):
            counts[unit] = int((part != -100).sum())
    return HandBatch(
        inputs=[{"vision": picture, "audio": clip, "llm": first}, {"llm": second}],
        units=[{"vision": [1, 0], "audio": [0], "llm": [0, 2]}, {"vision": [], "audio": [], "llm": [3, 1]}],
        labels=counts,
        order={(0, "vision", "llm"): torch.tensor([2, 3, 4, 5, 0, 1])},
    )


def by_hand(model, data, consumer="llm"):
    """The same loss written again: one sample at a time, rows put in with a Python loop."""
    total, predicted = torch.zeros((), dtype=torch.float64), {}
    for mb, inputs in enumerate(data.inputs):
        given = inputs[consumer]
        rows = {}
        for name in ("vision", "audio"):
            if name in inputs:
                rows[name] = getattr(model, name)(inputs[name])
                if (order := data.order.get((mb, name, consumer))) is not None:
                    rows[name] = rows[name][order]
        llm = getattr(model, consumer)
        start = 0
        for unit, length in zip(data.units[mb][consumer], given.packing.lengths, strict=True):
            hidden = list(llm.embed(given.ids[start : start + length]))
            for name, made in rows.items():
                for place, row in zip(given.slots[name].tolist(), made, strict=True):
                    if start <= place < start + length:
                        hidden[place - start] = row
            alone = tokens([length])
            logits = llm.head(llm.transform(torch.stack(hidden), alone.packing))
            labels = given.labels[start : start + length]
            total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            predicted[unit] = logits.argmax(-1)[labels != -100], labels[labels != -100]
            start += length
    return total / data.labels.sum(), predicted


def test_loss_gradients_and_metrics_equal_one_sample_at_a_time():
    model, data = model_of(), batch()
    out = model(data)
    expected, predicted = by_hand(model, data)
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=0)
    assert out.loss.dtype == torch.float64 and out.loss_tokens == data.labels.sum()
    grads = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad])
    wanted = torch.autograd.grad(expected, [p for p in model.parameters() if p.requires_grad])
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-12)
    assert out.predictions is None
    right = sum(int((a == b).sum()) for a, b in predicted.values())
    assert out.accuracy.item() == pytest.approx(right / data.labels.sum())

    out = model.eval()(data, keep_logits=True)
    for unit in range(4):
        run = out.predictions.values[out.predictions.offsets[unit] : out.predictions.offsets[unit + 1]]
        assert torch.equal(run, predicted[unit][0])
    assert [part.shape for part in out.logits] == [(17, 40), (11, 40)]


def test_the_row_order_matters():
    model, data = model_of(), batch()
    loss = model(data).loss
    data.order = {}
    assert abs(model(data).loss - loss) > 1e-6


def test_exact_match_counts_samples_whose_every_label_is_right():
    model, data = model_of(), batch()
    for mb, wrong in ((0, None), (1, 0)):  # all right, except one label of sample 3
        given = data.inputs[mb]["llm"]
        labels = given.labels.clone()
        order = {key: rows for key, rows in data.order.items() if key[0] == mb}
        single = HandBatch([data.inputs[mb]], [data.units[mb]], data.labels, order)
        with torch.no_grad():
            best = torch.cat([part.argmax(-1) for part in model(single, keep_logits=True).logits])
        marked = labels != -100
        labels[marked] = best[marked]
        if wrong is not None:
            place = int(marked.nonzero()[wrong])
            labels[place] = (labels[place] + 1) % 40
        data.inputs[mb]["llm"] = SequenceInputs(given.ids, labels, given.packing, given.slots)
    out = model(data)
    assert out.exact_match.item() == pytest.approx(3 / 4)
    assert out.accuracy.item() == pytest.approx(1 - 1 / data.labels.sum())
    data.labels[3] += 1  # a label the sample never showed: it cannot match
    assert model.eval().training is False


def test_text_only_batches_leave_encoders_without_gradient():
    model, data = model_of(), batch()
    text = HandBatch(data.inputs[1:], data.units[1:], data.labels * np.array([0, 1, 0, 1]))
    model(text).loss.backward()
    assert all(p.grad is None for p in [*model.vision.parameters(), *model.audio.parameters()])
    assert all(p.grad is not None for p in model.llm.parameters())


def test_no_labels_is_a_zero_loss_with_a_graph():
    model, data = model_of(), batch()
    for inputs in data.inputs:
        given = inputs["llm"]
        inputs["llm"] = SequenceInputs(given.ids, torch.full_like(given.labels, -100), given.packing, given.slots)
    data.labels = np.zeros(4, dtype=np.int64)
    out = model(data)
    out.loss.backward()
    assert out.loss == 0 and out.exact_match == 0 and out.accuracy == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.requires_grad)
    assert len(model.eval()(data).predictions.values) == 0


def test_freezing_modules_and_parts():
    model = model_of(freeze=["vision.backbone", "llm"])
    model(batch()).loss.backward()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.startswith(("vision.backbone.", "llm.", "audio.backbone.model.embed_positions")) for name in frozen)
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen
    assert any(name.startswith("vision.projector.") for name, p in model.named_parameters() if p.requires_grad)
    with pytest.raises(ModelError, match=r"freeze='vison' is no part"):
        model_of(freeze=["vison"])


def test_two_consumers_of_one_encoder():
    modules = {"vision": vision(), "llm": titan_llama(**TITAN), "caption": hf_llama(**LLAMA)}
    model = model_of(modules, edges=[("vision", "llm"), ("vision", "caption")])
    assert model.topological()[0] == "vision" and model.consumers() == ("llm", "caption")
    data = batch()
    data.inputs[0].pop("audio")
    for mb, inputs in enumerate(data.inputs):
        given = inputs["llm"]
        slots = {"vision": given.slots["vision"]}
        inputs["llm"] = SequenceInputs(given.ids, given.labels, given.packing, slots)
        inputs["caption"] = SequenceInputs(given.ids.flip(0), given.labels, given.packing, slots)
        data.units[mb]["caption"] = data.units[mb]["llm"]
    data.order[0, "vision", "caption"] = data.order[0, "vision", "llm"]
    out = model(data)
    parts = {name: by_hand(model, data, name)[0] for name in ("llm", "caption")}
    torch.testing.assert_close(out.loss, parts["llm"] + parts["caption"], rtol=1e-12, atol=0)
    torch.testing.assert_close(out.losses, parts, rtol=1e-12, atol=0)
    weight = model.vision.projector.up.weight
    both, *single = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (out.loss, *parts.values())]
    torch.testing.assert_close(both, single[0] + single[1], rtol=1e-9, atol=1e-12)
    assert all(part.abs().sum() > 0 for part in single)


def test_a_runner_takes_over():
    model, data = model_of(), batch()
    model.attach(lambda given: ("ran", given))
    assert model(data) == ("ran", data)
    model.detach()
    assert model(data).loss > 0


def test_graphs_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match="source rows have width 8, the target takes 16"):
        MultimodalModel({"vision": siglip2_encoder(out_width=8, **VIT), "llm": hf_llama(**LLAMA)})
    with pytest.raises(ModelError, match="no module 'lln'"):
        MultimodalModel({"vision": vision(), "llm": hf_llama(**LLAMA)}, [("vision", "lln")])
    with pytest.raises(ModelError, match=r"\['audio'\] feed nothing"):
        MultimodalModel({"vision": vision(), "audio": audio(), "llm": hf_llama(**LLAMA)}, [("vision", "llm")])
    with pytest.raises(ModelError, match="say edges"):
        MultimodalModel({"a": hf_llama(**LLAMA), "b": hf_llama(**LLAMA)})
    with pytest.raises(ModelError, match="from an Encoder to a CausalLM"):
        MultimodalModel({"vision": vision(), "llm": hf_llama(**LLAMA)}, [("llm", "vision")])
    with pytest.raises(ModelError, match="nothing has a loss"):
        MultimodalModel({"vision": vision()})
    with pytest.raises(ModelError, match="wrap it"):
        MultimodalModel({"llm": torch.nn.Linear(2, 2)})
    with pytest.raises(ModelError, match="'forward' is taken"):
        MultimodalModel({"forward": hf_llama(**LLAMA)})


def test_recompute_gives_the_same_gradients():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, data = model_of(), batch()
    recomputed = copy.deepcopy(model)
    for adapter in recomputed.modules_by_name.values():
        for fqn, block in adapter.blocks().items():
            parent, _, name = fqn.rpartition(".")
            adapter.get_submodule(parent)._modules[name] = checkpoint_wrapper(block)
    for m in (model, recomputed):
        m(data).loss.backward()
    for (name, a), b in zip(model.named_parameters(), recomputed.parameters(), strict=True):
        if a.requires_grad:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0, msg=name)
