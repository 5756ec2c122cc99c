"""Frozen encoders that work for the next step: every step's gradients against one process, fp64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from benchmarks import pipelines
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.monitor import BalanceMonitor, ThroughputMonitor, TimelineMonitor
from hetero_strategy.plan.ahead import ahead
from hetero_strategy.runtime.held import Held
from hetero_strategy.runtime.memory import owners
from hetero_strategy.schedule.action import Action, StageId
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.graph import PlannedCosts
from hetero_strategy.simulator.simulate import simulate
from hetero_strategy.strategy.blueprint import blueprint
from hetero_strategy.strategy.dry_run import dry_run
from tests.distributed.exact import NOTICED, differences, on, setting_of
from tests.distributed.harness import Pool
from tests.distributed.scenario import Job, Result, build, train_on_rank
from tests.distributed.scenario import data as scenario_data
from tests.distributed.stepping import (
    OnRank,
    Setting,
    Stepped,
    batches_on_rank,
    empty_model,
    placed,
    reference,
    share_of,
    steps_of,
)

BATCHES = ((0, 1, 2, 3, 4), (5, 6), (7, 2, 8), (1,))
"""Steps of unequal size; the last one has no other after it."""
FROZEN = {"freeze": ("vision",)}
AHEAD_ONLY = {"prefetch": {"vision": 1}}
AHEAD = {"freeze": ("vision",), "prefetch": {"vision": 1}, "batches": BATCHES, "microbatches": 3}
PLACEMENTS: dict[str, tuple[dict[str, dict[str, Any]], str, dict[str, Any]]] = {
    "on each stage": ({"vision": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)}, "1f1b", {}),
    "in other bubbles than a trained one": (
        {"vision": on(0, 1), "audio": on(0, 1, dp_shard=2), "llm": on(0, 1, pp=2)},
        "zb_h1",
        {"fill": "fine"},
    ),
    "disjoint, sharded": ({"vision": on(0, 1, dp_shard=2), "llm": on(2)}, "1f1b", {"precision": "32-mixed"}),
    "beside a language model in part": ({"vision": on(0, 1), "llm": on(1)}, "1f1b", {}),
    "all but its end, in pieces": (
        {"vision": on(0, 1), "llm": on(0, 1, pp=2)},
        "zb_h1",
        {"freeze": ("vision.backbone",), "fill": "fine", "pieces": {"vision": 2}, "vision_layers": 3},
    ),
    "the first of its pipeline's ranks": (
        {"vision": on(0, 1, pp=2), "llm": on(1, 2, pp=2)},
        "1f1b",
        {"freeze": ("vision.backbone",)},
    ),
    "wide, two ahead, balanced": (
        {"vision": on(0, 1, tp=2), "audio": on(1), "llm": on(0, 1, pp=2)},
        "gpipe",
        {
            "freeze": ("vision", "audio"),
            "prefetch": {"vision": 1, "audio": 1},
            "tokens": {"vision": 8},
            "balance": {"policy": "auto"},
        },
    ),
}


STAGES = {"vision": on(0, 1), "audio": on(0, 1), "llm": on(0, 1, pp=2)}
STEPS = 20
"""Two epochs, with validation in each."""


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_step_is_that_of_one_process(pool: Pool, folders: dict[bool, str], placement: str) -> None:
    layouts, schedule, options = PLACEMENTS[placement]
    setting = setting_of(folders, layouts, schedule, **{**AHEAD, **options})
    wanted = [reference(setting, setting.microbatches, step=k) for k in range(len(BATCHES))]
    runs: list[list[Stepped]] = pool.run(setting.world, batches_on_rank, setting, wanted, timeout=240)
    bound = 1e-10 if setting.precision == "64-true" else 1e-5
    for k, steps in enumerate(zip(*runs, strict=True)):
        assert not (found := differences(wanted[k], steps, bound)), f"step {k}: {'; '.join(found[:4])}"
        ran = {action.node.module for lane in steps[0].lanes for action in lane.actions}
        assert (ahead("vision") in ran) == (k + 1 < len(BATCHES))
        assert steps[0].plan.held == (frozenset(setting.prefetch) if k else frozenset())
    if placement == "on each stage":
        broken = pool.run(setting.world, batches_on_rank, setting, wanted, "held", timeout=240)
        for k in range(len(BATCHES)):
            worst = max(error for steps in broken for error in steps[k].errors.values())
            assert (worst > NOTICED) == (k > 0)


def looked_at(rank: int, world: int, setting: Setting) -> list[list[torch.Tensor]]:
    """Gradients of every step. The first batch and its own are evaluated before it, and it is run again after it."""
    made = OnRank(rank, world, setting)
    steps = steps_of(setting, setting.microbatches, made.share)
    batches = [steps[0, k, k > 0] for k in range(len(setting.batches))]
    found = []
    for batch in batches:
        for module in made.executor.modules.values():
            module.eval()
        for seen in (batches[0], batch):
            with torch.no_grad():
                made.executor.run(seen, train=False)
        for module in made.executor.modules.values():
            module.train()
        for call in range(2):
            made.executor.run(batch, train=True, call=call)
            gradients = [p.grad for p in made.owned.values() if p.grad is not None]
            for p in made.owned.values():
                p.grad = None
            if not call:
                found.append(gradients)
    dist.barrier()
    return found


def test_rows_ahead_are_those_of_training_whatever_else_the_model_is_asked(
    pool: Pool, folders: dict[bool, str]
) -> None:
    """With dropout in what runs ahead: evaluations and second calls leave what the next step reads as it is."""
    options = {**AHEAD, "freeze": ("vision", "audio"), "prefetch": {"vision": 1, "audio": 1}}
    drops = {"dropout": 0.2, "attention_dropout": 0.2}
    setting = setting_of(folders, STAGES, "1f1b", fill="fine", dropout=drops, **options)
    plain = pool.run(2, looked_at, replace(setting, prefetch={}), timeout=240)
    early = pool.run(2, looked_at, setting, timeout=240)
    for one, other in zip(plain, early, strict=True):
        for k, (wanted, found) in enumerate(zip(one, other, strict=True)):
            assert wanted and all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), f"step {k}"


class Saved(L.Callback):
    """A checkpoint in the middle of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def followed(rank: int, world: int, job: Job, path: str) -> Result:
    """With all that watches a run."""
    watching = [ThroughputMonitor(every_n_steps=5), BalanceMonitor(every_n_steps=5), TimelineMonitor()]
    callbacks = [Saved(path), *watching] if job.resume is None else []
    return train_on_rank(rank, world, replace(job, trainer={**job.trainer, "callbacks": callbacks}))


