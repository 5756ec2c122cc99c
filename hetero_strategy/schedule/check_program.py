"""Check that one rank's step program fits the plan and the programs of its peers (``program_faults``). Pure.

A program is compared with facts from which it was not made: the runs of rows in the plan, counted anew, and the
messages that its peers send and expect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from hetero_strategy.boundary.route import Rows
from hetero_strategy.plan.step_plan import StepPlan, edge_blocks, places_among
from hetero_strategy.schedule.action import Schedule, StageGraph, StageId
from hetero_strategy.schedule.compile import RankTransfer, StepProgram, rows_on


class Message(NamedTuple):
    """A message of rows between two ranks, as one of their programs has it."""

    backward: bool
    microbatches: tuple[int, int]
    """Microbatches of the edge's source and of its target."""
    rows: int
    numbers: int = 0
    """Size of a row of choices of experts; 0: rows of the edge travel."""


class MessageQueue(NamedTuple):
    """A queue in which a rank's messages follow each other."""

    edge: int
    hop: int
    peer: int
    sent: bool
    """Whether messages are sent; else they are received."""


def program_faults(
    plan: StepPlan, schedule: Schedule, rank: int, program: StepProgram, program_of: Callable[[int], StepProgram]
) -> Iterator[tuple[StageId, str]]:
    """Yield the faults of a rank's program.

    Every row that crosses an edge to this rank must arrive there once, or stay there. Each message that this rank or a
    peer sends must be expected by the receiver, in the same order and size.

    Args:
        program_of: returns the program of another rank.

    Yields:
        A stage of this rank, and its fault.
    """
    graph = schedule.graph
    reads = Counter(step.choices[0] for step in program.actions)
    for number, one in enumerate(program.transfers):
        source, target = graph.edges[one.edge]
        due, rows = _due(plan, graph, rank, one), _written(program, one)
        arrived = len(np.unique(rows))
        outside = len(rows) and not 0 <= rows.min() <= rows.max() < one.transfer.outputs
        stage = source if one.backward else target
        name = f"{source} to {target}, microbatches {one.microbatches[0]} and {one.microbatches[1]}"
        if not due == len(rows) == arrived or outside:
            what = "gradient rows" if one.backward else "rows"
            yield stage, f"{name}: {arrived} of {due} {what} reach rank {rank}"
        if one.numbers and reads[number] != due:
            yield stage, f"{name}: rank {rank} reads choices of experts {reads[number]} times, not {due}"
    own_queues = queues(program)
    for peer in sorted({queue.peer for queue in own_queues}):
        expected = {
            queue._replace(peer=peer, sent=not queue.sent): messages
            for queue, messages in queues(program_of(peer)).items()
            if queue.peer == rank
        }
        own = {queue: messages for queue, messages in own_queues.items() if queue.peer == peer}
        for queue in sorted({*own, *expected}):
            pairs = zip_longest(own.get(queue, ()), expected.get(queue, ()))
            odd = next(((k, here, there) for k, (here, there) in enumerate(pairs) if here != there), None)
            if odd is not None:
                edge = graph.edges[queue.edge]
                here, there = ("sends", "awaits") if queue.sent else ("awaits", "sends")
                yield (
                    next(stage for stage in edge if rank in graph.stages[stage].ranks),
                    f"{edge[0]} to {edge[1]}, message {odd[0]} of hop {queue.hop}: rank {rank} {here} {_shown(odd[1])},"
                    f" rank {peer} {there} {_shown(odd[2])}",
                )


def queues(program: StepProgram) -> dict[MessageQueue, list[Message]]:
    """Return all messages of a rank by queue, in the order in which they start."""
    by_queue: dict[MessageQueue, list[Message]] = {}
    batches = chain(program.starts, *(step.starts for step in program.actions))
    taken = ((*step.reads, step.choices[0]) for step in program.actions)
    passed_on = [number for numbers in taken for number in numbers if number is not None]
    for hop, numbers in ((1, chain.from_iterable(batches)), (2, passed_on)):
        for one in (program.transfers[number] for number in numbers):
            moved = one.transfer.first if hop == 1 else one.transfer.second
            for sent, messages in ((True, moved.sends), (False, moved.receives)):
                for peer, rows in messages:
                    message = Message(one.backward, one.microbatches, rows.size, one.numbers)
                    by_queue.setdefault(MessageQueue(one.edge, hop, peer, sent), []).append(message)
    return by_queue


def _due(plan: StepPlan, graph: StageGraph, rank: int, one: RankTransfer) -> int:
    """Count the rows that the plan brings to a rank in a transfer, or leaves there."""
    (source, target), (p, t) = graph.edges[one.edge], one.microbatches
    stage, microbatch = (source, p) if one.backward else (target, t)
    if one.numbers:
        return int(rank in graph.stages[stage].ranks)
    within = source.module == target.module
    assignment = plan.assignments[stage.module][microbatch]
    side = rows_on(graph.stages[stage], assignment.totals(inner=within or not one.backward), assignment.order)
    if within:
        return side.rows_on(rank)
    instance, part = side.seat(rank)
    blocks = edge_blocks(plan, source.module, p, target.module, t)
    there, sends = places_among(blocks.source_instance, graph.stages[source].members)
    here, reads = places_among(blocks.target_instance, graph.stages[target].members)
    instances, start = (there, blocks.source_start) if one.backward else (here, blocks.target_start)
    chosen = (instances == instance) & sends & reads
    pieces = side.cut(instances[chosen], start[chosen], blocks.rows[chosen])
    return int(pieces.rows[pieces.part == part].sum())


def _written(program: StepProgram, one: RankTransfer) -> Int64[np.ndarray, "rows"]:
    """Return the output rows that a transfer writes, each as often as it is written."""
    hops = (one.transfer.first, one.transfer.second)
    parts: list[Rows] = [one.transfer.local[1], *(rows for hop in hops for _, rows in hop.receives)]
    return np.concatenate(
        [
            np.arange(part.first, part.first + part.size) if part.at < 0 else program.index[part.at :][: part.size]
            for part in parts
        ]
    )


def _shown(message: Message | None) -> str:
    if message is None:
        return "nothing"
    (p, t), what = message.microbatches, "gradient rows" if message.backward else "rows"
    what = "choices of experts, as rows," if message.numbers else what
    return f"{message.rows} {what} of microbatches {p} and {t}"
