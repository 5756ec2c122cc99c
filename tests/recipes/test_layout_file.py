"""What a layout file says is what was planned, read back as `recipes.train layout=` reads it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import yaml

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.propose import Proposal
from hetero_strategy.planner.space import Degrees
from recipes.layout_file import write_layout
from tests.planner.models import model
from tests.planner.test_chain import planner, proposed


def test_a_pipeline_through_all_modules_is_written_whole(tmp_path: Path) -> None:
    shape = model((1, 256), (5, 512))
    made = planner(shape, 6)
    seconds, pipeline = proposed(made, shape, Degrees(1, 3, 1, 2), 4)
    assert math.isfinite(seconds)
    each = dict.fromkeys(shape.modules, pipeline.degrees)
    candidate = Proposal(seconds, (tuple(shape.modules),), (range(6),), each, 4, pipeline).candidate
    file = write_layout(tmp_path / "planned.yaml", made.evaluator.place(candidate), "a test", trains=True)
    read = yaml.safe_load(file.read_text())
    assert read["strategy"] == {"schedule": "1f1b", "reshard_after_forward": "never"}
    layouts = {name: ModuleLayout.from_config(name, fields) for name, fields in read["layout"].items()}
    assert layouts["llm"] == ModuleLayout(range(6), dp_shard=2, pp=3, split=(1, 2, 2))
    assert layouts["vision"].ranks == (0, 1)


def test_an_encoder_in_bubbles_and_its_pieces_are_read_again(tmp_path: Path) -> None:
    """Pieces are the strategy's: the layout is what a person gives."""
    made = planner(model((4, 256), (4, 512)), 4)
    layouts = {"vision": ModuleLayout(range(4), dp_shard=4), "llm": ModuleLayout(range(4), pp=4)}
    candidate = Candidate(layouts, 4, fill="fine", pieces={"vision": 2})
    placed = made.evaluator.place(candidate)
    assert placed.placement.layouts["vision"].split == (2, 2)
    read = yaml.safe_load(write_layout(tmp_path / "planned.yaml", placed, "a test", trains=True).read_text())
    assert read["strategy"] == {"schedule": "1f1b", "fill": "fine", "pieces": {"vision": 2}}
    again = {name: ModuleLayout.from_config(name, fields) for name, fields in read["layout"].items()}
    assert again["vision"] == layouts["vision"].resolved("vision")
    assert made.evaluator.seconds(replace(candidate, layouts=again)) == made.evaluator.seconds(candidate)
