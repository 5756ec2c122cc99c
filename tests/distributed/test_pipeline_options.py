"""What may be combined with pipelines, one thing at a time: gradients and evaluation against one process, fp64."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.transport import Transport, Wire, WireMessage
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.gradients import Reached
from hetero_strategy.runtime.executor import RunningStep
from hetero_strategy.runtime.step import StepRunner
from hetero_strategy.testing import Pool
from tests.distributed.exact import EXACT, NOTICED, compare, expected, on, setting_of
from tests.distributed.stepping import (
    OnRank,
    Reference,
    Run,
    Setting,
    by_module,
    evaluations_on_rank,
    reference,
    steps_on_rank,
)

PLAIN = {"vision": on(0), "llm": on(0, 1, pp=2)}
BOTH = {"vision": on(0, 1, pp=2), "llm": on(0, 1, pp=2)}
"""Two pipelines on the same ranks."""
MIXED = {"vision": on(0, 1), "audio": on(2), "llm": on(1, 3, pp=2)}
SHARDED = {"vision": on(0, 1), "llm": on(0, 1, 2, 3, pp=2)}
REPLICATED = {"vision": on(0, 1, dp_replicate=2), "llm": on(0, 1, 2, 3, pp=2, dp_replicate=2)}
TENSOR = {"vision": on(0), "llm": on(0, 1, 2, 3, pp=2, tp=2)}
DRAWS = {"vision": on(0), "llm": on(0, 1, pp=2), "draw": on(1, 2)}
TIED = {"lm": "hf_llama", "tied": True}
FROZEN = {
    "backbone": ("vision.backbone",),
    "vision": ("vision",),
    "llm": ("llm",),
    "all but the projector": ("vision.backbone", "llm"),
}
AGAIN = {"recompute": "all"}
FLOAT8 = "rowwise_with_gw_hp, emulated"
"""Scales of its weights' gradients, which are of all rows of a microbatch, would depend on the microbatches."""
GROUPED, SPLIT = {"vision": 1000, "audio": 1000}, {"vision": 8, "audio": 8}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "tied": (PLAIN, TIED, ("1f1b",), ("zb_h1", "interleaved_1f1b", "zbv")),
    "tied, sharded": (SHARDED, TIED, ("zb_h1",), ("1f1b",)),
    "tied, both ends in one stage": ({"vision": on(0, 1, pp=2), "llm": on(1)}, TIED, ("zb_h1",), ()),
    "recompute": (
        BOTH,
        {"transforms": by_module(recompute={"vision": "all", "llm": "all"})},
        ("zbv",),
        ("1f1b", "zb_h1"),
    ),
    "recompute in part": (
        BOTH,
        {"transforms": by_module(recompute={"vision": "every 2", "llm": "all but matmuls"})},
        ("zbv",),
        ("1f1b",),
    ),
    "frozen: backbone": (BOTH, {"freeze": FROZEN["backbone"]}, ("zb_h1",), ("1f1b", "zbv")),
    "frozen: llm": (BOTH, {"freeze": FROZEN["llm"]}, ("zb_h1",), ("1f1b", "zbv")),
    "frozen: all but the projector": (
        BOTH,
        {"freeze": FROZEN["all but the projector"]},
        ("1f1b",),
        ("zb_h1", "zbv"),
    ),
    "frozen, tensor parallel": ({"vision": on(1), "llm": on(0, 1, tp=2)}, {"freeze": ("llm",)}, ("1f1b",), ()),
    "frozen on other ranks": (
        {"vision": on(0, 1, pp=2), "llm": on(2, 3, pp=2)},
        {"freeze": ("vision.backbone", "llm")},
        ("zb_h1",),
        ("1f1b",),
    ),
    "gather once": (
        SHARDED,
        {"reshard_after_forward": "never"},
        ("interleaved_1f1b",),
        ("gpipe", "zb_h1", "zbv"),
    ),
    "gather where it is better": (SHARDED, {"reshard_after_forward": "auto"}, ("zb_h1",), ("1f1b",)),
    "gather always": (SHARDED, {"reshard_after_forward": "always"}, ("1f1b",), ("interleaved_1f1b",)),
    "gather always, frozen": (
        SHARDED,
        {"reshard_after_forward": "always", "freeze": ("vision.backbone", "llm")},
        ("1f1b",),
        (),
    ),
    "replicated": (REPLICATED, {}, ("zb_h1",), ("1f1b",)),
    "bounded": (MIXED, {"max_in_flight": {"llm": 2, "vision": 2}}, ("1f1b",), ("zb_h1",)),
    "bounded to one": (BOTH, {"max_in_flight": {"llm": 1, "vision": 1}}, ("zb_h1",), ("1f1b",)),
    "grouped": (MIXED, {"tokens": GROUPED}, ("1f1b",), ("zb_h1", "interleaved_1f1b", "zbv")),
    "split": (MIXED, {"tokens": SPLIT}, ("zb_h1",), ("gpipe", "interleaved_1f1b", "zbv", "sequential")),
    "grouped, on the same ranks": (BOTH, {"tokens": {"vision": 1000}}, ("zb_h1",), ("1f1b",)),
    "drawings grouped": (DRAWS, {"tokens": {"draw": 1000}}, ("1f1b",), ("zb_h1",)),
    "drawings split": (DRAWS, {"tokens": {"draw": 20}}, ("zb_h1",), ("gpipe",)),
    "drawings frozen": (DRAWS, {"freeze": ("draw",)}, ("zb_h1",), ("1f1b",)),
    "drawings behind a frozen llm": (DRAWS, {"freeze": ("vision.backbone", "llm")}, ("zb_h1",), ("1f1b",)),
    "drawings of text alone behind a frozen llm": (
        {"vision": on(1), "llm": on(0), "draw": on(1)},
        {"freeze": ("vision.backbone", "llm"), "tokens": {"draw": 4}},
        ("1f1b",),
        (),
    ),
    "replicated rows between stages": (TENSOR, {"lm": "hf_llama"}, ("interleaved_1f1b",), ("1f1b", "zb_h1")),
    "float8": (
        SHARDED,
        {"transforms": by_module(float8=dict.fromkeys(("vision", "llm"), FLOAT8))},
        ("zb_h1",),
        ("1f1b", "zbv"),
    ),
    "vision tp2 pp2": (
        {"vision": on(0, 1, 2, 3, pp=2, tp=2), "llm": on(0, 1)},
        {"llm_layers": 1, "vision_layers": 2},
        ("zb_h1",),
        ("1f1b",),
    ),
    "one after another": (MIXED, {}, ("sequential",), ()),
}
"""Layouts, options, the schedules that matter most to them, and others."""


