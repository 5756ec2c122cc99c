"""Schedules as text: a grid to look at, and the CSV of ``torch.distributed.pipelining``. Pure.

A cell is torch's: the stage's number, the kind of action, the microbatch (``1F0``, ``0UNSHARD``). Where a schedule has
several modules, the module's name and a dot come first (``llm.1F0``). A line is one rank's list; blank cells say that
nothing starts there.
"""

from __future__ import annotations

import csv
import io

from hetero_strategy.schedule.action import Action, Schedule
from hetero_strategy.schedule.check import lanes_of_actions

TORCH = {"REDUCE": "REDUCE_GRAD"}
"""Kinds that torch calls by another name."""


def grid(schedule: Schedule) -> str:
    """Every rank's list as a column, a line per action in which it starts as soon as those before it allow.

    Ranks with the same list share a column.
    """
    step: dict[Action, int] = {}
    free = [0] * len(schedule.lanes)
    lanes = lanes_of_actions(schedule)
    for action in schedule.starts:
        before = [step[need] + 1 for need in schedule.dependencies.before(action)]
        step[action] = max([*before, *(free[k] for k in lanes[action])])
        for k in lanes[action]:
            free[k] = step[action] + 1
    columns = [{step[a]: _cell(a, schedule) for a in lane.actions} for lane in schedule.lanes]
    heads = [
        f"rank {lane.ranks[0]}" + f" and {len(lane.ranks) - 1} more" * (len(lane.ranks) > 1) for lane in schedule.lanes
    ]
    widths = [max([len(head), *map(len, column.values())]) for head, column in zip(heads, columns, strict=True)]
    rows = [heads, *([column.get(i, "") for column in columns] for i in range(max(free, default=0)))]
    return "\n".join("  ".join(f"{x:<{n}}" for x, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def to_csv(schedule: Schedule) -> str:
    """The lists as CSV, a line per lane; for one pipelined module torch's pipelining runtime reads it.

    It gathers and reduces by itself, so UNSHARD and REDUCE are left out where there is one module.
    """
    alone = len(schedule.graph.pipelines) == 1
    out = io.StringIO()
    for lane in sorted(schedule.lanes, key=lambda lane: lane.ranks):
        cells = [_cell(a, schedule) for a in lane.actions if not alone or a.microbatch >= 0]
        csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _cell(action: Action, schedule: Schedule) -> str:
    module = "" if len(schedule.graph.pipelines) == 1 else f"{action.node.module}."
    number = "" if action.microbatch < 0 else str(action.microbatch)
    return f"{module}{action.node.stage}{TORCH.get(action.kind, action.kind)}{number}"
