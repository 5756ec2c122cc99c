"""Layouts and placements: derived degrees, shapes, and every fault with its numbers and its fix."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError, LayoutError
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.registry import rank_sets
from hetero_strategy.layout.spec import Placement
from hetero_strategy.strategy import HeteroStrategy


def test_one_degree_is_derived() -> None:
    assert ModuleLayout(ranks=range(8), tp=2).resolved().dp_shard == 4
    assert ModuleLayout(ranks=8, tp=-1, dp_shard=2).resolved().tp == 4
    assert ModuleLayout(ranks=[0, 3], dp_replicate=2).resolved().dp_shard == 1
    assert ModuleLayout(ranks=6, dp_replicate=3).resolved().dp == 6


def test_ranks_ascend_along_every_axis() -> None:
    layout = ModuleLayout(ranks=[7, 3, 0, 5, 6, 2, 9, 1], tp=2, dp_replicate=2).resolved()
    grid = layout.grid().squeeze()
    assert layout.ranks == (0, 1, 2, 3, 5, 6, 7, 9)
    assert grid.shape == (2, 2, 2)
    for axis in range(3):
        assert (np.diff(grid, axis=axis) > 0).all()
    assert layout.stage_grid(0).tolist() == [[0, 1], [2, 3], [5, 6], [7, 9]]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"ranks": []}, ["ranks is empty"]),
        ({"ranks": [0, 1, 1]}, ["ranks repeats [1]"]),
        ({"ranks": [-1, 0]}, ["-1", "count from 0"]),
        ({"ranks": 6, "tp": 4}, ["dp_shard=-1", "6 ranks", "tp 4"]),
        ({"ranks": 6, "tp": 4, "dp_shard": 1}, ["tp 4", "6", "-1"]),
        ({"ranks": 2, "tp": -1}, ["dp_shard and tp", "at most one"]),
        ({"ranks": 2, "tp": 0}, ["tp=0"]),
        ({"ranks": 2, "pp": 2, "vpp": 0}, ["vpp=0", "vpp=1"]),
        ({"ranks": 2, "vpp": 2}, ["vpp=2", "pp=1", "pp above 1"]),
        ({"ranks": 2, "pp": 2, "pp_style": "w"}, ["pp_style='w'", "'loop'", "'v'"]),
        ({"ranks": 2, "pp": 2, "pp_style": "v"}, ["pp_style='v'", "pp=2", "vpp=1", "vpp=2"]),
        ({"ranks": 4, "pp_style": "v", "vpp": 2}, ["pp_style='v'", "pp=1"]),
        ({"ranks": 2, "pp": 2, "split": [1, 2, 3]}, ["split=[1, 2, 3]", "3 stages", "pp 2 x vpp 1 = 2"]),
        ({"ranks": 4, "pp": -1, "dp_shard": 2, "vpp": 2, "split": [2, 2]}, ["pp 2 x vpp 2 = 4"]),
        ({"ranks": 2, "pp": 2, "split": [0, 0]}, ["split=[0, 0]", "at least one block"]),
        ({"ranks": 2, "pp": 2, "split": [3, 0]}, ["split=[3, 0]", "at least one block"]),
        ({"ranks": 2, "cp": 3}, ["dp_shard=-1", "2 ranks", "cp 3 = 3"]),
        ({"ranks": 12, "tp": 2, "pp": 2, "ep": 4}, ["ep=4", "dp_shard 3 x cp 1 x tp 2 = 6", "ep=3 or 6"]),
        ({"ranks": 4, "dp_replicate": 2, "ep": 4}, ["ep=4", "dp_shard 2 x cp 1 x tp 1 = 2", "ep=2"]),
        ({"ranks": 2, "ep": -1}, ["ep=-1", "ep=1"]),
    ],
)
def test_faults_name_field_numbers_and_fix(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(LayoutError) as raised:
        ModuleLayout(**fields).resolved("vision")
    message = str(raised.value)
    assert message.startswith("layout of 'vision': ")
    for part in parts:
        assert part in message


def test_all_faults_at_once() -> None:
    with pytest.raises(LayoutError) as raised:
        place({"vision": ModuleLayout(ranks=[0, 0], ep=0), "llm": ModuleLayout(ranks=[3, 8, 9], dp_shard=2)}, 4)
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert "ranks 8-9 do not exist in a world of 4" in lines[3] and "at least 10 processes" in lines[3]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"ranks": [0], "tpp": 2}, "unknown field tpp"),
        ({"tp": 2}, "ranks is missing"),
        ({"ranks": [0], "tp": "two"}, "tp='two' is not a whole number"),
        ({"ranks": "01"}, "ranks='01' is not a whole number or a list"),
        ({"ranks": [0], "split": 2}, "split=2 is not a list of whole numbers"),
        ({"ranks": [0], "split": "12"}, "split='12' is not a list"),
        ({"ranks": [0], "pp_style": 1}, "pp_style=1 is not 'loop' or 'v'"),
        ({"ranks": [0], "cp_form": "rings"}, "cp_form='rings' is not 'keys' or 'heads'"),
        ({"ranks": [0, True]}, "ranks=[0, True] is not a whole number or a list"),
        ({"ranks": [0.0, 1.7]}, "ranks=[0.0, 1.7] is not a whole number or a list"),
        ({"ranks": 2, "pp": 2, "split": [1.5, 1]}, "split=[1.5, 1] is not a list"),
        ({"ranks": 2, "tp": 2.0}, "tp=2.0 is not a whole number"),
        (3, "expected fields"),
    ],
)
def test_configs_are_read_strictly(config: object, part: str) -> None:
    with pytest.raises(LayoutError, match="layout of 'llm'") as raised:
        ModuleLayout.from_config("llm", config)
    assert part in str(raised.value)
    if "is not" in part:  # of one's own script, too
        with pytest.raises(LayoutError, match=re.escape(part)):
            ModuleLayout(**config)  # type: ignore[arg-type]


def test_ranks_may_be_anything_that_counts_once() -> None:
    assert ModuleLayout(r for r in (2, np.int64(1))).ranks == ModuleLayout({1, 2}).ranks == (1, 2)  # type: ignore[arg-type]
    assert ModuleLayout(np.int64(2)).ranks == (0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("layouts", [5, ["llm"], ModuleLayout(2)])
def test_layouts_are_given_by_module(layouts: object) -> None:
    with pytest.raises(ConfigError, match=r"HeteroStrategy: layouts=.*; use 'auto', or a mapping of modules"):
        HeteroStrategy(layouts)  # type: ignore[arg-type]


def test_placement_answers_who_is_where() -> None:
    placement = place({"vision": ModuleLayout(ranks=[1, 4]), "llm": ModuleLayout(ranks=[1, 2, 4, 6], tp=2)}, 8)
    assert placement.coordinate("llm", 4) == (1, 0, 0, 0, 0)
    assert placement.coordinate("llm", 6) == (1, 1, 0, 0, 1)
    assert place({"llm": ModuleLayout(ranks=8, cp=2, tp=2)}, 8).coordinate("llm", 6) == (1, 2, 0, 1, 0)
    assert placement.coordinate("vision", 2) is None
    assert placement.table()[1] == ("llm", "1-2,4,6", "dp_shard=2 tp=2")


def test_pipelines_are_read_and_cut_the_grid() -> None:
    config = {"ranks": 8, "pp": 2, "tp": 2, "vpp": 2, "pp_style": "v", "split": [1, 2, 1, 3]}
    layout = ModuleLayout.from_config("llm", config).resolved()
    assert layout.split == (1, 2, 1, 3) and layout.dp == 2
    assert [layout.pipeline.rank_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert [layout.stage_grid(s).tolist() for s in (0, 1)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert (layout.stage_grid(0) == layout.stage_grid(3)).all()
    placement = place({"llm": layout}, 8)
    assert placement.coordinate("llm", 6) == (1, 0, 1, 0, 0)
    assert placement.table() == [("llm", "0-7", "pp=2 dp_shard=2 tp=2 vpp=2 (v) split=1+2+1+3")]
    loop = ModuleLayout(ranks=3, pp=3, vpp=2).resolved()
    assert [loop.pipeline.rank_of(s) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    cut = replace(loop, pp_style="consecutive")
    assert [cut.pipeline.stages_of(rank) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert Placement({"vision": cut}, 3).table() == [("vision", "0-2", "pp=3 2 pieces")]


@given(st.data())
def test_groups_come_in_one_order_without_repetition(draws: st.DataObject) -> None:
    """The list from which every rank creates groups holds what meshes and edges need, each once."""
    world = draws.draw(st.integers(1, 16))

    def layout() -> ModuleLayout:
        count = draws.draw(st.integers(1, world))
        pp = draws.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
        tp = draws.draw(st.sampled_from([d for d in range(1, count // pp + 1) if count // pp % d == 0]))
        return ModuleLayout(ranks=tuple(draws.draw(st.permutations(range(world)))[:count]), tp=tp, pp=pp)

    placement = place({"a": layout(), "b": layout()}, world)
    a, b = placement.layouts["a"], placement.layouts["b"]
    sets = rank_sets(placement, [(*a.ranks, *b.ranks)])
    assert len(set(sets)) == len(sets)
    assert all(ranks == tuple(sorted(ranks)) for ranks in sets)
    assert tuple(sorted({*a.ranks, *b.ranks})) in sets
    for stage in range(a.pp):
        for line in (*a.stage_grid(stage), *a.stage_grid(stage).T):
            assert tuple(line.tolist()) in sets
