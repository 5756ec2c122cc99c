"""Layers that keep a state from row to row, such as gated delta nets and Mamba mixers: one sequence at a time.

transformers' own code for packed states needs kernels and is not handed on by all classes. Running a mixer once per
sequence is exact for each of them, and slow where sequences are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.model.inputs import Packing
from hetero_strategy.zoo.hf_packed import AttentionCall, PackedMask, packed_rows, rows_now
from hetero_strategy.zoo.hf_stand_ins import Joined, join


def mixers_of(blocks: Sequence[nn.Module], attention: Sequence[Sequence[AttentionCall]]) -> list[list[str]]:
    """Return the names of each block's children that mix rows without attention.

    They are the children with a convolution over rows, and in blocks without attention those that no block with
    attention has, by name and class.

    Args:
        attention: calls of attention by each block.
    """
    kinds = [[(name, type(child)) for name, child in block.named_children()] for block in blocks]
    common = {kind for block, calls in zip(kinds, attention, strict=True) if calls for kind in block}
    others = common and set(chain(*kinds)) - common
    return [
        [
            name
            for name, child in block.named_children()
            if any(isinstance(part, nn.Conv1d) for part in child.modules())
            or (not calls and (name, type(child)) in others)
        ]
        for block, calls in zip(blocks, attention, strict=True)
    ]


def run_each_sequence(block: nn.Module, names: Sequence[str]) -> None:
    """Change a block in place: it takes a ``packing``, and these children run once per sequence of it."""
    join(block, TakesPacking)
    for name in names:
        join(block.get_submodule(name), EachSequence)


class TakesPacking(Joined):
    """A block whose mixers find its packing; as an argument, the packing is there in a recomputed forward, too."""

    @override
    def forward(self, *args: Any, packing: Packing | None = None, **kwargs: Any) -> Any:
        with packed_rows(packing):
            return super().forward(*args, **kwargs)


class EachSequence(Joined):
    """A mixer of rows ``[1, T, ...]`` that runs on the rows of one sequence at a time, without a mask."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        packing = rows_now()
        if packing is None:
            return super().forward(*args, **kwargs)
        results, start = [], 0
        for length in packing.lengths[packing.lengths > 0].tolist():
            rows = slice(start, start + length)
            own = [_part(value, rows, packing.rows) for value in args]
            named = {name: _part(value, rows, packing.rows) for name, value in kwargs.items()}
            if "attention_mask" in named:  # bases without attention hand on that of :func:`some_mask`
                named["attention_mask"] = None
            results.append(super().forward(*own, **named))
            start += length
        return _end_to_end(results)


def _part(value: Any, rows: slice, count: int) -> Any:
    """Return an argument's part of some of ``count`` rows."""
    if isinstance(value, PackedMask):
        return None
    if isinstance(value, tuple | list):
        return type(value)(_part(each, rows, count) for each in value)
    return value[:, rows] if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == count else value


def _end_to_end(results: list[Any]) -> Any:
    """Join the rows of each sequence; other results than rows, such as attention weights, are None."""
    if isinstance(results[0], tuple):
        return (_end_to_end([result[0] for result in results]), *[None] * (len(results[0]) - 1))
    return torch.cat(results, dim=1)
