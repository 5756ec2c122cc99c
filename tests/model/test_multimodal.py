from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ModelError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.metadata import step_metadata
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model import MultimodalModel, SequenceInputs
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.zoo import flow_decoder, hf_llama, siglip2_encoder, titan_llama, whisper_encoder
from recipes.digits import write_digits_draw
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, HandBatch, clips, images, ready, tokens
from tests.small_models import draw_processors, kinds_of


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
        given=[{"vision": picture, "audio": clip, "llm": first}, {"llm": second}],
        units=[{"vision": [1, 0], "audio": [0], "llm": [0, 2]}, {"vision": [], "audio": [], "llm": [3, 1]}],
        labels=counts,
        order={(0, "vision", "llm"): torch.tensor([2, 3, 4, 5, 0, 1])},
    )


def by_hand(model, data, language_model="llm"):
    """The same loss written again: one sample at a time, rows put in with a Python loop."""
    total, predicted = torch.zeros((), dtype=torch.float64), {}
    for mb, inputs in enumerate(data.given):
        given = inputs[language_model]
        rows = {}
        for name in ("vision", "audio"):
            if name in inputs:
                rows[name] = getattr(model, name)(inputs[name])
                if (order := data.order.get((mb, name, language_model))) is not None:
                    rows[name] = rows[name][order]
        llm = getattr(model, language_model)
        start = 0
        for unit, length in zip(data.units[mb][language_model], given.packing.lengths, strict=True):
            hidden = list(llm.embed(given.ids[start : start + length]))
            for name, made in rows.items():
                for place, row in zip(given.slots[name].tolist(), made, strict=True):
                    if start <= place < start + length:
                        hidden[place - start] = row
            alone = tokens([length])
            logits = llm.head(llm.transform(torch.stack(hidden), alone))
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
        given = data.given[mb]["llm"]
        labels = given.labels.clone()
        order = {key: rows for key, rows in data.order.items() if key[0] == mb}
        single = HandBatch([data.given[mb]], [data.units[mb]], data.labels, order)
        with torch.no_grad():
            best = torch.cat([part.argmax(-1) for part in model(single, keep_logits=True).logits])
        marked = labels != -100
        labels[marked] = best[marked]
        if wrong is not None:
            place = int(marked.nonzero()[wrong])
            labels[place] = (labels[place] + 1) % 40
        data.given[mb]["llm"] = SequenceInputs(given.ids, labels, given.packing, slots=given.slots)
    out = model(data)
    assert out.exact_match.item() == pytest.approx(3 / 4)
    assert out.accuracy.item() == pytest.approx(1 - 1 / data.labels.sum())
    data.labels[3] += 1  # a label the sample never showed: it cannot match
    assert model.eval().training is False


def test_text_only_batches_leave_encoders_without_gradient():
    model, data = model_of(), batch()
    text = HandBatch(data.given[1:], data.units[1:], data.labels * np.array([0, 1, 0, 1]))
    model(text).loss.backward()
    assert all(p.grad is None for p in [*model.vision.parameters(), *model.audio.parameters()])
    assert all(p.grad is not None for p in model.llm.parameters())


def test_no_labels_is_a_zero_loss_with_a_graph():
    model, data = model_of(), batch()
    for inputs in data.given:
        given = inputs["llm"]
        inputs["llm"] = SequenceInputs(given.ids, torch.full_like(given.labels, -100), given.packing, slots=given.slots)
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
    with pytest.raises(ModelError, match=r"freeze='vision' is one string; give a list, \['vision'\]"):
        model_of(freeze="vision")


def test_two_consumers_of_one_encoder():
    modules = {"vision": vision(), "llm": titan_llama(**TITAN), "caption": hf_llama(**LLAMA)}
    model = model_of(modules, edges=[("vision", "llm"), ("vision", "caption")])
    assert model.topological()[0] == "vision" and model.language_models() == ("llm", "caption")
    data = batch()
    data.given[0].pop("audio")
    for mb, inputs in enumerate(data.given):
        given = inputs["llm"]
        slots = {"vision": given.slots["vision"]}
        inputs["llm"] = SequenceInputs(given.ids, given.labels, given.packing, slots=slots)
        inputs["caption"] = SequenceInputs(given.ids.flip(0), given.labels, given.packing, slots=slots)
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
    model.attach(lambda given, **_: SimpleNamespace(ran=given, expert_rows={}))
    assert model(data).ran is data
    model.detach()
    assert model(data).loss > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": None}, r"freeze=None; give a list, \['vision.backbone'\]"),
        ({"edges": ["vision"]}, r"edges=\['vision'\]; give pairs of modules"),
        ({"edges": [("vision",)]}, r"edges=\[\('vision',\)\]; give pairs of modules"),
        ({"loss_weights": ["llm"]}, r"loss_weights=\['llm'\]; give a number by module, such as \{'llm': 1.0\}"),
        ({"loss_weights": {"llm": "1"}}, "the weight of 'llm' is '1': use a number of at least 0"),
        ({"loss_weights": {"llm": float("inf")}}, "the weight of 'llm' is inf: use a number of at least 0"),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        MultimodalModel({"vision": vision(), "llm": hf_llama(**LLAMA)}, **options)


