"""A blueprint is what its three values say, before any process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.mask import Causal, ItemsAlone
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.plan.masks import sample_spans
from hetero_strategy.plan.plan_step import ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.schedule.action import StageId
from hetero_strategy.strategy.blueprint import Options, blueprint
from hetero_strategy.testing import Setting
from hetero_strategy.testing.plans import model, module
from tests.parallelize.pieces import MAKE

MIXED = Options(storage=Storage(torch.bfloat16))


def test_frozen_stages_of_a_module_that_trains_are_not_cast() -> None:
    vision = module(4, 256, edge_width=512)
    head = vision.trained * [0, 0, 0, 1]
    spec = replace(model(), modules=model().modules | {"vision": replace(vision, trained=head)})
    plan = blueprint(spec, place({"vision": ModuleLayout(2, pp=2), "llm": ModuleLayout(2, dp_replicate=2)}, 2), MIXED)
    assert [plan.graph.stages[StageId("vision", n)].sharded for n in (0, 1)] == [False, True]
    assert [plan.graph.stages[StageId("vision", n)].trains for n in (0, 1)] == [False, True]


def test_blocks_that_run_several_times_are_gathered_once_per_step() -> None:
    vision = replace(model().modules["vision"], runs_vary=True)
    spec = replace(model(), modules=model().modules | {"vision": vision})
    plan = blueprint(spec, place({name: ModuleLayout(2, dp_shard=2) for name in spec.modules}, 2), Options())
    assert [plan.graph.stages[StageId(name, 0)].sharded for name in ("vision", "llm")] == [True, False]


def test_the_first_stage_has_the_blocks_that_take_rows() -> None:
    deep = replace(model(), modules=model().modules | {"llm": replace(model().modules["llm"], first_blocks=5)})
    layouts = place({"vision": ModuleLayout(1), "llm": ModuleLayout(3, pp=3)}, 3)
    assert [blueprint(s, layouts, Options()).layouts["llm"].split for s in (model(), deep)] == [(2, 3, 3), (5, 1, 2)]


def test_every_stage_costs_what_its_module_counts() -> None:
    layouts = {"vision": ModuleLayout(2, pp=2), "llm": ModuleLayout(4, pp=2, tp=2)}
    setting = Setting("", layouts, vision=(96, 3), llm=(128, 4))
    plan, modules = setting.blueprint, setting.model().modules_by_name
    for name, layout in plan.layouts.items():
        lengths = torch.tensor([24, 40, 64]).numpy()
        assert layout.split is not None
        counted = modules[name].stage_flops(lengths, layout.split) / layout.neighbours
        stages = [plan.costs[StageId(name, n)] for n in range(len(layout.split))]
        found = [float(stage.of(lengths, lengths**2).sum()) for stage in stages]
        assert found == pytest.approx(counted.tolist())


@pytest.mark.parametrize("kind", sorted(MAKE))
def test_rows_lie_where_the_module_puts_them(kind: str) -> None:
    made = MAKE[kind]()
    spec = spec_of_module(made)
    for tp in spec.tp:
        for cp in (1, 2) if made.context_parallel else (1,):
            layout = ModuleLayout(tp * cp, tp=tp, cp=cp).resolved()
            assert spec.row_sharding(layout) == made.row_sharding(layout)


def test_a_degree_that_no_spec_lists_is_refused() -> None:
    layouts = place({"vision": ModuleLayout(1), "llm": ModuleLayout(128, tp=128)}, 128)
    with pytest.raises(LayoutError, match="layout of 'llm': tp=128; choose one of 1, 2, 4"):
        blueprint(model(), layouts, Options())


def test_rows_are_dealt_by_the_mask_of_the_module() -> None:
    """Control: rows that are dealt as causal leave a rank with many more pairs than the mean."""
    tokens, cp = np.array([4096]), 4
    items = StepItems(np.zeros(2, np.int64), np.array([1500, 800]), np.array([100, 2500]), np.array([1500, 800]))
    metadata = StepMetadata(0, 0, np.arange(1), tokens, tokens - 1, {"vision": items})
    mask = ItemsAlone().slices(tokens, sample_spans(metadata, ("vision",), np.arange(1)))
    uneven = []
    layouts = place({"vision": ModuleLayout((0,)), "llm": ModuleLayout((0, 1, 2, 3), cp=cp)}, cp)
    for rule in (ItemsAlone(), Causal()):
        llm = replace(model().modules["llm"], rules=((rule, np.ones(8, np.int64)),))
        spec = replace(model(), modules=model().modules | {"llm": llm})
        dealing = blueprint(spec, layouts, Options()).context(cp).dealing
        plan = plan_step(
            metadata, {"vision": 1, "llm": 1}, ("llm",), balancing=ResolvedBalance(dealing=dealing), microbatches=1
        )
        rows = plan.assignments["llm"][0].dealt(0, cp)
        seen = np.diff(mask.intervals()[:, 0], axis=0)[0][rows].sum(axis=1)
        uneven.append(float(seen.max() / seen.mean()))
    assert uneven[0] < 1.05 and uneven[1] > 1.2
