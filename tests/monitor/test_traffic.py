"""`traffic` against the routes that ranks really run, over random layouts and ragged counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.boundary.route import Side, least_rows, route
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.monitor import traffic as module
from hetero_strategy.monitor.traffic import Traffic
from hetero_strategy.plan.orchestrator import plan_step
from hetero_strategy.plan.step_plan import EdgeBlocks, StepItems, StepMetadata, crossing, edge_blocks
from hetero_strategy.schedule.action import Stage


def traffic(blocks: EdgeBlocks, source: Side, target: Side, node: int, *, backward: bool = False) -> Traffic:
    """Of one microbatch of each side, in one direction."""
    totals = source.totals[blocks.source_instance], target.totals[blocks.target_instance]
    stages = (Stage(side.instances, True, True, row_sharding=side.sharding) for side in (source, target))
    return module.traffic(blocks, totals, *stages, node)[backward]


def sent(blocks: EdgeBlocks, source: Side, target: Side, world: int, node: int, *, backward: bool) -> Traffic:
    """What all ranks send by their own routes, message by message."""
    within = between = 0
    for rank in range(world):
        way = route(blocks, source, target, rank)
        transfer = way.backward if backward else way.forward
        for hop in (transfer.first, transfer.second):
            for peer, rows in hop.sends:
                if peer // node == rank // node:
                    within += len(rows)
                else:
                    between += len(rows)
    return Traffic(within, between)


@st.composite
def edges(draw: st.DrawFn) -> tuple[EdgeBlocks, Side, Side, int]:
    world = draw(st.sampled_from([1, 2, 4, 6, 8]))
    grids = []
    for _ in range(2):
        per = draw(st.sampled_from([n for n in (1, 2, 4) if n <= world]))
        instances = draw(st.integers(1, world // per))
        ranks = draw(st.permutations(range(world)))[: per * instances]
        grids.append(np.array(ranks, dtype=np.int64).reshape(instances, per))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = draw(st.integers(1, 12))
    sample = np.sort(rng.integers(0, samples, draw(st.integers(0, 15)))).astype(np.int64)
    rows = rng.integers(1, 9, len(sample))
    before = np.array([rows[:i][sample[:i] == sample[i]].sum() for i in range(len(sample))], dtype=np.int64)
    tokens = np.bincount(sample, weights=rows, minlength=samples).astype(np.int64) + 3
    metadata = StepMetadata(0, 0, np.arange(samples), tokens, tokens, {"vision": StepItems(sample, rows, before, rows)})
    multiple = {"vision": grids[0].shape[1], "llm": grids[1].shape[1]}
    instances_of = {"vision": len(grids[0]), "llm": len(grids[1])}
    plan = plan_step(metadata, instances_of, ["llm"], row_multiple=multiple)
    sharded = draw(st.booleans()), draw(st.booleans())
    parts = [RowSharding(grid.shape[1] if one else 1) for grid, one in zip(grids, sharded, strict=True)]
    source = Side(grids[0], plan.assignments["vision"][0].totals(), parts[0])
    target = Side(grids[1], plan.assignments["llm"][0].totals(inner=True), parts[1])
    return edge_blocks(plan, "vision", 0, "llm", 0), source, target, world


@settings(max_examples=150, deadline=None)
@given(edges(), st.sampled_from([1, 2, 3, 8]), st.booleans())
def test_counts_what_routes_send(edge: tuple[EdgeBlocks, Side, Side, int], node: int, backward: bool) -> None:
    blocks, source, target, world = edge
    found = traffic(blocks, source, target, node, backward=backward)
    real = sent(blocks, source, target, world, node, backward=backward)
    assert sum(found) == pytest.approx(sum(real))
    assert sum(found) == pytest.approx(least_rows(blocks, source, target, backward=backward))
    # Shares of rows that do not divide by the number of senders are a row off at most, per pair of rank sets.
    pairs = source.instances.size * target.instances.size
    replicas = max(source.instances.shape[1], target.instances.shape[1])
    assert found.between == pytest.approx(real.between, abs=pairs * replicas if replicas > 1 else 1e-6)
    if node >= world:
        assert found.between == 0


def test_a_replica_set_gets_a_row_once_from_afar() -> None:
    """8 rows of rank 0 to a replica set on another node: 8 rows between nodes, and each passed on to 3 ranks there."""
    blocks = EdgeBlocks(*(np.array([x]) for x in (0, 0, 0, 0)), rows=np.array([8]))
    source = Side(np.array([[0]]), np.array([8]))
    target = Side(np.array([[4, 5, 6, 7]]), np.array([8]))
    assert traffic(blocks, source, target, 4) == Traffic(24.0, 8.0)
    assert traffic(blocks, source, target, 4, backward=True) == Traffic(0.0, 8.0)
    assert traffic(blocks, source, target, 8) == Traffic(32.0, 0.0)
    assert traffic(blocks, target, target, 4) == Traffic(0.0, 0.0)  # a rank that has a row is sent none


def test_pieces_of_bounded_size_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 40
    instance = np.arange(count)
    blocks = EdgeBlocks(instance, np.zeros(count, int), instance[::-1], np.zeros(count, int), np.full(count, 3))
    source, target = (Side(g, np.full(count, 3)) for g in (np.arange(40)[:, None], np.arange(80).reshape(40, 2)))
    whole = traffic(blocks, source, target, 8)
    monkeypatch.setattr(module, "_MOST_LINKS", 16)
    assert traffic(blocks, source, target, 8) == pytest.approx(whole)
    assert sum(whole) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_all_microbatches_at_once_are_the_sum_of_each(tp: int) -> None:
    rng = np.random.default_rng(tp)
    samples, grids = 40, {"vision": np.arange(4)[:, None], "llm": np.arange(8)[::-1].reshape(8 // tp, tp)}
    rows, zeros = rng.integers(1, 9, samples), np.zeros(samples, int)
    vision = {"vision": StepItems(np.arange(samples), rows, zeros, rows)}
    metadata = StepMetadata(0, 0, np.arange(samples), rows + 5, rows, vision)
    counts = {name: len(grid) for name, grid in grids.items()}
    plan = plan_step(metadata, counts, ["llm"], microbatches=3, row_multiple={"llm": tp})
    source, target = (Stage(grids[n], True, True, row_sharding=RowSharding(k)) for n, k in (("vision", 1), ("llm", tp)))
    has, needs = (np.array([a.totals(inner=n == "llm") for a in plan.assignments[n]]) for n in ("vision", "llm"))
    blocks, p, t = crossing(plan, "vision", "llm")
    totals = has[p, blocks.source_instance], needs[t, blocks.target_instance]
    whole = module.traffic(blocks, totals, source, target, 3)
    for backward in (False, True):
        each = Traffic(0.0, 0.0)
        for one, two in plan.feeds("vision", "llm"):
            sides = (
                Side(stage.grid, rows, stage.row_sharding) for stage, rows in ((source, has[one]), (target, needs[two]))
            )
            each += traffic(edge_blocks(plan, "vision", one, "llm", two), *sides, 3, backward=backward)
        assert whole[backward] == pytest.approx(each) and sum(each) > 0
