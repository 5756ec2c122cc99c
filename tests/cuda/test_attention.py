"""On CUDA attention takes packed rows as they are; in buckets it computes the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_strategy.model import attention
from hetero_strategy.model.inputs import Packing
from tests.cuda.devices import EVERYWHERE

CLOSE = 0.01
"""Relative error in the 2-norm, bf16."""


def errors(lengths: list[int], kv_heads: int, causal: bool, device: str, other: list[int] | None = None) -> list[float]:
    """Of output and gradients, as the product computes them, beside buckets (of ``other`` lengths), in the 2-norm."""
    make = lambda heads: torch.randn(1, sum(lengths), heads, 64).to(device, torch.bfloat16).transpose(1, 2)  # noqa: E731
    given = [make(heads).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    weight, found = make(4), []
    asked = attention._Options(causal, scale=0.1)
    for buckets, packed in ((False, lengths), (True, other or lengths)):
        packing = Packing.of(np.array(packed)).to(device)
        if buckets:
            out = attention._in_buckets(*given, packing, asked)
        else:
            out = attention.packed_attention(*given, packing, **asked._asdict())
        found.append([x.detach().double() for x in (out, *torch.autograd.grad(out, given, weight))])
    return [float((ours - buckets).norm() / buckets.norm()) for ours, buckets in zip(*found, strict=True)]


@EVERYWHERE
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", [[300, 7, 150, 64], [0, 33, 0, 0, 129, 1, 0]], ids=["ragged", "with empty ones"])
def test_packed_rows_attend_as_in_buckets(lengths: list[int], kv_heads: int, causal: bool, device: str) -> None:
    assert all(error <= CLOSE for error in errors(lengths, kv_heads, causal, device))


@pytest.mark.cuda
def test_the_flash_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not attention.VARLEN:
        pytest.skip(f"torch {torch.__version__} has no kernel for packed rows with window and scale")
    calls = []
    flash = attention._flash
    monkeypatch.setattr(attention, "_flash", lambda *args, **options: calls.append(1) or flash(*args, **options))
    errors([20, 0, 30], 4, True, "cuda")
    assert calls


@EVERYWHERE
def test_another_packing_is_noticed(device: str) -> None:
    """Negative control."""
    assert all(error > 2 * CLOSE for error in errors([40, 50], 4, True, device, other=[45, 45]))
