"""An encoder of a person's own, as README describes it: any module, without a word about its rows."""

from __future__ import annotations

import torch
from torch import nn

from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.model import Encoder, Projector
from hetero_strategy.model.inputs import EncoderInputs


class Cells(nn.Module):
    """A row for every ``side x side`` patches: their values through one linear map, summed."""

    def __init__(self, feature: int, width: int, side: int) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(feature, width), side

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        rows, made, start = self.first(inputs.values), [], 0
        for height, width in inputs.sizes.tolist():
            grid = rows[start : start + height * width].unflatten(0, (height // self.side, self.side, -1, self.side))
            made.append(grid.sum(dim=(1, 3)).flatten(0, 1))
            start += height * width
        return torch.cat([rows[:0], *made])


def own_encoder(*, patch_size: int, out_width: int, side: int) -> Encoder:
    """:class:`Cells` and a projector; always reads cells of 2 x 2."""
    processor = ImageProcessor(patch_size=patch_size, merge=2, channels=1)
    return Encoder(lambda: Cells(processor.feature, 16, side), Projector(16, out_width), processor=processor)
