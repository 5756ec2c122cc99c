"""What a layout file says is what was planned, read back as `recipes.train layout=` reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.testing import Pool
from hetero_strategy.testing.plans import batch, cluster, generator, model
from recipes import build
from recipes.layout_file import write_layout
from tests.recipes.commands import SMALL, run_on_ranks
from tests.recipes.test_conf import compose


def test_an_encoder_in_bubbles_and_its_pieces_are_read_again(tmp_path: Path) -> None:
    """Pieces are the strategy's: the layout is what a person gives."""
    evaluator = Evaluator(CostModel(model((4, 256), (4, 512)), cluster(4)), [batch(16)])
    layouts = {"vision": ModuleLayout(range(4), dp_shard=4), "llm": ModuleLayout(range(4), pp=4)}
    candidate = Candidate(layouts, 4, fill="fine", pieces={"vision": 2})
    placed = evaluator.place(candidate)
    assert placed.placement.layouts["vision"].split == (2, 2)
    read = yaml.safe_load(write_layout(tmp_path / "planned.yaml", placed, "a test", "train").read_text())
    assert read["strategy"] == {"schedule": "1f1b", "fill": "fine", "pieces": {"vision": 2}}
    again = {name: ModuleLayout.from_config(name, fields) for name, fields in read["layout"].items()}
    assert again["vision"] == layouts["vision"].resolved("vision")
    assert evaluator.seconds(replace(candidate, layouts=again)) == evaluator.seconds(candidate)


@pytest.mark.parametrize("fill", ["fine", "none"])
def test_instances_of_a_generator_that_act_on_their_own_are_read_again(tmp_path: Path, fill: str) -> None:
    """They fill nothing, and yet what fills says how they act."""
    shape, data = generator()
    evaluator = Evaluator(CostModel(shape, cluster(4)), [data])
    layouts = {"llm": ModuleLayout(4, pp=4), "draw": ModuleLayout(4, dp_shard=4)}
    placed = evaluator.place(Candidate(layouts, 8, fill=fill))
    read = yaml.safe_load(write_layout(tmp_path / "planned.yaml", placed, "a test", "train").read_text())
    assert read["strategy"] == {"schedule": "1f1b"} | ({"fill": "fine"} if fill == "fine" else {})


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"fill": "fine", "pieces": {"vision": 2}}, id="in pieces"),
        pytest.param({"fill": "decoupled"}, id="decoupled"),
    ],
)
def test_what_fills_bubbles_is_read_again_and_trains(
    pool: Pool, tmp_path: Path, given: tuple[str, ...], asked: dict[str, Any]
) -> None:
    """The file alone says it to the recipe, where a frozen part is the model's."""
    freeze = "vision.backbone" if "pieces" in asked else ""
    small = [o for o in SMALL if o.startswith(("model.", "data."))]
    cfg = compose(*given, *small, f"model.freeze=[{freeze}]")
    made = build.model_maker(cfg)()
    evaluator = Evaluator(CostModel(spec_of(made), cluster(2)), build.datamodule(cfg, lambda: made).sampled_batches(1))
    layouts = {name: ModuleLayout(range(2), dp_shard=2) for name in ("vision", "audio")}
    candidate = Candidate({**layouts, "llm": ModuleLayout(range(2), pp=2)}, 2, **asked)
    file = write_layout(tmp_path / "layout" / "planned.yaml", evaluator.place(candidate), "a test", "train")
    read = yaml.safe_load(file.read_text())["strategy"]
    assert read == {"schedule": "1f1b", **asked}
    run = run_on_ranks(pool, 2, tmp_path / "run", *given, *SMALL, f"model.freeze=[{freeze}]", f"layout={file}")
    assert "3 steps" in run.output
    ran = json.loads((tmp_path / "run" / "measured.json").read_text())
    again = {stage: set(times) for stage, times in ran["stages"].items()}
    assert ("B" in again["vision.0"]) == ("pieces" not in asked)
    assert ran["recomputed"]["vision"] == float(asked["fill"] == "decoupled")
