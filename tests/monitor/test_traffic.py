"""Bytes between ranks: what programs send is the least that can be sent, within nodes or between them."""

from __future__ import annotations

import pytest

from hetero_strategy.boundary.route import Hop, Rows, Transfer, least_rows
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.monitor.traffic import Traffic, sent
from hetero_strategy.plan.step_plan import edge_blocks
from hetero_strategy.schedule.compile import RankTransfer, StepProgram, compile_step, rows_on
from tests.schedule.test_compile import planned

LAYOUTS = {
    "apart": {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((2, 3))},
    "colocated": {"vision": ModuleLayout(range(4)), "llm": ModuleLayout(range(4), tp=2)},
    "replicas, pipeline": {"vision": ModuleLayout(range(4), tp=2), "llm": ModuleLayout((2, 3, 4, 5), pp=2, tp=2)},
    "generator": {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1, 2)), "draw": ModuleLayout((0, 3))},
}


@pytest.mark.parametrize("frozen", [(), ("vision",)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_send_the_least_there_and_back_where_gradients_flow(name: str, frozen: tuple[str, ...]) -> None:
    plan, schedule, world = planned(LAYOUTS[name], "1f1b", 2, frozen=frozen)
    graph, row_bytes = schedule.graph, [2 + number for number in range(len(schedule.graph.edges))]
    programs = [compile_step(plan, schedule, rank) for rank in range(world)]
    edges = {n: edge for n, edge in enumerate(graph.edges) if edge[0].module != edge[1].module}
    expected = 0
    for number, (source, target) in edges.items():
        for p, t in plan.feeds(source.module, target.module):
            blocks = edge_blocks(plan, source.module, p, target.module, t)
            sides = (
                rows_on(graph.stages[node], plan.assignments[node.module][m].totals(inner=node == target))
                for node, m in ((source, p), (target, t))
            )
            one, other = sides
            ways = (False, True) if graph.stages[source].backward else (False,)
            expected += sum(least_rows(blocks, one, other, backward=way) for way in ways) * row_bytes[number]
    for ranks_per_node in (1, 2, world):
        each = [sent(rank, program, row_bytes, ranks_per_node, edges) for rank, program in enumerate(programs)]
        within, between = (sum(column) for column in zip(*each, strict=True))
        assert within + between == expected > 0
        assert (ranks_per_node > 1 or not within) and (ranks_per_node < world or not between)
        every = [sent(rank, program, row_bytes, ranks_per_node) for rank, program in enumerate(programs)]
        assert (sum(map(sum, every)) > expected) == (len(edges) < len(graph.edges))


def test_by_hand() -> None:
    """Rank 1 sends 3 rows of 10 bytes to rank 0 and 5 to rank 2, one of which it passes on; 7 rows of 2 bytes apart."""
    first, none = Hop(((0, Rows(0, 3)), (2, Rows(3, 5)))), (Rows(0, 0), Rows(0, 0))
    one = RankTransfer(0, False, (0, 0), Transfer(8, 8, none, first, Hop(((2, Rows(0, 1)),), ((0, Rows(0, 9)),))))
    other = RankTransfer(1, True, (0, 0), Transfer(7, 7, none, Hop(((0, Rows(0, 7)),))))
    program = StepProgram(True, (), (one, other))
    assert sent(1, program, [10, 2], 2) == Traffic(30.0 + 14.0, 60.0)
    assert sent(1, program, [10, 2], 2, {0}) == Traffic(30.0, 60.0)
    assert sent(1, program, [10, 2], 4, {0}) == Traffic(90.0, 0.0)
