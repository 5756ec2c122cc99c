"""Steps whose messages and collectives hold up their hosts: none hangs, and gradients are those of one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from hetero_strategy.runtime import connect as phase
from hetero_strategy.schedule.compile import StepCompiler, StepProgram
from hetero_strategy.strategy import assembly
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.rendezvous import KINDS, PATIENCE, unforgiving
from tests.distributed.stepping import Reference, Run, Setting, reference, steps_on_rank
from tests.schedule.test_compile import ahead

LAYOUTS: dict[str, dict[str, Any]] = {
    "llm pp2": {"vision": on(0), "llm": on(0, 1, pp=2)},
    "vision | audio | llm pp2": {"vision": on(0), "audio": on(1), "llm": on(2, 3, pp=2)},
    "mixed, tp2": {"vision": on(0, 1), "llm": on(1, 0, 2, 3, tp=2, pp=2)},
    "generator pp2 around the llm": {"vision": on(0), "llm": on(0, 1, pp=2), "draw": on(1, 2, pp=2)},
    "vision fills llm pp3": {"vision": on(0, 1, 2), "llm": on(0, 1, 2, pp=3)},
    "experts": {"vision": on(0, 1), "llm": on(0, 1, 2, 3, pp=2, ep=2)},
    "balanced over llm pp2": {"vision": on(0, 1, 2, 3), "audio": on(0, 1, 2, 3), "llm": on(0, 1, 2, 3, pp=2)},
}
CASES = [
    *(("mixed, tp2", schedule) for schedule in ("gpipe", "zb_h1")),
    *((layout, "1f1b") for layout in LAYOUTS),
    *(("llm pp2", schedule) for schedule in ("interleaved_1f1b", "zbv")),
]


def start_early(actions: int) -> None:
    """From now on receives start so many actions before the one that reads them."""
    program = StepCompiler.program

    def moved(self: StepCompiler, plan: Any, *, rank: int, train: bool) -> StepProgram:
        return ahead(program(self, plan, rank=rank, train=train), actions)

    StepCompiler.program = moved  # type: ignore[method-assign]


SOON = 2.0
"""Seconds after which a step that has to hang is said to."""


def held_up(rank: int, world: int, setting: Setting, wanted: Reference, early: int) -> list[Run]:
    """Steps with each kind of message, from the connect phase on; ``early`` starts receives so many actions ahead."""
    if early:
        start_early(early)
    runs, counts = [], (4,) if setting.lm == "balanced" else (1, 4)  # the loss on balance is one of microbatches
    for kind in KINDS:
        with unforgiving(kind, SOON if early else PATIENCE):
            runs.append(steps_on_rank(rank, world, setting, wanted, counts))
    return runs


def gathering_in_another_order(rank: int, world: int, setting: Setting, wanted: Reference, kind: str) -> Run:
    """Rank 1 gathers the parameters of two modules in the other order than rank 0."""
    program = StepCompiler.program

    def swapped(self: StepCompiler, plan: Any, *, rank: int, train: bool) -> StepProgram:
        made = program(self, plan, rank=rank, train=train)
        if rank != 1:
            return made
        second = [one for one in made.actions if one.action.kind == "UNSHARD"][1]
        return replace(made, actions=(second, *(one for one in made.actions if one is not second)))

    StepCompiler.program = swapped  # type: ignore[method-assign]
    with unforgiving(kind, SOON) if kind else nullcontext():
        return steps_on_rank(rank, world, setting, wanted, (2,))


def unconnected(rank: int, world: int, setting: Setting, wanted: Reference) -> Run:
    """First messages hold up hosts, there is no connect phase, and receives start two actions ahead."""
    start_early(2)
    assembly.connect = lambda *given: None  # type: ignore[assignment]
    with unforgiving("first message", SOON):
        return steps_on_rank(rank, world, setting, wanted, (1, 4))


OFTEN = {("mixed, tp2", "zb_h1"), ("llm pp2", "zbv"), *((layout, "1f1b") for layout in LAYOUTS if "tp2" not in layout)}
"""In `make test`; of every schedule tests/schedule/test_compile.py proves it without processes."""


@pytest.mark.full_cases(
    "balanced over llm pp2-1f1b",
    "experts-1f1b",
    "generator pp2 around the llm-1f1b",
    "llm pp2-1f1b",
    "mixed, tp2-zb_h1",
    "vision fills llm pp3-1f1b",
)
@pytest.mark.parametrize(
    ("layout", "schedule"), [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full) for case in CASES]
)
def test_no_step_hangs(pool: Pool, folders: dict[bool, str], layout: str, schedule: str) -> None:
    setting = setting_of(folders, LAYOUTS[layout], schedule, fill="fine" if "fills" in layout else "none")
    if layout == "experts" or schedule != "1f1b":
        setting = replace(setting, lm="balanced")
    if layout == "experts":
        setting = replace(setting, reshard_after_forward="always")
    if "balanced" in layout:
        setting = replace(setting, balance={"policy": "auto"})
    wanted = reference(setting, 4) if setting.lm == "balanced" else expected(setting)
    ranks = pool.run(setting.world, held_up, setting, wanted, 0, timeout=360)
    for runs in zip(*ranks, strict=True):
        compare(wanted, runs)


def test_receives_started_too_early_hang(pool: Pool, folders: dict[bool, str]) -> None:
    """The negative control: what is started two actions ahead hangs where receives hold up their hosts."""
    setting = setting_of(folders, LAYOUTS["llm pp2"], "1f1b")
    with pytest.raises(WorkerError, match="hangs: nobody came to"):
        pool.run(2, held_up, setting, expected(setting), 2, timeout=360)


def test_first_messages_in_a_step_hang(pool: Pool, folders: dict[bool, str]) -> None:
    """The negative control of the connect phase."""
    setting = setting_of(folders, LAYOUTS["llm pp2"], "1f1b")
    with pytest.raises(WorkerError, match="hangs: nobody came to"):
        pool.run(2, unconnected, setting, expected(setting), timeout=360)


def test_collectives_in_another_order_hang(pool: Pool, folders: dict[bool, str]) -> None:
    """The negative control of collectives: gloo, whose threads forgive the order, does not notice."""
    setting = setting_of(folders, {"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, 2, dp_shard=3)}, "1f1b")
    setting = replace(setting, reshard_after_forward="never")
    wanted = expected(setting)
    compare(wanted, pool.run(3, gathering_in_another_order, setting, wanted, "", timeout=360))
    with pytest.raises(WorkerError, match="hangs: nobody came to"):
        pool.run(3, gathering_in_another_order, setting, wanted, "everything", timeout=360)


def test_every_rank_meets_every_other_once() -> None:
    for count in range(1, 12):
        ranks = [7 * r for r in range(count)]
        met = {rank: list(phase.rounds(ranks, rank)) for rank in ranks}
        assert all(sorted(met[rank]) == [r for r in ranks if r != rank] for rank in ranks)
        place = dict.fromkeys(ranks, 0)
        left = sum(map(len, met.values()))
        while left:  # two meet when each is next to the other
            pairs = [(r, met[r][place[r]]) for r in ranks if place[r] < len(met[r])]
            together = [(a, b) for a, b in pairs if a < b and (b, a) in pairs]
            assert together, "somebody waits for ever"
            for pair in together:
                for rank in pair:
                    place[rank] += 1
                    left -= 1
