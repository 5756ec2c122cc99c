"""A schedule of one's own: one registered object in one file."""

from __future__ import annotations

import pytest

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule import policies
from hetero_strategy.schedule.action import Action
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.policies import ModuleSteps, SchedulePolicy, register_schedule, schedules
from hetero_strategy.schedule.programs import RankProgram, one_forward_one_backward
from tests.schedule.cases import chain, work


def eager(steps: ModuleSteps) -> tuple[RankProgram, ...]:
    """1F1B whose stages run one microbatch further ahead, so that a late gradient stops nobody."""
    last = steps.pipeline.pp - 1
    ahead = [[min(s + last - stage + 1, c, steps.count) for s, c in zip(steps.should, steps.limit, strict=True)]
             for stage in range(last + 1)]  # fmt: skip
    return tuple(one_forward_one_backward(stage, leads) for stage, leads in enumerate(ahead))


EAGER = SchedulePolicy("eager_1f1b", eager)
register_schedule(EAGER)


def test_it_runs_like_the_others() -> None:
    made = make_schedule("eager_1f1b", chain(3), work(6))
    check(made)
    assert "eager_1f1b" in schedules()
    assert [str(a) for a in made.of(0)[:5]] == ["llm.0 F0", "llm.0 F1", "llm.0 F2", "llm.0 F3", "llm.0 B0"]
    plain = make_schedule("1f1b", chain(3), work(6))
    assert {n: held + 1 for n, held in plain.in_flight.items()} == dict(made.in_flight)
    bounded = make_schedule("eager_1f1b", chain(3), work(6), max_in_flight={"llm": 3})
    assert max(bounded.in_flight.values()) == 3 and bounded.of(0)[3] == Action("B", plain.of(0)[0].node, 0)


def test_names_are_taken_once() -> None:
    register_schedule(EAGER)
    with pytest.raises(ScheduleError, match="'eager_1f1b' is known already"):
        register_schedule(SchedulePolicy("eager_1f1b", eager, splits_backward=True))
    with pytest.raises(ScheduleError, match="llm has vpp=2 in loop style, which eager_1f1b does not order"):
        make_schedule("eager_1f1b", chain(2, 2), work(4))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((((0, 0, 0), (1, 0, 0)),), "gave 1 lists for llm, which has 2 ranks"),
        (None, "gave no lists for llm, which has 2 ranks"),
        ((((0, 0, 0), (1, 0, 0)), ((0, 1, 0),)), "rank 1: stage 1 has no backward of microbatch 0"),
        ((((1, 0, 0), (0, 0, 0)), ()), "rank 0: the backward of microbatch 0 in stage 0 comes before the forward"),
        ((((0, 0, 0), (0, 0, 0)), ()), "rank 0: the forward of microbatch 0 in stage 0 comes twice"),
        ((((0, 1, 0),), ()), r"rank 0: the forward of microbatch 0 in stage 1 is none of stages \[0\]"),
        ((((0, 0, 0), (1, 0, 0), (2, 0, 0)), ()), r"rank 0: \(2, 0, 0\) is no .* 0: forward, 1: backward"),
        ((((0, 0, 0), "backward"), ()), "rank 0: 'backward' is no"),
    ],
)
def test_lists_that_are_not_whole_are_refused(
    lists: tuple[RankProgram, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policies._policies, "broken", SchedulePolicy("broken", lambda steps: lists))
    with pytest.raises(ScheduleError, match=f"schedule 'broken'.* {message}"):
        make_schedule("broken", chain(2), work(1))


def test_weight_gradients_are_all_in_a_list_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing would never run, and the sums behind it would not either."""
    both = ((0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1))
    for listed, fits in ((0, True), (1, False), (2, True)):
        made = (both + ((2, 0, 0), (2, 0, 1))[:listed],)
        policy = SchedulePolicy("own", lambda steps, made=made: made, splits_backward=True)  # type: ignore[misc]
        monkeypatch.setitem(policies._policies, "own", policy)
        if fits:
            check(make_schedule("own", chain(1), work(2)))
        else:
            with pytest.raises(ScheduleError, match="rank 0: stage 0 has no weight gradient of microbatch 1"):
                make_schedule("own", chain(1), work(2))
    with pytest.raises(ScheduleError, match="'whole' divides backwards, so it needs programs"):
        register_schedule(SchedulePolicy("whole", None, splits_backward=True))


def test_lists_of_ranks_that_wait_for_each_other_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank wants a gradient before its second forward, the other one all forwards first."""
    dead = (((0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)), ((0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)))
    monkeypatch.setitem(policies._policies, "dead", SchedulePolicy("dead", lambda steps: dead))
    with pytest.raises(ScheduleError, match="schedule 'dead': the lists of llm's ranks wait for each other"):
        make_schedule("dead", chain(2), work(2))


def test_what_is_registered_is_a_policy() -> None:
    with pytest.raises(ScheduleError, match=r"takes a SchedulePolicy\(name, programs\), got a function"):
        register_schedule(eager)  # type: ignore[arg-type]
