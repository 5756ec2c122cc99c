"""Masks drawn at random and written pair by pair, and attention with them: references that share no code with ours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hetero_strategy.mask import BidirectionalItems, Causal, Full, ItemsAlone, MaskRule, Prefix, Spans, Words

Pairs = Callable[[], np.ndarray]
"""Function that returns whether each row sees each key, bool ``[T, T]``."""


class DrawnMask:
    """Sequences with items of two modules: in a third of the draws of at most one row, of 8 rows and of 40.

    Args:
        seed: number of the draw.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        longest = (1, 8, 40)[seed % 3]
        self.lengths = rng.integers(0, longest + 1, rng.integers(1, 6))
        sequences: list[int] = []
        positions: list[int] = []
        of_rows: list[int] = []
        items = []
        for number, length in enumerate(self.lengths.tolist()):
            of_row, position = [-1] * length, 0
            while (position := position + int(rng.integers(0, 9))) < length:
                rows = min(int(rng.integers(0, 12)), length - position)
                items.append((number, position, rows, ("vision", "audio")[int(rng.integers(2))]))
                of_row[position : position + rows] = [len(items) - 1] * rows
                position += rows
            sequences += [number] * length
            positions += range(length)
            of_rows += of_row
        self.sequence, self.position, self.item = (np.array(x, np.int64) for x in (sequences, positions, of_rows))
        self.source = np.array([items[item][3] if item >= 0 else "" for item in of_rows], "U6")
        self.window, shuffled = int(rng.integers(1, 16)), [items[at] for at in rng.permutation(len(items))]
        prompts = np.array([int(rng.integers(0, length + 1)) for length in self.lengths], np.int64)
        of, start, count = (np.array([line[at] for line in shuffled], np.int64) for at in range(3))
        self.spans = Spans(of, start, count, np.array([line[3] for line in shuffled], "U6"), prompts)
        text = 1 | 2 * rng.integers(0, 8, 6)[self.sequence]
        self.words = np.where(self.item < 0, text, 2 ** (1 + self.item % 3)).astype(np.int64)

    def cases(self) -> list[tuple[MaskRule, Pairs]]:
        """Return each rule with its mask."""
        q, k = np.ix_(*[np.arange(len(self.item))] * 2)
        sequence, position, item, prompts = self.sequence, self.position, self.item, self.spans.prompts
        assert prompts is not None
        together, back = sequence[q] == sequence[k], k <= q
        near = back & (q - k < self.window)
        same = (item[q] == item[k]) & (item[q] >= 0)
        images = same & (self.source[q] == "vision")
        in_prompts = (position[q] < prompts[sequence[q]]) & (position[k] < prompts[sequence[k]])
        w, words = self.window, self.words
        bits = np.where((words[q] & 1) == 1, back & ((words[q] & words[k]) != 0), words[q] == words[k])
        return [
            (Causal(), lambda: together & back),
            (Causal(w), lambda: together & near),
            (Full(), lambda: together),
            (Prefix(), lambda: together & (back | in_prompts)),
            (BidirectionalItems(), lambda: together & (back | same)),
            (BidirectionalItems(("vision",)), lambda: together & (back | images)),
            (BidirectionalItems(("vision",), w), lambda: together & (back | images) & (q - k < w)),
            (BidirectionalItems(None, w, whole_items=True), lambda: together & (near | same)),
            (ItemsAlone(), lambda: np.where(item[q] >= 0, same, together & back)),
            (ItemsAlone(("vision",)), lambda: np.where(images.any(1)[:, None], images, together & back)),
            (Words(lambda *_: words), lambda: together & bits),
        ]

    def case(self, number: int) -> tuple[MaskRule, np.ndarray]:
        """Return one rule, all of which take turns, and its mask."""
        cases = self.cases()
        rule, pairs = cases[number % len(cases)]
        return rule, pairs()


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with all scores at once; arguments as in :func:`packed_attention`, with a mask ``[T, T]``."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    return scores.softmax(3)[..., : key.shape[2]] @ value
