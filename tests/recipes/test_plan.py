"""`python -m recipes.plan`: what it prints and writes, that `recipes.train` runs it, and messages with a fix."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.explain import explain, unfilled
from hetero_strategy.planner.ranking import Answer, Ranked
from hetero_strategy.simulator.cost_model import MIXED, CostModel
from hetero_strategy.simulator.stage_times import NOTHING, BlockSeconds, Line
from hetero_strategy.testing import Pool
from hetero_strategy.testing.plans import batch, cluster, model
from recipes.plan import SHOWN, bubbles, candidates, modules, reasons
from tests.recipes.commands import SMALL, Ended, run_forked, run_on_ranks
from tests.recipes.test_errors import check_message

PLAN = "recipes.plan"
FEW = ("simulations=4", "batches=1")


def planned(folder: Path, *overrides: str) -> Ended:
    return run_forked(folder, *overrides, *FEW, module=PLAN, timeout=360)


@pytest.mark.full
def test_a_plan_is_printed_checked_drawn_and_trained(pool: Pool, given: tuple[str, ...], tmp_path: Path) -> None:
    small = [o for o in SMALL if o.startswith(("model.", "data."))]
    kept = ("++strategy.transforms.llm.recompute=every 2", "++strategy.transforms.llm.offload=all")
    found = planned(tmp_path / "plan", *given, *small, *kept, "cluster.ranks_per_node=2", "dry_run=true")
    assert found.code == 0, found.output
    for words in (
        "candidates fit on 2 x cpu",
        "best",
        "planning ",
        "predicted, ",
        "(by formula; profile=true measures",
        "limit ",
        "memory ",
        "no faults",
        "where each module",
    ):
        assert words in found.output, found.output
    file = tmp_path / "plan" / "layout" / "planned.yaml"
    assert yaml.safe_load(file.read_text())["strategy"]["transforms"] == {
        "llm": {"recompute": "every 2", "offload": "all"}
    }
    assert (tmp_path / "plan" / "timeline.png").stat().st_size > 10_000
    command = said_command(found.output)
    assert f"# {command}" in file.read_text() and {f"layout={file}", *given} <= set(shlex.split(command))
    assert not any(option.startswith(("cluster", "dry_run", "strategy")) for option in shlex.split(command))
    faster = [o for o in SMALL if not o.startswith(("model.", "data."))]  # what the command says itself
    faster += ["trainer.max_steps=2", "trainer.devices=2"]
    ended = run_on_ranks(pool, 2, tmp_path / "run", *shlex.split(command)[3:], *faster)
    assert "2 steps" in ended.output
    again = planned(tmp_path / "again", f"run={tmp_path / 'run'}", "cluster.ranks_per_node=2")
    assert again.code == 0, again.output
    assert "as it ran   " in again.output
    after, other = tmp_path / "again" / "layout" / "planned.yaml", said_command(again.output)
    assert {f"layout={after}", *given, *small} <= set(shlex.split(other)) and f"layout={file}" not in other
    assert "trainer.devices" not in other and "hydra.searchpath" not in other


def said_command(output: str) -> str:
    """What trains, as it is printed."""
    return next(line.split(None, 1)[1] for line in output.splitlines() if line.startswith("train "))


@pytest.mark.full
def test_data_that_are_made_here_are_made_for_a_plan_too(pool: Pool, tmp_path: Path) -> None:
    small = [o for o in SMALL if o.startswith(("model.", "data."))]
    sizes = ("data.write.train=24", "data.write.val=8", "data.write.test=8", f"data.write.folder={tmp_path}/digits")
    found = planned(tmp_path / "plan", *small, *sizes, "cluster.ranks_per_node=1")
    assert found.code == 0, found.output
    assert (tmp_path / "digits" / "train.json").exists() and said_command(found.output)


def test_bubbles_before_and_after_filling_are_said() -> None:
    evaluator = Evaluator(CostModel(model(), cluster(4)), [batch(16)])
    layouts = {"vision": ModuleLayout(4, dp_shard=2, tp=2), "llm": ModuleLayout(4, pp=2, tp=2)}
    said = {}
    for fill in ("fine", "none"):
        step = evaluator.step(evaluator.place(Candidate(layouts, 8, fill=fill)))
        said[fill] = bubbles(explain(evaluator, step), unfilled(evaluator, step))
    assert said["none"] == []
    first, *steps = said["fine"]
    assert re.fullmatch(r"filled +\d+% of the work of vision in bubbles: [\d.]+ ms on a rank, of the step drawn", first)
    taken = [float(re.fullmatch(rf"  {name} +([\d.]+) ms, wait: .*tensor parallel [\d.]+%", line)[1])  # type: ignore[index]
             for name, line in zip(("without", "in turns", "filled"), steps, strict=True)]  # fmt: skip
    assert taken[0] < taken[2] < taken[1]
    assert "warm-up" in steps[0] and "cool-down" in steps[0]


def test_of_a_long_step_the_part_that_is_drawn_is_named() -> None:
    evaluator, alike = Evaluator(CostModel(model(), cluster(2)), [batch(16)]), ModuleLayout(2)
    candidate = Candidate({"vision": alike, "llm": alike}, 8)
    found = explain(evaluator, evaluator.step(evaluator.place(candidate)))
    answer = Answer((Ranked(candidate, 1.0, 1.0),), 1)
    short, long = (reasons(answer, found, 100.0, drawn, "by formula") for drawn in (8, 4))
    (line,) = {*long} - {*short}
    assert line.startswith("drawn       its first 4 of 8 microbatches: ")


def test_work_that_no_row_adds_to_is_work_too() -> None:
    fixed, four = Line(0.5, 0.0, 0.0), 4
    blocks = {1: [BlockSeconds(fixed, fixed, NOTHING, fixed)] * four}
    evaluator = Evaluator(CostModel(model((four, 256)), cluster(2)), [batch(16)])
    estimates = Estimates(CostModel(model((four, 256)), cluster(2), MIXED, measured={"vision": blocks}), [batch(16)])
    placed = evaluator.place(Candidate({"vision": ModuleLayout(2), "llm": ModuleLayout(2)}, 3))
    table = modules(placed, SimpleNamespace(estimates=estimates, evaluator=evaluator))  # type: ignore[arg-type]
    assert next(iter(table.columns[-1].cells)) == "12"  # seconds: 4 blocks, 3 microbatches, forward and backward


@pytest.mark.full
def test_blocks_are_measured_once(pool: Pool, given: tuple[str, ...], tmp_path: Path) -> None:
    small = [o for o in SMALL if o.startswith(("model.", "data."))]
    options = [*given, *small, "cluster.ranks_per_node=2", "profile=true", "imports=[tests.planner.brief_plans]"]
    options.append(f"++hydra.job.env_set.XDG_CACHE_HOME={tmp_path}")
    first, again = (planned(tmp_path / name, *options) for name in ("first", "again"))
    assert first.code == again.code == 0, first.output + again.output
    lines = [[n for n in one.output.splitlines() if n.startswith("profile ")] for one in (first, again)]
    assert lines[0] == lines[1]
    assert all(f"{name} " in lines[0][0] for name in ("vision", "audio", "llm"))
    assert len(list((tmp_path / "hetero_strategy" / "profiles").iterdir())) == 2  # of seconds and of activations


@pytest.mark.full
def test_what_was_planned_is_in_the_file(pool: Pool, tmp_path: Path) -> None:
    """Statistics are planned for, though nothing trains on them."""
    more = ("model=vlm", "data=cornstarch_vision", "experiment=none", "trainer.precision=bf16-mixed")
    found = planned(tmp_path / "plan", *more, "data.global_batch=32", "cluster=a40")
    assert "one more" not in found.output
    assert found.code == 0, found.output
    text = (tmp_path / "plan" / "layout" / "planned.yaml").read_text()
    assert text.startswith("# @package _global_") and "4 x a40" in text and "microbatches" not in text
    assert "layout:" in text and "vision:" in text and "llm:" in text
    assert "recipes.train" not in found.output


def test_candidates_that_look_the_same_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.plan.row", lambda ranked, *_: (ranked.partition(" ")[0],))
    planner: Any = SimpleNamespace(evaluator=SimpleNamespace(shape=SimpleNamespace(modules=()), cluster="2 x cpu"))
    ranked = ["1 auto", "1 fine", *(str(n) for n in range(2, 20))]
    answer: Any = SimpleNamespace(ranked=ranked, best="1 fine", homogeneous=lambda: "15", considered=99)
    table = candidates(answer, planner, 1.0)
    marks, steps = ([*column.cells] for column in table.columns[:2])
    assert steps == [*(str(n) for n in range(1, 1 + SHOWN)), "15"]
    assert marks == ["best", *[""] * (SHOWN - 1), "one layout"]


@pytest.mark.full_cases(
    "overrides1-cluster: nodes=0 must be positive",
    "overrides3-the data has no items of draw",
    "overrides4-trainer.precision=bf16-true: plans are made for bf16-mixed",
    "overrides5-clusters",
    "overrides6-layout: plans choose layouts; leave it out",
    "overrides7-trainer.devices: plans are for all ranks of cluster; leave it out",
    "overrides8-schedule='zbv': plans choose virtual stages",
    "overrides9-cluster's own device, h100, and this machine has none",
)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.device=h900",), "device='h900' is not known; known: a40"),
        (("cluster.nodes=0",), "cluster: nodes=0 must be positive"),
        (("+cluster.memory=1e5",), "no layout of vision, audio, llm fits on 4 x cpu"),
        (("model=mllm_9b", "data=cornstarch_vision", "experiment=none"), "the data has no items of draw"),
        (("trainer.precision=bf16-true",), "trainer.precision=bf16-true: plans are made for bf16-mixed"),
        (("clusters=h100",), "clusters"),
        (("layout=colocated",), "layout: plans choose layouts; leave it out"),
        (("trainer.devices=2",), "trainer.devices: plans are for all ranks of cluster; leave it out"),
        (("strategy.schedule=zbv",), "schedule='zbv': plans choose virtual stages"),
        (("cluster=h100", "profile=true"), "cluster's own device, h100, and this machine has none"),
    ],
)
def test_what_cannot_be_planned_says_what_to_change(
    pool: Pool, given: tuple[str, ...], tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    data = () if "experiment=none" in overrides else given
    check_message(planned(tmp_path / "plan", *data, *overrides), message)


def test_a_layout_file_that_is_not_there(pool: Pool, given: tuple[str, ...], tmp_path: Path) -> None:
    check_message(run_forked(tmp_path / "run", *given, f"layout={tmp_path}/no.yaml"), "there is no such file")
    (tmp_path / "plain.yaml").write_text("llm: {ranks: 1}")
    check_message(run_forked(tmp_path / "run", *given, f"layout={tmp_path}/plain.yaml"), "folders called layout")
