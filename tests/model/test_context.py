"""Attention where each rank of context parallelism has a part of the rows: what all ranks make is the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hetero_strategy.errors import ModelError
from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.mask import BidirectionalItems, ItemsAlone, MaskRule, Prefix, Spans
from hetero_strategy.model import attention
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.context import Context, in_context
from hetero_strategy.model.inputs import IGNORE, ModuleInputs, Packing, SequenceInputs

LENGTHS = [[24], [5, 7, 12], [1, 0, 9, 2, 2, 10], [6, 6, 6, 6], [23, 1]]


def inputs_of(lengths: list[int]) -> SequenceInputs:
    total = sum(lengths)
    ids = torch.arange(total)
    labels = torch.where(ids % 3 == 0, IGNORE, ids + 1)
    columns = {"axes": torch.stack([ids, 2 * ids]), "deep": torch.randn(3, 2, total), "block": -ids}
    return SequenceInputs(ids, labels, Packing.of(np.array(lengths)), columns=columns)


def rows_by_rank(parts: int, total: int, dealt: str) -> np.ndarray:
    """Return the rows of each rank: two chunks each, or any rows that are dealt at random, ascending."""
    if dealt == "two chunks":
        return two_chunks(total, parts)
    return np.sort(np.random.default_rng(parts).permutation(total).reshape(parts, -1), axis=1)


def on_all_ranks(
    rows: list[Tensor], lengths: list[int], by_rank: np.ndarray, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Tensor:
    """Attention of every rank's rows, put together; what a rank gathers it is given."""
    whole = inputs_of(lengths)
    query, key, value = rows
    order = torch.from_numpy(by_rank.reshape(-1)).to(query.device)
    both = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (key, value)], dim=1)[order]
    out = query.new_empty(query.shape)
    for rank, own_rows in enumerate(by_rank):
        own = in_context(whole, rank, by_rank)

        def gather(context: Context, mine: Tensor, at: int = rank) -> Tensor:
            torch.testing.assert_close(mine, both.split(len(mine))[at])
            return both

        monkeypatch.setattr(Context, "gather", gather)
        mine = torch.from_numpy(own_rows).to(query.device)
        packing = own.packing.to(query.device)
        out = out.index_copy(2, mine, packed_attention(*(x[:, :, mine] for x in rows), packing, causal=True, **options))
    return out


