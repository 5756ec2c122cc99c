"""A fourth kind of module, written here alone: a contrastive head under the strategy gives one process's gradients.

The head compares, for every sample with a picture, the picture's rows with the language model's rows of the sample, by
the sigmoid loss of SigLIP (Zhai et al. 2023), over the sample's own pair and pairs with trained negatives. So the loss
is a sum over samples, whatever shares a microbatch with them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from hetero_strategy import ragged
from hetero_strategy.errors import ModelError
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.model import (
    Adapter,
    LossOutput,
    ModelOutput,
    ModuleInputs,
    ModuleKind,
    MultimodalModel,
)
from hetero_strategy.model.kind import InstanceUnits
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.parallelize.apply import check
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, UnitRuns
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.search import Planner
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.simulator.hardware import cluster
from hetero_strategy.testing import Pool
from tests.distributed import scenario
from tests.distributed.scenario import WIDTH, Job, Lit, Result, data, worst_gradient, worst_loss

NEGATIVES = 3
EDGES = (("vision", "llm"), ("audio", "llm"), ("vision", "match"), ("llm", "match"))


@dataclass(frozen=True, eq=False)
class Pairs(ModuleInputs):
    """Pictures and texts of n samples; a unit's rows are those of its pictures, then those of its text."""

    part: Tensor
    """int64 ``[T]``: ``2 * i`` for rows of the i-th unit's pictures, ``2 * i + 1`` for those of its text."""
    counts: Tensor
    """int64 ``[2 * n]``: rows of each part."""
    counted: Tensor
    """bool ``[n]``: units whose loss counts."""

    def silenced(self, bad: np.ndarray) -> Pairs:
        return replace(self, counted=torch.from_numpy(~bad))

    def only(self, units: np.ndarray) -> Pairs:
        counts = self.counts.unflatten(0, (-1, 2))[units].flatten()
        part = torch.arange(len(counts)).repeat_interleave(counts)
        return replace(self, part=part, counts=counts, counted=self.counted[units], slots={})


@dataclass
class Matched(LossOutput):
    margins: Tensor
    """``[n]``: score of the sample's own pair less the best negative's."""


register_dataclass(Matched)


class Matching(ModuleKind):
    """Units are samples that have a picture."""

    name = "Matching"
    takes_from = ("Encoder", "CausalLM")
    sources = 2

    def units(self, metadata: StepMetadata, sources: Sequence[str]) -> StepItems:
        encoder, language_model = sorted(sources, key=lambda name: name not in metadata.items)
        pictures = metadata.items[encoder]
        samples, unit = np.unique(pictures.sample, return_inverse=True)
        rows = np.bincount(unit, weights=pictures.edge_rows, minlength=len(samples)).astype(np.int64)
        numbers, none = np.arange(len(samples)), np.zeros_like(samples)
        inside = ragged.starts(pictures.edge_rows) - ragged.starts(rows)[unit]
        tokens = metadata.tokens[samples]
        return StepItems(
            sample=samples,
            edge_rows=rows,
            start=none,
            inner_rows=rows + tokens,
            targets=np.full_like(samples, 1 + NEGATIVES),
            given={
                encoder: UnitRuns(np.arange(len(unit)), np.zeros_like(unit), unit, inside, pictures.edge_rows),
                language_model: UnitRuns(samples, none, numbers, rows, tokens),
            },
        )

    def inputs(self, units: InstanceUnits) -> Pairs:
        counts = np.stack([units.edge_rows, units.inner_rows - units.edge_rows], axis=1).reshape(-1)
        part = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        counted = torch.ones(len(units.numbers), dtype=torch.bool)
        return Pairs(part, torch.from_numpy(counts), counted, slots=units.slots)

    def metrics(self, metadata: StepMetadata, module: str) -> dict[str, int]:
        return {"matched": len(metadata.items[module].sample)}

    def measured(self, inputs: Pairs, output: Matched) -> Sequence[Tensor]:
        return ((output.margins > 0).sum(),)

    def result(self, module: Adapter, metadata: StepMetadata, like: Tensor, *, pipelined: bool) -> Tensor:
        return like.new_zeros(len(metadata.items[module.name].sample))

    def placed(
        self, metadata: StepMetadata, module: str, units: np.ndarray, inputs: Pairs, output: Matched
    ) -> tuple[np.ndarray, Tensor]:
        return units, output.margins


