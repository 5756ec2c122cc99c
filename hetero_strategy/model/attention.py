"""Attention over ragged sequences that lie end to end, without a loop over sequences and without host syncs."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel, varlen

from hetero_strategy.errors import ModelError
from hetero_strategy.model.context import Context
from hetero_strategy.model.inputs import Packing

varlen_attn: Any = varlen.varlen_attn


def _takes(kernel: Any) -> tuple[bool, bool]:
    """Whether a kernel for packed sequences has all that is used of it, and whether it is to be told that several heads
    of queries share one of keys: torch 2.11's takes them as they come.
    """
    known = set(inspect.signature(kernel).parameters)
    return {"window_size", "scale"} <= known, "enable_gqa" in known


VARLEN, TOLD_OF_SHARED_HEADS = _takes(varlen_attn)
HALF = (torch.float16, torch.bfloat16)
WIDEST, MULTIPLE = 256, 8
"""Head dimension above which torch's flash kernels stop, and of which they take multiples alone."""
FLASH_MAJOR = 8
"""Major compute capability of the GPUs that they start with."""
DENSE_MAJOR = 9
"""From which major compute capability on cuDNN is faster than those kernels where sequences are alike."""
DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NOT_HERE = ("attention_mask", "s_aux", "position_bias", "head_mask")
"""What transformers' layers may pass to an attention that would change what comes out, and no kernel here takes."""
HF_ATTENTION = "hetero_packed"
"""Name under which packed attention is registered with transformers."""


class _Options(NamedTuple):
    """What :func:`packed_attention` is asked for beside its tensors."""

    causal: bool
    window: int | None = None
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None


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
) -> Tensor:
    """Compute scaled dot-product attention inside every sequence of ``packing``, never across.

    On CUDA in half precision torch's flash kernel for packed sequences takes the rows as they are, from compute
    capability 8.0 on and where 8 divides head_dim; sequences that are alike go to cuDNN from 9.0 on, which takes
    0.55 of the time on an H100. Elsewhere, and with dropout or a soft cap, sequences of similar length are padded
    together and each such bucket is one call: causal attention needs no mask for right padding; bidirectional attention
    gets a key mask only where a bucket has padding, and attention in a window a band where sequences are longer than
    it.

    Args:
        query: ``[1, heads, T, head_dim]``.
        key: ``[1, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        value: ``[1, kv_heads, T, head_dim]``.
        packing: the sequences that make up the T rows.
        causal: whether a row sees only rows up to itself.
        window: how many of these it sees at most, itself among them; causal attention only.
        scale: factor of the scores, ``head_dim ** -0.5`` by default.
        dropout: probability of dropping an attention weight.
        softcap: scores ``s`` become ``softcap * tanh(s / softcap)``, as in Gemma 2. No fused kernel of torch does it:
            all scores of a bucket are in memory.

    Returns:
        ``[1, heads, T, head_dim]``.

    Raises:
        ModelError: a window, shorter than a sequence, of attention that is not causal.
    """
    if window is not None and not causal and window < packing.longest:
        raise ModelError(
            f"window={window} of attention that is not causal: packed attention has windows that look back alone; leave"
            " it out, or give the blocks an attention of their own"
        )
    options = _Options(causal, window, scale, dropout, softcap)
    if packing.context is not None:
        return _in_context(query, key, value, packing, packing.context, options)
    if packing.rows == 0:
        return query + (key.sum() + value.sum())  # empty, yet a gradient (zero) reaches all three
    if _runs_flash(query, options):
        alike = window is None and packing.alike and _major(query) >= DENSE_MAJOR
        kernel = _dense if alike and current_flash_attention_impl() is None else _flash
        return kernel(query, key, value, packing, options)
    if torch.compiler.is_compiling():  # code that must not depend on how many buckets there are
        return _masked(query, key, value, packing, options)
    return _in_buckets(query, key, value, packing, options)


def _runs_flash(query: Tensor, options: _Options) -> bool:
    """Whether torch's flash kernels for packed sequences run here and do all that is asked."""
    if not query.is_cuda or options.dropout or options.softcap is not None or not VARLEN:
        return False
    return _flash_takes(query.dtype, query.shape[-1], _major(query))


def _major(rows: Tensor) -> int:
    """Major compute capability of a GPU, which torch keeps, and its compiler takes as constant."""
    return torch.cuda.get_device_properties(rows.device).major


def _flash_takes(dtype: torch.dtype, head_dim: int, major: int) -> bool:
    """Whether torch's flash kernels for packed sequences take such rows on GPUs of this major compute capability."""
    return dtype in HALF and head_dim <= WIDEST and head_dim % MULTIPLE == 0 and major >= FLASH_MAJOR