def several(
    rank: int,
    world: int,
    settings: list[Setting],
    wanted: Reference,
    damages: int,
    counts: tuple[int, ...] = (1, 9),
) -> list[Run]:
    """One run for each of several settings of one model, the first of which is damaged."""
    first, *others = settings
    runs = [steps_on_rank(rank, world, first, wanted, counts, damages)]
    return runs + [steps_on_rank(rank, world, setting, wanted, counts) for setting in others]


def many(rank: int, world: int, given: list[tuple[list[Setting], Reference, int]]) -> list[list[Run]]:
    return [several(rank, world, *one) for one in given]


def settings_of(folders: dict[bool, str], name: str, schedules: tuple[str, ...]) -> list[Setting]:
    layouts, options, *_ = CASES[name]
    layers = {} if "llm_layers" in options else {"llm_layers": 4, "vision_layers": 4}
    return [setting_of(folders, layouts, schedule, **layers, **options) for schedule in schedules]


class Ran:
    """Runs of cases; all that are tested with the same layouts run in one world, which the first of them starts.

    Args:
        request: of the module, for the tests of this session.
        pool: of processes.
        folders: data.
    """

    def __init__(self, request: pytest.FixtureRequest, pool: Pool, folders: dict[bool, str]) -> None:
        self.pool, self.folders = pool, folders
        self.tested = {
            (item.originalname, item.callspec.params["name"])  # type: ignore[attr-defined]
            for item in request.session.items
            if item.path == request.path and "name" in getattr(getattr(item, "callspec", None), "params", ())
        }
        self.found: dict[tuple[str, str], list[list[Run]]] = {}

    def alike(self, test: str, name: str) -> list[str]:
        """Return the tested cases of the same layouts."""
        return [n for n, case in CASES.items() if (test, n) in self.tested and case[0] == CASES[name][0]]

    def of(self, test: str, name: str, schedules: int, damages: int) -> list[list[Run]]:
        """Return the runs of a case on each rank; the first case of the layouts is damaged.

        Args:
            test: name of the test.
            name: name of the case.
            schedules: place of the schedules in a case.
            damages: number of microbatches of damaged steps; 0: none.
        """
        if (test, name) not in self.found:
            names = self.alike(test, name)
            settings = [settings_of(self.folders, n, CASES[n][schedules]) for n in names]
            given = [(one, expected(one[0]), 0 if i else damages) for i, one in enumerate(settings)]
            ranks = self.pool.run(settings[0][0].world, many, given, timeout=400)
            by_name = map(list, zip(*ranks, strict=True))
            self.found.update(zip(((test, n) for n in names), by_name, strict=True))
        return self.found[test, name]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pool: Pool, folders: dict[bool, str]) -> Ran:
    return Ran(request, pool, folders)


