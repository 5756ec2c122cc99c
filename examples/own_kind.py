"""A kind of module of your own: a contrastive head that compares a sample's pictures with its text.

    python examples/own_kind.py              # one process
    python examples/own_kind.py --ranks 4    # the head on rank 3 alone

For every sample with a picture it scores the pictures' rows against the language model's rows of that sample. It trains
negatives and has the sigmoid loss of SigLIP. docs/your_module.md explains each method.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from own_encoder import make_model, train, write_data
from torch import nn
from torch.utils._pytree import register_dataclass

from hetero_strategy import ModuleLayout, MultimodalModel
from hetero_strategy.model import Adapter, LossOutput, ModuleInputs, ModuleKind
from hetero_strategy.plan.step_plan import StepItems, UnitRuns

NEGATIVES = 7


@dataclass(frozen=True, eq=False)
class Pairs(ModuleInputs):
    """Inputs of n units: a unit's rows are the rows of its pictures, then the rows of its text."""

    part: torch.Tensor  # int64 [T]: 2i for rows of the i-th unit's pictures, 2i + 1 for those of its text
    counts: torch.Tensor  # int64 [2n]: rows of each part
    counted: torch.Tensor  # bool [n]

    def silenced(self, bad):  # on_error="skip": these units could not be read
        return replace(self, counted=torch.from_numpy(~bad))

    def only(self, units):  # int64 numbers of some units: packed units are compared with each alone
        counts = self.counts.unflatten(0, (-1, 2))[units].flatten()
        part = torch.arange(len(counts)).repeat_interleave(counts)
        return replace(self, part=part, counts=counts, counted=self.counted[units], slots={})


@dataclass
class Matched(LossOutput):
    """The loss, and a count for a metric."""

    right: torch.Tensor  # scalar: units whose own pair has the highest score


register_dataclass(Matched)  # FSDP of torch before 2.13 needs it


class Matching(ModuleKind):
    """A kind with one unit for each sample that has a picture."""

    name = "Matching"
    takes_from = ("Encoder", "CausalLM")
    sources = 2  # exactly one edge from each

    def units(self, metadata, sources):
        encoder, language_model = sorted(sources, key=lambda name: name not in metadata.items)
        pictures = metadata.items[encoder]
        samples, unit = np.unique(pictures.sample, return_inverse=True)
        rows = np.bincount(unit, weights=pictures.edge_rows, minlength=len(samples)).astype(np.int64)
        inside = np.cumsum(pictures.edge_rows) - pictures.edge_rows - (np.cumsum(rows) - rows)[unit]
        numbers, zeros, tokens = np.arange(len(samples)), np.zeros_like(samples), metadata.tokens[samples]
        return StepItems(
            sample=samples,
            edge_rows=rows,
            start=zeros,
            inner_rows=rows + tokens,
            targets=np.full_like(samples, 1 + NEGATIVES),  # elements of the loss: their sum is N
            given={  # from (unit, row) of a source to (unit, row) here, so many rows
                encoder: UnitRuns(np.arange(len(unit)), np.zeros_like(unit), unit, inside, pictures.edge_rows),
                language_model: UnitRuns(samples, zeros, numbers, rows, tokens),
            },
        )

    def inputs(self, units):
        counts = np.stack([units.edge_rows, units.inner_rows - units.edge_rows], axis=1).reshape(-1)
        part = np.repeat(np.arange(len(counts)), counts)
        counted = torch.ones(len(units.numbers), dtype=torch.bool)
        return Pairs(torch.from_numpy(part), torch.from_numpy(counts), counted, slots=units.slots)

    def metrics(self, metadata, module):  # divisors of the sums that measured() gives: the units that count
        return {"right": int((metadata.items[module].targets > 0).sum())}

    def measured(self, inputs, output):
        return (output.right,)


class Match(Adapter):
    """Two linear maps of mean rows, and scores between them."""

    kind = Matching()

    def __init__(self, width=32, dim=16):
        super().__init__()
        self.width = self.hidden_width = width
        self.norm, self.picture, self.text = nn.LayerNorm(width), nn.Linear(width, dim), nn.Linear(width, dim)
        self.negatives, self.scale = nn.Linear(dim, NEGATIVES, bias=False), nn.Linear(1, 1)

    def forward(self, inputs, rows, hidden=None):
        pooled = self.norm.weight.new_zeros(len(inputs.counts), self.width)
        for source, given in rows.items():
            pooled = pooled.index_add(0, inputs.part[inputs.slots[source]], given.to(pooled.dtype))
        pictures, texts = self.norm(pooled / inputs.counts[:, None]).unflatten(0, (-1, 2)).unbind(1)
        picture, text = self.picture(pictures), self.text(texts)
        scores = torch.cat([(picture * text).sum(1, keepdim=True), self.negatives(picture)], dim=1)
        signs = torch.ones_like(scores)
        signs[:, 1:] = -1
        losses = nn.functional.softplus(-signs * self.scale(scores[..., None])[..., 0])
        right = (scores[:, 0] > scores[:, 1:].amax(dim=1)) & inputs.counted
        return Matched((losses * inputs.counted[:, None]).sum(), right.sum())


def make():
    modules = make_model().modules_by_name
    edges = [("vision", "llm"), ("vision", "match"), ("llm", "match")]
    return MultimodalModel({**modules, "match": Match()}, edges, seed=1)


if __name__ == "__main__":
    layouts = {"vision": ModuleLayout([0]), "llm": ModuleLayout([1, 2], pp=2), "match": ModuleLayout([3])}
    train(__doc__, make, write_data, layouts)
