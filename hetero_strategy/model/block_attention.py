"""Exact attention block by block, with memory that grows with the rows alone, forward and backward.

A row sees intervals of keys, :class:`~hetero_strategy.mask.Slices` as tensors. Scores exist for one block of rows at a
time, and backward computes them again. It is one operator to torch's compiler, to recompute and to fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Rows whose scores exist at once."""


class _Scoring(NamedTuple):
    """The numbers that turn products of rows and keys into weights."""

    scale: float
    softcap: float
    dropout: float


class _Block(NamedTuple):
    """A block of B rows, with all query heads of a key head side by side, and the N keys that some of them see."""

    rows: slice
    keys: slice
    mask: Tensor
    """bool ``[B, N]``."""
    query: Tensor
    """``[kv_heads, heads / kv_heads * B, width]``."""
    key: Tensor
    """``[kv_heads, N, width]``."""
    value: Tensor

    def weights(self, sinks: Tensor | None, scoring: _Scoring) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the weights ``[kv_heads, heads / kv_heads, B, N]``, those of sinks ``[..., B, 1]``, and the slope of
        the soft cap.
        """
        scores = (self.query @ self.key.transpose(1, 2) * scoring.scale).unflatten(1, (-1, len(self.mask)))
        slope = None
        if scoring.softcap:
            bounded = torch.tanh(scores / scoring.softcap)
            scores, slope = scoring.softcap * bounded, 1 - bounded * bounded
        scores = scores.masked_fill_(~self.mask, -torch.inf)
        if sinks is None:
            return scores.softmax(-1), None, slope
        sunk = sinks.to(scores.dtype).reshape(len(scores), -1, 1, 1).expand(*scores.shape[:-1], 1)
        all_weights = torch.cat([scores, sunk], dim=-1).softmax(-1)
        return all_weights[..., :-1], all_weights[..., -1:], slope


def _blocks(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Tensor) -> Iterator[_Block]:
    """Yield blocks of rows, computed at least in fp32, and the keys from the first to the last that they see."""
    dtype, count = torch.promote_types(query.dtype, torch.float32), starts.shape[1]
    edges = range(0, count, BLOCK)
    most = torch.iinfo(starts.dtype).max
    used = starts.masked_fill(ends <= starts, most).amin(0)
    bounds = torch.stack([used, -ends.amax(0)])
    bounds = torch.nn.functional.pad(bounds, (0, -count % BLOCK), value=most).unflatten(1, (-1, BLOCK)).amin(2)
    for first, (low, high) in zip(edges, bounds.T.tolist(), strict=True):
        rows, keys = slice(first, min(first + BLOCK, count)), slice(low, -high)
        numbers = torch.arange(low, -high, device=query.device, dtype=starts.dtype)
        mask = ((numbers >= starts[:, rows, None]) & (numbers < ends[:, rows, None])).any(0)
        own = query[0, :, rows].to(dtype).unflatten(0, (key.shape[1], -1)).flatten(1, 2)
        yield _Block(rows, keys, mask, own, key[0, :, keys].to(dtype), value[0, :, keys].to(dtype))


def _dropped(weights: Tensor, seed: Tensor | None, block: int, dropout: float) -> Tensor | None:
    """Return the factors of weights with dropout: 0, or 1 over the share that is left."""
    if seed is None:
        return None
    generator = torch.Generator(weights.device).manual_seed(int(seed) + block)
    kept = torch.rand(weights.shape, dtype=torch.float32, generator=generator, device=weights.device) >= dropout
    return kept.to(weights.dtype) / (1 - dropout)


def _like_rows(rows: Tensor) -> Tensor:
    """Return memory for ``[1, heads, T, width]``, row by row, as projections want it."""
    return rows.new_empty(1, rows.shape[2], rows.shape[1], rows.shape[3]).transpose(1, 2)


@torch.library.custom_op("hetero::attend_in_blocks", mutates_args=())
def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Attend from rows to the keys in their intervals; on CUDA the host waits for the device.

    Args:
        query: queries ``[1, heads, T, width]``.
        key, value: ``[1, kv_heads, K, width]``; ``heads`` is a multiple of ``kv_heads``.
        starts, ends: int32 ``[m, T]``: first keys and ends of m intervals of each row, which sees at least one key.
        sinks: scores ``[heads]`` that take a share of every row's weights and give nothing.
        seed: int64 scalar on the host, for dropout; None: no dropout.
        scale: factor of the scores.
        softcap: bound of the scores; 0: none.
        dropout: probability of dropping a weight.

    Returns:
        ``[1, heads, T, width]``.
    """
    out = _like_rows(query)
    for number, block in enumerate(_blocks(query, key, value, starts, ends)):
        weights, _, _ = block.weights(sinks, _Scoring(scale, softcap, dropout))
        if (factors := _dropped(weights, seed, number, dropout)) is not None:
            weights = weights * factors
        attended = weights.flatten(1, 2) @ block.value
        out[0, :, block.rows] = attended.unflatten(1, (-1, len(block.mask))).flatten(0, 1).to(out.dtype)
    return out


@attend_in_blocks.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return _like_rows(query)


@torch.library.custom_op("hetero::attend_in_blocks_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks (none: empty)."""
    scoring = _Scoring(scale, softcap, dropout)
    precise = torch.promote_types(query.dtype, torch.float32)
    of_query = _like_rows(query)
    of_key, of_value = (torch.zeros_like(x, dtype=precise) for x in (key, value))
    of_sinks = torch.zeros(0 if sinks is None else query.shape[1], dtype=precise, device=query.device)
    for number, block in enumerate(_blocks(query, key, value, starts, ends)):
        weights, sunk, slope = block.weights(sinks, scoring)
        own = gradient[0, :, block.rows].to(precise).unflatten(0, (len(block.key), -1)).flatten(1, 2)
        of_weights = (own @ block.value.transpose(1, 2)).view_as(weights)
        dropped = weights
        if (factors := _dropped(weights, seed, number, dropout)) is not None:
            dropped, of_weights = weights * factors, of_weights * factors
        of_value[0, :, block.keys] += dropped.flatten(1, 2).transpose(1, 2) @ own
        mean = (of_weights * weights).sum(-1, keepdim=True)
        if sunk is not None:
            of_sinks -= (sunk * mean).sum((2, 3)).flatten()
        of_scores = weights * (of_weights - mean) * scale
        if slope is not None:
            of_scores *= slope
        of_scores = of_scores.flatten(1, 2)
        of_rows = (of_scores @ block.key).unflatten(1, (-1, len(block.mask))).flatten(0, 1)
        of_query[0, :, block.rows] = of_rows.to(query.dtype)
        of_key[0, :, block.keys] += of_scores.transpose(1, 2) @ block.query
    of_sinks = of_sinks if sinks is None else of_sinks.to(sinks.dtype)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_sinks


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    sinks = others[2]
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return _like_rows(query), torch.empty_like(key), torch.empty_like(value), of_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scoring = inputs[7:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint makes them again each time
    *rows, of_sinks = _backward(gradient, *saved, *ctx.scoring)
    return *rows, None, None, None if saved[5] is None else of_sinks, None, None, None, None


attend_in_blocks.register_autograd(_gradients, setup_context=_keep)
