"""Attention by rules' masks: block by block and by flex_attention, against attention with a dense mask."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.mask import BidirectionalItems, Causal, ItemsAlone, MaskRule, Slices, Spans, Words
from hetero_strategy.model import attention
from hetero_strategy.model.attention import block_mask, packed_attention
from hetero_strategy.model.block_attention import _backward, attend_in_blocks
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.model.kind import ModuleKind, check_edges
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.testing.drawn_masks import DrawnMask, dense_attention
from hetero_strategy.zoo import hf_llama
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from tests.model.helpers import ready
from tests.zoo.families import TINY
from tests.zoo.test_hf_positions import units_of


def drawn(total: int, width: int = 4) -> list[Tensor]:
    return [torch.randn(1, heads, total, width, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


def packing_of(draw: DrawnMask, rule: Any) -> Packing:
    packing = Packing.of(draw.lengths)
    packing.masks = {None: torch.from_numpy(rule.slices(draw.lengths, draw.spans).intervals())}
    return packing


@pytest.mark.parametrize("part", range(4))
def test_500_masks_attend_as_dense_ones(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, fp64, shared keys, in blocks of 16 rows; every other draw with soft cap and sinks."""
    monkeypatch.setattr("hetero_strategy.model.block_attention.BLOCK", 16)
    for seed in range(part, 500, 4):
        draw = DrawnMask(seed)
        rule, pairs = draw.case(seed // 4)
        mask, rows = torch.from_numpy(pairs), drawn(int(draw.lengths.sum()))
        if not len(mask):
            continue
        more = (
            {"softcap": 2.0, "sinks": torch.randn(4, dtype=torch.float64, requires_grad=True)} if seed % 8 > 3 else {}
        )
        leaves: Any = [*rows, *(x for x in more.values() if isinstance(x, Tensor))]
        out = packed_attention(*rows, packing_of(draw, rule), causal=True, scale=0.3, **more)
        wanted, weight = dense_attention(*rows, mask, scale=0.3, **more), torch.randn_like(out)
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        both = (torch.autograd.grad(x, leaves, weight) for x in (out, wanted))
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "more", [{}, {"softcap": 2.0}, {"sinks": torch.arange(4.0)}], ids=["plain", "soft cap", "sinks"]
)
def test_flex_attention_gives_the_same(more: dict[str, Any]) -> None:
    """As torch runs it without a compiler, on the host."""
    for draw in (DrawnMask(2), DrawnMask(5)):
        for rule, pairs in draw.cases()[1::3]:
            mask = torch.from_numpy(pairs())
            rows = [x.detach().float() for x in drawn(len(mask), 16)]
            packing = packing_of(draw, rule)
            options = attention._Options(True, scale=0.3, **more)
            out = attention._in_flex(*rows, packing.masks[None], options)
            torch.testing.assert_close(out, dense_attention(*rows, mask, scale=0.3, **more))


def image_between(total: int, image: int) -> tuple[np.ndarray, Spans]:
    """Return a sequence with two images and a short one."""
    spans = Spans(*(np.array(x) for x in ([0, 0], [100, 150 + image], [image, image], ["vision"] * 2)))
    return np.array([total - 30, 30]), spans


