"""Packed rows equal those of each unit alone, and what breaks that is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model import CausalLM, Encoder, EncoderInputs, ModuleInputs, MultimodalModel, Projector
from hetero_strategy.model.packed_alone import Pair, check_packed_alone, due
from hetero_strategy.zoo import flow_decoder, hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, HandBatch, clips, images, ready, tokens
from tests.model.test_generator import FLOW, items

CPU = torch.device("cpu")


class Rows(nn.Module):
    """A backbone of one layer, on whose rows ``mix`` works."""

    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.mix = nn.Linear(12, 32), mix()

    def forward(self, inputs: EncoderInputs) -> Tensor:
        rows = self.up(inputs.values.to(self.up.weight.dtype))
        return rows + self.mix(rows)


class Convolution(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(32, 32, 3, padding=1)

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.T[None])[0].T if len(rows) else rows


class Noise(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.rand_like(rows)


class Language(CausalLM):
    """Attention without a head, and positions; either may be of all packed rows."""

    block_list, max_length = "layers", 512

    def __init__(self, attends: bool = False, counts: bool = False, width: int = 16, vocabulary: int = 40) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.layers, self.output = nn.ModuleList([nn.Linear(width, width)]), nn.Linear(width, vocabulary)
        self.width = self.hidden_width = width
        self.attends, self.counts = attends, counts

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    def transform(self, hidden: Tensor, packing: Any) -> Tensor:
        hidden = hidden + self.places(torch.arange(len(hidden)) if self.counts else packing.positions)
        parts = [hidden] if self.attends else hidden.split(packing.lengths.tolist())
        seen = [nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True) for x in map(self.layers[0], parts)]
        return hidden + torch.cat(seen)

    def head(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)


def encoder(mix: Callable[[], nn.Module]) -> Encoder:
    return Encoder(lambda: Rows(mix), Projector(32, 16))


def pictures() -> EncoderInputs:
    return images([(4, 4), (2, 3), (5, 3), (2, 2)])


def batch(**inputs: Any) -> HandBatch:
    units = {name: list(range(len(given.packing.lengths))) for name, given in inputs.items()}
    text = inputs.get("llm", tokens([1]))
    counts = [int((part >= 0).sum()) for part in text.labels.split(text.packing.lengths.tolist())]
    return HandBatch([inputs], [units], np.array(counts))


def model_of(vision: Encoder, llm: Any = None, **options: Any) -> MultimodalModel:
    model = MultimodalModel({"vision": vision, "llm": llm or hf_llama(**LLAMA)}, [("vision", "llm")], **options)
    ready(model)
    return model


def data() -> HandBatch:
    seen = pictures()
    slots = torch.arange(int(seen.rows.sum()))
    return batch(vision=seen, llm=tokens([30, 12, 9, 17], slots={"vision": slots}))


@pytest.mark.parametrize(
    ("vision", "llm", "message"),
    [
        (encoder(Convolution), None, r"module 'vision': two items, of 6 and 4 rows, .* a row differs by 0\.\d+ of its s"
         r"ize, above 1.5e-08 \(float64\)"),
        (encoder(lambda: nn.BatchNorm1d(32)), None, "module 'vision': two items"),
        (encoder(nn.Identity), Language(attends=True), r"module 'llm': two samples, of 12 and 9 rows, .* without pack"),
        (encoder(nn.Identity), Language(counts=True), r"module 'llm': .*packing.positions.*check_packing=False"),
    ],
)  # fmt: skip
def test_what_is_seen_across_units_is_refused_by_name(vision: Encoder, llm: Any, message: str) -> None:
    model = model_of(vision, llm)
    before = {name: buffer.clone() for name, buffer in model.vision.named_buffers()}
    with pytest.raises(ModelError, match=message):
        model(data())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.vision.named_buffers())
    assert torch.isfinite(model_of(encoder(Convolution), llm, check_packing=False)(data()).loss)


@pytest.mark.parametrize("mix", [nn.Identity, lambda: nn.Dropout(0.5), Noise])
def test_nothing_changes_bit_by_bit(mix: Callable[[], nn.Module]) -> None:
    """Loss, gradients, random state and modes of a module that drops out, or draws in evaluation too."""
    found = []
    for check in (True, False):
        model = model_of(encoder(mix), hf_llama(**LLAMA, attention_dropout=0.3), check_packing=check)
        model.vision.backbone.up.eval()
        torch.manual_seed(3)
        out = model(data())
        out.loss.backward()
        assert all(module.packed_equals_alone for module in model.modules_by_name.values())
        assert model.training and not model.vision.backbone.up.training and model.vision.backbone.mix.training
        found.append([torch.get_rng_state(), out.loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


ZOO: dict[str, tuple[Callable[[], Any], Callable[[], ModuleInputs]]] = {
    "siglip2": (lambda: siglip2_encoder(out_width=16, merge=2, **VIT), lambda: images([(4, 4), (2, 6), (8, 4)], 2)),
    "whisper": (lambda: whisper_encoder(out_width=16, stack=2, **WHISPER), lambda: clips([9, 16, 21], stack=2)),
    "titan": (lambda: titan_llama(**TITAN), lambda: tokens([30, 12, 17])),
    "hf_llama": (lambda: hf_llama(**LLAMA), lambda: tokens([30, 12, 17])),
    "hf_qwen3": (lambda: hf_qwen3(**LLAMA), lambda: tokens([30, 12, 17])),
    "flow": (lambda: flow_decoder(**FLOW), lambda: items([(4, 4), (2, 3), (4, 2)], [2, 3, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_ready_modules_pass_in_every_precision(name: str) -> None:
    make, inputs = ZOO[name]
    for dtype, low in (
        (torch.float64, 0),
        (torch.float32, 0),
        (torch.float32, 1),
        (torch.bfloat16, 0),
        (torch.half, 0),
    ):
        module = ready(make(), dtype=dtype, name=name)
        others = {"llm": ready(hf_llama(**LLAMA), dtype=dtype, name="llm")} if not isinstance(module, CausalLM) else {}
        MultimodalModel({name: module, **others}, [(name, "llm")] * bool(others and name != "flow") or None)
        given = inputs()
        pair = Pair.of(module, batch(**{name: given}).plan, 0, [])
        if name == "flow":
            pair = pair._replace(runs={"llm": Runs(given.rows)})
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(low)):
            check_packed_alone(module, given, pair, name, CPU)


class Runs:
    """Each item is given its first rows."""

    def __init__(self, rows: np.ndarray) -> None:
        self.target, self.rows = np.arange(len(rows)), rows
        self.target_start = np.zeros_like(rows)


def test_a_mean_in_place_of_a_sum_is_refused() -> None:
    class Mean(type(flow_decoder(**FLOW))):  # type: ignore[misc]
        def loss(self, hidden: Tensor, inputs: Any) -> Tensor:
            return super().loss(hidden, inputs) / max(1, len(inputs.values))

    draw, given = ready(flow_decoder(**FLOW), name="draw"), items([(4, 4), (2, 3), (4, 2)], [2, 3, 1])
    draw.__class__ = Mean
    MultimodalModel({"draw": draw, "llm": hf_llama(**LLAMA)})
    pair = Pair.of(draw, batch(draw=given).plan, 0, [])._replace(runs={"llm": Runs(given.rows)})
    with pytest.raises(ModelError, match="the loss differs from the sum of both by"):
        check_packed_alone(draw, given, pair, "module 'draw'", CPU)


def test_it_comes_with_the_first_two_units_and_only_once() -> None:
    model, whole = model_of(encoder(Convolution)), data()
    one = batch(vision=images([(4, 4)]), llm=tokens([30], slots={"vision": torch.arange(16)}))
    assert due(model.vision, one.plan) is None and due(model.vision, whole.plan) == 0
    assert torch.isfinite(model(one).loss) and not model.vision.packed_equals_alone
    with pytest.raises(ModelError, match="two items"), torch.no_grad():
        model.eval()(whole)
    model.vision.packed_equals_alone = True
    assert due(model.vision, whole.plan) is None and torch.isfinite(model(whole).loss)


@pytest.mark.parametrize("inputs", [pictures(), items([(4, 4), (2, 3), (4, 2)], [2, 3, 1]), tokens([5, 2, 7])])
def test_some_units_of_inputs_are_what_they_are_alone(inputs: Any) -> None:
    parts, whole = [inputs.only(np.array([unit])) for unit in (0, 2)], inputs.only(np.array([0, 2]))
    for column in fields(inputs):
        left, right, both = (getattr(one, column.name) for one in (*parts, whole))
        if isinstance(both, Tensor) and column.name != "labelled":
            assert torch.equal(both, torch.cat([left, right])) and len(both) < len(getattr(inputs, column.name))
        elif isinstance(both, np.ndarray):
            assert np.array_equal(both, np.concatenate([left, right]))
    assert whole.packing.lengths.tolist() == inputs.packing.lengths[[0, 2]].tolist()
    assert inputs.only(np.arange(0)).packing.rows == 0


def test_inputs_with_fields_that_nobody_cuts_are_not_compared() -> None:
    @dataclass(frozen=True, eq=False)
    class More(EncoderInputs):
        more: Tensor | None = None

    model, given = model_of(encoder(Convolution)), pictures()
    check_packed_alone(model.vision, More(**vars(given)), Pair.of(model.vision, data().plan, 0, []), "", CPU)
