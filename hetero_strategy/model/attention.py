"""Attention over ragged sequences end to end, without a loop over sequences and without host syncs."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel, varlen

from hetero_strategy.errors import ModelError
from hetero_strategy.model.context import Context
from hetero_strategy.model.inputs import Bucket, Packing

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
    blocks: Tensor | None = None

    @property
    def dense(self) -> bool:
        """Return whether only scores or masks of all pairs of a bucket give the result."""
        return bool(self.softcap) or self.sinks is not None or self.blocks is not None


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
    blocks: Tensor | None = None,
) -> Tensor:
    """Compute scaled dot-product attention inside every sequence of ``packing``, never across.

    On CUDA in half precision, from compute capability 8.0 on and if 8 divides head_dim, torch's flash kernel for packed
    sequences takes the rows unchanged. Sequences of one length go to cuDNN from 9.0 on, which takes 0.55 of the time on
    an H100.

    Otherwise, and with dropout, sequences of similar length are padded together, and each such bucket is one call.
    Causal attention needs no mask for right padding; bidirectional attention gets a key mask only in a bucket with
    padding, and windowed attention a band if sequences are longer than the window. Soft caps, sinks and blocks need
    memory for all pairs of a bucket: scores of every head, with blocks alone one mask.

    Args:
        query: queries ``[1, heads, T, head_dim]``.
        key: keys ``[1, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        value: values ``[1, kv_heads, T, head_dim]``.
        packing: the sequences that make up the T rows.
        causal: whether a row sees only rows up to itself.
        window: most rows that a row sees, including itself; causal attention only.
        scale: factor of the scores; default ``head_dim ** -0.5``.
        dropout: probability of dropping an attention weight.
        softcap: bound of the scores, which become ``softcap * tanh(score / softcap)``.
        sinks: scores ``[heads]`` that take a share of every row's weights and give nothing.
        blocks: int64 ``[T]``, number of the block to which a row belongs, or -1; rows of a block also see its later
            rows, as far as the window reaches. Numbers are unique in a sequence; causal attention only.

    Returns:
        ``[1, heads, T, head_dim]``.

    Raises:
        ModelError: bidirectional attention has a window shorter than a sequence, or context parallelism meets soft
            caps, sinks or blocks.
    """
    if window is not None and not causal and window < packing.longest:
        raise ModelError(
            f"window={window} of attention that is not causal: packed attention has windows that look back alone; leave"
            " it out, or give the blocks an attention of their own"
        )
    options = _Options(causal, window, scale, dropout, softcap, sinks, blocks)
    if packing.context is not None:
        if options.dense:
            raise ModelError("attention with a soft cap, sinks or blocks does not know context parallelism: set cp=1")
        return _in_context(query, key, value, packing, packing.context, options)
    if packing.rows == 0:
        return query + (key.sum() + value.sum())  # empty, but a (zero) gradient reaches all three
    if _runs_flash(query, options):
        uniform = window is None and packing.alike and _major(query) >= DENSE_MAJOR
        kernel = _dense if uniform and current_flash_attention_impl() is None else _flash
        return kernel(query, key, value, packing, options)
    if not torch.compiler.is_compiling():
        return _in_buckets(query, key, value, packing, options)
    # Compiled code must not depend on the number of buckets.
    return (_uncompiled if options.dense else _masked)(query, key, value, packing, options)


def _runs_flash(query: Tensor, options: _Options) -> bool:
    """Return whether torch's flash kernels for packed sequences run here and support all options."""
    if not query.is_cuda or options.dropout or options.dense or not VARLEN:
        return False
    return _flash_takes(query.dtype, query.shape[-1], _major(query))


def _major(rows: Tensor) -> int:
    """Return the major compute capability of a GPU; torch caches it, and its compiler treats it as constant."""
    return torch.cuda.get_device_properties(rows.device).major


def _flash_takes(dtype: torch.dtype, head_dim: int, major: int) -> bool:
    """Return whether torch's flash kernels for packed sequences take such rows on GPUs of this compute capability."""
    return dtype in HALF and head_dim <= WIDEST and head_dim % MULTIPLE == 0 and major >= FLASH_MAJOR


def _in_buckets(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    q, k, v = (_to_buckets(x[0].transpose(0, 1), packing) for x in (query, key, value))
    blocks = None if options.blocks is None else _to_buckets(options.blocks, packing)
    parts = []
    for bucket in packing.buckets:
        shape = (bucket.count, bucket.length)
        rows = slice(bucket.start, bucket.start + bucket.count * bucket.length)
        mask = None if options.causal else bucket.mask
        if options.dense or (options.window is not None and options.window < bucket.length):
            steps = torch.arange(bucket.length, device=q.device)
            mask = _seen(steps, steps, options.window)[None, None]
            if blocks is not None:
                mask = _with_blocks(mask, blocks[rows].unflatten(0, shape), steps, bucket, options.window)
        one, two, three = (x[rows].unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
        part = _attend(one, two, three, mask, options)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _from_buckets(out, packing).transpose(0, 1)[None]


_uncompiled = torch.compiler.disable(_in_buckets)


def _with_blocks(mask: Tensor, blocks: Tensor, steps: Tensor, bucket: Bucket, window: int | None) -> Tensor:
    """Add to a causal mask ``[1, 1, L, L]`` the pairs in blocks ``[n, L]``; no row sees padding, which is later."""
    same = (blocks[:, :, None] == blocks[:, None]) & (blocks >= 0)[:, None]
    if window is not None:
        same = same & (steps[:, None] - steps < window)
    mask = mask | same[:, None]
    return mask if bucket.mask is None else mask & (bucket.mask | _seen(steps, steps, 1))


def _dense(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Attend in sequences of one length, which need no padding."""
    one, two, three = (x[0].unflatten(1, (-1, packing.longest)).transpose(0, 1) for x in (query, key, value))
    with sdpa_kernel(DENSE, set_priority=True):
        out = _attend(one, two, three, None, options)
    return out.transpose(0, 1).flatten(1, 2)[None]


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _varlen(q, k, v, (packing.offsets, packing.offsets, packing.longest, packing.longest), options)


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Any, ...], options: _Options) -> Tensor:
    """Run torch's kernel on rows ``[rows, heads, head_dim]``; the last row of a sequence sees its last key.

    Args:
        bounds: offsets of rows and of keys, and the longest of both.
    """
    around = (-1 if options.window is None else options.window - 1, 0) if options.causal else (-1, -1)
    shared: dict[str, Any] = {"enable_gqa": True} if TOLD_OF_SHARED_HEADS and query.shape[1] != key.shape[1] else {}
    out: Tensor = varlen_attn(query, key, value, *bounds, scale=options.scale, window_size=around, **shared)
    return out.transpose(0, 1)[None]


def _masked(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Attend over all rows in one call, whatever sequences they are; its mask ``[T, T]`` grows with the square of T."""
    mask = packing.sequence[:, None] == packing.sequence
    if options.causal:
        mask = mask & _seen(packing.positions, packing.positions, options.window)
    return _attend(query, key, value, mask[None, None], options)


def _in_context(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, context: Context, options: _Options
) -> Tensor:
    """Attend from one rank's rows to the rows of all context-parallel ranks."""
    if not options.causal:
        raise ModelError("attention that is not causal does not know context parallelism: set cp=1")
    sizes = [rows.shape[1] * rows.shape[3] for rows in (key, value)]
    own_rows = torch.cat([rows[0].transpose(0, 1).flatten(1) for rows in (key, value)], dim=1)
    gathered, flash = context.gather(own_rows), _runs_flash(query, options)
    seen = (context.seen_by_segments if flash else context.seen)(gathered).split(sizes, dim=1)
    keys, values = (x.unflatten(1, (key.shape[1], -1)) for x in seen)
    if flash:
        bounds = (*context.offsets, *(len(extent) for extent in context.extents))
        return _varlen(query[0].transpose(0, 1), keys, values, bounds, options)
    mask = packing.sequence[:, None] == context.sequence
    mask = mask & _seen(packing.positions, context.positions, options.window)
    one, two = (x.transpose(0, 1)[None] for x in (keys, values))
    return _attend(query, one, two, mask[None, None], options)


def _seen(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return whether each row sees each key, by their positions, bool ``[rows, keys]``."""
    before = rows[:, None] - keys
    return before >= 0 if window is None else (before >= 0) & (before < window)


def attention_pairs(lengths: np.ndarray, *, causal: bool, window: int | None = None) -> int:
    """Count the (query, key) pairs of sequences of these lengths, the exact work of attention without padding."""
    if not causal:
        return int((lengths * lengths).sum())
    near = lengths if window is None else np.minimum(lengths, window)
    return int((near * (near + 1) // 2 + (lengths - near) * near).sum())


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    """Attend in padded sequences ``[sequences, heads, T, head_dim]``; a mask fully defines what a row sees."""
    groups = query.shape[1] // key.shape[1]
    # Only the flash kernel (half precision on CUDA, no mask) shares key heads without falling back to the slow path.
    shared = groups > 1 and mask is None and query.is_cuda and query.dtype in HALF
    if groups > 1 and not shared:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if options.softcap or options.sinks is not None:
        assert mask is not None
        return _scored(query, key, value, mask, options)
    mask_options: dict[str, Any] = {"is_causal": options.causal}
    if mask is not None:
        mask_options = {"attn_mask": mask.expand(-1, -1, query.shape[2], -1)}
    return F.scaled_dot_product_attention(
        query, key, value, **mask_options, dropout_p=options.dropout, scale=options.scale, enable_gqa=shared
    )


def _scored(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: _Options) -> Tensor:
    """Attend as :func:`_attend` with scores of all pairs in memory."""
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = query @ key.transpose(-1, -2) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return F.dropout(weights, options.dropout)[..., : key.shape[2]] @ value


def _to_buckets(rows: Tensor, packing: Packing) -> Tensor:
    """Turn ``[T, ...]`` into ``[padded rows, ...]``."""
    if packing.gather is None or packing.restore is None:
        return rows
    return _Move.apply(rows, packing.gather, packing.restore, False)


def _from_buckets(padded: Tensor, packing: Packing) -> Tensor:
    """Turn ``[padded rows, ...]`` into ``[T, ...]``."""
    if packing.gather is None or packing.restore is None:
        return padded
    return _Move.apply(padded, packing.restore, packing.gather, True)


class _Move(torch.autograd.Function):
    """A gather ``rows[index]`` whose backward is a gather too, so it is fast and deterministic on every device.

    Padding slots never affect real rows: gradients out of them are exactly zero and may be dropped, and gradients into
    them must be zero.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, drops_padding: bool) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.drops_padding, ctx.shape = drops_padding, rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse = ctx.saved_tensors
        if ctx.drops_padding:
            return grads[0].new_zeros(ctx.shape).index_copy_(0, index, grads[0].contiguous()), None, None, None
        return grads[0].index_select(0, inverse), None, None, None
