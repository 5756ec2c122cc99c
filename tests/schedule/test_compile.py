"""Programs of all ranks of random steps, run without processes by hosts that every message holds up.

Messages of a batch are in rounds, as NCCL runs them: one to and one from each peer at a time, and then the next ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import LayoutError, ScheduleError
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan
from hetero_strategy.schedule.action import Schedule, StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.check_program import program_faults
from hetero_strategy.schedule.compile import StepProgram, TransferBatch, compile_step
from hetero_strategy.schedule.graph import stage_graph, work_of
from hetero_strategy.schedule.policies import schedule_policy, schedules

EDGES = (("vision", "llm"), ("audio", "llm"), ("llm", "draw"))


def metadata(samples: int, seed: int, modules: Sequence[str]) -> StepMetadata:
    """Samples with text, a few items of every other module among it, some without any."""
    rng = np.random.default_rng(seed)
    tokens, items = rng.integers(2, 9, samples), {}
    for name in modules:
        if name == "llm":
            continue
        sample = np.repeat(np.arange(samples), rng.integers(0, 3, samples))
        rows = rng.integers(1, 5, len(sample))
        start = np.empty_like(rows)
        for k, s in enumerate(sample):
            start[k], tokens[s] = tokens[s], tokens[s] + rows[k]
        items[name] = StepItems(sample, rows, start, rows * 2)
    return StepMetadata(0, seed, np.arange(samples), tokens, np.ones(samples, np.int64), items)


def planned(
    layouts: dict[str, ModuleLayout],
    schedule: str,
    microbatches: int,
    *,
    seed: int = 0,
    frozen: Sequence[str] = (),
    vision: int | None = None,
    filled_up: bool = True,
    balanced: int = 0,
) -> tuple[StepPlan, Schedule, int]:
    world = 1 + max(rank for layout in layouts.values() for rank in layout.ranks)
    resolved = place(layouts, world).layouts
    edges = [edge for edge in EDGES if set(edge) <= set(layouts)]
    order = [name for name in ("vision", "audio", "llm", "draw") if name in layouts]
    trains = {StageId(n, s): n not in frozen for n in order for s in range(resolved[n].pipeline.stages)}
    shardings = {"llm": RowSharding(resolved["llm"].tp)}
    graph = stage_graph(order, edges, resolved, trains, row_shardings=shardings, balanced={"llm": balanced})
    plan = plan_step(
        metadata(3 * microbatches, seed, order),
        {name: resolved[name].dp for name in order},
        ("llm",),
        microbatches=microbatches,
        row_multiple={"llm": resolved["llm"].tp} if filled_up else {},
        microbatch_rows={} if vision is None else {"vision": vision},
    )
    return plan, make_schedule(schedule, graph, work_of(plan, graph)), world


Event = tuple[str, frozenset[tuple[object, ...]]]
"""What holds up a host, and the messages in it: (edge, backward, microbatches, numbers, hop, sender, receiver)."""


def events(program: StepProgram, rank: int) -> list[Event]:
    """What a rank's host goes through: rounds of messages, and the messages that replicas pass on when they read."""

    def rounds(what: str, numbers: Sequence[int], hop: int) -> list[Event]:
        found: list[set[tuple[object, ...]]] = []
        before: Counter[tuple[bool, int]] = Counter()
        for number in numbers:
            transfer = program.transfers[number]
            name = (transfer.edge, transfer.backward, transfer.microbatches, transfer.numbers, hop)
            both = (transfer.transfer.first, transfer.transfer.second)[hop]
            for sent, messages in ((True, both.sends), (False, both.receives)):
                for peer, _ in messages:
                    place, way = before[sent, peer], (rank, peer) if sent else (peer, rank)
                    before[sent, peer] += 1
                    found += [set() for _ in range(place + 1 - len(found))]
                    found[place].add((*name, *way))
        return [(what, frozenset(messages)) for messages in found]

    def started(batches: Sequence[TransferBatch]) -> list[Event]:
        return [event for batch in batches for event in rounds("start", batch, 0)]

    found = started(program.starts)
    for step in program.actions:
        found += [event for n in step.reads for event in rounds("read", [n], 1)]
        found += [(str(step.action), frozenset()), *started(step.starts)]
    return found