def check_gradients(settings: list[Setting], ranks: list[list[Run]]) -> None:
    wanted = expected(settings[0])
    for setting, *runs in zip(settings, *ranks, strict=True):
        compare(wanted, runs)
        for run in runs:
            for step in run.steps:
                for node, held in step.in_flight.items():
                    assert held <= setting.max_in_flight.get(node.module, held)


@pytest.mark.full_cases(
    "bounded",
    "drawings behind a frozen llm",
    "drawings frozen",
    "drawings grouped",
    "drawings of text alone behind a frozen llm",
    "drawings split",
    "float8",
    "frozen, tensor parallel",
    "gather always, frozen",
    "gather once",
    "gather where it is better",
    "grouped, on the same ranks",
    "one after another",
    "recompute",
    "replicated rows between stages",
    "tied, both ends in one stage",
    "tied, sharded",
    "vision tp2 pp2",
)
@pytest.mark.parametrize("name", CASES)
def test_same_gradients(ran: Ran, folders: dict[bool, str], name: str) -> None:
    """The first case of some layouts also shows that a broken exchange between them would be noticed."""
    ranks = ran.of("test_same_gradients", name, 2, damages=4)
    assert bool(ranks[0][0].damaged) == (name == ran.alike("test_same_gradients", name)[0])
    check_gradients(settings_of(folders, name, CASES[name][2]), ranks)


def summed_in_backward(rank: int, world: int, setting: Setting, wanted: Reference) -> list[bool]:
    """Of every unit whose gradients are summed: whether a backward is at work then."""
    within: list[bool] = []
    original = fsdp._reduce

    def noted(stage: torch.nn.Module, group: Any, reached: Reached) -> None:
        within.append(torch._C._current_graph_task_id() != -1)
        original(stage, group, reached)

    fsdp._reduce = noted
    try:
        steps_on_rank(rank, world, setting, wanted, (4,))
    finally:
        fsdp._reduce = original
    return within


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_blocks_are_summed_beside_the_last_backward(pool: Pool, folders: dict[bool, str], schedule: str) -> None:
    """But for backwards in halves, as those of the second stage in zb_h1, of which the last is for the weights."""
    setting = setting_of(folders, {"llm": on(0, 1, 2, 3, pp=2)}, schedule, reshard_after_forward="never")
    ranks = pool.run(4, summed_in_backward, setting, expected(setting), timeout=240)
    assert all(any(within) for within in ranks) if schedule == "1f1b" else not any(ranks[3])


COMPILED = {
    "language model alone, tensor parallel and sharded": {"llm": on(0, 1, 2, 3, tp=2, dp_shard=2)},
    "stages": {"vision": on(0, 1), "llm": on(0, 1, pp=2)},
}


def graphs(rank: int, world: int, setting: Setting, wanted: Reference) -> tuple[Run, int]:
    """Steps, and how many graphs were compiled for them."""
    torch._dynamo.reset()
    counters.clear()
    run = steps_on_rank(rank, world, setting, wanted, (2, 4))
    return run, counters["stats"]["unique_graphs"]


def compiled_when(rank: int, world: int, setting: Setting) -> tuple[int, int, int]:
    """Actions run and graphs compiled when a rank's first message started, and graphs after two steps."""
    torch._dynamo.reset()
    counters.clear()
    made = OnRank(rank, world, setting)
    owned = [o.parameter for o in made.made.owned.values()]
    runner = StepRunner(made.executor, owned, lambda: None, lambda: True, lambda: False)
    batches = [made.steps(setting, number)[0] for number in (2, 4)]
    start, run, noted, actions = transport.start_messages, RunningStep.run, list[tuple[int, int]](), list[Any]()

    def started(wire: Wire, messages: Sequence[WireMessage]) -> Any:
        noted.append((len(actions), counters["stats"]["unique_graphs"]))
        return start(wire, messages)

    def ran(self: RunningStep, step: Any) -> None:
        actions.append(step)
        run(self, step)

    with patch.object(transport, "start_messages", started), patch.object(RunningStep, "run", ran):
        for batch in batches:
            runner(batch)
    dist.barrier()
    return (*noted[0], counters["stats"]["unique_graphs"])