@pytest.mark.parametrize("rule", [BidirectionalItems(), BidirectionalItems(window=200, whole_items=True), ItemsAlone()])
def test_block_masks_are_those_of_torch(rule: Any) -> None:
    """The very blocks, without a mask of pairs; with several intervals a row perhaps more."""
    lengths, spans = image_between(1500, 300)
    mask = torch.from_numpy(rule.slices(lengths, spans).intervals())
    ours = block_mask(mask, 1500)
    theirs = create_block_mask(ours.mask_mod, None, None, 1500, 1500, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and not ours.to_dense().all()


def test_blocks_of_500_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pair is missed, and no pair of a whole block is hidden; with one interval a row the blocks are the fewest."""
    monkeypatch.setattr("hetero_strategy.model.attention.BLOCK", 16)
    for seed in range(500):
        draw = DrawnMask(seed)
        rule, pairs = draw.case(seed)
        if not (total := len(pairs)):
            continue
        mask = torch.from_numpy(rule.slices(draw.lengths, draw.spans).intervals())
        blocks = block_mask(mask, total)
        count = -(-total // 16)
        square = np.zeros((16 * count, 16 * count), bool)
        square[:total, :total] = pairs
        by_block = square.reshape(count, 16, count, 16).swapaxes(1, 2)
        fewest, visited = by_block.any((2, 3)), blocks.to_dense()[0, 0].numpy() > 0
        assert (visited >= fewest).all() and (mask.shape[1] > 1 or (visited == fewest).all()), seed
        for row, many in enumerate(blocks.full_kv_num_blocks[0, 0].tolist()):
            assert by_block[row, blocks.full_kv_indices[0, 0, row, :many].numpy()].all(), seed


def test_block_masks_of_several_intervals_miss_nothing() -> None:
    lengths, spans = image_between(1500, 300)
    words = np.ones(1500, np.int64)
    words[100:400], words[450:750], words[800:] = 2, 4, 1 | 4
    mask = torch.from_numpy(Words(lambda *_: words).slices(lengths, spans).intervals())
    ours = block_mask(mask, 1500)
    theirs = create_block_mask(ours.mask_mod, None, None, 1500, 1500, device="cpu")
    assert mask.shape[1] == 4 and bool((ours.to_dense() >= theirs.to_dense()).all())


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that any operator makes, those inside attention block by block, too."""

    numbers = 0
    inside: ClassVar = {op._opoverload: op._init_fn for op in (attend_in_blocks, _backward)}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.inside:
            with self:
                return self.inside[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_no_tensor_has_all_pairs() -> None:
    """A language model's forward and backward of 1,500 rows: blocks of 128 rows, and at most all keys."""
    lengths, spans = image_between(1500, 300)
    llm = ready(hf_llama(check=False, **TINY["llama"]), dtype=torch.float32)
    llm.attend_by("items_alone")
    ids, packing = torch.randint(3, 140, (1500,)), Packing.of(lengths)
    packing.masks = llm.kind.masks(lengths, spans)
    with Largest() as made:
        llm(SequenceInputs(ids, ids, packing)).loss_sum.backward()
    heads = TINY["llama"]["num_attention_heads"]
    assert 128 * 1000 <= made.numbers <= heads * 128 * 1500 < 1500**2
    with Largest() as made:
        block_mask(packing.masks[None], 1500)
    assert made.numbers <= 2 * 1536


def test_dropout_drops_the_same_weights_in_backward() -> None:
    """By the derivative of forward along one direction, with the same random numbers."""
    rows, packing = drawn(300), Packing.of(np.array([200, 100]))

    def out(*given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return packed_attention(*given, packing, causal=True, dropout=0.4).square().sum()

    steps = [torch.randn_like(x) for x in rows]
    slope = sum((g * s).sum() for g, s in zip(torch.autograd.grad(out(*rows), rows), steps, strict=True))
    ends = [out(*(x.detach() + sign * 1e-6 * s for x, s in zip(rows, steps, strict=True))) for sign in (1, -1)]
    assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-6)


def test_a_window_without_a_mask_of_the_rule_is_refused() -> None:
    packing = packing_of(draw := DrawnMask(2), ItemsAlone())
    rows = drawn(int(draw.lengths.sum()))
    with pytest.raises(ModelError, match=r"a layer has window=3, and its rule of attention knows windows \[None\]"):
        packed_attention(*rows, packing, causal=True, window=3)


@pytest.mark.parametrize("rule", [BidirectionalItems(window=3), Causal(3)], ids=str)
def test_a_window_of_the_rule_holds_without_items(rule: MaskRule) -> None:
    """A sample of text gives the same rows alone and packed beside a sample with an image."""
    llm = ready(hf_llama(check=False, **TINY["llama"]), dtype=torch.float32)
    llm.attend_by(rule)
    both = llm.kind.inputs(units_of([[], [4]], np.full((1, 2), 4), ("grid_h", "grid_w"), padding=0))
    text = llm.kind.inputs(units_of([[]], np.zeros((0, 2), np.int64), ("grid_h", "grid_w"), padding=0))
    assert torch.equal(text.ids, both.ids[:7])
    alone, plain = llm(text).hidden, replace(text, packing=Packing.of(np.array([7])))
    torch.testing.assert_close(llm(both).hidden[:7], alone)
    assert not torch.allclose(llm(plain).hidden, alone)


def test_a_causal_rule_needs_no_mask() -> None:
    llm = hf_llama(check=False, **TINY["llama"])
    llm.attend_by("causal")
    assert not llm.kind.inputs(units_of([[4]], np.full((1, 2), 4), ("grid_h", "grid_w"))).packing.masks


@dataclass
class Thawed:
    """A rule that can change, so it has no hash."""

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        return Causal().slices(lengths, spans)


def test_a_language_model_attends_by_its_rule() -> None:
    """Its kind makes the masks of a microbatch, alignment rows included; rows of an item ignore the text before it."""
    llm = ready(hf_llama(check=False, **TINY["llama"]), dtype=torch.float32)
    llm.attend_by("items_alone")
    kind = pickle.loads(pickle.dumps(llm.kind))
    inputs = kind.inputs(units_of([[4], [4, 4], []], np.full((3, 2), 4), ("grid_h", "grid_w")))
    mask = inputs.packing.masks[None]
    assert mask[0, 0].tolist()[:13] == [0] * 5 + [5] * 4 + [0] * 4 and mask[1, 0].tolist()[5:10] == [9] * 4 + [10]
    assert mask[0, 0].tolist()[-3:] == [39] * 3 and not kind.masks(np.array([6]), Spans.none())
    other = replace(inputs, ids=torch.where(torch.arange(len(inputs.ids)) < 5, inputs.ids - 1, inputs.ids))
    moved = (llm(inputs).hidden - llm(other).hidden).abs().amax(1) > 1e-6
    assert moved.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 9, 10, 11, 12]
    with pytest.raises(ModelError, match=r"attention='alone'; choose causal, bidirectional_items, items_alone, prefix"):
        llm.attend_by("alone")
    llm.windows = (None, 7)
    with pytest.raises(ModelError, match=r"attention=ItemsAlone\(of=None\) knows no window, and .* window of 7"):
        llm.attend_by(ItemsAlone())
    with pytest.raises(ModelError, match=r"attention: Thawed cannot be hashed .*; rules are frozen dataclasses"):
        llm.attend_by(Thawed())
    llm.attend_by(BidirectionalItems(("visoin",)))
    assert llm.kind.rules[7] == BidirectionalItems(("visoin",), 7)
    with pytest.raises(ModelError, match=r"llm: its attention is of items of 'visoin', but modules with files .* none"):
        check_edges({"llm": llm.kind}, [], ModelError)


def test_a_spec_says_which_blocks_follow_which_rule() -> None:
    layers = ["full_attention", *["sliding_attention"] * 3]
    fields = {"use_sliding_window": True, "sliding_window": 5, "layer_types": layers, "num_hidden_layers": 4}
    llm = hf_causal_lm(model_type="qwen2", check=False, **{**TINY["qwen2"], **fields})
    found = [(rule, counts.tolist()) for rule, counts in spec_of_module(llm).rules]
    assert found == [(Causal(), [1, 0, 0, 0]), (Causal(5), [0, 1, 1, 1])]
    llm.attend_by("bidirectional_items")
    assert [rule for rule, _ in spec_of_module(llm).rules] == [BidirectionalItems(), BidirectionalItems(window=5)]


def test_a_rule_names_no_module_without_files() -> None:
    """Rows that a fusion makes of others are no items, so the rule would be causal."""

    class Fusion(ModuleKind):
        name, gives_to = "Fusion", ("CausalLM",)

        @override
        def units(self, metadata: Any, sources: Any) -> Any:
            raise NotImplementedError

        @override
        def inputs(self, units: Any) -> Any:
            raise NotImplementedError

    llm = hf_llama(check=False, **TINY["llama"])
    llm.attend_by(ItemsAlone(("fusion",)))
    with pytest.raises(ModelError, match=r"llm: its attention is of items of 'fusion', but modules with files .* none"):
        check_edges({"fusion": Fusion(), "llm": llm.kind}, [("fusion", "llm")], ModelError)