def test_graphs_that_do_not_fit_are_refused():
    with pytest.raises(
        ModelError, match=r"have width 8, the target takes 16: set out_width=16 for vision, or Projector\(\.\.\., 16\)"
    ):
        MultimodalModel({"vision": siglip2_encoder(out_width=8, **VIT), "llm": hf_llama(**LLAMA)})
    with pytest.raises(ModelError, match="no module 'lln'"):
        MultimodalModel({"vision": vision(), "llm": hf_llama(**LLAMA)}, [("vision", "lln")])
    with pytest.raises(ModelError, match="Encoder 'audio' feeds nothing"):
        MultimodalModel({"vision": vision(), "audio": audio(), "llm": hf_llama(**LLAMA)}, [("vision", "llm")])
    with pytest.raises(ModelError, match="say edges"):
        MultimodalModel({"a": hf_llama(**LLAMA), "b": hf_llama(**LLAMA)})
    with pytest.raises(
        ModelError,
        match="leads from a CausalLM to a Encoder",
    ):
        MultimodalModel({"vision": vision(), "llm": hf_llama(**LLAMA)}, [("llm", "vision")])
    with pytest.raises(ModelError, match="nothing has a loss"):
        MultimodalModel({"vision": vision()})
    with pytest.raises(ModelError, match="wrap it"):
        MultimodalModel({"llm": torch.nn.Linear(2, 2)})
    with pytest.raises(ModelError, match="'forward' is taken"):
        MultimodalModel({"forward": hf_llama(**LLAMA)})


class _Counting(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_a_part_with_a_state_that_no_checkpoint_would_hold_is_refused():
    module = vision()
    module.projector.counted = _Counting(2, 2, device="meta")
    with pytest.raises(ModelError, match=r"module 'vision': projector.counted \(_Counting\) has a state of its own"):
        MultimodalModel({"vision": module, "llm": hf_llama(**LLAMA)})


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


# ---- a generator behind the language model, and microbatches of its own ---------------------------------------------

DRAWN = {"width": 16, "patch_size": 2, "channels": 1, "dim": 8, "n_layers": 2, "n_heads": 2, "sample_steps": 2}


@pytest.fixture(scope="module")
def drawings(tmp_path_factory):
    folder = write_digits_draw(tmp_path_factory.mktemp("data") / "drawings", train=24, val=4, seed=1, progress=False)
    return build_index(folder / "train.json", ChatTokenizer(folder), draw_processors(), progress=False)


def drawing_batch(index, **options):
    options = {"global_batch_size": 12, "microbatches": 3, **options}
    edges, modules = (("vision", "llm"), ("llm", "draw")), ("vision", "llm", "draw")
    kinds = kinds_of(modules)
    return StepDataset(index, draw_processors(), edges, RankView.whole(modules), kinds=kinds, **options)[1, 0]


def drawing_model(**options):
    vit = {**VIT, "patch_size": 8, "num_channels": 1}
    modules = {
        "draw": flow_decoder(**DRAWN),
        "vision": siglip2_encoder(out_width=16, merge=2, **vit),
        "llm": titan_llama(**{**TITAN, "vocab_size": 110}),
    }
    model = MultimodalModel(modules, **options)
    for adapter in model.modules_by_name.values():
        ready(adapter)
    return model.double()


def grads(model, loss):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(
        zip(
            trained,
            torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True),
            strict=True,
        )
    )


def test_a_generator_learns_from_the_language_models_rows(drawings):
    model, data = drawing_model(loss_weights={"draw": 0.3}), drawing_batch(drawings)
    assert model.topological() == ("vision", "llm", "draw") and model.with_loss() == ("llm", "draw")
    assert [(edge.source, edge.target) for edge in model.edges] == [("vision", "llm"), ("llm", "draw")]
    assert model.language_models() == ("llm",)
    out = model(data)
    torch.testing.assert_close(out.loss, out.losses["llm"] + out.losses["draw"], rtol=1e-12, atol=0)

    # Written again: one sample at a time, rows found by their placeholder tokens.
    drawn = data.plan.metadata.items["draw"]
    total, seen = torch.zeros((), dtype=torch.float64), 0
    for t, sequence in enumerate(data.inputs["llm"]):
        given, pictures = data.inputs["draw"][t], data.inputs["vision"][t]
        rows = {("vision", t): model.vision(pictures)} if pictures is not None else {}
        order = data.local_rows("vision", t, "llm", t)
        assert order is None
        hidden = model.llm(sequence, rows).hidden
        if given is None:
            continue
        marked = hidden[sequence.ids == drawings_mark(drawings)]
        total = total + model.draw(given, {("llm", t): marked}).loss_sum
        seen += len(given.rows)
    assert seen == len(drawn.edge_rows) > 3
    torch.testing.assert_close(out.losses["draw"], 0.3 * total / int(drawn.targets.sum()), rtol=1e-12, atol=0)

    only = grads(model, out.losses["draw"])
    upstream = [name for name in only if name.startswith(("vision.", "llm.")) and "norm.weight" not in name]
    assert any(only[name].abs().max() > 0 for name in upstream if name.startswith("vision."))
    assert all(only[name].abs().max() > 0 for name in only if name.startswith(("llm.model.layers", "draw.")))
    assert only["llm.model.output.weight"].abs().max() == 0  # the rows lie before the head


