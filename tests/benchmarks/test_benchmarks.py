"""Each benchmark runs at a tiny size and says what it should."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    boundary_bytes,
    by_length,
    context,
    host_time,
    parts,
    step_overhead,
)
from benchmarks.peers.gather_then_slice import MIMO, Moved
from hetero_strategy.boundary.route import Side, route
from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding
from hetero_strategy.plan.step_plan import EdgeBlocks
from hetero_strategy.testing import Pool, ragged_step


def test_ragged_step_lays_items_one_after_another_before_the_text() -> None:
    draw = lambda rng, n: rng.integers(1, 9, n)  # noqa: E731
    made = ragged_step(3, 20, {"a": draw, "b": draw}, text=(2, 5))
    for sample in range(20):
        spans = []
        for items in made.items.values():
            mine = items.sample == sample
            spans += list(zip(items.start[mine].tolist(), items.edge_rows[mine].tolist(), strict=True))
        end = 0
        for start, rows in sorted(spans):
            assert start == end
            end += rows
        assert made.tokens[sample] - end == made.labels[sample] + 1


@pytest.mark.parametrize("assignment", boundary_bytes.ASSIGNMENTS)
@pytest.mark.parametrize("pair", boundary_bytes.PAIRS, ids=lambda p: p.name)
def test_boundary_bytes_equal_the_bound(pair: boundary_bytes.Pair, assignment: str) -> None:
    line = boundary_bytes.planned(boundary_bytes.edge_of(pair, assignment, 16), 8)
    assert line["ours"] == line["bound"]
    assert sum(line["peer"].values()) >= sum(line["bound"].values())
    if sum(line["bound"].values()):
        assert line["ours_over_bound"] == 1.0 <= line["peer_over_bound"]


def test_peer_by_hand() -> None:
    """Six rows from rank 0 to two sequence-parallel ranks: leader then broadcast; back all-gather, then leader."""
    array = lambda *v: np.asarray(v, dtype=np.int64)  # noqa: E731
    blocks = EdgeBlocks(array(0), array(0), array(0), array(1), array(6))
    source, target = Side(array([0]), array(6)), Side(array([1, 2]), array(8), RowSharding(2))
    assert MIMO(blocks, source, target).rows() == Moved(6 + 6, 6 + 6)
    assert MIMO(blocks, source, replace(target, sharding=REPLICATED)).rows() == Moved(6 + 6, 6)
    both = Side(array([0], [1]), array(3, 3))
    here = EdgeBlocks(array(0, 1), array(0, 0), array(0, 0), array(0, 3), array(3, 3))
    assert MIMO(here, both, Side(array([0, 1]), array(6), RowSharding(2))).rows() == Moved(6, 6)


def test_more_than_the_bound_is_noticed() -> None:
    """Negative control: the routes of a replicated target move more than a sequence-parallel one needs."""
    pair = next(p for p in boundary_bytes.PAIRS if p.name == "1 + 2 ranks, tp1 -> tp2 sp")
    edge = boundary_bytes.edge_of(pair, "aligned", 8)
    whole = replace(edge.target, sharding=REPLICATED)
    wasteful = sum(route(edge.blocks, edge.source, whole, r).forward.rows_sent for r in range(pair.world)) * 8
    assert wasteful == 2 * boundary_bytes.planned(edge, 8)["bound"]["forward"]


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("pair", ["dp4 -> tp2*dp2 sp", "2 + 2 ranks, dp2 -> tp2 sp"])
def test_runs_count_what_was_planned(pool, pair: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bytes.json"
    sizes = f"--assign round_robin --samples 8 --width 8 --run-width 8 --rounds 2 --json {file}"
    boundary_bytes.main(["--run", "--pairs", pair, *sizes.split()], pool)
    assert "peer / bound" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["benchmark"] == "boundary_bytes" and document["machine"]["torch"]
    runs = document["results"]["run"]["round_robin"]
    assert len(runs) == 1
    for one in runs:
        for who in ("ours", "peer"):
            assert one[who]["bytes"] == one[who]["planned_bytes"]


MOST_CALLS = 225
"""Calls of functions in an action on the main thread, besides kernels: 217 with torch 2.13, messages included.
What makes a step longer than it need be shows here, however busy the machine is."""


@pytest.mark.full
@pytest.mark.distributed
def test_step_overhead(pool, tmp_path) -> None:
    document = pool.run(1, _step_overhead, str(tmp_path / "overhead.json"), group=False)[0]
    assert document["settings"]["size"] == ["tiny"]
    assert document["machine"]["cores"] and document["machine"]["device"] == "cpu"
    results = document["results"]["tiny"]
    assert set(results["contenders"]) == {"hetero", "lightning", "fair", "fused", "plain"}
    for one in results["contenders"].values():
        assert one["step_ms"] >= one["fastest_ms"] and one["cpu_ms"] >= one["least_cpu_ms"]
    assert results["contenders"]["fair"]["over_fair"] == 1.0
    assert results["loss_difference"] < 1e-4


def _step_overhead(rank: int, world: int, file: str) -> dict[str, object]:
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    step_overhead.main(f"--size tiny --rounds 4 --warmup 2 --json {file}".split())
    with open(file) as f:
        document: dict[str, object] = json.load(f)
    return document


@pytest.mark.distributed
def test_host_time(pool) -> None:
    (figures,) = pool.run(1, _host_time, group=False)
    (one,), peers = figures["steps"], figures["beside torch"]
    assert one["actions"] == 3 * 2 * 32 + 3 and one["main"] < one["step"]
    assert 20 * one["actions"] < one["calls"] < MOST_CALLS * one["actions"]
    assert 2 < peers.pop("a block")["calls"] < 8  # nothing draws, so nothing is seeded
    ours, bound = peers.pop("ours")["calls"], peers.pop("bound")["calls"]
    assert all(0.8 * peer["calls"] > ours > bound > 20 for peer in peers.values()), peers


def _host_time(rank: int, world: int) -> dict[str, Any]:
    return host_time.main(["--instances", "2", "--rounds", "1"])


@pytest.mark.distributed
def test_parts(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--rows 512 --vocabulary 1024 --dim 64 --rounds 1 --sizes 8 --count 4"
    figures = parts.main(sizes.split(), pool)
    for share, most in (("5%", 0.1), ("25%", 0.3), ("100%", 0.4)):
        ours, whole = figures["head"][share]["ours"], figures["head"][share]["whole"]
        assert ours["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert 0 < ours["peak"] < most * whole["peak"]
    assert set(figures["optimizer"]["8"]) == {"loop", "ours", "fused"}
    assert "labelled" in capsys.readouterr().out


def test_dealt_rows_are_even_where_those_of_peers_are_not() -> None:
    """Control: two chunks and contiguous parts are uneven, and LPT's ranks have unequal rows."""
    found = context.compared("EE", 16384, 5, context.ATTENTION)
    worst = {way: [max(column) for column in zip(*ratios, strict=True)] for way, ratios in found.items()}
    assert worst["ours"][0] < 1.05 < 1.2 < min(worst["ring"][0], worst["zigzag"][0])
    assert worst["ours"][1] == 1.0 < worst["LPT"][1] and worst["LPT"][0] < 1.05


@pytest.mark.full
@pytest.mark.parametrize(("workload", "most"), [("llava", 0.7), ("video_long_tail", 1.0)])
def test_cp_by_length_costs_short_sequences_nothing(workload: str, most: float) -> None:
    """Control: cp 8 that cuts every sequence takes longer on slow links, far longer if sequences are short."""
    slow, fast = (by_length.compared(workload, 6, bandwidth) for bandwidth in (40e9, 200e9))
    assert max(slow["ours"], fast["ours"]) < 1.02 and 1 / slow["cp 8"] < most
    assert slow["keys"] < 0.35 and slow["padding"] < 0.001


@pytest.mark.full
@pytest.mark.distributed
def test_context_parallel_ranks_take_less_memory_than_one(pool: Pool) -> None:
    settings = (context.setting_of(name, dim=128, tokens=512) for name in ("cp 2", "one rank", "dp_shard 2"))
    cp, one, sharded = (max(pool.run(setting.world, context.allocated, setting)) for setting in settings)
    assert cp < 0.85 * one < sharded
