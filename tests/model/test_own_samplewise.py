"""A kind of one's own whose units are whole samples, and that is no CausalLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model import Adapter, LossOutput, ModuleKind, MultimodalModel
from hetero_strategy.zoo import titan_llama
from tests.model.helpers import TITAN, HandBatch, ready, tokens


class Scoring(ModuleKind):
    """Gives each sample a score, and counts what the scores are."""

    name = "Scoring"
    samplewise = True
    takes_from = ("Encoder",)

    def inputs(self, units):
        raise NotImplementedError  # the batch is made by hand

    def metrics(self, metadata, module):
        return {"score": len(metadata.labels)}

    def measured(self, inputs, output):
        return (output.loss_sum,)

    def result(self, module, metadata, like, *, pipelined):
        return like.new_zeros(len(metadata.labels))

    def placed(self, metadata, module, units, inputs, output):
        return units, output.hidden


class Score(Adapter):
    kind = Scoring()

    def __init__(self):
        super().__init__()
        self.width = self.hidden_width = 16
        self.embed = nn.Embedding(40, 1)

    def forward(self, inputs, rows, hidden=None):
        scores = torch.stack([part.sum() for part in self.embed(inputs.ids).split(inputs.packing.lengths.tolist())])
        return LossOutput(scores.sum(), hidden=scores)


def batch(*modules):
    first, second = tokens([8, 9], seed=1), tokens([5], seed=2)
    units = [{name: [0, 2] for name in modules}, {name: [1] for name in modules}]
    given = [dict.fromkeys(modules, first), dict.fromkeys(modules, second)]
    (zero, two), (one,) = ((part.labels >= 0).split(part.packing.lengths.tolist()) for part in (first, second))
    counts = np.array([int(labels.sum()) for labels in (zero, one, two)])
    return HandBatch(given, units, counts)


def test_it_trains_alone_with_the_metrics_that_it_has():
    model = ready(MultimodalModel({"score": Score()})).eval()
    with torch.no_grad():
        out = model(batch("score"))
    assert out.accuracy.isnan() and out.exact_match.isnan() and out.predictions is None
    assert out.drawn is not None
    torch.testing.assert_close(out.drawn["score"].mean(), out.metrics["score"]["score"].double())
    torch.testing.assert_close(out.loss * out.loss_tokens, out.drawn["score"].sum())


def test_beside_a_language_model_it_counts_in_no_accuracy():
    model = ready(MultimodalModel({"score": Score(), "llm": titan_llama(**TITAN)}, edges=[])).eval()
    with torch.no_grad():
        out = model(batch("score", "llm"))
    assert out.accuracy == out.metrics["llm"]["accuracy"] and "accuracy" not in out.metrics["score"]
    assert out.predictions is not None and len(out.predictions.values) == out.loss_tokens
    assert out.drawn is not None and out.drawn.keys() == {"score"}


def test_no_edge_brings_it_a_language_models_rows():
    class Reading(Scoring):
        name = "Reading"
        takes_from = ("CausalLM",)

    class Read(Score):
        kind = Reading()

    with pytest.raises(ModelError, match=r"edge llm -> read: the units of both are whole samples.*units\(\)"):
        MultimodalModel({"llm": titan_llama(**TITAN), "read": Read()}, edges=[("llm", "read")])
