"""Every schedule of pipelined modules, in every kind of placement: gradients against one process, fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.transport import Transport
from hetero_strategy.loading.steps import RankView
from hetero_strategy.runtime import executor as running
from hetero_strategy.schedule.policies import schedules
from hetero_strategy.testing import Pool
from tests.distributed.exact import EXACT, Given, compare, expected, on, run_together, setting_of
from tests.distributed.stepping import SAMPLES, OnRank, Setting, reference, steps_of

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")
COUNTS = (1, 4, 9)
"""Microbatches of the steps of a chosen pair: fewer than stages, some without items, one sample in each."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "vision, then llm pp2": {"vision": on(0), "llm": on(1, 2, pp=2)},
    "vision pp2 beside audio, then llm pp3": {"vision": on(0, 1, pp=2), "audio": on(2), "llm": on(3, 4, 5, pp=3)},
    "encoders on the llm's stages": {"vision": on(0, 1), "audio": on(1), "llm": on(0, 1, pp=2)},
    "mixed": {"vision": on(0, 1), "audio": on(2), "llm": on(1, 3, pp=2)},
    "llm tp2 pp2 dp2, vision dp3": {
        "vision": on(0, 1, 2),
        "audio": on(3),
        "llm": on(0, 1, 2, 3, 4, 5, 6, 7, tp=2, pp=2),
    },
    "one pipeline through all, dp2": {
        "audio": on(0, 1),
        "vision": on(0, 1, 2, 3, pp=2),
        "llm": on(2, 3, 4, 5, pp=2),
    },
    "generator on its own rank": {"vision": on(0), "llm": on(0, 1, pp=2), "draw": on(2)},
    "generator on a stage of the llm": {"vision": on(0), "llm": on(0, 1, pp=2), "draw": on(1)},
    "generator pp2 around the llm": {"vision": on(0), "llm": on(0, 1, pp=2), "draw": on(1, 2, pp=2)},
}
"""Two encoders feed an llm, or one encoder an llm that feeds a generator."""

CHOSEN = {
    "vision, then llm pp2": ("zbv",),
    "vision pp2 beside audio, then llm pp3": ("zb_h1",),
    "encoders on the llm's stages": ("gpipe", "zb_h1", "zbv"),
    "mixed": ("1f1b", "interleaved_1f1b", "DualPipeV"),
    "llm tp2 pp2 dp2, vision dp3": ("zb_h1",),
    "one pipeline through all, dp2": ("1f1b",),
    "generator on its own rank": ("zb_h1", "gpipe"),
    "generator on a stage of the llm": ("interleaved_1f1b", "1f1b", "DualPipeV"),
    "generator pp2 around the llm": ("zbv", "1f1b"),
}
"""Every layout, and every schedule both with a generator and without one. That schedules are right for any graph is
proved without processes; these prove that the executor does what they say, the first of a layout, where steps are not
slow, also that a broken exchange would be noticed."""
PAIRS = [(layout, schedule) for layout, schedules in CHOSEN.items() for schedule in schedules]


FULL = ("encoders on the llm's stages", "llm tp2 pp2 dp2, vision dp3", "one pipeline through all, dp2",
        "generator pp2 around the llm")  # fmt: skip
"""Layouts whose worlds take several seconds."""


def check_schedules(pool: Pool, given: dict[str, Given]) -> None:
    """Run settings of one layout in one world, and compare each with one process."""
    for schedule, runs in run_together(pool, given).items():
        _, wanted, _, damages = given[schedule]
        broken = {"forward", "backward"} if damages else set()
        assert {name.split()[0] for name in runs[0].damaged} == broken, schedule
        compare(wanted, runs, schedule)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.full] * (n in FULL)) for n in CHOSEN])
