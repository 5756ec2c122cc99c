"""A window of steps costs the main thread little, however many rows the steps have."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.monitor import BalanceMonitor, ThroughputMonitor
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.plan_step import ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.schedule.graph import stage_graph, work_of
from hetero_strategy.zoo import hf_llama, siglip2_encoder

ROWS = 2_000_000
"""Of the language model in a step, about."""


class Lit(nn.Module):
    """As deep as models are."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_hidden_layers": 32, "num_attention_heads": 2, "intermediate_size": 64}
        with models_without_values():
            vision = siglip2_encoder(out_width=64, merge=2, num_channels=1, num_patches=16, hidden_size=32, **sizes)
            llm = hf_llama(vocab_size=8, hidden_size=64, num_key_value_heads=2, **sizes)
            self.model = MultimodalModel({"vision": vision, "llm": llm})

    def log(self, *given: Any, **options: Any) -> None: ...


def planned(seed: int, instances: int, microbatches: int) -> StepPlan:
    """Sequences of 200 to 8000 tokens with up to 3 pictures each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(200, 8001, ROWS // 4100)
    number, pictures = np.arange(len(tokens)), rng.integers(0, 4, len(tokens))
    sample = np.repeat(number, pictures)
    place_in_sample = np.arange(len(sample)) - np.repeat(np.cumsum(pictures) - pictures, pictures)
    rows = np.minimum(rng.integers(16, 257, len(sample)), tokens[sample] // 4)
    items = StepItems(sample, rows, place_in_sample * (tokens[sample] // 4), 4 * rows)
    metadata = StepMetadata(0, seed, number, tokens, tokens // 3, {"vision": items})
    costs = {"vision": Cost(1e5, 1.0), "llm": Cost(1e6, 1.0)}
    balancing = ResolvedBalance(policy=dict.fromkeys(costs, "auto"), costs=costs)
    counts = dict.fromkeys(costs, instances)
    return plan_step(metadata, counts, ("llm",), microbatches=microbatches, balancing=balancing)


def trainer_of(instances: int) -> Any:
    """As much of one as monitors read."""
    layout = ModuleLayout(tuple(range(instances)))
    placement = place({"vision": layout, "llm": layout}, instances)
    nodes = {StageId("vision", 0): True, StageId("llm", 0): True}
    graph = stage_graph(("vision", "llm"), [("vision", "llm")], placement.layouts, nodes)
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"),
        reduce=lambda x, reduce_op: x,
        executor=SimpleNamespace(
            compiler=SimpleNamespace(graph=graph), row_bytes=[8192], rank=0, ready=lambda batch, train: batch
        ),
        placement=placement,
        num_processes=8,
    )
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    return SimpleNamespace(
        fit_loop=loop, strategy=strategy, loggers=[], train_dataloader=None, world_size=1, is_global_zero=True
    )


@pytest.mark.perf
@pytest.mark.parametrize("monitor", [ThroughputMonitor(1, peak_flops=1e15), BalanceMonitor(every_n_steps=1)])
@pytest.mark.parametrize("instances", [16, 64])
def test_a_window_takes_a_millisecond_per_million_rows(monitor: L.Callback, instances: int) -> None:
    """The shortest window, of one step: what does not grow with rows has nothing to be divided by."""
    trainer, lit = trainer_of(instances), Lit()
    model: Any = lit
    monitor.on_train_start(trainer, model)
    took = []
    for seed in range(8):
        plan, graph = planned(seed, instances, 8), trainer.strategy.executor.compiler.graph
        program = compile_step(plan, make_schedule("1f1b", graph, work_of(plan, graph)), 0)
        batch = SimpleNamespace(plan=plan, program=program)
        begin = time.thread_time()
        monitor.on_train_batch_start(trainer, model, batch, seed)
        monitor.on_train_batch_end(trainer, model, None, batch, seed)
        rows = sum(int(a.inner_rows.sum()) for parts in batch.plan.assignments.values() for a in parts)
        took.append((time.thread_time() - begin) / rows)
    assert 1e9 * min(took) < 1.0