class Match(Adapter):
    kind = Matching()

    def __init__(self, width: int, dim: int = 12) -> None:
        super().__init__()
        self.width = self.hidden_width = width
        with torch.device("meta"):  # values follow from the model's seed, in one process too
            self.norm, self.picture, self.text = nn.LayerNorm(width), nn.Linear(width, dim), nn.Linear(width, dim)
            self.negatives = nn.Parameter(torch.empty(NEGATIVES, dim))
            self.scale, self.bias = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.negatives)
        nn.init.constant_(self.scale, 2.0)
        nn.init.constant_(self.bias, -1.0)

    def forward(self, inputs: Pairs, rows: Mapping[Hashable, Tensor], hidden: Tensor | None = None) -> Matched:
        pooled = self.bias.new_zeros(len(inputs.counts), self.width)
        for source, given in rows.items():
            pooled = pooled.index_add(0, inputs.part[inputs.slots[source]], given.to(pooled.dtype))
        pictures, texts = self.norm(pooled / inputs.counts[:, None]).unflatten(0, (-1, 2)).unbind(1)
        queries = F.normalize(self.picture(pictures), dim=-1)[:, None]
        keys = torch.cat([self.text(texts)[:, None], self.negatives.expand(len(texts), -1, -1)], dim=1)
        scores = self.scale * (queries * F.normalize(keys, dim=-1)).sum(-1) + self.bias
        signs = torch.ones_like(scores)
        signs[:, 1:] = -1
        losses = -F.logsigmoid(signs * scores) * inputs.counted[:, None]
        return Matched(losses.sum(), scores[:, 0] - scores[:, 1:].amax(dim=1))


def model_of(job: Job, vocabulary: int) -> MultimodalModel:
    modules = {**scenario.model_of(job, vocabulary).modules_by_name, "match": Match(WIDTH)}
    return MultimodalModel(modules, EDGES, freeze=job.freeze, loss_weights={"match": 0.5}, seed=11)


class Own(Lit):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = model_of(self.job, self.vocabulary)
            self.validated: list[ModelOutput] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.model is not None
        self.validated.append(self.model(batch))


@dataclass
class Fitted:
    result: Result
    matched: float
    margins: Tensor
    """Of the validation's samples with a picture, in their order."""


def fit(job: Job) -> Fitted:
    trainer, module, _ = scenario.build(job)
    module = Own(job, module.vocabulary)
    with scenario.damaged(job.damage):
        trainer.fit(module, datamodule=scenario.datamodule(job, model_of))
    out = module.validated[0]
    result = Result([float(x) for x in module.losses], module.gradients, [], {}, {})
    return Fitted(result, float(out.metrics["match"]["matched"]), (out.drawn or {})["match"])


def on_rank(rank: int, world: int, jobs: Sequence[Job]) -> list[Fitted]:
    return [fit(job) for job in jobs]


def on(*ranks: int, **degrees: int) -> dict[str, Any]:
    return {"ranks": list(ranks), **degrees}


