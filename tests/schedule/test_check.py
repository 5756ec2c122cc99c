"""Damaged schedules are refused, each kind of fault by its own words; schedules as text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action import Action, Schedule, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from tests.schedule.cases import Module, chain, damaged, graph, work

EDGES = [("vision", "llm"), ("audio", "llm")]


def moved(schedule: Schedule, rank: int, action: Action, to: int) -> Schedule:
    """With one action at another place of a rank's list."""
    actions = list(schedule.of(rank))
    actions.remove(action)
    actions.insert(to, action)
    return damaged(schedule, schedule.lane_of[rank], actions)


@pytest.fixture
def mixed() -> Schedule:
    """Vision on ranks 0 and 1 of both LLM stages, audio on rank 2."""
    modules = {"vision": Module([[0, 1]]), "audio": Module([[2]]), "llm": Module([[0], [1]], sharded=True)}
    schedule = make_schedule("zb_h1", graph(modules, EDGES), work(4, *modules, edges=EDGES))
    check(schedule)
    return schedule


LLM0, LLM1, VISION, AUDIO = StageId("llm", 0), StageId("llm", 1), StageId("vision", 0), StageId("audio", 0)


def test_a_missing_action(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 2 never runs audio\.0 F3 \(1 of 9 actions missing\)"):
        check(damaged(mixed, mixed.lane_of[2], [a for a in mixed.of(2) if a != Action("F", AUDIO, 3)]))


def test_an_action_twice(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 2 runs audio\.0 F0 2 times"):
        check(damaged(mixed, mixed.lane_of[2], [*mixed.of(2), Action("F", AUDIO, 0)]))


def test_an_action_that_the_step_does_not_have(mixed: Schedule) -> None:
    for foreign in (
        Action("F", AUDIO, 4),
        Action("I", AUDIO, 0),
        Action("UNSHARD", AUDIO),
        Action("F", StageId("x", 0), 0),
    ):
        with pytest.raises(ScheduleError, match=f"rank 2: {foreign} is not part of this step"):
            check(damaged(mixed, mixed.lane_of[2], [*mixed.of(2), foreign]))


def test_an_action_of_a_node_that_the_rank_does_not_host(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 2 has llm\.0 F0 in its list but does not host llm\.0"):
        check(damaged(mixed, mixed.lane_of[2], [*mixed.of(2), Action("F", LLM0, 0)]))


def test_a_rank_in_two_lanes_or_in_none(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 2 hosts audio\.0 but is in no lane"):
        check(replace(mixed, lanes=tuple(lane for lane in mixed.lanes if 2 not in lane.ranks)))
    with pytest.raises(ScheduleError, match="rank 0 is in lanes 0 and 3"):
        check(replace(mixed, lanes=(*mixed.lanes, mixed.lanes[0])))
    with pytest.raises(ScheduleError, match="ranks 0 and 2 share lane 0 but host different nodes"):
        check(replace(mixed, lanes=(replace(mixed.lanes[0], ranks=(0, 2)), *mixed.lanes[1:2])))


def test_what_is_needed_comes_later(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 2 runs audio\.0 B0 before audio\.0 F0, which it needs"):
        check(moved(mixed, 2, Action("F", AUDIO, 0), len(mixed.of(2)) - 2))
    with pytest.raises(ScheduleError, match=r"rank 0 runs llm\.0 F0 before vision\.0 F0, which it needs"):
        check(moved(mixed, 0, Action("F", LLM0, 0), 0))


def test_w_before_i(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 1 runs llm\.1 W0 before llm\.1 I0, which it needs"):
        check(moved(mixed, 1, Action("W", LLM1, 0), mixed.of(1).index(Action("I", LLM1, 0))))


def test_unshard_too_late_and_reduce_too_early(mixed: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"rank 1 runs llm\.1 F0 before llm\.1 UNSHARD"):
        check(moved(mixed, 1, Action("UNSHARD", LLM1), len(mixed.of(1)) - 1))
    with pytest.raises(ScheduleError, match=r"rank 1 runs llm\.1 REDUCE before llm\.1 W3"):
        check(moved(mixed, 1, Action("REDUCE", LLM1), len(mixed.of(1)) - 2))


def test_more_microbatches_than_the_bound() -> None:
    schedule = make_schedule("1f1b", chain(2), work(4))
    with pytest.raises(
        ScheduleError, match=r"rank 0 holds 2 microbatches of llm\.0 after llm\.0 F1, in_flight allows 1"
    ):
        check(replace(schedule, in_flight={**schedule.in_flight, LLM0: 1}))
    assert schedule.in_flight == {LLM0: 2, LLM1: 1}
    # I leaves W what it needs: F0 I0 F1 I1 W0 holds two microbatches.
    split = make_schedule("zb_h1", chain(2), work(2))
    with pytest.raises(ScheduleError, match=r"rank 1 holds 2 microbatches of llm\.1 after llm\.1 F1"):
        check(replace(split, in_flight={**split.in_flight, LLM1: 1}))


def test_ranks_that_share_two_nodes_in_different_order() -> None:
    """Two encoders on the same two ranks, which host different LLM stages: blocking collectives would never meet."""
    modules = {"vision": Module([[0, 1]]), "audio": Module([[0, 1]]), "llm": Module([[0], [1]])}
    schedule = make_schedule("gpipe", graph(modules, EDGES), work(2, *modules, edges=EDGES))
    check(schedule)
    place = schedule.of(1).index(Action("F", AUDIO, 0))
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank . waits in (vision|audio)\.0 F0 for rank ., which waits in"
    ):
        check(moved(schedule, 1, Action("F", VISION, 0), place))


def test_ranks_that_wait_for_each_other_s_rows() -> None:
    """Every list is in order by itself: stage 0 wants a backward before the forward that the backward needs."""
    schedule = make_schedule("1f1b", chain(2), work(3))
    late = moved(schedule, 1, Action("F", LLM1, 2), 1)
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0 waits in llm\.0 B0 for rows of llm\.1 B0; rank 1 waits in"
    ):
        check(replace(late, in_flight={LLM0: 3, LLM1: 3}))


def test_rows_awaited_in_another_order_than_sent() -> None:
    schedule = make_schedule("gpipe", chain(2), work(3))
    with pytest.raises(
        ScheduleError, match=r"rank 1 awaits rows of llm\.0 F1 \(for llm\.1 F1\) before those of llm\.0 F0"
    ):
        check(moved(schedule, 1, Action("F", LLM1, 1), 0))


def test_a_node_split_that_has_no_weight_gradient() -> None:
    schedule = make_schedule("1f1b", graph({"llm": Module([[0], [1]], trains=[True, False])}), work(2))
    with pytest.raises(ScheduleError, match=r"llm\.1 is split in I and W but has no weight gradient"):
        check(replace(schedule, split=frozenset({LLM1})))


def test_random_damage_to_one_rank_of_several_is_refused(mixed: Schedule) -> None:
    """Two neighbours of one list exchanged: refused whenever they matter to each other, to other ranks or to memory."""
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        lane = draw.randrange(len(mixed.lanes))
        actions = list(mixed.lanes[lane].actions)
        i, k = sorted(draw.sample(range(len(actions)), 2))
        actions[i], actions[k] = actions[k], actions[i]
        try:
            check(damaged(mixed, lane, actions))
        except ScheduleError as error:
            refused += " starts before " not in str(error)  # ``starts`` stays as it was; other checks must notice
    assert refused > 150


def test_starts_keep_to_every_list_and_to_what_actions_need() -> None:
    schedule = make_schedule("gpipe", chain(2), work(2))
    for action, said in (
        (Action("F", LLM0, 1), r"llm\.0 F1 starts before llm\.0 F0, which rank 0 runs first"),
        (Action("F", LLM1, 0), r"llm\.1 F0 starts before llm\.0 F0, which it needs"),
    ):
        with pytest.raises(ScheduleError, match=said):
            check(replace(schedule, starts=(action, *(a for a in schedule.starts if a != action))))


def test_a_grid() -> None:
    assert make_schedule("1f1b", chain(2), work(2)).grid().splitlines() == [
        "rank 0        rank 1",
        "0F0",
        "0F1           1F0",
        "              1B0",
        "0B0           1F1",
        "              1B1",
        "0B1           1REDUCE_GRAD",
        "0REDUCE_GRAD",
    ]


def test_a_grid_of_wrong_starts_is_refused() -> None:
    schedule = make_schedule("1f1b", chain(2), work(2))
    reversed_starts, without_last = schedule.starts[::-1], schedule.starts[:-1]
    for starts, said in ((reversed_starts, "starts before"), (without_last, "starts names 9 actions, the step has 10")):
        with pytest.raises(ScheduleError, match=said):
            replace(schedule, starts=starts).grid()
    forwards = tuple(replace(lane, actions=lane.actions[:1]) for lane in schedule.lanes)[1:]
    with pytest.raises(ScheduleError, match=r"llm\.1 F0 needs llm\.0 F0, which no rank runs"):
        replace(schedule, lanes=forwards, starts=forwards[0].actions).grid()


def test_a_line_per_rank() -> None:
    assert make_schedule("zb_h1", chain(2), work(2)).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
