"""Blocks' seconds from what stages of a run took: a world that takes what the formula says is found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.planner.estimate import Estimates
from hetero_strategy.planner.space import Degrees
from hetero_strategy.schedule.action import StageId
from hetero_strategy.simulator.cost_model import CostModel, Precision, module_times
from hetero_strategy.simulator.from_run import Measured
from hetero_strategy.simulator.stage_times import NOTHING, BlockSeconds, Line, StageTimes
from hetero_strategy.testing.plans import batch, cluster, model

CLUSTER, PRECISION = cluster(8), Precision(4, 4)
PIPED = {"vision": ModuleLayout((0, 1), pp=2, split=(1, 3)), "llm": ModuleLayout((2, 3), pp=2, split=(5, 3))}
CONTEXT = {"vision": ModuleLayout((0,), split=(4,)), "llm": ModuleLayout(4, tp=2, cp=2, split=(8,))}
EXPERTS = {"vision": ModuleLayout((0,), split=(4,)), "llm": ModuleLayout(4, tp=2, ep=4, split=(8,))}
BOTH = {"vision": ModuleLayout((0,), split=(4,)), "llm": ModuleLayout(4, tp=2, cp=2, ep=4, split=(8,))}
ALONE = {"vision": ModuleLayout((0,), split=(4,)), "llm": ModuleLayout((0, 1), tp=2, split=(8,))}


def times(shape: ModelSpec, layouts: dict[str, ModuleLayout], name: str, **options: Any) -> list[StageTimes]:
    fed = shape.fed_by_trainable()[name]
    layout = layouts[name].resolved()
    return module_times(shape.modules[name], layout, CLUSTER, fed=fed, precision=PRECISION, **options)


def measured(
    shape: ModelSpec, layouts: dict[str, ModuleLayout], halves: bool = False, recomputed: float = 0.0
) -> Measured:
    """Measure what the formula says; the busiest context-parallel rank receives 0.75 keys for each row of its instance,
    and has 1.25 times the mean of pairs.
    """
    stages: dict[StageId, dict[Any, Line]] = {}
    for name in layouts:
        for i, stage in enumerate(times(shape, layouts, name, recomputed=recomputed)):
            backward = {"I": stage.input, "W": stage.weight} if halves else {"B": stage.backward}
            stages[StageId(name, i)] = {"F": stage.forward, **backward}
            if (keys := stage.keys) is not None:
                one = Line(keys.latency, 0.75 * keys.per_key / keys.groups, 0.0)
                of = stages[StageId(name, i)]
                busiest = {kind: line._replace(per_pair=1.25 * line.per_pair) for kind, line in of.items()}
                stages[StageId(name, i)] = {k: line.plus(one, keys.exchanges(k)) for k, line in busiest.items()}
    resolved = {name: layout.resolved() for name, layout in layouts.items()}
    return Measured(resolved, dict.fromkeys(layouts, recomputed), stages, keys={"llm": 0.75}, pairs={"llm": 1.25})


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("ran", "halves", "again"),
    [
        (PIPED, False, 0.0),
        (PIPED, True, 0.5),
        (ALONE, False, 1.0),
        (CONTEXT, True, 1.0),
        (EXPERTS, False, 1.0),
        (BOTH, False, 0.5),
    ],
)
def test_other_layouts_take_what_the_formula_says(
    ran: dict[str, ModuleLayout], halves: bool, again: float, frozen: bool
) -> None:
    shape = model((4, 256), (8, 512), frozen=frozen, experts=8)
    shape = replace(shape, modules={n: replace(m, keys=2 * m.width) for n, m in shape.modules.items()})
    found = measured(shape, ran, halves, again).modules(shape, CLUSTER, PRECISION)
    for layouts in (PIPED, ALONE, CONTEXT, EXPERTS, BOTH):
        for name in shape.modules:
            known, formula = (times(shape, layouts, name, measured=m) for m in (found[name], None))
            for one, other in zip(known, formula, strict=True):
                assert one.forward.per_row == pytest.approx(other.forward.per_row)
                assert one.keys == other.keys
                assert one.forward.per_pair == pytest.approx(other.forward.per_pair)
                assert one.backward.per_row == pytest.approx(other.backward.per_row, rel=1e-6)
                if halves:
                    assert (one.input.per_row, one.weight.per_row) == pytest.approx(
                        (other.input.per_row, other.weight.per_row)
                    )


def test_a_device_twice_as_slow_is_twice_as_slow() -> None:
    shape = model((4, 256), (8, 512))
    once = measured(shape, PIPED)
    slow = {s: {kind: line.plus(line) for kind, line in of.items()} for s, of in once.stages.items()}
    twice = Measured(once.layouts, once.recomputed, slow).modules(shape, CLUSTER, PRECISION)
    for name in shape.modules:
        alone = ALONE | {"llm": ModuleLayout((0,), split=(8,))}
        one, other = (times(shape, alone, name, measured=m) for m in (twice[name], None))
        assert one[0].backward == pytest.approx(other[0].backward.plus(other[0].backward))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    given = measured(model((4, 256), (8, 512)), PIPED, recomputed=0.5)
    given.write(tmp_path / "measured.json")
    assert Measured.read(tmp_path / "measured.json") == given


def test_a_file_of_an_earlier_version_has_evenly_chosen_experts_and_even_ranks_that_lack_all_other_keys(
    tmp_path: Path,
) -> None:
    shape = model((4, 256), (8, 512))
    shape = replace(shape, modules={n: replace(m, keys=2 * m.width) for n, m in shape.modules.items()})
    given = measured(shape, CONTEXT)
    replace(given, expert_load=1.5).write(file := tmp_path / "measured.json")
    content = json.loads(file.read_text())
    assert content.pop("expert_load") == 1.5 and content.pop("keys") and content.pop("pairs")
    file.write_text(json.dumps(content))
    assert (old := Measured.read(file)) == replace(given, keys={}, pairs={})
    even = replace(given, keys={"llm": 0.5}, pairs={"llm": 1.0})
    assert old.modules(shape, CLUSTER, PRECISION) == even.modules(shape, CLUSTER, PRECISION)


def test_what_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing: a run writes it at the end"):
        Measured.read(tmp_path / "measured.json")
    (tmp_path / "measured.json").write_text('{"layouts": {}}')
    with pytest.raises(ConfigError, match="is damaged"):
        Measured.read(tmp_path / "measured.json")
    with pytest.raises(ConfigError, match="vision has 5 blocks in this one"):
        measured(model((4, 256), (8, 512)), PIPED).modules(model((5, 256), (8, 512)), CLUSTER, PRECISION)


def test_blocks_whose_seconds_do_not_grow_with_rows_are_shared_evenly() -> None:
    fixed = Line(1e-3, 0.0, 0.0)
    blocks = {1: [BlockSeconds(fixed, fixed, NOTHING, fixed)] * 4}
    made = Estimates(CostModel(model((4, 256)), CLUSTER, PRECISION, measured={"vision": blocks}), [batch(8)])
    assert made.slowest_share("vision", 1, 2) == 0.5
    assert made.busy("vision", Degrees(1, 2, 1, 1), 4) == pytest.approx(4 * 8e-3 / 2)