def _in_buckets(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    q, k, v = (_to_buckets(x[0].transpose(0, 1), packing) for x in (query, key, value))
    parts = []
    for bucket in packing.buckets:
        shape = (bucket.count, bucket.length)
        rows = slice(bucket.start, bucket.start + bucket.count * bucket.length)
        mask = None if options.causal else bucket.mask
        if options.window is not None and options.window < bucket.length:
            steps = torch.arange(bucket.length, device=q.device)
            mask = _seen(steps, steps, options.window)[None, None]
        one, two, three = (x[rows].unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
        part = _attend(one, two, three, mask, options)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _from_buckets(out, packing).transpose(0, 1)[None]


def _dense(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Sequences of one length, which need no padding."""
    one, two, three = (x[0].unflatten(1, (-1, packing.longest)).transpose(0, 1) for x in (query, key, value))
    with sdpa_kernel(DENSE, set_priority=True):
        out = _attend(one, two, three, None, options)
    return out.transpose(0, 1).flatten(1, 2)[None]


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _varlen(q, k, v, (packing.offsets, packing.offsets, packing.longest, packing.longest), options)


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Any, ...], options: _Options) -> Tensor:
    """Torch's kernel on rows ``[rows, heads, head_dim]``; bounds: offsets of rows and of keys, the longest of both. The
    last row of a sequence sees its last key.
    """
    around = (-1 if options.window is None else options.window - 1, 0) if options.causal else (-1, -1)
    shared: dict[str, Any] = {"enable_gqa": True} if TOLD_OF_SHARED_HEADS and query.shape[1] != key.shape[1] else {}
    out: Tensor = varlen_attn(query, key, value, *bounds, scale=options.scale, window_size=around, **shared)
    return out.transpose(0, 1)[None]


def _masked(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """One call over all rows, whatever sequences they are; its mask ``[T, T]`` grows with the square of the rows."""
    mask = packing.sequence[:, None] == packing.sequence
    if options.causal:
        mask = mask & _seen(packing.positions, packing.positions, options.window)
    return _attend(query, key, value, mask[None, None], options)


def _in_context(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, context: Context, options: _Options
) -> Tensor:
    """Attention of one rank's rows to those of all ranks of context parallelism."""
    if not options.causal:
        raise ModelError("attention that is not causal does not know context parallelism: set cp=1")
    sizes = [rows.shape[1] * rows.shape[3] for rows in (key, value)]
    mine = torch.cat([rows[0].transpose(0, 1).flatten(1) for rows in (key, value)], dim=1)
    seen = context.seen(context.gather(mine)).split(sizes, dim=1)
    keys, values = (x.unflatten(1, (key.shape[1], -1)) for x in seen)
    if _runs_flash(query, options):
        bounds = (*context.offsets, *(len(extent) for extent in context.extents))
        return _varlen(query[0].transpose(0, 1), keys, values, bounds, options)
    counts = [len(chunk) for chunk in context.keys]
    theirs = (x.split(counts) for x in (context.sequence, context.positions, keys, values))
    own = (packing.sequence.chunk(2), packing.positions.chunk(2), query.chunk(2, dim=2))
    chunks = zip(zip(*own, strict=True), zip(*theirs, strict=True), strict=True)
    return torch.cat([_chunk(options, *rows, *seen) for rows, seen in chunks], dim=2)


def _chunk(
    options: _Options,
    sequence: Tensor,
    positions: Tensor,
    query: Tensor,
    of: Tensor,
    at: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Attention of a chunk's rows to the keys of its segments ``[keys, heads, head_dim]``."""
    mask = (sequence[:, None] == of) & _seen(positions, at, options.window)
    key, value = (x.transpose(0, 1)[None] for x in (keys, values))
    return _attend(query, key, value, mask[None, None], options)


def _seen(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a row at one of these positions sees a key at one of those, bool ``[rows, keys]``."""
    before = rows[:, None] - keys
    return before >= 0 if window is None else (before >= 0) & (before < window)


def attention_pairs(lengths: np.ndarray, *, causal: bool, window: int | None = None) -> int:
    """Count the (query, key) pairs of sequences of these lengths, the exact work of attention without padding."""
    if not causal:
        return int((lengths * lengths).sum())
    near = lengths if window is None else np.minimum(lengths, window)
    return int((near * (near + 1) // 2 + (lengths - near) * near).sum())


def register_hf_attention() -> None:
    """Register ``HF_ATTENTION`` with transformers; the layers must be called with ``packing=``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(HF_ATTENTION, _hf_attention)


def _hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    others["attention_mask"] = attention_mask
    if asked := [name for name in NOT_HERE if others.get(name) is not None]:
        raise ModelError(
            f"{type(module).__name__} asks for attention with {', '.join(asked)}, which packed attention does not have;"
            " give its blocks an attention of their own"
        )
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    out = packed_attention(
        query,
        key,
        value,
        packing,
        causal=causal,
        window=sliding_window,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
    )
    return out.transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    """Attention of padded sequences ``[sequences, heads, T, head_dim]``; a mask says all of what a row sees."""
    groups = query.shape[1] // key.shape[1]
    # Only the flash kernel (half precision on CUDA, no mask) shares key heads without falling back to the slow path.
    shared = groups > 1 and mask is None and query.is_cuda and query.dtype in HALF and options.softcap is None
    if groups > 1 and not shared:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if options.softcap is not None:
        return _capped(query, key, value, mask, options)
    given: dict[str, Any] = {"is_causal": options.causal}
    if mask is not None:
        given = {"attn_mask": mask.expand(-1, -1, query.shape[2], -1)}
    return F.scaled_dot_product_attention(
        query, key, value, **given, dropout_p=options.dropout, scale=options.scale, enable_gqa=shared
    )


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    """The same with a soft cap of the scores, whose softmax is in fp32 at least."""
    cap = options.softcap
    assert cap is not None
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = cap * torch.tanh(query @ key.transpose(-2, -1) * (scale / cap))
    if mask is None and options.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return F.dropout(weights, options.dropout) @ value


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
    """``rows[index]``, whose backward is a gather too, so it is fast and deterministic on every device.

    Padding slots take part in nothing real: the gradient that comes out of them is exactly zero and may be dropped, and
    the gradient that goes into them must be zero.
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