LAYOUTS = {
    "colocated": {"vision": on(0, 1, 2), "audio": on(0, 1, 2), "llm": on(0, 1, 2), "match": on(0, 1, 2)},
    "disjoint, the head replicated": {
        "vision": on(0), "audio": on(0), "llm": on(0), "match": on(1, 2, dp_replicate=2),
    },
    "language model pipelined": {
        "vision": on(0, 2), "audio": on(1), "llm": on(0, 1, pp=2), "match": on(1, 2, dp_shard=2),
    },
    "language model's rows sharded": {"vision": on(2), "audio": on(2), "llm": on(0, 1, tp=2), "match": on(1, 2)},
}  # fmt: skip
BROKEN = ("forward:2", "forward:3", "backward:2", "backward:3")
"""Rows and gradients of the head's two edges where no module has stages."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = data(tmp_path_factory.mktemp("kind") / "digits")
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 1}  # before the weights differ by rounding
    return Job(str(folder), steps=1, precision="64-true", microbatches=3, val="val.json", trainer=options)


@pytest.fixture(scope="module")
def expected(job: Job) -> Fitted:
    return fit(job)


@pytest.mark.full
def test_same_gradients(pool: Pool, job: Job, expected: Fitted) -> None:
    found = pool.run(3, on_rank, [job.on(**layouts) for layouts in LAYOUTS.values()], timeout=300)
    assert expected.result.gradients["model.match.picture.weight"].abs().max() > 0
    for name, ranks in zip(LAYOUTS, zip(*found, strict=True), strict=True):
        worst, where = worst_gradient(expected.result, [rank.result for rank in ranks])
        assert worst < 1e-10, f"{name}: {where}"
        assert worst_loss(expected.result, [rank.result for rank in ranks]) < 1e-10
        for rank in ranks:
            assert rank.matched == expected.matched
            torch.testing.assert_close(rank.margins, expected.margins, rtol=1e-10, atol=0)


def test_damage_is_noticed(pool: Pool, job: Job, expected: Fitted) -> None:
    disjoint = LAYOUTS["disjoint, the head replicated"]
    jobs = [replace(job, damage=damage).on(**disjoint) for damage in BROKEN]
    for damage, ranks in zip(BROKEN, zip(*pool.run(3, on_rank, jobs, timeout=300), strict=True), strict=True):
        worst, _ = worst_gradient(expected.result, [rank.result for rank in ranks])
        assert worst > 1e-3, f"{damage} went unnoticed"


def test_pairs_do_not_depend_on_who_shares_a_microbatch(job: Job, expected: Fitted) -> None:
    alone = fit(replace(job, microbatches=1)).result
    assert worst_gradient(expected.result, [alone])[0] < 1e-10


def test_a_sample_that_counts_for_nothing(job: Job) -> None:
    """It has no share in the head's loss, and none in its N."""
    module = scenario.datamodule(job, model_of)
    module.prepare_data()
    batch = module.train_dataloader().steps[0, 0]
    lit = Own(job, module.tokenizer.vocab_size)
    lit.configure_model()
    table = batch.plan.metadata.items["match"]
    assert batch.plan.normalizer("match") == (1 + NEGATIVES) * len(table.sample)
    assert lit.model is not None
    bad = np.arange(len(batch)) == table.sample[0]
    before, after = (lit.model(one).losses["match"] for one in (batch, batch.without(bad)))
    rest = batch.without(~bad)
    one = lit.model(rest).losses["match"]
    assert rest.plan.normalizer("match") == 1 + NEGATIVES
    count = len(table.sample)
    torch.testing.assert_close(before * count, after * (count - 1) + one, rtol=1e-5, atol=0)


def test_plans_know_its_units_and_that_it_has_no_blocks(job: Job) -> None:
    data_module = scenario.datamodule(job, model_of)
    data_module.prepare_data()
    (batch,) = data_module.sampled_batches(1)
    assert len(batch.items["match"].sample)
    lit = Own(job, data_module.tokenizer.vocab_size)
    with torch.device("meta"):
        lit.configure_model()
    assert lit.model is not None
    planner = Planner(CostModel(spec_of(lit.model), cluster("cpu", 1, 2)), [batch], microbatches=1, simulations=1)
    assert planner.plan().best.seconds > 0
    blockless = ModuleLayout(range(2), split=(0,)).resolved()  # as a run chooses it
    ran = {
        name: blockless if name == "match" else ModuleLayout(range(2)).resolved() for name in lit.model.topological()
    }
    planner.evaluator.place(Candidate(ran))
    assert place({"match": blockless}, 2).table()[0][2] == "dp_shard=2"
    assert not check("match", lit.model.modules_by_name["match"], blockless)


def plain_on_rank(rank: int, world: int, job: Job) -> str:
    forward = Match.forward
    Match.forward = lambda *given: forward(*given).loss_sum  # type: ignore[assignment, method-assign]
    with pytest.raises(ModelError) as error:
        fit(job)
    return str(error.value)


def test_a_loss_that_is_no_loss_output_is_refused(pool: Pool, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "module 'match' is a Matching, which has a loss, but its forward returned a Tensor: return LossOutput"
    alone = {name: on(0) for name in ("vision", "audio", "llm", "match")}
    (said,) = pool.run(1, plain_on_rank, job.on(**alone), timeout=120)
    assert said.startswith(message)
    forward = Match.forward
    monkeypatch.setattr(Match, "forward", lambda *given: forward(*given).loss_sum)
    with pytest.raises(ModelError, match=re.escape(message)):
        fit(job)


def test_edges_that_do_not_fit_are_refused(job: Job) -> None:
    lit = Lit(job, 100)
    lit.configure_model()
    assert lit.model is not None
    modules: dict[str, Any] = {**lit.model.modules_by_name, "match": Match(WIDTH)}
    with pytest.raises(ModelError, match=r"Matching 'match' is fed by 1 modules, it needs 2: .* Encoder, CausalLM"):
        MultimodalModel(modules, EDGES[:3])
    with pytest.raises(ModelError, match="match -> llm leads from a Matching to a CausalLM"):
        MultimodalModel(modules, [*EDGES, ("match", "llm")])
