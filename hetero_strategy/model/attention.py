"""Attention over ragged sequences end to end, without a loop over sequences.

The host waits for a CUDA device only where attention runs block by block: with dropout, or in fp64.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel, varlen
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hetero_strategy.errors import ModelError
from hetero_strategy.model.block_attention import BLOCK, attend_in_blocks
from hetero_strategy.model.context import Context
from hetero_strategy.model.head_exchange import HeadExchange
from hetero_strategy.model.inputs import Packing
from hetero_strategy.model.key_exchange import attend_over_ranks

varlen_attn: Any = varlen.varlen_attn


def _takes(kernel: Any) -> tuple[bool, bool]:
    """Return whether a kernel for packed sequences has all needed arguments, and whether it has ``enable_gqa`` for key
    heads shared by several query heads: torch 2.11's kernel needs no such flag.
    """
    known = set(inspect.signature(kernel).parameters)
    return {"window_size", "scale"} <= known, "enable_gqa" in known


VARLEN, TOLD_OF_SHARED_HEADS = _takes(varlen_attn)
HALF = (torch.float16, torch.bfloat16)
WIDEST, MULTIPLE = 256, 8
"""Largest head dimension of torch's flash kernels, and the number of which it must be a multiple."""
NARROWEST = 16
"""Smallest head dimension of flex_attention's kernels."""
FLASH_MAJOR = 8
"""Lowest major compute capability of the flash kernels' GPUs."""
DENSE_MAJOR = 9
"""Major compute capability from which cuDNN is faster than the flash kernels for sequences of one length."""
DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Options(NamedTuple):
    """The options of :func:`packed_attention`."""

    causal: bool
    window: int | None = None
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute scaled dot-product attention inside every sequence of ``packing``, never across.

    Memory grows with the rows, whatever the mask; with flex_attention also with the pairs of blocks of 128 rows. The
    kernel is the first of these that knows all options:

    * on CUDA in half precision, from compute capability 8.0 on and if 8 divides head_dim, torch's flash kernel for
      packed sequences, which takes the rows unchanged. Sequences of one length go to cuDNN from 9.0 on, which takes
      0.55 of the time on an H100. Neither knows masks of rules, soft caps, sinks and dropout;
    * on CUDA flex_attention, which knows neither dropout nor fp64;
    * attention block by block in a Python loop, in which the host waits for a CUDA device.

    Args:
        query: queries ``[1, heads, T, head_dim]``.
        key: keys ``[1, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        value: values ``[1, kv_heads, T, head_dim]``.
        packing: the sequences that make up the T rows.
        causal: whether a row sees only rows up to itself, or by the mask in :attr:`Packing.masks` for this window.
        window: most rows that a row sees, including itself; causal attention only.
        scale: factor of the scores; default ``head_dim ** -0.5``.
        dropout: probability of dropping an attention weight.
        softcap: bound of the scores, which become ``softcap * tanh(score / softcap)``.
        sinks: scores ``[heads]`` that take a share of every row's weights and give nothing.

    Returns:
        ``[1, heads, T, head_dim]``.

    Raises:
        ModelError: attention that is not causal has a window shorter than a sequence, or meets context parallelism by
            keys; context-parallel ranks cannot divide the heads; or the rule of attention has no mask for ``window``.
    """
    if isinstance(context := packing.context, HeadExchange):
        all_rows = context.to_heads(query, key, value)
        attended = packed_attention(
            *all_rows,
            packing=context.whole,
            causal=causal,
            window=window,
            scale=scale,
            dropout=dropout,
            softcap=softcap,
            sinks=None if sinks is None else context.own(sinks),
        )
        return context.to_rows(attended, query.shape[2])
    if window is not None and not causal and window < packing.longest:
        raise ModelError(
            f"window={window} of attention that is not causal: packed attention has windows that look back alone; leave"
            " it out, or give the blocks an attention of their own"
        )
    options = _Options(causal, window, scale, dropout, softcap, sinks)
    if context is not None:
        if not causal:
            raise ModelError(
                "attention that is not causal does not know context parallelism by keys: set cp=1 or cp_form='heads'"
            )
        if (keys := context.keys_of(window)).most:
            in_flash = _runs_flash(query, options) and context.by_segments and not packing.masks

            def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
                return _attended(query, key, value, packing, options._replace(sinks=sinks))

            return attend_over_ranks(attend, context, keys, in_flash, query, key, value, sinks=sinks)
    if packing.rows == 0:
        return query + (key.sum() + value.sum())  # empty, but a (zero) gradient reaches all three
    return _attended(query, key, value, packing, options)


def _attended(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Attend with the first kernel that knows all options, to the seen keys."""
    causal, window = options.causal, options.window
    mask = packing.masks.get(window) if causal else None
    if causal and packing.masks and mask is None:
        raise ModelError(f"a layer has window={window}, and its rule of attention knows windows {[*packing.masks]}")
    by_segments = not isinstance(packing.context, Context) or packing.context.by_segments
    if mask is None and by_segments and _runs_flash(query, options):
        uniform = window is None and packing.alike and _major(query) >= DENSE_MAJOR
        kernel = _dense if uniform and current_flash_attention_impl() is None else _flash
        return kernel(query, key, value, packing, options)
    run = _in_flex if _runs_flex(query, options) else _in_blocks
    return run(query, key, value, intervals(packing, causal=causal, window=window) if mask is None else mask, options)


def intervals(packing: Packing, *, causal: bool, window: int | None = None) -> Tensor:
    """Return the keys that each row sees where no rule gives a mask: first keys and ends, int32 ``[2, 1, T]``."""
    if not causal:
        return torch.stack([packing.offsets[:-1], packing.offsets[1:]]).index_select(1, packing.sequence)[:, None]
    end = torch.arange(1, packing.rows + 1, device=packing.positions.device)
    if isinstance(packing.context, Context):
        end = packing.context.keys_of(window).ends
    seen = packing.positions + 1
    start = end - (seen if window is None else seen.clamp(max=window))
    return torch.stack([start, end])[:, None].to(torch.int32)


def _runs_flash(query: Tensor, options: _Options) -> bool:
    """Return whether torch's flash kernels for packed sequences run here and support all options."""
    if not query.is_cuda or options.dropout or options.softcap or options.sinks is not None or not VARLEN:
        return False
    return _flash_takes(query.dtype, query.shape[-1], _major(query))


def _major(rows: Tensor) -> int:
    """Return the major compute capability of a GPU; torch caches it, and its compiler treats it as constant."""
    return torch.cuda.get_device_properties(rows.device).major


def _flash_takes(dtype: torch.dtype, head_dim: int, major: int) -> bool:
    """Return whether torch's flash kernels for packed sequences take such rows on GPUs of this compute capability."""
    return dtype in HALF and head_dim <= WIDEST and head_dim % MULTIPLE == 0 and major >= FLASH_MAJOR


def _runs_flex(query: Tensor, options: _Options) -> bool:
    """Return whether torch's flex_attention runs here and supports all options."""
    fits = query.dtype != torch.float64 and query.shape[-1] >= NARROWEST
    return query.is_cuda and fits and not options.dropout


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: _Options) -> Tensor:
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    seed = torch.randint(2**62, (), device="cpu") if options.dropout else None
    out: Tensor = attend_in_blocks(
        query, key, value, mask[0], mask[1], options.sinks, seed, scale, options.softcap or 0.0, options.dropout
    )
    return out