def run(ranks: Sequence[list[Event]]) -> list[str]:
    """Let all hosts go, past a message only when both sides have come to it; returns who is stuck, and where."""
    place = [0] * len(ranks)
    seen: dict[object, set[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, listed in enumerate(ranks):
            while place[rank] < len(listed):
                for message in listed[place[rank]][1]:
                    seen.setdefault(message, set()).add(rank)
                if any(len(seen[message]) < 2 for message in listed[place[rank]][1]):
                    break
                place[rank], moved = place[rank] + 1, True
    return [f"rank {r} in {listed[place[r]][0]}" for r, listed in enumerate(ranks) if place[r] < len(listed)]


@st.composite
def steps(draw: st.DrawFn, schedule: str) -> tuple[StepPlan, Schedule, int]:
    style = schedule_policy(schedule).virtual
    virtual = style in ("loop", "v")
    world = draw(st.integers(2, 6))

    def layout(*, piped: bool = False, virtual: bool = False) -> ModuleLayout:
        count = draw(st.integers(2 if virtual else 1, world))
        ranks = tuple(draw(st.permutations(range(world)))[:count])
        divisors = [d for d in range(2 if virtual else 1, count + 1) if count % d == 0]
        pp = draw(st.sampled_from(divisors)) if piped else 1
        tp = draw(st.sampled_from([d for d in (1, 2) if count // pp % d == 0]))
        own = "v" if style == "v" and virtual else "loop"
        return ModuleLayout(ranks=ranks, pp=pp, tp=tp, vpp=2 if virtual else 1, pp_style=own)

    layouts = {"vision": layout(piped=not virtual), "llm": layout(piped=True, virtual=virtual)}
    for name in ("audio", "draw"):
        if draw(st.booleans()):
            layouts[name] = layout()
    frozen = [name for name in layouts if draw(st.booleans())]
    count = draw(st.integers(1, 5))
    layouts = {name: replace(one, split=None) for name, one in layouts.items()}
    rows = draw(st.sampled_from([None, 3, 20, 60]))  # in a microbatch: of a sample or less, of one or of several
    options = {"seed": draw(st.integers(0, 99)), "balanced": draw(st.sampled_from([0, 5]))}
    return planned(layouts, schedule, count, frozen=frozen, vision=rows, **options)


@pytest.mark.full_cases("1f1b", "interleaved_1f1b", "sequential", "zb_h1")
@pytest.mark.parametrize("schedule", schedules())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_step_holds_up_hosts_for_ever(schedule: str, data: st.DataObject) -> None:
    """Also where every message waits for both hosts: no transfer starts before what its sender waits for."""
    plan, made, world = data.draw(steps(schedule))
    check(made)
    programs = [compile_step(plan, made, rank) for rank in range(world)]
    assert not run([events(program, rank) for rank, program in enumerate(programs)])
    for rank, program in enumerate(programs):
        assert tuple(one.action for one in program.actions) == made.of(rank)
        started = [n for batches in every_start(program) for batch in batches for n in batch]
        assert len(set(started)) == len(started), "a transfer starts twice"
        moving = {n for n, t in enumerate(program.transfers) if t.transfer.first.sends or t.transfer.first.receives}
        assert set(started) == moving
        assert not [*program_faults(plan, made, rank, program, programs.__getitem__)]
        assert choices_arrive(made, program)
        backward = [(k, one.action.node) for k, one in enumerate(program.actions) if one.action.kind in ("B", "W")]
        final = {node: k for k, node in backward}  # of each stage the last is what stays
        assert [k for k, one in enumerate(program.actions) if one.last] == sorted(final.values())


def choices_arrive(schedule: Schedule, program: StepProgram) -> bool:
    """Whether each F but the first stage's, and each B or I but the last stage's, has the choices of experts."""
    stages = schedule.graph.stages
    return all(
        (one.choices[0] is not None)
        == bool(
            stages[one.action.node].balanced
            and schedule.train
            and one.action.kind in ("F", "B", "I")
            and one.action.node._replace(stage=one.action.node.stage + (-1 if one.action.kind == "F" else 1)) in stages
        )
        for one in program.actions
    )


def every_start(program: StepProgram) -> list[tuple[TransferBatch, ...]]:
    """Batches that start before the first action, and after each."""
    return [program.starts, *(one.starts for one in program.actions)]


def restarted(program: StepProgram, starts: Sequence[Iterable[TransferBatch]]) -> StepProgram:
    """The program with other batches, as :func:`every_start` lists them."""
    first, *others = map(tuple, starts)
    actions = [one._replace(starts=own) for one, own in zip(program.actions, others, strict=True)]
    return replace(program, starts=first, actions=tuple(actions))


def ahead(program: StepProgram, actions: int = 2) -> StepProgram:
    """The program with every receive started so many actions before the one that reads it, sends as they were."""

    def sends(number: int) -> bool:
        return bool(program.transfers[number].transfer.first.sends)

    starts = [[batch for batch in batches if sends(batch[0])] for batches in every_start(program)]
    for k, one in enumerate(program.actions):
        waiting = [n for n in one.reads if not sends(n) and program.transfers[n].transfer.first.receives]
        starts[max(0, k - actions)] += [(n,) for n in waiting]
    return restarted(program, starts)


def merged(program: StepProgram) -> StepProgram:
    """The program with all that starts between two actions in one batch."""
    return restarted(program, [[tuple(chain(*batches))] for batches in every_start(program)])


Change = Callable[[StepProgram], StepProgram]
APART = {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1,))}
HUNG: dict[str, tuple[Change, dict[str, ModuleLayout], str, int | None]] = {
    "pp2": (ahead, {"llm": ModuleLayout((0, 1), pp=2)}, "1f1b", None),
    "pp8": (ahead, {"llm": ModuleLayout(tuple(range(8)), pp=8)}, "1f1b", None),
    "zero bubble": (ahead, {"llm": ModuleLayout((0, 1, 2, 3), pp=4)}, "zb_h1", None),
    "encoder on its own rank": (ahead, APART, "1f1b", None),
    "two encoders": (
        ahead,
        {"vision": ModuleLayout((0,)), "audio": ModuleLayout((1,)), "llm": ModuleLayout((2, 3), pp=2)},
        "1f1b",
        None,
    ),
    "an encoder's microbatches feed several": (merged, APART, "1f1b", 60),
    "several feed one": (merged, APART, "1f1b", 3),
}
"""How starts are changed so that hosts hang, in which layouts and schedule, and about how many rows of pictures are in
a microbatch.
"""


@pytest.mark.parametrize("name", HUNG)
def test_other_starts_hang(name: str) -> None:
    """The negative controls: receives two actions ahead, and one batch for all that starts between two actions."""
    change, layouts, schedule, vision = HUNG[name]
    plan, made, world = planned(layouts, schedule, 8, vision=vision)
    programs = [compile_step(plan, made, rank) for rank in range(world)]
    assert not run([events(program, rank) for rank, program in enumerate(programs)])
    assert run([events(change(program), rank) for rank, program in enumerate(programs)])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_was_sent_is_freed_once_its_gradient_is_back(schedule: str) -> None:
    """Not at the end of the step, when rows of all microbatches would be there at once."""
    plan, made, _ = planned({"llm": ModuleLayout((0, 1), pp=2)}, schedule, 4)
    program = compile_step(plan, made, 0)
    given = {one.action.microbatch: one.gives for one in program.actions if one.action.kind == "F"}
    freed = {one.action.microbatch: one.frees for one in program.actions if one.action.kind in ("B", "I")}
    assert len(given) == 4 and all(given.values()) and freed == given


def test_rows_that_cannot_be_shared_out_name_their_module() -> None:
    layouts = {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1, 2, 3), tp=3)}
    plan, made, _ = planned(layouts, "1f1b", 2, filled_up=False)
    with pytest.raises(
        LayoutError, match=r"module 'llm' in microbatch 0: instance .* no multiple of 3; .* row_sharding say one"
    ):
        compile_step(plan, made, 1)


def test_starts_that_lists_do_not_keep_to_are_refused() -> None:
    _, made, _ = planned({"llm": ModuleLayout((0, 1), pp=2)}, "1f1b", 4)
    wrong = list(made.starts)
    wrong[0], wrong[1] = wrong[1], wrong[0]
    with pytest.raises(ScheduleError, match="starts before"):
        check(replace(made, starts=tuple(wrong)))
    with pytest.raises(ScheduleError, match="starts names 3 actions"):
        check(replace(made, starts=made.starts[:3]))


@pytest.mark.parametrize("train", [True, False])
def test_ten_thousand_ranks(train: bool) -> None:
    layouts = {"vision": ModuleLayout(tuple(range(2000))), "llm": ModuleLayout(tuple(range(2000, 10_000)), pp=8, tp=8)}
    plan, made, _ = planned(layouts, "1f1b", 64)
    check(made)
    for rank in (0, 2000, 9999):
        program = compile_step(plan, made, rank)
        assert tuple(one.action for one in program.actions) == made.of(rank)