def flash(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, scale: Any, window_size: Any, **_: Any) -> Tensor:
    """What torch's kernel does: the last row of a segment sees its last key."""
    rows, keys, most_rows, most_keys = bounds
    assert most_rows == rows.diff().max() and most_keys == keys.diff().max()
    assert rows[-1] == len(query) and keys[-1] == len(key) == len(value)
    outs = []
    for at in range(len(rows) - 1):
        q, k, v = (x[a[at] : a[at + 1]].transpose(0, 1) for x, a in ((query, rows), (key, keys), (value, keys)))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        before = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (before >= 0) & ((before <= window_size[0]) | (window_size[0] < 0))
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        outs.append(((q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def kernels(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "flash":
        monkeypatch.setattr(attention, "_runs_flash", lambda *_: True)
        monkeypatch.setattr(attention, "varlen_attn", flash)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kernel", ["flash", "masked"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dealt", ["two chunks", "any rows"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_all_ranks_make_the_whole(
    parts: int, dealt: str, lengths: list[int], kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, too: those of keys are sums over the ranks that see them."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 24, heads, 6, dtype=torch.float64).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    expected = packed_attention(*rows, Packing.of(np.array(lengths)), causal=True, window=window)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, rows, weight)
    kernels(kernel, monkeypatch)
    out = on_all_ranks(rows, lengths, rows_by_rank(parts, 24, dealt), monkeypatch, window=window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, gradient in zip(torch.autograd.grad(out, rows, weight), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [ItemsAlone(), BidirectionalItems(), BidirectionalItems(window=3), Prefix()], ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_rows_see_later_rows_on_other_ranks(parts: int, rule: MaskRule, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 7, 12]
    spans = Spans(*(np.array(x) for x in ([0, 1, 2], [1, 0, 2], [3, 7, 8], ["vision"] * 3)), np.array([2, 0, 11]))
    mask = torch.from_numpy(rule.slices(np.array(lengths), spans).intervals())
    whole = inputs_of(lengths)
    whole.packing.masks = {None: mask}
    monkeypatch.setattr(f"{__name__}.inputs_of", lambda _: whole)
    rows = [torch.randn(1, 24, heads, 6, dtype=torch.float64).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    expected = packed_attention(*rows, whole.packing, causal=True)
    assert not torch.allclose(expected, packed_attention(*rows, Packing.of(np.array(lengths)), causal=True))
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, rows, weight)
    out = on_all_ranks(rows, lengths, two_chunks(24, parts), monkeypatch)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, gradient in zip(torch.autograd.grad(out, rows, weight), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


def test_keys_are_laid_out_by_segments_for_two_of_a_sequence_at_most() -> None:
    """In many blocks each key would be laid out once for each later block; the kernels of masks need each key once."""
    whole = inputs_of([40, 24])
    for by_rank, by_segments in ((two_chunks(64, 2), True), (np.arange(64).reshape(16, 2, 2).swapaxes(0, 1), False)):
        contexts = [in_context(whole, rank, by_rank.reshape(2, -1)).packing.context for rank in range(2)]
        for context in contexts:
            assert context is not None and context.by_segments == by_segments and len(context.keys) <= 64
            assert len(context.of_segments) == sum(map(len, context.turns)) == context.offsets[1][-1]
            assert (len(context.of_segments) > 0) == by_segments


def test_compiled_blocks_know_all_numbers_of_segments() -> None:
    """Compiled once for a second segment and once without, not once for each number of segments."""
    compiled = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=compiled)
    def seen(context: Context, rows: Tensor) -> Tensor:
        return context.seen_by_segments(rows) * 2

    compilations = []
    for blocks in (1, 1, 2, 2, 3, 4, 5, 6):
        by_rank = np.arange(blocks * 24).reshape(blocks, 2, 12).swapaxes(0, 1).reshape(2, -1)
        for lengths in ([24 * blocks], [14, 24 * blocks - 14]):
            context = in_context(inputs_of(lengths), 1, by_rank).packing.context
            assert context is not None
            rows = torch.randn(24 * blocks, 3, requires_grad=True)
            out, wanted = seen(context, rows), context.seen_by_segments(rows) * 2
            weight = torch.randn_like(out)
            assert torch.equal(out, wanted)
            assert torch.equal(*(torch.autograd.grad(x, rows, weight)[0] for x in (out, wanted)))
        compilations.append(compiled.frame_count)
    assert compilations[4] == compilations[-1] <= 5


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dealt", ["two chunks", "any rows"])
def test_rows_keep_what_they_are(lengths: list[int], dealt: str) -> None:
    whole, by_rank = inputs_of(lengths), rows_by_rank(2, 24, dealt)
    labelled = np.flatnonzero(whole.labels.numpy() != IGNORE)
    of = whole.packing.sequence[labelled].tolist()
    numbers = [[s, of[:at].count(s)] for at, s in enumerate(of)]
    for rank in range(2):
        mine, own = by_rank[rank], in_context(whole, rank, by_rank)
        for found, wanted in (
            (own.ids, whole.ids),
            (own.labels, whole.labels),
            (own.packing.positions, whole.packing.positions),
            (own.packing.sequence, whole.packing.sequence),
        ):
            assert found.tolist() == wanted[mine].tolist()
        assert own.columns.keys() == whole.columns.keys()
        for name, column in whole.columns.items():
            assert torch.equal(own.columns[name], torch.stack([column[..., row] for row in mine.tolist()], dim=-1))
        assert own.labelled is not None and own.own_labels is not None
        found = own.ids[own.labelled].tolist()  # a row's number
        assert own.own_labels.tolist() == [numbers[labelled.tolist().index(row)] for row in found]
        assert (own.packing.rows, own.packing.longest) == (12, max(lengths))
        bad = np.arange(max(1, len(lengths) - 1)) == 0
        silent = own.silenced(bad)
        assert silent.columns is own.columns
        assert (silent.labels == IGNORE)[own.packing.sequence == 0].all()
        kept = own.packing.sequence != 0
        assert silent.labels[kept].tolist() == own.labels[kept].tolist()
        assert silent.labelled is not None and silent.own_labels is not None
        assert silent.own_labels.tolist() == [one for one in own.own_labels.tolist() if one[0]]
        assert len(silent.labelled) == int((silent.labels != IGNORE).sum()) == len(silent.own_labels)


@dataclass(frozen=True, eq=False)
class Weighted(SequenceInputs):
    weights: Tensor | None = None


def test_what_are_no_sequences_is_refused() -> None:
    with pytest.raises(ModelError, match="cp=2 of a module that takes ModuleInputs: it is for SequenceInputs"):
        in_context(ModuleInputs(), 0, two_chunks(8, 2))
    whole = inputs_of([5, 3])
    with pytest.raises(ModelError, match="module that takes Weighted: it is for SequenceInputs, whose columns"):
        in_context(Weighted(whole.ids, whole.labels, whole.packing, weights=torch.ones(8)), 0, two_chunks(8, 2))


def test_attention_to_later_rows_is_refused() -> None:
    own = in_context(inputs_of([8]), 0, two_chunks(8, 2))
    rows = torch.randn(1, 2, 4, 8)
    with pytest.raises(ModelError, match="not causal does not know context parallelism by keys: set cp=1 or"):
        packed_attention(rows, rows, rows, own.packing, causal=False)


def test_what_is_measured_and_predicted_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person reads of a step: tokens and whole samples predicted right, over both ranks' rows."""
    from hetero_strategy.model.causal_lm import CausalLMKind, LMOutput

    whole = inputs_of([5, 7, 12])
    assert whole.labelled is not None
    right = torch.ones(len(whole.labelled), dtype=torch.bool)
    right[whole.labels[whole.labelled] == 8] = False  # of the second sequence
    metadata: Any = SimpleNamespace(labels=np.array([9, 5, 9, 3, 9, 8]))  # of three samples elsewhere, too
    units = np.array([3, 1, 5])
    counted: list[tuple[int, int]] = []
    parts = [in_context(whole, rank, two_chunks(24, 2)) for rank in range(2)]
    rows = {int(row): number for number, row in enumerate(whole.labelled)}
    mine = [[rows[int(row)] for row in own.ids[own.labelled]] for own in parts]
    outputs = [LMOutput(torch.zeros(()), right[at], torch.tensor(at)) for at in mine]
    measured: Callable[..., Any] = CausalLMKind().measured
    shares: list[Tensor] = []
    monkeypatch.setattr(Context, "summed", lambda _, numbers: shares.append(numbers.clone()) or numbers)
    for own, output in zip(parts, outputs, strict=True):
        measured(own, output)
    monkeypatch.setattr(Context, "summed", lambda *_: shares[0] + shares[1])
    for own, output in zip(parts, outputs, strict=True):
        tokens, samples = measured(own, output)
        counted.append((int(tokens), int(samples)))
    everything = LMOutput(torch.zeros(()), right, torch.arange(len(right)))
    places, predicted = CausalLMKind().placed(metadata, "llm", units, whole, everything)
    expected = dict(zip(places.tolist(), predicted.tolist(), strict=True))
    made = [CausalLMKind().placed(metadata, "llm", units, *of) for of in zip(parts, outputs, strict=True)]
    assert {p: n for at, found in made for p, n in zip(at.tolist(), found.tolist(), strict=True)} == expected
    tokens, samples = measured(whole, everything)
    assert tuple(map(sum, zip(*counted, strict=True))) == (int(tokens), int(samples)) == (len(right) - 1, 2)