def test_gradients_are_those_of_one_process(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    settings = {schedule: setting_of(folders, LAYOUTS[layout], schedule) for schedule in CHOSEN[layout]}
    slow = settings[CHOSEN[layout][0]].world == 8  # processes, which take seconds for a step
    counts = COUNTS[1:2] if slow else COUNTS
    damages = dict.fromkeys(CHOSEN[layout], 0) | {CHOSEN[layout][0]: 0 if slow else 4}
    check_schedules(pool, {s: (one, expected(one), counts, damages[s]) for s, one in settings.items()})


def test_the_chosen_pairs_are_of_every_layout_and_schedule() -> None:
    assert set(CHOSEN) == set(LAYOUTS) and all(CHOSEN.values())
    assert {schedule for _, schedule in PAIRS + OTHER_PAIRS} >= {*schedules()} - {"sequential", "eager_1f1b"}
    for draws in (False, True):
        assert {schedule for layout, schedule in PAIRS if ("draw" in LAYOUTS[layout]) == draws} >= set(SCHEDULES)


OTHERS = {
    "vision, then llm pp2": ("interleaved_1f1b",),
    "vision pp2 beside audio, then llm pp3": ("zbv", "InterleavedZeroBubble"),
    "encoders on the llm's stages": ("interleaved_1f1b",),
    "mixed": ("zb_h1",),
    "llm tp2 pp2 dp2, vision dp3": ("gpipe", "zbv"),
    "one pipeline through all, dp2": ("interleaved_1f1b", "zb_h1", "ZBVZeroBubble"),
    "generator on its own rank": ("Interleaved1F1B",),
    "generator on a stage of the llm": ("zb_h1",),
    "generator pp2 around the llm": ("interleaved_1f1b",),
}
"""With the chosen ones every schedule has sharded layouts; that of tensor parallel stages lacks two, which "replicated
rows between stages" in test_pipeline_options has."""
OTHER_PAIRS = [(layout, schedule) for layout, schedules in OTHERS.items() for schedule in schedules]


def test_the_other_pairs_are_new_and_shard_in_every_schedule() -> None:
    assert set(OTHERS) == set(LAYOUTS) and not set(PAIRS) & set(OTHER_PAIRS)
    for sharded in (False, True):
        pairs = [(layout, schedule) for layout, schedule in PAIRS + OTHER_PAIRS if ("dp2" in layout) == sharded]
        assert {schedule for _, schedule in pairs} >= set(SCHEDULES)


@pytest.mark.full
@pytest.mark.parametrize("layout", OTHERS)
def test_other_schedules_in_every_layout(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    """Other numbers of microbatches are drawn in `python -m tests.fuzz`, and proved without processes."""
    given = {}
    for schedule in OTHERS[layout]:
        setting = setting_of(folders, LAYOUTS[layout], schedule)
        turn = OTHER_PAIRS.index((layout, schedule)) + [*OTHERS].index(layout) // 2
        given[schedule] = setting, expected(setting), COUNTS[1 + turn % 2 :][:1], 0
    check_schedules(pool, given)


@pytest.mark.parametrize("draws", [False, True])
def test_the_reference_does_not_depend_on_microbatches(folders: dict[bool, str], draws: bool) -> None:
    layouts = LAYOUTS["generator on its own rank" if draws else "mixed"]
    setting = setting_of(folders, layouts, "1f1b")
    wanted = expected(setting)
    for number in (1, SAMPLES):
        found = reference(setting, number)
        assert found.losses == pytest.approx(wanted.losses, rel=EXACT)
        assert max(wanted.errors(found.gradients).values()) <= EXACT


def test_the_batch_is_ragged_and_has_microbatches_of_text(folders: dict[bool, str]) -> None:
    """What the parity tests say they cover."""
    setting = setting_of(folders, LAYOUTS["mixed"], "1f1b")
    for number in (4, SAMPLES):
        plan = steps_of(setting, number, RankView.whole(setting.modules)).plan(0, 0)
        idle = {n: {i for i, a in enumerate(plan.assignments[n]) if a.idle} for n in setting.modules}
        assert not idle["llm"]
        assert idle["audio"] if number == 4 else idle["vision"] & idle["audio"]
    assert len(set(plan.metadata.tokens.tolist())) > 4
    drawing = setting_of(folders, LAYOUTS["generator on its own rank"], "1f1b")
    plan = steps_of(drawing, SAMPLES, RankView.whole(drawing.modules)).plan(0, 0)
    assert 0 < len(plan.active("draw")) < SAMPLES and 0 < len(plan.active("vision")) < SAMPLES


class Sent:
    """A message that says when it is over, as NCCL's do and gloo's do not."""

    def __init__(self, work: dist.Work) -> None:
        self.wait = work.wait

    def is_completed(self) -> bool:
        self.wait()
        return True


def outputs_held(rank: int, world: int, setting: Setting) -> list[int]:
    """At each backward: outputs of this rank's forwards whose memory is still in use."""
    outputs: list[StorageWeakRef] = []
    held: list[int] = []
    send, give, back = transport.start_messages, Transport.give, running.RunningStep._backward

    def noting(self: Transport, number: int, rows: torch.Tensor) -> None:
        if not self._transfers[number][0].tag % 2:
            outputs.append(StorageWeakRef(rows.untyped_storage()))
        give(self, number, rows)

    def counting(self: running.RunningStep, *given: Any) -> None:
        self.transport._let_go()
        held.append(sum(not output.expired() for output in outputs))
        back(self, *given)

    transport.start_messages = lambda wire, messages: [
        Sent(work) if one.sends else work for one, work in zip(messages, send(wire, messages), strict=True)
    ]
    Transport.give, running.RunningStep._backward = noting, counting  # type: ignore[method-assign]
    try:
        made = OnRank(rank, world, setting)
        made.executor.run(made.steps(setting, 4)[0], train=True)
    finally:
        transport.start_messages, Transport.give, running.RunningStep._backward = send, give, back  # type: ignore[method-assign]
    return held


def test_outputs_that_were_sent_are_let_go(pool: Pool, folders: dict[bool, str]) -> None:
    """Four microbatches are in flight at the first backward; none of their outputs is kept for it."""
    setting = Setting(folders[False], {"llm": on(0, 1, pp=2)}, "gpipe", microbatches=4)
    first, last = pool.run(2, outputs_held, setting, timeout=120)
    assert first == [0, 0, 0, 0] and last == [0, 0, 0, 0]
