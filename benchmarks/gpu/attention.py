"""Attention over packed rows: the flash kernel for them, block by block, and dense attention over padded sequences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.table import Line
from benchmarks.measuring import peak_bytes, seconds_in_turns
from hetero_strategy.model import attention
from hetero_strategy.model.inputs import Packing

SIZES = {"full": (16384, 200, 8000, 16, 128), "tiny": (96, 5, 40, 2, 8)}
"""Rows, shortest and longest sequence, heads, width of a head."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value ``[1, heads, T, head_dim]`` -> ``[1, heads, T, head_dim]``."""


def mixed_lengths(rows: int, shortest: int, longest: int) -> np.ndarray:
    """Random lengths, evenly on a logarithmic scale, that add up to ``rows``; one is the longest."""
    rng, lengths = np.random.default_rng(0), [longest]
    while (left := rows - sum(lengths)) >= 2 * shortest:
        drawn = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        lengths.append(min(drawn, left - shortest))
    return rng.permutation([*lengths, left]).astype(np.int64)


def dense(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Causal attention of all sequences at once, each padded to the longest."""
    shape = (len(packing.lengths), packing.longest)
    slots = packing.sequence * packing.longest + packing.positions
    padded = (
        x[0].new_zeros(x.shape[1], shape[0] * shape[1], x.shape[3]).index_copy(1, slots, x[0]).unflatten(1, shape)
        for x in (query, key, value)
    )
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in padded), is_causal=True)
    return out.transpose(0, 1).flatten(1, 2).index_select(1, slots)[None]


def ways(packing: Packing) -> dict[str, Attend]:
    """How it may be done on this device."""
    options = attention._Options(causal=True)
    mask = attention.intervals(packing, causal=True)
    blocks = partial(attention._in_blocks, mask=mask, options=options)
    made: dict[str, Attend] = {"blocks": blocks, "dense": partial(dense, packing=packing)}
    if packing.offsets.is_cuda and attention.VARLEN:
        made["flash"] = partial(attention._flash, packing=packing, options=options)
    return made


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Forward and backward of each way in bf16, all compared with dense attention."""
    rows, shortest, longest, heads, width = SIZES[size]
    packing = Packing.of(mixed_lengths(rows, shortest, longest)).to(device)
    rng = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, 1, rows, heads, width, generator=rng, device=device, dtype=torch.bfloat16)
    query, key, value, out = (make().transpose(1, 2) for _ in range(4))
    given = [x.requires_grad_() for x in (query, key, value)]
    attend = ways(packing)
    runs = {name: partial(_both, way, given, out) for name, way in attend.items()}
    peaks = {name: peak_bytes(run, device) / 1e6 for name, run in runs.items()}
    seconds = seconds_in_turns(runs, device, rounds=9, warm_up=3.0 if size == "full" else 0.0)
    milliseconds = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    apart = {name: _apart(way(*given), attend["dense"](*given)) for name, way in attend.items()}
    for name in ("flash", "blocks"):
        if name not in attend:
            yield Line(f"{name}, time", None, "ms", "dense", milliseconds["dense"], note=_why_not(device))
            continue
        note = f"{len(packing.lengths)} sequences, {rows} rows, differs by {apart[name]:.0e}"
        yield Line(f"{name}, time", milliseconds[name], "ms", "dense", milliseconds["dense"], "< 1", note)
        yield Line(f"{name}, peak memory", peaks[name], "MB", "dense", peaks["dense"], "< 1")


def _both(attend: Attend, given: list[Tensor], gradient: Tensor) -> None:
    torch.autograd.grad(attend(*given), given, gradient)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.detach().float() - other.detach().float()).norm() / other.detach().float().norm())


def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return "it needs a CUDA device"
    return f"torch {torch.__version__} has no kernel for packed rows with window and scale"
