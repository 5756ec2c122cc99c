"""The formula holds what the memory model does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.read_spec import spec_of, spec_of_module
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import Degrees
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.profiling.stage_memory import stage_bytes
from hetero_strategy.simulator import hardware
from hetero_strategy.simulator.cost_model import ADAM_BYTES, MIXED, CostModel, Precision, module_times
from hetero_strategy.testing.plans import batch, cluster, model
from hetero_strategy.zoo import siglip2_encoder, titan_llama
from hetero_strategy.zoo.hf_causal_lm import hf_llama
from tests.model.helpers import LLAMA

FP32 = Precision(4, 4)


@pytest.mark.parametrize("precision", [MIXED, Precision(4, 4)])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_parameters_take_the_bytes_of_the_memory_model(module: str, shards: int, precision: Precision) -> None:
    """Frozen weights of a module that nothing shards are there once."""
    made, degrees = model(frozen=True), Degrees(1, 1, 4 // shards, shards, whole=True)
    shape = made.modules[module]
    size = stage_bytes(shape, degrees.layout(range(4)), 0, shape.blocks, True, precision)
    expected = size.masters + size.optimizer + size.gathered.sum() + size.summed.sum()
    estimates = Estimates(CostModel(made, cluster(4), precision), [batch(4)])
    assert estimates.held(module, degrees) == pytest.approx(expected)


def test_context_parallel_ranks_hold_what_shards_do_and_keep_a_part_of_the_rows_but_all_keys() -> None:
    made = model()
    llm = replace(made.modules["llm"], keys=1024)
    estimates = Estimates(CostModel(replace(made, modules={**made.modules, "llm": llm}), cluster(4), MIXED), [batch(4)])
    alone, shards, both = (Degrees(1, 1, 1, *of) for of in ((1,), (2,), (1, (), False, 2)))
    for whole in (False, True):
        held = [estimates.held("llm", way._replace(whole=whole)) for way in (shards, both)]
        assert held[0] == held[1] < estimates.held("llm", alone)
    llm_work, links = estimates.work("llm", 1, cp=2), cluster(4).within
    latency = llm_work.fixed - estimates.work("llm", 1).fixed
    assert latency == pytest.approx(3 * llm.blocks * links.latency), "in each microbatch; once forward, twice backward"
    assert llm_work.travel * links.bandwidth == pytest.approx(3 * llm.blocks * 1024 * batch(4).tokens.sum() / 4)
    kept = [estimates.activations("llm", way, 1) for way in (alone, both)]
    rows, made_again = (
        batch(4).tokens.sum(),
        llm.blocks + 3,
    )  # keys of others for each block, for one more its gradients
    assert kept[1] - kept[0] / 2 == pytest.approx(2 * made_again * 1024 * 0.75 * rows)
    assert estimates.worth("llm", both._replace(dp_shard=4))


def test_context_parallelism_is_worth_it_where_it_has_less_work_than_tensor_parallelism() -> None:
    """Fewer bytes travel where there are few heads of keys, and more where each head of queries has its own."""
    made, both = model((4, 256), (8, 2048)), Degrees(1, 1, 1, 1, cp=2)
    for keys, worth in ((512, True), (2 * 8 * 2048, False)):
        llm = replace(made.modules["llm"], keys=keys)
        shape = replace(made, modules={**made.modules, "llm": llm})
        assert Estimates(CostModel(shape, cluster(4), MIXED), [batch(4)]).worth("llm", both) == worth


@pytest.mark.full
def test_the_formula_needs_what_the_memory_model_predicts() -> None:
    """Of a SigLIP and a Llama of usual widths on GPUs: never a tenth too little, nor a quarter too much."""
    with models_without_values():
        encoder = siglip2_encoder(
            out_width=4096, merge=2, patch_size=14, num_channels=3, num_patches=4096, hidden_size=1280,
            intermediate_size=5120, num_hidden_layers=16, num_attention_heads=16,
        )  # fmt: skip
        sizes = {"n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}
        llm = titan_llama(vocab_size=128256, dim=4096, max_seq_len=65536, **sizes)
        made = MultimodalModel({"vision": encoder, "llm": llm}, edges=[("vision", "llm")]).train()
    samples, each, length = 32, 32, 65536
    tokens, rows = np.full(samples, length), np.full(samples * each, 4096)
    sample, start = np.divmod(np.arange(samples * each), each)
    items = StepItems(sample, rows // 4, start * 1024, rows)
    shape, data = spec_of(made), StepMetadata(0, 0, np.arange(samples), tokens, tokens - 1, {"vision": items})
    planner = Planner(CostModel(shape, hardware.cluster("h100", 4)), [data], balance=BalanceConfig(reorder="none"))
    memory = memory_model(made, shape, "h100", MIXED)
    every, of = [Recompute()], ModuleLayout
    spread = of(32, dp_shard=32)
    ways: list[tuple[ModuleLayout, ModuleLayout, int, dict[str, list[Recompute]], str]] = [
        (spread, of(32, dp_shard=8, cp=4), 4, {"llm": [Recompute(4)]}, "auto"),
        (spread, of(32, dp_shard=8, cp=4), 4, {"llm": every, "vision": every}, "auto"),
        (spread, of(32, dp_shard=8, tp=4), 4, {"llm": every}, "never"),
        (of(32, dp_shard=4, tp=8), of(32, dp_shard=4, tp=8), 8, {"llm": [Recompute(4)], "vision": every}, "never"),
        (of(32, dp_shard=8, tp=4), of(32, dp_shard=4, tp=4, cp=2), 8, {}, "auto"),
        (spread, of(32, dp_shard=2, tp=4, pp=4), 16, {}, "never"),
        (spread, of(32, dp_shard=2, cp=2, tp=2, pp=4), 16, {"llm": every}, "never"),
        (of(range(8), dp_shard=8), of(range(8, 32), dp_shard=3, tp=8), 8, {"llm": every}, "never"),
    ]
    for vision, language_model, count, transforms, reshard in ways:
        one = Candidate({"vision": vision, "llm": language_model}, count, "auto", transforms, reshard, "none")
        needed = planner.evaluator.shown(planner.evaluator.place(one)).memory(memory).peak
        formula = planner.estimates.needed(one)
        assert 0.9 * needed.max() < formula.max() < 1.25 * needed.max(), one


def test_an_embedding_that_is_the_head_counts_once_where_one_stage_has_both() -> None:
    """The stages of a pipeline have one each."""
    with torch.device("meta"):
        made = hf_llama(**LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": True})
    table, every = made.model.lm_head.weight.numel(), sum(p.numel() for p in made.parameters())
    shape = spec_of_module(made)
    assert shape.held(0, 3) == (every, every) and shape.tied
    assert shape.held(0, 2)[0] + shape.held(2, 3)[0] == every + table
    for tp in (1, 2):
        alone, first, last = (
            stage_bytes(shape, ModuleLayout(tp * pp, tp=tp, pp=pp, dp_shard=1), a, b, True, FP32)
            for pp, a, b in ((1, 0, 3), (2, 0, 2), (2, 2, 3))
        )
        for kind in ("masters", "optimizer"):
            both = getattr(first, kind) + getattr(last, kind) - (kind == "masters") * shape.buffers
            assert both - getattr(alone, kind) == pytest.approx(4 * table / tp * (1 + (kind == "optimizer")))
    model_shape = replace(model(), modules={**model().modules, "llm": shape})
    estimates = Estimates(CostModel(model_shape, cluster(4), FP32), [batch(4)])
    held = [estimates.held("llm", Degrees(1, pp, 1, 1)) * pp / 16 for pp in (1, 2)]
    assert held == [pytest.approx(every), pytest.approx(every + table)]
    for pp, split in ((1, (3,)), (2, (2, 1))):
        times = module_times(
            shape, ModuleLayout(pp, pp=pp, dp_shard=1, split=split), cluster(4), fed=True, precision=FP32
        )
        adam = sum(one.after for one in times) / ADAM_BYTES * cluster(4).device.memory_bandwidth
        assert adam == pytest.approx(every + table * (pp - 1))