def drawings_mark(index):
    """Token that fills the rows of a drawing: the one at an item's start."""
    table = index.items["draw"]
    return int(index.ids[index.offsets[table.sample[0]] + table.start[0]])


@pytest.mark.parametrize(
    "own", [{"vision": 1000}, {"vision": 10}, {"draw": 1000}, {"draw": 20}, {"vision": 1000, "draw": 20}, {"draw": 1}]
)
def test_microbatches_of_their_own_change_nothing(drawings, own):
    model = drawing_model()
    expected, found = (drawing_batch(drawings, microbatch_rows=tokens) for tokens in ({}, own))
    counts = {name: len(found.plan.assignments[name]) for name in own}
    assert all((count < 3) == (own[name] == 1000) for name, count in counts.items())
    a, b = model(expected), model(found)
    for name in a.losses:
        torch.testing.assert_close(a.losses[name], b.losses[name], rtol=1e-12, atol=0)
    mine = grads(model, b.loss)
    for name, grad in grads(model, a.loss).items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-9, atol=1e-13, msg=name)
    drawn = [model.eval()(data).drawn["draw"] for data in (expected, found)]
    torch.testing.assert_close(*drawn, rtol=1e-10, atol=1e-12)
    assert drawn[0].shape == (int(expected.plan.metadata.items["draw"].targets.sum()) // 4, 4)


def test_damaged_routes_are_seen(drawings):
    """The negative control: rows of one drawing given to another change loss and drawings."""
    model, data = drawing_model(), drawing_batch(drawings, microbatch_rows={"draw": 1000})
    expected = model(data).losses["draw"]
    slots = data.inputs["draw"][0].slots
    key = next(key for key in slots if len(slots[key]) > 2)  # an item has two rows
    slots[key] = slots[key].roll(2)
    assert abs(model(data).losses["draw"] - expected) > 1e-8


def test_a_batch_without_drawings(drawings):
    samples = np.setdiff1d(np.arange(len(drawings)), drawings.items["draw"].sample)[:2]
    assert len(samples) == 2
    model, metadata = drawing_model(), step_metadata(drawings, 0, 0, samples, draw_processors())
    inputs = tokens(metadata.tokens.tolist(), vocab=110)
    counts = [int((part != -100).sum()) for part in inputs.labels.split(metadata.tokens.tolist())]
    metadata = dataclasses.replace(metadata, labels=np.array(counts))
    plan = plan_step(metadata, {"vision": 1, "llm": 1, "draw": 1}, ("llm",))
    data = Batch(plan, {"vision": (None,), "llm": (inputs,), "draw": (None,)})
    out = model(data)
    assert out.losses["draw"] == 0 and plan.normalizer("draw") == 1
    out.losses["draw"].backward()  # of nothing, which is no error
    assert all(p.grad is None for p in model.parameters())
    assert model.eval()(data).drawn is None


def test_generators_that_do_not_fit_are_refused():
    def refused(message, modules=None, **options):
        made = {"llm": titan_llama(**TITAN), "draw": flow_decoder(**DRAWN), **(modules or {})}
        with pytest.raises(ModelError, match=message):
            MultimodalModel(made, **options)

    refused(
        "llm -> draw: source rows have width 16, the target takes 8: set width=16 for draw",
        {"draw": flow_decoder(**{**DRAWN, "width": 8})},
    )
    refused("'draw' is fed by 0 modules", edges=[])
    refused("'draw' is fed by 2 modules", {"two": titan_llama(**TITAN)}, edges=[("llm", "draw"), ("two", "draw")])
    refused("from a Encoder to a Generator", {"vision": vision()}, edges=[("vision", "draw")])
    refused("from a Generator to a CausalLM", edges=[("draw", "llm")])
    refused("loss_weights: 'drew' has no loss: modules with a loss are llm, draw", loss_weights={"drew": 1})
    refused("the weight of 'draw' is -1", loss_weights={"draw": -1})
