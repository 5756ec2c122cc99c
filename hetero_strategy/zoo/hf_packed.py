"""Attention of transformers' layers over packed rows: one attention function, one mask function, one mask object.

transformers calls the mask function once per kind of layer in a base's forward, and hands the result to each layer,
which hands it to the attention function. The mask is thus an argument of every block, so a block that runs again in
backward has it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.attention import attention_pairs, packed_attention
from hetero_strategy.model.inputs import Movable, Packing

HF_ATTENTION = "hetero_packed"
"""Name of both functions in transformers' registries, of language models and of towers that make no mask."""
END_TO_END = "hetero_flash_rows"
"""Name for towers whose rows lie end to end; with "flash" in it they call attention once per block."""
NOT_HERE = ("position_bias", "head_mask")
"""Arguments of attention functions that would change the result, and that no kernel here supports."""


@dataclass(eq=False)
class PackedMask(Movable):
    """A mask of packed rows, which transformers' layers take as ``attention_mask`` and pass on unread."""

    packing: Packing
    causal: bool = True
    window: int | None = None
    """Most rows that a row sees, including itself."""
    chunk: int | None = None
    """Length of the chunks that see only themselves; :attr:`packing` is cut into them already."""


class AttentionCall(NamedTuple):
    """One call of the attention function by a layer, for one sequence."""

    heads: int
    key_heads: int
    key_width: int
    value_width: int
    window: int | None
    chunk: int | None

    @property
    def context_width(self) -> int:
        """Return the numbers per row that context parallelism sends; values are padded to the keys' width."""
        return 2 * self.key_heads * self.key_width

    def flops(self, lengths: np.ndarray) -> int:
        """Count the FLOPs of the pairs of sequences of these lengths."""
        lengths = lengths if self.chunk is None else _chunks(lengths, self.chunk)
        pairs = attention_pairs(lengths, causal=True, window=self.window)
        return 2 * self.heads * (self.key_width + self.value_width) * pairs


_rows: ContextVar[Packing | None] = ContextVar("hetero_packed_rows", default=None)
_calls: ContextVar[list[AttentionCall] | None] = ContextVar("hetero_attention_calls", default=None)


@contextmanager
def packed_rows(packing: Packing | None) -> Iterator[None]:
    """Make transformers' masks those of packed rows, in a base's forward inside the context; None: none."""
    token = _rows.set(packing)
    try:
        yield
    finally:
        _rows.reset(token)


def rows_now() -> Packing | None:
    """Return the packing of :func:`packed_rows`, if any."""
    return _rows.get()


