"""On CUDA attention takes packed rows as they are; block by block it computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.mask import ItemsAlone, Spans
from hetero_strategy.model import attention
from hetero_strategy.model.inputs import Packing
from tests.cuda.devices import EVERYWHERE
from tests.model.test_context import inputs_of, on_all_ranks

CLOSE = 0.01
"""Relative error in the 2-norm, bf16."""


def errors(lengths: list[int], kv_heads: int, causal: bool, device: str, other: list[int] | None = None) -> list[float]:
    """Of output and gradients, as the product computes them, beside blocks (of ``other`` lengths), in the 2-norm."""
    make = lambda heads: torch.randn(1, sum(lengths), heads, 64).to(device, torch.bfloat16).transpose(1, 2)  # noqa: E731
    given = [make(heads).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    weight, found = make(4), []
    asked = attention._Options(causal, scale=0.1)
    for blocks, packed in ((False, lengths), (True, other or lengths)):
        packing = Packing.of(np.array(packed), alike=True).to(device)
        if blocks:
            out = in_blocks(given, packing, asked)
        else:
            out = attention.packed_attention(*given, packing, **asked._asdict())
        found.append([x.detach().double() for x in (out, *torch.autograd.grad(out, given, weight))])
    return [float((ours - blocks).norm() / blocks.norm()) for ours, blocks in zip(*found, strict=True)]


def in_blocks(given: list[torch.Tensor], packing: Packing, asked: Any) -> torch.Tensor:
    return attention._in_blocks(*given, attention.intervals(packing, causal=asked.causal), asked)


@EVERYWHERE
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", [[300, 7, 150, 64], [0, 33, 0, 0, 129, 1, 0]], ids=["ragged", "with empty ones"])
def test_packed_rows_attend_as_in_blocks(lengths: list[int], kv_heads: int, causal: bool, device: str) -> None:
    assert all(error <= CLOSE for error in errors(lengths, kv_heads, causal, device))


@EVERYWHERE
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sequences_of_one_length_attend_as_in_blocks(
    kv_heads: int, causal: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(attention, "packed_attention", _dense)
    assert all(error <= CLOSE for error in errors([1024, 1024], kv_heads, causal, device))


def _dense(*given: Any, **asked: Any) -> torch.Tensor:
    return attention._dense(*given, attention._Options(**asked))


@pytest.mark.parametrize(
    ("lengths", "alike"),
    [([1024] * 3, True), ([4096], True), ([512] * 3, False), ([1100] * 2, False), ([1024, 2048], False), ([], False)],
)
def test_only_long_sequences_of_one_length_are_alike(lengths: list[int], alike: bool) -> None:
    assert Packing.of(np.array(lengths), alike=True).alike is alike
    assert not Packing.of(np.array(lengths)).alike, "the step has other lengths"


@pytest.mark.cuda
@pytest.mark.parametrize(("lengths", "kernel"), [([20, 0, 30], "_flash"), ([1024, 1024], "_dense")])
def test_the_kernel_for_such_lengths_is_used(lengths: list[int], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not attention.VARLEN:
        pytest.skip(f"torch {torch.__version__} has no kernel for packed rows with window and scale")
    if kernel == "_dense" and torch.cuda.get_device_properties(0).major < attention.DENSE_MAJOR:
        pytest.skip("cuDNN is no faster on this GPU")
    calls = []
    used = getattr(attention, kernel)
    monkeypatch.setattr(attention, kernel, lambda *args, **options: calls.append(1) or used(*args, **options))
    errors(lengths, 4, True, "cuda")
    assert calls


@pytest.mark.cuda
@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"sinks": torch.arange(4.0)}], ids=["plain", "cap", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flex_attention_attends_as_in_blocks(dtype: torch.dtype, more: dict[str, Any]) -> None:
    """Two images that see themselves alone, in 1,000 rows."""
    spans = Spans(*(np.array(x) for x in ([0, 0], [100, 500], [300, 200], ["vision"] * 2)))
    mask = torch.from_numpy(ItemsAlone().slices(np.array([900, 100]), spans).intervals()).cuda()
    make = lambda heads: torch.randn(1, heads, 1000, 64, device="cuda", dtype=dtype).requires_grad_()  # noqa: E731
    given, weight = [make(heads) for heads in (4, 2, 2)], make(4).detach()
    options = attention._Options(
        True, **{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    )
    outs = [run(*given, mask, options) for run in (attention._in_flex, attention._in_blocks)]
    both = ([out, *torch.autograd.grad(out, given, weight)] for out in outs)
    for ours, blocks in zip(*both, strict=True):
        assert float((ours.double() - blocks.double()).norm() / blocks.double().norm()) <= CLOSE


@EVERYWHERE
def test_another_packing_is_noticed(device: str) -> None:
    """Negative control."""
    assert all(error > 2 * CLOSE for error in errors([40, 50], 4, True, device, other=[45, 45]))


@EVERYWHERE
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", [[600], [300, 7, 150, 63, 80]], ids=["one", "ragged"])
def test_context_parallel_ranks_attend_as_in_blocks(lengths: list[int], kv_heads: int, device: str) -> None:
    rows = [torch.randn(1, 600, n, 64).to(device, torch.bfloat16).transpose(1, 2) for n in (4, kv_heads, kv_heads)]
    given, weight = [x.requires_grad_() for x in rows], torch.randn_like(rows[0])
    whole = in_blocks(given, Packing.of(np.array(lengths)).to(device), attention._Options(True))
    parts = on_all_ranks(given, inputs_of(lengths), two_chunks(600, 2), weight)
    for ours, other in zip(
        (parts.out, *parts.gradients), (whole, *torch.autograd.grad(whole, given, weight)), strict=True
    ):
        assert float((ours.double() - other.double()).norm() / other.double().norm()) <= CLOSE