@pytest.mark.full
def test_a_run_is_bit_by_bit_the_one_without_over_epochs_validations_and_a_resume(pool: Pool, tmp_path: Path) -> None:
    trainer = {"val_check_interval": 0.5, "max_epochs": 2, "default_root_dir": str(tmp_path)}
    job = Job(str(scenario_data(tmp_path)), STAGES, STEPS, freeze=("vision",), val="val.json", trainer=trainer)
    path = str(tmp_path / "saved")
    plain, early = (
        pool.run(2, followed, replace(job, strategy={"fill": "fine", **given}), path, timeout=360)
        for given in ({}, AHEAD_ONLY)
    )
    resumed = replace(job, strategy={"fill": "fine", **AHEAD_ONLY}, resume=path)
    again = pool.run(2, followed, resumed, path, timeout=360)
    for one, other, later in zip(plain, early, again, strict=True):
        assert len(one.losses) == STEPS and one.losses == other.losses and one.losses[4:] == later.losses
        assert one.metrics == other.metrics
        for name, value in one.owned.items():
            assert torch.equal(value, other.owned[name]) and torch.equal(value, later.owned[name]), name
        assert one.logged["val/loss"] == other.logged["val/loss"] == later.logged["val/loss"]
    measured = json.loads((tmp_path / "measured.json").read_text())["stages"]
    assert {"vision.0", "llm.1"} <= measured.keys() and not any("+1" in stage for stage in measured)


