"""Schedules as text: a grid to look at, and the CSV of ``torch.distributed.pipelining``. Pure.

A cell is torch's: the stage's number, the kind of action, the microbatch (``1F0``, ``0UNSHARD``). Where a schedule has
several modules, the module's name and a dot come first (``llm.1F0``), and ``@`` names a cohort (``vision.0@1F0``). A
line is one rank's list; blank cells say that nothing starts there.
"""

from __future__ import annotations

import csv
import io
import re
from typing import cast, get_args

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule import programs
from hetero_strategy.schedule.action import Action, Kind, Lane, Schedule, StageGraph, StageId, StepWork
from hetero_strategy.schedule.check import lanes_of_actions

TORCH = {"REDUCE": "REDUCE_GRAD"}
"""Kinds that torch calls by another name."""
_CELL = re.compile(r"(?:(?P<module>.+)\.)?(?P<stage>\d+)(?:@(?P<cohort>\d+))?(?P<kind>[A-Z_]+)(?P<microbatch>\d*)")


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


def from_csv(text: str, name: str, graph: StageGraph, work: StepWork, *, train: bool = True) -> Schedule:
    """A schedule from such lines, one per set of ranks that host the same stages, in the order of their first ranks.

    Args:
        text: the lines; cells of a graph of one module need not name it.
        name: what to call it.
        graph: of all stages.
        work: of the step.
        train: with backwards.

    Raises:
        ScheduleError: a cell that is none, or lists that wait for each other; ``schedule.check`` proves the rest.
    """
    lines = [[_action(cell.strip(), graph) for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    ranks = [r for hosted, r in graph.hosts.items() if any(work.microbatches.get(s.module) for s in hosted)]
    if len(lines) != len(ranks):
        raise ScheduleError(f"{name}: {len(lines)} lists for {len(ranks)} sets of ranks that host the same stages")
    actions = [a for line in lines for a in line]
    held = {s: max(programs.held([_op(a) for a in own if a.node == s]) for own in lines) for s in graph.stages}
    lanes = tuple(Lane(r, tuple(line)) for r, line in zip(sorted(ranks), lines, strict=True))
    split = frozenset(a.node for a in actions if a.kind == "W")
    return Schedule(name, graph, work, split, train, lanes, held)


def _op(action: Action) -> programs.Op:
    """As programs have it; what is neither a forward nor a backward has the number of no kind."""
    kinds = {"F": programs.FORWARD, "B": programs.BACKWARD, "I": programs.BACKWARD, "W": programs.WEIGHT}
    return kinds.get(action.kind, -1), action.node.stage, action.microbatch


def _cell(action: Action, schedule: Schedule) -> str:
    module = "" if len(schedule.graph.pipelines) == 1 else f"{action.node.module}."
    number = "" if action.microbatch < 0 else str(action.microbatch)
    cohort = "" if action.node.cohort < 0 else f"@{action.node.cohort}"
    return f"{module}{action.node.stage}{cohort}{TORCH.get(action.kind, action.kind)}{number}"


def _action(cell: str, graph: StageGraph) -> Action:
    found = _CELL.fullmatch(cell)
    modules = list(graph.pipelines)
    if found is None:
        raise ScheduleError(f"{cell!r} is no action; write for example 0F3, llm.1B0 or 0UNSHARD")
    names = {torch: ours for ours, torch in TORCH.items()}
    kind, module = names.get(found["kind"], found["kind"]), found["module"] or modules[0]
    stage = StageId(module, int(found["stage"]), int(found["cohort"] or -1))
    if kind not in get_args(Kind) or stage not in graph.stages or (found["module"] is None and len(modules) > 1):
        raise ScheduleError(f"{cell!r} names no action of {', '.join(map(str, graph.stages))}")
    return Action(cast(Kind, kind), stage, int(found["microbatch"] or -1))
