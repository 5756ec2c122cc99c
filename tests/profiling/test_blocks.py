"""Seconds of blocks, measured, and what the planner makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.errors import LayoutError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.spec import Placement
from hetero_strategy.model import Encoder, MultimodalModel, Projector
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.model.read_spec import spec_of, spec_of_module
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.plan.step_plan import StepItems
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.profiling.blocks import fit, packings, profile
from hetero_strategy.simulator.cost_model import CostModel, module_times
from hetero_strategy.simulator.stage_times import NOTHING, BlockSeconds, Line
from hetero_strategy.strategy.blueprint import Options, blueprint
from hetero_strategy.testing import Setting
from hetero_strategy.testing.plans import cluster, module

ALONE = ModuleLayout((0,))
SETTING = Setting("", {"vision": ALONE, "llm": ALONE}, vision=(64, 3), llm=(128, 4), samples=4, microbatches=2)
BLOCK = BlockSeconds(Line(1.0, 2.0, 4.0), Line(3.0, 6.0, 8.0), Line(2.0, 3.0, 8.0), Line(2.0, 4.0, 0.0))


def test_a_line_is_found_again() -> None:
    given = np.array([[1.0, n, n * n] for n in (10.0, 20.0, 40.0, 80.0)])
    line, errors = fit(given, given @ np.array([1e-3, 2e-5, 3e-8]))
    np.testing.assert_allclose(line, [1e-3, 2e-5, 3e-8], rtol=1e-6)
    assert errors.max() < 1e-9


def test_no_figure_of_a_line_is_negative() -> None:
    given = np.array([[1.0, n, n * n] for n in (10.0, 20.0, 40.0)])
    line, errors = fit(given, given @ np.array([-1e-3, 3e-4, 0.0]))
    assert min(line) >= 0
    assert errors.max() > 0.01


def test_packings_are_of_short_mixed_and_long_units() -> None:
    lengths = np.array([16, 32, 64, 128, 256, 512])
    made = list(packings(lengths, 2048))
    assert {int(made[0].max()), int(made[-1].min())} == {16, 256}
    assert max(int(m.sum()) for m in made) >= 1024
    assert min(len(m) for m in made) == 1


@pytest.fixture(scope="module")
def frozen() -> MultimodalModel:
    model = SETTING.model()
    model.modules_by_name["vision"].get_submodule("backbone").requires_grad_(False)
    return model


@pytest.mark.full
def test_blocks_that_are_alike_are_measured_once(frozen: MultimodalModel) -> None:
    told: list[str] = []
    found = profile(
        frozen, [SETTING.metadata(0)], torch.device("cpu"), seconds=0.02, tp=(1, 2),
        progress=lambda done, total, what: told.append(what),
    )  # fmt: skip
    assert [what for what in told if what.startswith("llm")] == [
        f"llm, block {n}, tp {t}" for t in (1, 2) for n in (0, 1, 3)
    ]
    llm = found.modules["llm"]
    assert llm[1][1] is llm[1][2]
    assert len(llm[2]) == 4
    assert all(min(line) >= 0 and max(line) > 0 for block in llm[1] for line in block)
    assert set(found.modules["vision"]) == {1}  # it has one head
    assert 0 < found.fits["llm"].median < found.fits["llm"].worst


@pytest.mark.full
def test_what_has_no_gradient_takes_no_time(frozen: MultimodalModel) -> None:
    first, _, last = profile(frozen, [SETTING.metadata(0)], torch.device("cpu"), seconds=0.02).modules["vision"][1]
    assert first.forward != NOTHING
    assert first.backward == first.input == first.weight == NOTHING
    assert last.input == NOTHING  # the projector trains, and nothing before it
    assert last.weight == last.backward != NOTHING


def test_a_module_of_which_the_batches_have_no_unit_is_left_to_the_formula(frozen: MultimodalModel) -> None:
    batch, none = SETTING.metadata(0), np.zeros(0, np.int64)
    batch = replace(batch, items={"vision": StepItems(none, none, none, none)})
    found = profile(frozen, [batch], torch.device("cpu"), seconds=0.02)
    assert set(found.modules) == set(found.fits) == {"llm"}
    evaluator = Evaluator(CostModel(spec_of(frozen), cluster(1), measured=found.modules), [SETTING.metadata(0)])
    assert evaluator.seconds(Candidate({"vision": ALONE, "llm": ALONE}, 2)) > 0


def test_measured_seconds_are_those_of_stages() -> None:
    measured = {1: [BLOCK] * 4}
    layout = ModuleLayout(tuple(range(2)), pp=2, split=(3, 1)).resolved()
    first, last = module_times(module(4, 64), layout, cluster(2), fed=True, measured=measured)
    rows, squares = np.array([10.0]), np.array([100.0])
    seconds = {kind: first.seconds(kind, rows, squares)[0] for kind in ("F", "B", "I", "W")}  # type: ignore[arg-type]
    assert seconds == {"F": 3 * 421, "B": 3 * 863, "I": 3 * 832, "W": 3 * 42}
    assert last.forward == BLOCK.forward


def test_recompute_adds_the_measured_forward() -> None:
    layout = ModuleLayout((0,), split=(1,)).resolved()
    (made,) = module_times(module(1, 64), layout, cluster(1), fed=True, measured={1: [BLOCK]}, recomputed=0.5)
    assert made.input == BLOCK.input.plus(BLOCK.forward, 0.5)
    assert made.backward == BLOCK.backward.plus(BLOCK.forward, 0.5)
    assert made.weight == BLOCK.weight


def test_a_degree_that_was_not_measured_divides_the_next_lower_one() -> None:
    layout = ModuleLayout(tuple(range(4)), tp=4, split=(1,)).resolved()
    measured = {1: [BLOCK], 2: [BlockSeconds(*(line.shared(2).plus(Line(1.0, 0.0, 0.0)) for line in BLOCK))]}
    (made,) = module_times(module(1, 64), layout, cluster(4), fed=True, measured=measured)
    assert made.forward.fixed >= 2.0
    assert made.weight == Line(3.0, 1.0, 0.0)


def test_a_step_takes_what_was_measured() -> None:
    shape, batch = spec_of(SETTING.model()), SETTING.metadata(0)
    candidate = Candidate(dict(SETTING.layouts), SETTING.microbatches)
    measured = {name: {1: [BLOCK] * m.blocks} for name, m in shape.modules.items()}
    slow = Evaluator(CostModel(shape, cluster(1), measured=measured), [batch]).seconds(candidate)
    rows = batch.tokens.sum() + batch.items["vision"].inner_rows.sum()
    assert slow > 8 * 3 * rows
    assert Evaluator(CostModel(shape, cluster(1)), [batch]).seconds(candidate) < 1


def test_ranks_that_share_a_core_take_turns() -> None:
    ranks = ModuleLayout((0, 1))
    candidate = Candidate({"vision": ranks, "llm": ranks}, SETTING.microbatches)
    shape, batch, whole = spec_of(SETTING.model()), SETTING.metadata(0), cluster(2, bandwidth=1e15)
    own, two, one = (
        Evaluator(CostModel(shape, replace(whole, cores_per_node=cores)), [batch]).seconds(candidate)
        for cores in (None, 2, 1)
    )
    assert own < two < 1.2 * own, "collectives are not beside compute"
    assert 1.5 * two < one < 2.01 * two


class Plain(nn.Module):
    """A backbone that says nothing of its inputs, and has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 64)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.up(inputs.values)


def test_a_backbone_of_ones_own_is_left_to_the_formula_and_not_cut() -> None:
    with torch.device("meta"):
        plain = Encoder(Plain, Projector(64, 32), processor=ImageProcessor(patch_size=4))
    assert plain.example_unit == 16 and plain.example(np.array([16])) is None
    spec = ModelSpec({"vision": spec_of_module(plain)}, ())
    with pytest.raises(LayoutError, match="layout of 'vision': it has no blocks to cut it by; leave pieces out"):
        blueprint(spec, Placement({"vision": replace(ALONE.resolved(), vpp=2)}, 1), Options())