@contextmanager
def noted_attention() -> Iterator[list[AttentionCall]]:
    """Note the calls of the attention function on the meta device inside the context; it computes nothing there."""
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def register_hf_attention() -> None:
    """Register both functions with transformers; calling it again changes nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(HF_ATTENTION, _attention)
    ALL_ATTENTION_FUNCTIONS.register(END_TO_END, _end_to_end)
    ALL_MASK_ATTENTION_FUNCTIONS.register(HF_ATTENTION, _mask)


def use_packed_attention(model: nn.Module, name: str = HF_ATTENTION) -> None:
    """Set the registered functions in every config of a model.

    The name is set after construction, because transformers looks for a kernel of an unknown name on its hub.
    """
    register_hf_attention()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def reason_of_failure(model_class: Any) -> str:
    """Return why a class of transformers may fail on packed rows, and what to do."""
    if getattr(model_class, "_supports_attention_backend", True):
        return "correct the config if it names a field, else take another class or version of transformers"
    return (
        f"{model_class.__name__} has attention, masks or mixers of its own (_supports_attention_backend=False), which"
        " may not know packed rows: take another class"
    )


def some_mask(rows: int) -> Tensor:
    """Return an ``attention_mask`` for a base's forward, bool ``[1, 1, rows]`` on the CPU.

    It has neither two nor four dimensions: transformers then makes masks by the registered function, and neither reads
    the positions for boundaries of sequences nor waits for the device.
    """
    return torch.ones(1, 1, 1, dtype=torch.bool, device="cpu").expand(1, 1, rows)


def _mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> PackedMask | None:
    """Make the mask of one kind of layer; outside :func:`packed_rows`, where no layer runs, none."""
    packing = _rows.get()
    if packing is None:
        return None
    if local_size is None:
        return PackedMask(packing)
    # A window of n rows ends n - 1 rows before a row n, and a chunk of n rows begins at row n.
    first, row, near = (torch.tensor(number, device="cpu") for number in (0, local_size, 1))
    if local_size <= 1 or bool(mask_function(first, first, row, near)):
        return PackedMask(packing, window=local_size)
    if packing.longest > local_size:
        packing = _chunked(packing, local_size)
    return PackedMask(packing, chunk=local_size)


def _chunked(packing: Packing, size: int) -> Packing:
    """Cut sequences into chunks of ``size`` rows, which are sequences of their own to attention."""
    if packing.context is not None or packing.masks:
        raise ModelError(
            f"attention in chunks of {size} rows and a sequence of {packing.longest} rows do not know context"
            " parallelism and rules of attention: set cp=1, and take a language model without such chunks for a rule"
        )
    device = packing.positions.device
    chunks = Packing.of(_chunks(packing.lengths, size))
    return (chunks.pin_memory() if device.type == "cuda" else chunks).to(device)


def _chunks(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the lengths of all chunks of sequences."""
    count = -(-lengths // size)
    chunks = np.full(int(count.sum()), size, np.int64)
    chunks[np.cumsum(count)[lengths > 0] - 1] = ((lengths - 1) % size + 1)[lengths > 0]
    return chunks


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with queries ``[1, heads, T, width]``; return ``[1, T, heads, value width]``."""
    if not isinstance(attention_mask, PackedMask):
        raise ModelError(
            f"{type(module).__name__} gives attention a {type(attention_mask).__name__} for a mask, so that packed"
            " sequences would see each other; give its blocks an attention of their own"
        )
    if extra := [name for name in NOT_HERE if others.get(name) is not None]:
        raise ModelError(
            f"{type(module).__name__} asks for attention with {', '.join(extra)}, which packed attention does not have;"
            " give its blocks an attention of their own"
        )
    mask, wide = attention_mask, value.shape[-1]
    window = sliding_window if mask.window is None else mask.window
    if window is not None and window < 1:
        raise ModelError(
            f"{type(module).__name__} has a window of {window} rows, which sees nothing; set sliding_window to at least"
            " 1 in the config"
        )
    if query.is_meta and (calls := _calls.get()) is not None:  # the compiler cannot read a ContextVar
        shape = (query.shape[1], key.shape[1], query.shape[-1], wide)
        calls.append(AttentionCall(*shape, window, mask.chunk))
        return value.new_zeros(1, query.shape[2], query.shape[1], wide), None
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    query, key, value = _of_one_width(query, key, value)
    out = packed_attention(
        query,
        key,
        value,
        mask.packing,
        causal=mask.causal,
        window=window,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[..., :wide].transpose(1, 2).contiguous(), None  # some classes take views of it


def _end_to_end(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    cu_seq_lens_q: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within the items of a tower, which hands on a packing in the place of their bounds."""
    if query.is_meta and not isinstance(cu_seq_lens_q, Packing):  # a trace, which has no packing
        cu_seq_lens_q = Packing.of(np.array([query.shape[2]])).to(query.device)
    if not isinstance(cu_seq_lens_q, Packing):
        raise ModelError(
            f"{type(module).__name__} does not say where its items end, or makes it on the device: not run"
        )
    return _attention(module, query, key, value, PackedMask(cu_seq_lens_q, causal=False), **more)


def _of_one_width(*rows: Tensor) -> Iterator[Tensor]:
    """Pad the last dimensions of queries, keys and values to the widest, as kernels need it."""
    widest = max(each.shape[-1] for each in rows)
    return (each if each.shape[-1] == widest else F.pad(each, (0, widest - each.shape[-1])) for each in rows)