@pytest.mark.full
def test_all_stages_compile_before_the_first_message(pool: Pool, folders: dict[bool, str]) -> None:
    compiled = {name: {"compile": "eager"} for name in ("vision", "llm")}
    setting = setting_of(folders, COMPILED["stages"], "1f1b", transforms=compiled)
    for actions, at_first, at_end in pool.run(setting.world, compiled_when, setting, timeout=240):
        assert actions >= 4, "forward and backward of both modules"
        assert at_first == at_end >= 2, "blocks were compiled while messages were under way"
    eager = pool.run(setting.world, compiled_when, replace(setting, transforms={}), timeout=240)
    assert eager[1][0] < 4, "the second stage ran before rows came, though nothing takes longer the first time"


def test_instances_that_gather_together_warm_up_with_one_microbatch(pool: Pool, folders: dict[bool, str]) -> None:
    """The largest of one instance is fed by a projector that trains, that of the other has text alone: its backward
    through the frozen language model would gather nothing.
    """
    frozen = {"freeze": ("vision.backbone", "llm"), "batches": ((3, 6, 0, 7),)}
    setting = setting_of(folders, {"vision": on(1), "llm": on(0, 1, dp_shard=2)}, "1f1b", **frozen)
    compare(expected(setting), pool.run(2, steps_on_rank, setting, expected(setting), (2,), timeout=120))


def test_weights_that_do_not_train_are_freed_where_no_backward_comes(pool: Pool, folders: dict[bool, str]) -> None:
    """One instance of a frozen language model, gathered once per step, has nothing; the other gets rows that train."""
    frozen = {"freeze": ("llm",), "reshard_after_forward": "never", "batches": ((3,),), "microbatches": 1}
    setting = setting_of(folders, {"audio": on(0, 1, dp_shard=2), "llm": on(0, 1, dp_shard=2)}, "1f1b", **frozen)
    wanted = reference(setting, 1)
    compare(wanted, pool.run(2, steps_on_rank, setting, wanted, (1,), timeout=120))


@pytest.mark.full  # tests/parallelize/test_compile.py has pieces of them
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks(pool: Pool, folders: dict[bool, str], name: str) -> None:
    """In a language model alone, rows come to the first block as an unfinished collective: without care for these torch
    2.13's backward fails before it.
    """
    layers = {} if "stages" in name else {"llm_layers": 2}
    setting = setting_of(folders, COMPILED[name], "zb_h1" if name == "stages" else "1f1b", **layers)
    wanted = expected(setting)
    compiled = replace(setting, transforms={name: {"compile": "aot_eager"} for name in setting.modules})
    runs, counts = zip(*pool.run(setting.world, graphs, compiled, wanted, timeout=840), strict=True)
    compare(wanted, runs)
    loss = 2  # a graph for each direction
    assert 1 <= max(counts) <= 2 * len(setting.modules) + loss, "ragged rows are compiled again"


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_same_gradients_in_other_schedules(ran: Ran, folders: dict[bool, str], name: str) -> None:
    ranks = ran.of("test_same_gradients_in_other_schedules", name, 3, damages=0)
    check_gradients(settings_of(folders, name, CASES[name][3]), ranks)


@pytest.mark.parametrize("freeze", FROZEN.values(), ids=FROZEN)
def test_frozen_parts_have_no_gradients(folders: dict[bool, str], freeze: tuple[str, ...]) -> None:
    """What the comparison above rests on."""
    wanted = expected(setting_of(folders, BOTH, "1f1b", freeze=freeze))
    assert wanted.gradients
    assert not any(name.startswith(part) for name in wanted.gradients for part in freeze)


