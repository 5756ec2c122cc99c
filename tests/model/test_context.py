"""Attention where each rank of context parallelism has a part of the rows: what all ranks make is the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hetero_strategy.errors import ModelError
from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.mask import BidirectionalItems, ItemsAlone, MaskRule, Prefix, Spans
from hetero_strategy.model import attention, key_exchange
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.context import Context, in_context
from hetero_strategy.model.inputs import IGNORE, ModuleInputs, Packing, SequenceInputs
from hetero_strategy.model.packing_errors import Meeting, together
from hetero_strategy.profiling.allocations import Allocations

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


class Attended(NamedTuple):
    out: Tensor
    gradients: list[Tensor]
    """Of queries, keys and values, and of sinks from each rank."""
    kept: list[int]
    """Bytes that each rank keeps from forward until backward, besides its own rows and results."""


def on_all_ranks(
    rows: list[Tensor],
    whole: SequenceInputs,
    by_rank: np.ndarray,
    weight: Tensor,
    windows: Collection[int | None] = (),
    change: Callable[[Context], None] = lambda _: None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Attended:
    """Attention of every rank's rows and its gradients, put together; the ranks are threads."""
    meeting, kept = Meeting(len(by_rank)), [0] * len(by_rank)

    def attend(rank: int) -> list[Tensor]:
        own = in_context(whole, rank, by_rank, windows).to(rows[0].device)
        at = torch.from_numpy(by_rank[rank])
        own.packing.context = together(own.packing.context, meeting)
        change(own.packing.context)
        mine = [x.detach()[:, :, at].requires_grad_() for x in rows]
        leaves = mine if sinks is None else [*mine, sinks.detach().requires_grad_()]
        with Allocations(leaves) as memory:
            before = memory.now
            out = packed_attention(
                *mine, own.packing, causal=True, sinks=None if sinks is None else leaves[3], **options
            )
            meeting.barrier.wait()  # others still read what this rank sent them
            kept[rank] = memory.now - before - out.nbytes
        found = [out.detach(), *torch.autograd.grad(out, leaves, weight[:, :, at])]
        meeting.leave(rank)
        return found

    with ThreadPoolExecutor(len(by_rank)) as threads:
        found = list(threads.map(attend, range(len(by_rank))))
    order = torch.from_numpy(by_rank.reshape(-1)).argsort()
    out, *gradients = (torch.cat(parts, dim=2)[:, :, order] for parts in list(zip(*found, strict=True))[:4])
    return Attended(out, [*gradients, *(sum(parts) for parts in list(zip(*found, strict=True))[4:])], kept)


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
    monkeypatch.setattr(key_exchange, "LEAST", 0 if dealt == "any rows" else 1 << 20)  # several groups of heads, or one
    windows = [window] if dealt == "any rows" else []
    found = on_all_ranks(rows, inputs_of(lengths), rows_by_rank(parts, 24, dealt), weight, windows, window=window)
    for one, other in zip([found.out, *found.gradients], [expected, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [ItemsAlone(), BidirectionalItems(), BidirectionalItems(window=3), Prefix()], ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_rows_see_later_rows_on_other_ranks(parts: int, rule: MaskRule) -> None:
    lengths = [5, 7, 12]
    spans = Spans(*(np.array(x) for x in ([0, 1, 2], [1, 0, 2], [3, 7, 8], ["vision"] * 3)), np.array([2, 0, 11]))
    mask = torch.from_numpy(rule.slices(np.array(lengths), spans).intervals())
    whole = inputs_of(lengths)
    whole.packing.masks = {None: mask}
    rows = [torch.randn(1, 24, heads, 6, dtype=torch.float64).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    expected = packed_attention(*rows, whole.packing, causal=True)
    assert not torch.allclose(expected, packed_attention(*rows, Packing.of(np.array(lengths)), causal=True))
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, rows, weight)
    found = on_all_ranks(rows, whole, two_chunks(24, parts), weight)
    for one, other in zip([found.out, *found.gradients], [expected, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [(4, 2), (6, 3), (4, 1)], ids=str)
def test_options_hold_in_each_group_of_heads(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_exchange, "LEAST", 0)
    torch.manual_seed(0)
    of_each = (heads[0], heads[1], heads[1])
    rows = [torch.randn(1, n, 24, 6, dtype=torch.float64, requires_grad=True) for n in of_each]
    sinks = torch.randn(heads[0], dtype=torch.float64, requires_grad=True)
    whole = inputs_of([5, 7, 12])
    expected = packed_attention(*rows, whole.packing, causal=True, sinks=sinks, softcap=2.0, window=4)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [*rows, sinks], weight)
    found = on_all_ranks(rows, whole, two_chunks(24, 2), weight, (None, 4), sinks=sinks, softcap=2.0, window=4)
    for one, other in zip([found.out, *found.gradients], [expected, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("parts", "dealt"), [(4, "two chunks"), (8, "any rows")])
def test_half_gradients_are_rounded_once_more_for_any_number_of_ranks(parts: int, dealt: str) -> None:
    """What other ranks send of a key is rounded, the sums are not: together 1.4 of one rank's error."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 256, heads, 32).to(torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2)]
    weight, whole = torch.randn(1, 4, 256, 32).to(torch.bfloat16), inputs_of([256])

    def of_one(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in rows]
        out = packed_attention(*leaves, whole.packing, causal=True)
        return [x.double() for x in torch.autograd.grad(out, leaves, weight.to(dtype))]

    exact, rounded = of_one(torch.float64), of_one(torch.bfloat16)
    found = on_all_ranks(rows, whole, rows_by_rank(parts, 256, dealt), weight)
    for one, other, wanted in zip(found.gradients, rounded, exact, strict=True):
        assert (one.double() - wanted).norm() < 1.6 * (other - wanted).norm()


def keeping(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    """What a fused kernel keeps: its inputs, its result and a number for each row."""
    rows = (x.transpose(0, 1)[None] for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*rows)[0].transpose(0, 1)


@pytest.mark.parametrize("kernel", ["flash", "masked"])
@pytest.mark.parametrize("least", [0, 1 << 20])
def test_no_travelled_key_is_kept(kernel: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a result twice. Control: what travelled is kept where it is no part of the graph's inputs."""
    monkeypatch.setattr(key_exchange, "LEAST", least)
    kernels(kernel, monkeypatch)
    monkeypatch.setattr(attention, "varlen_attn", keeping)
    rows = [torch.randn(1, 2, 240, 64, dtype=torch.float64) for _ in range(3)]
    travelled = 2 * 120 * 2 * 64 * 8

    def kept() -> int:
        return max(on_all_ranks(rows, inputs_of([240]), two_chunks(240, 2), torch.ones_like(rows[0])).kept)

    assert kept() < travelled / 20
    monkeypatch.setattr(key_exchange, "_share_memory", lambda *_: False)
    assert kept() > travelled


def test_keys_are_laid_out_by_segments_for_two_of_a_sequence_at_most() -> None:
    """In many blocks each key would be laid out once for each later block; the kernels of masks need each key once."""
    whole = inputs_of([40, 24])
    for by_rank, by_segments in ((two_chunks(64, 2), True), (np.arange(64).reshape(16, 2, 2).swapaxes(0, 1), False)):
        contexts = [in_context(whole, rank, by_rank.reshape(2, -1)).packing.context for rank in range(2)]
        for context in contexts:
            assert context is not None and context.by_segments == by_segments
            keys = context.keys_of(None)
            assert len(keys.keys) <= 64 and len(keys.of_segments) == sum(map(len, keys.turns)) == keys.offsets[-1]
            assert (len(keys.of_segments) > 0) == by_segments


def rule_of(name: str) -> tuple[MaskRule, Spans]:
    """Return a rule and its items in sequences of 50, 31 and 15 rows."""
    spans = Spans(*(np.array(x) for x in ([0, 1, 1], [3, 0, 20], [30, 9, 4], ["vision"] * 3)), np.array([2, 0, 11]))
    return {"gemma3": BidirectionalItems(window=7), "EE": ItemsAlone(), "prefix": Prefix()}[name], spans


@pytest.mark.parametrize("name", ["causal", "window", "gemma3", "EE", "prefix"])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_rows_travel_where_they_are_attended_and_lacked(name: str, parts: int) -> None:
    """Counted pair by pair, of each rank from each."""
    whole, window = inputs_of([50, 31, 15]), 7 if name in ("window", "gemma3") else None
    starts = np.repeat([0, 50, 81], [50, 31, 15])
    seen = [[*range(start if window is None else max(start, row - 6), row + 1)] for row, start in enumerate(starts)]
    if name not in ("causal", "window"):
        rule, spans = rule_of(name)
        mask = rule.slices(whole.packing.lengths, spans).intervals()
        whole.packing.masks = {window: torch.from_numpy(mask)}
        seen = [[key for low, high in mask[:, :, row].T for key in range(low, high)] for row in range(96)]
    by_rank = rows_by_rank(parts, 96, "two chunks")
    owner = {row: rank for rank, rows in enumerate(by_rank.tolist()) for row in rows}
    wanted = [[0] * parts for _ in range(parts)]
    for rank, rows in enumerate(by_rank.tolist()):
        for key in {key for row in rows for key in seen[row]} - {*rows}:
            wanted[rank][owner[key]] += 1
    for rank in range(parts):
        context = in_context(whole, rank, by_rank, [window]).packing.context
        assert context is not None
        keys = context.keys_of(window)
        assert [*keys.received] == wanted[rank] and [*keys.sent] == [of[rank] for of in wanted]
        assert keys.most == max(map(sum, wanted))


def test_nothing_travels_where_no_rank_lacks_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "send", None)
    packing = in_context(inputs_of([12, 6, 6]), 1, np.arange(24).reshape(2, 12)).packing
    rows = [torch.randn(1, 2, 12, 6, dtype=torch.float64) for _ in range(3)]
    alone = packed_attention(*rows, Packing.of(np.array([6, 6])), causal=True)
    torch.testing.assert_close(packed_attention(*rows, packing, causal=True), alone, rtol=1e-12, atol=1e-12)


def without_a_source(travel: Any, own: Tensor, arriving: Tensor) -> Tensor:
    places = travel.keys.own[: travel.keys.sent[0]]
    return own.index_add_(0, places, travel.context.arrived(arriving)[: len(places)])


@pytest.mark.parametrize("fault", ["", "a key replaced", "a source left out", "a key of another fetch"])
def test_faults_of_the_exchange_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: without a fault there is no difference."""
    torch.manual_seed(0)
    rows = [torch.randn(1, n, 24, 6, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    expected = packed_attention(*rows, Packing.of(np.array([24])), causal=True)
    weight = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, rows, weight)]

    def change(context: Context) -> None:
        if fault == "a key replaced" and context.rank == 0:
            keys = context.keys_of(None)
            context.keys = {None: replace(keys, own=torch.cat([keys.own[1:2], keys.own[1:]]))}

    if fault == "a source left out":
        monkeypatch.setattr(key_exchange._Travel, "finish_back", without_a_source)
    if fault == "a key of another fetch":
        unpack = key_exchange._Kept.unpack
        monkeypatch.setattr(key_exchange._Kept, "unpack", lambda kept, of: unpack(kept, of).roll(1, -1))
    found = on_all_ranks(rows, inputs_of([24]), two_chunks(24, 3), weight, change=change)
    errors = [float((a - b).detach().abs().max()) for a, b in zip([found.out, *found.gradients], wanted, strict=True)]
    if not fault:
        assert max(errors) < 1e-12
    else:
        assert max(errors) > 1e-2
        assert (errors[0] > 1e-2) == (fault == "a key replaced")


def test_compiled_blocks_know_all_numbers_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is outside of compiled code, which does not depend on sizes of the plan."""
    compiled = CompileCounterWithBackend("aot_eager")
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def send(context: Context, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert len(rows) == sum(sent)
        return rows.new_ones(sum(received), rows.shape[1])

    monkeypatch.setattr(Context, "send", send)
    monkeypatch.setattr(Context, "arrived", lambda _, rows: rows)

    def eager(rows: Tensor, packing: Packing) -> Tensor:
        return packed_attention(rows @ weight, rows, rows, packing, causal=True) * 2

    block = torch.compile(eager, backend=compiled, dynamic=True)
    compilations = []
    for blocks in (1, 1, 2, 2, 3, 4, 5, 6):
        by_rank = np.arange(blocks * 24).reshape(blocks, 2, 12).swapaxes(0, 1).reshape(2, -1)
        for lengths in ([24 * blocks], [14, 24 * blocks - 14]):
            packing = in_context(inputs_of(lengths), 1, by_rank).packing
            rows = torch.randn(1, 2, 12 * blocks, 6, dtype=torch.float64, requires_grad=True)
            found, wanted = block(rows, packing), eager(rows, packing)
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(*(torch.autograd.grad(x.sum(), (rows, weight)) for x in (found, wanted)))
        compilations.append(compiled.frame_count)
    assert 0 < compilations[4] == compilations[-1] <= 5


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dealt", ["two chunks", "any rows"])
def test_rows_keep_what_they_are(lengths: list[int], dealt: str) -> None:
    whole, by_rank = inputs_of(lengths), rows_by_rank(2, 24, dealt)
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
        assert (own.packing.rows, own.packing.longest) == (12, max(lengths))
        bad = np.arange(max(1, len(lengths) - 1)) == 0
        silent = own.silenced(bad)
        assert silent.columns is own.columns
        assert (silent.labels == IGNORE)[own.packing.sequence == 0].all()
        kept = own.packing.sequence != 0
        assert silent.labels[kept].tolist() == own.labels[kept].tolist()
        assert silent.labelled is not None
        assert len(silent.labelled) == int((silent.labels != IGNORE).sum())


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
    rows = {int(label): number for number, label in enumerate(whole.labels[whole.labelled])}
    mine = [[rows[label] for label in own.spread.tokens.tolist()] for own in parts if own.spread is not None]
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
