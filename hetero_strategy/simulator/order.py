"""The order in which a schedule's actions can run, or the reason why there is none. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action import Action, Schedule
from hetero_strategy.schedule.check import check


def running_order(schedule: Schedule) -> tuple[Sequence[Action], dict[Action, list[Action]]]:
    """List every action once, after all that it depends on and after what any of its ranks runs before it.

    Returns:
        The actions, and for every action those of other stages that read its rows.

    Raises:
        ScheduleError: some actions never become next on all ranks of their stage.
    """
    try:
        order = schedule.starts
    except ScheduleError:  # the checker says what is wrong; it looks at more than is needed to run
        check(schedule)
        raise
    readers: dict[Action, list[Action]] = {}
    for action in order:
        for source in schedule.dependencies.crossing(action):
            readers.setdefault(source, []).append(action)
    return order, readers
