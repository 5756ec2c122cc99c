"""Measure whether packed sequences of a language model stay apart, with made-up rows and without a reference.

Forwards alone are compared: no gradient is needed, and a router that counts other sequences' rows shows, too, though no
gradient tells.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.context import Context, in_context
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.model.packed_alone import row_difference

LENGTHS = np.array([5, 11, 1, 14, 1])
CHANGED, FROM = 1, 6
"""Sequence whose rows are changed, and its first row that is."""


def packing_errors(module: CausalLM, ids: Tensor | None = None) -> dict[str, float]:
    """Run a language model on five packed sequences and measure what should be 0 but for rounding.

    Args:
        module: whole module with values, in evaluation mode.
        ids: token numbers int64 ``[32]`` below the vocabulary; default: drawn.

    Returns:
        Largest differences of a row, relative to the size of rows: ``others``: rows of other sequences if one sequence
        changes; ``earlier``: rows of a sequence if its later rows change; ``alone``: rows of a sequence without the
        others; ``context``: rows of two context-parallel ranks, if the module allows them. Infinite: not finite.
    """
    inputs = made_up(module, ids)
    generator = torch.Generator().manual_seed(2)
    rows, other = (torch.randn(len(inputs.ids), module.width, generator=generator) for _ in range(2))
    starts = ragged.offsets(LENGTHS)
    first, change, last = int(starts[CHANGED]), int(starts[CHANGED]) + FROM, int(starts[CHANGED + 1])
    changed = rows.clone()
    changed[change:last] = other[change:last]
    with torch.no_grad():
        packed, moved = (_rows(module, inputs, values) for values in (rows, changed))
        elsewhere = [*range(first), *range(last, len(rows))]
        alone = [
            row_difference(packed[a:b], _rows(module, inputs.only(np.array([number])), rows[a:b]))
            for number, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        ]
        errors = {
            "others": row_difference(moved[elsewhere], packed[elsewhere]),
            "earlier": row_difference(moved[first:change], packed[first:change]),
            "alone": max(alone),
        }
        if module.context_parallel:
            errors["context"] = row_difference(_in_two_parts(module, inputs, rows), packed)
    return errors


def made_up(module: CausalLM, ids: Tensor | None = None) -> SequenceInputs:
    """Return packed sequences of drawn tokens, each of which is a label."""
    if ids is None:
        high = module.vocab_size or 2
        ids = torch.randint(0, high, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(1))
    return SequenceInputs(ids, ids.clone(), Packing.of(LENGTHS))


def _rows(module: CausalLM, inputs: SequenceInputs, rows: Tensor) -> Tensor:
    """Return rows after the last block, made from these rows ``[T, width]`` in place of embedded tokens."""
    slots: dict[Hashable, Tensor] = {"rows": torch.arange(len(rows))}
    dtype = next(p.dtype for p in module.parameters())
    output: Any = module(replace(inputs, slots=slots), {"rows": rows.to(dtype)})
    return output.hidden


def _in_two_parts(module: CausalLM, inputs: SequenceInputs, rows: Tensor) -> Tensor:
    """Run two context-parallel ranks as threads, which hand each other their keys."""
    meeting, total = Meeting(2), len(rows)
    dealt = two_chunks(total, 2)
    results: list[Tensor | BaseException] = [torch.empty(0)] * 2

    def rank(number: int) -> None:
        part = in_context(inputs, number, dealt, module.kind.rules)
        context = part.packing.context
        part = replace(part, packing=replace(part.packing, context=together(context, meeting)))
        own = rows[dealt[number]]
        try:
            with torch.no_grad(), torch.device("cpu"):  # both belong to a thread
                results[number] = _rows(module, part, own)
            meeting.leave(number)
        except BaseException as error:
            results[number] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in results if isinstance(one, BaseException)]
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    whole = torch.empty_like(rows)
    for number, one in enumerate(results):
        assert isinstance(one, Tensor)
        whole[dealt[number]] = one.to(whole.dtype)
    return whole


class Meeting:
    """A place where ranks in threads exchange tensors. None waits by the clock, for a busy machine changes nothing."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.parts: list[Sequence[Tensor] | None] = [None] * ranks

    def exchange(self, rank: int, parts: Sequence[Tensor], received: Sequence[int]) -> Tensor:
        """Return the ``received`` rows of each rank for this one, which sends a part to each."""
        self.parts[rank] = parts
        self.barrier.wait()
        arrived = [of[rank] for of in self.parts if of is not None]
        self.barrier.wait()  # until all have read, none may write again
        self.parts[rank] = None
        self._require([len(part) for part in arrived] == [*received])
        return torch.cat(arrived)

    def leave(self, rank: int) -> None:
        """Wait until all ranks leave."""
        self.parts[rank] = None
        self.barrier.wait()
        self._require(all(parts is None for parts in self.parts))

    def _require(self, alike: bool) -> None:
        if not alike:
            raise RuntimeError("one context-parallel rank exchanges keys more often than the other")


class _Together(Context):
    """A context whose ranks are threads."""

    meeting: Meeting

    @override
    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self.meeting.exchange(self.rank, rows.split([*sent]), received)

    @override
    def arrived(self, sending: Tensor) -> Tensor:
        return sending


def together(context: object, meeting: Meeting) -> Context:
    """Return a context of a rank that is a thread."""
    assert isinstance(context, Context)
    joined = _Together(**{field.name: getattr(context, field.name) for field in fields(context)})
    joined.meeting = meeting
    return joined