EVERYWHERE = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.15}
DROPOUT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "in stages, run forward twice": (
        {"vision": on(0, 1, pp=2), "audio": on(0, 1, pp=2), "llm": on(0, 1, pp=2)},
        {"transforms": {"vision": AGAIN, "audio": AGAIN, "llm": AGAIN}, "dropout": EVERYWHERE},
        ("1f1b", "zb_h1", "interleaved_1f1b"),
    ),
    "of rows that tensor-parallel ranks share": (
        {"vision": on(0), "audio": on(0, 1, tp=2), "llm": on(1)},
        {"dropout": {"dropout": 0.2}, "transforms": {"audio": {"recompute": "all"}}},
        ("1f1b",),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DROPOUT)
def test_the_same_random_numbers_wherever_a_module_lives(pool: Pool, folders: dict[bool, str], name: str) -> None:
    layouts, options, schedules = DROPOUT[name]
    layers = {f"{module}_layers": 4 for module in layouts}
    settings = [setting_of(folders, layouts, schedule, lm="hf_llama", **layers, **options) for schedule in schedules]
    wanted = reference(settings[0], 4)
    without = reference(replace(settings[0], dropout={}), 4)
    assert max(without.errors(wanted.gradients).values()) > NOTICED
    for runs in zip(*pool.run(settings[0].world, several, settings, wanted, 4, (4,), timeout=240), strict=True):
        compare(wanted, runs)


@pytest.mark.full
def test_idle_ranks(pool: Pool, folders: dict[bool, str]) -> None:
    """Ranks 1 and 4 have nothing."""
    setting = setting_of(folders, {"vision": on(0), "llm": on(2, 3, pp=2)}, "1f1b")
    wanted = expected(setting)
    runs = pool.run(5, steps_on_rank, setting, wanted, (1, 9), 4, timeout=120)
    compare(wanted, runs)
    assert not runs[1].steps[0].errors and not runs[4].steps[0].errors


def late_on_rank(rank: int, world: int, setting: Setting, wanted: Reference) -> Run:
    """Rank 2 takes what its instance passes on among its ranks long after it was sent."""
    original = Transport._start

    def start(self: Transport, numbers: Sequence[int], *, first: bool) -> None:
        if rank == 2 and not first and self._transfers[numbers[0]][1].second.receives:
            time.sleep(0.3)
        original(self, numbers, first=first)

    Transport._start = start  # type: ignore[method-assign]
    return steps_on_rank(rank, world, setting, wanted, (1,))


def test_gradients_on_their_way_to_other_ranks_are_not_added_to(pool: Pool, folders: dict[bool, str]) -> None:
    """One row, whose gradient from ``llm`` rank 1 passes on to rank 2, while that from ``caption`` is there to add."""
    layouts = {"vision": on(1, 2, tp=2), "llm": on(0), "caption": on(1, 2)}
    setting = setting_of(folders, layouts, "1f1b", batches=((7,),))
    wanted = reference(setting, 1)
    compare(wanted, pool.run(setting.world, late_on_rank, setting, wanted))


EVALUATED: dict[str, tuple[dict[str, Any], str]] = {
    "llm pp2": (MIXED, "1f1b"),
    "virtual stages": (PLAIN, "interleaved_1f1b"),
    "v": (BOTH, "zbv"),
    "gathered once": (SHARDED, "zb_h1"),
    "llm tp2 pp2 dp2, vision dp3": (
        {"vision": on(0, 1, 2), "audio": on(3), "llm": on(0, 1, 2, 3, 4, 5, 6, 7, tp=2, pp=2)},
        "zb_h1",
    ),
    "drawings": (DRAWS, "1f1b"),
    "drawings pp2": ({**DRAWS, "draw": on(1, 2, pp=2)}, "gpipe"),
}


@pytest.mark.full_cases("drawings", "gathered once")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if "dp2" in n else ()) for n in EVALUATED])
def test_evaluation(pool: Pool, folders: dict[bool, str], name: str) -> None:
    layouts, schedule = EVALUATED[name]
    setting = setting_of(folders, layouts, schedule)
    wanted = reference(setting, 2, train=False)
    assert wanted.predicted is not None
    for rank in pool.run(setting.world, evaluations_on_rank, setting, (1, 4, 9), timeout=120):
        for found in rank:
            assert found.losses == pytest.approx(wanted.losses, rel=EXACT)
            assert torch.equal(found.predicted, wanted.predicted)
            assert not found.recorded  # only training steps are kept
            for generator, drawn in found.drawn.items():
                if layouts[generator].get("pp", 1) == 1:  # a pipelined one does not draw
                    torch.testing.assert_close(drawn, wanted.drawn[generator].to(drawn.dtype), rtol=1e-5, atol=1e-6)
