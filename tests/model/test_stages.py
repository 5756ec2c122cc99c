"""Pipeline stages of every adapter: chained they are the whole module, and they share its tensors and names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.errors import ModelError
from hetero_strategy.model import Backbone, Encoder, Projector
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.encoder import EncoderKind
from hetero_strategy.model.inputs import EncoderInputs, SequenceInputs
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.zoo import hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, clips, images, ready, tokens

DEEP = {"num_hidden_layers": 5}
SLOTS = {"vision": torch.tensor([1, 4])}
ROWS = {"vision": torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(2, 16)}


class Case:
    def __init__(self, make: Callable[[], Adapter], inputs: Callable[[bool], EncoderInputs | SequenceInputs]) -> None:
        self.make, self.inputs = make, inputs

    def language(self) -> bool:
        return isinstance(self.inputs(False), SequenceInputs)

    def rows(self, empty: bool) -> dict[str, torch.Tensor]:
        return ROWS if self.language() and not empty else {}


def _text(empty: bool) -> SequenceInputs:
    return tokens([]) if empty else tokens([3, 5, 1], slots=SLOTS)


CASES = {
    "titan": Case(lambda: titan_llama(**TITAN | {"n_layers": 5}), _text),
    "hf_llama": Case(lambda: hf_llama(**LLAMA | DEEP), _text),
    "hf_llama_tied": Case(lambda: hf_llama(**LLAMA | DEEP, tie_word_embeddings=True), _text),
    "hf_qwen3": Case(lambda: hf_qwen3(**LLAMA | DEEP, head_dim=8), _text),
    "siglip2": Case(
        lambda: siglip2_encoder(out_width=8, merge=2, **VIT | DEEP),
        lambda empty: images([] if empty else [(2, 4), (4, 4), (2, 2)], merge=2),
    ),
    "whisper": Case(
        lambda: whisper_encoder(out_width=8, stack=2, **WHISPER | {"encoder_layers": 5}),
        lambda empty: clips([] if empty else [7, 24, 1], stack=2),
    ),
}
SPLITS = [(5,), (3, 2), (1, 4), (2, 1, 2), (1, 1, 1, 1, 1)]


def cut(module: Adapter, split: tuple[int, ...]) -> list[Adapter]:
    blocks, ends = list(module.blocks()), np.cumsum(split)
    return [
        module.stage(blocks[end - n : end], first=i == 0, last=i == len(split) - 1)
        for i, (n, end) in enumerate(zip(split, ends, strict=True))
    ]


def without_payload(inputs: EncoderInputs | SequenceInputs, *, first: bool, last: bool):
    """What the loader gives ranks that hold neither the first nor the last stage."""
    if isinstance(inputs, EncoderInputs):
        return inputs if first else replace(inputs, values=inputs.values[:0])
    ids, labels = (inputs.ids if first else inputs.ids[:0]), (inputs.labels if last else inputs.labels[:0])
    return replace(inputs, ids=ids, labels=labels, slots=inputs.slots if first else {})


def loss(out) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
    return out.loss_sum + 0.1 * out.hidden.square().sum()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("empty", [False, True], ids=["rows", "no rows"])
@pytest.mark.parametrize("kind", CASES)
def test_chained_stages_are_the_whole_module(kind: str, empty: bool, split: tuple[int, ...]) -> None:
    """Bit for bit, values and gradients, with every stage its own graph between detached rows."""
    case = CASES[kind]
    module = ready(case.make())
    inputs, rows = case.inputs(empty), case.rows(empty)
    whole = module(inputs, rows)
    loss(whole).backward()
    expected = gradients(module)
    module.zero_grad()

    hidden, graphs = None, []
    stages = cut(module, split)
    for i, stage in enumerate(stages):
        given = without_payload(inputs, first=i == 0, last=stage is stages[-1])
        leaf = None if hidden is None else hidden.detach().requires_grad_()
        out = stage(given, rows if i == 0 else {}, leaf)
        graphs.append((leaf, out))
        if stage is not stages[-1]:
            assert out.shape == (int(inputs.packing.rows), module.hidden_width)
        hidden = out
    gradient = None
    for leaf, out in reversed(graphs):
        if gradient is None:
            loss(out).backward()
        else:
            out.backward(gradient)
        gradient = None if leaf is None else leaf.grad
    final = graphs[-1][1]
    assert torch.equal(loss(final), loss(whole))
    found = gradients(module)
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not torch.equal(found[name], expected[name])]
    if kind == "hf_llama_tied" and len(split) > 1:  # the two shares of one gradient are added in another order
        wrong = [n for n in wrong if not torch.allclose(found[n], expected[n], rtol=1e-13, atol=1e-15)]
    assert wrong == []
    assert empty or any(g.abs().sum() > 0 for g in found.values())


@pytest.mark.parametrize("kind", CASES)
def test_a_stage_without_its_block_is_noticed(kind: str) -> None:
    """Negative control: the comparison above sees one missing block."""
    case = CASES[kind]
    module = ready(case.make())
    inputs, rows = case.inputs(False), case.rows(False)
    first, _ = cut(module, (3, 2))
    last = module.stage(list(module.blocks())[4:], first=False, last=True)
    assert not torch.allclose(loss(last(inputs, {}, first(inputs, rows))), loss(module(inputs, rows)))


@pytest.mark.parametrize("kind", CASES)
def test_stages_share_tensors_and_names(kind: str) -> None:
    module = CASES[kind].make()
    whole = dict(module.named_parameters())
    stages = cut(module, (2, 1, 2))
    names = [{*stage.global_parameters()} for stage in stages]
    for stage in stages:
        for fqn, parameter in stage.global_parameters().items():
            assert parameter is whole[fqn]
    assert set.union(*names) == set(whole)
    shared = {tied[0]} if (tied := module.tied_weight()) else set()
    assert names[0] & names[2] == shared and not names[0] & names[1] and not names[1] & names[2]
    assert [len(stage.blocks()) for stage in stages] == [2, 1, 2] and len(module.blocks()) == 5
    assert list(stages[1].blocks()) == list(module.blocks())[2:3]
    assert dict(module.named_parameters()).keys() == whole.keys()


def test_before_and_after_run_at_their_ends_only() -> None:
    seen = []

    def before(inputs):
        seen.append("before")
        return inputs

    def after(rows, inputs):
        seen.append("after")
        return rows

    module = ready(siglip2_encoder(out_width=8, before=before, after=after, **VIT | DEEP))
    inputs, hidden = images([(2, 2)]), None
    for stage in cut(module, (2, 1, 2)):
        hidden = stage(inputs, {}, hidden)
        seen.append("stage")
    assert seen == ["before", "stage", "stage", "after", "stage"]


def test_after_sees_the_same_inputs_in_every_layout() -> None:
    def after(rows, inputs):
        assert inputs.values.shape[0] == 0
        return rows + torch.from_numpy(np.repeat(inputs.rows, inputs.rows))[:, None]

    module = ready(siglip2_encoder(out_width=8, after=after, **VIT | DEEP))
    inputs, hidden = images([(2, 2), (2, 4)]), None
    for stage in cut(module, (2, 1, 2)):
        hidden = stage(inputs, {}, hidden)
        inputs = replace(inputs, values=inputs.values[:0])  # as later stages get them
    assert torch.equal(hidden, module(images([(2, 2), (2, 4)])))


def test_stages_are_in_the_mode_of_the_whole() -> None:
    """Dropout of a module around the blocks: on in training, off in evaluation, however the mode is set."""
    module = ready(whisper_encoder(out_width=8, **WHISPER, dropout=0.5))
    first, inputs = cut(module, (1, 1))[0], clips([8])
    assert not torch.equal(first(inputs), first(inputs))
    for part in module.modules():
        part.training = False  # as Lightning restores modes
    assert torch.equal(first(inputs), first(inputs))
    module.train()
    assert not torch.equal(first(inputs), first(inputs))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_stage_flops_sum_to_the_whole(kind: str, split: tuple[int, ...]) -> None:
    module, lengths = CASES[kind].make(), np.array([5, 2, 8])
    stages = module.stage_flops(lengths, split)
    assert stages.shape == (len(split),) and stages.sum() == module.flops(lengths)
    blocks = module.part_flops(lengths)[1]
    assert (blocks > 0).all() and np.all(stages >= np.array(split) * blocks[0])
    if kind == "titan" and len(split) > 1:  # the head weighs on the last stage alone
        assert stages[0] == split[0] * blocks[0] and stages[-1] == split[-1] * blocks[0] + 2 * 16 * 40 * 15


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no block \['model.layers.7'\]"):
        titan_llama(**TITAN).stage(["model.layers.7"], first=True, last=False)
    plain = Encoder(nn.Linear(3, 4), nn.Linear(4, 5))
    with pytest.raises(ModelError, match="Encoder has no blocks"):
        plain.stage(["x"], first=True, last=False)
    stage = titan_llama(**TITAN).stage(["model.layers.1"], first=False, last=True)
    with pytest.raises(ValueError, match="previous stage's rows"):
        stage(tokens([2]))


def test_a_list_of_blocks_has_another_name_than_the_method() -> None:
    with pytest.raises(ModelError, match="Named: blocks is a method"):

        class Named(Adapter):
            block_list = "blocks"


class Nested(Backbone):
    """A backbone whose parts around the blocks are inside other modules."""

    block_list, before_blocks, after_blocks = "layers", ("stem.patch",), ("out.norm",)
    width = hidden_width = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"patch": nn.Linear(16, 8)})
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.ModuleDict({"norm": nn.LayerNorm(8)})

    def embed(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.stem["patch"](inputs.values)

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        for block in self.blocks().values():
            rows = block(rows)
        return rows

    def finish(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return self.out["norm"](rows)


class Blocked(Adapter):
    """An adapter with blocks that cannot be cut."""

    kind = EncoderKind()

    width = hidden_width = 8

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def blocks(self) -> dict[str, nn.Module]:
        return {"one": self.one, "two": self.two}


def test_a_spec_leaves_the_module_whole() -> None:
    """Stages are made for it, of which each lacks parts."""
    encoder = Encoder(Nested, Projector(8, 4), processor=ImageProcessor(patch_size=4))
    parameters = [name for name, _ in encoder.named_parameters()]
    spec = spec_of_module(encoder)
    assert [name for name, _ in encoder.named_parameters()] == parameters
    assert spec.parameters.sum() == sum(p.numel() for p in encoder.parameters()) and spec.most_stages == 2
    assert not hasattr(encoder.stage(["backbone.layers.1"], first=False, last=True).backbone.stem["patch"], "weight")


def test_a_module_that_cannot_be_cut_counts_as_one_block() -> None:
    spec = spec_of_module(Blocked())
    assert (spec.has_blocks, spec.most_stages, spec.parameters.tolist()) == (True, 1, [144])
