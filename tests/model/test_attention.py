from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_strategy.errors import ModelError
from hetero_strategy.model import attention
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.inputs import Packing
from hetero_strategy.zoo import hf_packed

CASES = [[5], [4, 4, 4], [7, 3, 7, 1], [2, 9, 8, 0, 7, 1], [12, 3, 3, 3], [1, 1], [0, 4, 0]]


def reference(query, key, value, lengths, causal, scale, window=99):
    """One plain softmax per sequence."""
    groups = query.shape[1] // key.shape[1]
    outs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * scale
        if causal:
            seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
            scores = scores.masked_fill(~seen, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
        start += length
    return torch.cat(outs, 2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "major", "takes"),
    [
        (torch.bfloat16, 128, 9, True),
        (torch.float16, 8, 8, True),
        (torch.float32, 128, 9, False),
        (torch.bfloat16, 264, 9, False),
        (torch.bfloat16, 36, 9, False),
        (torch.float16, 64, 7, False),
    ],
)
def test_flash_kernels_are_taken_where_they_run(dtype, head_dim, major, takes):
    assert attention._flash_takes(dtype, head_dim, major) is takes


@pytest.mark.parametrize(
    ("kernel", "options", "lengths", "major"),
    [
        ("_flash", {}, [64, 128], 9),
        ("_dense", {}, [1024, 1024], 9),
        ("_flash", {}, [1024, 1024], 8),
        ("_flash", {"window": 3}, [1024, 1024], 9),
        ("_in_flex", {"softcap": 2.0}, [1024, 1024], 9),
        ("_in_blocks", {"dropout": 0.1}, [1024, 1024], 9),
    ],
)
def test_a_gpu_takes_the_fastest_kernel_that_does_all_that_is_asked(kernel, options, lengths, major, monkeypatch):
    """On tensors without values."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    for name in ("_flash", "_dense", "_in_flex", "_in_blocks"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: name)
    with FakeTensorMode():
        rows = torch.empty(1, 4, sum(lengths), 16, dtype=torch.bfloat16, device="cuda")
    packing = Packing.of(np.array(lengths), alike=True)
    assert packed_attention(rows, rows, rows, packing, causal=True, **options) == kernel


def test_weights_are_dropped():
    inputs, packing = make([7, 3]), Packing.of(np.array([7, 3]))
    out = [packed_attention(*inputs, packing, causal=True, dropout=p) for p in (0.0, 0.5, 0.5)]
    assert not torch.equal(out[0], out[1]) and not torch.equal(out[1], out[2])


def test_what_packed_attention_cannot_do_is_refused():
    inputs, packing = make([3]), Packing.of(np.array([3]))
    with pytest.raises(ModelError, match="Identity asks for attention with head_mask, which packed attention does not"):
        hf_packed._attention(torch.nn.Identity(), *inputs, hf_packed.PackedMask(packing), head_mask=torch.zeros(4))
    with pytest.raises(ModelError, match="Identity gives attention a Tensor for a mask"):
        hf_packed._attention(torch.nn.Identity(), *inputs, torch.ones(1, 1, 3, 3))
    with pytest.raises(ModelError, match="window=2 of attention that is not causal"):
        packed_attention(*inputs, packing, causal=False, window=2)


def test_transformers_classes_are_given_rows_that_they_may_view():
    query, key, value = make([7, 3])
    mask = hf_packed.PackedMask(Packing.of(np.array([7, 3])))
    rows, _ = hf_packed._attention(torch.nn.Identity(), query, key, value[..., :-1], mask)
    assert rows.view(1, 10, -1).shape == (1, 10, query.shape[1] * (value.shape[-1] - 1))


def make(lengths, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    torch.manual_seed(0)
    total = sum(lengths)
    # Rows first in memory, as projections make them.
    return [
        torch.randn(1, total, h, dim, dtype=dtype).transpose(1, 2).requires_grad_() for h in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_equals_attention_of_each_sequence(lengths, causal):
    inputs = make(lengths)
    packing = Packing.of(np.array(lengths))
    out = packed_attention(*inputs, packing, causal=causal, scale=0.3)
    expected = reference(*inputs, lengths, causal, 0.3)
    weight = torch.randn_like(out)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out, inputs, weight)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, inputs, weight), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [1, 3, 7, 8])
@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_a_window_ends_what_a_row_sees(lengths, window):
    inputs = make(lengths)
    packing = Packing.of(np.array(lengths))
    expected = reference(*inputs, lengths, True, 0.3, window)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, weight)
    options = {"causal": True, "window": window, "scale": 0.3}
    out = packed_attention(*inputs, packing, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for grad, theirs in zip(torch.autograd.grad(out, inputs, weight), wanted, strict=True):
        torch.testing.assert_close(grad, theirs, rtol=1e-11, atol=1e-11)
    seen = sum(int(torch.ones(n, n).tril().triu(1 - window).sum()) for n in lengths)
    assert attention.attention_pairs(np.array(lengths), causal=True, window=window) == seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype):
    lengths = [7, 3, 7, 1]
    inputs = make(lengths, dtype=dtype)
    out = packed_attention(*inputs, Packing.of(np.array(lengths)), causal=False)
    assert out.dtype == dtype
    expected = reference(*(x.double() for x in inputs), lengths, False, 8**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.02 if dtype != torch.float32 else 1e-6)
    out.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in inputs)


def test_no_row_sees_another_sequence_or_its_future():
    lengths = [5, 4, 6]
    inputs = make(lengths)
    packing = Packing.of(np.array(lengths))
    out = packed_attention(*inputs, packing, causal=True)
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[:, :, 7] += 1.0  # third row of the second sequence
    moved = (packed_attention(*changed, packing, causal=True) - out).abs().sum((0, 1, 3)) > 0
    assert moved.nonzero().flatten().tolist() == [7, 8]
    moved = packed_attention(*changed, packing, causal=False) - packed_attention(*inputs, packing, causal=False)
    assert (moved.abs().sum((0, 1, 3)) > 0).nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_a_wrong_packing_is_noticed():
    inputs = make([5, 4])
    out = packed_attention(*inputs, Packing.of(np.array([5, 4])), causal=False)
    assert not torch.allclose(out, packed_attention(*inputs, Packing.of(np.array([9])), causal=False))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_at_all_has_gradients(lengths):
    inputs = make(lengths)
    out = packed_attention(*inputs, Packing.of(np.array(lengths, dtype=np.int64)), causal=True)
    assert out.shape == inputs[0].shape
    assert all(grad is not None for grad in torch.autograd.grad(out.sum(), inputs))


def test_positions_and_sequences():
    packing = Packing.of(np.array([2, 0, 3]))
    assert packing.positions.tolist() == [0, 1, 0, 1, 2]
    assert packing.sequence.tolist() == [0, 0, 2, 2, 2]
    assert packing.longest == 3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_go_to_the_flash_kernel_as_they_are(causal, kv_heads, monkeypatch):
    """What a GPU would be given, on tensors without values: no padding, no mask, no repeated heads."""
    lengths = np.array([5, 0, 3, 9])
    given = []
    kernel = attention.varlen_attn

    def seen(*args, **options):
        given.append((args, options))
        return kernel(*args, **options)

    monkeypatch.setattr(attention, "varlen_attn", seen)
    packing = Packing.of(lengths)
    assert packing.offsets.tolist() == [0, 5, 5, 8, 17] and packing.offsets.dtype == torch.int32
    make = lambda heads, device: torch.empty(1, heads, 17, 8, dtype=torch.bfloat16, device=device)  # noqa: E731
    query, key, value = (make(heads, "meta") for heads in (4, kv_heads, kv_heads))
    window = 5 if causal else None
    out = attention._flash(query, key, value, packing.to("meta"), attention._Options(causal, window, 0.3))
    assert out.shape == query.shape
    packed_attention(make(4, "cpu"), make(4, "cpu"), make(4, "cpu"), packing, causal=causal)  # there is none on the CPU
    ((q, k, _, offsets, _, longest, _), options) = given.pop()
    assert not given
    assert q.shape == (17, 4, 8) and k.shape == (17, kv_heads, 8) and longest == 9 and len(offsets) == 5
    shared = {"enable_gqa": True} if kv_heads < 4 and attention.TOLD_OF_SHARED_HEADS else {}
    assert options == {"scale": 0.3, "window_size": (4, 0) if causal else (-1, -1), **shared}


def test_a_torch_that_does_not_say_that_heads_share_keys_is_not_asked_to():
    """torch 2.11's kernel, by its parameters."""

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=None):
        raise AssertionError

    assert attention._takes(of_2_11) == (True, False)
    assert attention._takes(lambda query, key, value, is_causal: None) == (False, False)