def lived(rank: int, world: int, job: Job) -> tuple[list[float], list[float]]:
    """Validations before and after a fit whose loaders are new in each epoch; losses, and those of the validations."""
    trainer, module, dm = build(job)
    seen = [trainer.validate(module, datamodule=dm, verbose=False)[0]["val/loss"]]
    trainer.fit(module, datamodule=dm)
    seen.append(float(trainer.callback_metrics["val/loss"]))
    seen.append(trainer.validate(module, datamodule=dm, verbose=False)[0]["val/loss"])
    return [float(x) for x in module.losses], seen


@pytest.mark.full
def test_validations_around_a_fit_with_new_loaders_in_each_epoch(pool: Pool, tmp_path: Path) -> None:
    trainer = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "default_root_dir": str(tmp_path)}
    folder = str(scenario_data(tmp_path))
    job = Job(folder, STAGES, STEPS, freeze=("vision",), val="val.json", trainer=trainer, capture=False)
    plain, early = (
        pool.run(2, lived, replace(job, strategy={"fill": "fine", **given}), timeout=360) for given in ({}, AHEAD_ONLY)
    )
    assert plain == early and len(plain[0][0]) == STEPS and len(set(plain[0][1])) == 2


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "trained": (
        {},
        {},
        r"prefetch names 'vision', whose first stage has parameters that train .* pieces=\{'vision': 2\}",
    ),
    "no such module": (FROZEN, {"prefetch": {"image": 1}}, r"prefetch names 'image'; the modules are vision, audio"),
    "has a loss": (
        {"freeze": ("llm",), "edges": (("llm", "draw"),)},
        {"prefetch": {"llm": 1}},
        r"prefetch names 'llm', a CausalLM in one stage, whose loss belongs to the step itself",
    ),
    "reads rows": ({"freeze": ("llm",)}, {"prefetch": {"llm": 1}}, r"prefetch names 'llm', which reads rows"),
    "two steps": (FROZEN, {"prefetch": {"vision": 2}}, r"prefetch of 'vision' is 2; a module runs 1 step ahead"),
    "sequential": (FROZEN, {"schedule": "sequential"}, r"prefetch=\{'vision': 1\} with schedule='sequential'"),
    "gathered again": (FROZEN, {"reshard_after_forward": "always"}, r"with reshard_after_forward='always'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_ahead_is_refused_before_anything_is_built(folders: dict[bool, str], case: str) -> None:
    options, given, message = REFUSED[case]
    stages = {"llm": on(0), "draw": on(1)} if "edges" in options else STAGES
    setting = setting_of(folders, stages, "gpipe", **options)
    layouts = placed(setting, 2).layouts
    with pytest.raises(ConfigError, match=message):
        blueprint(empty_model(setting), layouts, ScheduleConfig(**{"schedule": "gpipe", **AHEAD_ONLY, **given}))


def test_rows_of_a_step_that_did_not_run_are_missed_by_name(folders: dict[bool, str]) -> None:
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    steps = steps_of(setting, 3, share_of(placed(setting, 2), setting, 0))
    held = Held()
    held.turn(steps[0, 0].plan, train=True)
    held.turn(steps[0, 1, True].plan, train=True)
    with pytest.raises(DataError, match=r"step 3 of epoch 0 needs rows of vision that step 2 makes, but step 1 of"):
        held.turn(steps[0, 3, True].plan, train=True)


def test_payload_is_read_once_with_the_step_that_computes_with_it(folders: dict[bool, str]) -> None:
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    steps = steps_of(setting, 3, share_of(placed(setting, 2), setting, 0))
    first, second = steps[0, 0], steps[0, 1, True]

    def rows(batch: Batch, module: str) -> int:
        return sum(len(made.values) for made in batch.inputs[module] if made is not None)  # type: ignore[attr-defined]

    assert rows(first, "vision") and rows(first, ahead("vision")) == rows(steps[0, 1], "vision") > 0
    assert not rows(second, "vision")


def test_the_first_batch_of_a_run_needs_nothing_of_one_before(folders: dict[bool, str]) -> None:
    """Also in the middle of an epoch."""
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    loader = StepLoader(steps_of(setting, 3, share_of(placed(setting, 2), setting, 0)))
    assert [len(batch.plan.held) for batch in loader] == [0, 1, 1, 1]
    loader.load_state_dict({**loader.state_dict(), "consumed": 2})
    assert [len(batch.plan.held) for batch in loader] == [0, 1]


def test_batches_of_two_loaders_are_not_mixed_up(folders: dict[bool, str]) -> None:
    """They have the same epoch and step, and other samples."""
    one = setting_of(folders, STAGES, "1f1b", **AHEAD)
    other = replace(one, batches=((1, 2, 3), *BATCHES[1:]))
    a, b = (steps_of(setting, 3, share_of(placed(setting, 2), setting, 0)) for setting in (one, other))
    held = Held()
    held.turn(a[0, 0].plan, train=True)
    held.keep(a[0, 0].plan, "vision", 0, torch.zeros(1), train=True)
    held.turn(b[0, 0].plan, train=True)
    held.keep(b[0, 0].plan, "vision", 0, torch.ones(1), train=True)
    held.turn(b[0, 1, True].plan, train=True)
    assert held.rows(b[0, 1, True].plan, "vision", 0) == 1
    mixed = steps_of(replace(one, batches=(BATCHES[0], BATCHES[2])), 3, share_of(placed(one, 2), one, 0))
    held.turn(a[0, 0].plan, train=True)
    with pytest.raises(DataError, match=r"step 0 of epoch 0, which other samples follow, was run before it"):
        held.turn(mixed[0, 1, True].plan, train=True)


def test_training_batches_are_evaluated_in_their_turn_and_training_goes_on(folders: dict[bool, str]) -> None:
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    steps, held = steps_of(setting, 3, share_of(placed(setting, 2), setting, 0)), Held()
    plans = [steps[0, number, number > 0].plan for number in range(4)]

    def through(number: int, value: float, *, train: bool) -> None:
        held.turn(plans[number], train=train)
        held.keep(plans[number], "vision", 0, torch.tensor(value), train=train)

    for number in (0, 1):
        through(number, number, train=True)
    through(0, 10, train=False)
    for number, made in ((1, 0), (2, 1), (3, 12)):  # by training, as far as that is, or by the evaluation itself
        through(number, 10 + number, train=False)
        assert held.rows(plans[number], "vision", 0) == made
    assert [float(rows) for _, rows in held.all_rows()] == [0, 1, 12, 13]
    held.turn(plans[2], train=True)
    assert held.rows(plans[2], "vision", 0) == 1
    assert [float(rows) for _, rows in held.all_rows()] == [1]
    with pytest.raises(DataError, match="step 3 of epoch 0 needs rows"):
        Held().turn(plans[3], train=False)


def test_a_step_that_was_evaluated_is_trained_as_any_other(folders: dict[bool, str]) -> None:
    """What it computes is its own, and nothing of a run that ended early is kept."""
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    steps, held = steps_of(setting, 3, share_of(placed(setting, 2), setting, 0)), Held()
    plans = [steps[0, number, number > 0].plan for number in range(3)]
    for number, value, train in ((0, 0, True), (1, 10, False), (1, 1, True)):
        held.turn(plans[number], train=train)
        held.keep(plans[number], "vision", 0, torch.tensor(value), train=train)
    held.turn(plans[2], train=True)
    assert held.rows(plans[2], "vision", 0) == 1
    held.keep(plans[2], "vision", 0, torch.tensor(2), train=True)
    held.turn(plans[0], train=True)
    assert not [*held.all_rows()]


def test_weights_that_change_between_two_steps_are_noticed(folders: dict[bool, str]) -> None:
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    steps = steps_of(setting, 3, share_of(placed(setting, 2), setting, 0))
    teacher = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    held = Held({"vision": [teacher]})
    held.turn(steps[0, 0].plan, train=True)
    teacher.mul_(0.9)
    held.turn(steps[0, 0].plan, train=True)  # once more, with the weights that there are now
    held.turn(steps[0, 1, True].plan, train=True)
    teacher.mul_(0.9)
    with pytest.raises(DataError, match="weights of vision have changed since step 1 computed rows for step 2"):
        held.turn(steps[0, 2, True].plan, train=True)


def test_a_stage_ahead_is_planned_with_its_own_share_of_the_work(folders: dict[bool, str]) -> None:
    options = {**AHEAD, "vision_layers": 4, "balance": {"policy": "auto"}}
    setting = setting_of(folders, STAGES, "1f1b", **options)
    placement = placed(setting, 2)
    config = ScheduleConfig("1f1b", fill="fine", pieces={"vision": 2}, prefetch={"vision": 1})
    made = blueprint(empty_model(setting), placement.layouts, config)
    steps = steps_of(setting, 3, share_of(placement, setting, 0))
    early, later = (PlannedCosts(plan, made.graph, made.costs) for plan in (steps[0, 0].plan, steps.plan(0, 1)))
    for number in steps.plan(0, 1).active("vision"):
        first, second = (later(Action("F", node, number)) for node in made.graph.chains["vision"][0])
        (node,) = made.graph.chains[ahead("vision")][0]
        assert early(Action("F", node, number)) == pytest.approx(first)
        assert first and second


def test_a_rank_without_memory_says_what_is_held(folders: dict[bool, str]) -> None:
    setting = setting_of(folders, STAGES, "1f1b", **AHEAD)
    steps, held = steps_of(setting, 3, share_of(placed(setting, 2), setting, 0)), Held()
    for number, rows in ((0, 4), (1, 6)):
        plan = steps[0, number, number > 0].plan
        held.turn(plan, train=True)
        held.keep(plan, "vision", 0, torch.zeros(rows, 8), train=True)
    executor: Any = SimpleNamespace(parameters={}, running=None, held=held)
    assert owners(executor, []) == {"rows of module 'vision', made a step ahead": (4 + 6) * 8 * 4}


def test_a_dry_run_counts_the_rows_that_are_held() -> None:
    sizes: dict[str, Any] = {"vision": (64, 1), "llm": (128, 2), "samples": 8, "microbatches": 2}
    layouts = {"vision": ModuleLayout(range(2)), "llm": ModuleLayout(range(2), pp=2)}
    one = pipelines.Setting("small", layouts, **sizes)
    found, batches = {}, [one.metadata(0), one.metadata(1)]
    for early in ({}, {"vision": 1}):
        model = one.model()
        for p in model.modules_by_name["vision"].parameters():
            p.requires_grad_(False)
        scheduling = ScheduleConfig(fill="fine", prefetch=early)
        found[bool(early)] = dry_run(model, layouts, batches, world_size=2, microbatches=2, scheduling=scheduling)
    assert not found[True].faults and not found[False].faults
    rows = sum(int(m.items["vision"].edge_rows.sum()) for m in batches)
    more = [b.bytes["rows"] - a.bytes["rows"] for a, b in zip(found[False].ranks, found[True].ranks, strict=True)]
    assert sum(more) == rows * 128 * 4
    assert [r.bytes["gathered"] for r in found[True].ranks] == [r.bytes["gathered"] for r in found[False].ranks]


@pytest.mark.parametrize("fill", ["none", "fine", "search", "coarse", "decoupled"])
def test_a_step_is_shorter_however_bubbles_are_filled(fill: str) -> None:
    """By at least a third of what the pipeline waits for its first rows."""
    ranks = range(4)
    layouts = {"vision": ModuleLayout(ranks), "audio": ModuleLayout(ranks), "llm": ModuleLayout(ranks, pp=4)}
    sizes: dict[str, Any] = {"vision": (256, 12), "audio": (64, 2), "llm": (512, 12), "samples": 32, "microbatches": 8}
    one = pipelines.Setting("steps", layouts, freeze=("vision",), fill=fill, **sizes)
    simulations = []
    for early in ({}, {"vision": 1}):
        _, _, costs, schedule = pipelines.planned(replace(one, prefetch=early), 0)
        simulations.append(simulate(schedule, costs.of_instances))
    alone, ahead_of = simulations
    waits = min(alone.start[action].min() for action in alone.start if action.node == StageId("llm", 0))
    assert ahead_of.time < alone.time - waits / 3
