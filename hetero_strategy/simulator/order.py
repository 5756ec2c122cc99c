"""A sequence in which all actions of a schedule can run, or the reason why there is none. Pure."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action import Action, Schedule, StageId
from hetero_strategy.schedule.check import check


def running_order(schedule: Schedule) -> tuple[list[Action], dict[Action, list[Action]]]:
    """List every action once, after all that it depends on and after what any of its ranks runs before it.

    An action can run when it is next in the lists of all ranks of its stage and what it reads has run.

    Returns:
        The actions, and for every action those of other stages that read its rows.

    Raises:
        ScheduleError: some actions never become next on all ranks of their stage.
    """
    lists = [lane.actions for lane in schedule.lanes]
    hosts = _hosts(schedule)
    dependencies = schedule.dependencies
    waits: dict[Action, int] = {}  # for how many actions, and for how many lanes
    readers: dict[Action, list[Action]] = {}
    followers: dict[Action, list[Action]] = {}
    for number, actions in enumerate(lists):
        for action in actions:
            if number not in hosts.get(action.node, ()):
                _refuse(schedule)
            if action in waits:
                continue
            crossing, local = dependencies.crossing(action), dependencies.local(action)
            waits[action] = len(crossing) + len(local) + len(hosts[action.node])
            for source in crossing:
                readers.setdefault(source, []).append(action)
            for source in local:
                followers.setdefault(source, []).append(action)
    position = [0] * len(lists)
    order: list[Action] = []
    ready: deque[Action] = deque()

    def count_down(action: Action) -> None:
        waits[action] -= 1
        if waits[action] == 0:
            ready.append(action)

    for actions in lists:
        if actions:
            count_down(actions[0])
    while ready:
        action = ready.popleft()
        order.append(action)
        for reader in readers.get(action, ()):
            count_down(reader)
        for follower in followers.get(action, ()):
            count_down(follower)
        for lane in hosts[action.node]:
            position[lane] += 1
            if position[lane] < len(lists[lane]):
                count_down(lists[lane][position[lane]])
    if any(position[lane] < len(actions) for lane, actions in enumerate(lists)):
        _refuse(schedule)
    return order, readers


def _refuse(schedule: Schedule) -> NoReturn:
    """Let the checker say what is wrong; it looks at more than is needed to run, and so is not asked before."""
    check(schedule)
    raise ScheduleError(f"schedule {schedule.name!r} cannot run: some actions never become next on all their ranks")


def _hosts(schedule: Schedule) -> dict[StageId, tuple[int, ...]]:
    """Stage with work -> numbers of the lanes that its ranks are in."""
    lane_of = schedule.lane_of
    listed = {a.node for lane in schedule.lanes for a in lane.actions}
    hosts: dict[StageId, tuple[int, ...]] = {}
    for stage_id in listed:
        ranks = schedule.graph.stages[stage_id].ranks if stage_id in schedule.graph.stages else frozenset()
        if not ranks or not all(rank in lane_of for rank in ranks):
            _refuse(schedule)
        hosts[stage_id] = tuple(sorted({lane_of[rank] for rank in ranks}))
    return hosts
