"""The formula holds what the memory model does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.shape import ModelShape, _module
from hetero_strategy.planner.space import Degrees
from hetero_strategy.planner.stage_memory import stage_bytes
from hetero_strategy.planner.times import ADAM_BYTES, MIXED, Precision, module_times
from hetero_strategy.zoo.hf_lm import hf_llama
from tests.model.helpers import LLAMA
from tests.planner.models import batch, cluster, model

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
    estimates = Estimates(made, cluster(4), [batch(4)], precision)
    assert estimates.held(module, degrees) == pytest.approx(expected)


def test_context_parallel_ranks_hold_what_shards_do_and_keep_a_part_of_the_rows_but_all_keys() -> None:
    made = model()
    llm = replace(made.modules["llm"], keys=1024)
    estimates = Estimates(replace(made, modules={**made.modules, "llm": llm}), cluster(4), [batch(4)], MIXED)
    alone, shards, both = (Degrees(1, 1, 1, *of) for of in ((1,), (2,), (1, 0, False, 2)))
    for whole in (False, True):
        held = [estimates.held("llm", way._replace(whole=whole)) for way in (shards, both)]
        assert held[0] == held[1] < estimates.held("llm", alone)
    kept = [estimates.activations("llm", way, 1) for way in (alone, both)]
    keys = 1024 / (17 * llm.width)
    assert kept[1] == pytest.approx(kept[0] * (1 + keys) / 2)
    assert not estimates.worth("llm", both) and estimates.worth("llm", both._replace(dp_shard=4))


def test_frozen_replicas_of_a_pipeline_need_the_ranks_that_hold_each_once() -> None:
    shape = model(frozen=True)
    module = replace(shape.modules["llm"], trained=shape.modules["llm"].trained * 0)
    shape = ModelShape({**shape.modules, "llm": module}, shape.edges)
    estimates = Estimates(shape, cluster(8), [batch(4)], MIXED)
    assert estimates.least_ranks("llm", 4) == pytest.approx(4 * 2 * module.parameters.sum() / estimates.memory)


def test_an_embedding_that_is_the_head_counts_once_where_one_stage_has_both() -> None:
    """The stages of a pipeline have one each."""
    with torch.device("meta"):
        made = hf_llama(**LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": True})
    table, every = made.model.lm_head.weight.numel(), sum(p.numel() for p in made.parameters())
    shape = _module(made)
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
    estimates = Estimates(model_shape, cluster(4), [batch(4)], FP32)
    held = [estimates.held("llm", Degrees(1, pp, 1, 1)) * pp / 16 for pp in (1, 2)]
    assert held == [pytest.approx(every), pytest.approx(every + table)]
    for pp, split in ((1, (3,)), (2, (2, 1))):
        times = module_times(
            shape, ModuleLayout(pp, pp=pp, dp_shard=1, split=split), cluster(4), fed=True, precision=FP32
        )
        adam = sum(one.after for one in times) / ADAM_BYTES * cluster(4).device.memory_bandwidth
        assert adam == pytest.approx(every + table * (pp - 1))