def _in_flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: _Options) -> Tensor:
    softcap, sinks = options.softcap, options.sinks

    def bounded(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    run = flex_attention if torch.compiler.is_compiling() or not query.is_cuda else _compiled_flex()
    out, aux = run(
        query,
        key,
        value,
        score_mod=bounded if softcap else None,
        block_mask=block_mask(mask, key.shape[2]),
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is None:
        return out
    # A sink is one more score in the sum of which lse is the logarithm.
    return out * (aux.lse - sinks[:, None]).sigmoid()[..., None].to(out.dtype)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def block_mask(mask: Tensor, keys: int) -> BlockMask:
    """Build the mask of flex_attention from intervals, int32 ``[2, m, T]``, in memory for pairs of blocks alone.

    Of ``keys`` keys it leaves out the blocks that no row of a block sees. If rows have several intervals, it leaves out
    those outside all numbered intervals of the block's rows, from the least to the largest key of each number.
    """
    starts, ends = mask[0], mask[1]
    rows, none = starts.shape[1], ends <= starts
    first, last = (
        F.pad(x.masked_fill(none, void), (0, -rows % BLOCK), value=void).unflatten(1, (-1, BLOCK))
        for x, void in ((starts, torch.iinfo(starts.dtype).max), (ends, -1))
    )
    edges = torch.arange(0, keys, BLOCK, device=starts.device, dtype=starts.dtype)
    some = (edges < last.amax(2)[..., None]) & (edges + BLOCK > first.amin(2)[..., None])
    whole = (edges >= first.amax(2)[..., None]) & (edges + BLOCK <= last.amin(2)[..., None])
    full = whole.any(0)
    partly, fully = (
        (
            blocks.sum(-1, dtype=torch.int32)[None, None],
            blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None, None],
        )
        for blocks in (some.any(0) & ~full, full)
    )

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = (key >= starts[0, row]) & (key < ends[0, row])
        for number in range(1, len(starts)):
            seen = seen | ((key >= starts[number, row]) & (key < ends[number, row]))
        return seen

    return BlockMask.from_kv_blocks(*partly, *fully, BLOCK, seen, (rows, keys))


def _dense(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Attend in sequences of one length, which need no padding."""
    one, two, three = (x[0].unflatten(1, (-1, packing.longest)).transpose(0, 1) for x in (query, key, value))
    shared = query.shape[1] != key.shape[1]
    with sdpa_kernel(DENSE, set_priority=True):
        out = F.scaled_dot_product_attention(
            one, two, three, is_causal=options.causal, scale=options.scale, enable_gqa=shared
        )
    return out.transpose(0, 1).flatten(1, 2)[None]


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Run torch's kernel on packed rows; in context parallelism the last row of a segment sees its last key."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds: tuple[Any, ...] = (packing.offsets, packing.offsets, packing.longest, packing.longest)
    if isinstance(packing.context, Context):
        keys = packing.context.keys_of(options.window)
        bounds = (packing.offsets, keys.offsets, len(packing.context.extent), len(keys.extent))
    around = (-1 if options.window is None else options.window - 1, 0) if options.causal else (-1, -1)
    shared: dict[str, Any] = {"enable_gqa": True} if TOLD_OF_SHARED_HEADS and q.shape[1] != k.shape[1] else {}
    out: Tensor = varlen_attn(q, k, v, *bounds, scale=options.scale, window_size=around, **shared)
    return out.transpose(0, 1)[None]


def attention_pairs(lengths: np.ndarray, *, causal: bool, window: int | None = None) -> int:
    """Count the (query, key) pairs of sequences of these lengths, the exact work of attention without padding."""
    if not causal:
        return int((lengths * lengths).sum())
    near = lengths if window is None else np.minimum(lengths, window)
    return int((near * (near + 1) // 2 + (lengths - near) * near).sum())
