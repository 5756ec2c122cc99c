"""How steps of ``stepping`` are compared with one process, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_strategy.schedule.policies import schedule_policy
from hetero_strategy.testing import Pool
from tests.distributed.stepping import Reference, Run, Setting, Stepped, reference, steps_on_rank

EXACT = 1e-10
"""Relative error of a loss, and of any parameter's gradient in the 2-norm."""
NOTICED = 1e-3
"""The same where something is broken."""

_references: dict[tuple[Any, ...], Reference] = {}


def on(*ranks: int, **degrees: Any) -> dict[str, Any]:
    """A layout."""
    return {"ranks": list(ranks), **degrees}


def setting_of(
    folders: Mapping[bool, str], layouts: Mapping[str, Mapping[str, Any]], schedule: str, **options: Any
) -> Setting:
    """Modules with pipeline ranks get the stages that the schedule needs, and a layer more than it needs."""
    virtual = schedule_policy(schedule).virtual
    stages = {"loop": {"vpp": 2}, "v": {"vpp": 2, "pp_style": "v"}}.get(virtual, {})
    given = {name: {**one, **(stages if one.get("pp", 1) > 1 else {})} for name, one in layouts.items()}
    layers = {f"{n}_layers": one["pp"] * one.get("vpp", 1) + 1 for n, one in given.items() if one.get("pp", 1) > 1}
    return Setting(folders["draw" in layouts], given, schedule, **{**layers, **options})


def expected(setting: Setting) -> Reference:
    """One process, once for each model: the microbatches do not matter, as a test says."""
    key = setting.model_key()
    if key not in _references:
        _references[key] = reference(setting, 2)
    return _references[key]


Given = tuple[Setting, Reference, Sequence[int | None], int]
"""A setting, what one process makes of it, numbers of microbatches, and that of damaged steps; 0: none."""


def run_together(
    pool: Pool, given: Mapping[str, Given], run: Callable[..., Run] = steps_on_rank
) -> dict[str, tuple[Run, ...]]:
    """Run settings by name in one world, which starts once, and return the runs of each on all ranks."""
    (world,) = {setting.world for setting, *_ in given.values()}
    ranks = pool.run(world, _runs_on_rank, list(given.values()), run, timeout=400)
    return dict(zip(given, zip(*ranks, strict=True), strict=True))


def _runs_on_rank(rank: int, world: int, given: Sequence[Given], run: Callable[..., Run]) -> list[Run]:
    return [run(rank, world, *one) for one in given]


def compare(wanted: Reference, runs: Sequence[Run], name: str = "") -> None:
    """Check that plan and schedule are the same on all ranks, each step is that of one process, and damage is noticed.

    Args:
        wanted: one process.
        runs: steps of each rank.
        name: name of the setting in messages.
    """
    for steps in zip(*(run.steps for run in runs), strict=True):
        assert len({step.lanes for step in steps}) == len({step.plan.digest for step in steps}) == 1, name
        found = differences(wanted, steps)
        assert not found, f"{name} {'; '.join(found[:8])}"
    for damage in runs[0].damaged:
        worst = max(error for run in runs for error in run.damaged[damage].values())
        assert worst > NOTICED, f"{name} {damage} went unnoticed"


def differences(wanted: Reference, steps: Sequence[Stepped], bound: float = EXACT) -> list[str]:
    """What is not as in one process: losses on every rank, gradients wherever parameters are owned, what is frozen,
    and what the stages held.

    Args:
        wanted: one process.
        steps: the same step as every rank saw it.
        bound: of relative errors.
    """
    found = []
    nowhere = set(wanted.gradients).difference(*(step.errors for step in steps))
    found += [f"no rank has a gradient of {name}" for name in sorted(nowhere)]
    for rank, step in enumerate(steps):
        for name, trained in step.trains.items():
            if trained != (name in wanted.trains):
                found.append(f"{name} on rank {rank} is {'not ' * (not trained)}trained")
            elif name in wanted.gradients and name not in step.errors:
                found.append(f"{name} on rank {rank} has no gradient")
        for name, error in step.errors.items():
            if not error <= bound:
                found.append(f"gradient of {name} on rank {rank} is off by {error:.2g}")
        for kind, losses in (("loss", step.losses), ("loss in evaluation", step.evaluated or step.losses)):
            for name, loss in wanted.losses.items():
                if not abs(losses.get(name, float("nan")) - loss) <= bound * abs(loss):
                    found.append(f"{kind} of {name} on rank {rank} is {losses.get(name)}, not {loss}")
        if step.peaks != step.in_flight:
            found.append(f"rank {rank} held {step.peaks} microbatches, not {step.in_flight}")
    return found
