"""A new kind of file: time series in ``.npy`` files, for which ``<series>`` stands in a question.

    python examples/own_processor.py              # one process
    python examples/own_processor.py --ranks 4

docs/your_module.md says what each method is for.
"""

import numpy as np
import torch
from own_encoder import make_llm, train, write_text
from torch import nn

from hetero_strategy import Encoder, EncoderInputs, ModuleLayout, MultimodalModel, Projector
from hetero_strategy.errors import DataError
from hetero_strategy.model import Packing


class Series:
    """A processor: it turns a file into rows of ``channels * stack`` numbers."""

    field = "series"  # of the manifest
    size_names = ("rows",)  # of the numbers in an item's sizes

    def __init__(self, channels=12, stack=4):
        self.channels, self.stack = channels, stack
        self.feature = channels * stack  # width of a raw row: so many time steps

    def settings(self):  # for JSON: the data set is indexed again where they change
        return {"kind": "Series", "channels": self.channels, "stack": self.stack}

    def measure(self, path):  # sizes and edge rows, from the header alone
        rows = len(self.opened(path)) // self.stack
        return (rows,), rows

    def inner_rows(self, sizes):  # int64 [n, k] -> int64 [n]: the rows that the backbone's transformer sees
        return sizes[:, 0]

    def check(self, path):  # reads all of the file
        self.load(path)

    def load(self, path, sizes=None):  # float32 [R, feature], where R is the product of the sizes
        if sizes is not None and self.measure(path)[0] != sizes:
            raise DataError(f"{path}: its sizes were {sizes} when it was indexed; delete the index folder")
        values = np.array(self.opened(path), np.float32)
        return values[: len(values) // self.stack * self.stack].reshape(-1, self.feature)

    def collate(self, values, sizes, rows):  # items end to end; there may be none
        joined = np.concatenate([np.zeros((0, self.feature), np.float32), *values])
        return EncoderInputs(torch.from_numpy(joined), sizes, rows, Packing.of(self.inner_rows(sizes)))

    def opened(self, path):
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable .npy file: {error}") from None
        if values.ndim != 2 or values.shape[1] != self.channels or len(values) < self.stack:
            raise DataError(f"{path}: shape {values.shape}, needs [at least {self.stack}, {self.channels}]")
        return values


class SeriesMLP(nn.Module):
    """Any ``nn.Module`` that maps rows can be an encoder; it may get no rows at all."""

    def __init__(self, feature=48, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(feature, width), nn.Linear(width, width)

    def forward(self, inputs: EncoderInputs):
        return self.down(nn.functional.gelu(self.up(inputs.values.to(self.up.weight.dtype))))


def make():
    llm = make_llm()
    return MultimodalModel(
        {"sensor": Encoder(SeriesMLP, Projector(64, llm.width), processor=Series()), "llm": llm}, seed=1
    )


def write(folder, samples=64):
    """Write time series of several lengths and the question which of two waves they are."""
    rng, entries = np.random.default_rng(0), []
    for i in range(samples):
        turns = np.arange(rng.integers(8, 40))[:, None] / (4 if i % 2 else 8)
        np.save(folder / f"{i}.npy", np.sin(2 * np.pi * turns + rng.random(12)))
        turns = [{"from": "human", "value": "<series> which wave ?"}, {"from": "gpt", "value": ("slow", "fast")[i % 2]}]
        entries.append({"id": str(i), "series": f"{i}.npy", "conversations": turns})
    write_text(folder, entries, "<series>")


if __name__ == "__main__":
    train(
        __doc__,
        make,
        write,
        {
            "sensor": ModuleLayout(
                [0],
            ),
            "llm": ModuleLayout([1, 2, 3], dp_shard=3),
        },
    )
