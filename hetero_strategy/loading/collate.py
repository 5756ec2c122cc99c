"""From the units that an instance computes to what its module takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch

from hetero_strategy.loading.payload import Items
from hetero_strategy.model.inputs import IGNORE, GeneratorInputs, Packing, SequenceInputs

Slots = Mapping[Hashable, torch.Tensor]
"""(source, its microbatch) -> rows inside the module that it fills."""


def sequence(
    tokens: np.ndarray, learnt: np.ndarray, lengths: np.ndarray, packing: Packing, slots: Slots
) -> SequenceInputs:
    """Samples of these lengths, end to end, and the alignment rows of the packing behind them.

    Args:
        tokens: ids, int32 ``[T]``.
        learnt: whether each is to be predicted, bool ``[T]``.
    """
    ids = np.zeros(int(packing.lengths.sum()), np.int64)
    ids[: len(tokens)] = tokens
    labels = np.full(len(ids), IGNORE, np.int64)
    # Shifted within each sample: its last token predicts nothing, whatever sample lies behind it.
    last = np.zeros(len(tokens), bool)
    last[np.cumsum(lengths)[lengths > 0] - 1] = True
    source = np.flatnonzero(~last[:-1] & learnt[1:])
    labels[source] = ids[source + 1]
    return SequenceInputs(torch.from_numpy(ids), torch.from_numpy(labels), packing, dict(slots))


def targets(
    items: Items,
    drawn: Sequence[np.ndarray] | None,
    feature: int,
    packing: Packing,
    slots: Slots,
    seed: tuple[int, int, int],
) -> GeneratorInputs:
    """What one instance of a generator draws in one of its microbatches.

    Args:
        drawn: rows of each item, float32 ``[R, feature]``; None where this rank has no stage that sees target rows,
            which are the first and the last.
        seed: (of the run, epoch, of the generator): noise and times are functions of these and of the item alone.
    """
    noise = [np.zeros((0, feature), np.float32)]
    time = np.zeros(len(items.numbers), np.float32)
    for place, item in enumerate(items.numbers.tolist()):
        random = np.random.Generator(np.random.PCG64([*seed[:2], item, seed[2]]))
        time[place] = random.random(dtype=np.float32)  # first, so that ranks that read no payload draw the same
        if drawn is not None:
            noise.append(random.standard_normal(drawn[place].shape, np.float32))
    return GeneratorInputs(
        values=torch.from_numpy(np.concatenate([noise[0], *(drawn or ())])),
        noise=torch.from_numpy(np.concatenate(noise)),
        time=torch.from_numpy(time),
        sizes=items.sizes,
        rows=items.rows,
        packing=packing,
        slots=dict(slots),
    )
