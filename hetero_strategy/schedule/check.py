"""Prove that a schedule can run, whoever made it (``check``). Pure.

Every list of a schedule is compared with the actions that the step needs. Then all lists run abstractly: an action
happens when every rank of its node has reached it (it may hold collectives that block) and all rows it reads have been
made. Time is linear in the number of actions times the lanes that share them.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action import Action, Kind, Lane, Schedule, StageId


def check(schedule: Schedule) -> None:
    """Refuse a schedule that is not complete or cannot run.

    It proves that:

    * lanes hold the ranks that have work, each once; every action is once on every lane that hosts its node and on no
      other lane;
    * on every rank an action comes after all actions that it needs, UNSHARD before all forwards of its node and REDUCE
      after all its backwards; UNSHARD of cohorts, which all of them run together, is before all else;
    * all lists reach their end, if an action blocks until all its ranks have come and its rows are there, and a REDUCE
      until all cohorts of its stage have come, in one order of these REDUCE actions;
    * rows of an edge are awaited in the order in which they are sent;
    * no node holds more microbatches than ``in_flight`` says;
    * ``starts`` is one order of all actions that every list keeps to, with dependencies first.

    Transfers start in that order on every rank (``schedule.compile``), so no rank's host ever waits for later work of
    another rank, even if sends and receives block their hosts.

    Raises:
        ScheduleError: the message names the rank, the action and the numbers of the first fault.
    """
    _check_lanes(schedule)
    homes = lanes_of_actions(schedule)
    _check_complete(schedule, homes)
    needs = {action: schedule.dependencies.before(action) for action in homes}
    for lane in schedule.lanes:
        _check_order(schedule, lane, needs)
        _check_opening(schedule, lane)
    _check_runs(schedule, homes, needs)
    _check_edges(schedule, homes)
    schedule.check_starts()


def expected(schedule: Schedule, node: StageId) -> list[Action]:
    """Return all actions that a node has in the step of a schedule."""
    stage = schedule.graph.stages[node]
    if not schedule.work.microbatches.get(node.module):
        return []
    spans = schedule.work.of(node)
    kinds: list[Kind] = ["F"]
    if schedule.train and stage.backward:
        kinds += ["I", "W"] if node in schedule.split else ["B"]
    actions = [Action(kind, node, span.number) for kind in kinds for span in spans]
    if stage.sharded:
        actions.append(Action("UNSHARD", node))
    if schedule.train and stage.backward and stage.trains:
        actions.append(Action("REDUCE", node))
    return actions


def _check_lanes(schedule: Schedule) -> None:
    seen: dict[int, int] = {}
    hosted = {rank: nodes for nodes, ranks in schedule.graph.hosts.items() for rank in ranks}
    for number, lane in enumerate(schedule.lanes):
        for rank in lane.ranks:
            if rank in seen:
                raise ScheduleError(f"rank {rank} is in lanes {seen[rank]} and {number}; it can run one list only")
            seen[rank] = number
            if hosted.get(rank) != hosted.get(lane.ranks[0]):
                raise ScheduleError(f"ranks {lane.ranks[0]} and {rank} share lane {number} but host different nodes")
    for nodes, ranks in schedule.graph.hosts.items():
        if any(schedule.work.microbatches.get(n.module) for n in nodes):
            for rank in ranks:
                if rank not in seen:
                    raise ScheduleError(f"rank {rank} hosts {', '.join(map(str, nodes))} but is in no lane")
    for node in schedule.split:
        stage = schedule.graph.stages.get(node)
        if stage is None or not (stage.trains and stage.backward and schedule.train):
            raise ScheduleError(f"{node} is split in I and W but has no weight gradient")


def lanes_of_actions(schedule: Schedule) -> dict[Action, tuple[int, ...]]:
    """Return the lanes of every action of the step."""
    lanes: dict[StageId, list[int]] = {}
    of_rank = schedule.lane_of
    for nodes, ranks in schedule.graph.hosts.items():
        numbers = sorted({of_rank[r] for r in ranks if r in of_rank})
        for node in nodes:
            lanes[node] = sorted({*lanes.get(node, ()), *numbers})
    return {a: tuple(lanes[n]) for n in schedule.graph.stages for a in expected(schedule, n)}


def _check_complete(schedule: Schedule, homes: dict[Action, tuple[int, ...]]) -> None:
    due: list[list[Action]] = [[] for _ in schedule.lanes]
    for action, lanes in homes.items():
        for number in lanes:
            due[number].append(action)
    for wanted, lane in zip(due, schedule.lanes, strict=True):
        rank = lane.ranks[0]
        counts = Counter(lane.actions)
        foreign = next((a for a in counts if a not in homes), None)
        if foreign is not None:
            raise ScheduleError(f"rank {rank}: {foreign} is not part of this step")
        own = set(wanted)
        guest = next((a for a in counts if a not in own), None)
        if guest is not None:
            raise ScheduleError(f"rank {rank} has {guest} in its list but does not host {guest.node}")
        twice = next((a for a, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ScheduleError(f"rank {rank} runs {twice} {counts[twice]} times")
        if len(counts) < len(own):
            missing = [a for a in wanted if a not in counts]
            raise ScheduleError(f"rank {rank} never runs {missing[0]} ({len(missing)} of {len(own)} actions missing)")


def _check_order(schedule: Schedule, lane: Lane, needs: dict[Action, tuple[Action, ...]]) -> None:
    """Check a single rank: dependencies, UNSHARD and REDUCE, and microbatches held."""
    rank = lane.ranks[0]
    place = {a: i for i, a in enumerate(lane.actions)}
    first: dict[StageId, Action] = {}
    last: dict[StageId, Action] = {}
    counts: dict[StageId, int] = {}
    for i, action in enumerate(lane.actions):
        node = action.node
        if action.kind in ("UNSHARD", "REDUCE"):
            continue
        for need in needs[action]:
            if place.get(need, -1) > i:
                raise ScheduleError(f"rank {rank} runs {action} before {need}, which it needs")
        if action.kind == "F":
            first.setdefault(node, action)
            if schedule.train and schedule.graph.stages[node].backward:
                counts[node] = counts.get(node, 0) + 1
                bound = schedule.in_flight.get(node, 0)
                if counts[node] > bound:
                    raise ScheduleError(
                        f"rank {rank} holds {counts[node]} microbatches of {node} after {action}, "
                        f"in_flight allows {bound}"
                    )
        else:
            last[node] = action
            if action.kind != "I":
                counts[node] -= 1
    for node, action in first.items():
        unshard = place.get(Action("UNSHARD", node), -1)
        if unshard > place[action]:
            raise ScheduleError(f"rank {rank} runs {action} before {node} UNSHARD gathers its parameters")
    for node, action in last.items():
        reduce = place.get(Action("REDUCE", node), len(place))
        if reduce < place[action]:
            raise ScheduleError(f"rank {rank} runs {node} REDUCE before {action} has added to its gradients")


def _check_opening(schedule: Schedule, lane: Lane) -> None:
    """Check that all cohorts of a stage gather together, in one order on all ranks."""
    listed = set(lane.actions)
    gathers = (Action("UNSHARD", node) for node in schedule.graph.stages if node.cohort >= 0)
    for due, action in zip((a for a in gathers if a in listed), lane.actions, strict=False):
        if due != action:
            raise ScheduleError(
                f"rank {lane.ranks[0]} runs {action} where it should run {due}: cohorts gather before all else, in the"
                " order of the stages"
            )


def _check_runs(
    schedule: Schedule, homes: dict[Action, tuple[int, ...]], needs: dict[Action, tuple[Action, ...]]
) -> None:
    """Run all lists abstractly; cohorts of a stage reduce in one action, on the lanes of all of them."""
    together = _together(schedule, homes)
    homes = homes | {joint: tuple(dict.fromkeys(k for a in of for k in homes[a])) for joint, of in together.items()}
    joint_of = {action: joint for joint, of in together.items() for action in of}
    needs = {a: before for a, before in needs.items() if joint_of.get(a, a) == a}
    lists = [[joint_of.get(a, a) for a in lane.actions] for lane in schedule.lanes]
    frees: dict[Action, list[Action]] = {}
    waits: dict[Action, int] = {}
    for action, before in needs.items():
        waits[action] = len(before) + len(homes[action])
        for need in before:
            if need not in homes:
                raise ScheduleError(f"{action} needs {need}, which is not part of this step")
            frees.setdefault(need, []).append(action)
    heads = [-1] * len(lists)
    coming = list(range(len(lists)))
    left = sum(map(len, lists))
    while coming:
        lane = coming.pop()
        heads[lane] += 1
        if heads[lane] == len(lists[lane]):
            continue
        ready = [lists[lane][heads[lane]]]
        while ready:
            action = ready.pop()
            waits[action] -= 1
            if not waits[action]:
                left -= len(homes[action])
                coming += homes[action]
                ready += frees.get(action, ())
    if left:
        raise ScheduleError(_deadlock(schedule, lists, heads, homes, waits, needs))


def _together(schedule: Schedule, homes: dict[Action, tuple[int, ...]]) -> dict[Action, list[Action]]:
    """Return the REDUCE of the first cohort of each stage -> the REDUCE of all its cohorts."""
    reduces: dict[StageId, list[Action]] = {}
    for node in schedule.graph.stages:
        action = Action("REDUCE", node)
        if node.cohort >= 0 and action in homes:
            reduces.setdefault(node.all_instances, []).append(action)
    return {of[0]: of for of in reduces.values()}


def _deadlock(
    schedule: Schedule,
    lists: list[list[Action]],
    heads: list[int],
    homes: dict[Action, tuple[int, ...]],
    waits: dict[Action, int],
    needs: dict[Action, tuple[Action, ...]],
) -> str:
    at = {i: actions[h] for i, (actions, h) in enumerate(zip(lists, heads, strict=True)) if h < len(actions)}
    rank = {i: lane.ranks[0] for i, lane in enumerate(schedule.lanes)}
    for i, action in at.items():
        for other in homes[action]:
            if at.get(other, action) != action and i in homes[at[other]]:
                return (
                    f"deadlock: rank {rank[i]} waits in {action} for rank {rank[other]}, which waits in {at[other]} "
                    f"for it: ranks that share nodes must run them in one order"
                )
    stuck = []
    for i, action in list(at.items())[:4]:
        missing = [str(n) for n in needs[action] if waits[n]]
        absent = [str(rank[k]) for k in homes[action] if at.get(k) != action]
        what = f"rows of {', '.join(missing)}" if missing else f"rank {', '.join(absent)}"
        stuck.append(f"rank {rank[i]} waits in {action} for {what}")
    return "deadlock: " + "; ".join(stuck)


def _check_edges(schedule: Schedule, homes: dict[Action, tuple[int, ...]]) -> None:
    """Check that rows of one edge and direction are awaited in the order in which they are sent."""
    places = [{a: i for i, a in enumerate(lane.actions)} for lane in schedule.lanes]
    awaited: dict[tuple[StageId, Action], tuple[int, Action]] = {}
    for action, lanes in homes.items():
        place = places[lanes[0]][action]
        for sent in schedule.dependencies.crossing(action):
            key = (action.node, sent)
            if key not in awaited or place < awaited[key][0]:
                awaited[key] = (place, action)
    by_edge: dict[tuple[StageId, StageId, bool], list[tuple[int, int, Action, Action]]] = {}
    for (reader, sent), (place, action) in awaited.items():
        sender = places[homes[sent][0]][sent]
        by_edge.setdefault((sent.node, reader, sent.kind == "F"), []).append((sender, place, sent, action))
    for transfers in by_edge.values():
        for (_, reached, before, _), (_, place, sent, action) in pairwise(sorted(transfers, key=lambda t: t[0])):
            if place < reached:
                raise ScheduleError(
                    f"rank {schedule.lanes[homes[action][0]].ranks[0]} awaits rows of {sent} (for {action}) before "
                    f"those of {before}, but they are sent after them"
                )
